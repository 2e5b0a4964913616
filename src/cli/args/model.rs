//! Flags of the model, its device and its KV cache. They resolve to [`EngineOptions`].

use super::check_range;
use super::device::{DeviceArgs, ThreadArgs};
use crate::cli::flags::name_flags;
use crate::dims;
use crate::model::weights::WeightType;
use crate::run::draft_model::DraftWhen;
use crate::run::draft_model::protocol::MAX_DRAFT;
use crate::run::eviction::{Eviction, Policy};
use crate::run::options::EngineOptions;
#[cfg(feature = "chat")]
use crate::run::plan::Plan;
use crate::run::session::Notice;
use clap::{Args, ValueEnum};
use files::error::{MAX_LINE_BYTES, one_line};
use files::lora::LoraFile;
use files::{Result, bundle, hf_cache, print_stderr};
use numeric::kv::{KvType, KvTypes};
use std::hint::black_box;
use std::path::{Path, PathBuf};

/// Upper limit of `--max-seq-len`.
pub const MAX_SEQ_LEN: usize = 1 << 24;
/// Default of `--max-seq-len`.
pub const DEFAULT_CONTEXT: usize = 2048;
/// Its default where a conversation grows: the model's own maximum, but no more than is worth its memory.
#[cfg(feature = "chat")]
const CONVERSATION_CONTEXT: usize = if dims::MAX_POSITION < 8192 { dims::MAX_POSITION } else { 8192 };
/// That default, for `--help`.
#[cfg(feature = "chat")]
pub const CONVERSATION_CONTEXT_HELP: &str = "Context size in tokens, prompt included [default: the model's own maximum, at most 8192; less where memory is short]";

/// Path of the model.
#[derive(Args, Clone)]
pub struct PathArgs {
    /// Model directory, .safetensors file, .gguf file, packed file or bundle; or ORG/NAME from the Hugging Face cache
    /// (see `hf download`) [default: the model bundled in this program, else the one it was built for]
    #[arg(short = 'm', long, visible_alias = "model", aliases = ["hf-repo", "hf", "hfr"], value_name = "PATH")]
    pub model_path: Option<PathBuf>,
}

impl PathArgs {
    /// The given path, or the default model's.
    ///
    /// # Errors
    ///
    /// `Model` for a name that is neither a file nor in the Hugging Face cache.
    pub fn model_path(&self) -> Result<PathBuf> {
        self.model_path.as_deref().map_or_else(|| Ok(default_model_path()), hf_cache::resolve_model)
    }
}

/// The program's own file if it is a bundle, else the model that `ANTIGRAVITY_MODEL` names, else the directory that was
/// built in, else the program's own directory.
fn default_model_path() -> PathBuf {
    // Keeps the text in the program's file, where `bundle` looks for it.
    black_box(dims::BUILT_FOR);
    let exe = std::env::current_exe().unwrap_or_default();
    if bundle::find_mark(&exe).is_some() {
        return exe;
    }
    let baked = PathBuf::from(dims::MODEL_DIR);
    if let Some(name) = std::env::var_os("ANTIGRAVITY_MODEL") {
        let path = hf_cache::resolve_model(Path::new(&name)).unwrap_or_default();
        if baked.file_name() != Some(&*name) && path.exists() {
            return path;
        }
        warn_of_other_model(&name.to_string_lossy());
    }
    choose_model_dir(baked, exe.parent().unwrap_or(Path::new(".")))
}

/// Warns if `ANTIGRAVITY_MODEL` names another model than the built-in one, which runs in its place.
fn warn_of_other_model(named: &str) {
    let short = Path::new(named).file_name().unwrap_or_default().to_string_lossy();
    let built = dims::MODEL;
    if !named.is_empty() && short.split(':').next() != Some(built) {
        let named = one_line(named, MAX_LINE_BYTES / 4);
        print_stderr!(
            "warning: ANTIGRAVITY_MODEL={named}: no such model here; this program was built for {built} and runs it. To change \
             the model, build again: ANTIGRAVITY_MODEL={named} cargo build --release"
        );
    }
}

/// The built-in directory or, if that is missing, the program's own if it holds a model. If neither does, the built-in
/// one, so that the error names it.
fn choose_model_dir(baked: PathBuf, beside: &Path) -> PathBuf {
    let weights = |file: &Path| file.extension().is_some_and(|e| e == "safetensors" || e == "gguf");
    let holds_model = || {
        let mut entries = std::fs::read_dir(beside).into_iter().flatten().flatten();
        entries.any(|entry| weights(&entry.path()))
    };
    let shipped = baked.as_os_str().is_empty();
    if shipped || (!baked.exists() && holds_model()) { beside.into() } else { baked }
}

