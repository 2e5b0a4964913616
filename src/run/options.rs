//! Options for loading a model and generating text, with the command line's defaults.

use crate::model::weights::{ModelPath, OpenModel, WeightType};
use crate::opencl::facts_of;
use crate::run::draft_model::DraftWhen;
use crate::run::eviction::Eviction;
use crate::run::split::{Split, SplitStage};
use files::lora::LoraFile;
use files::{Result, hf_cache};
use numeric::cancel::CancelToken;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::path::PathBuf;
use std::sync::Arc;
use text::sampler::SamplerOptions;
use text::tokenizer::SpecialText;

/// Default maximum number of tokens in one pass: whole tiles for every kernel, and short enough for a quick Ctrl-C.
pub const PREFILL_CHUNK: usize = 256;
/// Default on the largest GPUs.
const LARGEST_CHUNK: usize = 1024;
/// Number of tokens that keeps one of a GPU's compute units busy. Of the 1B shape, matrices of 2,048 rows have 128
/// tiles for 256 tokens, and an H200 has 132 units.
const TOKENS_PER_COMPUTE_UNIT: usize = 8;

/// Callback with the amount done and the total. By default it does nothing.
#[derive(Clone)]
pub struct Progress(Arc<dyn Fn(usize, usize) + Send + Sync>);

impl Progress {
    /// Calls `function`, from any thread.
    pub fn new(function: impl Fn(usize, usize) + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    /// Reports that `done` of `all` are done.
    pub fn report(&self, done: usize, all: usize) {
        (self.0)(done, all)
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new(|_, _| {})
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress(a function)")
    }
}

/// Callback with one line for the user. By default the line is dropped.
#[derive(Clone)]
pub struct Notice(Arc<dyn Fn(&str) + Send + Sync>);

impl Notice {
    /// Calls `function`, from any thread.
    pub fn new(function: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    /// Reports a line.
    pub fn warn(&self, line: &str) {
        (self.0)(line)
    }
}

impl Default for Notice {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl std::fmt::Debug for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notice(a function)")
    }
}

/// One of the two devices of a hybrid session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The CPU.
    Cpu,
    /// The OpenCL device.
    Gpu,
}

impl Side {
    /// Both devices.
    pub const ALL: [Side; 2] = [Side::Cpu, Side::Gpu];

    /// The other device.
    pub fn other_side(self) -> Self {
        match self {
            Side::Cpu => Side::Gpu,
            Side::Gpu => Side::Cpu,
        }
    }

    /// The word in messages.
    pub fn name(self) -> &'static str {
        match self {
            Side::Cpu => "CPU",
            Side::Gpu => "GPU",
        }
    }
}

/// Schedule of a hybrid session: prompts on one device, decoded tokens by their position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedSchedule {
    /// Device that computes prompts.
    pub prefill: Side,
    /// Positions at which decoding moves to the GPU; it begins on the CPU.
    pub to_gpu: Vec<usize>,
    /// Positions at which it moves back.
    pub to_cpu: Vec<usize>,
}

impl FixedSchedule {
    /// The default schedule: prompts on the CPU, and decoding on the GPU from position 512 on.
    pub fn default_schedule() -> Self {
        Self { prefill: Side::Cpu, to_gpu: vec![512], to_cpu: Vec::new() }
    }

    /// The device that decodes the token at a position, by the last border at or before it.
    pub fn side_at(&self, position: usize) -> Side {
        let last = |borders: &[usize]| borders.iter().copied().filter(|&b| b <= position).max();
        match (last(&self.to_gpu), last(&self.to_cpu)) {
            (Some(gpu), Some(cpu)) if gpu > cpu => Side::Gpu,
            (Some(_), None) => Side::Gpu,
            _ => Side::Cpu,
        }
    }
}

/// Which device runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// The CPU.
    Cpu,
    /// An OpenCL device, or an error.
    OpenCl,
    /// The CPU and an OpenCL device in turn, as [`EngineOptions::hybrid`] says, or an error.
    Hybrid,
    /// The CPU and an OpenCL device, each for what it is faster at by measurement; the CPU if there is no device.
    Auto,
}

