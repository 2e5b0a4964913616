//! Model files and tokenizers: valid ones mean what they say, wrong ones are refused with one line.

#[path = "../bed/bed.rs"]
mod bed;

mod gguf;
mod gguf_model;
mod hostile_gguf;
mod hostile_model;
mod hostile_safetensors;
mod sigbus;
mod tokenizer;
