//! The memory plan, before anything is allocated: what the model, its cache and its buffers will take,
//! and whether the machine has that much.
//!
//! Two sums matter. *Need* must fit, or the program would be killed or crawl: all memory of our own, and
//! the mapped weights that every token reads. *Peak* bounds the resident set that the system reports; it
//! also counts mapped pages that can be dropped at any time.

mod advice;
mod opened;
mod server;

pub use advice::{Context, check_apart, check_sharing};
pub use opened::Opened;
#[cfg(feature = "serve")]
pub use server::{BACKLOG, CONNECTION_BUFFER, CONNECTIONS, request_threads};

use crate::dims::*;
use crate::model::cpu;
use crate::model::device::Ring;
use crate::model::weights::{Calibration, ModelPath, OpenModel, WeightBytes, WeightType};
use crate::opencl;
use crate::run::calibration;
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::placement;
use crate::run::session::ROWS;
use crate::run::system::{self, Memory};
use files::folder::Folder;
use files::{Result, containment};
use numeric::pool;
use std::path::Path;

/// What kind of memory holds something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Our own; stays until the end.
    Own,
    /// Pages of a mapped file that every token reads; they must stay in memory.
    Mapped,
    /// Pages of a mapped file of which little is read; the system drops and rereads them at will.
    Dropped,
    /// Memory of an OpenCL device, which is the machine's where that is unified.
    Device,
    /// Address space of which little is touched. Only the limits of the process count it.
    Reserved,
}

impl Kind {
    /// The word in the table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Own => "own",
            Kind::Mapped => "mapped",
            Kind::Dropped => "mapped, may be dropped",
            Kind::Device => "device",
            Kind::Reserved => "address space",
        }
    }
}

/// One line of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// What it is.
    pub what: String,
    /// Its size.
    pub bytes: u64,
    /// Where it is.
    pub kind: Kind,
}

/// How the weights lie on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A packed file, mapped.
    Packed,
    /// A checkpoint: matrices are quantised into memory, or used as mapped with [`WeightType::F32`].
    Checkpoint,
    /// Nothing found; sizes are those of a packed file with 16-bit embeddings.
    Assumed,
}

/// The program where the system does not tell how large it is.
const PROGRAM: u64 = 8 << 20;
/// What it needs before a model is loaded: libraries, allocator.
const LIBRARIES: u64 = 2 << 20;
/// The libraries of an OpenCL device.
const DRIVER: u64 = 14 << 20;
/// Peak memory of loading a tokenizer for each byte of its file, beside [`WORDS`]: 17 in all were measured with a file
/// of 0.3 MB, 12 with one of 3 MB.
const TOKENIZER: u64 = 13;
/// The library's cache of words.
const WORDS: u64 = 3 << 19;
/// What the C library reserves where a thread allocates.
const HEAP: u64 = 64 << 20;
/// Small things that nobody counts: the stacks on which threads handle signals, buffers, fragments.
const SMALL: u64 = 4 << 20;
/// For each slot: its token id, and the text of a prompt that fills the context, at four bytes a token, with 8 bytes to
/// encode each of them.
const TEXT_PER_SLOT: u64 = 8 + 4 * 9;
/// Encoding a text at once, which takes 130 bytes a byte; a long one is encoded in parts.
const ENCODING: u64 = 4 << 20;
/// The same for a short one, by its slots.
const ENCODING_PER_SLOT: u64 = 4 * 130;

/// What a run will take.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The options it is for, threads resolved.
    pub options: EngineOptions,
    /// How the weights lie on disk.
    pub form: Form,
    /// The machine.
    pub memory: Memory,
    /// The fingerprint of the weights' files; empty while there are none.
    pub model_id: String,
    weights: WeightBytes,
    /// Bytes of the program itself.
    program: u64,
    tokenizer_file: u64,
    /// Buffers that hold the logits of [`ROWS`] tokens.
    row_blocks: usize,
    /// Bytes that the rows of all sequences may fill together, where not all of them can be full.
    shared_rows: Option<u64>,
    /// Bytes for requests and answers under way, where a server runs.
    requests: u64,
    /// The device's memory, when one runs the model.
    device: Option<DeviceMemory>,
}

/// Where a device's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceMemory {
    /// The machine's; also where no device could be asked.
    Unified,
    /// Its own, so many bytes.
    Own(u64),
}

impl DeviceMemory {
    fn of(options: &EngineOptions) -> Option<Self> {
        if options.backend == BackendKind::Cpu {
            return None;
        }
        match opencl::facts_of(options.cl_device.as_deref()) {
            None if options.backend == BackendKind::Auto => None,
            Some(facts) if !facts.unified_memory => Some(DeviceMemory::Own(facts.global_memory)),
            _ => Some(DeviceMemory::Unified),
        }
    }
}

