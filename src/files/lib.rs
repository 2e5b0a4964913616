//! Model files: config, tensors, tokenizer and other text files.
//!
//! [`config`] reads a `config.json`; [`hf_cache`] finds a model in the Hugging Face cache. [`source`] opens safetensors
//! and GGUF files, [`packed_file`] describes the program's own format. A [`bundle`] is a program with a packed file
//! inside; [`model_dir`] reads the text files of a model directory or bundle. [`blocks`] decodes block formats. Files
//! are [`mapped`] into memory, also as a part of a larger one ([`file_range`]), and written atomically
//! ([`atomic_file`]). [`catch_panic`] turns panics and hangs of libraries into errors. All text for stderr goes
//! through [`stderr`], and [`progress`] is shown there; [`text_file`] reads UTF-8 text.
#![deny(unsafe_code)]

pub mod atomic_file;
pub mod blocks;
pub mod bundle;
pub mod catch_panic;
pub mod config;
pub mod error;
pub mod file_range;
pub mod hf_cache;
pub mod json_depth;
pub mod lora;
#[allow(unsafe_code)]
pub mod mapped;
pub mod model_dir;
pub mod packed_file;
pub mod progress;
pub mod source;
pub mod stderr;
pub mod text_file;

pub use error::{Error, Result};

/// The project's directory on the machine that runs the tests, which may be a phone.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    let dir: std::path::PathBuf =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into();
    let project = dir.ancestors().find(|d| d.join("tests/fixtures").is_dir());
    project.expect("tests run within the project").into()
}
