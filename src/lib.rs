//! Runs one language model, whose dimensions were baked in at build time.
#![deny(unsafe_code)]

pub mod backend;
pub mod chat;
pub mod cli;
pub mod config;
pub mod cpu;
pub mod dims;
pub mod engine;
pub mod error;
pub mod kv;
pub mod plan;
pub mod quant;
pub mod rope;
pub mod sampler;
pub mod saved;
pub mod session;
pub mod system;
pub mod tokenizer;
pub mod trace;
pub mod weights;

pub use engine::{Engine, EngineOptions, GenerateOptions};
pub use error::{Error, Result};
