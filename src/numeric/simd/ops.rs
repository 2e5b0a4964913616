//! The float operations of a transformer, each written once over sixteen lanes.
//!
//! Each public function is safe and takes the instruction set first. It checks lengths, then runs the body that is
//! compiled for that set.

#![allow(clippy::missing_safety_doc, reason = "the contract is that of Lanes")]

use super::lanes::Lanes;
use super::{Isa, dispatch};
use crate::quant::activations::ActBlock;
use files::blocks::{BLOCK, Dtype};
use files::mapped::MappedSlice;

/// Evaluates an expression for each run of sixteen elements. `i` is the run's first element, `part` the length of a
/// shorter last run.
///
/// A macro, because a closure is compiled without the instruction set of the surrounding function and is then not
/// inlined: attention and SiLU were five times slower.
macro_rules! sixteens {
    ($n:expr, |$i:ident, $part:ident| $body:expr) => {{
        let n: usize = $n;
        let whole = n / 16 * 16;
        let mut $i = 0;
        while $i < whole {
            let $part: Option<usize> = None;
            $body;
            $i += 16;
        }
        if whole < n {
            let ($i, $part) = (whole, Some(n - whole));
            $body;
        }
    }};
}
pub(super) use sixteens;

/// Loads the run of sixteen elements (or `part`) from element `i` on.
#[inline(always)]
pub(super) unsafe fn load<L: Lanes>(p: &[f32], i: usize, part: Option<usize>) -> L {
    match part {
        None => L::load(p.as_ptr().add(i)),
        Some(n) => L::load_part(p.as_ptr().add(i), n),
    }
}

/// Stores the run of sixteen elements (or `part`) from element `i` on.
#[inline(always)]
pub(super) unsafe fn store<L: Lanes>(x: L, p: &mut [f32], i: usize, part: Option<usize>) {
    match part {
        None => x.store(p.as_mut_ptr().add(i)),
        Some(n) => x.store_part(p.as_mut_ptr().add(i), n),
    }
}

/// Computes `e^x` with at most 2 ulp of error for x in [-87.3, 88]; 0 below that, e^88 above.
///
/// `x = n ln2 + r` with |r| <= ln2 / 2; ln2 in two parts (Cody and Waite); a Taylor polynomial of
/// degree 7, whose truncation error on that range is below 6e-9.
#[inline(always)]
pub(super) unsafe fn exp_lanes<L: Lanes>(x: L) -> L {
    let low = L::splat(-87.3);
    let clamped = x.max(low).min(L::splat(88.0));
    let n = clamped.mul(L::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(L::splat(-355.0 / 512.0), clamped);
    let r = n.fma(L::splat(2.121_944_4e-4), r);
    let mut p = L::splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p.fma(r, L::splat(c));
    }
    p.mul(L::pow2(n)).where_ge(x, low)
}

/// `x[i] = e^(x[i])`.
pub fn exp_in_place(isa: Isa, x: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32]) {
        sixteens!(x.len(), |i, part| store(exp_lanes(load::<L>(x, i, part)), x, i, part));
    }
    dispatch!(isa, body::<L>(x: &mut [f32]))
}

/// Root-mean-square norm of each row: `h = x * (1 / sqrt(mean(x^2) + eps)) * w`.
pub fn rms_norm(isa: Isa, x: &[f32], w: &[f32], eps: f32, h: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &[f32], w: &[f32], eps: f32, h: &mut [f32]) {
        for (x, h) in x.chunks_exact(w.len()).zip(h.chunks_exact_mut(w.len())) {
            let mut squares = L::splat(0.0);
            sixteens!(x.len(), |i, part| {
                let x: L = load(x, i, part);
                squares = x.fma(x, squares);
            });
            let scale = L::splat(1.0 / (squares.sum() / x.len() as f32 + eps).sqrt());
            sixteens!(x.len(), |i, part| {
                store(load::<L>(x, i, part).mul(scale).mul(load(w, i, part)), h, i, part);
            });
        }
    }
    assert!(x.len() == h.len() && x.len().is_multiple_of(w.len()));
    dispatch!(isa, body::<L>(x: &[f32], w: &[f32], eps: f32, h: &mut [f32]))
}

