//! Text: [`tokenizer`] between text and token ids, [`chat`] from a conversation to a prompt, [`sampler`] from logits to
//! the next token.
#![deny(unsafe_code)]

pub mod chat;
pub mod sampler;
pub mod tokenizer;

use files::{Error, Result};

/// The project's directory where tests run, which may be a phone.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    let dir: std::path::PathBuf =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into();
    let project = dir.ancestors().find(|d| d.join("tests/fixtures").is_dir());
    project.expect("tests run within the project").into()
}
