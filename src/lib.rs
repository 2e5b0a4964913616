//! Runs one Llama or Qwen class model whose dimensions were baked in at build time.
//!
//! # The tour of one token
//!
//! [`config`] reads a `config.json`; `build.rs` turns it into the constants of [`dims`]. [`weights`] maps the
//! checkpoint and packs its matrices ([`quant`]) or maps a packed file. [`tokenizer`] turns the prompt into
//! ids, [`chat`] a conversation into a prompt. A [`session`] feeds ids to a [`backend`] — the CPU's is
//! [`cpu`], a GPU's [`opencl`] — which looks up the embedding, runs the layers with [`rope`] and the cache
//! described in [`kv`], and answers with logits; when the cache is full it evicts slots ([`kv::eviction`]), and in a
//! hybrid session it moves between two backends. The [`sampler`] draws the next id, which goes round again, and its
//! text streams out of the [`engine`], which has asked [`plan`] and [`system`] whether it all fits. [`trace`] can
//! watch every step; [`saved`] puts a sequence to disk.
//!
//! [`Engine`] is the front door; [`cli`] is what the binary does with it.
#![deny(unsafe_code)]

pub mod config;
pub mod dims;
pub mod error;
mod guard;

pub mod quant;
pub mod weights;

pub mod chat;
pub mod sampler;
pub mod tokenizer;

pub mod backend;
pub mod cpu;
pub mod kv;
pub mod opencl;
pub mod rope;
pub mod trace;

pub mod engine;
pub mod plan;
pub mod saved;
pub mod session;
pub mod system;

pub mod cli;

/// The project's directory where tests run, which may be a phone.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

pub use engine::{BatchItem, Engine, EngineOptions, GenerateOptions};
pub use error::{Error, Result};
