//! Runs one language model, whose dimensions were baked in at build time.
#![deny(unsafe_code)]

pub mod config;
pub mod dims;
pub mod error;
pub mod weights;

pub use error::{Error, Result};