/// Path of the model, the type of its weights, and adapters.
#[derive(Args, Clone)]
pub struct WeightArgs {
    #[command(flatten)]
    pub model: PathArgs,
    /// Type of the weight matrices: auto (native for GGUF and quantised checkpoints, q4_0 for others), native (as stored;
    /// FP8 becomes Q8_0), q4_0, iq4_nl or q4 (about as small, and less is lost, least with q4; they take longer to
    /// quantise, so pack them), or f32 (for reference; blocks are expanded in memory)
    #[arg(long, default_value = "auto", value_name = "TYPE")]
    pub weight_type: WeightType,
    /// LoRA adapter that is added to the weights before they are quantised: PEFT's directory or .safetensors file, or a
    /// .gguf file; SCALE multiplies it [default: 1]; repeatable. With native weights, sums are rounded to the stored type
    #[arg(long, alias = "lora-scaled", value_name = "FILE[:SCALE]")]
    pub lora: Vec<LoraFile>,
}

/// Flags for loading the model and for its device, shared by all commands that run it.
#[derive(Args, Clone)]
pub struct LoadArgs {
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Maximum number of prompt tokens per pass [default: 256, or up to 1024 on a large discrete GPU that also computes
    /// attention]
    #[arg(long, aliases = ["ubatch-size", "ub"], value_name = "N")]
    pub prefill_chunk: Option<usize>,
    /// Keep the most used experts of a packed file in memory, up to N MiB, by how often earlier runs chose them
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub keep_experts: u64,
    #[command(flatten, next_help_heading = "Device")]
    pub device: DeviceArgs,
}

impl LoadArgs {
    /// Checks and resolves the flags; cache and threads keep their defaults.
    pub fn resolve_options(&self) -> Result<EngineOptions> {
        let mut options = EngineOptions {
            weight_type: self.weights.weight_type,
            lora: self.weights.lora.clone(),
            keep_experts: self.keep_experts.saturating_mul(1 << 20),
            // Printed under --quiet too: a lost device or a flag without effect explains the output that follows.
            notice: Notice::new(|line| print_stderr!("{}", one_line(&name_flags(line), MAX_LINE_BYTES))),
            ..EngineOptions::new(self.weights.model.model_path()?)
        };
        self.device.apply_to(&mut options)?;
        options.prefill_chunk = match self.prefill_chunk {
            Some(n) => check_range("--prefill-chunk", n, 4096)?,
            None => options.default_chunk(),
        };
        Ok(options)
    }
}

/// Flags of model, device and cache, shared by all commands that generate.
#[derive(Args, Clone)]
pub struct ModelArgs {
    #[command(flatten, next_help_heading = "Model")]
    pub load: LoadArgs,
    #[command(flatten, next_help_heading = "Device")]
    pub cores: ThreadArgs,
    #[command(flatten, next_help_heading = "Cache")]
    pub cache: CacheArgs,
}

/// Value of `--draft-when`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DraftWhenArg {
    Pays,
    Always,
}

/// The KV cache, its eviction, and drafts.
#[derive(Args, Clone)]
pub struct CacheArgs {
    /// Context size in tokens, prompt included [default: 2048]
    #[arg(short = 'c', long, visible_alias = "ctx-size", value_name = "N")]
    max_seq_len: Option<usize>,
    /// Data type of the KV cache: f32, f16, q8, q6, q5 or q4
    #[arg(long, default_value = "q4", value_name = "TYPE")]
    kv_type: KvType,
    /// Data type of the keys only; -ctk for short
    #[arg(long = "cache-type-k", visible_alias = "ctk", value_name = "TYPE")]
    cache_type_k: Option<KvType>,
    /// Data type of the values only; -ctv for short
    #[arg(long = "cache-type-v", visible_alias = "ctv", value_name = "TYPE")]
    cache_type_v: Option<KvType>,
    /// Action when the context is full: none ends the text, sliding keeps the latest tokens, snapkv and h2o keep the
    /// tokens that receive the most attention
    #[arg(long, default_value = "none", value_name = "POLICY")]
    eviction_policy: Policy,
    /// Number of tokens that an eviction keeps
    #[arg(long, default_value_t = 1024, value_name = "N")]
    eviction_window: usize,
    /// First tokens that are never evicted [default: 4 with sliding and snapkv until the text exceeds the
    /// context the model was trained for, else 0; in a chat at least the system prompt]
    #[arg(long, visible_alias = "keep", value_name = "N")]
    protected_prefix: Option<usize>,
    /// Also evict when less system memory than this is available
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    memory_threshold_mb: u64,
    /// Speculative decoding: draft up to N tokens, from the text so far, by the model's own MTP block if its file has
    /// one, or with --draft-model, and verify them in one pass; the text is the same, and faster if drafts are right; 0
    /// is off [default: 0, or 8 with --draft-model]
    #[arg(long, value_name = "N")]
    draft: Option<usize>,
    /// Draft with another antigravity program, built for a smaller model with the same tokenizer; or, for Gemma 4 on the
    /// CPU, with the folder of its assistant, or org/name in the Hugging Face cache; -md for short
    #[arg(long, aliases = ["model-draft", "md"], value_name = "PROGRAM")]
    draft_model: Option<PathBuf>,
    /// When the draft model or the MTP block drafts: pays (only as many tokens as speed up the text, by measured times), or always (N
    /// tokens)
    #[arg(long, value_enum, default_value = "pays", value_name = "WHEN")]
    draft_when: DraftWhenArg,
}

