//! The CPU backend: the whole forward pass, one line per step.
//!
//! The result is the same bits for every instruction set, thread count and number of tokens at once;
//! `simd` and `simd::attend` say how.

pub mod attention;
mod batch;
mod cache;
mod mass;
mod matmul;
#[allow(unsafe_code)]
mod pool;
#[allow(unsafe_code)]
pub mod simd;
pub mod topology;

use crate::backend::{Backend, CancelToken, KvRows, Lent, Logits};
use crate::dims::*;
use crate::error::{Error, Result};
use crate::kv::{KvTypes, check_capacity};
use crate::quant::packed::GROUP_ROWS;
use crate::quant::{BLOCK, act::ActBlock};
use crate::trace::{Recorder, Steps};
use crate::weights::{Layer, Reads, Weights};
pub use batch::CpuBatch;
use batch::Rows;
use cache::Cache;
pub use mass::bytes as mass_bytes;
use mass::{Noted, SlotMass};
use matmul::Input;
use pool::Pool;
pub use pool::keep_to;
use simd::attend::{CHUNK, Partial};
use simd::{Isa, ops};
use std::ops::Range;
use std::sync::Arc;

/// Columns of q, k and v in the fused buffer, each padded to whole groups of sixteen.
const Q_PAD: usize = Q_DIM.next_multiple_of(16);
const KV_PAD: usize = KV_DIM.next_multiple_of(16);
const QKV: usize = Q_PAD + 2 * KV_PAD;
/// Weight bytes of one task in decode: small enough that no thread waits long for the last one, large enough
/// that what was prefetched when it began is not much of it (20 KiB: 4 % slower).
const DECODE_TASK_BYTES: usize = 128 << 10;
/// Columns of one task in prefill: enough to use the activations in the first-level cache well, few enough
/// that threads end together.
const PREFILL_TASK_COLS: usize = 128;

/// How a [`CpuBackend`] is set up.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Threads, caller included.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Element types of the cache.
    pub kv_types: KvTypes,
    /// Slots of the cache.
    pub capacity: usize,
    /// Most tokens of one forward pass; scratch is sized for it.
    pub max_tokens: usize,
}

/// Activations in the form or forms that the weights reading them need; the other is empty.
struct Acts<const W: usize> {
    /// `[token][W]`
    floats: Vec<f32>,
    /// `[token][W / 32]`
    blocks: Vec<ActBlock>,
}

impl<const W: usize> Acts<W> {
    fn new(tokens: usize, reads: Reads) -> Result<Self> {
        Ok(Self {
            floats: try_vec(if reads.floats { tokens * W } else { 0 }, 0.0)?,
            blocks: try_vec(if reads.blocks { tokens * (W / BLOCK) } else { 0 }, ActBlock::ZERO)?,
        })
    }

    fn input(&self, tokens: usize) -> Input<'_> {
        Input { floats: &self.floats, blocks: &self.blocks, tokens }
    }

    /// Computes rows `0..tokens` with `row(token, destination)` and quantises them where needed.
    fn fill(&mut self, pool: &Pool, isa: Isa, tokens: usize, row: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = tokens.div_ceil(4 * pool.threads());
        if !self.floats.is_empty() {
            pool.tiles(&mut self.floats[..tokens * W], W, (rows, W), |mut tile| {
                (0..tile.rows).for_each(|r| row(tile.row + r, tile.row_mut(r)));
            });
            return self.quantise(pool, isa, tokens);
        }
        let blocks = W / BLOCK;
        pool.tiles(&mut self.blocks[..tokens * blocks], blocks, (rows, blocks), |mut tile| {
            let mut h = [0.0; W];
            for r in 0..tile.rows {
                row(tile.row + r, &mut h);
                ops::quantise(isa, &h, tile.row_mut(r));
            }
        });
    }

    /// Makes the blocks of rows `0..tokens` from the floats, where both are needed.
    fn quantise(&mut self, pool: &Pool, isa: Isa, tokens: usize) {
        let (floats, blocks) = (&self.floats, W / BLOCK);
        if !self.blocks.is_empty() {
            let rows = tokens.div_ceil(4 * pool.threads());
            pool.tiles(&mut self.blocks[..tokens * blocks], blocks, (rows, blocks), |mut tile| {
                for r in 0..tile.rows {
                    ops::quantise(isa, &floats[(tile.row + r) * W..][..W], tile.row_mut(r));
                }
            });
        }
    }
}

