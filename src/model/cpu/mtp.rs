//! Drafts by the block that predicts the token after the next one. A *pair* is a token and the model's final state of
//! the token before it; the block predicts the token that follows.

use super::acts::Activations;
use super::attention::AttentionLayer;
use super::kv::CpuCache;
use super::matmul::{self, MatmulOutput};
use super::runs::PassRuns;
use super::steps::{KV_COLS, Q_COLS, QKV, Scratch, add_projection, norm_row, scratch_bytes, task_cols};
use crate::device::{KvCache, Logits, Ring, Run};
use crate::dims::*;
use crate::rope::Frequencies;
use crate::weights::{MtpBlock, Weights};
use files::Result;
use numeric::kv::KvTypes;
use numeric::pool::Pool;
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::Isa;
use std::sync::Arc;

/// Slots of a sequence's cache of pairs.
pub const MTP_SLOTS: usize = 1024;
/// Number of tokens that the block predicts: the first ones, which a vocabulary of merged pairs has most often. Of 248,320,
/// they take a quarter of the time.
pub const MTP_VOCAB: usize = if VOCAB < 1 << 16 { VOCAB } else { 1 << 16 };
/// Pairs computed at once.
const CHUNK: usize = 32;

/// Bytes of the buffers of a pass.
pub fn mtp_scratch_bytes() -> usize {
    scratch_bytes(MTP_SLOTS, CHUNK) + CHUNK * 2 * DIM * (size_of::<f32>() + 2)
}

/// The block on the CPU: everything that a pass over pairs needs, except the caches.
pub struct MtpDevice {
    weights: Arc<Weights>,
    pool: Pool,
    isa: Isa,
    scratch: Scratch,
    /// Normed embedding and state of each pair.
    joined: Activations,
    frequencies: Frequencies,
}

impl MtpDevice {
    /// Allocates the buffers of a pass and starts the threads; `None` if the weights have no such block.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new(weights: &Arc<Weights>, isa: Isa, threads: usize) -> Result<Option<Self>> {
        let Some(block) = weights.mtp.as_ref().filter(|_| HAS_MTP) else { return Ok(None) };
        Ok(Some(Self {
            pool: Pool::new(threads),
            isa,
            scratch: Scratch::new(isa, weights, MTP_SLOTS, CHUNK)?,
            joined: Activations::new(isa, CHUNK, 2 * DIM, block.join.activation_forms())?,
            frequencies: Frequencies::new(),
            weights: Arc::clone(weights),
        }))
    }

    /// An empty cache of pairs, of which only layer [`MTP_LAYER`] is used: pages of the others take no memory. The
    /// types are not rotated ones.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new_cache(&self, types: KvTypes) -> Result<Box<dyn KvCache>> {
        Ok(Box::new(CpuCache::new(types, (MTP_SLOTS, Ring::new(CHUNK)), 0..LAYERS)?))
    }

    /// Appends the pairs of `run`'s tokens and these states, `[token][DIM]`, to its cache, which has room for them.
    /// Computes the states of the last ones that the run asks for, and no logits: see [`MtpDevice::compute_logits`].
    ///
    /// # Errors
    ///
    /// None, unless the cache is another device's.
    pub fn append_pairs(&mut self, run: Run<'_>, states: &[f32]) -> Result<()> {
        let Run { cache, mut tokens, mut pos, hidden, .. } = run;
        let mut states = states;
        while tokens.len() > CHUNK {
            let (some, rest) = tokens.split_at(CHUNK);
            let (some_states, rest_states) = states.split_at(CHUNK * DIM);
            self.append_chunk(Run::new(cache, some, pos, Logits::None), some_states)?;
            (tokens, states, pos) = (rest, rest_states, pos + CHUNK);
        }
        self.append_chunk(Run { hidden, ..Run::new(cache, tokens, pos, Logits::None) }, states)
    }

    /// Computes the logits, `[MTP_VOCAB]`, of a state of the block.
    pub fn compute_logits(&mut self, state: &[f32], logits: &mut [f32]) {
        let Self { weights, pool, isa, scratch: s, .. } = self;
        s.h.fill_rows::<DIM>(pool, *isa, 1, |_, h| h.copy_from_slice(state));
        let x = s.h.as_input::<DIM>(*isa, 1);
        let tile = task_cols(1, (MTP_VOCAB, DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(logits, MTP_VOCAB, tile, |mut tile| {
            matmul::project(*isa, &weights.head, x, MatmulOutput::whole_tile(&mut tile), |to, y, _| {
                to.copy_from_slice(y);
            });
        });
    }

    fn append_chunk(&mut self, run: Run<'_>, states: &[f32]) -> Result<()> {
        let Self { weights, pool, isa, scratch: s, joined, frequencies } = self;
        let block = weights.mtp.as_ref().expect("invariant: `new` has found it");
        let (runs, isa) = (&mut [run], *isa);
        let mut n = runs[0].tokens.len();
        s.embed_tokens(weights, runs, frequencies);
        join_pairs(s, block, (joined, states), pool, (isa, n));
        let mut seqs = PassRuns::default();
        seqs.borrow_rows(runs)?;
        let layer = AttentionLayer { index: MTP_LAYER, weights: &block.layer, calibration: &[] };
        s.norm_tokens(&block.layer.attn_norm, pool, isa, n);
        let narrows = seqs.tokens_in_last_layer() < n;
        s.compute_qkv(layer.weights, if narrows { KV_COLS } else { 0..QKV }, pool, isa, n);
        s.store_keys_values(layer, &seqs, pool, isa);
        if narrows {
            n = s.select_output_tokens(&mut seqs);
            if n == 0 {
                return Ok(());
            }
            s.norm_tokens(&block.layer.attn_norm, pool, isa, n);
            s.compute_qkv(layer.weights, Q_COLS, pool, isa, n);
        }
        s.compute_attention(layer, &seqs, pool, isa);
        s.project_attention(layer.weights, pool, isa, n);
        s.norm_tokens(&block.layer.ffn_norm, pool, isa, n);
        s.gate_up(layer.weights, pool, isa, n);
        s.project_down(layer.weights, pool, isa, n);
        s.write_hidden(&block.norm, &mut seqs, isa);
        Ok(())
    }
}

/// Joins the embeddings of `n` tokens, which are in the residual, with the states before them.
fn join_pairs(
    s: &mut Scratch,
    block: &MtpBlock,
    (joined, states): (&mut Activations, &[f32]),
    pool: &Pool,
    (isa, n): (Isa, usize),
) {
    let x = &s.x;
    joined.fill_rows::<{ 2 * DIM }>(pool, isa, n, |t, row| {
        let (embedding, state) = row.split_at_mut(DIM);
        norm_row(isa, &x[t * DIM..][..DIM], &block.embed_norm, embedding);
        norm_row(isa, &states[t * DIM..][..DIM], &block.hidden_norm, state);
    });
    s.x[..n * DIM].fill(0.0);
    add_projection(&mut s.x, (&block.join, &[]), joined.as_input::<{ 2 * DIM }>(isa, n), pool, isa);
}
