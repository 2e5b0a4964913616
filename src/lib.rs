//! Runs one language model, whose dimensions were baked in at build time.
#![deny(unsafe_code)]

pub mod backend;
pub mod config;
pub mod cpu;
pub mod dims;
pub mod error;
pub mod kv;
pub mod quant;
pub mod rope;
pub mod sampler;
pub mod session;
pub mod trace;
pub mod weights;

pub use error::{Error, Result};
