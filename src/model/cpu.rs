//! The CPU: the whole forward pass, one line per step.
//!
//! Every instruction set, thread count and mixture of runs gives the same bits; `simd` and `simd::attend` explain how.

mod acts;
mod assistant;
pub mod attention;
mod attention_inputs;
pub mod experts;
mod input_squares;
mod kv;
mod mamba;
mod matmul;
mod mtp;
mod per_layer;
mod projections;
mod recurrent;
mod runs;
mod softmax_cell;

mod steps;

use crate::device::{CancelToken, Device, KvCache, Ring, Run};
use crate::dims::*;
use crate::rope::Frequencies;
use crate::trace::{Steps, Trace};
use crate::weights::{Mixer, Weights};
pub use assistant::AssistantDevice;
use attention::AttentionLayer;
use files::Result;
use input_squares::InputOf;
pub use input_squares::InputSquares;
use kv::CpuCache;
pub use kv::mass_bytes;
pub use mtp::{MTP_SLOTS, MTP_VOCAB, MtpDevice, mtp_scratch_bytes};
use numeric::kv::KvTypes;
use numeric::pool::Pool;
use numeric::simd::Isa;
use runs::PassRuns;
use std::ops::Range;
use std::sync::Arc;
use steps::{KV_COLS, Q_COLS, QKV, Scratch};
pub use steps::{notes_bytes, scratch_bytes, thread_bytes};

/// Tokens of a pass that is not interrupted if the model has a recurrent state.
const SHORT_PASS: usize = 16;

/// Settings of a [`CpuDevice`].
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Number of threads, the caller included.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Element types of caches.
    pub kv_types: KvTypes,
    /// Slots that scratch is allocated for; it grows for longer caches.
    pub slots: usize,
    /// Maximum number of tokens of one pass; scratch is sized for it.
    pub max_tokens: usize,
}

/// The CPU as a device: everything a pass needs except the caches.
pub struct CpuDevice {
    weights: Arc<Weights>,
    pool: Pool,
    isa: Isa,
    kv_types: KvTypes,
    scratch: Scratch,
    /// Empty between passes.
    sequences: PassRuns<'static>,
    max_tokens: usize,
    frequencies: Frequencies,
    trace: Option<Trace>,
    /// Sums of squared queries: see [`CpuDevice::record_query_squares`].
    squares: Option<Vec<f64>>,
    /// Squares of the inputs of matrices, if they are measured.
    inputs: Option<InputSquares>,
    /// The layers that it computes: all, unless it is a stage of a split.
    layers: Range<usize>,
}

impl CpuDevice {
    /// Allocates the buffers of a pass and starts the threads.
    pub fn new(weights: Arc<Weights>, options: CpuOptions) -> Result<Self> {
        let CpuOptions { threads, isa, kv_types, slots, max_tokens } = options;
        let max_tokens = max_tokens.max(1);
        Ok(Self {
            pool: Pool::new(threads),
            isa,
            kv_types,
            scratch: Scratch::new(isa, &weights, slots, max_tokens)?,
            sequences: PassRuns::default(),
            max_tokens,
            frequencies: Frequencies::new(),
            trace: None,
            squares: None,
            inputs: None,
            layers: 0..LAYERS,
            weights,
        })
    }

    /// Computes only these layers, as a stage of a [split](crate::split).
    pub fn with_layers(self, layers: Range<usize>) -> Self {
        Self { layers, ..self }
    }

