//! Flags of a generation: length, stop conditions, output. They resolve to [`GenerateOptions`].

#[cfg(feature = "chat")]
use super::clap_error::one_line;
use super::flag_warnings::FlagWarnings;
use super::model::ModelArgs;
use super::prompt::{PromptArgs, PromptsArgs};
use super::sampling::SamplerArgs;
use crate::cli::terminal::{Verbosity, prompt_progress};
use crate::run::options::{GenerateOptions, Progress};
use clap::{Args, ValueEnum};
use files::atomic_file::AtomicFile;
use files::{Error, Result};
use std::path::PathBuf;
use text::sampler::Logprobs;

/// All flags of `generate`, which `plan` takes too.
#[derive(Args, Clone)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub warnings: FlagWarnings,
    #[command(flatten, next_help_heading = "Prompt")]
    pub prompt: PromptArgs,
    #[command(flatten, next_help_heading = "Prompt")]
    pub prompts: PromptsArgs,
    /// Continue the text saved in this file, if it exists, and save it there at the end. A prompt that starts with the
    /// saved text extends it; any other prompt is appended. The random numbers continue too, unless --seed changes
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub session: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Output")]
    pub completion: CompletionArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

impl GenerateArgs {
    /// Checks and resolves the flags of the generation.
    pub fn resolve_options(&self, format: Format) -> Result<GenerateOptions> {
        Ok(GenerateOptions {
            specials: self.prompt.special_handling(),
            ..self.completion.resolve_options(format)?
        })
    }
}

/// Flags of a generation that `generate` and `chat` share.
#[derive(Args, Clone)]
pub struct CompletionArgs {
    /// Maximum number of tokens to generate; -1 continues until the text ends or the context is full
    #[arg(short, long, visible_aliases = ["predict", "n-predict"], default_value = "20", value_name = "N")]
    pub num_tokens: i64,
    /// Stop before this text; may be repeated
    #[arg(
        short = 'r',
        long = "stop",
        alias = "reverse-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    pub stop: Vec<String>,
    /// Continue past the end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten, next_help_heading = "Sampling")]
    pub sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Output")]
    pub output: OutputArgs,
}

impl CompletionArgs {
    /// Checks and resolves the flags for output in `format`.
    pub fn resolve_options(&self, format: Format) -> Result<GenerateOptions> {
        Ok(GenerateOptions {
            max_tokens: parse_token_limit(self.num_tokens)?,
            sampler: self.sampler.resolve_options()?,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: self.output.checked_logprobs(format)?,
            progress: Progress::new(prompt_progress(self.output.verbosity())),
            ..GenerateOptions::default()
        })
    }
}

/// The flags that `/set` can change in a conversation.
#[cfg(feature = "chat")]
#[derive(clap::Parser, Clone)]
#[command(no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
struct SetArgs {
    #[arg(long, alias = "n")]
    num_tokens: Option<i64>,
    #[command(flatten)]
    sampler: SamplerArgs,
}

#[cfg(feature = "chat")]
impl CompletionArgs {
    /// Returns these flags with one of them changed.
    ///
    /// # Errors
    ///
    /// `Usage` for an unknown name or an invalid value.
    pub fn with_setting(&self, name: &str, value: &str) -> Result<Self> {
        use clap::{CommandFactory, FromArgMatches};
        let mut set = SetArgs { num_tokens: None, sampler: self.sampler.clone() };
        // Without defaults, only the given flag changes.
        let unset = |arg: clap::Arg| {
            let takes_values = arg.get_action().takes_values();
            arg.default_value(None::<&str>).allow_negative_numbers(takes_values)
        };
        let command = SetArgs::command().mut_args(unset);
        let flag = format!("--{}={value}", name.trim_start_matches('-').replace('_', "-"));
        command
            .try_get_matches_from([flag])
            .and_then(|matches| set.update_from_arg_matches(&matches))
            .map_err(|e| Error::Usage(one_line(&e, Some("chat"))))?;
        let num_tokens = set.num_tokens.unwrap_or(self.num_tokens);
        Ok(Self { num_tokens, sampler: set.sampler, ..self.clone() })
    }
}

/// The sampling flags with their values, for `/set`.
#[cfg(feature = "chat")]
pub fn format_settings(options: &GenerateOptions) -> String {
    let s = &options.sampler;
    let tokens = options.max_tokens.map_or("-1".into(), |n| n.to_string());
    format!(
        "temperature {}, top-k {}, top-p {}, min-p {}, repetition-penalty {}, num-tokens {tokens}",
        s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty
    )
}

/// Resolves `--num-tokens`; -1 is no limit.
pub fn parse_token_limit(num_tokens: i64) -> Result<Option<usize>> {
    match num_tokens {
        -1 => Ok(None),
        n => usize::try_from(n)
            .map(Some)
            .map_err(|_| Error::Usage(format!("--num-tokens {n}: use 0 or more, or -1 for no limit"))),
    }
}

/// Format of results.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    #[value(alias = "json")]
    Jsonl,
}

/// `--quiet`, for commands without `--verbose`.
#[derive(Args, Clone)]
pub struct QuietArgs {
    /// Print only errors on stderr
    #[arg(short, long)]
    pub quiet: bool,
}

impl QuietArgs {
    pub fn verbosity(&self) -> Verbosity {
        if self.quiet { Verbosity::Quiet } else { Verbosity::Normal }
    }
}

/// Output flags of a generation.
#[derive(Args, Clone)]
pub struct OutputArgs {
    /// Plain text, or one JSON object per line
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    /// Add to each token's JSON line its log probability and those of the N most probable tokens, before sampling
    /// (natural logarithm)
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
    /// Verbosity on stderr.
    pub fn verbosity(&self) -> Verbosity {
        if self.verbose { Verbosity::Verbose } else { self.quiet.verbosity() }
    }

    /// Fails if the `--trace` file cannot be written; called before anything is generated.
    pub fn check_trace(&self) -> Result<()> {
        let Some(file) = &self.trace else { return Ok(()) };
        let refused = |e| Error::io(file, format!("cannot write the trace: {e}"));
        AtomicFile::create(file).map(drop).map_err(refused)
    }

    /// Checks `--logprobs`, which requires JSON lines.
    pub fn checked_logprobs(&self, format: Format) -> Result<Option<usize>> {
        let Some(n) = self.logprobs else { return Ok(None) };
        Logprobs::check_count(n)?;
        if format != Format::Jsonl {
            return Err(Error::Usage(format!("--logprobs {n} requires --format jsonl")));
        }
        Ok(Some(n))
    }
}
