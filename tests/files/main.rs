//! Model files and tokenizers: valid ones mean what they say; wrong ones are refused with one line.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]

/// Shared by all four binaries.
#[path = "../support/support.rs"]
mod support;

/// A GGUF tensor decodes to other values than ggml's decoders give, or an odd but valid header is refused.
mod gguf;
/// A GGUF file gives a layer another mixer, window or position encoding than it has.
mod gguf_layers;
/// A GGUF file describes another model than the checkpoint it was made from.
mod gguf_model;
/// A damaged or malicious GGUF file is accepted, panics, or takes memory that its size does not justify.
mod hostile_gguf;
/// A well-formed file of a model that is wrong (config, tensors, values, tokenizer) loads.
mod hostile_model;
/// A damaged or malicious safetensors file is accepted or panics; an odd but valid one is refused.
mod hostile_safetensors;
/// Text from a file forges a line of an error, controls the terminal, or makes the line too long.
mod hostile_text;
/// A real model's strings or conversations become other tokens than its own tokenizer and template make of them.
mod real;
/// A mapped file that shrinks while in use ends the process without a line that names it.
mod sigbus;
/// A tokenizer read from GGUF gives other ids than the model's own.
mod tokenizer;
