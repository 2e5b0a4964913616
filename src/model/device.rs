//! The seam between a sequence and the device that runs the model.
//!
//! A device owns the weights and the buffers of a pass, never a sequence. A pass takes *runs*: some tokens of one
//! sequence each, with its cache. One token of eight sequences, a prompt of 500, eight drafted tokens: all are runs of
//! one pass, which reads the weights once, and each gets the bits that it would get alone.

use crate::dims::{GLOBAL_LAYERS, HEAD_DIM, KV_HEADS, LOCAL_LAYERS, WINDOW, is_local};
use crate::trace::Trace;
use files::Result;
pub use numeric::cancel::CancelToken;
use numeric::kv::KvTypes;
use numeric::pool::Pool;
use std::any::Any;
use std::ops::{DerefMut, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where a pass writes the logits of a run.
pub enum Logits<'a> {
    /// Nowhere: the tokens only fill the cache.
    None,
    /// Of the last token: `[VOCAB]`.
    Last(&'a mut [f32]),
    /// Of every token: `[tokens][VOCAB]`.
    All(&'a mut [f32]),
}

/// Memory for the logits of one token: `[VOCAB]`.
pub type Row = Box<dyn DerefMut<Target = [f32]> + Send>;

/// Some tokens of one sequence in a pass.
pub struct Run<'a> {
    /// The sequence's cache, made by the device of the pass, or one whose rows that device can reach
    /// ([`Cache::host`]). The tokens take the slots after the filled ones, which must be free.
    pub cache: &'a mut dyn Cache,
    /// At least one; ids below `VOCAB`.
    pub tokens: &'a [u32],
    /// Position of the first token; the others follow.
    pub pos: usize,
    /// Tokens of the sequence that are known: up to the end of a prompt of which this is a part. Models that rotate
    /// otherwise in long sequences do so from the start of a long prompt on.
    pub known: usize,
    /// Which logits are wanted.
    pub logits: Logits<'a>,
    /// How many of the tokens, the last ones, add their attention to the mass of the slots that they see; 0 is none.
    /// The cache must have room for the mass: [`Cache::write_mass`] has been called once.
    pub observe: usize,
}

impl<'a> Run<'a> {
    /// A run whose attention is not observed.
    pub fn new(cache: &'a mut dyn Cache, tokens: &'a [u32], pos: usize, logits: Logits<'a>) -> Self {
        Self { cache, tokens, pos, known: 0, logits, observe: 0 }
    }
}

/// A device that several sequences use in turn, or in one pass.
pub type SharedDevice = Arc<Mutex<dyn Device>>;

/// Locks a device for a pass.
pub fn locked(device: &SharedDevice) -> MutexGuard<'_, dyn Device + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What runs passes: the model's weights on one device, and the buffers of a pass.
pub trait Device: Send {
    /// Device and instruction set, for reports.
    fn name(&self) -> String;

    /// Most tokens of one pass, all runs together.
    fn max_tokens(&self) -> usize;

    /// An empty cache of `slots` slots.
    ///
    /// # Errors
    ///
    /// `Memory` where there is no room for it.
    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn Cache>>;

    /// Memory to which passes write the logits of a token without a copy; `None` where `now` is as good. A device that is
    /// lost may write to it still.
    fn row(&mut self, _now: &[f32]) -> Option<Row> {
        None
    }

    /// Threads that have nothing to do between passes.
    fn pool(&self) -> Option<&Pool> {
        None
    }

    /// Computes one pass: the tokens of every run join its cache, and the logits asked for are written.
    ///
    /// Allocates nothing, but for the first pass with a cache that is longer than all before, and the first observed one.
    ///
    /// # Errors
    ///
    /// `Interrupted` soon after `cancel` is cancelled, `Device` where the device is lost; then none of the tokens
    /// counts. A pass with an observed run is completed: what slots received of half of it could not be taken back.
    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()>;

    /// Turns step timing and layer digests on, or off, which also hands back the trace.
    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace>;
}

/// Shape of a cache, and how much of it is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Element types of the rows.
    pub types: KvTypes,
    /// Slots of a head in layers that see all.
    pub slots: usize,
    /// Rows of a head in local layers: see [`Ring`].
    pub ring: usize,
    /// Filled slots: the first ones.
    pub len: usize,
}

