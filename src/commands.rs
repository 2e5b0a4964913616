//! The commands, their help, and the function that runs each.

use crate::cli;
#[cfg(feature = "serve")]
use crate::serve;
#[cfg(feature = "tools")]
use crate::tools;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use files::{Error, Result};

pub use cli::signal::leave;

/// The command line.
#[derive(Parser)]
#[command(name = "antigravity", version = version(), about, max_term_width = 100)]
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
    #[command(before_help = "\
Examples:
  antigravity chat --system 'Answer in one sentence.'
  antigravity chat --single-turn --prompt 'Why is the sky blue?'")]
    Chat(cli::chat::ChatArgs),
    /// HTTP server compatible with the OpenAI and Anthropic APIs
    #[cfg(feature = "serve")]
    #[command(before_help = "\
Examples:
  antigravity serve
  antigravity serve --host 0.0.0.0 --api-key-file keys.txt --slots 8")]
    Serve(serve::ServeArgs),
    /// Measure perplexity, fact recall, and the difference between two settings
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity eval --file story.txt
  antigravity eval --file story.txt --kv-type q4 --against kv=f32,weights=f32")]
    Eval(tools::eval::EvalArgs),
    /// Write the raw logits of given token ids
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity logits --tokens ids.json --out logits.f32
  antigravity logits --tokens ids.json --out logits.f32 --trace-hash")]
    Logits(tools::logits::LogitsArgs),
    /// Convert a model to a packed file, which loads instantly
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity pack
  antigravity pack --model-path model.gguf --out model.packed.safetensors")]
    Pack(tools::pack::PackArgs),
    /// Write one executable file that contains this program, its model, tokenizer and chat template
    #[cfg(feature = "tools")]
    #[command(
        before_help = "\
Examples:
  antigravity bundle --out story
  antigravity bundle --out story-arm --program target/aarch64-unknown-linux-musl/dist/antigravity",
        after_help = "\
The file runs from any directory and needs no other file. Every command uses its model unless --model-path names \
another. Each start verifies the file table and the text files (CRC-32) and the model (a hash of its header and of \
samples of its weights, and the checks of any packed file); `doctor` verifies every byte. `strip` would remove the \
model. `bundle`, run from a bundle, replaces the model; `pack`, run from one, writes its packed file."
    )]
    Bundle(tools::bundle::BundleArgs),
    /// Measure prompt and generation speed, loading time and memory
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity bench
  antigravity bench -p 512 -n 128 --depth 0,1024 --threads 2,4 -o json")]
    Bench(tools::bench::BenchArgs),
    /// Show how much memory a run needs, without loading the model
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity plan
  antigravity plan --max-seq-len 8192 --kv-type f16")]
    Plan(tools::plan::PlanArgs),
    /// Show the contents of a model file and the model this program was built for
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity inspect
  antigravity inspect model.gguf --format json")]
    Inspect(tools::inspect::InspectArgs),
    /// Convert text to token ids, or ids to text
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity tokenize --prompt 'Once upon a time'
  antigravity tokenize --decode '1, 2, 3'")]
    Tokenize(tools::tokenize::TokenizeArgs),
    /// (internal) Draft side of speculative decoding; started by --draft-model
    #[cfg(feature = "tools")]
    #[command(
        before_help = "\
Examples:
  antigravity generate -p 'Once upon a time' --draft-model ./story-draft
  antigravity draft < /dev/null",
        after_help = "\
Reads requests from stdin and writes answers to stdout, one JSON object per line, until stdin ends. The first line \
reports that the model is loaded and identifies its tokenizer."
    )]
    Draft(tools::draft::DraftArgs),
    /// Check this machine: CPU, memory, OpenCL, and whether the model is ready
    #[cfg(feature = "tools")]
    #[command(before_help = "\
Examples:
  antigravity doctor
  antigravity doctor --cl-device 1")]
    Doctor(tools::doctor::DoctorArgs),
    /// Print the version and the built-in model with its dimensions
    Version,
}

/// Parses the process's arguments and runs the command.
pub fn run() -> Result<()> {
    cli::signal::outlive_file_limit();
    parse_args().and_then(|args| run_command(args.command)).map_err(cli::flags::name_flags_in)
}

fn run_command(command: Command) -> Result<()> {
    match command {
        Command::Generate(a) => cli::generate::run(&a),
        #[cfg(feature = "chat")]
        Command::Chat(a) => cli::chat::run(&a),
        #[cfg(feature = "serve")]
        Command::Serve(a) => serve::run(&a),
        #[cfg(feature = "tools")]
        Command::Eval(a) => tools::eval::run(&a),
        #[cfg(feature = "tools")]
        Command::Logits(a) => tools::logits::run(&a),
        #[cfg(feature = "tools")]
        Command::Pack(a) => tools::pack::run(&a),
        #[cfg(feature = "tools")]
        Command::Bundle(a) => tools::bundle::run(&a),
        #[cfg(feature = "tools")]
        Command::Bench(a) => tools::bench::run(&a),
        #[cfg(feature = "tools")]
        Command::Plan(a) => tools::plan::run(&a),
        #[cfg(feature = "tools")]
        Command::Inspect(a) => tools::inspect::run(&a),
        #[cfg(feature = "tools")]
        Command::Tokenize(a) => tools::tokenize::run(&a),
        #[cfg(feature = "tools")]
        Command::Draft(a) => tools::draft::run(&a),
        #[cfg(feature = "tools")]
        Command::Doctor(a) => tools::doctor::run(&a),
        Command::Version => cli::terminal::put(&format!("antigravity {}\n", version())),
    }
}

/// Version, built-in model and its dimensions, compiler and, in a shipped program, the commit.
pub(crate) fn version() -> String {
    use crate::dims::*;
    let commit = if COMMIT.is_empty() { String::new() } else { format!(", commit {COMMIT}") };
    format!(
        "{} (model {MODEL}: {} {LAYERS} layers, dim {DIM}, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, ffn {FFN_DIM}, vocab {VOCAB}; {COMPILER}{commit})",
        env!("CARGO_PKG_VERSION"),
        ARCH.name()
    )
}

/// The command line as [`run`] parses it; shell completions and the manual are generated from it. Flags may have
/// underscores in place of hyphens, and values may be negative numbers.
pub fn command() -> clap::Command {
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
    let command = command();
    let words = cli::args::translate_args(&command, std::env::args_os().collect())?;
    let named = words.get(1).and_then(|w| w.to_str()).filter(|name| command.find_subcommand(name).is_some());
    let named = named.map(str::to_owned);
    command.try_get_matches_from(words).and_then(|m| Cli::from_arg_matches(&m)).map_err(|e| {
        if e.use_stderr() {
            return Error::Usage(cli::args::one_line(&e, named.as_deref()));
        }
        match cli::terminal::put(&e.render().to_string()) {
            Ok(()) => std::process::exit(0),
            Err(e) => e,
        }
    })
}
