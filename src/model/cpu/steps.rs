//! The buffers of a forward pass, and all its steps except attention. Each step computes all tokens on all threads.

use super::acts::{Activations, try_vec};
use super::experts::ExpertScratch;
use super::matmul::{self, GateUp, MatmulInput, MatmulOutput, OutputColumns};
use super::runs::PassRuns;
use super::softmax_cell::AtomicSoftmax;
use crate::device::Run;
use crate::dims::*;
use crate::rope::{Frequencies, compute_angles};
use crate::weights::{
    ActivationForms, FeedForward, Ffn, Layer, Matrix, Mixer, MixtureOfExperts, Weights, forms_of,
};
use files::Result;
use files::blocks::BLOCK;
use files::config::Norm;
use numeric::pool::{Pool, RowTable, Tile};
use numeric::quant::activations::{ActBlock, ActTile};
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::attend::{CHUNK, MAX_QUERIES, Partial};
use numeric::simd::{Isa, ops};
use std::ops::Range;

/// Columns of q, the gate of attention's output, k and v in the fused buffer, each padded to whole groups of sixteen.
pub(super) const Q_PAD: usize = Q_DIM.next_multiple_of(16);
pub(super) const KV_PAD: usize = KV_DIM.next_multiple_of(16);
pub(super) const K_AT: usize = Q_PAD + GATE_DIM.next_multiple_of(16);
pub(super) const QKV: usize = K_AT + 2 * KV_PAD;
/// The columns of q and the gate, and those of k and v.
pub(super) const Q_COLS: Range<usize> = 0..K_AT;
pub(super) const KV_COLS: Range<usize> = K_AT..QKV;
/// Weight bytes of one task in decode: small enough that no thread waits long for the last task, large enough
/// that the first lines, which are not prefetched yet, are a small part of it (20 KiB: 4 % slower).
const DECODE_TASK_BYTES: usize = 128 << 10;
/// Weight bytes of one task if a thread's share of a matrix is more than [`DECODE_TASKS`] small tasks. It helps
/// `gate_up`, where memory waits for silu between two pieces. (One thread of a Zen 4 EPYC reads weights at 76 % of the
/// bandwidth instead of 73.)
const LARGE_DECODE_TASK_BYTES: usize = 512 << 10;
/// Number of small tasks per thread that lets all threads end together.
const DECODE_TASKS: usize = 32;
/// Columns of one task in prefill: enough to use the activations in the first-level cache well, few enough
/// that threads end together.
const PREFILL_TASK_COLS: usize = 128;