/// LayerNorm of each row: `h = (x - mean) * (1 / sqrt(mean((x - mean)^2) + eps)) * w + b`. `wb` is `w`, then `b`.
pub fn layer_norm(isa: Isa, x: &[f32], wb: &[f32], eps: f32, h: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &[f32], wb: &[f32], eps: f32, h: &mut [f32]) {
        let (w, b) = wb.split_at(wb.len() / 2);
        for (x, h) in x.chunks_exact(w.len()).zip(h.chunks_exact_mut(w.len())) {
            let mut sum = L::splat(0.0);
            sixteens!(x.len(), |i, part| sum = sum.add(load(x, i, part)));
            let mean = L::splat(sum.sum() / x.len() as f32);
            let mut squares = L::splat(0.0);
            sixteens!(x.len(), |i, part| {
                store(load::<L>(x, i, part).sub(mean), h, i, part);
                // Reloading zeroes the lanes past the end.
                let centred: L = load(h, i, part);
                squares = centred.fma(centred, squares);
            });
            let scale = L::splat(1.0 / (squares.sum() / x.len() as f32 + eps).sqrt());
            sixteens!(x.len(), |i, part| {
                let scaled = load::<L>(h, i, part).mul(scale);
                store(scaled.fma(load(w, i, part), load(b, i, part)), h, i, part);
            });
        }
    }
    assert!(x.len() == h.len() && wb.len().is_multiple_of(2) && x.len().is_multiple_of(wb.len() / 2));
    dispatch!(isa, body::<L>(x: &[f32], wb: &[f32], eps: f32, h: &mut [f32]))
}

/// `a[i] += b[i]`.
pub fn add_in_place(isa: Isa, a: &mut [f32], b: &[f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(a: &mut [f32], b: &[f32]) {
        sixteens!(a.len(), |i, part| {
            store(load::<L>(a, i, part).add(load(b, i, part)), a, i, part);
        });
    }
    assert_eq!(a.len(), b.len());
    dispatch!(isa, body::<L>(a: &mut [f32], b: &[f32]))
}

/// `a[i] = fma(b[i], factor, a[i])`.
pub fn add_scaled(isa: Isa, a: &mut [f32], b: &[f32], factor: f32) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(a: &mut [f32], b: &[f32], factor: f32) {
        let factor = L::splat(factor);
        sixteens!(a.len(), |i, part| {
            store(load::<L>(b, i, part).fma(factor, load(a, i, part)), a, i, part);
        });
    }
    assert_eq!(a.len(), b.len());
    dispatch!(isa, body::<L>(a: &mut [f32], b: &[f32], factor: f32))
}

/// Sum over the sixteen lanes.
pub fn sum(isa: Isa, x: &[f32]) -> f32 {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &[f32]) -> f32 {
        let mut sum = L::splat(0.0);
        sixteens!(x.len(), |i, part| sum = sum.add(load(x, i, part)));
        sum.sum()
    }
    dispatch!(isa, body::<L>(x: &[f32]) -> f32)
}

/// SiLU, `x / (1 + e^-x)`.
#[inline(always)]
unsafe fn silu_lanes<L: Lanes>(x: L) -> L {
    x.div(L::splat(1.0).add(exp_lanes(L::splat(0.0).sub(x))))
}

/// `x[i] = silu(x[i])`
pub fn silu(isa: Isa, x: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32]) {
        sixteens!(x.len(), |i, part| store(silu_lanes::<L>(load(x, i, part)), x, i, part));
    }
    dispatch!(isa, body::<L>(x: &mut [f32]))
}

