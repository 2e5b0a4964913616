//! Flags that say what to generate and when to stop: the one way to [`GenerateOptions`].

use super::output::{Format, OutputArgs};
use super::sampling::SamplerArgs;
use crate::cli::terminal::prompt_progress;
use crate::run::options::{GenerateOptions, Progress};
use clap::Args;
use files::{Error, Result};

/// What to generate: shared by `generate` and `chat`.
#[derive(Args, Clone)]
pub(in crate::cli) struct CompletionArgs {
    /// Most tokens to generate; -1 goes on until the text ends or the cache is full
    #[arg(short, long, visible_alias = "predict", default_value = "20", value_name = "N")]
    pub num_tokens: i64,
    /// Stop before this text; may be repeated
    #[arg(short = 'r', long = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on past the end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten, next_help_heading = "Sampling")]
    pub sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Output")]
    pub output: OutputArgs,
}

impl CompletionArgs {
    /// Checks the flags and resolves them, for an output in `format`.
    pub fn resolve(&self, format: Format) -> Result<GenerateOptions> {
        Ok(GenerateOptions {
            max_tokens: token_limit(self.num_tokens)?,
            sampler: self.sampler.resolve()?,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: self.output.logprobs(format)?,
            progress: Progress::new(prompt_progress(self.output.verbosity())),
            ..GenerateOptions::default()
        })
    }
}

/// `--num-tokens`: -1 is no limit.
pub(in crate::cli) fn token_limit(num_tokens: i64) -> Result<Option<usize>> {
    match num_tokens {
        -1 => Ok(None),
        n => usize::try_from(n)
            .map(Some)
            .map_err(|_| Error::Usage(format!("--num-tokens {n}: use a number from 0, or -1 for no limit"))),
    }
}
