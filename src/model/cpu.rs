//! The CPU backend: the whole forward pass, one line per step.
//!
//! The result is the same bits for every instruction set, thread count and number of tokens at once;
//! `simd` and `simd::attend` say how.

pub mod attention;
mod batch;
mod cache;
mod mass;
mod matmul;
mod scratch;

use crate::dims::*;
use crate::model::backend::{Backend, CancelToken, KvRows, Lent, Logits};
use crate::model::trace::{Recorder, Steps};
use crate::model::weights::Weights;
pub use batch::CpuBatch;
use batch::Rows;
use cache::Cache;
use files::{Error, Result};
use mass::SlotMass;
pub use mass::bytes as mass_bytes;
use numeric::kv::{KvTypes, check_capacity};
use numeric::pool::Pool;
use numeric::simd::Isa;
use numeric::simd::attend::Partial;
pub use scratch::bytes as scratch_bytes;
use scratch::{Scratch, partials_for, try_vec};
use std::ops::Range;
use std::sync::Arc;

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

/// Mass was asked for that there is none of.
fn not_observed() -> Error {
    Error::Other("attention was never observed, so slots have no mass".into())
}

impl Runner {
    fn new(weights: Arc<Weights>, options: CpuOptions) -> Result<Self> {
        let CpuOptions { threads, isa, kv_types: _, capacity, max_tokens } = options;
        Ok(Self {
            pool: Pool::new(threads)?,
            isa,
            scratch: Scratch::new(isa, &weights, capacity, max_tokens)?,
            max_tokens,
            frequencies: crate::model::rope::frequencies(),
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
