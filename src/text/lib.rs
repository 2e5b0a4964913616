//! Text: [`tokenizer`] converts between text and token ids, [`chat`] renders conversations as prompts, [`sampler`]
//! chooses the next token from the logits.
#![deny(unsafe_code)]

pub mod chat;
pub mod sampler;
pub mod tokenizer;

use files::{Error, Result};

/// The project directory on the machine that runs the tests, which may be a phone.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    let dir: std::path::PathBuf =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into();
    let project = dir.ancestors().find(|d| d.join("tests/fixtures").is_dir());
    project.expect("tests run within the project").into()
}
