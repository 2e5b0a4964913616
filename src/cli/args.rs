//! Flags of every command, with the names and defaults of the specification.

mod cores;
mod device;
mod eviction;
mod grammar;
mod sampling;

pub(super) use cores::MaskArgs;
use cores::ThreadArgs;
#[cfg(feature = "tools")]
pub(super) use device::BackendName;

use super::prompts::PromptsArgs;
use super::terminal::prompt_progress;
use crate::dims;
use crate::model::weights::WeightType;
use crate::run::options::{EngineOptions, GenerateOptions, PREFILL_CHUNK};
use clap::{Args, Parser, Subcommand, ValueEnum};
use device::DeviceArgs;
use eviction::EvictionArgs;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
pub(super) use sampling::SamplerArgs;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use text::sampler::Logprobs;

/// Runs one language model, baked in at build time.
#[derive(Parser)]
#[command(name = "antigravity", version = version(), about, max_term_width = 100, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Subcommand)]
pub(super) enum Command {
    /// Complete a prompt, streamed to stdout
    Generate(GenerateArgs),
    /// Talk with the model, turn by turn
    #[cfg(feature = "chat")]
    Chat(super::chat::ChatArgs),
    /// Measure perplexity, or how far two settings are apart
    #[cfg(feature = "tools")]
    Eval(super::eval::EvalArgs),
    /// Write the raw logits of given token ids
    #[cfg(feature = "tools")]
    Logits(super::logits::LogitsArgs),
    /// Write the packed model file, which loads at once
    #[cfg(feature = "tools")]
    Pack(super::pack::PackArgs),
    /// Measure speed and memory: prefill, decode, load
    #[cfg(feature = "tools")]
    Bench(super::bench::BenchArgs),
    /// Show the memory plan without loading
    #[cfg(feature = "tools")]
    Plan(super::plan::PlanArgs),
    /// Show what a model file holds and what this program was built for
    #[cfg(feature = "tools")]
    Inspect(super::inspect::InspectArgs),
    /// Turn text into token ids, or ids into text
    #[cfg(feature = "tools")]
    Tokenize(super::tokenize::TokenizeArgs),
    /// Show what this machine offers
    #[cfg(feature = "tools")]
    Doctor(super::doctor::DoctorArgs),
}

/// Version, baked model and its dimensions.
fn version() -> String {
    use dims::*;
    format!(
        "{} (model {MODEL}: {} {LAYERS} layers, dim {DIM}, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, ffn {FFN_DIM}, vocab {VOCAB})",
        env!("CARGO_PKG_VERSION"),
        ARCH.name()
    )
}

impl Cli {
    /// Reads the process's arguments. Help and version go to stdout and end the process.
    pub(super) fn parse_args() -> Result<Self> {
        Self::try_parse_from(std::env::args_os().map(long_spelling)).map_err(|e| {
            if !e.use_stderr() {
                let _ = e.print();
                std::process::exit(0)
            }
            Error::Usage(one_line(&e))
        })
    }
}

/// What is wrong, without the usage and the advice that clap prints in further paragraphs.
fn one_line(e: &clap::Error) -> String {
    if e.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let remedy = if cfg!(feature = "tools") { "antigravity --help lists them" } else { "use generate" };
        return format!("a command is missing; {remedy}");
    }
    let text = e.to_string();
    let lines =
        text.lines().map(str::trim).take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more"));
    let lines: Vec<&str> = lines.filter(|l| !l.is_empty()).collect();
    let line = lines.join(" ").replace(" tip: ", "; tip: ");
    line.trim_start_matches("error: ").into()
}

/// Short flags of more than one letter, as llama.cpp spells them.
fn long_spelling(arg: OsString) -> OsString {
    match arg.to_str() {
        Some("-ctk") => "--cache-type-k".into(),
        Some("-ctv") => "--cache-type-v".into(),
        Some("-st") => "--single-turn".into(),
        _ => arg,
    }
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Text,
    Jsonl,
}

/// Which model, on what, with which cache: shared by all commands that run it.
#[derive(Args, Clone)]
pub(super) struct ModelArgs {
    /// Model directory, .safetensors file, .gguf file or packed file [default: the baked model's directory]
    #[arg(short = 'm', long, visible_alias = "model", value_name = "PATH")]
    pub model_path: Option<PathBuf>,
    /// What weight matrices become: auto (native for GGUF, q4_0 for safetensors), native (as stored), q4_0, or f32
    /// (blocks of a GGUF file are expanded in memory: a reference)
    #[arg(long, default_value = "auto", value_name = "TYPE")]
    pub weight_type: WeightType,
    /// Element type of the KV cache: f32, f16, q8 or q4
    #[arg(long, default_value = "q4", value_name = "TYPE")]
    pub kv_type: KvType,
    /// Element type of the keys alone
    #[arg(long = "cache-type-k", visible_alias = "ctk", value_name = "TYPE")]
    pub cache_type_k: Option<KvType>,
    /// Element type of the values alone
    #[arg(long = "cache-type-v", visible_alias = "ctv", value_name = "TYPE")]
    pub cache_type_v: Option<KvType>,
    /// Slots of the KV cache
    #[arg(short = 'c', long, visible_alias = "ctx-size", default_value_t = 2048, value_name = "N")]
    pub max_seq_len: usize,
    /// Most tokens of one prefill step
    #[arg(long, default_value_t = PREFILL_CHUNK, value_name = "N")]
    pub prefill_chunk: usize,
    /// While text is generated on the CPU, compute up to N tokens at once that what stands before makes likely: the same
    /// text, faster where it repeats; 0 is off
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub draft: usize,
    #[command(flatten)]
    pub cores: ThreadArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub eviction: EvictionArgs,
}