/// Buffers of one forward pass, sized once.
pub(super) struct Scratch {
    /// Residual stream: `[token][DIM]`
    pub(super) x: Vec<f32>,
    /// Normed residual.
    pub(super) h: Activations,
    /// `[token][q | gate | k | v]`, see [`QKV`]; in layers with narrower heads, they fill the beginning of each part.
    pub(super) qkv: Vec<f32>,
    /// Attention output: `[token][head][HEAD_DIM]`, zeros behind narrower heads
    pub(super) att: Vec<f32>,
    /// Projected inputs of a recurrent layer: `[token][MIX]`, see [`MIX`]; empty, like the next three, if there is none.
    pub(super) mix: Vec<f32>,
    /// Output of its convolution: `[token][CONV_CHANNELS]`
    pub(super) conv: Vec<f32>,
    /// Output of the matrices of a delta net or Mamba2: `[block][token][16]` of each run
    pub(super) core: Vec<f32>,
    /// Output of the mixer before its projection.
    pub(super) mixed: Activations,
    /// Attention output in the forms that the output projection reads.
    pub(super) att_in: Activations,
    /// silu(gate) * up.
    pub(super) ffn: Activations,
    /// Buffers of layers with experts.
    pub(super) experts: ExpertScratch,
    /// Embeddings that all layers have of a token: `[token][layer][PER_LAYER_DIM]`; empty, like the next three, if the
    /// model has none.
    pub(super) per_layer: Vec<f32>,
    /// Projection of the residual to the width of one of them: `[token][PER_LAYER_DIM]`
    pub(super) per_layer_gate: Vec<f32>,
    /// One of them times its gate.
    pub(super) per_layer_in: Activations,
    /// Tokens of the pass.
    pub(super) token_ids: Vec<u32>,
    /// Partial attention of one token: `[kv_head][chunk][query head of the group]`
    pub(super) partials: Vec<Partial<HEAD_DIM>>,
    /// Softmax of the queries of observed tokens: `[token][HEADS]`; empty until any are.
    pub(super) notes: Vec<AtomicSoftmax>,
    /// Run that each token belongs to.
    pub(super) run_of: Vec<u32>,
    /// Tokens whose logits are wanted.
    wanted: Vec<usize>,
    /// Destinations of their logits.
    logits: RowTable<f32>,
    /// Output of attention or the feed-forward layer before its norm: `[token][DIM]`; empty if the model has no such
    /// norm.
    pub(super) post: Vec<f32>,
    /// Cosines and sines of the tokens' positions: `[token][ANGLES]`
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

/// Number of partials for a cache of `capacity` slots.
pub(super) fn count_partials(capacity: usize) -> usize {
    HEADS * capacity.div_ceil(CHUNK)
}

/// Allocates the partials for a cache of `capacity` slots.
pub(super) fn alloc_partials(capacity: usize) -> Result<Vec<Partial<HEAD_DIM>>> {
    try_vec(count_partials(capacity), Partial::EMPTY)
}

/// Bytes of scratch for passes of `max_tokens` tokens over caches of `capacity` slots.
pub fn scratch_bytes(capacity: usize, max_tokens: usize) -> usize {
    let isa = Isa::detect().unwrap_or(Isa::Scalar);
    let acts_of = |rows: usize, w: usize| {
        let blocks = rows * size_of::<ActBlock>() + isa.act_tiles(rows) * size_of::<ActTile>();
        w / BLOCK * blocks + rows * 4 * w
    };
    let acts = |w| acts_of(max_tokens, w);
    let post = if POST_NORMS { DIM } else { 0 };
    let recurrent = MIX + CONV_CHANNELS + STATE_WIDTH;
    let per_layer = PER_LAYER_ROW + PER_LAYER_DIM;
    let floats = max_tokens * 4 * (DIM + post + QKV + Q_DIM + 2 * ANGLES + recurrent + per_layer);
    let lists = max_tokens * (size_of::<u32>() + size_of::<usize>());
    let partials = count_partials(capacity) * size_of::<Partial<HEAD_DIM>>();
    floats
        + lists
        + acts(DIM)
        + acts(Q_DIM)
        + acts(MAX_FFN_DIM)
        + acts(MIXED)
        + acts(PER_LAYER_DIM)
        + ExpertScratch::count_bytes(isa, max_tokens, acts_of)
        + partials
}

/// Additional bytes of scratch for passes that observe `max_tokens` tokens.
pub const fn notes_bytes(max_tokens: usize) -> usize {
    size_of::<AtomicSoftmax>() * HEADS * max_tokens
}

/// Stack bytes that a thread touches: tiles of attention, of the widest row, and room for calls.
pub const fn thread_bytes() -> u64 {
    let attention = MAX_QUERIES * (4 * HEAD_DIM + 2 * size_of::<Partial<HEAD_DIM>>());
    (attention + 4 * (MAX_FFN_DIM + DIM + Q_DIM + PER_LAYER_ROW + 2 * MAMBA_DIM) + (256 << 10)) as u64
}

/// Activation forms that matrices read of the normed residual, of attention's output, of a recurrent layer's, of the
/// feed-forward's, and of a layer's embedding; and experts of their input and of their own feed-forward's.
fn list_forms(weights: &Weights) -> [ActivationForms; 7] {
    let of_experts = |of: fn(&MixtureOfExperts) -> ActivationForms| {
        activation_forms(weights, |layer| match &layer.ffn {
            Ffn::Experts(w) => of(w),
            _ => ActivationForms::default(),
        })
    };
    let of_projection = forms_of(weights.per_layer.as_ref().map(|w| &w.projection));
    let normed = activation_forms(weights, Layer::normed_forms) | weights.head.activation_forms();
    [
        normed | of_projection,
        activation_forms(weights, |layer| match &layer.mixer {
            Mixer::Attention(w) => w.wo.activation_forms(),
            Mixer::LocalAttention(w) => w.wo.activation_forms(),
            _ => ActivationForms::default(),
        }),
        activation_forms(weights, |layer| match &layer.mixer {
            Mixer::ShortConv(w) => w.w_out.activation_forms(),
            Mixer::DeltaNet(w) => w.w_out.activation_forms(),
            _ => forms_of(layer.mamba.as_ref().map(|w| &w.w_out)),
        }),
        activation_forms(weights, |layer| match &layer.ffn {
            Ffn::Usual(w) => w.down.activation_forms(),
            Ffn::Wide(w) => w.down.activation_forms(),
            Ffn::Experts(w) => {
                let branch = forms_of(w.branches.as_ref().map(|branches| &branches.shared.down));
                forms_of(w.shared.as_ref().map(|(w, _)| &w.down)) | branch
            }
            Ffn::None => ActivationForms::default(),
        }),
        activation_forms(weights, |layer| forms_of(layer.per_layer.as_ref().map(|w| &w.out))),
        of_experts(MixtureOfExperts::gate_up_forms),
        of_experts(|w| w.down.activation_forms()),
    ]
}

/// Union of the activation forms that some matrices read, over all layers.
fn activation_forms(weights: &Weights, of: impl Fn(&Layer) -> ActivationForms) -> ActivationForms {
    let layers = weights.layers.iter().chain(weights.mtp.as_ref().map(|block| &block.layer));
    layers.fold(ActivationForms::default(), |all, layer| all | of(layer))
}

/// Columns of one task over a `(rows, cols)` matrix, a multiple of `run`.
pub(super) fn task_cols(tokens: usize, (rows, cols): (usize, usize), run: usize, threads: usize) -> usize {
    if tokens > 1 {
        return PREFILL_TASK_COLS.min(rows.div_ceil(8 * threads).next_multiple_of(run));
    }
    let row_bytes = cols / BLOCK * 18 + 1;
    let bytes = rows * row_bytes / (DECODE_TASKS * threads);
    (bytes.clamp(DECODE_TASK_BYTES, LARGE_DECODE_TASK_BYTES) / row_bytes)
        .next_multiple_of(run)
        .min(rows.div_ceil(threads).next_multiple_of(run))
}

impl Scratch {
    /// Scratch for passes of `max_tokens` tokens over a cache of `capacity` slots.
    pub(super) fn new(isa: Isa, weights: &Weights, capacity: usize, max_tokens: usize) -> Result<Self> {
        let [of_norm, of_att, of_mixed, of_ffn, of_per_layer, of_experts @ ..] = list_forms(weights);
        Ok(Self {
            x: try_vec(max_tokens * DIM, 0.0)?,
            h: Activations::new(isa, max_tokens, DIM, of_norm)?,
            qkv: try_vec(max_tokens * QKV, 0.0)?,
            att: try_vec(max_tokens * Q_DIM, 0.0)?,
            att_in: Activations::new(isa, max_tokens, Q_DIM, of_att)?,
            mix: try_vec(max_tokens * MIX, 0.0)?,
            conv: try_vec(max_tokens * CONV_CHANNELS, 0.0)?,
            core: try_vec(max_tokens * STATE_WIDTH, 0.0)?,
            mixed: Activations::new(isa, max_tokens, MIXED, of_mixed)?,
            ffn: Activations::new(isa, max_tokens, MAX_FFN_DIM, of_ffn)?,
            experts: ExpertScratch::new(isa, max_tokens, of_experts)?,
            per_layer: try_vec(max_tokens * PER_LAYER_ROW, 0.0)?,
            per_layer_gate: try_vec(max_tokens * PER_LAYER_DIM, 0.0)?,
            per_layer_in: Activations::new(isa, max_tokens, PER_LAYER_DIM, of_per_layer)?,
            token_ids: Vec::with_capacity(if HAS_PER_LAYER { max_tokens } else { 0 }),
            partials: alloc_partials(capacity)?,
            notes: Vec::new(),
            run_of: Vec::with_capacity(max_tokens),
            wanted: Vec::with_capacity(max_tokens),
            logits: RowTable::default(),
            post: try_vec(if POST_NORMS { max_tokens * DIM } else { 0 }, 0.0)?,
            cos: try_vec(max_tokens * ANGLES, 0.0)?,
            sin: try_vec(max_tokens * ANGLES, 0.0)?,
        })
    }

