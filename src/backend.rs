//! The seam between a session and the device that runs the model.

use crate::dims::KV_HEADS;
use crate::error::Result;
use crate::kv::KvTypes;
use crate::trace::Recorder;
use std::ops::Range;

/// Where `forward` writes logits.
pub enum Logits<'a> {
    /// Nowhere: the tokens only fill the cache.
    None,
    /// Of the last token: `[VOCAB]`.
    Last(&'a mut [f32]),
    /// Of every token: `[tokens][VOCAB]`.
    All(&'a mut [f32]),
}

/// Rows of consecutive slots of one layer, in the cache's own element types.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvRows {
    /// Keys after RoPE: `[kv_head][slot][row bytes]`.
    pub k: Vec<u8>,
    /// Values: `[kv_head][slot][row bytes]`.
    pub v: Vec<u8>,
}

impl KvRows {
    /// Zeroed rows of `slots` slots.
    pub fn zeroed(types: KvTypes, slots: usize, head_dim: usize) -> Self {
        let rows = |bytes: usize| vec![0; KV_HEADS * slots * bytes];
        Self { k: rows(types.k.row_bytes(head_dim)), v: rows(types.v.row_bytes(head_dim)) }
    }
}

/// Attention of new tokens over one layer's rows, which a device left to another.
pub struct AttentionJob<'a> {
    /// New tokens.
    pub tokens: usize,
    /// Filled slots before them; each token sees those, the ones before it and its own.
    pub before: usize,
    /// Queries as the stored keys expect them: `[token][HEADS][HEAD_DIM]`, rows `stride` apart.
    pub queries: &'a [f32],
    /// Floats from one token's queries to the next's.
    pub stride: usize,
    /// Keys, new ones included: `[kv_head][slot][row bytes]`, `capacity` slots a head (fewer of the last).
    pub k: &'a [u8],
    /// Values, likewise.
    pub v: &'a [u8],
    /// Slots of a head.
    pub capacity: usize,
    /// Element types of the rows.
    pub types: KvTypes,
    /// `[token][HEADS][HEAD_DIM]`
    pub att: &'a mut [f32],
}

/// Computes an [`AttentionJob`]. Whoever puts a backend together hands it in, so that backends do not know each
/// other.
pub type Attention = Box<dyn FnMut(AttentionJob<'_>) + Send>;

/// One device running the whole model: weights, scratch and cache in its own memory.
pub trait Backend: Send {
    /// Device and instruction set, for reports.
    fn name(&self) -> String;

    /// Appends `tokens` to the cache at RoPE positions `pos..` and computes the logits asked for.
    ///
    /// Never allocates. The caller has checked that the slots fit ([`Backend::capacity`]) and that the
    /// ids are below `VOCAB`.
    fn forward(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> Result<()>;

    /// Most tokens one `forward` takes.
    fn max_tokens(&self) -> usize;

    /// Filled KV slots.
    fn len(&self) -> usize;

    /// True when no slot is filled.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots there are.
    fn capacity(&self) -> usize;

    /// Element types of the cache.
    fn kv_types(&self) -> KvTypes;

    /// Rewinds, or adopts rows just written.
    fn set_len(&mut self, len: usize);

    /// Makes the cache hold `slots` slots, keeping the rows that are filled.
    fn resize(&mut self, slots: usize) -> Result<()>;

    /// Moves the rows of `slots` (ascending) of one layer and KV head to slots `0..`.
    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()>;

    /// Copies filled slots of one layer out.
    fn read_kv(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()>;

    /// Copies rows of one layer in; [`Backend::set_len`] makes them count.
    fn write_kv(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()>;

    /// Turns step timing and layer digests on (or off, which also hands back what was recorded).
    fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder>;
}
