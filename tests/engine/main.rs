//! The model on the CPU: the same bits on every path, and memory that is bounded and given back.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]

/// Shared by all four binaries.
#[path = "../support/support.rs"]
mod support;

/// Decoding a token allocates memory.
mod allocations;
mod assistant;
/// The attention mass of slots depends on threads, chunks or the instruction set, or does not move with its rows.
mod attention_mass;
/// A prompt's answer depends on the prompts computed with it.
mod batch;
/// Memory of evicted slots is not given back.
#[cfg(target_os = "linux")]
mod cache_memory;
/// A q4 cache loses more than it has to.
mod calibration;
/// A turn of a conversation computes what is known already.
mod conversation;
/// A draft changes a token.
mod draft;
/// A draft model changes a token, guesses badly, or ends a text when it lies, hangs or dies.
#[cfg(unix)]
mod draft_model;
/// A text longer than its slots gets wrong positions, takes more memory, or stops making sense.
mod eviction;
/// A GGUF file gives other numbers than the checkpoint it was made from.
mod gguf;
/// Any path through the engine gives other tokens or logits than `tests/golden` has.
mod golden;
/// A kernel of some instruction set gives other bits than scalar code, or scalar code is wrong.
mod kernels;
/// An adapter adds other numbers than it holds, to other rows, or is forgotten by what identifies the weights.
mod lora;
/// The model's own block drafts other tokens than it predicts.
mod mtp;
/// A KV cache changes when it is exported and imported, or one that does not fit the model is imported.
mod past;
/// A row of a q4 cache has other scales than its definition.
mod q4_rows;
/// A checkpoint quantised by a text depends on threads, or loses too much.
mod quantise;
/// A checkpoint that is quantised already gives other weights than the values that it stands for.
mod quantised;
/// Sessions that load a saved sequence take memory each, compute other tokens, or change the file.
mod shared_prefix;
/// Sliding-window layers keep too few rows or too many, or a reused row changes a result. `cargo xtask test sliding`
/// builds for models with such layers.
mod sliding_window;
/// Layers on several devices give other bits than on one, or a device is given layers that it cannot compute.
mod split;
