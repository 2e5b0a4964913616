//! The program as users run it: exit codes, what goes to stdout and what to stderr, and the flags that change the text.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]
#![cfg(all(unix, feature = "chat", feature = "tools"))]

/// Shared by all four binaries.
#[path = "../support/support.rs"]
mod support;

/// `bench` leaves out a number, or its tables and JSON disagree.
mod bench;
/// A program with its model inside says something else, reads another file, or runs although it is damaged.
mod bundle;
/// A chat loses turns, computes them twice, or takes control tokens from a message.
mod chat;
/// A command of a chat (`/undo`, `/retry` and others) leaves a trace.
mod chat_commands;
/// Unwritable output, a full disk or a signal gives the wrong exit code, loses a session or leaves a file behind.
mod ends;
/// A wrong flag, file or model does not end with one line and the right exit code.
mod errors;
/// `eval` gives other numbers than the reference, or a policy leaves its window.
mod eval;
/// A context that does not fit in memory is accepted, or threads leave their cores.
mod fit;
/// A text leaves its JSON schema or grammar.
#[cfg(feature = "grammar")]
mod grammar;
/// A flag of llama.cpp is misread, a typing mistake gets no hint, or a flag is ignored without a warning.
mod habits;
/// `generate` puts something else on stdout than text, or a flag does not change it as it says.
mod output;
/// Prompts of a file get other answers than each alone.
mod prompts;
/// An answer of the server depends on other requests, a request is misread, or one harms another.
#[cfg(feature = "serve")]
mod serve;
/// A saved session or conversation continues differently, or a damaged file is accepted.
mod sessions;
/// Packed models, sessions or instruction sets give other text or logits.
mod state;
/// Ctrl-C takes too long, or pieces of a text are not whole characters.
mod stream;
/// A model's call or thought is shown as text, or the wrong template is used.
mod templates;
/// A chat at a terminal loses lines, or does not restore the terminal.
mod terminal;
/// `tokenize` gives other ids or pieces.
mod tokenize;
