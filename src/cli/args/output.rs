//! Flags that say what is printed, and where.

use crate::cli::terminal::Verbosity;
use clap::{Args, ValueEnum};
use files::atomic_file::Unfinished;
use files::{Error, Result};
use std::path::PathBuf;
use text::sampler::Logprobs;

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    #[value(alias = "json")]
    Jsonl,
}

/// Whether anything is said on stderr.
#[derive(Args, Clone)]
pub struct QuietArgs {
    /// Print nothing on stderr but errors
    #[arg(short, long)]
    pub quiet: bool,
}

impl QuietArgs {
    pub fn verbosity(&self) -> Verbosity {
        if self.quiet { Verbosity::Quiet } else { Verbosity::Normal }
    }
}

/// What a generation prints.
#[derive(Args, Clone)]
pub struct OutputArgs {
    /// Plain text, or one JSON object a line
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    /// Add to each token's JSON line its natural log probability and those of the N most probable tokens, before any
    /// sampling
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
    /// Write a Chrome/Perfetto trace of the run
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    quiet: QuietArgs,
    /// Print more on stderr
    #[arg(short, long, conflicts_with = "quiet")]
    verbose: bool,
}

impl OutputArgs {
    /// How much is said on stderr.
    pub fn verbosity(&self) -> Verbosity {
        if self.verbose { Verbosity::Verbose } else { self.quiet.verbosity() }
    }

    /// Refuses a `--trace` that cannot be written, before anything is generated.
    pub fn check_trace(&self) -> Result<()> {
        let Some(file) = &self.trace else { return Ok(()) };
        let refused = |e| Error::io(file, format!("cannot write the trace: {e}"));
        Unfinished::create(file).map(drop).map_err(refused)
    }

    /// Checks `--logprobs`, which needs an output of JSON lines.
    pub fn logprobs(&self, format: Format) -> Result<Option<usize>> {
        let Some(n) = self.logprobs else { return Ok(None) };
        Logprobs::check(n)?;
        if format != Format::Jsonl {
            return Err(Error::Usage(format!("--logprobs {n}: is part of JSON lines; add --format jsonl")));
        }
        Ok(Some(n))
    }
}
