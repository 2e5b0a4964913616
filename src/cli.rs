//! The command line: flags as typed ([`Cli`]), one file per command that acts on them.

mod answer;
mod args;
mod bench;
mod chat;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod logits;
mod pack;
mod plan;
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
        Command::Bench(a) => bench::run(&a),
        Command::Plan(a) => plan::run(&a),
        Command::Inspect(a) => inspect::run(&a),
        Command::Doctor(a) => doctor::run(&a),
    }
}
