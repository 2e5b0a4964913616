//! Matrix products over column tiles: selects the kernel of a weight format and orders the loops.

use crate::dims::{EXPERT_BIAS, EXPERTS, HAS_GATE, MLP, MLP_BIAS, MLP_SCALES};
use crate::weights::Matrix;
use files::blocks::BLOCK;
use files::config::Mlp;
use numeric::pool::Tile;
use numeric::quant::activations::{ActBlock, ActTile};
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::groups::{Groups, MOST_GROUPS};
use numeric::simd::products::{MAX_TOKENS, multiply};
use numeric::simd::recurrent::apply_sigmoid;
use numeric::simd::{Isa, ops};
use std::ops::Range;

/// Activations of some tokens, in the forms that the weights read.
#[derive(Clone, Copy)]
pub struct MatmulInput<'a> {
    /// `[token][cols]`; empty when only quantised weights read it.
    pub floats: &'a [f32],
    /// `[token][block]`; empty when only unquantised weights read it.
    pub blocks: &'a [ActBlock],
    /// The blocks arranged as `[tile][block]`; empty unless the instruction set reads tiles.
    pub tiles: &'a [ActTile],
    /// Number of tokens.
    pub tokens: usize,
}

/// Columns of a product, which are rows of its weights.
#[derive(Clone, Copy)]
pub struct OutputColumns {
    /// The first column, a multiple of 16.
    pub first: usize,
    /// Number of columns, a multiple of 16 except at the matrix's end.
    pub width: usize,
}

impl OutputColumns {
    /// The columns of a tile.
    pub fn of_tile<T>(tile: &Tile<'_, T>) -> Self {
        Self { first: tile.col, width: tile.cols }
    }
}

/// Destination of [`project`].
pub struct MatmulOutput<'a, 'b> {
    /// Rows are tokens.
    pub tile: &'a mut Tile<'b, f32>,
    /// The tile's column for the first of `columns`.
    pub at: usize,
    /// Columns of the product.
    pub columns: OutputColumns,
}

impl<'a, 'b> MatmulOutput<'a, 'b> {
    /// The whole tile, which has the same columns as the product.
    pub fn whole_tile(tile: &'a mut Tile<'b, f32>) -> Self {
        let columns = OutputColumns::of_tile(tile);
        Self { tile, at: 0, columns }
    }
}

/// Gate and up, which are multiplied with the same activations.
#[derive(Clone, Copy)]
pub struct GateUp<'a, const ROWS: usize, const COLS: usize> {
    /// Matrix whose product goes through the activation function; without it, the product of `up` does.
    pub gate: Option<&'a Matrix<ROWS, COLS>>,
    /// Bias of the gate: `[ROWS]`, empty if there is none.
    pub gate_bias: &'a [f32],
    /// Matrix whose product the gate's is multiplied with.
    pub up: &'a Matrix<ROWS, COLS>,
    /// Bias of `up`: `[ROWS]`, empty if there is none.
    pub up_bias: &'a [f32],
}

/// Maximum number of tokens at once of a kernel without tiles.
const SMALL_BATCH: usize = 16;

