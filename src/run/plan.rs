//! The memory plan, made before anything is allocated: estimates the memory of the model, its cache and its buffers,
//! and checks that the machine has it.
//!
//! It has two sums. *Need* must fit, or the program would be killed or very slow: all allocated memory, and the mapped
//! weights that every token reads. *Peak* is an upper bound of the resident set that the system reports; it also counts
//! mapped pages that can be dropped at any time.

mod advice;
mod opened;
mod server;
mod stages;

pub use advice::{ContextName, check_models_fit, check_sequences_fit};
pub use opened::OpenedModel;
#[cfg(feature = "serve")]
pub use server::{BACKLOG, CONNECTION_BUFFER, CONNECTIONS, request_threads};

use crate::dims::*;
use crate::model::cpu;
use crate::model::device::Ring;
use crate::model::weights::{Assistant, Calibration, OpenModel, WeightBytes, WeightType};
use crate::opencl;
use crate::run::calibration;
use crate::run::draft_model::mtp;
use crate::run::eviction::Policy;
use crate::run::kept_experts;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::placement;
use crate::run::session::LOGITS_ROWS;
use crate::run::system::{self, Memory};
use files::model_dir::ModelDir;
use files::{Result, catch_panic};
use numeric::pool;
use std::ops::Range;
use std::path::Path;

/// Kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Allocated memory, until the end.
    Own,
    /// Pages of a mapped file that every token reads; they must stay in memory.
    Mapped,
    /// Pages of a mapped file that are rarely read; the system drops and rereads them at will.
    Reclaimable,
    /// Memory of an OpenCL device, which is the machine's if it is unified.
    Device,
    /// Address space that is hardly touched; only the process's limits count it.
    AddressSpace,
}

impl MemoryKind {
    /// Name in the plan's table.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::Own => "own",
            MemoryKind::Mapped => "mapped",
            MemoryKind::Reclaimable => "mapped, may be dropped",
            MemoryKind::Device => "device",
            MemoryKind::AddressSpace => "address space",
        }
    }
}

/// One line of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanItem {
    /// Purpose.
    pub purpose: String,
    /// Size.
    pub bytes: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
}

/// Form of the weights on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightsForm {
    /// A packed file, which is mapped.
    Packed,
    /// A checkpoint: matrices are quantised into memory, or used as mapped with [`WeightType::F32`].
    Checkpoint,
    /// No file; sizes are estimated for a packed file with 16-bit embeddings.
    Assumed,
}

/// Size of the program if the system does not tell it.
const PROGRAM: u64 = 8 << 20;
/// Memory before a model is loaded: libraries, allocator.
const LIBRARIES: u64 = 2 << 20;
/// Memory of an OpenCL device's libraries.
const DRIVER: u64 = 14 << 20;
/// Peak bytes of loading a tokenizer per byte of its file, besides [`WORDS`]. Measured in total: 17 with a file of 0.3
/// MB, 12 with one of 3 MB.
const TOKENIZER: u64 = 13;
/// The tokenizer library's cache of words.
const WORDS: u64 = 3 << 19;
/// Address space that the C library reserves for each thread that allocates.
const HEAP: u64 = 64 << 20;
/// Small allocations that are not counted: signal stacks, buffers, fragmentation.
const SMALL: u64 = 4 << 20;
/// Bytes per slot: its token id, and the text of a prompt that fills the context, at four bytes a token, with 8 bytes
/// to encode each byte.
const TEXT_PER_SLOT: u64 = 8 + 4 * 9;
/// Maximum memory of encoding a text, which takes 130 bytes a byte; a long one is encoded in parts.
const ENCODING: u64 = 4 << 20;
/// Memory of encoding a short text, per slot.
const ENCODING_PER_SLOT: u64 = 4 * 130;

