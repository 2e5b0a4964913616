//! Runs one language model whose dimensions are compiled in.
//!
//! ```
//! use antigravity::{Engine, EngineOptions, GenerateOptions, dims::MODEL_DIR};
//!
//! let engine = Engine::load(EngineOptions::new(MODEL_DIR))?;
//! let mut session = engine.session()?;
//! let prompt = engine.encode("Once upon a time")?;
//! for piece in engine.stream(&mut session, &prompt, &GenerateOptions::default())? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), antigravity::Error>(())
//! ```
//!
//! To use it from another package, write into its `Cargo.toml` and `.cargo/config.toml`:
//!
//! ```toml
//! [dependencies]
//! antigravity = { path = "../antigravity", default-features = false }
//! ```
//!
//! ```toml
//! [env]
//! ANTIGRAVITY_MODEL = { value = "models/mine", relative = true } # the model to compile in
//! ```
//!
//! # The parts
//!
//! A part uses only parts below it.
//!
//! ```text
//!                        main, commands
//!          ┌───────────────────┼───────────────────┐
//!         cli                serve               tools
//!   generate, chat        HTTP server     bench, eval, pack, ...
//!          └───────────────────┼───────────────────┘
//!                             run
//!       engine, session, generation loop, two devices, memory plan
//!          ┌───────────────────┼───────────────────┐
//!          │                opencl                 │
//!          │     GPU passes, kernels, tuning       │
//!          │                   │                   │
//!        text                model           opencl/runtime
//!  tokenizer, chat,    device trait, weights,  OpenCL library,
//!      sampler             CPU passes        buffers, programs
//!          │                   │                   │
//!          │                numeric                │
//!          │    SIMD kernels, quantised formats,   │
//!          │              thread pool              │
//!          └───────────────────┼───────────────────┘
//!                            files
//!       config, safetensors, GGUF, packed files, bundles, errors
//! ```
//!
//! # The tour of a token
//!
//! Before the first token, `build.rs` reads the model's config with [`files::config`] and writes the constants of
//! [`dims`]. [`Engine::load`] checks the memory [`plan`] and maps or packs the weights ([`model::weights`]). [`chat`]
//! turns a conversation into a prompt, and [`tokenizer`] turns the prompt into ids.
//!
//! Then each token takes the same way:
//!
//! 1. `cli/generate.rs` asks its stream for the next piece of text.
//! 2. [`run::generate`], the only generation loop, steps a batch of sequences. For each it lets the [`sampler`] choose
//!    the next id from the last logits, decodes the id to text and looks for stop strings.
//! 3. [`session`] gives the id a place in the KV cache, evicts slots if the cache is full ([`run::eviction`]), and runs
//!    one pass on its [`model::device`]. If there are two devices, [`run::placement`] chooses one.
//! 4. The device computes the pass: it looks up the embedding, runs the layers and returns logits. The CPU is
//!    [`model::cpu`], which calls the SIMD kernels of [`numeric`]; a GPU is [`opencl`].
//!
//! [`model::trace`] can record every step. [`saved`] writes a sequence to disk, and [`run::past`] exports its keys and
//! values as plain numbers.
//!
//! [`Engine`] is the entry point of the library; [`commands`] is that of the program.
#![deny(unsafe_code)]

mod cli;
pub mod commands;
#[cfg(feature = "ffi")]
#[doc(hidden)]
#[allow(unsafe_code, clippy::too_many_arguments, clippy::missing_safety_doc)]
pub mod ffi;
pub mod opencl;
pub mod run;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "tools")]
mod tools;

pub use ::model;
pub use files::lora::LoraFile;
pub use files::{Error, Result};
pub use model::dims;
pub use run::engine::Engine;
pub use run::generate::prompts::BatchItem;
pub use run::options::{EngineOptions, GenerateOptions, Progress};
pub use run::past::{LayerKeyValues, PastKeyValues};
pub use run::{embed, engine, plan, saved, session};
pub use text::{chat, sampler, tokenizer};

/// The project's directory where tests run, which may be a phone.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}
