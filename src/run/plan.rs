//! The memory plan, before anything is allocated: what the model, its cache and its buffers will take,
//! and whether the machine has that much.
//!
//! Two sums matter. *Need* must fit, or the program would be killed or crawl: all memory of our own, and
//! the mapped weights that every token reads. *Peak* bounds the resident set that the system reports; it
//! also counts mapped pages that can be dropped at any time.

mod advice;

pub use advice::{Context, check_apart, check_sharing};

use crate::dims::*;
use crate::model::cpu;
use crate::model::weights::{
    Checkpoint, ModelPath, Role, Spec, Storage as Kept, WeightType, convert, pack, table,
};
use crate::opencl;
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::session::ROWS;
use crate::run::system::Memory;
use files::packed_file;
use files::source::gguf::block::BlockType;
use files::source::{Dtype, Source};
use files::{Error, Result};
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
}

impl Kind {
    /// The word in the table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Own => "own",
            Kind::Mapped => "mapped",
            Kind::Dropped => "mapped, may be dropped",
            Kind::Device => "device",
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
    /// A checkpoint: matrices are quantised into memory, or used as mapped with `--weight-type f32`.
    Checkpoint,
    /// Nothing found; sizes are those of a packed file with 16-bit embeddings.
    Assumed,
}

/// Bytes of the weights, by where they will be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WeightBytes {
    form: Form,
    own: u64,
    mapped: u64,
    dropped: u64,
    /// On an OpenCL device: matrices padded to whole groups of rows, vectors.
    device: u64,
    /// The largest stored tensor that is read, quantised and dropped again while loading.
    passing: u64,
}

/// Executable, libraries, allocator and what else is there before a model.
const PROGRAM: u64 = 24 << 20;
/// Peak memory of loading a tokenizer for each byte of its file: 19 were measured with a file of 0.3 MB,
/// 12 with one of 3 MB; the rest is for the library's cache of words.
const TOKENIZER: u64 = 24;
/// For each slot: its token id, and encoding the text of a prompt that fills the context, at about a
/// hundred bytes a byte of text and four bytes a token.
const TEXT_PER_SLOT: u64 = 8 + 400;

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
    tokenizer_file: u64,
    /// Buffers that hold the logits of [`ROWS`] tokens.
    row_blocks: usize,
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
        let facts = opencl::device::devices().ok().and_then(|found| {
            let index = opencl::device::choose(found, options.cl_device.as_deref()).ok()?;
            Some(&found[index].facts)
        });
        match facts {
            None if options.backend == BackendKind::Auto => None,
            Some(facts) if !facts.unified_memory => Some(DeviceMemory::Own(facts.global_memory)),
            _ => Some(DeviceMemory::Unified),
        }
    }
}

/// What `auto` comes to where there is no device, or no memory for two: the CPU alone, after one line.
///
/// # Errors
///
/// Those of [`Plan::new`].
pub fn settle(mut options: EngineOptions) -> Result<EngineOptions> {
    if options.backend == BackendKind::Auto {
        let plan = Plan::new(&options)?;
        let why = match (plan.device, plan.check()) {
            (None, _) => "no OpenCL device (doctor says why)".into(),
            (_, Err(Error::Memory(why))) => why,
            _ => return Ok(options),
        };
        (options.notice)(&format!("auto: {why}; using the CPU"));
        options.backend = BackendKind::Cpu;
    }
    Ok(options)
}