/// The memory plan of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Options that it is for, threads resolved.
    pub options: EngineOptions,
    /// Form of the weights on disk.
    pub form: WeightsForm,
    /// The machine.
    pub memory: Memory,
    /// Fingerprint of the weights' files; empty if there are none.
    pub model_id: String,
    weights: WeightBytes,
    /// Bytes of experts that are kept in memory beyond those that a token reads.
    kept_experts: u64,
    /// Bytes of the model's assistant, if it drafts.
    assistant: u64,
    /// Bytes of the program itself.
    program: u64,
    tokenizer_file: u64,
    /// Number of buffers for the logits of [`LOGITS_ROWS`] tokens.
    row_blocks: usize,
    /// Bytes that the rows of all sequences share, if they cannot all be full.
    shared_rows: Option<u64>,
    /// Bytes for a server's requests and answers in progress; 0 without a server.
    requests: u64,
    /// The device's memory, if one runs the model.
    device: Option<DeviceMemory>,
}

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceMemory {
    /// The machine's memory; also assumed if no device could be asked.
    Unified,
    /// Its own memory, with this number of bytes.
    Own(u64),
}

impl DeviceMemory {
    fn of(options: &EngineOptions) -> Option<Self> {
        if options.backend == BackendKind::Cpu {
            return None;
        }
        if !options.split_stages().is_empty() {
            return stages::split_memory(options);
        }
        match opencl::facts_of(options.cl_device.as_deref()) {
            None if options.backend == BackendKind::Auto => None,
            Some(facts) if !facts.unified_memory => Some(DeviceMemory::Own(facts.global_memory)),
            _ => Some(DeviceMemory::Unified),
        }
    }
}