impl Plan {
    /// The plan for a model that is there. Reads headers only.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        Self::of(&ModelPath::new(&options.model)?.open(options.weight_type)?, options)
    }

    /// The plan for an opened model.
    ///
    /// # Errors
    ///
    /// `Usage` if the environment gives the machine's memory and it is no number.
    pub fn of(model: &OpenModel, options: &EngineOptions) -> Result<Self> {
        let mut options = options.clone();
        options.weight_type = model.weight_type;
        let mut plan = Self::with(options, WeightBytes::of(model), &model.path.dir)?;
        plan.form = if model.checkpoint.packed().is_some() { Form::Packed } else { Form::Checkpoint };
        if let Some(gguf) = model.gguf() {
            plan.tokenizer_file = gguf.header_len() as u64;
        }
        Ok(Self { model_id: model.checkpoint.fingerprint(), ..plan })
    }

    /// The plan for a packed file of the baked model that is not there yet.
    pub fn assumed(options: &EngineOptions) -> Result<Self> {
        let mut options = options.clone();
        if options.weight_type == WeightType::Auto {
            options.weight_type = WeightType::Q4_0;
        }
        let dir = options.model.clone();
        Self::with(options, WeightBytes::assumed(), &dir)
    }

    fn with(mut options: EngineOptions, weights: WeightBytes, dir: &Path) -> Result<Self> {
        if options.threads == 0 {
            options.threads = numeric::topology::default_threads();
        }
        let tokenizer_file = Folder::of(dir)?.len_of("tokenizer.json").unwrap_or(0);
        let memory = Memory::to_plan_with()?;
        let device = DeviceMemory::of(&options);
        let (form, model_id) = (Form::Assumed, String::new());
        let program = add(system::program_bytes().unwrap_or(PROGRAM), LIBRARIES);
        Ok(Self {
            options,
            form,
            memory,
            model_id,
            weights,
            program,
            tokenizer_file,
            row_blocks: 0,
            shared_rows: None,
            requests: 0,
            device,
        })
    }

    /// The same plan, with `blocks` buffers for the logits of every token.
    pub fn with_rows(mut self, blocks: usize) -> Self {
        self.row_blocks = blocks;
        self
    }

    /// Bytes of the rows of all sequences: in layers that see all, and in local ones.
    fn rows(&self, slots: usize) -> [u64; 2] {
        let (o, chunk) = (&self.options, self.chunk(slots));
        let [all, local] =
            ring(o, chunk).bytes(o.kv_types, slots).map(|bytes| mul(bytes, o.sequences() as u64));
        match self.shared_rows {
            // Never less than those of one sequence.
            Some(most) => [all.min(most.saturating_sub(local).max(all / o.sequences() as u64)), local],
            None => [all, local],
        }
    }

    /// Most tokens of a pass.
    fn chunk(&self, slots: usize) -> usize {
        placement::chunk_in(&self.options, slots)
    }

    /// Its lines, for the context asked for.
    pub fn items(&self) -> Vec<Item> {
        self.items_for(self.options.max_seq_len)
    }

    /// Whether CPU and device have the same memory and use it so.
    fn is_shared(&self) -> bool {
        self.options.zero_copy && self.device == Some(DeviceMemory::Unified)
    }

    fn items_for(&self, slots: usize) -> Vec<Item> {
        let o = &self.options;
        let put = |what: &str, bytes: u64, kind: Kind| Item { what: what.into(), bytes, kind };
        let (batch, chunk) = (o.sequences(), self.chunk(slots));
        let all_slots = mul(slots as u64, batch as u64);
        let ring = ring(o, chunk);
        let [of_all, of_local] = self.rows(slots);
        let vocab = VOCAB as u64;
        // Of the session, of the sampler's input and of its ranking.
        let logits = mul(mul(vocab, 4 + 4 + 16), batch as u64);
        // Drafts of all sequences fit into one pass.
        let drafted = if o.draft > 0 { mul(o.draft.min(chunk / batch) as u64 + 1, batch as u64) } else { 0 };
        let rows = add(mul(self.row_blocks as u64, ROWS.min(chunk) as u64), drafted);
        let cpu_scratch = scratch(slots, chunk);
        let both = self.device.is_some() && matches!(o.backend, BackendKind::Hybrid | BackendKind::Auto);
        let (there, scratch) = match (self.device, if o.gpu_attn || both { batch } else { 1 }) {
            (None, _) => (Kind::Own, cpu_scratch),
            (_, attended) => (Kind::Device, device_scratch(slots.max(ring.rows(slots)), chunk, attended)),
        };
        // The CPU attends over mapped memory; a device's own memory cannot be mapped.
        let of_attention = if o.gpu_attn || both { there } else { Kind::Own };
        // Shared weights are counted once, as the device's.
        let copied = |bytes: u64| if self.is_shared() { 0 } else { bytes };
        let on_device = if self.device.is_some() { self.weights.device } else { 0 };
        let caches = match batch {
            1 => format!("KV cache, {} x {slots} slots", o.kv_types),
            n => format!("KV caches of {n} prompts, {} x {slots} slots", o.kv_types),
        };
        let calibration = self.calibration();
        let encoding = mul(slots as u64, ENCODING_PER_SLOT).min(ENCODING);
        let mut items = vec![
            put("weights", copied(self.weights.own), Kind::Own),
            put("weights", copied(self.weights.mapped), Kind::Mapped),
            put("weights", on_device, Kind::Device),
            put("embedding", self.weights.dropped, Kind::Dropped),
            put("calibration", calibration, Kind::Own),
            put(&caches, of_all, of_attention),
            put(&of_rings(o, ring.rows(slots)), of_local, of_attention),
            put("rows of sequences that have ended", o.prefix_cache, Kind::Own),
            put(&format!("scratch for {chunk} tokens"), scratch, there),
            put("attention mass", mass(o, slots, chunk), of_attention),
            put("logits", add(logits, mul(rows, mul(vocab, 4))), Kind::Own),
            put("tokens and text", add(mul(all_slots, TEXT_PER_SLOT), encoding), Kind::Own),
            put("tokenizer", self.tokenizer(), Kind::Own),
            put("requests and answers", self.of_requests(), Kind::Own),
            put(&format!("{} threads", o.threads), mul(o.threads as u64, cpu::thread_bytes()), Kind::Own),
            put("program", self.program, Kind::Own),
            put("stacks", self.stacks(), Kind::Reserved),
        ];
        if both {
            items.push(put("attention mass once more, for the CPU", mass(o, slots, chunk), Kind::Own));
            items.push(put("KV cache once more, for the CPU", copied(add(of_all, of_local)), Kind::Own));
            items.push(put(&format!("scratch for {chunk} tokens, the CPU's"), cpu_scratch, Kind::Own));
        }
        if self.device.is_some() {
            items.push(put("calibration", calibration, Kind::Device));
            items.push(put("slots that an eviction leaves", evicted(o, slots), of_attention));
            let attention = if o.gpu_attn || both { 0 } else { host_attention(slots, chunk) };
            let landing = if self.is_apart() { opencl::logits_bytes(chunk) as u64 } else { 0 };
            let host = add(attention, add(host_state(chunk), add(landing, DRIVER)));
            items.push(put("host's part of the device's work", host, Kind::Own));
        }
        items.into_iter().filter(|i| i.bytes > 0).collect()
    }

    /// Whether a device runs the model that has memory of its own.
    fn is_apart(&self) -> bool {
        matches!(self.device, Some(DeviceMemory::Own(_)))
    }

    fn need_for(&self, slots: usize) -> u64 {
        let apart = self.is_apart();
        let counts = |i: &&Item| match i.kind {
            Kind::Own | Kind::Mapped => true,
            Kind::Dropped | Kind::Reserved => false,
            Kind::Device => !apart,
        };
        sum(self.items_for(slots).iter().filter(counts))
    }

    /// Bytes of an OpenCL device.
    pub fn on_device(&self) -> u64 {
        sum(self.items().iter().filter(|i| i.kind == Kind::Device))
    }

    /// Bytes that must fit.
    pub fn need(&self) -> u64 {
        self.need_for(self.options.max_seq_len)
    }

    /// Bytes of one sequence: its cache, buffers and threads. Each further one needs as much again.
    pub fn session(&self) -> u64 {
        let shared = [self.weights.mapped, self.calibration(), self.tokenizer(), self.program];
        self.need().saturating_sub(shared.into_iter().fold(self.weights.own, add))
    }

    /// An upper bound of the resident set, mapped pages included.
    pub fn peak(&self) -> u64 {
        // While loading, the cache and the buffers are not there yet, but one stored tensor is, or what the calibration is
        // computed with.
        let calibrating = if self.calibration() > 0 { calibration::pass_bytes() } else { 0 };
        let passing = self.weights.passing.max(calibrating);
        let loading = [self.weights.own, self.weights.mapped, self.weights.dropped, passing];
        let loading = loading.into_iter().fold(self.program, add);
        loading.max(sum(self.items().iter().filter(|i| i.kind != Kind::Reserved)))
    }

    /// What keys of a rotated type are calibrated with.
    fn calibration(&self) -> u64 {
        if self.options.kv_types.k.rotated() { Calibration::BYTES as u64 } else { 0 }
    }

    /// Loading the tokenizer.
    fn tokenizer(&self) -> u64 {
        if self.tokenizer_file == 0 { 0 } else { add(WORDS, mul(self.tokenizer_file, TOKENIZER)) }
    }

    /// Stacks of all threads: of the passes, of loading the tokenizer, of signals.
    fn stacks(&self) -> u64 {
        let team = mul(self.options.threads as u64, pool::STACK as u64);
        add(team, containment::STACK as u64 + SMALL + self.server_threads() * server::STACK)
    }

    /// What is still to be mapped, for `slots` slots: memory to be written, and in all. The model's files are mapped
    /// before there is a plan.
    fn to_map(&self, slots: usize) -> (u64, u64) {
        let own = self.need_for(slots).saturating_sub(add(self.weights.mapped, self.program));
        let data = add(own, add(self.stacks(), SMALL));
        (data, add(data, mul(self.options.threads as u64 + 2 + self.server_threads(), HEAP)))
    }

    /// The longest context that fits in `memory`; `None` when not even the model does. At most 2^24.
    pub fn longest(&self, memory: u64) -> Option<usize> {
        longest_where(|slots| self.need_for(slots) <= memory)
    }
}