/// `gate[i] = silu(gate[i]) * up[i]`
pub fn silu_mul(isa: Isa, gate: &mut [f32], up: &[f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(gate: &mut [f32], up: &[f32]) {
        sixteens!(gate.len(), |i, part| {
            let silu = silu_lanes::<L>(load(gate, i, part));
            store(silu.mul(load(up, i, part)), gate, i, part);
        });
    }
    assert_eq!(gate.len(), up.len());
    dispatch!(isa, body::<L>(gate: &mut [f32], up: &[f32]))
}

/// GELU by the tanh formula, `0.5 x (1 + tanh(u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, computed as
/// `x / (1 + e^(-2u))`: no cancellation, and one exponential as in SiLU.
#[inline(always)]
unsafe fn gelu_lanes<L: Lanes>(x: L) -> L {
    let slope = x.mul(x).fma(L::splat(GELU[1]), L::splat(GELU[0]));
    x.div(L::splat(1.0).add(exp_lanes(x.mul(slope))))
}

/// Factors of `x` and `x^3` in `-2u`: `-2 sqrt(2 / pi)`, and that times 0.044715.
const GELU: [f32; 2] = [-1.595_769_2, -0.071_354_814];

/// `gate[i] = gelu(gate[i]) * up[i]`, see [`gelu`].
pub fn gelu_mul(isa: Isa, gate: &mut [f32], up: &[f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(gate: &mut [f32], up: &[f32]) {
        sixteens!(gate.len(), |i, part| {
            let gelu = gelu_lanes::<L>(load(gate, i, part));
            store(gelu.mul(load(up, i, part)), gate, i, part);
        });
    }
    assert_eq!(gate.len(), up.len());
    dispatch!(isa, body::<L>(gate: &mut [f32], up: &[f32]))
}

/// `x[i] = gelu(x[i])`, by the tanh formula.
pub fn gelu(isa: Isa, x: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32]) {
        sixteens!(x.len(), |i, part| store(gelu_lanes::<L>(load(x, i, part)), x, i, part));
    }
    dispatch!(isa, body::<L>(x: &mut [f32]))
}

/// `x[i] = cap * tanh(x[i] / cap)`, computed as `cap - 2 cap / (1 + e^(2x / cap))`.
pub fn apply_softcap(isa: Isa, x: &mut [f32], cap: f32) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32], cap: f32) {
        let (cap, factor, twice) = (L::splat(cap), L::splat(2.0 / cap), L::splat(-2.0 * cap));
        sixteens!(x.len(), |i, part| {
            let growth = exp_lanes(load::<L>(x, i, part).mul(factor));
            store(cap.add(twice.div(L::splat(1.0).add(growth))), x, i, part);
        });
    }
    dispatch!(isa, body::<L>(x: &mut [f32], cap: f32))
}

/// Quantises activations to blocks of 32 bytes, equal to [`ActBlock::quantise`] of each block.
pub fn quantise_activations(isa: Isa, x: &[f32], out: &mut [ActBlock]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &[f32], out: &mut [ActBlock]) {
        let (sixteens, rest) = x.as_chunks::<BLOCK>().0.as_chunks::<16>();
        let (sixteens_out, rest_out) = out.as_chunks_mut::<16>();
        for (x, out) in sixteens.iter().zip(sixteens_out) {
            quantise_16::<L>(x, out);
        }
        for (x, out) in rest.iter().zip(rest_out) {
            let max = max_magnitude::<L>(x).largest();
            let (d, id) = if max == 0.0 { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) };
            out.d = d;
            // A sum of 32 small integers is exact in f32.
            out.offset = -8 * quantise_block::<L>(x, id, out).sum() as i32;
        }
    }
    assert_eq!(x.len(), out.len() * BLOCK);
    dispatch!(isa, body::<L>(x: &[f32], out: &mut [ActBlock]))
}

/// Quantises sixteen blocks at once: they share one division and one tree of maximums, for which a single block would
/// wait.
#[inline(always)]
unsafe fn quantise_16<L: Lanes>(x: &[[f32; BLOCK]; 16], out: &mut [ActBlock; 16]) {
    let mut rows = [L::splat(0.0); 16];
    for (row, x) in rows.iter_mut().zip(x) {
        *row = max_magnitude(x);
    }
    let max = L::largests(&rows);
    let above_zero = L::splat(f32::from_bits(1));
    let (mut d, mut id, mut offset) = ([0.0f32; 16], [0.0f32; 16], [0.0f32; 16]);
    max.div(L::splat(127.0)).store(d.as_mut_ptr());
    L::splat(127.0).div(max).where_ge(max, above_zero).store(id.as_mut_ptr());
    for (b, row) in rows.iter_mut().enumerate() {
        *row = quantise_block(&x[b], id[b], &mut out[b]);
    }
    // Exact, as above.
    L::sums(&rows).mul(L::splat(-8.0)).store(offset.as_mut_ptr());
    for (b, out) in out.iter_mut().enumerate() {
        (out.d, out.offset) = (d[b], offset[b] as i32);
    }
}