    /// Grows for caches of `slots` slots and for notes on `observed` tokens.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub(super) fn grow_for(&mut self, slots: usize, observed: usize) -> Result<()> {
        if self.partials.len() < count_partials(slots) {
            self.partials = alloc_partials(slots)?;
        }
        if self.notes.len() < observed * HEADS {
            self.notes = AtomicSoftmax::allocate(observed * HEADS)?;
        }
        Ok(())
    }

    /// Looks the tokens' embedding rows up and prepares their RoPE angles.
    pub(super) fn embed_tokens(&mut self, weights: &Weights, runs: &[Run<'_>], frequencies: &Frequencies) {
        self.run_of.clear();
        self.token_ids.clear();
        let tokens = runs.iter().enumerate().flat_map(|(run, r)| {
            r.tokens.iter().enumerate().map(move |(i, &token)| (run, token as usize, r.pos + i))
        });
        for (t, (run, token, pos)) in tokens.enumerate() {
            self.run_of.push(run as u32);
            if HAS_PER_LAYER {
                self.token_ids.push(token as u32);
            }
            weights.embed_token(token, pos, &mut self.x[t * DIM..][..DIM]);
            let at = t * ANGLES..(t + 1) * ANGLES;
            let (cos, sin) = (&mut self.cos[at.clone()], &mut self.sin[at]);
            compute_angles(pos, frequencies.for_position(pos, runs[run].known_len), cos, sin);
        }
    }

    /// Drops the tokens that need nothing more once their keys and values are in the caches. Returns the number left,
    /// which are now the first of the pass.
    pub(super) fn select_output_tokens(&mut self, seqs: &mut PassRuns<'_>) -> usize {
        self.run_of.clear();
        for (run, seq) in seqs.iter_mut().enumerate() {
            let to = self.run_of.len();
            let from = seq.keep_output_tokens(to);
            self.run_of.extend(from.clone().map(|_| run as u32));
            for (rows, width) in [
                (&mut self.x, DIM),
                (&mut self.cos, ANGLES),
                (&mut self.sin, ANGLES),
                (&mut self.per_layer, PER_LAYER_ROW),
            ] {
                rows.copy_within(from.start * width..from.end * width, to * width);
            }
        }
        self.run_of.len()
    }

    /// Computes silu(gate) * up of the normed residual, in the forms that `down` reads.
    pub(super) fn gate_up(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        match &layer.ffn {
            Ffn::Usual(w) => self.compute_gate_up(w, pool, isa, n),
            Ffn::Wide(w) => self.compute_gate_up(w, pool, isa, n),
            Ffn::Experts(w) if HAS_EXPERTS => self.compute_experts(w, pool, isa, n),
            Ffn::Experts(_) => unreachable!("invariant: the model has no experts"),
            Ffn::None => {}
        }
    }

    pub(super) fn compute_gate_up<const W: usize>(
        &mut self,
        w: &FeedForward<W>,
        pool: &Pool,
        isa: Isa,
        n: usize,
    ) {
        let x = self.h.as_input::<DIM>(isa, n);
        let w = GateUp { gate: w.gate.as_ref(), gate_bias: &[], up: &w.up, up_bias: &w.up_bias };
        let cols = if HAS_GATE { 2 * DIM } else { DIM };
        let tile = task_cols(n, (W, cols), matmul::RUN, pool.thread_count());
        if !self.ffn.floats.is_empty() {
            pool.run_columns(&mut self.ffn.floats[..n * W], W, tile, |mut tile| {
                matmul::gate_up(isa, w, x, OutputColumns::of_tile(&tile), |first, at, products| {
                    put_floats(&mut tile, (first, at), products);
                });
            });
            return self.ffn.quantise_rows::<W>(pool, isa, n);
        }
        let blocks = W / BLOCK;
        pool.run_columns(&mut self.ffn.blocks[..n * blocks], blocks, tile / BLOCK, |mut tile| {
            let columns = OutputColumns { first: tile.col * BLOCK, width: tile.cols * BLOCK };
            matmul::gate_up(isa, w, x, columns, |first, at, products| {
                put_blocks(isa, &mut tile, (first, at), products);
            });
        });
        self.ffn.arrange_tiles::<W>(pool, isa, n);
    }

    /// Adds the feed-forward layer's second half to the residual.
    pub(super) fn project_down(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        match &layer.ffn {
            Ffn::Usual(w) => self.project_ffn(w, pool, isa, n),
            Ffn::Wide(w) => self.project_ffn(w, pool, isa, n),
            Ffn::Experts(w) if HAS_EXPERTS => self.project_experts(w, pool, isa, n),
            Ffn::Experts(_) => unreachable!("invariant: the model has no experts"),
            Ffn::None => {}
        }
        self.post_norm(&layer.ffn_post_norm, if HAS_PER_LAYER { 1.0 } else { layer.scalar }, pool, isa, n);
    }

    fn project_ffn<const W: usize>(&mut self, w: &FeedForward<W>, pool: &Pool, isa: Isa, n: usize) {
        let to = if POST_NORMS { &mut self.post } else { &mut self.x };
        add_projection(to, (&w.down, &w.down_bias), self.ffn.as_input::<W>(isa, n), pool, isa);
    }

    /// Norms the residual of the first `n` tokens into `h`; copies it if the model has no norms there. Does nothing for
    /// a part that the layer lacks.
    pub(super) fn norm_tokens(&mut self, w: &[f32], pool: &Pool, isa: Isa, n: usize) {
        if !PRE_NORMS {
            return self.copy_tokens(pool, isa, n);
        }
        if ONE_PART_LAYERS && w.is_empty() {
            return;
        }
        let x = &self.x;
        self.h.fill_rows::<DIM>(pool, isa, n, |t, h| norm_row(isa, &x[t * DIM..][..DIM], w, h));
    }

    /// Copies the residual of the first `n` tokens into `h`.
    pub(super) fn copy_tokens(&mut self, pool: &Pool, isa: Isa, n: usize) {
        let x = &self.x;
        self.h.fill_rows::<DIM>(pool, isa, n, |t, h| h.copy_from_slice(&x[t * DIM..][..DIM]));
    }

    /// Norms `post` and adds it to the residual, if the model has such norms; then multiplies the residual with `scalar`.
    pub(super) fn post_norm(&mut self, w: &[f32], scalar: f32, pool: &Pool, isa: Isa, n: usize) {
        if !POST_NORMS {
            return;
        }
        let post = &self.post;
        let rows = n.div_ceil(4 * pool.thread_count());
        pool.run_tiles(&mut self.x[..n * DIM], DIM, (rows, DIM), |mut tile| {
            let mut h = [0.0; DIM];
            for r in 0..tile.rows {
                norm_row(isa, &post[(tile.row + r) * DIM..][..DIM], w, &mut h);
                let row = tile.row_mut(r);
                row.iter_mut().zip(&h).for_each(|(x, h)| *x += h);
                if LAYER_SCALARS {
                    row.iter_mut().for_each(|x| *x *= scalar);
                }
            }
        });
    }

    /// Writes the normed residual of the tokens whose final states are wanted.
    pub(super) fn write_hidden(&self, norm: &[f32], seqs: &mut PassRuns<'_>, isa: Isa) {
        for run in seqs.iter_mut() {
            let end = run.span.first + run.span.tokens;
            let rows = run.hidden.chunks_exact_mut(DIM).rev();
            for (t, h) in (run.span.first..end).rev().zip(rows) {
                norm_row(isa, &self.x[t * DIM..][..DIM], norm, h);
            }
        }
    }

    /// Lists the tokens whose logits are wanted; false if there are none.
    pub(super) fn list_output_tokens(&mut self, seqs: &mut PassRuns<'_>) -> bool {
        self.wanted.clear();
        self.wanted.extend(seqs.iter_mut().flat_map(|run| run.output_tokens()));
        !self.wanted.is_empty()
    }

    /// Computes the final norm and the logits of the tokens wanted.
    pub(super) fn compute_logits(
        &mut self,
        weights: &Weights,
        seqs: &mut PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let (x, wanted) = (&self.x, &self.wanted);
        let n = wanted.len();
        self.h.fill_rows::<DIM>(pool, isa, n, |i, h| {
            norm_row(isa, &x[wanted[i] * DIM..][..DIM], &weights.norm, h)
        });
        let x = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (VOCAB, DIM), GROUP_ROWS, pool.thread_count());
        let rows = seqs.iter_mut().flat_map(|run| run.logits_rows());
        pool.run_scattered_columns(&mut self.logits, rows, (VOCAB, tile), |mut tile| {
            matmul::project(isa, &weights.head, x, MatmulOutput::whole_tile(&mut tile), |dst, y, _| {
                dst.copy_from_slice(y);
                if LOGIT_SCALE != 1.0 {
                    dst.iter_mut().for_each(|y| *y *= LOGIT_SCALE as f32);
                }
                if LOGIT_SOFTCAP > 0.0 {
                    ops::apply_softcap(isa, dst, LOGIT_SOFTCAP as f32);
                }
            });
        });
    }
}

