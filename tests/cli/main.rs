//! The program as users run it: every command's exit codes, what goes to stdout and what to stderr, and the flags
//! that change the text.
#![cfg(all(unix, feature = "chat", feature = "tools"))]

#[path = "../bed/bed.rs"]
mod bed;

mod bench;
mod chat_commands;
mod chat_eval;
mod errors;
mod eval;
mod fit;
#[cfg(feature = "grammar")]
mod grammar;
mod killed;
mod output;
mod prompts;
mod sessions;
mod state;
mod stream;
mod terminal;
mod tokenize;
