//! The seam between a sequence and the device that runs the model.
//!
//! A device owns the weights and the buffers of a pass, never a sequence. A pass takes *runs*: some tokens of one
//! sequence each, with its cache. One token of eight sequences, a prompt of 500, eight drafted tokens: all are runs of
//! one pass, which reads the weights once, and each gets the bits that it would get alone.

use crate::dims::{FULL_ATTENTION_LAYERS, HEAD_DIM, KV_HEADS, SLIDING_LAYERS, WINDOW, is_sliding};
use crate::trace::Trace;
use files::Result;
pub use numeric::cancel::CancelToken;
use numeric::kv::KvTypes;
use numeric::pool::Pool;
use std::any::Any;
use std::fs::File;
use std::ops::{DerefMut, Range};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Destination of a run's logits.
pub enum Logits<'a> {
    /// None: the tokens only fill the cache.
    None,
    /// Logits of the last token: `[VOCAB]`.
    Last(&'a mut [f32]),
    /// Logits of every token: `[tokens][VOCAB]`.
    All(&'a mut [f32]),
}

impl Logits<'_> {
    /// Borrows the destination again.
    pub fn reborrow(&mut self) -> Logits<'_> {
        match self {
            Logits::None => Logits::None,
            Logits::Last(logits) => Logits::Last(logits),
            Logits::All(logits) => Logits::All(logits),
        }
    }
}

/// Memory for the logits of one token: `[VOCAB]`.
pub type LogitsBuffer = Box<dyn DerefMut<Target = [f32]> + Send>;

/// Consecutive tokens of one sequence in a pass.
pub struct Run<'a> {
    /// The sequence's cache, made by the device of the pass, or one whose rows that device can reach
    /// ([`KvCache::host_rows`]). The tokens take the slots after the filled ones, which must be free.
    pub cache: &'a mut dyn KvCache,
    /// At least one; ids below `VOCAB`.
    pub tokens: &'a [u32],
    /// Position of the first token; the others follow.
    pub pos: usize,
    /// Length of the sequence as far as it is known: includes the whole prompt that this run is a part of. Models with
    /// other RoPE frequencies for long sequences use them from the first token of a long prompt.
    pub known_len: usize,
    /// The logits wanted.
    pub logits: Logits<'a>,
    /// Number of tokens, counted from the end, whose attention is added to the mass of the slots that they see. Unless
    /// it is 0, [`KvCache::write_mass`] must have been called once to allocate the mass.
    pub observed_tokens: usize,
    /// Destination of the final states (the residual after the last norm) of this many tokens, counted from the end:
    /// `[token][DIM]`. Empty unless the model drafts for itself.
    pub hidden: &'a mut [f32],
    /// Residual of each token, `[token][DIM]`, for the stage of a [split](crate::split) whose device computes only some
    /// layers: the one that enters its first layer, replaced by the one that leaves its last. The first stage reads none,
    /// and the last writes none. Empty for a device that computes all layers.
    pub residual: &'a mut [f32],
}

impl<'a> Run<'a> {
    /// A run whose attention is not observed.
    pub fn new(cache: &'a mut dyn KvCache, tokens: &'a [u32], pos: usize, logits: Logits<'a>) -> Self {
        Self {
            cache,
            tokens,
            pos,
            known_len: 0,
            logits,
            observed_tokens: 0,
            hidden: &mut [],
            residual: &mut [],
        }
    }
}

/// Empties a list and keeps its memory for the items of the next pass, which borrow something else.
pub(crate) fn reuse_memory<A, B>(mut list: Vec<A>) -> Vec<B> {
    list.clear();
    // Collects in place, because the items have the same layout: an empty vector with the same memory.
    list.into_iter().map(|_| unreachable!("it is empty")).collect()
}

/// A device that several sequences share, in turn or in one pass.
pub type SharedDevice = Arc<Mutex<dyn Device>>;

/// Locks a device for a pass.
pub fn lock_device(device: &SharedDevice) -> MutexGuard<'_, dyn Device + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One device with the model's weights and the buffers of a pass.
pub trait Device: Send {
    /// Device and instruction set, for reports.
    fn name(&self) -> String;

