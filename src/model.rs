//! The model: its weights, the seam between a session and a device, and the forward pass on the CPU.

pub mod backend;
pub mod cpu;
pub mod rope;
pub mod trace;
pub mod weights;
