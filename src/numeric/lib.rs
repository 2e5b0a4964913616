//! Numeric kernels: everything that computes without knowing the model.
//!
//! [`quant`] lays out quantised weights and activations, [`simd`] computes with them on every instruction set, with the
//! same bits on each. [`kv`] names the element types of the cache. [`pool`] is the team of threads that runs steps.
//! [`widely`] compiles loops of plain Rust for wide vectors.
#![deny(unsafe_code)]

pub mod cancel;
pub mod kv;
#[allow(unsafe_code)]
pub mod pool;
pub mod quant;
#[allow(unsafe_code)]
pub mod simd;
pub mod topology;
#[allow(unsafe_code)]
mod widely;

pub use widely::widely;