/// Buffers of one forward pass, sized once.
struct Scratch {
    /// Residual stream: `[token][DIM]`
    x: Vec<f32>,
    /// Normed residual.
    h: Acts<DIM>,
    /// `[token][q | k | v]`, see [`QKV`]
    qkv: Vec<f32>,
    /// Attention output: `[token][head][HEAD_DIM]`
    att: Vec<f32>,
    /// The same as the output projection reads it.
    att_in: Acts<Q_DIM>,
    /// silu(gate) * up.
    ffn: Acts<FFN_DIM>,
    /// Partial attention of one token: `[kv_head][chunk][query head of the group]`
    partials: Vec<Partial<HEAD_DIM>>,
    /// How many tokens at the end of a pass are observed.
    observed: usize,
    /// Their softmax: `[token][HEADS]`; empty until any are.
    notes: Vec<Noted>,
    /// Cosines and sines of the tokens' positions: `[token][HEAD_DIM / 2]`
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// What computes passes, whosever rows they are: weights, threads, buffers.
struct Runner {
    weights: Arc<Weights>,
    pool: Pool,
    isa: Isa,
    scratch: Scratch,
    max_tokens: usize,
    /// Radians per position of each rotated pair.
    frequencies: [f64; HEAD_DIM / 2],
    recorder: Option<Recorder>,
}

/// A model on the CPU.
pub struct CpuBackend {
    runner: Runner,
    cache: Cache,
    /// From the first time on that attention is observed.
    mass: Option<SlotMass>,
    /// What ends passes early.
    cancel: Option<CancelToken>,
}

fn try_vec<T: Clone>(len: usize, zero: T) -> Result<Vec<T>> {
    let mut v = Vec::new();
    v.try_reserve_exact(len).map_err(|_| {
        let mib = (len * size_of::<T>()) >> 20;
        Error::Memory(format!("cannot allocate {mib} MiB of scratch; use a smaller --prefill-chunk"))
    })?;
    v.resize(len, zero);
    Ok(v)
}

/// Partials for a cache of `capacity` slots.
fn partials_for(capacity: usize) -> usize {
    HEADS * capacity.div_ceil(CHUNK)
}

/// Bytes of scratch that a backend with these options allocates.
pub fn scratch_bytes(capacity: usize, max_tokens: usize) -> usize {
    let acts = |w: usize| w / BLOCK * size_of::<ActBlock>() + 4 * w;
    let token = 4 * (DIM + QKV + Q_DIM + HEAD_DIM) + acts(DIM) + acts(Q_DIM) + acts(FFN_DIM);
    max_tokens * token + partials_for(capacity) * size_of::<Partial<HEAD_DIM>>()
}

impl CpuBackend {
    /// Allocates cache and scratch and starts the threads.
    pub fn new(weights: Arc<Weights>, options: CpuOptions) -> Result<Self> {
        Self::with(weights, options, Cache::new(options.kv_types, options.capacity)?)
    }

    /// The same without memory for rows: those of another backend are to be adopted before anything runs.
    pub fn without_rows(weights: Arc<Weights>, options: CpuOptions) -> Result<Self> {
        Self::with(weights, options, Cache::without_memory(options.kv_types, options.capacity))
    }

    fn with(weights: Arc<Weights>, mut options: CpuOptions, cache: Cache) -> Result<Self> {
        options.max_tokens = options.max_tokens.clamp(1, options.capacity.max(1));
        Ok(Self { runner: Runner::new(weights, options)?, cache, mass: None, cancel: None })
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.runner.pool.threads()
    }
}

/// What some matrices of all layers together read.
fn reads(weights: &Weights, of: impl Fn(&Layer) -> Reads) -> Reads {
    weights.layers.iter().fold(Reads::default(), |all, layer| all | of(layer))
}

/// Mass was asked for that there is none of.
fn not_observed() -> Error {
    Error::Other("attention was never observed, so slots have no mass".into())
}

/// Columns of one task over a matrix with rows of `cols` elements, a multiple of `run`.
fn task_cols(tokens: usize, (rows, cols): (usize, usize), run: usize, threads: usize) -> usize {
    if tokens > 1 {
        return PREFILL_TASK_COLS.min(rows.div_ceil(8 * threads).next_multiple_of(run));
    }
    let row_bytes = cols / BLOCK * 18 + 1;
    (DECODE_TASK_BYTES / row_bytes).next_multiple_of(run).min(rows.div_ceil(threads).next_multiple_of(run))
}

impl Scratch {
    /// Looks the tokens' embedding rows up and prepares their RoPE angles.
    fn embed(&mut self, weights: &Weights, rows: &Rows<'_>, frequencies: &[f64]) {
        for (t, x) in self.x.chunks_exact_mut(DIM).take(rows.count()).enumerate() {
            let (token, pos) = rows.token(t);
            weights.embed.row(token as usize, x);
            let angles = t * (HEAD_DIM / 2)..(t + 1) * (HEAD_DIM / 2);
            let (cos, sin) = (&mut self.cos[angles.clone()], &mut self.sin[angles]);
            crate::rope::angles(pos, frequencies, cos, sin);
        }
    }

