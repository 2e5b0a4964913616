//! Runs one language model whose dimensions were baked in at build time.
//!
//! # The tour of one token
//!
//! [`files::config`] reads a `config.json`; `build.rs` turns it into the constants of [`dims`]. [`model::weights`] maps
//! the checkpoint and packs its matrices or maps a packed file. [`tokenizer`] turns the prompt into ids, [`chat`] a
//! conversation into a prompt. A [`session`] feeds ids to a [`model::device`] — the CPU is [`model::cpu`], a GPU
//! [`opencl`] — which looks up the embedding, runs the layers and answers with logits; when the cache is full it evicts
//! slots ([`run::eviction`]), and where there are two devices, [`run::placement`] moves it between them. In the loop of [`run::generate`] the
//! [`sampler`] draws the next id, which goes round again, and its text streams out. The [`engine`] has asked [`plan`] and
//! [`run::system`] whether it all fits. [`model::trace`] can watch every step; [`saved`] puts a sequence to disk,
//! [`run::past`] hands its keys and values out as plain numbers.
//!
//! [`Engine`] is the front door; [`commands`] is what the binary does with it.
#![deny(unsafe_code)]

mod cli;
pub mod commands;
pub mod opencl;
pub mod run;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "tools")]
mod tools;

pub use ::model;
pub use files::{Error, Result};
pub use model::dims;
pub use run::engine::Engine;
pub use run::generate::prompts::BatchItem;
pub use run::options::{EngineOptions, GenerateOptions, Progress};
pub use run::past::{PastKeyValues, PastLayer};
pub use run::{engine, plan, saved, session};
pub use text::{chat, sampler, tokenizer};

/// The project's directory where tests run, which may be a phone.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}