    /// Maximum number of tokens of one pass, all runs together.
    fn max_tokens(&self) -> usize;

    /// An empty cache of `slots` slots.
    ///
    /// # Errors
    ///
    /// `Memory` where there is no room for it.
    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn KvCache>>;

    /// A logits buffer that the device writes to without a copy; `None` if `current` is as good. It must stay valid
    /// after the device is lost.
    fn logits_buffer(&mut self, _current: &[f32]) -> Option<LogitsBuffer> {
        None
    }

    /// The device's thread pool, for work between passes.
    fn thread_pool(&self) -> Option<&Pool> {
        None
    }

    /// Computes one pass: appends the rows of each run's tokens to its cache and writes the logits asked for.
    ///
    /// Allocates nothing, except in the first pass with a longer cache than before, in the first observed pass, and for the
    /// threads of a [split](crate::split) that compute a long pass.
    ///
    /// # Errors
    ///
    /// `Interrupted` soon after `cancel` is cancelled, `Device` if the device is lost; then none of the tokens is
    /// added, and recurrent states are unspecified. A pass with an observed run is never interrupted, because half of
    /// its mass could not be taken back.
    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()>;

    /// Turns step timing and layer digests on, or off with `None`. Returns the previous trace.
    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace>;
}

/// Shape and fill level of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Element types of the rows.
    pub types: KvTypes,
    /// Slots of a head in full-attention layers.
    pub slots: usize,
    /// Rows of a head in sliding-window layers: see [`Ring`].
    pub ring: usize,
    /// Filled slots: the first ones.
    pub len: usize,
}

impl Extent {
    /// Rows of a head of a layer.
    pub fn rows_per_head(&self, layer: usize) -> usize {
        if is_sliding(layer) { self.ring } else { self.slots }
    }

    /// Bytes of all rows.
    pub fn total_bytes(&self) -> usize {
        let bytes = |layers, rows| self.types.slot_bytes(layers, KV_HEADS, HEAD_DIM) * rows;
        bytes(FULL_ATTENTION_LAYERS, self.slots) + bytes(SLIDING_LAYERS, self.ring)
    }

    /// Checks that `tokens` tokens of one pass fit, the first at position `pos`.
    pub fn has_room(&self, pos: usize, tokens: usize) -> bool {
        let ring =
            SLIDING_LAYERS == 0 || pos + tokens <= self.ring || WINDOW + tokens + ATTN_BLOCK <= self.ring;
        ring && self.len + tokens <= self.slots
    }
}

/// Slots of a chunk of attention.
pub const ATTN_BLOCK: usize = 128;

/// Size of the ring buffer that holds a head's rows in a sliding-window layer.
///
/// The ring holds the latest positions, whatever is evicted from full-attention layers. Position `p` is in row `p`
/// modulo the number of rows. That number is the window, the tokens of the longest pass and a chunk of attention,
/// rounded up to whole chunks: so the rows of a chunk are contiguous, and no pass writes into a chunk that it reads. As
/// many tokens as one pass has can be taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    window_rows: usize,
    has_whole_window: bool,
}

impl Ring {
    /// A ring for passes of at most `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        let most = WINDOW.saturating_add(tokens.saturating_add(ATTN_BLOCK)).min(usize::MAX >> 4);
        Self {
            window_rows: if SLIDING_LAYERS != 0 { most.next_multiple_of(ATTN_BLOCK) } else { 0 },
            has_whole_window: false,
        }
    }

    /// A ring for sequences with more positions than the cache has slots: see [`KvCache::reserve_window_rows`].
    pub fn with_whole_window(self) -> Self {
        Self { has_whole_window: true, ..self }
    }

    /// Rows of a head when full-attention layers have `slots` slots: no more than these, unless positions exceed them.
    pub fn rows_per_head(self, slots: usize) -> usize {
        if self.has_whole_window { self.window_rows } else { self.window_rows.min(slots) }
    }

    /// Bytes of a cache of `slots` slots: `[full-attention layers, sliding-window layers]`.
    pub fn cache_bytes(self, types: KvTypes, slots: usize) -> [u64; 2] {
        let bytes = |layers, rows: usize| {
            (types.slot_bytes(layers, KV_HEADS, HEAD_DIM) as u64).saturating_mul(rows as u64)
        };
        [bytes(FULL_ATTENTION_LAYERS, slots), bytes(SLIDING_LAYERS, self.rows_per_head(slots))]
    }
}

