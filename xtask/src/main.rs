//! `cargo xtask <task>`: the project's only tool.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]

mod android;
mod bench;
mod build;
mod cargo;
mod changed_copy;
mod chart;
mod command;
mod completions;
mod deploy;
mod device;
mod elf;
mod error;
mod fetch;
mod fuzz;
mod golden;
mod header;
mod json;
mod parity;
mod profile;
mod quality;
mod run;
mod runner;
mod sensors;
mod size;
mod synth;
mod table;
mod tally;
mod targets;
mod test;
mod tidy;
mod toolchain;

use clap::{CommandFactory, Parser, Subcommand};
use error::{Error, Result};
use std::process::ExitCode;

/// The project's only tool
#[derive(Parser)]
#[command(
    bin_name = "cargo xtask",
    args_override_self = true,
    disable_version_flag = true,
    max_term_width = 120
)]
struct Cli {
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// Runs the tests that every change must pass; `test all` runs what CI does, `test list` lists the parts
    Test(test::TestArgs),
    /// Downloads a real model: a name under models/, such as smollm2-135m, or org/name[:file] of the Hugging Face Hub
    Fetch(fetch::FetchArgs),
    /// Compares logits and text with the reference results of transformers, model by model
    Parity(parity::ParityArgs),
    /// Runs the golden tests in release, or the golden set on a device; --bless rewrites the files
    Golden(golden::GoldenArgs),
    /// Builds for a device, packs the model and copies both to it; --bundle: as one file
    Deploy(deploy::DeployArgs),
    /// Runs the deployed program; without a command it writes a story
    Run(run::RunArgs),
    /// Measures speed, start-up, clocks and temperatures on a device; PEER=LLAMA_BENCH: next to llama.cpp; serve: under
    /// load
    Bench(Box<bench::BenchArgs>),
    /// Records a generation on a device as a page of charts and a Perfetto trace
    Profile(profile::ProfileArgs),
    /// Measures the cost of KV types and eviction policies: perplexity, KL divergence, recall, as Markdown
    Quality(quality::QualityArgs),
    /// Runs a test binary on the device of $ANTIGRAVITY_DEVICE; `cargo test --target …` calls it
    Runner(runner::RunnerArgs),
    /// Runs a cargo command with the linker that `build` would use: `xtask cargo test --target T` needs no NDK
    Cargo(cargo::CargoArgs),
    /// Draws the README's chart of speeds from the table in xtask/MEASUREMENTS.md
    Chart,
    /// Writes a model of real shapes with random weights to target/synth/MODEL
    Synth(synth::SynthArgs),
    /// Builds for release; prints the program's path, size and libraries
    Build(build::BuildArgs),
    /// Writes completions for bash, fish and zsh, and manual pages
    Completions(completions::CompletionsArgs),
    /// Runs the fuzz targets of tests/fuzz; needs cargo-fuzz and a nightly compiler
    Fuzz(fuzz::FuzzArgs),
    /// Writes include/antigravity.h, the C API, from src/ffi
    Header,
    /// Checks the rules of the source files
    Tidy,
}

fn main() -> ExitCode {
    match run_task(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            if !matches!(e, Error::Program(_)) {
                eprintln!("error: {e}");
            }
            ExitCode::from(e.exit_code())
        }
    }
}

fn run_task(task: Option<Task>) -> Result<()> {
    match task {
        None => {
            print!("{}", Cli::command().render_help());
            Ok(())
        }
        Some(Task::Test(args)) => test::run(&args),
        Some(Task::Fetch(args)) => fetch::run(&args),
        Some(Task::Parity(args)) => parity::run(&args),
        Some(Task::Golden(args)) => golden::run(&args),
        Some(Task::Deploy(args)) => deploy::run(&args),
        Some(Task::Run(args)) => run::run(&args),
        Some(Task::Bench(args)) => bench::run(&args),
        Some(Task::Profile(args)) => profile::run(&args),
        Some(Task::Quality(args)) => quality::run(&args),
        Some(Task::Runner(args)) => runner::run(&args),
        Some(Task::Cargo(args)) => cargo::run(&args),
        Some(Task::Chart) => chart::run(),
        Some(Task::Synth(args)) => synth::run(&args),
        Some(Task::Build(args)) => build::run(&args),
        Some(Task::Completions(args)) => completions::run(&args),
        Some(Task::Fuzz(args)) => fuzz::run(&args),
        Some(Task::Header) => header::run(),
        Some(Task::Tidy) => tidy::run(),
    }
}

/// The arguments of a task, from a line as a user types it.
#[cfg(test)]
fn parse_args<T: clap::Args + clap::FromArgMatches>(line: &str) -> Result<T> {
    let words = ["xtask"].into_iter().chain(line.split_whitespace());
    let task = T::augment_args(clap::Command::new("xtask").args_override_self(true));
    let matches = task.try_get_matches_from(words).map_err(|e| Error::Usage(e.to_string()))?;
    T::from_arg_matches(&matches).map_err(|e| Error::Usage(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_and_its_flags_parse() {
        Cli::command().debug_assert();
        let parse = |line: &str| Cli::try_parse_from(["xtask"].into_iter().chain(line.split(' ')));
        for line in ["help", "build --help", "biuld", "tidy x", "synth", "bench --clients 1", "run --nope"] {
            assert!(parse(line).is_err(), "{line}");
        }
        let Some(Task::Cargo(args)) = parse("cargo test --target t -- --exact").unwrap().task else {
            panic!()
        };
        assert_eq!(args.words, ["test", "--target", "t", "--", "--exact"]);
        let Some(Task::Run(args)) = parse("run --serial S --serial=T -- chat -q").unwrap().task else {
            panic!()
        };
        assert_eq!((args.device.serial.as_deref(), args.words.len()), (Some("T"), 2));
    }
}
