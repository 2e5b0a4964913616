//! The model: its dimensions, its weights, the seam between a session and a device, and the forward pass on the CPU.
#![deny(unsafe_code)]

pub mod cpu;
pub mod device;
pub mod dims;
pub mod rope;
pub mod split;
pub mod trace;
pub mod weights;
