//! Flags that say which model runs, on what and with which cache: the one way to [`EngineOptions`].

use super::cores::ThreadArgs;
use super::device::DeviceArgs;
use super::eviction::EvictionArgs;
use super::number::within;
use crate::dims;
use crate::model::weights::WeightType;
use crate::run::options::{EngineOptions, PREFILL_CHUNK};
use crate::run::session::Notice;
use clap::Args;
use files::{Result, say};
use numeric::kv::{KvType, KvTypes};
use std::path::{Path, PathBuf};

/// Where the model is.
#[derive(Args, Clone)]
pub(in crate::cli) struct PathArgs {
    /// Model directory, .safetensors file, .gguf file or packed file [default: the baked model's directory]
    #[arg(short = 'm', long, visible_alias = "model", value_name = "PATH")]
    pub model_path: Option<PathBuf>,
}

impl PathArgs {
    /// The path given, or the baked model's.
    pub fn path(&self) -> PathBuf {
        self.model_path.clone().unwrap_or_else(default_model)
    }
}

/// `ANTIGRAVITY_MODEL` as at build time, else the baked directory, else the program's own.
fn default_model() -> PathBuf {
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

/// Where the model is, and what its weights become.
#[derive(Args, Clone)]
pub(in crate::cli) struct WeightArgs {
    #[command(flatten)]
    pub model: PathArgs,
    /// What weight matrices become: auto (native for GGUF, q4_0 for safetensors), native (as stored), q4_0, or f32
    /// (a reference: a GGUF file's blocks are expanded in memory)
    #[arg(long, default_value = "auto", value_name = "TYPE")]
    pub weight_type: WeightType,
}

/// How the model is loaded and where it runs: shared by all commands that run it.
#[derive(Args, Clone)]
pub(in crate::cli) struct LoadArgs {
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Most tokens of one prefill pass
    #[arg(long, default_value_t = PREFILL_CHUNK, value_name = "N")]
    pub prefill_chunk: usize,
    #[command(flatten, next_help_heading = "Device")]
    pub device: DeviceArgs,
}

impl LoadArgs {
    /// Checks the flags and resolves them; the cache and the threads have their defaults.
    pub fn resolve(&self) -> Result<EngineOptions> {
        let mut options = EngineOptions {
            weight_type: self.weights.weight_type,
            prefill_chunk: within("--prefill-chunk", self.prefill_chunk, 4096)?,
            // Under --quiet too: a lost device or a flag without effect explains what follows.
            notice: Notice::new(|line| say!("{line}")),
            ..EngineOptions::new(self.weights.model.path())
        };
        self.device.apply(&mut options)?;
        Ok(options)
    }
}

/// Which model, on what, with which cache: shared by all commands that run one sequence at a time.
#[derive(Args, Clone)]
pub(in crate::cli) struct ModelArgs {
    #[command(flatten, next_help_heading = "Model")]
    pub load: LoadArgs,
    #[command(flatten, next_help_heading = "CPU")]
    pub cores: ThreadArgs,
    #[command(flatten, next_help_heading = "KV cache")]
    pub cache: CacheArgs,
}

/// The cache, and what is computed ahead into it.
#[derive(Args, Clone)]
pub(in crate::cli) struct CacheArgs {
    /// Slots of the KV cache: the longest text, prompt included
    #[arg(short = 'c', long, visible_alias = "ctx-size", default_value_t = 2048, value_name = "N")]
    pub max_seq_len: usize,
    /// Element type of the KV cache: f32, f16, q8 or q4
    #[arg(long, default_value = "q4", value_name = "TYPE")]
    pub kv_type: KvType,
    /// Element type of the keys alone; -ctk for short
    #[arg(long = "cache-type-k", visible_alias = "ctk", value_name = "TYPE")]
    pub cache_type_k: Option<KvType>,
    /// Element type of the values alone; -ctv for short
    #[arg(long = "cache-type-v", visible_alias = "ctv", value_name = "TYPE")]
    pub cache_type_v: Option<KvType>,
    #[command(flatten)]
    pub eviction: EvictionArgs,
    /// Guess up to N tokens ahead from the text so far and check them in one pass: the same text, faster where it
    /// repeats itself, on the CPU only; 0 is off
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub draft: usize,
}

impl ModelArgs {
    /// Checks the flags and resolves them.
    pub fn resolve(&self) -> Result<EngineOptions> {
        let cache = &self.cache;
        Ok(EngineOptions {
            kv_types: KvTypes {
                k: cache.cache_type_k.unwrap_or(cache.kv_type),
                v: cache.cache_type_v.unwrap_or(cache.kv_type),
            },
            eviction: cache.eviction.resolve()?,
            max_seq_len: within("--max-seq-len", cache.max_seq_len, 1 << 24)?,
            threads: self.cores.resolve()?,
            draft: if cache.draft == 0 { 0 } else { within("--draft", cache.draft, 64)? },
            ..self.load.resolve()?
        })
    }

    /// The path that was given.
    #[cfg(feature = "tools")]
    pub fn given_path(&self) -> Option<&Path> {
        self.load.weights.model.model_path.as_deref()
    }
}
