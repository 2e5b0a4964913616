//! Buffers of a forward pass, allocated once. Additional buffers for attention over a longer cache, or for observed
//! attention, are allocated on demand.

use super::defines::{ATTN_BLOCK, FFN_PAD, QKV, SCORES};
use super::shapes::MAX_BATCH_RUNS;
use crate::dims::*;
use crate::model::device::Run;
use crate::model::rope::{Frequencies, compute_angles};
use crate::model::weights::Weights;
use numeric::pool::run_both;
use opencl_runtime::buffer::{
    Access, Buffer, Place, ReadbackBuffer, StagingBuffer, StridedPieces, bytes_of, bytes_of_mut,
};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Integers before the rows of [`Scratch::state`], as in `kernels/common.cl`.
pub const HEADER: usize = 16;
/// Index of the only token's slot in the header; next comes the token whose residual the head reads.
const H_SLOT: usize = 0;
/// Floats in the row of a token: the residual, then the cosines and sines of its position, then its embeddings for each
/// layer, if the model has such.
const STATE_ROW: usize = DIM + 2 * ANGLES + PER_LAYER_ROW;
/// Maximum tokens whose logits are computed at once.
const LOGIT_ROWS: usize = 16;

/// Bytes of the placeholder buffer.
const NONE: usize = 64;

/// Buffers of a forward pass.
pub struct Scratch {
    /// Header, then `[token][x | cos | sin | embeddings of each layer]`: everything the host sends, in one transfer, and the residual stream.
    pub state: StagingBuffer,
    /// `[token][QKV]`
    pub qkv: Buffer,
    /// Attention's output: `[token][head][HEAD_DIM]`
    pub att: Buffer,
    /// Inputs of a recurrent layer: `[token][MIX]`; a placeholder, like the next two, if there is none.
    pub mix: Buffer,
    /// Output of the convolution of a delta net or of Mamba2: `[token][CONV_CHANNELS]`
    pub conv: Buffer,
    /// Output of a recurrent layer before its projection: `[token][MIXED]`
    pub mixed: Buffer,
    /// Projections of tokens for all layers: `[token][PER_LAYER_ROW]`; a placeholder, like the next one, if layers have
    /// no embeddings.
    pub projected: Buffer,
    /// Gate of a layer's embedding: `[token][PER_LAYER_DIM]`
    pub layer_gate: Buffer,
    /// Scores of experts: `[token][SCORES]`; a placeholder, like the next six, if the model has none.
    pub scores: Buffer,
    /// Experts of a token and their weights: `[token][EXPERTS.used][2]`
    pub choices: Buffer,
    /// Lists of each expert's choices: see `kernels/experts.cl`
    pub sorted: Buffer,
    /// silu(gate) * up of each choice: `[token][EXPERTS.used][EXPERTS.dim]`, bytes or floats.
    pub expert_acts: Buffer,
    /// Scales of `expert_acts`: `[token][EXPERTS.used][EXPERTS.dim / 32]`
    pub expert_scales: Buffer,
    /// Output of each choice: `[token][EXPERTS.used][DIM]`; of many tokens before that gate and up
    pub expert_out: Buffer,
    /// Output of the feed-forward beside the experts: `[token][DIM]`
    pub shared_out: Buffer,
    /// Input of the next matrix: `[token][cols]`, bytes or floats.
    pub acts: Buffer,
    /// Scales of `acts`: `[token][cols / 32]`
    pub act_scales: Buffer,
    /// Sums of the halves of each block of `acts`: `[token][cols / 32][2]`
    pub act_sums: Buffer,
    /// `[token][gate: FFN_PAD | up: FFN_PAD]`, without a gate only up
    pub gate_up: Buffer,
    /// `[token][DIM]`: outputs to be normed before they are added to the residual, if the model does that.
    pub post: Buffer,
    /// `[logit_rows][VOCAB]`
    pub logits: Buffer,
    /// Chunks of attention of one token, or of several runs with one token each: `[chunk][HEADS][HEAD_DIM]`
    pub partials: Buffer,
    /// Largest score and softmax sum per chunk: `[chunk][HEADS][2]`
    pub ml: Buffer,
    /// Largest score and softmax sum per token of a run: `[token][HEADS][2]`. `None` until attention is observed.
    pub softmax: Option<Buffer>,
    /// Placeholder for unused kernel arguments.
    pub none: Buffer,
    /// Header of `state`.
    header: [u32; HEADER],
    /// Tokens of the pass.
    tokens: Vec<Token>,
    /// Residuals exchanged with other stages: `[token][DIM]`.
    residual: Vec<f32>,
    /// Maximum tokens of a pass.
    pub max_tokens: usize,
    /// Maximum tokens whose logits fit.
    pub logit_rows: usize,
    /// Slots for which `partials` and `ml` have room, a multiple of the chunk size.
    pub slots: usize,
    /// Number of runs for which they have room.
    pub at_once: usize,
}