/// Options for loading and running a model.
///
/// ```
/// use antigravity::EngineOptions;
/// use antigravity::session::Notice;
/// use std::sync::{Arc, Mutex};
///
/// // The defaults of the command line: the CPU, a q4 cache of 2,048 slots, all big cores.
/// let mut options = EngineOptions::new("models/mine");
/// options.max_seq_len = 4096;
///
/// // Warnings arrive as lines.
/// let said = Arc::new(Mutex::new(Vec::new()));
/// let lines = Arc::clone(&said);
/// options.notice = Notice::new(move |line| lines.lock().unwrap().push(line.to_string()));
/// ```
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Model directory, `.safetensors` file, `.gguf` file, packed file or bundle.
    pub model: PathBuf,
    /// Type of the matrices.
    pub weight_type: WeightType,
    /// LoRA adapters that are added to the matrices before these are quantised.
    pub lora: Vec<LoraFile>,
    /// Element types of the KV cache.
    pub kv_types: KvTypes,
    /// Slots of the KV cache: the context length in tokens, prompt included.
    pub max_seq_len: usize,
    /// Number of threads; 0 takes the number of performance cores.
    pub threads: usize,
    /// Maximum number of tokens of one pass.
    pub prefill_chunk: usize,
    /// Number of prompts that [`Engine::generate_batch`](crate::Engine::generate_batch) completes at once; the memory
    /// plan counts a cache for each.
    pub batch: usize,
    /// Bytes of a server's prefix cache: rows of ended sequences.
    pub prefix_cache: u64,
    /// Maximum number of tokens drafted at a time, without changing the text: see
    /// [`Session::with_drafts`](crate::session::Session::with_drafts); 0 is none.
    pub draft: usize,
    /// Draft program: its path, or its name in `PATH`; or the folder of a Gemma 4 assistant of the model, or its name in
    /// the Hugging Face cache. It is used where the text so far does not suggest its continuation, and drafts at most
    /// [`EngineOptions::draft`] tokens. Without it, the model's own block drafts, if its file has one.
    pub draft_model: Option<PathBuf>,
    /// Condition for drafts by either.
    pub draft_when: DraftWhen,
    /// Bytes of a packed file's most used experts whose pages are locked in memory, by the counts of earlier runs; 0 locks
    /// none.
    pub keep_experts: u64,
    /// Instruction set; `None` takes the best, or the one that `ANTIGRAVITY_SIMD` names.
    pub isa: Option<Isa>,
    /// Which device runs the model.
    pub backend: BackendKind,
    /// Number or name of the OpenCL device; `None` takes the first GPU.
    pub cl_device: Option<String>,
    /// Devices that compute some layers each; `None` if one computes all, or two in turn. It needs
    /// [`BackendKind::OpenCl`] and [`EngineOptions::gpu_attn`].
    pub split: Option<Split>,
    /// OpenCL: compute attention on the device instead of the CPU.
    pub gpu_attn: bool,
    /// OpenCL: keep one copy of the weights, in memory that CPU and device share.
    pub zero_copy: bool,
    /// OpenCL: if kernels must be compiled first, [`Engine::session`](crate::Engine::session) waits for them; otherwise
    /// its sequence begins on the CPU.
    pub wait_for_gpu: bool,
    /// Hybrid: the schedule of the two devices.
    pub hybrid: FixedSchedule,
    /// Eviction of slots from a full cache.
    pub eviction: Eviction,
    /// Receives warnings, such as that a device cannot be used and the CPU takes its place.
    pub notice: Notice,
    /// Receives the number of OpenCL kernels built, and of all, while a caller waits for them.
    pub compile_progress: Progress,
}

impl EngineOptions {
    /// Folder of the model's assistant, if that drafts and not a program.
    pub fn assistant_folder(&self) -> Option<PathBuf> {
        let given = self.draft_model.as_ref().filter(|_| self.draft > 0)?;
        let found = hf_cache::resolve_model(given).unwrap_or_else(|_| given.clone());
        Some(hf_cache::resolve_snapshot(&found)).filter(|folder| folder.is_dir())
    }

    /// The defaults of the command line for a model.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            weight_type: WeightType::Auto,
            lora: Vec::new(),
            kv_types: KvTypes::same(KvType::Q4),
            max_seq_len: 2048,
            threads: 0,
            prefill_chunk: PREFILL_CHUNK,
            batch: 1,
            prefix_cache: 0,
            draft: 0,
            draft_model: None,
            draft_when: DraftWhen::Pays,
            keep_experts: 0,
            isa: None,
            backend: BackendKind::Cpu,
            cl_device: None,
            split: None,
            gpu_attn: false,
            zero_copy: false,
            wait_for_gpu: true,
            hybrid: FixedSchedule::default_schedule(),
            eviction: Eviction::NEVER,
            notice: Notice::default(),
            compile_progress: Progress::default(),
        }
    }

    /// Opens the model with its adapters.
    ///
    /// # Errors
    ///
    /// `Model`: a file is missing or damaged, or an adapter does not fit. `Usage`: a model with adapters is packed.
    pub fn open_model(&self) -> Result<OpenModel> {
        ModelPath::new(&self.model)?.open_with_adapters(self.weight_type, &self.lora)
    }

    /// The stages of the split; none without one.
    pub fn split_stages(&self) -> &[SplitStage] {
        match &self.split {
            Some(Split::Stages(stages)) => stages,
            _ => &[],
        }
    }

    /// Number of sequences computed together: [`EngineOptions::batch`], at least 1.
    pub fn sequence_count(&self) -> usize {
        self.batch.max(1)
    }

    /// Default of [`EngineOptions::prefill_chunk`]: [`PREFILL_CHUNK`], or on a large GPU with its own memory that
    /// computes the whole model, the number that keeps it busy.
    pub fn default_chunk(&self) -> usize {
        let alone = matches!(self.backend, BackendKind::OpenCl | BackendKind::Auto) && self.gpu_attn;
        let facts = alone.then(|| facts_of(self.cl_device.as_deref())).flatten();
        facts.map_or(PREFILL_CHUNK, |facts| default_chunk_for(facts.compute_units, facts.unified_memory))
    }
}