impl Extent {
    /// Rows of a head of a layer.
    pub fn rows(&self, layer: usize) -> usize {
        if is_local(layer) { self.ring } else { self.slots }
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        let bytes = |layers, rows| self.types.slot_bytes(layers, KV_HEADS, HEAD_DIM) * rows;
        bytes(GLOBAL_LAYERS, self.slots) + bytes(LOCAL_LAYERS, self.ring)
    }

    /// Whether there is room for `tokens` tokens of one pass, the first at position `pos`.
    pub fn has_room(&self, pos: usize, tokens: usize) -> bool {
        let ring = LOCAL_LAYERS == 0 || pos + tokens <= self.ring || WINDOW + tokens + CHUNK <= self.ring;
        ring && self.len + tokens <= self.slots
    }
}

/// Slots of a chunk of attention.
pub const CHUNK: usize = 128;

/// How many rows of a head a local layer keeps.
///
/// Its rows are the latest positions', whatever is evicted from the slots of the others. That of position `p` lies in
/// row `p` modulo their number, which is the window, the tokens of the longest pass and a chunk of attention, in whole
/// chunks: so the rows of a chunk lie next to each other, and no pass writes into a chunk that it reads. As many tokens
/// as a pass has can be taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    most: usize,
    outlasts: bool,
}

impl Ring {
    /// For passes of at most `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        let most = WINDOW.saturating_add(tokens.saturating_add(CHUNK)).min(usize::MAX >> 4);
        Self { most: if LOCAL_LAYERS != 0 { most.next_multiple_of(CHUNK) } else { 0 }, outlasts: false }
    }

    /// For sequences that have more positions than the cache has slots: see [`Cache::outlast`].
    pub fn outlasting(self) -> Self {
        Self { outlasts: true, ..self }
    }

    /// Rows of a head beside `slots` slots in the other layers: as many at most, where sequences end with the slots.
    pub fn rows(self, slots: usize) -> usize {
        if self.outlasts { self.most } else { self.most.min(slots) }
    }

    /// Bytes of a cache of `slots` slots: of the layers that see all, and of the local ones.
    pub fn bytes(self, types: KvTypes, slots: usize) -> [u64; 2] {
        let bytes = |layers, rows: usize| {
            (types.slot_bytes(layers, KV_HEADS, HEAD_DIM) as u64).saturating_mul(rows as u64)
        };
        [bytes(GLOBAL_LAYERS, slots), bytes(LOCAL_LAYERS, self.rows(slots))]
    }
}

/// Bytes of the rows that a token reads over `slots` filled slots.
pub fn read_bytes(types: KvTypes, slots: f64) -> f64 {
    let bytes = |layers| types.slot_bytes(layers, KV_HEADS, HEAD_DIM) as f64;
    bytes(GLOBAL_LAYERS) * slots + bytes(LOCAL_LAYERS) * slots.min(WINDOW as f64)
}

/// Where the rows of `slots`, or of positions in a local layer, lie among the `rows` of a head: runs of neighbours, in
/// order, each as the first row and how many.
pub fn pieces(slots: Range<usize>, rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = slots.start;
    std::iter::from_fn(move || {
        let at = next % rows.max(1);
        let n = slots.end.saturating_sub(next).min(rows - at);
        next += n;
        (n > 0).then_some((at, n))
    })
}

/// The K and V rows of one sequence, in the memory of the device that made it.
///
/// In layers that see all, rows are addressed by slot; in local layers by position, and only the latest are there: see
/// [`Ring`]. Mass and [`Cache::keep`] are for the former alone.
pub trait Cache: Any + Send {
    /// Its shape.
    fn extent(&self) -> Extent;

    /// Sets the number of filled slots: rewinds, or makes rows just written count. Slots filled this way have no mass.
    fn set_len(&mut self, len: usize);

    /// Changes the number of slots. Filled slots keep their rows.
    ///
    /// # Errors
    ///
    /// `Usage` below the filled slots, `Memory`; then nothing has changed.
    fn resize(&mut self, slots: usize) -> Result<()>;

    /// Makes room in local layers for sequences that have more positions than there are slots, as after evictions.
    ///
    /// # Errors
    ///
    /// `Memory`; then nothing has changed.
    fn outlast(&mut self) -> Result<()>;

    /// Moves the rows (and the mass) of `slots`, which ascend, of one layer and KV head to slots `0..`.
    /// [`Cache::set_len`] follows once every head of every layer keeps as many.
    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()>;