/// Bytes of each buffer for `tokens` tokens, in the order in which [`Scratch::new`] takes them.
fn buffer_sizes(tokens: usize) -> [usize; 21] {
    let widest = [DIM, Q_DIM, MAX_FFN_DIM, MIXED].into_iter().fold(0, usize::max);
    let floats = [
        HEADER + tokens * STATE_ROW,
        tokens * QKV,
        tokens * Q_DIM,
        tokens * widest,
        tokens * widest.div_ceil(32),
        tokens * widest.div_ceil(32) * 2,
        // If the host computes attention, also new values.
        tokens * ((1 + HAS_GATE as usize) * FFN_PAD).max(KV_DIM),
        tokens * if POST_NORMS { DIM } else { 0 },
        tokens.min(LOGIT_ROWS) * VOCAB,
        tokens * MIX,
        tokens * if STATE_WIDTH != 0 { CONV_CHANNELS } else { 0 },
        tokens * MIXED,
        tokens * PER_LAYER_ROW,
        tokens * PER_LAYER_DIM,
        tokens * SCORES,
        2 * tokens * EXPERTS.used,
        tokens * EXPERTS.used * EXPERTS.dim,
        tokens * EXPERTS.used * EXPERTS.dim.div_ceil(32),
        tokens * EXPERTS.used * DIM.max((1 + HAS_GATE as usize) * EXPERTS.dim),
        tokens * if HAS_FFN_BESIDE { DIM } else { 0 },
        if HAS_EXPERTS { EXPERTS.count + 1 + tokens * EXPERTS.used } else { 0 },
    ];
    floats.map(|n| 4 * n)
}

/// Bytes of `partials` and of `ml` for `caches` caches with `slots` slots.
fn part_sizes(slots: usize, caches: usize) -> [usize; 2] {
    let heads = HEADS * (slots.div_ceil(ATTN_BLOCK).max(1) + ATTENTION_SINKS as usize) * caches;
    [4 * heads * HEAD_DIM, 4 * heads * 2]
}

/// Bytes of the logits that a pass of `tokens` tokens computes at once.
pub fn logits_bytes(tokens: usize) -> usize {
    4 * tokens.min(LOGIT_ROWS) * VOCAB
}

/// Bytes of all buffers together, without those of attention.
pub fn bytes(tokens: usize) -> usize {
    buffer_sizes(tokens).iter().sum::<usize>() + NONE
}

/// Bytes for the chunks of attention over `slots` slots, of one token of each sequence.
pub fn parts_bytes(slots: usize, sequences: usize) -> usize {
    part_sizes(slots, at_once(sequences)).iter().sum()
}

/// Number of sequences that attend in one launch.
fn at_once(sequences: usize) -> usize {
    sequences.clamp(1, MAX_BATCH_RUNS)
}

fn allocate_buffer(device: &Device, len: usize) -> Result<Buffer> {
    device.allocate_buffer(len, Access::ReadWrite, Place::Device)
}

