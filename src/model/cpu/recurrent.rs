//! Layers with a recurrent state: gated short convolutions and gated delta nets, and what Mamba2 shares with them. Tokens
//! of a run are computed in ascending order, channels and columns of the state in parallel.

use super::projections::ProjectionPart;
use super::runs::{PassRuns, RunSpan};
use super::steps::{Scratch, add_projection, task_cols};
use crate::dims::*;
use crate::weights::{DeltaNet, Matrix, ShortConv};
use numeric::pool::Pool;
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::recurrent::{
    DeltaUpdate, STATE_COLUMNS, apply_sigmoid, apply_softplus, convolve_token, delta_step,
};
use numeric::simd::{Isa, ops};
use std::ops::Range;
use std::sync::Mutex;

const VALUE_HEADS: usize = DELTA_NET.value_heads;
const KEY_HEADS: usize = if HAS_DELTA_NET { DELTA_NET.key_heads } else { 1 };
const KEY_WIDTH: usize = DELTA_NET.key_dim;
const VALUE_WIDTH: usize = DELTA_NET.value_dim;
/// Lengths of chunks, which must not be 0 in models without such layers.
const VALUE_CHUNK: usize = if HAS_DELTA_NET { VALUE_WIDTH } else { 1 };
const CHANNELS_CHUNK: usize = if HAS_STATE { CONV_CHANNELS } else { 1 };
const ROWS_CHUNK: usize = if STATE_ROWS != 0 { STATE_ROWS } else { 1 };
const KEY_CHUNK: usize = if HAS_DELTA_NET { KEY_WIDTH } else { 1 };
/// Blocks of columns of the state of a delta net or of Mamba2; and of each head of a delta net.
const BLOCKS: usize = STATE_WIDTH / STATE_COLUMNS;
const HEAD_BLOCKS: usize = if HAS_DELTA_NET { VALUE_WIDTH / STATE_COLUMNS } else { 1 };
/// Inputs of a convolution that its state holds.
const HELD_INPUTS: usize = CONV_TAPS.saturating_sub(1);

/// Channels of one task of a convolution.
const TASK_CHANNELS: usize = 256;

