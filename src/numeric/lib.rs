//! Numeric kernels that are independent of the model.
//!
//! [`quant`] defines the layouts of quantised weights and activations. [`simd`] has the kernels, which give the same
//! bits on every instruction set. [`kv`] has the element types of the KV cache, [`pool`] the thread pool, [`topology`]
//! the choice of cores. [`with_avx2`] compiles loops of plain Rust for wide vectors.
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
mod with_avx2;

pub use with_avx2::with_avx2;