/// Options of one generation.
///
/// ```
/// use antigravity::session::CancelToken;
/// use antigravity::{Engine, EngineOptions, GenerateOptions, Progress};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// // The defaults: 20 tokens, the command line's sampler, no stop strings.
/// assert_eq!(GenerateOptions::default().max_tokens, Some(20));
///
/// // A closure receives progress, and any clone of the token can cancel.
/// let (cancel, done) = (CancelToken::default(), Arc::new(AtomicUsize::new(0)));
/// let (from_closure, seen) = (cancel.clone(), Arc::clone(&done));
/// let progress = Progress::new(move |tokens, _all| {
///     seen.store(tokens, Ordering::Relaxed);
///     from_closure.cancel();
/// });
/// let options = GenerateOptions { cancel, progress, ..Default::default() };
/// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
/// assert_eq!(engine.generate("Once upon a time", &options)?, "", "ended before its first token");
/// assert_eq!(done.load(Ordering::Relaxed), 0);
/// # Ok::<(), antigravity::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Maximum number of tokens to generate; `None` generates until the end of the sequence or of the context.
    pub max_tokens: Option<usize>,
    /// Treatment of control tokens spelled in a prompt.
    pub specials: SpecialText,
    /// Sampler settings.
    pub sampler: SamplerOptions,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Minimum number of tokens: nothing ends the text before, except a grammar that must end.
    pub min_tokens: usize,
    /// Sequences of token ids that are never generated.
    pub bad_words: Vec<Vec<u32>>,
    /// Continues past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Additional token ids that end the text, e.g. those of a chat template.
    pub stop_tokens: Vec<u32>,
    /// Control tokens whose text is shown, e.g. those of
    /// [`OutputFormat::marker_token_ids`](text::chat::OutputFormat::marker_token_ids).
    pub shown_tokens: Vec<u32>,
    /// Number of most probable tokens to report with their log-probabilities:
    /// [`TokenStream::logprobs`](crate::run::generate::stream::TokenStream::logprobs).
    pub logprobs: Option<usize>,
    /// Tokens whose log-probabilities follow those of the most probable ones.
    pub logprob_tokens: Vec<u32>,
    /// Number of most probable tokens to report at each token of a prompt, from the second on:
    /// [`BatchAnswer::prompt_logprobs`](crate::run::generate::prompts::BatchAnswer::prompt_logprobs).
    pub prompt_logprobs: Option<usize>,
    /// Cancels the generation: between tokens, and in a long prompt within a fraction of a pass.
    pub cancel: CancelToken,
    /// Receives the number of prompt tokens done and of all that must be computed.
    pub progress: Progress,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: Some(20),
            specials: SpecialText::default(),
            sampler: SamplerOptions::default(),
            stop: Vec::new(),
            min_tokens: 0,
            bad_words: Vec::new(),
            ignore_eos: false,
            stop_tokens: Vec::new(),
            shown_tokens: Vec::new(),
            logprobs: None,
            logprob_tokens: Vec::new(),
            prompt_logprobs: None,
            cancel: CancelToken::default(),
            progress: Progress::default(),
        }
    }
}

/// Default chunk on a device with this number of compute units: a power of two.
fn default_chunk_for(units: u32, unified_memory: bool) -> usize {
    let most = if unified_memory { PREFILL_CHUNK } else { LARGEST_CHUNK };
    let busy = TOKENS_PER_COMPUTE_UNIT * units.max(1) as usize;
    (1 << busy.ilog2()).clamp(PREFILL_CHUNK, most)
}

/// The error for a prompt that needs this many tokens.
pub(crate) fn long_prompt_error(need: &str, have: usize) -> files::Error {
    files::Error::Usage(format!(
        "the prompt needs {need} tokens but the context has {have}; raise `EngineOptions::max_seq_len`, shorten the prompt or \
         give an `Eviction::policy`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_gpus_with_memory_of_their_own_take_larger_chunks() {
        let chunks = [0, 28, 80, 132, 4000]
            .map(|units| [default_chunk_for(units, false), default_chunk_for(units, true)]);
        assert_eq!(chunks, [[256, 256], [256, 256], [512, 256], [1024, 256], [1024, 256]]);
    }
}
