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
/// stdout or stderr that cannot be written, a full disk or a signal ends the program otherwise than it should, loses a
/// session or leaves a file.
mod ends;
/// A wrong flag, file or model does not end with one line and the right exit code.
mod errors;
/// `eval` gives other numbers than the reference, or a policy leaves its window.
mod eval;
/// A context that does not fit in memory is taken, or threads leave their cores.
mod fit;
/// A text leaves its JSON schema or grammar.
#[cfg(feature = "grammar")]
mod grammar;
/// A habit from llama.cpp is misread, a typing mistake gets no hint, or a flag is passed over in silence.
mod habits;
/// `generate` puts something else on stdout than text, or a flag does not change it as it says.
mod output;
/// Prompts of a file get other answers than each alone.
mod prompts;
/// An answer of the server depends on what runs beside it, a request is misread, or one harms another.
#[cfg(feature = "serve")]
mod serve;
/// A saved session or conversation goes on differently, or a damaged file is taken.
mod sessions;
/// Packed models, sessions or instruction sets give other text or logits.
mod state;
/// Ctrl-C takes too long, or pieces of a text are not whole characters.
mod stream;
/// A call or a thought of a model is taken for text, or a template that is given for another.
mod templates;
/// A chat at a terminal loses lines, or leaves the terminal in disorder.
mod terminal;
/// `tokenize` gives other ids or pieces.
mod tokenize;