/// Puts products of some tokens from row `first` and column `at` of a tile on.
pub(super) fn put_floats(
    tile: &mut Tile<'_, f32>,
    (first, at): (usize, usize),
    products: &[[f32; matmul::RUN]],
) {
    for (t, y) in products.iter().enumerate() {
        let out = &mut tile.row_mut(first + t)[at..];
        let cols = out.len().min(y.len());
        out[..cols].copy_from_slice(&y[..cols]);
    }
}

/// Quantises products of some tokens, a block of each, from row `first` and column `at` of a tile on.
pub(super) fn put_blocks(
    isa: Isa,
    tile: &mut Tile<'_, ActBlock>,
    (first, at): (usize, usize),
    products: &[[f32; matmul::RUN]],
) {
    for (some, products) in products.chunks(16).enumerate() {
        let mut blocks = [ActBlock::ZERO; 16];
        let blocks = &mut blocks[..products.len()];
        ops::quantise_activations(isa, products.as_flattened(), blocks);
        for (t, block) in blocks.iter().enumerate() {
            tile.row_mut(first + 16 * some + t)[at / BLOCK] = *block;
        }
    }
}

/// Norms one row into `h`.
pub(super) fn norm_row(isa: Isa, x: &[f32], w: &[f32], h: &mut [f32]) {
    match NORM {
        Norm::Rms => ops::rms_norm(isa, x, w, NORM_EPS as f32, h),
        Norm::Layer => ops::layer_norm(isa, x, w, NORM_EPS as f32, h),
    }
}