impl Plan {
    /// The plan for a model that is there. Reads headers only.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        let path = ModelPath::new(&options.model)?;
        let model = path.open(options.weight_type)?;
        let opened = &model.checkpoint;
        let options = &EngineOptions { weight_type: model.weight_type, ..options.clone() };
        let weights = match opened.packed() {
            Some(source) => packed(source),
            None => checkpoint(opened, options.weight_type),
        };
        let mut plan = Self::with(options, weights, &path.dir)?;
        if let Some(gguf) = model.gguf() {
            plan.tokenizer_file = gguf.header_len() as u64;
        }
        Ok(Self { model_id: opened.fingerprint(), ..plan })
    }

    /// The plan for a packed file of the baked model that is not there yet.
    pub fn assumed(options: &EngineOptions) -> Result<Self> {
        let weight_type = match options.weight_type {
            WeightType::Auto => WeightType::Q4_0,
            other => other,
        };
        let options = &EngineOptions { weight_type, ..options.clone() };
        let sizes = |role| {
            let of_role = table().into_iter().filter(move |s| s.role == role);
            of_role.fold(0, |sum, s| add(sum, if role == Role::Matrix { matrix(&s) } else { dense(&s, 2) }))
        };
        let weights = WeightBytes {
            form: Form::Assumed,
            own: mul(2, sizes(Role::Vector)),
            mapped: sizes(Role::Matrix),
            dropped: sizes(Role::Embedding),
            device: table().iter().fold(0, |sum, s| add(sum, on_device(s, assumed_form(s)))),
            passing: 0,
        };
        Self::with(options, weights, &options.model)
    }

    fn with(options: &EngineOptions, weights: WeightBytes, dir: &Path) -> Result<Self> {
        let mut options = options.clone();
        if options.threads == 0 {
            options.threads = numeric::topology::default_threads();
        }
        let tokenizer_file = std::fs::metadata(dir.join("tokenizer.json")).map_or(0, |m| m.len());
        let (form, memory) = (weights.form, Memory::to_plan_with()?);
        let device = DeviceMemory::of(&options);
        let model_id = String::new();
        Ok(Self { options, form, memory, model_id, weights, tokenizer_file, row_blocks: 0, device })
    }

    /// The same with the logits of every token besides, in `blocks` buffers.
    pub fn with_rows(mut self, blocks: usize) -> Self {
        self.row_blocks = blocks;
        self
    }

    /// Its lines, for the context asked for.
    pub fn items(&self) -> Vec<Item> {
        self.items_for(self.options.max_seq_len)
    }

    fn items_for(&self, slots: usize) -> Vec<Item> {
        let o = &self.options;
        let put = |what: &str, bytes: u64, kind: Kind| Item { what: what.into(), bytes, kind };
        let batch = o.sequences();
        let chunk = o.prefill_chunk.clamp(1, slots.max(1)).max(batch);
        let all_slots = mul(slots as u64, batch as u64);
        let vocab = VOCAB as u64;
        // Of the session, of the sampler's input and of its ranking.
        let logits = mul(mul(vocab, 4 + 4 + 16), batch as u64);
        let drafted = if o.draft > 0 { o.draft as u64 + 1 } else { 0 };
        let rows = add(mul(self.row_blocks as u64, ROWS.min(chunk) as u64), drafted);
        let cpu_scratch = scratch(slots, chunk);
        let (there, scratch) = match self.device {
            None => (Kind::Own, cpu_scratch),
            Some(_) => (Kind::Device, device_scratch(slots, chunk)),
        };
        let both = self.device.is_some() && matches!(o.backend, BackendKind::Hybrid | BackendKind::Auto);
        let apart = self.is_apart();
        // What the CPU attends over is mapped, and a memory of the device's own is not.
        let of_attention = if o.gpu_attn || both { there } else { Kind::Own };
        // Shared weights are the device's alone.
        let shared = o.zero_copy && self.device == Some(DeviceMemory::Unified);
        let copied = |bytes: u64| if shared { 0 } else { bytes };
        let on_device = if self.device.is_some() { self.weights.device } else { 0 };
        let caches = match batch {
            1 => format!("KV cache, {} x {slots} slots", o.kv_types),
            n => format!("KV caches of {n} prompts, {} x {slots} slots", o.kv_types),
        };
        let mut items = vec![
            put("weights", copied(self.weights.own), Kind::Own),
            put("weights", copied(self.weights.mapped), Kind::Mapped),
            put("weights", on_device, Kind::Device),
            put("embedding", self.weights.dropped, Kind::Dropped),
            put(&caches, mul(all_slots, slot_bytes(o)), if apart { of_attention } else { there }),
            put(&format!("scratch for {chunk} tokens"), scratch, there),
            put("attention mass", mass(o, slots, chunk), of_attention),
            put("logits", add(logits, mul(rows, mul(vocab, 4))), Kind::Own),
            put("tokens and text", mul(all_slots, TEXT_PER_SLOT), Kind::Own),
            put("tokenizer", mul(self.tokenizer_file, TOKENIZER), Kind::Own),
            put(&format!("{} threads", o.threads), mul(o.threads as u64, thread_bytes()), Kind::Own),
            put("program", PROGRAM, Kind::Own),
        ];
        if both {
            items.push(put("attention mass once more, for the CPU", mass(o, slots, chunk), Kind::Own));
            let cache = copied(mul(all_slots, slot_bytes(o)));
            items.push(put("KV cache once more, for the CPU", cache, Kind::Own));
            items.push(put(&format!("scratch for {chunk} tokens, the CPU's"), cpu_scratch, Kind::Own));
        }
        if self.device.is_some() {
            let attention = if o.gpu_attn || both { 0 } else { host_attention(slots, chunk) };
            let landing = if apart { opencl::logits_bytes(chunk) as u64 } else { 0 };
            let host = add(attention, add(host_state(chunk), landing));
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
        let counts = |i: &&Item| i.kind != Kind::Dropped && !(apart && i.kind == Kind::Device);
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
        let shared = [self.weights.mapped, mul(self.tokenizer_file, TOKENIZER), PROGRAM];
        self.need().saturating_sub(shared.into_iter().fold(self.weights.own, add))
    }

    /// An upper bound of the resident set, mapped pages included.
    pub fn peak(&self) -> u64 {
        // While loading, the cache and the buffers are not there yet, but one stored tensor is.
        let loading = [self.weights.own, self.weights.mapped, self.weights.dropped, self.weights.passing];
        let loading = loading.into_iter().fold(PROGRAM, add);
        loading.max(sum(&self.items()))
    }

    /// The longest context that fits in `memory`; `None` when not even the model does. At most 2^24.
    pub fn longest(&self, memory: u64) -> Option<usize> {
        longest_where(|slots| self.need_for(slots) <= memory)
    }
}

