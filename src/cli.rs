//! The command line: flags, the terminal, and the commands that generate text.

pub mod args;
pub mod background_compile;
#[cfg(feature = "chat")]
pub mod chat;
pub mod flags;
pub mod generate;
pub mod generation_report;
pub mod jsonl_events;
pub mod load;
pub mod prompts;
pub mod signal;
pub mod terminal;
#[cfg(feature = "line-editor")]
pub mod terminal_mode;
#[cfg(feature = "chat")]
pub mod word_wrap;

/// Version, built-in model and its dimensions, compiler and, in a shipped program, the commit.
pub(crate) fn version_text() -> String {
    use crate::dims::*;
    let commit = if COMMIT.is_empty() { String::new() } else { format!(", commit {COMMIT}") };
    format!(
        "{} (model {MODEL}: {} {LAYERS} layers, dim {DIM}, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, ffn {FFN_DIM}, vocab {VOCAB}; {COMPILER}{commit})",
        env!("CARGO_PKG_VERSION"),
        ARCH.name()
    )
}
