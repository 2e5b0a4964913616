//! The commands, their help, and the function that runs each.

use crate::cli;
use crate::cli::terminal::{Style, style_text, write_stdout};
use crate::dims;
#[cfg(feature = "serve")]
use crate::serve;
#[cfg(feature = "tools")]
use crate::tools;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use files::{Error, Result};
use std::io::{IsTerminal, stdin, stdout};

pub use cli::signal::exit_process;

/// The command line.
#[derive(Parser)]
#[command(name = "antigravity", version = cli::version_text(), about, max_term_width = 100)]
#[command(before_help = "\
Examples:
  antigravity -p 'Once upon a time' -n -1
  antigravity chat")]
#[command(
    after_help = "Without a command, flags are those of generate. `antigravity COMMAND --help` lists a command's flags."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[allow(clippy::large_enum_variant, reason = "there is one value")]
#[derive(Subcommand)]
enum Command {
    /// Complete a prompt
    #[command(before_help = "\
Examples:
  antigravity generate -p 'Once upon a time' -n 100
  antigravity generate --prompt-file question.txt --temperature 0 --format jsonl")]
    Generate(cli::args::GenerateArgs),
    /// Chat with the model
    #[cfg(feature = "chat")]
    #[command(
        visible_alias = "run",
        before_help = "\
Examples:
  antigravity chat --system 'Answer in one sentence.'
  antigravity run Why is the sky blue?"
    )]
    Chat(cli::chat::ChatArgs),
    /// HTTP server compatible with the OpenAI and Anthropic APIs
    #[cfg(feature = "serve")]
    #[command(before_help = "\
Examples:
  antigravity serve
  antigravity serve --host 0.0.0.0 --api-key-file keys.txt --slots 8")]
    Serve(serve::ServeArgs),
    #[cfg(feature = "tools")]
    #[command(flatten)]
    Tool(tools::ToolCommand),
    /// (internal) Compile OpenCL programs after the end of the process that needed them
    #[command(hide = true)]
    Compile(cli::background_compile::CompileArgs),
    /// Print the version and the built-in model with its dimensions
    Version,
}

/// Parses the process's arguments and runs the command.
pub fn run() -> Result<()> {
    cli::signal::ignore_file_size_signal();
    greet_user()?;
    parse_args().and_then(|args| run_command(args.command)).map_err(cli::flags::name_flags_in)
}

/// The text for a user who types only the program's name.
const SHORT_HELP: &str = "
  antigravity chat             hold a conversation
  antigravity -p 'Once' -n -1  complete a text
  antigravity serve            start a server with a chat page
  antigravity list             show the model and its files
  antigravity doctor           check this machine
  antigravity --help           list commands; COMMAND --help lists its flags
";

/// Prints [`SHORT_HELP`] and ends the process, if there are no arguments and a user sits at the terminal.
fn greet_user() -> Result<()> {
    let asks = std::env::args_os().len() < 2 && stdin().is_terminal() && stdout().is_terminal();
    if !asks || !cfg!(all(feature = "serve", feature = "tools")) {
        return Ok(());
    }
    let model = style_text(Style::Bold, dims::MODEL);
    write_stdout(&format!("antigravity runs one language model: {model}\n{SHORT_HELP}"))?;
    exit_process(0)
}

fn run_command(command: Command) -> Result<()> {
    match command {
        Command::Generate(a) => cli::generate::run(&a),
        #[cfg(feature = "chat")]
        Command::Chat(a) => cli::chat::run(&a),
        #[cfg(feature = "serve")]
        Command::Serve(a) => serve::run(&a),
        #[cfg(feature = "tools")]
        Command::Tool(command) => tools::run(command),
        Command::Compile(a) => cli::background_compile::run(&a),
        Command::Version => write_stdout(&format!("antigravity {}\n", cli::version_text())),
    }
}

/// The command line as [`run`] parses it; shell completions and the manual are generated from it. Flags may have
/// underscores in place of hyphens, and values may be negative numbers.
pub fn clap_command() -> clap::Command {
    let spellings = |arg: clap::Arg| {
        let takes_values = arg.get_action().takes_values();
        let long = arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten());
        let underscores: Vec<String> =
            long.filter(|l| l.contains('-')).map(|l| l.replace('-', "_")).collect();
        arg.allow_negative_numbers(takes_values).aliases(underscores)
    };
    Cli::command().mut_subcommands(|c| c.mut_args(spellings))
}

/// Parses the process's arguments. Help and version are printed on stdout and end the process.
fn parse_args() -> Result<Cli> {
    let command = clap_command();
    let words = cli::args::translate_args(&command, std::env::args_os().collect())?;
    let named = words.get(1).and_then(|w| w.to_str()).filter(|name| command.find_subcommand(name).is_some());
    let named = named.map(str::to_owned);
    command.try_get_matches_from(words).and_then(|m| Cli::from_arg_matches(&m)).map_err(|e| {
        if e.use_stderr() {
            return Error::Usage(cli::args::one_line(&e, named.as_deref()));
        }
        match write_stdout(&e.render().to_string()) {
            Ok(()) => std::process::exit(0),
            Err(e) => e,
        }
    })
}
