//! The projections of attention: queries, keys and values of the normed residual, and its output to the residual.

use super::matmul::{self, MatmulInput, MatmulOutput, OutputColumns};
use super::steps::{K_AT, KV_PAD, Q_PAD, QKV, Scratch, add_projection, task_cols};
use crate::dims::*;
use crate::weights::{Attention, Layer, Matrix, Mixer};
use files::config::{AttentionGate, QkNorm};
use numeric::pool::{Pool, Tile};
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::recurrent::apply_sigmoid;
use numeric::simd::{Isa, ops};
use std::ops::Range;

/// Elements of attention's output that share a gate.
const GATE_WIDTH: usize = match ATTENTION_GATE {
    AttentionGate::PerHead => HEAD_DIM,
    _ => 1,
};

impl Scratch {
    /// Computes these `columns` of a layer's q, k and v of the normed residual in one parallel step.
    pub(super) fn compute_qkv(
        &mut self,
        layer: &Layer,
        columns: Range<usize>,
        pool: &Pool,
        isa: Isa,
        n: usize,
    ) {
        match &layer.mixer {
            Mixer::Attention(w) => self.project_qkv(w, columns, pool, isa, n),
            Mixer::LocalAttention(w) => self.project_qkv(w, columns, pool, isa, n),
            _ => unreachable!("invariant: the layer has attention"),
        }
    }

    fn project_qkv<const Q: usize, const KV: usize>(
        &mut self,
        w: &Attention<Q, KV>,
        columns: Range<usize>,
        pool: &Pool,
        isa: Isa,
        n: usize,
    ) {
        let x = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (columns.len(), DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(&mut self.qkv[..n * QKV], QKV, tile, |mut tile| {
            ProjectionPart { start: 0, w: &w.wq, bias: &w.q_bias }.project(
                isa,
                x,
                &mut tile,
                columns.clone(),
            );
            if let Some(gate) = w.gate.as_ref().filter(|_| HAS_ATTENTION_GATE) {
                let part = ProjectionPart { start: Q_PAD, w: gate, bias: &[] };
                part.project(isa, x, &mut tile, columns.clone());
            }
            let (k, v) = (w.wk.as_ref().zip(Some(&w.k_bias)), w.wv.as_ref().zip(Some(&w.v_bias)));
            for (start, part) in [(K_AT, k), (K_AT + KV_PAD, v)] {
                let Some((w, bias)) = part else { continue };
                ProjectionPart { start, w, bias }.project(isa, x, &mut tile, columns.clone());
            }
        });
        if QK_NORM == QkNorm::Whole {
            pool.run_tiles(&mut self.qkv[..n * QKV], QKV, (1, QKV), |mut tile| {
                let row = tile.row_mut(0);
                for (part, norm) in [(0..Q_DIM, &w.q_norm), (K_AT..K_AT + KV_DIM, &w.k_norm)] {
                    if columns.contains(&part.start) {
                        let mut normed = [0.0; Q_DIM];
                        let normed = &mut normed[..part.len()];
                        ops::rms_norm(isa, &row[part.clone()], norm, NORM_EPS as f32, normed);
                        row[part].copy_from_slice(normed);
                    }
                }
            });
        }
    }

    /// Adds the projection of a layer's attention output, multiplied with its gate, to the residual.
    pub(super) fn project_attention(&mut self, layer: &Layer, pool: &Pool, isa: Isa, n: usize) {
        match &layer.mixer {
            Mixer::Attention(w) => self.project_heads(w, pool, isa, n),
            Mixer::LocalAttention(w) => self.project_heads(w, pool, isa, n),
            _ => unreachable!("invariant: the layer has attention"),
        }
    }

    fn project_heads<const Q: usize, const KV: usize>(
        &mut self,
        w: &Attention<Q, KV>,
        pool: &Pool,
        isa: Isa,
        n: usize,
    ) {
        let (att, qkv) = (&self.att, &self.qkv);
        self.att_in.fill_rows::<Q>(pool, isa, n, |t, row| {
            let att = &att[t * Q_DIM..][..Q_DIM];
            for (row, head) in row.chunks_exact_mut(Q / HEADS).zip(att.chunks_exact(HEAD_DIM)) {
                row.copy_from_slice(&head[..Q / HEADS]);
            }
            if ATTENTION_OUT_SCALE != 1.0 {
                row.iter_mut().for_each(|x| *x *= ATTENTION_OUT_SCALE as f32);
            }
            if HAS_ATTENTION_GATE {
                let mut gate = [0.0; GATE_DIM];
                gate.copy_from_slice(&qkv[t * QKV + Q_PAD..][..GATE_DIM]);
                apply_sigmoid(isa, &mut gate);
                let width = GATE_WIDTH;
                for (row, gate) in row.chunks_exact_mut(width).zip(gate) {
                    row.iter_mut().for_each(|x| *x *= gate);
                }
            }
        });
        let to = if POST_NORMS { &mut self.post } else { &mut self.x };
        add_projection(to, (&w.wo, &w.o_bias), self.att_in.as_input::<Q>(isa, n), pool, isa);
    }
}

/// A projection of the normed residual whose columns begin at `start` of a buffer of several.
pub(super) struct ProjectionPart<'a, const ROWS: usize> {
    pub start: usize,
    pub w: &'a Matrix<ROWS, DIM>,
    /// Empty if there is none.
    pub bias: &'a [f32],
}

impl<const ROWS: usize> ProjectionPart<'_, ROWS> {
    /// Computes those of its columns that are in `tile`, which may span several parts, and in `columns`.
    #[inline(always)]
    pub(super) fn project(
        &self,
        isa: Isa,
        x: MatmulInput<'_>,
        tile: &mut Tile<'_, f32>,
        columns: Range<usize>,
    ) {
        let from = tile.col.max(columns.start).max(self.start);
        let to = columns.end.min(tile.col + tile.cols).min(self.start + ROWS);
        if from >= to {
            return;
        }
        let (at, columns) = (from - tile.col, OutputColumns { first: from - self.start, width: to - from });
        matmul::project(isa, self.w, x, MatmulOutput { tile, at, columns }, |dst, y, row| {
            if self.bias.is_empty() {
                dst.copy_from_slice(y);
            } else {
                dst.iter_mut().zip(y).zip(&self.bias[row..]).for_each(|((d, y), b)| *d = y + b);
            }
        });
    }
}
