//! The command line: flags as typed ([`Cli`]), one file per command that acts on them.

mod args;
mod chat;
mod eval;
mod generate;
mod logits;
mod pack;
mod report;
mod signal;
mod terminal;

pub use args::Cli;

use crate::error::Result;
use args::Command;

/// Parses the process's arguments and runs the command.
pub fn run() -> Result<()> {
    let cli = Cli::parse_args()?;
    match cli.command {
        Command::Generate(a) => generate::run(&a),
        Command::Chat(a) => chat::run(&a),
        Command::Eval(a) => eval::run(&a),
        Command::Logits(a) => logits::run(&a),
        Command::Pack(a) => pack::run(&a),
    }
}
