//! The seam between a session and the device that runs the model.

use crate::dims::KV_HEADS;
use crate::model::trace::Recorder;
use files::Result;
pub use numeric::cancel::CancelToken;
use numeric::kv::KvTypes;
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
    /// Where to add the attention that slots receive, if anybody observes it.
    pub mass: Option<Mass<'a>>,
}

/// The attention that slots of one layer receive: of each observed token in ascending order, the softmax weights
/// summed over the query heads of the group in ascending order.
pub struct Mass<'a> {
    /// `[kv_head][capacity]`, only added to.
    pub sums: &'a mut [f32],
    /// How many tokens are observed, the last ones of the pass.
    pub tokens: usize,
}

/// Computes an [`AttentionJob`]. Whoever puts a backend together hands it in, so that backends do not know each
/// other.
pub type Attention = Box<dyn FnMut(AttentionJob<'_>) + Send>;

/// The memory of all rows of a cache, which two backends use in turn where their memory is one.
pub trait RowMemory: Send + Sync {
    /// Keys and values of one layer: `[kv_head][slot][row bytes]` each.
    fn layer(&self, layer: usize) -> (&[u8], &[u8]);

    /// The same, to write.
    fn layer_mut(&mut self, layer: usize) -> (&mut [u8], &mut [u8]);
}

/// Rows that go from one backend to another with the memory they lie in.
pub struct Lent {
    /// The memory; dropping it gives it back to the device it is of.
    pub memory: Box<dyn RowMemory>,
    /// Slots of a head.
    pub capacity: usize,
    /// Filled slots.
    pub len: usize,
}

/// One device running the whole model: weights, scratch and cache in its own memory.
pub trait Backend: Send {
    /// Device and instruction set, for reports.
    fn name(&self) -> String;

    /// Appends `tokens` to the cache at RoPE positions `pos..` and computes the logits asked for.
    ///
    /// Never allocates. The caller has checked that the slots fit ([`Backend::capacity`]) and that the
    /// ids are below `VOCAB`.
    fn forward(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> Result<()>;

    /// From now on, [`Backend::forward`] ends with `Interrupted` soon after `cancel` is cancelled, and then none of its
    /// tokens counts; `None` ends that. A pass whose attention is observed is completed.
    fn heed(&mut self, cancel: Option<&CancelToken>);

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

    /// Makes the cache hold `slots` slots, keeping the rows that are filled. Shared memory is resized by the backend
    /// it is of, while it has it; one that has none yet gets memory of its own.
    fn resize(&mut self, slots: usize) -> Result<()>;

    /// Moves the rows (and the mass) of `slots` (ascending) of one layer and KV head to slots `0..`.
    /// [`Backend::set_len`] follows once every head of every layer keeps as many.
    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()>;

    /// From now on, each pass adds the attention of its last `tokens` tokens to the mass of the slots they see;
    /// 0 ends that. The mass is there, zeroed, from the first call with another number on.
    fn observe(&mut self, tokens: usize) -> Result<()>;

    /// Copies the mass of the filled slots of one layer out: `[kv_head][slot]`. Only once [`Backend::observe`] has
    /// made it.
    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()>;

    /// Replaces the mass of the filled slots, likewise.
    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()>;

    /// Hands the memory of its rows to the backend it shares it with, which [`Backend::adopt`]s it; until it comes
    /// back this backend holds no rows. `None` where the memory is nobody else's. The mass stays: it is read before
    /// and written after.
    fn lend(&mut self) -> Result<Option<Lent>>;

    /// Takes rows with their memory: back, or from the backend it shares it with.
    fn adopt(&mut self, rows: Lent) -> Result<()>;

    /// Copies filled slots of one layer out.
    fn read_kv(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()>;

    /// Copies rows of one layer in; [`Backend::set_len`] makes them count.
    fn write_kv(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()>;

    /// Turns step timing and layer digests on (or off, which also hands back what was recorded).
    fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder>;
}
