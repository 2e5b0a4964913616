//! Matrix products over column tiles: which kernel a weight format needs, and the order of the loops.

use super::pool::Tile;
use super::simd::{Isa, Q4Group, ops, q4_group};
use crate::quant::act::ActBlock;
use crate::quant::packed::{GROUP_ROWS, Packed};
use crate::weights::Matrix;

/// Tokens whose activations stay in the first-level cache while the tile's weights pass by.
pub const TOKENS: usize = 12;

/// Activations of some tokens, in the form or forms that the weights at hand need.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// `[token][cols]`; empty when only Q4_0 weights read it.
    pub floats: &'a [f32],
    /// `[token][block]`; empty when only unquantised weights read it.
    pub blocks: &'a [ActBlock],
    /// Tokens.
    pub tokens: usize,
}

/// Rows `16 * group ..` of `w` times tokens `from .. from + out.len()`.
fn group<const ROWS: usize, const COLS: usize>(
    isa: Isa,
    w: &Matrix<ROWS, COLS>,
    group: usize,
    (x, from): (Input<'_>, usize),
    out: &mut [[f32; GROUP_ROWS]],
) {
    match w {
        Matrix::Q4(w) => {
            let blocks = Packed::<ROWS, COLS>::BLOCKS;
            let rows = Q4Group { quants: w.quants(group), scales: w.scales(group), blocks };
            q4_group(isa, rows, &x.blocks[from * blocks..][..out.len() * blocks], out);
        }
        Matrix::Dense { dtype, data } => {
            let x = &x.floats[from * COLS..][..out.len() * COLS];
            ops::dense_group(isa, data, *dtype, group * GROUP_ROWS, x, out);
        }
    }
}

/// Columns `first .. first + width` (multiples of 16 but for the matrix's end) of `x * w^T` into the same
/// columns of a tile, by way of `put(destination, product, first row of w)`.
pub fn project<const ROWS: usize, const COLS: usize>(
    isa: Isa,
    w: &Matrix<ROWS, COLS>,
    x: Input<'_>,
    (tile, at): (&mut Tile<'_, f32>, usize),
    (first, width): (usize, usize),
    put: impl Fn(&mut [f32], &[f32], usize),
) {
    let mut out = [[0.0f32; GROUP_ROWS]; TOKENS];
    for from in (0..x.tokens).step_by(TOKENS) {
        let n = TOKENS.min(x.tokens - from);
        for row in (first..first + width).step_by(GROUP_ROWS) {
            group(isa, w, row / GROUP_ROWS, (x, from), &mut out[..n]);
            let cols = GROUP_ROWS.min(first + width - row);
            for (t, out) in out[..n].iter().enumerate() {
                let dst = &mut tile.row_mut(from + t)[at + row - first..][..cols];
                put(dst, &out[..cols], row);
            }
        }
    }
}

/// Rows of gate and up that are taken together: one block of the activations that `down` reads.
pub const RUN: usize = 2 * GROUP_ROWS;

/// Rows `first .. first + width` of gate and up times the tokens, then `silu(gate) * up`, handed to
/// `put(first token, row - first, products)` in runs of 32 rows (fewer at the matrix's end) of several tokens.
pub fn gate_up<const ROWS: usize, const COLS: usize>(
    isa: Isa,
    (gate, up): (&Matrix<ROWS, COLS>, &Matrix<ROWS, COLS>),
    x: Input<'_>,
    (first, width): (usize, usize),
    mut put: impl FnMut(usize, usize, &[[f32; RUN]]),
) {
    let mut out = [[0.0f32; GROUP_ROWS]; TOKENS];
    let mut gates = [[0.0f32; RUN]; TOKENS];
    let mut ups = [[0.0f32; RUN]; TOKENS];
    for from in (0..x.tokens).step_by(TOKENS) {
        let n = TOKENS.min(x.tokens - from);
        for run in (first..first + width).step_by(RUN) {
            let cols = RUN.min(first + width - run);
            for (w, into) in [(gate, &mut gates), (up, &mut ups)] {
                for half in (0..cols).step_by(GROUP_ROWS) {
                    group(isa, w, (run + half) / GROUP_ROWS, (x, from), &mut out[..n]);
                    for (into, out) in into.iter_mut().zip(&out[..n]) {
                        into[half..half + GROUP_ROWS].copy_from_slice(out);
                    }
                }
            }
            // All tokens in one call: the exponentials of one token alone are bound by latency.
            ops::silu_mul(isa, gates[..n].as_flattened_mut(), ups[..n].as_flattened());
            put(from, run - first, &gates[..n]);
        }
    }
}