    /// Computes the pass. If it fails, the slots of its tokens are still taken.
    fn compute_pass(&mut self, runs: &mut [Run<'_>]) -> Result<()> {
        let Self { weights, pool, isa, scratch: s, sequences, trace, squares, inputs, layers, .. } = self;
        let (mut n, isa) = (runs.iter().map(|run| run.tokens.len()).sum(), *isa);
        let observed = runs.iter().any(|run| run.observed_tokens > 0);
        let last = runs.last().map_or(0, |run| run.pos + run.tokens.len() - 1);
        let mut steps = Steps::start_pass(trace.as_mut(), n);

        s.embed_tokens(weights, runs, &self.frequencies); // embedding rows and RoPE angles
        s.embed_for_layers(weights, pool, isa, n); // embeddings that each layer has of a token
        steps.end_step("embed", 0);
        let mut seqs = std::mem::take(sequences).into_empty();
        seqs.borrow_rows(runs)?;
        if layers.start > 0 {
            seqs.read_residual(&mut s.x); // from the stage before
        }
        if steps.is_traced() {
            seqs.force_last_token(); // its residual is digested after every layer
        }
        // Layers behind those of this device read the residual of all tokens.
        let narrows = squares.is_none() && layers.end == LAYERS && !is_recurrent(LAST_WRITING_LAYER);
        let narrows = narrows && seqs.tokens_in_last_layer() < n;
        for (index, layer) in layers.clone().zip(&weights.layers[layers.clone()]) {
            let narrows = narrows && index == LAST_WRITING_LAYER;
            s.norm_tokens(&layer.attn_norm, pool, isa, n); // RMS norm before attention
            steps.end_step("norm", index);
            if let Some(inputs) = inputs {
                inputs.add(index, InputOf::Mixer, &s.h, (DIM, 0..n));
            }
            match &layer.mixer {
                Mixer::Attention(_) | Mixer::LocalAttention(_) => {
                    let attending = AttentionLayer::of(weights, index);
                    let columns = match (narrows, has_cache(index)) {
                        (true, _) => KV_COLS,
                        (false, true) => 0..QKV,
                        (false, false) => Q_COLS,
                    };
                    s.compute_qkv(layer, columns, pool, isa, n); // queries, keys and values
                    steps.end_step("qkv", index);
                    if let Some(squares) = squares {
                        s.add_squares(attending, isa, n, &mut squares[kv_layer(index) * KV_DIM..]);
                    }
                    if has_cache(index) {
                        s.store_keys_values(attending, &seqs, pool, isa); // keys are rotated by their position and stored in the cache
                        steps.end_step("rope", index);
                    }
                    if narrows {
                        n = s.select_output_tokens(&mut seqs); // from here on, only tokens whose logits are wanted
                        if n == 0 {
                            pool.check_cancelled()?;
                            break;
                        }
                        s.norm_tokens(&layer.attn_norm, pool, isa, n);
                        s.compute_qkv(layer, Q_COLS, pool, isa, n);
                        steps.end_step("qkv", index);
                    }
                    s.compute_attention(attending, &seqs, pool, isa); // each query attends to all slots up to its own
                    steps.end_step("attend", index);
                    if observed {
                        s.record_mass(attending, &mut seqs, pool, isa); // adds up the attention each slot received
                        steps.end_step("observe", index);
                    }
                    s.project_attention(layer, pool, isa, n); // attention's output, added to the residual
                }
                Mixer::ShortConv(w) => {
                    s.compute_conv_inputs(w, pool, isa, n); // gates b and c, and x
                    steps.end_step("qkv", index);
                    s.mix_by_convolution(w, index, &seqs, pool, (isa, n)); // c * conv(b * x)
                    steps.end_step("mix", index);
                    s.project_mixed(&w.w_out, pool, isa, n);
                }
                Mixer::DeltaNet(w) => {
                    s.compute_delta_inputs(w, pool, isa, n); // queries, keys, values, gates, decays
                    steps.end_step("qkv", index);
                    s.mix_by_delta_net(w, index, &seqs, pool, (isa, n)); // each token updates the state and reads it
                    steps.end_step("mix", index);
                    s.project_mixed(&w.w_out, pool, isa, n);
                }
                Mixer::None => {}
            }
            if let Some(w) = layer.mamba.as_ref().filter(|_| HAS_MAMBA) {
                s.compute_mamba_inputs(w, pool, isa, n); // gate, x, b, c and time steps
                steps.end_step("qkv", index);
                s.mix_by_mamba(w, index, &seqs, pool, (isa, n)); // each token updates the state and reads it
                steps.end_step("mix", index);
                s.project_mixed(&w.w_out, pool, isa, n);
            }
            s.post_norm(&layer.attn_post_norm, 1.0, pool, isa, n);
            steps.end_step("out", index);
            s.norm_tokens(&layer.ffn_norm, pool, isa, n); // RMS norm before the feed-forward layer
            steps.end_step("norm", index);
            if let Some(inputs) = inputs {
                inputs.add_mixer_outputs(index, s, n);
            }
            s.gate_up(layer, pool, isa, n); // silu(gate) * up, of the experts that a router chooses if there are several
            steps.end_step("gate_up", index);
            if let Some(inputs) = inputs.as_mut().filter(|_| has_ffn(index)) {
                inputs.add(index, InputOf::Ffn, &s.h, (DIM, 0..n));
            }
            s.project_down(layer, pool, isa, n); // back to the residual's width, and added to it
            steps.end_step("down", index);
            if let Some(inputs) = inputs {
                inputs.add_gated_ups(index, s, n);
            }
            s.add_per_layer(layer, index, pool, isa, n); // the layer's own embedding of the token
            steps.record_residual(last, index, &s.x[(n - 1) * DIM..][..DIM]);
            pool.check_cancelled()?;
        }
        if layers.end < LAYERS {
            seqs.write_residual(&s.x); // for the next stage
            *sequences = seqs.into_empty();
            return Ok(());
        }
        s.write_hidden(&weights.norm, &mut seqs, isa); // final states, for drafts by the model itself
        if s.list_output_tokens(&mut seqs) {
            s.compute_logits(weights, &mut seqs, pool, isa); // final RMS norm, one logit per vocabulary entry
            steps.end_step("head", LAYERS);
            pool.check_cancelled()?;
        }
        *sequences = seqs.into_empty();
        Ok(())
    }
}

impl CpuDevice {
    /// From now on, sums up the squares of all tokens' queries before calibration, to compute a calibration from.
    pub fn record_query_squares(&mut self) {
        self.squares = Some(vec![0.0; LAYERS * KV_DIM]);
    }

    /// Sums of squares so far, over all tokens and the query heads of each group: `[layer][kv_head][HEAD_DIM]`.
    pub fn query_squares(&self) -> &[f64] {
        self.squares.as_deref().unwrap_or_default()
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa.name(), self.pool.thread_count())
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn KvCache>> {
        Ok(Box::new(CpuCache::new(self.kv_types, (slots, Ring::new(self.max_tokens)), self.layers.clone())?))
    }

    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()> {
        let n: usize = runs.iter().map(|run| run.tokens.len()).sum();
        assert!(n > 0 && n <= self.max_tokens);
        let slots = runs.iter().map(|run| run.cache.extent().slots).max().unwrap_or(0);
        let observed = runs.iter().any(|run| run.observed_tokens > 0);
        self.scratch.grow_for(slots, if observed { self.max_tokens } else { 0 })?;
        // A few tokens are done before anyone waits, and an interrupted pass costs a recurrent state.
        let is_short = HAS_STATE && n <= SHORT_PASS;
        self.pool.set_cancel(cancel.filter(|_| !observed && !is_short));
        let result = self.compute_pass(runs);
        if result.is_err() {
            runs::release_slots(runs);
        }
        result
    }

    fn thread_pool(&self) -> Option<&Pool> {
        Some(&self.pool)
    }

    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        std::mem::replace(&mut self.trace, trace)
    }
}
