//! Mamba2: each head has a matrix, which decays and takes in each token. Tokens of a run are computed in ascending order,
//! columns of the matrices in parallel.

use super::projections::ProjectionPart;
use super::recurrent::{core_of_token, update_states};
use super::runs::PassRuns;
use super::steps::{Scratch, task_cols};
use crate::dims::*;
use crate::weights::Mamba;
use files::config::MambaNorm;
use numeric::pool::Pool;
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::recurrent::{MambaUpdate, STATE_COLUMNS, apply_softplus, mamba_step};
use numeric::simd::{Isa, ops};

const HEADS: usize = MAMBA.heads;
/// Blocks of columns of a head's state. This and the next ones must not be 0 in models without Mamba2.
const HEAD_BLOCKS: usize = if HAS_MAMBA { MAMBA.head_dim / STATE_COLUMNS } else { 1 };
/// Heads, and columns, of a group.
const GROUP_HEADS: usize = if HAS_MAMBA { HEADS / MAMBA.groups } else { 1 };
const GROUP_WIDTH: usize = GROUP_HEADS * HEAD_BLOCKS * STATE_COLUMNS;
/// Factors of the parts of the projected inputs, with the column at which each part ends.
const PARTS: [(usize, f64); 5] = [
    (MAMBA_DIM, SSM_IN_SCALES[0]),
    (2 * MAMBA_DIM, SSM_IN_SCALES[1]),
    (2 * MAMBA_DIM + MAMBA_GROUPS_DIM, SSM_IN_SCALES[2]),
    (MAMBA_STEP_AT, SSM_IN_SCALES[3]),
    (MAMBA_STEP_AT + HEADS, SSM_IN_SCALES[4]),
];

impl Scratch {
    /// Projects the normed residual to the inputs of Mamba2, and computes time steps and decays.
    pub(super) fn compute_mamba_inputs(&mut self, w: &Mamba, pool: &Pool, isa: Isa, n: usize) {
        let x = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (MIX, DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(&mut self.mix[..n * MIX], MIX, tile, |mut tile| {
            ProjectionPart { start: 0, w: &w.w_in, bias: &[] }.project(isa, x, &mut tile, 0..MIX);
        });
        pool.run_tiles(&mut self.mix[..n * MIX], MIX, (1, MIX), |mut tile| {
            prepare_inputs(isa, w, tile.row_mut(0));
        });
    }

    /// Mixes the tokens by Mamba2.
    pub(super) fn mix_by_mamba(
        &mut self,
        w: &Mamba,
        index: usize,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        (isa, n): (Isa, usize),
    ) {
        self.convolve_runs((&w.taps, &w.conv_bias), index, seqs, pool, isa);
        pool.run_tiles(&mut self.conv[..n * CONV_CHANNELS], CONV_CHANNELS, (1, CONV_CHANNELS), |mut tile| {
            ops::silu(isa, tile.row_mut(0));
        });
        let (mix, conv, core, run_of) = (&self.mix, &self.conv, &mut self.core, &self.run_of);
        update_states((core, run_of), index, seqs, pool, |t, block, state, out| {
            let (row, factors) = (&conv[t * CONV_CHANNELS..][..CONV_CHANNELS], &mix[t * MIX..][..MIX]);
            let head = block / HEAD_BLOCKS;
            let (x, groups) = row.split_at(MAMBA_DIM);
            let group = head / GROUP_HEADS * MAMBA.state;
            let update = MambaUpdate {
                b: &groups[group..][..MAMBA.state],
                c: &groups[MAMBA_GROUPS_DIM + group..][..MAMBA.state],
                x: x[block * STATE_COLUMNS..].first_chunk().expect("invariant: whole blocks"),
                step: factors[MAMBA_STEP_AT + head],
                decay: factors[MAMBA_DECAY_AT + head],
                skip: w.skip[head],
            };
            mamba_step(isa, state, update, out);
        });
        let core = &*core;
        self.mixed.fill_rows::<MIXED>(pool, isa, n, |t, row| {
            let span = seqs.read_run(run_of[t] as usize).span;
            row.copy_from_slice(&mix[t * MIX..][..MAMBA_DIM]);
            for (group, gate) in row.chunks_exact_mut(GROUP_WIDTH).enumerate() {
                let mut out = [0.0; GROUP_WIDTH];
                core_of_token(core, span, t, group * GROUP_WIDTH, &mut out);
                gate_group(isa, gate, &mut out, w.norm.get(group * GROUP_WIDTH..).unwrap_or_default());
            }
            if SSM_OUT_SCALE != 1.0 {
                row.iter_mut().for_each(|x| *x *= SSM_OUT_SCALE as f32);
            }
        });
    }
}

/// Multiplies the parts of a token's inputs by their factors; then computes each head's time step,
/// `softplus(dt + bias)`, and its decay, `exp(decay * step)`.
fn prepare_inputs(isa: Isa, w: &Mamba, row: &mut [f32]) {
    let mut from = 0;
    for (to, factor) in PARTS {
        if factor != 1.0 {
            row[from..to].iter_mut().for_each(|x| *x *= factor as f32);
        }
        from = to;
    }
    let (inputs, decays) = row.split_at_mut(MAMBA_DECAY_AT);
    let steps = &mut inputs[MAMBA_STEP_AT..][..HEADS];
    steps.iter_mut().zip(&w.bias).for_each(|(step, bias)| *step += bias);
    apply_softplus(isa, steps);
    decays.iter_mut().zip(&*steps).zip(&w.decay).for_each(|((decay, step), factor)| *decay = step * factor);
    ops::exp_in_place(isa, decays);
}

/// Gates the output of a group, `gate = silu(gate) * out`, and norms it before or after that if the model does.
fn gate_group(isa: Isa, gate: &mut [f32], out: &mut [f32; GROUP_WIDTH], norm: &[f32]) {
    let eps = NORM_EPS as f32;
    match MAMBA.norm {
        MambaNorm::None => ops::silu_mul(isa, gate, out),
        MambaNorm::AfterGate => {
            ops::silu_mul(isa, gate, out);
            out.copy_from_slice(gate);
            ops::rms_norm(isa, out, &norm[..GROUP_WIDTH], eps, gate);
        }
        MambaNorm::BeforeGate => {
            let mut normed = [0.0; GROUP_WIDTH];
            ops::rms_norm(isa, out, &norm[..GROUP_WIDTH], eps, &mut normed);
            ops::silu_mul(isa, gate, &normed);
        }
    }
}