/// Adds `y` to the residual, or stores it in `post` if it is to be normed first.
#[inline(always)]
pub(super) fn add_to_residual(to: &mut f32, y: f32) {
    const RESIDUAL: f32 = RESIDUAL_SCALE as f32;
    if POST_NORMS {
        *to = y;
    } else if RESIDUAL != 1.0 {
        *to += y * RESIDUAL;
    } else {
        *to += y;
    }
}

/// Adds the products of a matrix and its bias, if there is one, to rows of the residual or of `post`: see
/// [`add_to_residual`].
pub(super) fn add_projection<const COLS: usize>(
    to: &mut [f32],
    (w, bias): (&Matrix<DIM, COLS>, &[f32]),
    x: MatmulInput<'_>,
    pool: &Pool,
    isa: Isa,
) {
    let n = x.tokens;
    let tile = task_cols(n, (DIM, COLS), GROUP_ROWS, pool.thread_count());
    pool.run_columns(&mut to[..n * DIM], DIM, tile, |mut tile| {
        matmul::project(isa, w, x, MatmulOutput::whole_tile(&mut tile), |to, y, row| {
            if (O_BIAS || MLP_BIAS) && !bias.is_empty() {
                to.iter_mut().zip(y).zip(&bias[row..]).for_each(|((to, y), b)| add_to_residual(to, y + b));
            } else {
                to.iter_mut().zip(y).for_each(|(to, y)| add_to_residual(to, *y));
            }
        });
    });
}