impl ModelArgs {
    /// The path given, or the baked model's.
    pub fn path(&self) -> PathBuf {
        self.model_path.clone().unwrap_or_else(default_model)
    }

    /// Checks the flags and resolves them.
    pub fn resolve(&self) -> Result<EngineOptions> {
        let (backend, hybrid) = self.device.resolve()?;
        let eviction = self.eviction.resolve()?;
        let positive = |flag: &str, n: usize, most: usize| match n {
            n if (1..=most).contains(&n) => Ok(n),
            n => Err(Error::Usage(format!("{flag} {n}: use a number from 1 to {most}"))),
        };
        Ok(EngineOptions {
            model: self.path(),
            weight_type: self.weight_type,
            kv_types: KvTypes {
                k: self.cache_type_k.unwrap_or(self.kv_type),
                v: self.cache_type_v.unwrap_or(self.kv_type),
            },
            max_seq_len: positive("--max-seq-len", self.max_seq_len, 1 << 24)?,
            threads: self.cores.resolve()?,
            prefill_chunk: positive("--prefill-chunk", self.prefill_chunk, 4096)?,
            batch: 1,
            draft: match self.draft {
                0 => 0,
                n => positive("--draft", n, 64)?,
            },
            isa: None,
            backend,
            cl_device: self.device.cl_device.clone(),
            gpu_attn: self.device.gpu_attn,
            gpu_fast: self.device.gpu_fast,
            zero_copy: self.device.zero_copy,
            hybrid,
            eviction,
            // Under --quiet too: that a device is lost, or that a flag has no effect, explains what follows.
            notice: |line| eprintln!("{line}"),
        })
    }
}

/// `ANTIGRAVITY_MODEL` as at build time, else the baked directory, else the program's own.
pub(super) fn default_model() -> PathBuf {
    let baked = PathBuf::from(dims::MODEL_DIR);
    if let Some(name) = std::env::var_os("ANTIGRAVITY_MODEL") {
        let path = PathBuf::from(&name);
        if baked.file_name() != Some(&*name) && path.exists() {
            return path;
        }
    }
    if baked.exists() {
        return baked;
    }
    let exe = std::env::current_exe().unwrap_or_default();
    exe.parent().unwrap_or(Path::new(".")).into()
}

/// A completion.
#[derive(Args, Clone)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Prompt [default: stdin when piped, else "Hello, world! I am a"]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Prompt from a file; - is stdin
    #[arg(short = 'f', long, visible_alias = "file", value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// Tokens to generate; -1 until the end of the sequence or of the context
    #[arg(
        short,
        long,
        visible_alias = "predict",
        default_value_t = 20,
        value_name = "N",
        allow_negative_numbers = true
    )]
    pub num_tokens: i64,
    /// Text that ends the answer; may be given more than once
    #[arg(short = 'r', long = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on past the end of the sequence
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub prompts: PromptsArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Go on from the state in this file, if it exists, and save it there at the end. A prompt that begins with the
    /// text so far is that text going on, of which nothing is computed again; any other one is appended. Random
    /// numbers go on too, unless --seed is another one
    #[arg(long, value_name = "FILE")]
    pub session: Option<PathBuf>,
}

/// Where what is said goes.
#[derive(Args, Clone)]
pub(super) struct OutputArgs {
    /// Text, or one JSON object a line
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    /// With each token's JSON line, what the model held of it and of the N most probable tokens before any sampler:
    /// natural logarithms of probabilities
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
    /// Write a Chrome/Perfetto trace of the run
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Say nothing but errors on stderr
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more on stderr
    #[arg(short, long)]
    pub verbose: bool,
}

impl OutputArgs {
    /// Checks `--logprobs`, for which the output must be JSON `lines`.
    pub fn logprobs(&self, lines: bool) -> Result<Option<usize>> {
        let Some(n) = self.logprobs else { return Ok(None) };
        Logprobs::check(n)?;
        match lines {
            true => Ok(Some(n)),
            false => Err(Error::Usage(format!("--logprobs {n}: is part of JSON lines; add --format jsonl"))),
        }
    }

    /// Whether the output is JSON lines.
    pub fn is_jsonl(&self) -> bool {
        self.format == Format::Jsonl
    }
}

/// `--num-tokens`: -1 is no limit.
pub(super) fn token_limit(num_tokens: i64) -> Result<Option<usize>> {
    match num_tokens {
        -1 => Ok(None),
        n => usize::try_from(n)
            .map(Some)
            .map_err(|_| Error::Usage(format!("--num-tokens {n}: use a number from 0, or -1 for no limit"))),
    }
}

impl GenerateArgs {
    /// Checks the flags of the generation.
    pub fn resolve(&self) -> Result<GenerateOptions> {
        if self.session.is_some() {
            self.sampler
                .grammar
                .refuse("--session: a grammar begins with its text; leave one of them out")?;
        }
        Ok(GenerateOptions {
            max_tokens: token_limit(self.num_tokens)?,
            sampler: self.sampler.resolve()?,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: self.output.logprobs(self.output.is_jsonl() || self.prompts.prompts.is_some())?,
            progress: if self.output.quiet { |_, _| {} } else { prompt_progress },
            ..GenerateOptions::default()
        })
    }
}