/// The largest number of slots that `fits`; at most 2^24. Every smaller number must fit too.
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

/// What local layers' part of a cache is called.
fn of_rings(o: &EngineOptions, rows: usize) -> String {
    format!("KV cache of local layers, {} x {rows} rows", o.kv_types)
}

/// How many rows local layers keep, with passes of `chunk` tokens.
fn ring(o: &EngineOptions, chunk: usize) -> Ring {
    let ring = Ring::new(chunk);
    if o.eviction.policy == Policy::None { ring } else { ring.outlasting() }
}

/// `1.5 MiB`, as in all messages.
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

fn mul(a: u64, b: u64) -> u64 {
    a.saturating_mul(b)
}

fn sum<'a>(items: impl IntoIterator<Item = &'a Item>) -> u64 {
    items.into_iter().fold(0, |sum, i| add(sum, i.bytes))
}

/// Scratch of the backend. Numbers so large that they cannot fit anyway are cut before they overflow.
fn scratch(slots: usize, chunk: usize) -> u64 {
    const MOST: usize = usize::MAX >> 28;
    cpu::scratch_bytes(slots.min(MOST), chunk.min(MOST >> 8)) as u64
}

/// The same on an OpenCL device, with the parts of attention of a token each of some sequences.
fn device_scratch(slots: usize, chunk: usize, sequences: usize) -> u64 {
    const MOST: usize = usize::MAX >> 32;
    let slots = slots.min(MOST);
    add(opencl::scratch_bytes(chunk.min(MOST >> 8)) as u64, opencl::parts_bytes(slots, sequences) as u64)
}