/// Returns in lane `i` the larger magnitude of elements `i` and `i + 16`.
#[inline(always)]
unsafe fn max_magnitude<L: Lanes>(x: &[f32; BLOCK]) -> L {
    L::load(x.as_ptr()).abs().max(L::load(x.as_ptr().add(16)).abs())
}

/// Writes the quantised values of a block. Returns in lane `i` the sum of elements `i` and `i + 16`.
#[inline(always)]
unsafe fn quantise_block<L: Lanes>(x: &[f32; BLOCK], id: f32, out: &mut ActBlock) -> L {
    let id = L::splat(id);
    let (a, b) = (L::load(x.as_ptr()).mul(id).round(), L::load(x.as_ptr().add(16)).mul(id).round());
    a.store_i8(out.q.as_mut_ptr());
    b.store_i8(out.q.as_mut_ptr().add(16));
    a.add(b)
}

/// Rotates each head of `x` by the angles with these cosines and sines: element `i` with element `i + half`, in the
/// "rotate half" order of Hugging Face checkpoints.
pub fn apply_rope(isa: Isa, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        for head in x.chunks_exact_mut(2 * cos.len()) {
            let (a, b) = head.split_at_mut(cos.len());
            sixteens!(cos.len(), |i, part| {
                let (x0, x1): (L, L) = (load(a, i, part), load(b, i, part));
                let (c, s): (L, L) = (load(cos, i, part), load(sin, i, part));
                let minus = L::splat(0.0).sub(x1.mul(s));
                store(x0.fma(c, minus), a, i, part);
                store(x1.fma(c, x0.mul(s)), b, i, part);
            });
        }
    }
    assert!(cos.len() == sin.len() && x.len().is_multiple_of(2 * cos.len()));
    dispatch!(isa, body::<L>(x: &mut [f32], cos: &[f32], sin: &[f32]))
}

/// Multiplies rows `first..first + 16` of an unquantised `[rows][cols]` matrix with `out.len()` tokens.
///
/// `x` is `[token][cols]`. Rows past the end give 0. Each dot product is a sum over the sixteen lanes.
pub fn dense_group(isa: Isa, w: &MappedSlice, dtype: Dtype, first: usize, x: &[f32], out: &mut [[f32; 16]]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(w: &[u8], dtype: Dtype, first: usize, x: &[f32], out: &mut [[f32; 16]]) {
        let cols = x.len() / out.len();
        let row_bytes = cols * dtype.byte_size();
        let rows = (w.len() / row_bytes).saturating_sub(first).min(16);
        for (x, out) in x.chunks_exact(cols).zip(out) {
            *out = [0.0; 16];
            for (r, o) in out.iter_mut().enumerate().take(rows) {
                let row = &w[(first + r) * row_bytes..][..row_bytes];
                let mut acc = L::splat(0.0);
                sixteens!(cols, |i, part| {
                    acc = load_dtype::<L>(row, dtype, i, part).fma(load(x, i, part), acc);
                });
                *o = acc.sum();
            }
        }
    }
    assert!(!out.is_empty() && x.len().is_multiple_of(out.len()));
    let w = w.bytes();
    dispatch!(isa, body::<L>(w: &[u8], dtype: Dtype, first: usize, x: &[f32], out: &mut [[f32; 16]]))
}

/// Loads sixteen (or `part`) stored values from element `i` on.
#[inline(always)]
pub(super) unsafe fn load_dtype<L: Lanes>(bytes: &[u8], dtype: Dtype, i: usize, part: Option<usize>) -> L {
    let size = dtype.byte_size();
    let mut copy = [0u8; 64];
    let mut p = bytes.as_ptr().add(i * size);
    if let Some(n) = part {
        std::ptr::copy_nonoverlapping(p, copy.as_mut_ptr(), n * size);
        p = copy.as_ptr();
    }
    match dtype {
        Dtype::F32 => L::load(p.cast()),
        Dtype::F16 => L::load_f16(p),
        Dtype::BF16 => L::load_bf16(p),
        _ => unreachable!("invariant: not a weight type"),
    }
}
