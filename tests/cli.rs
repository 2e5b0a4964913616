//! The real binary on the bundled model: exit codes, what goes where, and the flags that change the text.
#![cfg(all(unix, feature = "chat", feature = "tools"))]

#[path = "device/place.rs"]
mod place;
#[path = "cli/program.rs"]
mod program;

#[path = "cli/bench.rs"]
mod bench;
#[path = "cli/chat_commands.rs"]
mod chat_commands;
#[path = "cli/chat_eval.rs"]
mod chat_eval;
#[path = "cli/errors.rs"]
mod errors;
#[path = "cli/eval.rs"]
mod eval;
#[path = "cli/fit.rs"]
mod fit;
#[path = "cli/killed.rs"]
mod killed;
#[path = "cli/output.rs"]
mod output;
#[path = "cli/prompts.rs"]
mod prompts;
#[path = "cli/state.rs"]
mod state;
#[path = "cli/stream.rs"]
mod stream;
#[path = "cli/terminal.rs"]
mod terminal;
#[path = "cli/tokenize.rs"]
mod tokenize;