    /// Copies filled slots of one layer out; of a local layer positions, of which no other has taken the place.
    fn read(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()>;

    /// Copies rows of one layer in; [`Cache::set_len`] makes them count.
    fn write(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()>;

    /// Copies the attention mass of the filled slots of one layer out: `[kv_head][slot]`, zeros before anything was
    /// observed.
    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()>;

    /// Replaces the mass of the filled slots, likewise. The first call makes room for the mass of all slots, so that
    /// no pass has to.
    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()>;

    /// The rows as the CPU reaches them, until the device that made the cache computes with it again.
    ///
    /// # Panics
    ///
    /// Where the CPU cannot reach them: the memory is a GPU's own.
    fn host(&mut self) -> Result<&mut dyn HostRows>;
}

/// The rows of a cache in memory that the CPU reaches.
pub trait HostRows: Send + Sync {
    /// Keys and values of one layer: `[kv_head][slot][row bytes]` each, all rows that there is room for.
    fn layer(&self, layer: usize) -> (&[u8], &[u8]);

    /// The same to write, and the mass.
    fn layer_mut(&mut self, layer: usize) -> HostLayer<'_>;
}

/// One layer of a cache, to write.
pub struct HostLayer<'a> {
    /// Keys after RoPE: `[kv_head][slot][row bytes]`.
    pub k: &'a mut [u8],
    /// Values, likewise.
    pub v: &'a mut [u8],
    /// Attention mass: `[kv_head][slot]`, where the cache has room for it.
    pub mass: Option<&'a mut [f32]>,
}

/// Rows of consecutive slots of one layer, in the cache's own element types: what devices exchange.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvRows {
    /// Keys after RoPE, as [`numeric::kv::KvType::rotated`] says: `[kv_head][slot][row bytes]`.
    pub k: Vec<u8>,
    /// Values: `[kv_head][slot][row bytes]`.
    pub v: Vec<u8>,
}

impl KvRows {
    /// Zeroed rows of `slots` slots.
    pub fn zeroed(types: KvTypes, slots: usize, head_dim: usize) -> Self {
        let mut rows = Self::default();
        rows.resize(types, slots, head_dim);
        rows
    }

    /// The numbers of these rows that can be NaN or infinite.
    pub fn floats(&self, types: KvTypes) -> impl Iterator<Item = f32> {
        types.k.floats(&self.k, HEAD_DIM).chain(types.v.floats(&self.v, HEAD_DIM))
    }

    /// Makes it rows of `slots` slots; what they are is not said.
    pub fn resize(&mut self, types: KvTypes, slots: usize, head_dim: usize) {
        self.k.resize(KV_HEADS * slots * types.k.row_bytes(head_dim), 0);
        self.v.resize(KV_HEADS * slots * types.v.row_bytes(head_dim), 0);
    }
}

/// Attention of new tokens over one layer's rows, which a device left to another.
pub struct AttentionJob<'a> {
    /// New tokens.
    pub tokens: usize,
    /// Filled slots before them, or positions in a local layer; each token sees those, the ones before it and its own.
    pub before: usize,
    /// Of these, how many each sees at most, the last ones; `None` where it sees all.
    pub window: Option<usize>,
    /// Queries as the stored keys expect them: `[token][HEADS][HEAD_DIM]`, rows `stride` apart.
    pub queries: &'a [f32],
    /// Floats from one token's queries to the next's.
    pub stride: usize,
    /// Keys, new ones included: `[kv_head][slot][row bytes]`, `capacity` slots a head (fewer of the last).
    pub k: &'a [u8],
    /// Values, likewise.
    pub v: &'a [u8],
    /// Rows of a head: that of slot or position `i` is row `i % capacity`.
    pub capacity: usize,
    /// Element types of the rows.
    pub types: KvTypes,
    /// `[token][HEADS][HEAD_DIM]`
    pub att: &'a mut [f32],
    /// Where to add the attention that slots receive; `None` where it is not observed.
    pub mass: Option<Mass<'a>>,
}

/// The attention that slots of one layer receive: of each observed token in ascending order, the softmax weights
/// summed over the query heads of the group in ascending order.
pub struct Mass<'a> {
    /// `[kv_head][capacity]`. New attention is added to what is there.
    pub sums: &'a mut [f32],
    /// How many tokens are observed, the last ones of the pass.
    pub tokens: usize,
}

/// Computes an [`AttentionJob`]. The engine hands it to the device, so that devices do not know each other.
pub type Attention = Box<dyn FnMut(AttentionJob<'_>) + Send>;