/// Value of `--draft` if only `--draft-model` is given.
const DEFAULT_MODEL_DRAFT: usize = 8;

impl CacheArgs {
    /// The eviction flags; their numbers are checked only if a policy is set.
    fn resolve_eviction(&self) -> Result<Eviction> {
        let eviction = Eviction {
            policy: self.eviction_policy,
            window: self.eviction_window,
            prefix: self.protected_prefix,
            memory_threshold: self.memory_threshold_mb.saturating_mul(1 << 20),
        };
        if eviction.policy != Policy::None {
            eviction.validate()?;
        }
        Ok(eviction)
    }

    /// Maximum length of drafts.
    fn draft_length(&self) -> Result<usize> {
        match (self.draft, &self.draft_model) {
            (Some(0), _) | (None, None) => Ok(0),
            (Some(n), _) => check_range("--draft", n, MAX_DRAFT),
            (None, Some(_)) => Ok(DEFAULT_MODEL_DRAFT),
        }
    }

    /// Condition for drafts by a model.
    fn draft_when(&self) -> DraftWhen {
        match self.draft_when {
            DraftWhenArg::Pays => DraftWhen::Pays,
            DraftWhenArg::Always => DraftWhen::Always,
        }
    }
}

impl ModelArgs {
    /// Checks the flags and resolves them.
    pub fn resolve_options(&self) -> Result<EngineOptions> {
        let cache = &self.cache;
        Ok(EngineOptions {
            kv_types: KvTypes {
                k: cache.cache_type_k.unwrap_or(cache.kv_type),
                v: cache.cache_type_v.unwrap_or(cache.kv_type),
            },
            eviction: cache.resolve_eviction()?,
            max_seq_len: match cache.max_seq_len {
                Some(n) => check_range("--max-seq-len", n, MAX_SEQ_LEN)?,
                None => DEFAULT_CONTEXT,
            },
            threads: self.cores.resolve_threads()?,
            draft: cache.draft_length()?,
            draft_model: cache.draft_model.clone(),
            draft_when: cache.draft_when(),
            ..self.load.resolve_options()?
        })
    }

    /// Resolves the flags for a single text, which may begin on the CPU while kernels compile.
    pub fn resolve_for_one_text(&self) -> Result<EngineOptions> {
        Ok(EngineOptions { wait_for_gpu: self.load.device.wait_for_gpu, ..self.resolve_options()? })
    }

    /// The options with a conversation's default context, if no context is given.
    #[cfg(feature = "chat")]
    pub fn with_conversation_context(&self, mut options: EngineOptions) -> EngineOptions {
        if self.cache.max_seq_len.is_none() {
            options.max_seq_len = CONVERSATION_CONTEXT;
        }
        options
    }

    /// Shortens the default context of [`ModelArgs::with_conversation_context`] to what fits in memory.
    #[cfg(feature = "chat")]
    pub fn fit_default_context(&self, plan: &mut Plan) {
        if self.cache.max_seq_len.is_none() {
            plan.shorten_context();
        }
    }

    /// The path of `--model-path`.
    pub fn given_path(&self) -> Option<&Path> {
        self.load.weights.model.model_path.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_baked_folder_that_is_gone_is_named_unless_there_is_a_model_beside_the_program() {
        let beside = std::env::temp_dir().join(format!("antigravity-beside-{}", std::process::id()));
        std::fs::create_dir_all(&beside).expect("a directory");
        let chosen = |baked: &str| choose_model_dir(baked.into(), &beside);
        assert_eq!(chosen("/no/such/model"), Path::new("/no/such/model"));
        assert_eq!(chosen(""), beside);
        assert_eq!(chosen("/"), Path::new("/"));
        std::fs::write(beside.join("model-00001-of-00002.safetensors"), "").expect("a file");
        assert_eq!(chosen("/no/such/model"), beside);
        std::fs::remove_dir_all(&beside).expect("removed");
    }
}
