//! Runs one language model, whose dimensions were baked in at build time.
#![deny(unsafe_code)]

pub mod chat;
pub mod config;
pub mod dims;
pub mod error;
pub mod sampler;
pub mod tokenizer;

pub use error::{Error, Result};