impl Scratch {
    /// Projects the normed residual to the inputs of a gated short convolution.
    pub(super) fn compute_conv_inputs(&mut self, w: &ShortConv, pool: &Pool, isa: Isa, n: usize) {
        let x = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (MIX, DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(&mut self.mix[..n * MIX], MIX, tile, |mut tile| {
            ProjectionPart { start: 0, w: &w.w_in, bias: &[] }.project(isa, x, &mut tile, 0..MIX);
        });
    }

    /// Mixes the tokens by a gated short convolution: `c * conv(b * x)`.
    pub(super) fn mix_by_convolution(
        &mut self,
        w: &ShortConv,
        index: usize,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        (isa, n): (Isa, usize),
    ) {
        pool.run_tiles(&mut self.mix[..n * MIX], MIX, (1, MIX), |mut tile| {
            let (b, rest) = tile.row_mut(0).split_at_mut(DIM);
            b.iter_mut().zip(&rest[DIM..]).for_each(|(b, x)| *b *= x);
        });
        self.convolve_runs((&w.taps, &[]), index, seqs, pool, isa);
        let (mix, conv) = (&self.mix, &self.conv);
        self.mixed.fill_rows::<MIXED>(pool, isa, n, |t, row| {
            let gate = &mix[t * MIX + DIM..][..DIM];
            let conv = &conv[t * CONV_CHANNELS..][..DIM];
            row.iter_mut().zip(gate).zip(conv).for_each(|((y, c), conv)| *y = c * conv);
        });
    }

    /// Projects the normed residual to the inputs of a gated delta net.
    pub(super) fn compute_delta_inputs(&mut self, w: &DeltaNet, pool: &Pool, isa: Isa, n: usize) {
        let x = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (MIX, DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(&mut self.mix[..n * MIX], MIX, tile, |mut tile| {
            ProjectionPart { start: 0, w: &w.qkv, bias: &[] }.project(isa, x, &mut tile, 0..MIX);
            ProjectionPart { start: MIX_GATE_AT, w: &w.z, bias: &[] }.project(isa, x, &mut tile, 0..MIX);
            ProjectionPart { start: MIX_BETA_AT, w: &w.b, bias: &[] }.project(isa, x, &mut tile, 0..MIX);
            let decays = ProjectionPart { start: MIX_DECAY_AT, w: &w.a, bias: &w.bias };
            decays.project(isa, x, &mut tile, 0..MIX);
        });
    }

    /// Mixes the tokens by a gated delta net. A key head serves `shared_run` value heads, then the next one, and so on
    /// round.
    #[allow(clippy::modulo_one, reason = "many models have no delta net")]
    pub(super) fn mix_by_delta_net(
        &mut self,
        w: &DeltaNet,
        index: usize,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        (isa, n): (Isa, usize),
    ) {
        self.convolve_runs((&w.taps, &[]), index, seqs, pool, isa);
        pool.run_tiles(&mut self.conv[..n * CONV_CHANNELS], CONV_CHANNELS, (1, CONV_CHANNELS), |mut tile| {
            prepare_heads(isa, tile.row_mut(0));
        });
        pool.run_tiles(&mut self.mix[..n * MIX], MIX, (1, MIX), |mut tile| {
            prepare_factors(isa, &w.decay, tile.row_mut(0));
        });
        let (mix, conv, core, run_of) = (&self.mix, &self.conv, &mut self.core, &self.run_of);
        update_states((core, run_of), index, seqs, pool, |t, block, state, out| {
            let (factors, row) = (&mix[t * MIX..][..MIX], &conv[t * CONV_CHANNELS..][..CONV_CHANNELS]);
            let head = block / HEAD_BLOCKS;
            let of_key = head / w.shared_run % KEY_HEADS * KEY_WIDTH;
            let values = &row[2 * DELTA_KEY_DIM + block * STATE_COLUMNS..];
            let update = DeltaUpdate {
                query: &row[of_key..][..KEY_WIDTH],
                key: &row[DELTA_KEY_DIM + of_key..][..KEY_WIDTH],
                value: values.first_chunk().expect("invariant: whole blocks"),
                decay: factors[MIX_DECAY_AT + head],
                beta: factors[MIX_BETA_AT + head],
            };
            delta_step(isa, state, update, out);
        });
        let core = &*core;
        self.mixed.fill_rows::<MIXED>(pool, isa, n, |t, row| {
            let span = seqs.read_run(run_of[t] as usize).span;
            row.copy_from_slice(&mix[t * MIX + MIX_GATE_AT..][..DELTA_VALUE_DIM]);
            for (head, gate) in row.chunks_exact_mut(VALUE_CHUNK).enumerate() {
                let (mut out, mut normed) = ([0.0; VALUE_WIDTH], [0.0; VALUE_WIDTH]);
                core_of_token(core, span, t, head * VALUE_WIDTH, &mut out);
                ops::rms_norm(isa, &out, &w.norm, NORM_EPS as f32, &mut normed);
                ops::silu_mul(isa, gate, &normed);
            }
        });
    }

    /// Adds the projection of a recurrent layer's output to the residual.
    pub(super) fn project_mixed<const COLS: usize>(
        &mut self,
        w: &Matrix<DIM, COLS>,
        pool: &Pool,
        isa: Isa,
        n: usize,
    ) {
        let to = if POST_NORMS { &mut self.post } else { &mut self.x };
        add_projection(to, (w, &[]), self.mixed.as_input::<MIXED>(isa, n), pool, isa);
    }

    /// Convolves [`CONV_CHANNELS`] columns of `mix` into `conv`, by taps and a bias that may be empty, and keeps the last
    /// inputs in the states.
    pub(super) fn convolve_runs(
        &mut self,
        (taps, bias): (&[f32], &[f32]),
        index: usize,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let (mix, conv) = (&self.mix, &mut self.conv);
        let own_inputs = |t: usize| &mix[t * MIX + CONV_AT..][..CONV_CHANNELS];
        for run in 0..seqs.len() {
            let mut seq = seqs.write_run(run);
            let (first, tokens) = (seq.span.first, seq.span.tokens);
            let [state, first_state] = seq.rows.layer_states_mut(index).map(|state| &mut state[..CONV_STATE]);
            let held = &*state;
            // Inputs of token `t`, oldest first: those of the state, then the run's own.
            let input =
                |t: usize, tap: usize, channels: Range<usize>| match (t + tap).checked_sub(HELD_INPUTS) {
                    Some(own) => &own_inputs(first + own)[channels],
                    None => &held[(t + tap) * CONV_CHANNELS..][channels],
                };
            let out = &mut conv[first * CONV_CHANNELS..][..tokens * CONV_CHANNELS];
            pool.run_tiles(out, CONV_CHANNELS, (tokens, TASK_CHANNELS), |mut tile| {
                let channels = tile.col..tile.col + tile.cols;
                let taps: [&[f32]; CONV_TAPS] =
                    std::array::from_fn(|tap| &taps[tap * CONV_CHANNELS..][channels.clone()]);
                let bias = bias.get(channels.clone()).unwrap_or_default();
                for t in 0..tokens {
                    let inputs: [&[f32]; CONV_TAPS] =
                        std::array::from_fn(|tap| input(t, tap, channels.clone()));
                    convolve_token(isa, &inputs, &taps, bias, tile.row_mut(t));
                }
            });
            if tokens > 1
                && let Some(older) = CONV_STATE.checked_sub(CONV_CHANNELS)
            {
                let (kept, last) = first_state.split_at_mut(older);
                kept.copy_from_slice(&held[CONV_CHANNELS..]);
                last.copy_from_slice(own_inputs(first));
            }
            let shifted = HELD_INPUTS.saturating_sub(tokens);
            let replaced = HELD_INPUTS - shifted;
            state.copy_within(replaced * CONV_CHANNELS.., 0);
            let rows = state.chunks_exact_mut(CHANNELS_CHUNK).skip(shifted);
            for (row, own) in rows.zip(tokens - replaced..) {
                row.copy_from_slice(own_inputs(first + own));
            }
        }
    }
}

/// Updates the matrices of a layer's states by `step(token, block of columns, state, output)`, and writes the outputs to
/// `core`: `[block][token][16]` of each run. `run_of` is the run of each token.
pub(super) fn update_states(
    (core, run_of): (&mut [f32], &[u32]),
    index: usize,
    seqs: &PassRuns<'_>,
    pool: &Pool,
    step: impl Fn(usize, usize, &mut [f32], &mut [f32; STATE_COLUMNS]) + Sync,
) {
    let update =
        |[state, first_state]: [&mut [f32]; 2], block: usize, tokens: Range<usize>, core: &mut [f32]| {
            let (outs, _) = core.as_chunks_mut::<STATE_COLUMNS>();
            for (t, out) in tokens.clone().zip(outs) {
                step(t, block, state, out);
                if t == tokens.start && tokens.len() > 1 {
                    first_state.copy_from_slice(state);
                }
            }
        };
    for run in (0..seqs.len()).filter(|&run| seqs.uses_all_threads(run)) {
        let mut seq = seqs.write_run(run);
        let (first, tokens) = (seq.span.first, seq.span.tokens);
        let core = &mut core[first * STATE_WIDTH..][..tokens * STATE_WIDTH];
        let mut states = state_blocks(seq.rows.layer_states_mut(index));
        let mut cores = core.chunks_exact_mut(tokens * STATE_COLUMNS);
        let blocks: [Mutex<_>; BLOCKS] = std::array::from_fn(|_| {
            Mutex::new(states.next().zip(cores.next()).expect("invariant: whole blocks"))
        });
        pool.run(BLOCKS, &|block| {
            let mut all = blocks[block].lock().expect("invariant: no job panics");
            let ([state, first_state], core) = &mut *all;
            update([state, first_state], block, first..first + tokens, core);
        });
    }
    if (0..seqs.len()).any(|run| !seqs.uses_all_threads(run)) {
        let all = &mut core[..run_of.len() * STATE_WIDTH];
        pool.run_tiles(all, STATE_WIDTH, (1, STATE_WIDTH), |mut tile| {
            let (t, run) = (tile.row, run_of[tile.row] as usize);
            if seqs.uses_all_threads(run) {
                return;
            }
            let mut seq = seqs.write_run(run);
            let cores = tile.row_mut(0).chunks_exact_mut(STATE_COLUMNS);
            let states = state_blocks(seq.rows.layer_states_mut(index));
            states
                .zip(cores)
                .enumerate()
                .for_each(|(block, (states, core))| update(states, block, t..t + 1, core));
        });
    }
}

/// Copies the columns of `core` from `column` on, of token `t` of a run, to `out`: whole blocks.
pub(super) fn core_of_token(core: &[f32], span: RunSpan, t: usize, column: usize, out: &mut [f32]) {
    let core = &core[span.first * STATE_WIDTH..];
    for (i, out) in out.chunks_exact_mut(STATE_COLUMNS).enumerate() {
        let block = column / STATE_COLUMNS + i;
        let at = (block * span.tokens + t - span.first) * STATE_COLUMNS;
        out.copy_from_slice(&core[at..at + STATE_COLUMNS]);
    }
}

/// The blocks of a layer's matrices, `[STATE_ROWS][16]` each, of two states.
fn state_blocks(states: [&mut [f32]; 2]) -> impl Iterator<Item = [&mut [f32]; 2]> {
    let [current, first] =
        states.map(|state| state[CONV_STATE..].chunks_exact_mut(ROWS_CHUNK * STATE_COLUMNS));
    current.zip(first).map(|(current, first)| [current, first])
}

/// Applies SiLU to a token's convolved queries, keys and values, and gives each head of queries and keys the length 1;
/// queries are then divided by the square root of their width.
fn prepare_heads(isa: Isa, row: &mut [f32]) {
    ops::silu(isa, row);
    // A norm over the root of the sum of squares, with its own epsilon.
    let eps = 1e-6 / KEY_WIDTH as f32;
    let length = 1.0 / (KEY_WIDTH as f32).sqrt();
    let (queries, rest) = row.split_at_mut(DELTA_KEY_DIM);
    for (heads, factor) in [(queries, length * length), (&mut rest[..DELTA_KEY_DIM], length)] {
        for head in heads.chunks_exact_mut(KEY_CHUNK) {
            let mut normed = [0.0; KEY_WIDTH];
            ops::rms_norm(isa, head, &[factor; KEY_WIDTH], eps, &mut normed);
            head.copy_from_slice(&normed);
        }
    }
}

/// Computes the strength of each head's update, `apply_sigmoid(b)`, and its decay, `exp(decay * apply_softplus(a))`.
fn prepare_factors(isa: Isa, decay: &[f32], row: &mut [f32]) {
    apply_sigmoid(isa, &mut row[MIX_BETA_AT..][..VALUE_HEADS]);
    let decays = &mut row[MIX_DECAY_AT..][..VALUE_HEADS];
    apply_softplus(isa, decays);
    decays.iter_mut().zip(decay).for_each(|(x, decay)| *x *= decay);
    ops::exp_in_place(isa, decays);
}