    /// q, k and v of the normed residual, in one parallel step.
    fn qkv(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        let x = self.h.input(n);
        let tile = task_cols(n, (QKV, DIM), GROUP_ROWS, pool.threads());
        pool.columns(&mut self.qkv[..n * QKV], QKV, tile, |mut tile| {
            // The tile may span the borders between q, k and v.
            let end = tile.col + tile.cols;
            let mut part = |start: usize, rows: usize, m: Part<'_>| {
                let (from, to) = (tile.col.max(start), end.min(start + rows));
                if from < to {
                    let at = from - tile.col;
                    m.project(isa, x, (&mut tile, at), (from - start, to - from));
                }
            };
            part(0, Q_DIM, Part::Q(&layer.wq, &layer.q_bias));
            part(Q_PAD, KV_DIM, Part::Kv(&layer.wk, &layer.k_bias));
            part(Q_PAD + KV_PAD, KV_DIM, Part::Kv(&layer.wv, &layer.v_bias));
        });
    }

    /// The attention output's projection, added to the residual.
    fn out(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        let att = &self.att;
        self.att_in.fill(pool, isa, n, |t, row| row.copy_from_slice(&att[t * Q_DIM..][..Q_DIM]));
        let x = self.att_in.input(n);
        let tile = task_cols(n, (DIM, Q_DIM), GROUP_ROWS, pool.threads());
        pool.columns(&mut self.x[..n * DIM], DIM, tile, |mut tile| {
            let cols = (tile.col, tile.cols);
            matmul::project(isa, &layer.wo, x, (&mut tile, 0), cols, |dst, y, row| {
                if O_BIAS {
                    let bias = &layer.o_bias[row..];
                    dst.iter_mut().zip(y).zip(bias).for_each(|((d, y), b)| *d += y + b);
                } else {
                    dst.iter_mut().zip(y).for_each(|(d, y)| *d += y);
                }
            });
        });
    }

    /// silu(gate) * up of the normed residual, quantised for `down` on the way.
    fn gate_up(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        let x = self.h.input(n);
        let w = (&layer.gate, &layer.up);
        let tile = task_cols(n, (FFN_DIM, 2 * DIM), matmul::RUN, pool.threads());
        if !self.ffn.floats.is_empty() {
            pool.columns(&mut self.ffn.floats[..n * FFN_DIM], FFN_DIM, tile, |mut tile| {
                matmul::gate_up(isa, w, x, (tile.col, tile.cols), |first, at, products| {
                    for (t, y) in products.iter().enumerate() {
                        let out = &mut tile.row_mut(first + t)[at..];
                        let cols = out.len().min(y.len());
                        out[..cols].copy_from_slice(&y[..cols]);
                    }
                });
            });
            return self.ffn.quantise(pool, isa, n);
        }
        let blocks = FFN_DIM / BLOCK;
        pool.columns(&mut self.ffn.blocks[..n * blocks], blocks, tile / BLOCK, |mut tile| {
            let cols = (tile.col * BLOCK, tile.cols * BLOCK);
            matmul::gate_up(isa, w, x, cols, |first, at, products| {
                for (some, products) in products.chunks(16).enumerate() {
                    let mut blocks = [ActBlock::ZERO; 16];
                    let blocks = &mut blocks[..products.len()];
                    ops::quantise(isa, products.as_flattened(), blocks);
                    for (t, block) in blocks.iter().enumerate() {
                        tile.row_mut(first + 16 * some + t)[at / BLOCK] = *block;
                    }
                }
            });
        });
    }

    /// The feed-forward layer's second half, added to the residual.
    fn down(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        let x = self.ffn.input(n);
        let tile = task_cols(n, (DIM, FFN_DIM), GROUP_ROWS, pool.threads());
        pool.columns(&mut self.x[..n * DIM], DIM, tile, |mut tile| {
            let cols = (tile.col, tile.cols);
            matmul::project(isa, &layer.down, x, (&mut tile, 0), cols, |dst, y, _| {
                dst.iter_mut().zip(y).for_each(|(d, y)| *d += y);
            });
        });
    }