/// Multiplies groups of `w`'s rows with the tokens of `x` from `from` on into `out[group][token][row]`.
fn multiply_groups<const ROWS: usize, const COLS: usize>(
    isa: Isa,
    w: &Matrix<ROWS, COLS>,
    groups: Range<usize>,
    (x, from): (MatmulInput<'_>, usize),
    out: &mut [[f32; GROUP_ROWS]],
) {
    let tokens = out.len() / groups.len();
    match w {
        Matrix::Quantised(w) => {
            let blocks = COLS / BLOCK;
            let (quants, scales) = (w.quants(groups.clone()), w.scales(groups.clone()));
            let w = Groups { format: w.format(), quants, scales, groups: groups.len(), blocks };
            let tiles = x.tiles.get(from / ActTile::TOKENS * blocks..).unwrap_or_default();
            let tiles = &tiles[..tiles.len().min(tokens / ActTile::TOKENS * blocks)];
            multiply::<COLS>(isa, w, &x.blocks[from * blocks..][..tokens * blocks], tiles, out);
        }
        Matrix::Dense { dtype, data } => {
            let x = &x.floats[from * COLS..][..tokens * COLS];
            for (group, out) in groups.zip(out.chunks_exact_mut(tokens)) {
                ops::dense_group(isa, data, *dtype, group * GROUP_ROWS, x, out);
            }
        }
    }
}

/// Computes columns of `x * w^T` and passes them to `put(destination in the tile, product, first row of w)`, 16 a time.
pub fn project<const ROWS: usize, const COLS: usize>(
    isa: Isa,
    w: &Matrix<ROWS, COLS>,
    x: MatmulInput<'_>,
    out: MatmulOutput<'_, '_>,
    put: impl Fn(&mut [f32], &[f32], usize),
) {
    let (tokens, _) = isa.tile_shape(x.tokens);
    if tokens <= SMALL_BATCH {
        multiply_by::<{ SMALL_BATCH * MOST_GROUPS }, ROWS, COLS>(isa, w, x, out, put);
    } else {
        multiply_by::<{ MAX_TOKENS * MOST_GROUPS }, ROWS, COLS>(isa, w, x, out, put);
    }
}

/// Computes [`project`] with at most `PASS` products of sixteen rows and one token at once. Not inlined, like
/// [`gate_up_by`]: otherwise a single token would touch the large stack of many, page by page.
#[inline(never)]
fn multiply_by<const PASS: usize, const ROWS: usize, const COLS: usize>(
    isa: Isa,
    w: &Matrix<ROWS, COLS>,
    x: MatmulInput<'_>,
    MatmulOutput { tile, at, columns: OutputColumns { first, width } }: MatmulOutput<'_, '_>,
    put: impl Fn(&mut [f32], &[f32], usize),
) {
    let mut out = [[0.0f32; GROUP_ROWS]; PASS];
    let end = (first + width).div_ceil(GROUP_ROWS);
    let mut from = 0;
    while from < x.tokens {
        let (tokens, groups) = isa.tile_shape(x.tokens - from);
        let n = tokens.min(x.tokens - from);
        for group in (first / GROUP_ROWS..end).step_by(groups) {
            let groups = group..end.min(group + groups);
            let out = &mut out[..groups.len() * n];
            multiply_groups(isa, w, groups.clone(), (x, from), out);
            for t in 0..n {
                let dst = tile.row_mut(from + t);
                for (group, out) in groups.clone().zip(out.chunks_exact(n)) {
                    let row = group * GROUP_ROWS;
                    let cols = GROUP_ROWS.min(first + width - row);
                    put(&mut dst[at + row - first..][..cols], &out[t][..cols], row);
                }
            }
        }
        from += n;
    }
}

/// Adds a bias to each row of some groups of products of `n` tokens.
#[inline(always)]
fn add_bias(products: &mut [[f32; GROUP_ROWS]], n: usize, bias: &[f32]) {
    for (products, bias) in products.chunks_exact_mut(n).zip(bias.chunks(GROUP_ROWS)) {
        products.iter_mut().for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
    }
}

/// `gate = g * sigmoid(1.702 g) * (clamp(up, -limit, limit) + 1)` with `g = min(gate, limit)`.
fn clamped_swiglu(isa: Isa, gates: &mut [[f32; GROUP_ROWS]], ups: &[[f32; GROUP_ROWS]]) {
    const LIMIT: f32 = EXPERTS.limit as f32;
    for (gates, ups) in gates.iter_mut().zip(ups) {
        *gates = gates.map(|g| if g > LIMIT { LIMIT } else { g });
        let mut sigmoids = gates.map(|g| 1.702 * g);
        apply_sigmoid(isa, &mut sigmoids);
        for ((g, sigmoid), up) in gates.iter_mut().zip(sigmoids).zip(ups) {
            let up = if *up > LIMIT { LIMIT } else { *up };
            *g = *g * sigmoid * ((if up < -LIMIT { -LIMIT } else { up }) + 1.0);
        }
    }
}

/// Applies the model's activation function: `gates = silu(gates) * ups`, or another.
#[inline(always)]
fn apply_activation(isa: Isa, gates: &mut [[f32; GROUP_ROWS]], ups: &[[f32; GROUP_ROWS]]) {
    const GATE: f32 = MLP_SCALES[0] as f32;
    const OUT: f32 = MLP_SCALES[1] as f32;
    if GATE != 1.0 {
        gates.as_flattened_mut().iter_mut().for_each(|x| *x *= GATE);
    }
    match MLP {
        Mlp::SwiGlu => ops::silu_mul(isa, gates.as_flattened_mut(), ups.as_flattened()),
        Mlp::GeGlu => ops::gelu_mul(isa, gates.as_flattened_mut(), ups.as_flattened()),
        Mlp::Gelu => ops::gelu(isa, gates.as_flattened_mut()),
        Mlp::SquaredRelu => {
            gates.as_flattened_mut().iter_mut().for_each(|x| *x = if *x > 0.0 { *x * *x } else { 0.0 });
        }
        Mlp::ClampedSwiGlu => clamped_swiglu(isa, gates, ups),
    }
    if OUT != 1.0 {
        gates.as_flattened_mut().iter_mut().for_each(|x| *x *= OUT);
    }
}

/// Rows of gate and up computed together: one block of the activations that `down` reads.
pub const RUN: usize = 2 * GROUP_ROWS;

/// Computes columns of `silu(x * gate^T) * (x * up^T)`, or the model's other activation, and passes them to `put(first
/// token, column - columns.first, products)`, 32 at a time (fewer at the matrix's end), for several tokens.
pub fn gate_up<const ROWS: usize, const COLS: usize>(
    isa: Isa,
    w: GateUp<'_, ROWS, COLS>,
    x: MatmulInput<'_>,
    columns: OutputColumns,
    put: impl FnMut(usize, usize, &[[f32; RUN]]),
) {
    let (tokens, _) = isa.tile_shape(x.tokens);
    if tokens <= SMALL_BATCH {
        gate_up_by::<SMALL_BATCH, { 2 * SMALL_BATCH }, ROWS, COLS>(isa, w, x, columns, put);
    } else {
        gate_up_by::<MAX_TOKENS, { 2 * MAX_TOKENS }, ROWS, COLS>(isa, w, x, columns, put);
    }
}

/// Computes [`gate_up`] with at most `PASS` tokens at once; `OUT` is two groups of them.
#[inline(never)]
fn gate_up_by<const PASS: usize, const OUT: usize, const ROWS: usize, const COLS: usize>(
    isa: Isa,
    GateUp { gate, gate_bias, up, up_bias }: GateUp<'_, ROWS, COLS>,
    x: MatmulInput<'_>,
    OutputColumns { first, width }: OutputColumns,
    mut put: impl FnMut(usize, usize, &[[f32; RUN]]),
) {
    // `[run][group][token][row]`
    let mut gates = [[0.0f32; GROUP_ROWS]; OUT];
    let mut ups = [[0.0f32; GROUP_ROWS]; OUT];
    let mut rows = [[0.0f32; RUN]; PASS];
    let end = first + width;
    let mut from = 0;
    while from < x.tokens {
        let n = isa.tile_shape(x.tokens - from).0.min(x.tokens - from);
        // Several runs of one matrix before the other, if they fit: weights are read in longer pieces. (Two groups at a
        // time: 10 % less bandwidth on a Zen 4 EPYC.)
        for piece in (first..end).step_by(PASS / n * RUN) {
            let piece = piece..end.min(piece + PASS / n * RUN);
            let products = |w, out: &mut [[f32; GROUP_ROWS]]| {
                for (run, out) in piece.clone().step_by(RUN).zip(out.chunks_mut(RUN / GROUP_ROWS * n)) {
                    let group = run / GROUP_ROWS;
                    multiply_groups(isa, w, group..group + out.len() / n, (x, from), out);
                }
            };
            let groups = piece.len().div_ceil(GROUP_ROWS);
            let (gates, ups) = (&mut gates[..groups * n], &mut ups[..groups * n]);
            products(gate.unwrap_or(up), gates);
            if HAS_GATE {
                products(up, ups);
            }
            if MLP_BIAS {
                add_bias(gates, n, &up_bias[piece.start..]);
            }
            if EXPERT_BIAS {
                add_bias(gates, n, &gate_bias[piece.start..]);
                add_bias(ups, n, &up_bias[piece.start..]);
            }
            // All tokens in one call: the exponentials of a single token are bound by latency.
            apply_activation(isa, gates, ups);
            for (run, gates) in piece.step_by(RUN).zip(gates.chunks(RUN / GROUP_ROWS * n)) {
                for (half, gates) in gates.chunks_exact(n).enumerate() {
                    for (row, gates) in rows.iter_mut().zip(gates) {
                        row[half * GROUP_ROWS..][..GROUP_ROWS].copy_from_slice(gates);
                    }
                }
                put(from, run - first, &rows[..n]);
            }
        }
        from += n;
    }
}