impl Scratch {
    /// Allocates buffers for `tokens` tokens, or fewer if the device's buffers are too small, and for the caches of
    /// `sequences` sequences with `slots` slots.
    pub fn new(device: &Device, tokens: usize, (slots, sequences): (usize, usize)) -> Result<Self> {
        let most = device.info().max_alloc;
        let mut tokens = tokens.max(1);
        while tokens > 1 && buffer_sizes(tokens).iter().any(|&n| n as u64 > most) {
            tokens /= 2;
        }
        let sizes = buffer_sizes(tokens);
        let [state, qkv, att, acts, act_scales, act_sums, gate_up, post, logits, mix, conv, mixed, ..] =
            sizes;
        let [.., projected, layer_gate, scores, choices, expert_acts, expert_scales, _, _, _] = sizes;
        let [.., expert_out, shared_out, sorted] = sizes;
        let none = allocate_buffer(device, NONE)?;
        let allocate = |len: usize| match len {
            0 => Ok(none.clone()),
            len => allocate_buffer(device, len),
        };
        let at_once = at_once(sequences);
        let [partials, ml] = part_sizes(slots, at_once);
        Ok(Self {
            state: StagingBuffer::new(device, state, Access::ReadWrite)?,
            qkv: allocate_buffer(device, qkv)?,
            att: allocate_buffer(device, att)?,
            acts: allocate_buffer(device, acts)?,
            act_scales: allocate_buffer(device, act_scales)?,
            act_sums: allocate_buffer(device, act_sums)?,
            gate_up: allocate_buffer(device, gate_up)?,
            post: allocate(post)?,
            mix: allocate(mix)?,
            conv: allocate(conv)?,
            mixed: allocate(mixed)?,
            projected: allocate(projected)?,
            layer_gate: allocate(layer_gate)?,
            scores: allocate(scores)?,
            choices: allocate(choices)?,
            expert_acts: allocate(expert_acts)?,
            expert_scales: allocate(expert_scales)?,
            expert_out: allocate(expert_out)?,
            shared_out: allocate(shared_out)?,
            sorted: allocate(sorted)?,
            logits: allocate_buffer(device, logits)?,
            partials: allocate_buffer(device, partials)?,
            ml: allocate_buffer(device, ml)?,
            softmax: None,
            none,
            header: [0; HEADER],
            tokens: Vec::with_capacity(tokens),
            residual: Vec::new(),
            max_tokens: tokens,
            logit_rows: tokens.min(LOGIT_ROWS),
            slots: slots.max(1).next_multiple_of(ATTN_BLOCK),
            at_once,
        })
    }

    /// Makes room for attention over `slots` slots. Launches bound to reallocated buffers must be bound again.
    pub fn reserve_slots(&mut self, device: &Device, slots: usize) -> Result<()> {
        if slots > self.slots {
            let [partials, ml] = part_sizes(slots, self.at_once);
            (self.partials, self.ml) = (allocate_buffer(device, partials)?, allocate_buffer(device, ml)?);
            self.slots = slots.next_multiple_of(ATTN_BLOCK);
        }
        Ok(())
    }

    /// Allocates the buffer for observing attention of many tokens.
    pub fn reserve_softmax(&mut self, device: &Device) -> Result<()> {
        if self.softmax.is_none() {
            self.softmax = Some(allocate_buffer(device, 4 * 2 * HEADS * self.max_tokens)?);
        }
        Ok(())
    }

    /// Looks up the tokens' embedding rows, computes their RoPE angles, and sends both to the device.
    pub fn upload_tokens(
        &mut self,
        weights: &Weights,
        runs: &[Run<'_>],
        frequencies: &Frequencies,
    ) -> Result<()> {
        self.tokens.clear();
        for run in runs {
            let at = run.tokens.iter().zip(run.pos..);
            self.tokens.extend(at.map(|(&id, pos)| Token { id, pos, known: run.known_len }));
        }
        let (header, tokens) = (self.header, &self.tokens[..]);
        self.state.write(4 * (HEADER + tokens.len() * STATE_ROW), |bytes| {
            let (first, rows) = bytes.split_at_mut(4 * HEADER);
            first.copy_from_slice(header.map(u32::to_ne_bytes).as_flattened());
            embed_all(weights, frequencies, tokens, rows);
        })
    }

    /// Sets, for the next [`Scratch::upload_tokens`], the slot of a single token, and the token whose residual the
    /// head reads.
    pub fn set_token(&mut self, slot: usize, row: usize) {
        self.set_header(H_SLOT, [slot as u32, row as u32]);
    }

    /// Sets integers of the header from `first` on; the next [`Scratch::upload_tokens`] sends them.
    pub fn set_header<const N: usize>(&mut self, first: usize, values: [u32; N]) {
        self.header[first..first + N].copy_from_slice(&values);
    }

    /// Queues copying the residual and attention's output of token `from` to token `to`, and what else of it is read by
    /// later layers.
    pub fn move_token(&self, from: usize, to: usize) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let ([x, new_x], state) = ([from, to].map(|t| 4 * (HEADER + t * STATE_ROW)), self.state.buffer());
        let read = if SHARES_KV { STATE_ROW } else { DIM };
        state.copy_to(x..x + 4 * read, state, new_x)?;
        let [att, new_att] = [from, to].map(|t| 4 * t * Q_DIM);
        self.att.copy_to(att..att + 4 * Q_DIM, &self.att, new_att)
    }