/// The largest number of slots that `fits`, which every smaller number does too; at most 2^24.
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

/// Bytes of one slot of the cache.
fn slot_bytes(o: &EngineOptions) -> u64 {
    o.kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as u64
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

/// The same on an OpenCL device, with the parts of one token's attention.
fn device_scratch(slots: usize, chunk: usize) -> u64 {
    const MOST: usize = usize::MAX >> 28;
    let slots = slots.min(MOST);
    add(opencl::scratch_bytes(chunk.min(MOST >> 8)) as u64, opencl::parts_bytes(slots) as u64)
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

/// What is sent to a device for some tokens: written, and staged.
fn host_state(chunk: usize) -> u64 {
    mul(chunk as u64, 8 * (DIM + HEAD_DIM) as u64)
}

/// Attention on the host: its input, its output and its parts.
fn host_attention(slots: usize, chunk: usize) -> u64 {
    let token = 4 * (Q_DIM + opencl::QKV) as u64;
    add(mul(chunk as u64, token), scratch(slots, 0))
}

/// Bytes of a tensor on an OpenCL device: rows of elements are padded to whole groups.
fn on_device(spec: &Spec, form: Kept) -> u64 {
    let padded = |n: usize| n.next_multiple_of(16) as u64;
    match (spec.role, form) {
        (Role::Embedding, _) => 0,
        (Role::Matrix, Kept::Rows(block)) => {
            mul(mul(padded(spec.rows), spec.cols as u64), block.bytes() as u64)
        }
        (Role::Matrix, _) => kept(spec, form),
        (Role::Vector, _) if spec.name.ends_with("_proj.bias") => mul(padded(spec.cols), 4),
        (Role::Vector, _) => dense(spec, 4),
    }
}

/// Bytes of a tensor in this form.
fn kept(spec: &Spec, form: Kept) -> u64 {
    form.parts(spec).iter().fold(0, |sum, part| add(sum, part.len as u64))
}

/// What a packed file has by default of a model in 16 bits.
fn assumed_form(spec: &Spec) -> Kept {
    Kept::of(spec, BlockType::F16, WeightType::Q4_0)
}

/// What a thread touches of its stack: tiles of attention and of the widest row, and room to call.
fn thread_bytes() -> u64 {
    let attention = cpu::attention::task_bytes();
    (attention + 4 * (FFN_DIM + DIM + Q_DIM) + (256 << 10)) as u64
}

fn dense(spec: &Spec, size: usize) -> u64 {
    mul(mul(spec.rows as u64, spec.cols as u64), size as u64)
}

/// Bytes of a matrix once packed; as 16-bit floats where it cannot be.
fn matrix(spec: &Spec) -> u64 {
    kept(spec, assumed_form(spec))
}

/// A packed file: all is mapped, vectors are copied.
fn packed(source: &Source) -> WeightBytes {
    let all = source.tensors().fold(0, |sum, t| add(sum, t.data.bytes().len() as u64));
    let of_role = |role| table().into_iter().filter(move |s| s.role == role);
    let dropped = of_role(Role::Embedding)
        .map(|s| s.name)
        .chain([packed_file::GGUF.to_owned()])
        .filter_map(|name| source.get(&name))
        .fold(0, |sum, t| add(sum, t.data.bytes().len() as u64));
    let own = of_role(Role::Vector).fold(0, |sum, s| add(sum, dense(&s, 4)));
    let forms = pack::storages(source);
    let device = table().iter().zip(forms).fold(0, |sum, (s, form)| add(sum, on_device(s, form)));
    WeightBytes { form: Form::Packed, own, mapped: all.saturating_sub(dropped), dropped, device, passing: 0 }
}

/// A checkpoint: what is converted becomes ours, the rest stays mapped.
fn checkpoint(opened: &Checkpoint, weight_type: WeightType) -> WeightBytes {
    let mut bytes =
        WeightBytes { form: Form::Checkpoint, own: 0, mapped: 0, dropped: 0, device: 0, passing: 0 };
    for spec in table() {
        // A tensor that is missing or wrong is loading's to report.
        let stored = opened.find(&spec).ok();
        let form = Kept::of(&spec, stored.as_ref().map_or(BlockType::F32, |t| t.block), weight_type);
        let converted = stored.as_ref().is_none_or(|t| convert::is_converted(t, form));
        bytes.device = add(bytes.device, on_device(&spec, form));
        match spec.role {
            Role::Vector => bytes.own = add(bytes.own, dense(&spec, 4)),
            Role::Embedding => bytes.dropped = add(bytes.dropped, kept(&spec, form)),
            Role::Matrix if converted => {
                bytes.own = add(bytes.own, kept(&spec, form));
                let stored = stored.map_or(dense(&spec, Dtype::F32.size()), |t| t.data.bytes().len() as u64);
                bytes.passing = bytes.passing.max(stored.min(convert::WINDOW as u64));
            }
            Role::Matrix => bytes.mapped = add(bytes.mapped, kept(&spec, form)),
        }
    }
    bytes
}

#[cfg(test)]
mod tests;
