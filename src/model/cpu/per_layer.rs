//! Embeddings that each layer has of a token: computed at the start of a pass, and added to the residual behind each
//! layer, gated by it. Models without them have none of these steps.

use super::matmul::{self, MatmulOutput};
use super::steps::{Scratch, add_projection, task_cols};
use crate::dims::*;
use crate::weights::{Layer, Weights};
use numeric::pool::Pool;
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::{Isa, ops};

/// Factor of the projection of a token's usual embedding.
fn projection_scale() -> f32 {
    1.0 / (DIM as f32).sqrt()
}

/// Factor of the rows of the table.
fn table_scale() -> f32 {
    (PER_LAYER_DIM as f32).sqrt()
}

impl Scratch {
    /// Computes the embeddings of `n` tokens for all layers: the normed projection of the usual embedding plus the row of
    /// the table, over the square root of 2.
    pub(super) fn embed_for_layers(&mut self, weights: &Weights, pool: &Pool, isa: Isa, n: usize) {
        let Some(w) = weights.per_layer.as_ref().filter(|_| HAS_PER_LAYER) else { return };
        self.copy_tokens(pool, isa, n);
        let input = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (PER_LAYER_ROW, DIM), GROUP_ROWS, pool.thread_count());
        let all = &mut self.per_layer[..n * PER_LAYER_ROW];
        pool.run_columns(all, PER_LAYER_ROW, tile, |mut tile| {
            matmul::project(isa, &w.projection, input, MatmulOutput::whole_tile(&mut tile), |to, y, _| {
                to.iter_mut().zip(y).for_each(|(to, y)| *to = y * projection_scale());
            });
        });
        let tokens = &self.token_ids;
        pool.run_tiles(all, PER_LAYER_ROW, (1, PER_LAYER_ROW), |mut tile| {
            let (mut row, mut normed) = ([0.0; PER_LAYER_ROW], [0.0; PER_LAYER_DIM]);
            w.decode_row(tokens[tile.row] as usize, &mut row);
            for layer in 0..LAYERS {
                let of_layer = layer * PER_LAYER_DIM..(layer + 1) * PER_LAYER_DIM;
                let to = &mut tile.row_mut(0)[of_layer.clone()];
                ops::rms_norm(isa, to, &w.norm, NORM_EPS as f32, &mut normed);
                for ((to, normed), row) in to.iter_mut().zip(normed).zip(&row[of_layer]) {
                    *to = (normed + row * table_scale()) * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        });
    }

    /// Adds a layer's embeddings of `n` tokens to the residual, gated by the residual and normed; then multiplies it with
    /// the layer's factor.
    pub(super) fn add_per_layer(&mut self, layer: &Layer, index: usize, pool: &Pool, isa: Isa, n: usize) {
        let Some(w) = layer.per_layer.as_ref().filter(|_| HAS_PER_LAYER) else { return };
        self.copy_tokens(pool, isa, n);
        let input = self.h.as_input::<DIM>(isa, n);
        let tile = task_cols(n, (PER_LAYER_DIM, DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(&mut self.per_layer_gate[..n * PER_LAYER_DIM], PER_LAYER_DIM, tile, |mut tile| {
            matmul::project(isa, &w.gate, input, MatmulOutput::whole_tile(&mut tile), |to, y, _| {
                to.copy_from_slice(y);
            });
        });
        let (gate, embeddings) = (&self.per_layer_gate, &self.per_layer);
        self.per_layer_in.fill_rows::<PER_LAYER_DIM>(pool, isa, n, |t, row| {
            row.copy_from_slice(&gate[t * PER_LAYER_DIM..][..PER_LAYER_DIM]);
            let from = t * PER_LAYER_ROW + index * PER_LAYER_DIM;
            ops::gelu_mul(isa, row, &embeddings[from..][..PER_LAYER_DIM]);
        });
        let input = self.per_layer_in.as_input::<PER_LAYER_DIM>(isa, n);
        add_projection(&mut self.post, (&w.out, &[]), input, pool, isa);
        self.post_norm(&w.norm, layer.scalar, pool, isa, n);
    }
}