    /// Replaces the residual of all tokens by those of the runs.
    pub fn write_residuals(&mut self, runs: &[Run<'_>]) -> Result<()> {
        self.residual.clear();
        runs.iter().for_each(|run| self.residual.extend_from_slice(run.residual));
        self.state.buffer().write_pieces(residual_pieces(&self.residual), bytes_of(&self.residual))
    }

    /// Reads the residual of all tokens into the runs.
    pub fn read_residuals(&mut self, runs: &mut [Run<'_>]) -> Result<()> {
        self.residual.resize(runs.iter().map(|run| run.residual.len()).sum(), 0.0);
        let pieces = residual_pieces(&self.residual);
        self.state.buffer().read_pieces(pieces, bytes_of_mut(&mut self.residual))?;
        let mut rest = &self.residual[..];
        for run in runs {
            let own;
            (own, rest) = rest.split_at(run.residual.len());
            run.residual.copy_from_slice(own);
        }
        Ok(())
    }

    /// Lets the host change the residual of the first `n` tokens, `[token][DIM]`, through page-locked memory.
    pub fn change_residuals(&mut self, n: usize, change: impl FnOnce(&mut [f32])) -> Result<()> {
        let Self { state, residual, .. } = self;
        residual.resize(n * DIM, 0.0);
        state.update_bytes(4 * (HEADER + n * STATE_ROW), |bytes| {
            let mut rows = bytes[4 * HEADER..].chunks_exact_mut(4 * STATE_ROW);
            for (x, row) in residual.chunks_exact_mut(DIM).zip(&mut rows) {
                bytes_of_mut(x).copy_from_slice(&row[..4 * DIM]);
            }
            change(residual);
            let rows = bytes[4 * HEADER..].chunks_exact_mut(4 * STATE_ROW);
            residual
                .chunks_exact(DIM)
                .zip(rows)
                .for_each(|(x, row)| row[..4 * DIM].copy_from_slice(bytes_of(x)));
        })
    }

    /// Reads the residual of the first token through page-locked memory.
    pub fn read_token(&self, readback: &mut ReadbackBuffer, x: &mut [f32]) -> Result<()> {
        readback.read(self.state.buffer(), 4 * HEADER, bytes_of_mut(x))
    }

    /// Reads the residual of token `t`.
    pub fn read_residual(&self, t: usize, x: &mut [f32]) -> Result<()> {
        self.state.buffer().read(4 * (HEADER + t * STATE_ROW), bytes_of_mut(x))
    }
}

/// Places of the residuals of the first tokens, `[token][DIM]`, in [`Scratch::state`].
fn residual_pieces(residuals: &[f32]) -> StridedPieces {
    StridedPieces { start: 4 * HEADER, len: 4 * DIM, count: residuals.len() / DIM, pitch: 4 * STATE_ROW }
}

/// A token of a pass.
#[derive(Clone, Copy)]
struct Token {
    id: u32,
    pos: usize,
    /// Number of known tokens in its sequence.
    known: usize,
}

/// Rows that an additional thread must write to be worth starting.
const ROWS_PER_THREAD: usize = 64;

/// Writes the tokens' rows of [`Scratch::state`]. Several threads do this for a long prompt: a single one takes a
/// sixth of the time that a fast GPU needs for everything else.
fn embed_all(weights: &Weights, frequencies: &Frequencies, tokens: &[Token], rows: &mut [u8]) {
    if tokens.len() >= 2 * ROWS_PER_THREAD {
        let (some, others) = tokens.split_at(tokens.len() / 2);
        let (of_some, of_others) = rows.split_at_mut(4 * STATE_ROW * some.len());
        let embed_others = || embed_all(weights, frequencies, others, of_others);
        return run_both(embed_others, || embed_all(weights, frequencies, some, of_some));
    }
    for (&Token { id, pos, known }, row) in tokens.iter().zip(rows.chunks_exact_mut(4 * STATE_ROW)) {
        let mut floats = [0.0; STATE_ROW];
        let (x, of_pos) = floats.split_at_mut(DIM);
        weights.embed_token(id as usize, pos, x);
        let (cos, sin) = of_pos.split_at_mut(ANGLES);
        let (sin, embeddings) = sin.split_at_mut(ANGLES);
        if let Some(w) = weights.per_layer.as_ref().filter(|_| HAS_PER_LAYER) {
            w.decode_row(id as usize, embeddings);
        }
        compute_angles(pos, frequencies.for_position(pos, known), cos, sin);
        row.copy_from_slice(bytes_of(&floats));
    }
}