impl Plan {
    /// The plan for an existing model. Reads only headers.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        Self::for_model(&options.open_model()?, options)
    }

    /// The plan for an opened model.
    ///
    /// # Errors
    ///
    /// `Usage` if the environment variable for the machine's memory is not a number, and errors of
    /// [`kept_experts::check_options`].
    pub fn for_model(model: &OpenModel, options: &EngineOptions) -> Result<Self> {
        let mut options = options.clone();
        options.weight_type = model.weight_type;
        let mut plan = Self::with(options, WeightBytes::for_model(model), &model.path.dir)?;
        plan.form =
            if model.checkpoint.packed().is_some() { WeightsForm::Packed } else { WeightsForm::Checkpoint };
        if let Some(gguf) = model.gguf() {
            plan.tokenizer_file = gguf.header_len() as u64;
        }
        let kept = kept_experts::planned_bytes(&plan.options, &model.checkpoint.source_fingerprint());
        plan.kept_experts = kept.min(plan.weights.unchosen);
        Ok(Self { model_id: model.checkpoint.fingerprint(), ..plan })
    }

    /// The plan for a packed file of the baked model that does not exist yet.
    pub fn estimate(options: &EngineOptions) -> Result<Self> {
        let mut options = options.clone();
        if options.weight_type == WeightType::Auto {
            options.weight_type = WeightType::Q4_0;
        }
        let dir = options.model.clone();
        Self::with(options, WeightBytes::estimate(), &dir)
    }

    fn with(mut options: EngineOptions, weights: WeightBytes, dir: &Path) -> Result<Self> {
        kept_experts::check_options(&options)?;
        if options.threads == 0 {
            options.threads = numeric::topology::default_threads();
        }
        let tokenizer_file = ModelDir::open(dir)?.file_size("tokenizer.json").unwrap_or(0);
        let memory = Memory::for_planning()?;
        let device = DeviceMemory::of(&options);
        let (form, model_id) = (WeightsForm::Assumed, String::new());
        let assistant = options.assistant_folder().map_or(0, |folder| Assistant::stored_bytes(&folder));
        let program = add(system::program_bytes().unwrap_or(PROGRAM), LIBRARIES);
        Ok(Self {
            options,
            form,
            memory,
            model_id,
            weights,
            kept_experts: 0,
            assistant,
            program,
            tokenizer_file,
            row_blocks: 0,
            shared_rows: None,
            requests: 0,
            device,
        })
        .and_then(Self::resolve_split)
    }

    /// Adds `blocks` buffers for the logits of every token.
    pub fn with_rows(mut self, blocks: usize) -> Self {
        self.row_blocks = blocks;
        self
    }

    /// Bytes of the rows of all sequences: `[full-attention layers, sliding-window layers]`.
    fn kv_row_bytes(&self, slots: usize) -> [u64; 2] {
        let (o, chunk) = (&self.options, self.max_pass_tokens(slots));
        let [all, local] = window_ring(o, chunk)
            .cache_bytes(o.kv_types, slots)
            .map(|bytes| mul(bytes, o.sequence_count() as u64));
        match self.shared_rows {
            // At least the rows of one sequence.
            Some(most) => [all.min(most.saturating_sub(local).max(all / o.sequence_count() as u64)), local],
            None => [all, local],
        }
    }

    /// Maximum number of tokens of a pass.
    fn max_pass_tokens(&self, slots: usize) -> usize {
        placement::max_pass_tokens_for(&self.options, slots)
    }

    /// The plan's lines for the requested context.
    pub fn plan_items(&self) -> Vec<PlanItem> {
        self.items_for(self.options.max_seq_len)
    }

    /// True if CPU and device share one copy of weights and cache.
    fn is_shared(&self) -> bool {
        self.options.zero_copy && self.device == Some(DeviceMemory::Unified)
    }

    /// The CPU's lines where it and a device compute by turns.
    fn cpu_items_beside_device(&self, slots: usize) -> [PlanItem; 4] {
        let (o, chunk, kind) = (&self.options, self.max_pass_tokens(slots), MemoryKind::Own);
        let rows = if self.is_shared() { 0 } else { self.kv_row_bytes(slots).into_iter().fold(0, add) };
        let lines = [
            ("attention mass", mass_bytes(o, 0..LAYERS, (slots, chunk))),
            ("KV cache", rows),
            ("recurrent states", placement::state_bytes(&(0..LAYERS), o.sequence_count())),
            (&format!("scratch for {chunk} tokens"), cpu_scratch_bytes(slots, chunk)),
        ];
        lines.map(|(what, bytes)| PlanItem { purpose: format!("{what}, the CPU's"), bytes, kind })
    }

    fn items_for(&self, slots: usize) -> Vec<PlanItem> {
        let o = &self.options;
        let put = |what: &str, bytes: u64, kind: MemoryKind| PlanItem { purpose: what.into(), bytes, kind };
        let (batch, chunk) = (o.sequence_count(), self.max_pass_tokens(slots));
        let all_slots = mul(slots as u64, batch as u64);
        let (ring, [of_all, of_local]) = (window_ring(o, chunk), self.kv_row_bytes(slots));
        let cpu_scratch = cpu_scratch_bytes(slots, chunk);
        let both = self.device.is_some() && matches!(o.backend, BackendKind::Hybrid | BackendKind::Auto);
        let attended = if o.gpu_attn || both { batch } else { 1 };
        let rows_per_head = slots.max(ring.rows_per_head(slots));
        let (there, scratch) = match self.device {
            None => (MemoryKind::Own, cpu_scratch),
            Some(_) => (MemoryKind::Device, device_scratch_bytes(rows_per_head, chunk, attended)),
        };
        // Attention on the CPU needs the cache in memory that the CPU can address.
        let of_attention = if o.gpu_attn || both { there } else { MemoryKind::Own };
        // Shared weights are counted once, as the device's.
        let copied = |bytes: u64| if self.is_shared() { 0 } else { bytes };
        // Of a split, each stage has lines of its own.
        let whole = |bytes: u64| if o.split_stages().is_empty() { bytes } else { 0 };
        let encoding = mul(slots as u64, ENCODING_PER_SLOT).min(ENCODING);
        let calibration = self.calibration_bytes();
        let mut items = vec![
            put("weights", copied(self.weights.own), MemoryKind::Own),
            put("weights", copied(self.host_share()), MemoryKind::Mapped),
            put("weights", whole(self.device.map_or(0, |_| self.weights.device)), MemoryKind::Device),
            put("embedding", self.weights.dropped, MemoryKind::Reclaimable),
            put("kept experts", copied(self.kept_experts), MemoryKind::Mapped),
            put("experts that a token leaves out", copied(self.droppable_experts()), MemoryKind::Reclaimable),
            put("calibration", calibration, MemoryKind::Own),
            put(&cache_name(o, batch, slots), whole(of_all), of_attention),
            put(&window_cache_name(o, ring.rows_per_head(slots)), whole(of_local), of_attention),
            put("recurrent states", whole(placement::state_bytes(&(0..LAYERS), batch)), there),
            put("checkpoints of recurrent states", placement::checkpoint_bytes(batch), MemoryKind::Own),
            put("prefix cache", o.prefix_cache, MemoryKind::Own),
            put(&format!("scratch for {chunk} tokens"), whole(scratch), there),
            put("attention mass", whole(mass_bytes(o, 0..LAYERS, (slots, chunk))), of_attention),
            put("logits", self.logits_bytes(batch, chunk), MemoryKind::Own),
            put("draft block", mtp_bytes(o), MemoryKind::Own),
            put("assistant", self.assistant, MemoryKind::Mapped),
            put("tokens and text", add(mul(all_slots, TEXT_PER_SLOT), encoding), MemoryKind::Own),
            put("tokenizer", self.tokenizer_bytes(), MemoryKind::Own),
            put("requests and answers", self.request_bytes(), MemoryKind::Own),
            put(&format!("{} threads", o.threads), self.thread_bytes(), MemoryKind::Own),
            put("program", self.program, MemoryKind::Own),
            put("stacks", self.stack_bytes(), MemoryKind::AddressSpace),
        ];
        if both {
            items.extend(self.cpu_items_beside_device(slots));
        }
        if self.device.is_some() {
            let calibration = opencl::calibration_bytes(o.kv_types) as u64;
            items.push(put("calibration", whole(calibration), MemoryKind::Device));
            items.push(put("list of slots for evictions", eviction_list_bytes(o, slots), of_attention));
            let host_side = self.host_side_bytes(slots, chunk, both);
            items.push(put("host side of the device", host_side, MemoryKind::Own));
        }
        items.extend(self.split_items(slots));
        items.into_iter().filter(|i| i.bytes > 0).collect()
    }

    /// Bytes of logits: of the sequences, of prompts that are scored, and of drafts.
    fn logits_bytes(&self, batch: usize, chunk: usize) -> u64 {
        // Logits of the session, the sampler's input and its ranking.
        let sampled = mul(mul(VOCAB as u64, 4 + 4 + 16), batch as u64);
        let draft = self.options.draft;
        // The drafts of all sequences fit into one pass.
        let drafted = if draft > 0 { mul(draft.min(chunk / batch) as u64 + 1, batch as u64) } else { 0 };
        let rows = add(mul(self.row_blocks as u64, LOGITS_ROWS.min(chunk) as u64), drafted);
        add(sampled, mul(rows, mul(VOCAB as u64, 4)))
    }

    fn thread_bytes(&self) -> u64 {
        mul(self.options.threads as u64, cpu::thread_bytes())
    }

    /// Bytes of host memory that a device needs for passes of `chunk` tokens; `both` if the CPU computes in turn.
    fn host_side_bytes(&self, slots: usize, chunk: usize, both: bool) -> u64 {
        let attention = if self.options.gpu_attn || both { 0 } else { host_attention(slots, chunk) };
        let landing = if self.has_own_memory() { opencl::logits_bytes(chunk) as u64 } else { 0 };
        add(attention, add(host_state(chunk), add(landing, DRIVER)))
    }

    /// True if a device with its own memory runs the model.
    fn has_own_memory(&self) -> bool {
        matches!(self.device, Some(DeviceMemory::Own(_)))
    }

    fn needed_bytes_for(&self, slots: usize) -> u64 {
        let apart = self.has_own_memory();
        let counts = |i: &&PlanItem| match i.kind {
            MemoryKind::Own | MemoryKind::Mapped => true,
            MemoryKind::Reclaimable | MemoryKind::AddressSpace => false,
            MemoryKind::Device => !apart,
        };
        sum(self.items_for(slots).iter().filter(counts))
    }

    /// Bytes on an OpenCL device.
    pub fn device_bytes(&self) -> u64 {
        sum(self.plan_items().iter().filter(|i| i.kind == MemoryKind::Device))
    }

    /// Bytes that must fit.
    pub fn needed_bytes(&self) -> u64 {
        self.needed_bytes_for(self.options.max_seq_len)
    }

    /// Bytes of experts in a mapped file that a token reads, and of all of them; zeros if there are none.
    pub fn expert_bytes(&self) -> (u64, u64) {
        let WeightBytes { chosen, unchosen, .. } = self.weights;
        (chosen, add(chosen, unchosen))
    }

    /// Bytes of experts in a mapped file that the system may drop.
    fn droppable_experts(&self) -> u64 {
        self.weights.unchosen - self.kept_experts
    }

    /// Bytes of experts in a mapped file that are kept in memory.
    pub fn kept_expert_bytes(&self) -> u64 {
        if self.kept_experts == 0 { 0 } else { self.options.keep_experts.min(self.expert_bytes().1) }
    }

    /// Bytes of one sequence: its cache, buffers and threads. Every other sequence needs the same.
    pub fn session_bytes(&self) -> u64 {
        let WeightBytes { own, mapped, .. } = self.weights;
        let mapped = add(mapped, self.kept_experts);
        let shared = [mapped, self.assistant, self.calibration_bytes(), self.tokenizer_bytes(), self.program];
        self.needed_bytes().saturating_sub(shared.into_iter().fold(own, add))
    }

    /// An upper bound of the resident set, mapped pages included.
    pub fn peak_bytes(&self) -> u64 {
        // While loading, the cache and the buffers are not allocated yet, but one stored tensor or the calibration's
        // pass is.
        let calibrating = if self.calibration_bytes() > 0 { calibration::pass_bytes() } else { 0 };
        let passing = self.weights.conversion_window.max(calibrating);
        let WeightBytes { own, mapped, dropped, unchosen, .. } = self.weights;
        let loading = [own, mapped, dropped, unchosen, passing];
        let loading = loading.into_iter().fold(self.program, add);
        loading.max(sum(self.plan_items().iter().filter(|i| i.kind != MemoryKind::AddressSpace)))
    }

    /// Bytes of the calibration, if keys are stored rotated.
    fn calibration_bytes(&self) -> u64 {
        if self.options.kv_types.k.is_rotated() { Calibration::BYTES as u64 } else { 0 }
    }

    /// Bytes of loading the tokenizer.
    fn tokenizer_bytes(&self) -> u64 {
        if self.tokenizer_file == 0 { 0 } else { add(WORDS, mul(self.tokenizer_file, TOKENIZER)) }
    }

    /// Bytes of the stacks of all threads: for passes, also those of a split's stages, for loading the tokenizer, for signals.
    fn stack_bytes(&self) -> u64 {
        let threads = self.options.threads.saturating_add(self.options.split_stages().len());
        let team = mul(threads as u64, pool::STACK_BYTES as u64);
        add(team, catch_panic::STACK_BYTES as u64 + SMALL + self.server_threads() * server::STACK)
    }

    /// Bytes still to be mapped for `slots` slots: writable, and in total. The model's files are already mapped.
    fn address_space_needed(&self, slots: usize) -> (u64, u64) {
        let mapped = add(self.weights.mapped, self.kept_experts);
        let own = self.needed_bytes_for(slots).saturating_sub(add(mapped, self.program));
        let data = add(own, add(self.stack_bytes(), SMALL));
        (data, add(data, mul(self.options.threads as u64 + 2 + self.server_threads(), HEAP)))
    }

    /// The longest context, at most 2^24, that fits in `memory`; `None` if not even the model does.
    pub fn longest_context(&self, memory: u64) -> Option<usize> {
        longest_where(|slots| self.needed_bytes_for(slots) <= memory)
    }
}