/// What observing attention takes, for the policies that look at it.
fn mass(o: &EngineOptions, slots: usize, chunk: usize) -> u64 {
    const MOST: usize = usize::MAX >> 28;
    match o.eviction.policy {
        Policy::None | Policy::Sliding => 0,
        Policy::SnapKv | Policy::H2o => {
            let slots = mul(cpu::mass_bytes(slots.min(MOST)) as u64, o.sequences() as u64);
            add(slots, cpu::notes_bytes(chunk.min(MOST >> 8)) as u64)
        }
    }
}

/// What a device is told at evictions.
fn evicted(o: &EngineOptions, slots: usize) -> u64 {
    match o.eviction.policy {
        Policy::None => 0,
        _ => opencl::list_bytes(slots.min(usize::MAX >> 32)) as u64,
    }
}

/// What is sent to a device for some tokens: the host's copy, and the one that the driver stages.
fn host_state(chunk: usize) -> u64 {
    mul(chunk as u64, 8 * (DIM + HEAD_DIM) as u64)
}

/// Attention on the host: its input, its output, new rows and its parts.
fn host_attention(slots: usize, chunk: usize) -> u64 {
    let token = 4 * (Q_DIM + KV_DIM + opencl::QKV) as u64;
    add(mul(chunk as u64, token), scratch(slots, 0))
}

#[cfg(test)]
mod tests;