    /// RMS norm of tokens `from..from + n` into `h`.
    fn norm(&mut self, w: &[f32], pool: &Pool, isa: Isa, (from, n): (usize, usize)) {
        let x = &self.x[from * DIM..];
        self.h.fill(pool, isa, n, |t, h| ops::norm(isa, &x[t * DIM..][..DIM], w, RMS_EPS as f32, h));
    }

    /// Logits of the `n` rows of `h`.
    fn head(&mut self, weights: &Weights, pool: &Pool, isa: Isa, logits: &mut [f32]) {
        let n = logits.len() / VOCAB;
        let x = self.h.input(n);
        let tile = task_cols(n, (VOCAB, DIM), GROUP_ROWS, pool.threads());
        pool.columns(logits, VOCAB, tile, |mut tile| {
            let cols = (tile.col, tile.cols);
            matmul::project(isa, &weights.head, x, (&mut tile, 0), cols, |dst, y, _| dst.copy_from_slice(y));
        });
    }
}

/// One of the three projections that share an input.
enum Part<'a> {
    Q(&'a crate::weights::Matrix<Q_DIM, DIM>, &'a [f32]),
    Kv(&'a crate::weights::Matrix<KV_DIM, DIM>, &'a [f32]),
}

impl Part<'_> {
    fn project(&self, isa: Isa, x: Input<'_>, at: (&mut pool::Tile<'_, f32>, usize), rows: (usize, usize)) {
        let biased = |bias: &[f32], dst: &mut [f32], y: &[f32], row: usize| {
            if QKV_BIAS {
                dst.iter_mut().zip(y).zip(&bias[row..]).for_each(|((d, y), b)| *d = y + b);
            } else {
                dst.copy_from_slice(y);
            }
        };
        match self {
            Part::Q(w, b) => matmul::project(isa, w, x, at, rows, |d, y, row| biased(b, d, y, row)),
            Part::Kv(w, b) => matmul::project(isa, w, x, at, rows, |d, y, row| biased(b, d, y, row)),
        }
    }
}

impl Runner {
    fn new(weights: Arc<Weights>, options: CpuOptions) -> Result<Self> {
        let CpuOptions { threads, isa, kv_types: _, capacity, max_tokens } = options;
        let scratch = Scratch {
            x: try_vec(max_tokens * DIM, 0.0)?,
            h: Acts::new(max_tokens, weights.head.reads() | reads(&weights, Layer::read_normed))?,
            qkv: try_vec(max_tokens * QKV, 0.0)?,
            att: try_vec(max_tokens * Q_DIM, 0.0)?,
            att_in: Acts::new(max_tokens, reads(&weights, |layer| layer.wo.reads()))?,
            ffn: Acts::new(max_tokens, reads(&weights, |layer| layer.down.reads()))?,
            partials: try_vec(partials_for(capacity), Partial::EMPTY)?,
            observed: 0,
            notes: Vec::new(),
            cos: try_vec(max_tokens * (HEAD_DIM / 2), 0.0)?,
            sin: try_vec(max_tokens * (HEAD_DIM / 2), 0.0)?,
        };
        Ok(Self {
            pool: Pool::new(threads)?,
            isa,
            scratch,
            max_tokens,
            frequencies: crate::rope::frequencies(),
            recorder: None,
            weights,
        })
    }

