//! The command line: flags as typed ([`Cli`]), one file per command that acts on them.

mod answer;
mod args;
#[cfg(feature = "tools")]
mod bench;
#[cfg(feature = "chat")]
mod chat;
#[cfg(feature = "tools")]
mod doctor;
#[cfg(feature = "tools")]
mod eval;
mod events;
mod generate;
#[cfg(feature = "tools")]
mod inspect;
#[cfg(feature = "tools")]
mod logits;
#[cfg(feature = "line-editor")]
mod mode;
#[cfg(feature = "tools")]
mod pack;
#[cfg(feature = "tools")]
mod plan;
mod prompts;
#[cfg(feature = "tools")]
mod report;
mod signal;
mod start;
mod terminal;
#[cfg(feature = "tools")]
mod tokenize;

pub use args::Cli;

use args::Command;
use files::Result;

/// Parses the process's arguments and runs the command.
pub fn run() -> Result<()> {
    let cli = Cli::parse_args()?;
    match cli.command {
        Command::Generate(a) => generate::run(&a),
        #[cfg(feature = "chat")]
        Command::Chat(a) => chat::run(&a),
        #[cfg(feature = "tools")]
        Command::Eval(a) => eval::run(&a),
        #[cfg(feature = "tools")]
        Command::Logits(a) => logits::run(&a),
        #[cfg(feature = "tools")]
        Command::Pack(a) => pack::run(&a),
        #[cfg(feature = "tools")]
        Command::Bench(a) => bench::run(&a),
        #[cfg(feature = "tools")]
        Command::Plan(a) => plan::run(&a),
        #[cfg(feature = "tools")]
        Command::Inspect(a) => inspect::run(&a),
        #[cfg(feature = "tools")]
        Command::Tokenize(a) => tokenize::run(&a),
        #[cfg(feature = "tools")]
        Command::Doctor(a) => doctor::run(&a),
    }
}