/// Bytes of the rows that one token's attention reads over `slots` filled slots.
pub fn read_bytes(types: KvTypes, slots: f64) -> f64 {
    let bytes = |layers| types.slot_bytes(layers, KV_HEADS, HEAD_DIM) as f64;
    bytes(FULL_ATTENTION_LAYERS) * slots + bytes(SLIDING_LAYERS) * slots.min(WINDOW as f64)
}

/// Splits `slots` (positions in a sliding-window layer) into contiguous spans of a head's ring of `rows` rows, in
/// order: first row and number of rows.
pub fn ring_spans(slots: Range<usize>, rows: usize) -> impl Iterator<Item = (usize, usize)> {
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
/// Full-attention layers address rows by slot; sliding-window layers by position, and hold only the latest: see
/// [`Ring`]. Only full-attention layers have mass and [`KvCache::retain_slots`].
pub trait KvCache: Any + Send {
    /// The shape and fill level.
    fn extent(&self) -> Extent;

    /// Sets the number of filled slots: rewinds, or adds rows just written. Slots added this way have no mass. A length
    /// of 0 clears the recurrent state; with any other, it stays that of the tokens computed so far.
    fn set_len(&mut self, len: usize);

    /// Copies the recurrent state out, `[STATE]`, of the layers that it holds; empty for models without.
    fn read_state(&mut self, state: &mut [f32]) -> Result<()>;

    /// Replaces the recurrent state of these layers by that in `state`: `[STATE]`.
    fn write_state(&mut self, state: &[f32]) -> Result<()>;

    /// Goes back to the recurrent state after the first token of the last run, which had more than one, as when a draft
    /// is not accepted.
    fn restore_first_state(&mut self) -> Result<()>;

    /// Changes the number of slots. Filled slots keep their rows.
    ///
    /// # Errors
    ///
    /// `Usage` if `slots` is below the filled slots, `Memory`; then nothing has changed.
    fn resize(&mut self, slots: usize) -> Result<()>;

    /// Enlarges the rings for a sequence with more positions than slots, as after evictions.
    ///
    /// # Errors
    ///
    /// `Memory`; then nothing has changed.
    fn reserve_window_rows(&mut self) -> Result<()>;

    /// Moves the rows (and the mass) of `slots`, in ascending order, of one layer and KV head to slots `0..`. The
    /// caller calls [`KvCache::set_len`] once every head of every layer keeps the same number.
    fn retain_slots(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()>;

    /// Copies filled slots of one layer out; in a sliding-window layer, positions that have not been overwritten.
    fn read_rows(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()>;

    /// Copies rows of one layer in; [`KvCache::set_len`] then adds them.
    fn write_rows(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()>;

    /// Maps the rows of a full-attention layer's first `slots` slots from a file that has them, in place of
    /// [`KvCache::write_rows`]. Returns false if they must be written, with unspecified rows till then.
    fn map_rows(&mut self, _layer: usize, _slots: usize, _file: &RowsInFile<'_>) -> bool {
        false
    }

    /// Copies the attention mass of one layer's filled slots out: `[kv_head][slot]`, zeros before the first observed
    /// pass.
    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()>;

    /// Replaces the mass of one layer's filled slots. The first call allocates the mass of all slots, so that no pass
    /// has to.
    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()>;

    /// Rows that the CPU can address, valid until the device that made the cache computes with it again.
    ///
    /// # Panics
    ///
    /// If the CPU cannot address them: the memory is a GPU's own.
    fn host_rows(&mut self) -> Result<&mut dyn HostRows>;
}

/// Rows of a cache in memory that the CPU can address.
pub trait HostRows: Send + Sync {
    /// Keys and values of one layer: `[kv_head][slot][row bytes]` each, filled or not.
    fn layer_rows(&self, layer: usize) -> (&[u8], &[u8]);

    /// Keys, values and mass of one layer, to write.
    fn layer_rows_mut(&mut self, layer: usize) -> HostLayer<'_>;

    /// State of a recurrent layer, `[LAYER_STATE]`, and the one to [restore](KvCache::restore_first_state).
    fn layer_states_mut(&mut self, layer: usize) -> [&mut [f32]; 2];
}

/// One layer of a cache, borrowed for writing.
pub struct HostLayer<'a> {
    /// Keys after RoPE: `[kv_head][slot][row bytes]`.
    pub k: &'a mut [u8],
    /// Values, likewise.
    pub v: &'a mut [u8],
    /// Attention mass: `[kv_head][slot]`, if it is allocated.
    pub mass: Option<&'a mut [f32]>,
}

/// Rows of consecutive slots of one layer in the cache's element types, to exchange between devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvRows {
    /// Keys after RoPE, as [`numeric::kv::KvType::is_rotated`] says: `[kv_head][slot][row bytes]`.
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

    /// Finds the first NaN or infinity in these rows.
    pub fn find_not_finite(&self, types: KvTypes) -> Option<f32> {
        let found = types.k.find_not_finite(&self.k, HEAD_DIM);
        found.or_else(|| types.v.find_not_finite(&self.v, HEAD_DIM))
    }

    /// Resizes to rows of `slots` slots; their content is unspecified.
    pub fn resize(&mut self, types: KvTypes, slots: usize, head_dim: usize) {
        self.k.resize(KV_HEADS * slots * types.k.row_bytes(head_dim), 0);
        self.v.resize(KV_HEADS * slots * types.v.row_bytes(head_dim), 0);
    }
}

/// A file with the rows of one layer's first slots, `[kv_head][slot][row bytes]`.
pub struct RowsInFile<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    /// Keys, then values: offset of the first head's rows, and the distance from one head's to the next's.
    pub heads: [(u64, u64); 2],
}

/// Attention of new tokens over one layer's rows, which an OpenCL device leaves to the CPU.
pub struct AttentionJob<'a> {
    /// New tokens.
    pub tokens: usize,
    /// Filled slots (positions in a sliding-window layer) before them; a token sees these, the new ones before it and
    /// its own.
    pub before: usize,
    /// Maximum number of latest positions that a token sees; `None` for full attention.
    pub window: Option<usize>,
    /// Queries as the stored keys expect them: `[token][HEADS][HEAD_DIM]`, rows `stride` apart.
    pub queries: &'a [f32],
    /// Distance in floats from one token's queries to the next's.
    pub stride: usize,
    /// Keys, new ones included: `[kv_head][slot][row bytes]`, `capacity` slots a head (fewer of the last).
    pub k: &'a [u8],
    /// Values, likewise.
    pub v: &'a [u8],
    /// Rows of a head; slot or position `i` is in row `i % capacity`.
    pub capacity: usize,
    /// Element types of the rows.
    pub types: KvTypes,
    /// Sinks of the heads, `[HEADS]`, empty without; then the layer's calibration, which shifts them.
    pub sinks: [&'a [f32]; 2],
    /// `[token][HEADS][HEAD_DIM]`
    pub att: &'a mut [f32],
    /// Sums to add the slots' attention to; `None` if it is not observed.
    pub mass: Option<AttentionMass<'a>>,
}

/// Attention mass of one layer's slots: the softmax weights of observed tokens, summed over the tokens in ascending
/// order and over the query heads of the group in ascending order.
pub struct AttentionMass<'a> {
    /// `[kv_head][capacity]`. New attention is added to what is there.
    pub sums: &'a mut [f32],
    /// Number of observed tokens, counted from the end of the pass.
    pub tokens: usize,
}

/// Computes an [`AttentionJob`]. The engine hands it to the device, so that devices do not know each other.
pub type AttentionFn = Box<dyn FnMut(AttentionJob<'_>) + Send>;

/// Computes, in the same way, the feed-forward of a layer with experts on the residual of a pass: `[token][DIM]`.
pub type ExpertsFn = Box<dyn FnMut(usize, &mut [f32]) + Send>;
