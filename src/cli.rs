//! The command line: flags, the terminal, and the commands that make text there.

pub mod answer;
pub mod args;
#[cfg(feature = "chat")]
pub mod chat;
pub mod events;
pub mod flags;
pub mod generate;
#[cfg(feature = "line-editor")]
pub mod mode;
pub mod prompts;
pub mod signal;
pub mod start;
pub mod terminal;
#[cfg(feature = "chat")]
pub mod wrap;
