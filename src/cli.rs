//! The command line: flags, the terminal, and the commands that generate text.

pub mod args;
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