    /// One pass: the tokens of `rows` join their caches, and the logits asked for are computed.
    ///
    /// # Errors
    ///
    /// `Interrupted` where the pool has left tasks out; then no row counts.
    fn pass(&mut self, rows: &mut Rows<'_>, mass: &mut Option<SlotMass>, out: Logits<'_>) -> Result<()> {
        let Self { weights, pool, isa, scratch: s, recorder, .. } = self;
        let (n, isa) = (rows.count(), *isa);
        assert!(n > 0 && n <= self.max_tokens && rows.fit());
        let mut steps = Steps::begin(recorder.as_mut(), n);

        s.embed(weights, rows, &self.frequencies); // rows of the embedding, angles of RoPE
        steps.done("embed", 0);
        for (index, layer) in weights.layers.iter().enumerate() {
            s.norm(&layer.attn_norm, pool, isa, (0, n)); // RMS norm before attention
            steps.done("norm", index);
            s.qkv(layer, pool, isa, n); // queries, keys and values
            steps.done("qkv", index);
            s.store(layer, index, rows, pool, isa); // keys get their position and join the cache
            steps.done("rope", index);
            s.attend(layer, index, rows, pool, isa); // each query over all slots up to its own
            steps.done("attend", index);
            if let (Rows::Run { cache, .. }, Some(mass), 1..) = (&*rows, &mut *mass, s.observed) {
                s.observe((layer, index), (cache, mass), pool, isa, n); // what each slot received of it
                steps.done("observe", index);
            }
            s.out(layer, pool, isa, n); // attention's output joins the residual
            steps.done("out", index);
            s.norm(&layer.ffn_norm, pool, isa, (0, n)); // RMS norm before the feed-forward layer
            steps.done("norm", index);
            s.gate_up(layer, pool, isa, n); // silu(gate) * up
            steps.done("gate_up", index);
            s.down(layer, pool, isa, n); // back to the residual's width, and joins it
            steps.done("down", index);
            steps.residual(rows.last_position(), index, &s.x[(n - 1) * DIM..][..DIM]);
            pool.finished()?;
        }
        let logits = match out {
            Logits::None => None,
            Logits::Last(logits) => Some((n - 1, 1, logits)),
            Logits::All(logits) => Some((0, n, logits)),
        };
        if let Some((from, rows, logits)) = logits {
            assert_eq!(logits.len(), rows * VOCAB);
            s.norm(&weights.norm, pool, isa, (from, rows)); // final RMS norm
            s.head(weights, pool, isa, logits); // one logit per vocabulary entry
            steps.done("head", LAYERS);
            pool.finished()?;
        }
        rows.done();
        Ok(())
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.runner.isa.name(), self.threads())
    }

    fn forward(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> Result<()> {
        let Self { runner, cache, mass, cancel } = self;
        assert!(cache.len() + tokens.len() <= cache.capacity());
        if let Some(mass) = mass {
            mass.clear(cache.len()..cache.len() + tokens.len());
        }
        // What slots received of half a pass could not be taken back.
        let cancel = cancel.as_ref().filter(|_| mass.is_none() || runner.scratch.observed == 0);
        runner.pool.heed(cancel);
        runner.pass(&mut Rows::Run { cache, tokens, pos }, mass, out)
    }

    fn heed(&mut self, cancel: Option<&CancelToken>) {
        self.cancel = cancel.cloned();
    }

    fn max_tokens(&self) -> usize {
        self.runner.max_tokens
    }

    fn len(&self) -> usize {
        self.cache.len()
    }

    fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    fn kv_types(&self) -> KvTypes {
        self.cache.types()
    }

    fn set_len(&mut self, len: usize) {
        let before = self.cache.len();
        self.cache.set_len(len);
        if let Some(mass) = self.mass.as_mut().filter(|_| len > before) {
            mass.clear(before..len);
        }
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        let len = self.cache.len();
        check_capacity(slots, len)?;
        let partials = try_vec(partials_for(slots), Partial::EMPTY)?;
        let mass = self.mass.as_ref().map(|mass| mass.resized(slots, len)).transpose()?;
        self.cache.resize(slots)?;
        (self.runner.scratch.partials, self.mass) = (partials, mass);
        Ok(())
    }

    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        self.cache.keep(layer, kv_head, slots)?;
        match &mut self.mass {
            Some(mass) => mass.keep((layer, kv_head), slots, self.cache.len()),
            None => Ok(()),
        }
    }

    fn observe(&mut self, tokens: usize) -> Result<()> {
        if tokens > 0 && self.mass.is_none() {
            let notes = mass::notes(self.runner.max_tokens)?;
            self.mass = Some(SlotMass::new(self.cache.capacity())?);
            self.runner.scratch.notes = notes;
        }
        self.runner.scratch.observed = tokens;
        Ok(())
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * self.cache.len());
        let Some(of_slots) = &self.mass else { return Err(not_observed()) };
        of_slots.read(layer, mass);
        Ok(())
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * self.cache.len());
        let Some(of_slots) = &mut self.mass else { return Err(not_observed()) };
        of_slots.write(layer, mass);
        Ok(())
    }

    fn lend(&mut self) -> Result<Option<Lent>> {
        Ok(self.cache.lend())
    }

    fn adopt(&mut self, rows: Lent) -> Result<()> {
        let needed = partials_for(rows.capacity);
        if self.runner.scratch.partials.len() < needed {
            self.runner.scratch.partials = try_vec(needed, Partial::EMPTY)?;
        }
        let (capacity, len) = (rows.capacity, rows.len);
        if let Some(mass) = self.mass.as_mut() {
            if capacity != self.cache.capacity() {
                *mass = SlotMass::new(capacity)?;
            }
            mass.clear(0..len);
        }
        self.cache.adopt(rows);
        Ok(())
    }

    fn read_kv(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        self.cache.read(layer, slots, rows);
        Ok(())
    }

    fn write_kv(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        self.cache.write(layer, slots, rows);
        Ok(())
    }

    fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder> {
        std::mem::replace(&mut self.runner.recorder, recorder)
    }
}