/// The largest number of slots, at most 2^24, that `fits`. Every smaller number must fit too.
fn longest_where(fits: impl Fn(usize) -> bool) -> Option<usize> {
    if !fits(1) {
        return None;
    }
    // `low` fits, `high` does not (or is the end).
    let (mut low, mut high) = (1, (1 << 24) + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

fn cache_name(o: &EngineOptions, sequences: usize, slots: usize) -> String {
    match sequences {
        1 => format!("KV cache, {} x {slots} tokens", o.kv_types),
        n => format!("KV caches of {n} sequences, {} x {slots} tokens", o.kv_types),
    }
}

/// Name of the sliding-window layers' part of a cache.
fn window_cache_name(o: &EngineOptions, rows: usize) -> String {
    format!("KV cache of sliding-window layers, {} x {rows} tokens", o.kv_types)
}

/// Ring of the sliding-window layers, with passes of `chunk` tokens.
fn window_ring(o: &EngineOptions, chunk: usize) -> Ring {
    let ring = Ring::new(chunk);
    if o.eviction.policy == Policy::None { ring } else { ring.with_whole_window() }
}

/// Formats bytes as `1.5 MiB`, as in all messages.
pub fn format_mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

fn mul(a: u64, b: u64) -> u64 {
    a.saturating_mul(b)
}

fn sum<'a>(items: impl IntoIterator<Item = &'a PlanItem>) -> u64 {
    items.into_iter().fold(0, |sum, i| add(sum, i.bytes))
}

/// Bytes of the CPU's scratch. Numbers that cannot fit anyway are clamped before they overflow.
fn cpu_scratch_bytes(slots: usize, chunk: usize) -> u64 {
    const MOST: usize = usize::MAX >> 28;
    cpu::scratch_bytes(slots.min(MOST), chunk.min(MOST >> 8)) as u64
}

/// Bytes of an OpenCL device's scratch, with partial attention of one token of each sequence.
fn device_scratch_bytes(slots: usize, chunk: usize, sequences: usize) -> u64 {
    const MOST: usize = usize::MAX >> 32;
    let slots = slots.min(MOST);
    add(opencl::scratch_bytes(chunk.min(MOST >> 8)) as u64, opencl::parts_bytes(slots, sequences) as u64)
}

/// Bytes for observing attention in some layers, for the policies that look at it.
fn mass_bytes(o: &EngineOptions, layers: Range<usize>, (slots, chunk): (usize, usize)) -> u64 {
    const MOST: usize = usize::MAX >> 28;
    let full = cache_layers(&layers)[0];
    if full == 0 || !o.eviction.policy.observes_attention() {
        return 0;
    }
    let slots = mul(cpu::mass_bytes(slots.min(MOST)) as u64, (full * o.sequence_count()) as u64);
    add(slots, cpu::notes_bytes(chunk.min(MOST >> 8)) as u64)
}

/// Bytes for drafts by the model's own block, if it drafts.
fn mtp_bytes(o: &EngineOptions) -> u64 {
    if !HAS_MTP || o.draft == 0 || o.draft_model.is_some() {
        return 0;
    }
    add(cpu::mtp_scratch_bytes() as u64, mul(mtp::sequence_bytes(), o.sequence_count() as u64))
}

/// Bytes of the list of slots that a device receives at evictions.
fn eviction_list_bytes(o: &EngineOptions, slots: usize) -> u64 {
    if o.eviction.policy == Policy::None {
        0
    } else {
        opencl::slot_list_bytes(slots.min(usize::MAX >> 32)) as u64
    }
}

/// Bytes sent to a device for a pass: the host's copy and the driver's staging copy.
fn host_state(chunk: usize) -> u64 {
    mul(chunk as u64, 8 * (DIM + HEAD_DIM) as u64)
}

/// Bytes of attention on the host: input, output, new rows and partial results.
fn host_attention(slots: usize, chunk: usize) -> u64 {
    let token = 4 * (Q_DIM + KV_DIM + opencl::QKV) as u64;
    add(mul(chunk as u64, token), cpu_scratch_bytes(slots, 0))
}

#[cfg(test)]
mod tests;
