//! Attention of a few queries over one fixed chunk of the cache, and the merge of chunks.
//!
//! The slots of a sequence are cut into chunks of [`CHUNK`], by slot number, whoever computes them. A
//! chunk gives each query a [`Partial`]; partials are merged in ascending order of chunks. So the result
//! does not depend on threads, on the number of queries at once, or on who merges.

use super::kv_row::decode;
use super::lanes::Lanes;
use super::ops::{exp_lanes, load, sixteens, store};
use super::{Isa, dispatch};
use crate::kv::KvTypes;

/// Slots in one chunk.
pub const CHUNK: usize = 128;
/// Queries that one call takes at most.
pub const QUERIES: usize = 32;
/// Slots whose rows are widened at once.
const ROWS: usize = 16;

/// A softmax-weighted sum in the making: `o / l` is the result.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Partial<const HD: usize> {
    /// Largest score.
    pub m: f32,
    /// Sum of `e^(score - m)`.
    pub l: f32,
    /// Sum of `e^(score - m) * v`.
    pub o: [f32; HD],
}

impl<const HD: usize> Partial<HD> {
    /// Nothing seen yet.
    pub const EMPTY: Self = Self { m: f32::NEG_INFINITY, l: 0.0, o: [0.0; HD] };
}

/// The rows of one chunk of one KV head, contiguous.
#[derive(Clone, Copy)]
pub struct KvChunk<'a> {
    /// `[slot][row bytes]` of the keys.
    pub k: &'a [u8],
    /// `[slot][row bytes]` of the values.
    pub v: &'a [u8],
    /// Element types.
    pub types: KvTypes,
}

/// Scores, softmax numerators and weighted values of each query over the first `visible[query]` slots of
/// the chunk, for at most `N` queries. They are rotated by RoPE and already scaled by `1 / sqrt(head_dim)`.
pub fn attend<const HD: usize, const N: usize>(
    isa: Isa,
    kv: KvChunk<'_>,
    queries: &[[f32; HD]],
    visible: &[usize],
    out: &mut [Partial<HD>],
) {
    #[inline(always)]
    unsafe fn body<L: Lanes, const HD: usize, const N: usize>(
        kv: KvChunk<'_>,
        queries: &[[f32; HD]],
        visible: &[usize],
        out: &mut [Partial<HD>],
    ) {
        let slots = visible.iter().copied().max().unwrap_or(0);
        let (k_bytes, v_bytes) = (kv.types.k.row_bytes(HD), kv.types.v.row_bytes(HD));
        let mut scores = [[0.0f32; CHUNK]; N];
        let mut rows = [[0.0f32; HD]; ROWS];
        // SAFETY: `attend` checked that the chunk holds `slots` rows of each; lanes as the caller's.
        unsafe {
            for first in (0..slots).step_by(ROWS) {
                let n = ROWS.min(slots - first);
                for (r, row) in rows[..n].iter_mut().enumerate() {
                    decode::<L, HD>(kv.types.k, &kv.k[(first + r) * k_bytes..][..k_bytes], row);
                }
                for (q, scores) in queries.iter().zip(&mut scores) {
                    dots::<L, HD>(q, &rows).store(scores[first..].as_mut_ptr());
                }
            }
            for ((scores, out), &n) in scores.iter_mut().zip(out.iter_mut()).zip(visible) {
                (out.m, out.l) = numerators::<L>(&mut scores[..n]);
                out.o = [0.0; HD];
            }
            for first in (0..slots).step_by(ROWS) {
                let n = ROWS.min(slots - first);
                for (r, row) in rows[..n].iter_mut().enumerate() {
                    decode::<L, HD>(kv.types.v, &kv.v[(first + r) * v_bytes..][..v_bytes], row);
                }
                for ((scores, out), &seen) in scores.iter().zip(out.iter_mut()).zip(visible) {
                    let n = seen.saturating_sub(first).min(ROWS);
                    add::<L, HD>(&scores[first..][..n], &rows, &mut out.o);
                }
            }
        }
    }
    let slots = visible.iter().copied().max().unwrap_or(0);
    assert!(queries.len() == visible.len() && queries.len() == out.len() && queries.len() <= N);
    assert!(slots <= CHUNK);
    assert!(kv.k.len() >= slots * kv.types.k.row_bytes(HD) && kv.v.len() >= slots * kv.types.v.row_bytes(HD));
    dispatch!(isa, body::<L, HD: usize, N: usize>(kv: KvChunk<'_>, queries: &[[f32; HD]], visible: &[usize],
        out: &mut [Partial<HD>]))
}

/// Dot products of one query with sixteen rows.
#[inline(always)]
unsafe fn dots<L: Lanes, const HD: usize>(q: &[f32; HD], rows: &[[f32; HD]; ROWS]) -> L {
    // SAFETY: rows and query have HD elements; indices from `sixteens`; lanes as the caller's.
    unsafe {
        let mut acc = [L::splat(0.0); ROWS];
        for (acc, row) in acc.iter_mut().zip(rows) {
            sixteens!(HD, |i, part| *acc = load::<L>(row, i, part).fma(load(q, i, part), *acc));
        }
        L::sums(&acc)
    }
}

/// `o += weight * row` for each weight in turn.
#[inline(always)]
unsafe fn add<L: Lanes, const HD: usize>(weights: &[f32], rows: &[[f32; HD]; ROWS], o: &mut [f32; HD]) {
    /// Runs of sixteen that are kept in registers.
    const RUNS: usize = 8;
    // SAFETY: rows have HD elements, RUNS * 16 at most where they are read by runs; indices from `sixteens`;
    // lanes as the caller's.
    unsafe {
        if HD.is_multiple_of(16) && HD <= 16 * RUNS {
            let mut sum = [L::splat(0.0); RUNS];
            for (i, sum) in sum.iter_mut().enumerate().take(HD / 16) {
                *sum = L::load(o.as_ptr().add(16 * i));
            }
            for (w, row) in weights.iter().zip(rows) {
                let w = L::splat(*w);
                for (i, sum) in sum.iter_mut().enumerate().take(HD / 16) {
                    *sum = w.fma(L::load(row.as_ptr().add(16 * i)), *sum);
                }
            }
            for (i, sum) in sum.iter().enumerate().take(HD / 16) {
                sum.store(o.as_mut_ptr().add(16 * i));
            }
        } else {
            sixteens!(HD, |i, part| {
                let mut sum: L = load(o, i, part);
                for (w, row) in weights.iter().zip(rows) {
                    sum = L::splat(*w).fma(load(row, i, part), sum);
                }
                store(sum, o, i, part);
            });
        }
    }
}

/// Turns scores into `e^(score - max)`; returns the maximum and the sum.
#[inline(always)]
unsafe fn numerators<L: Lanes>(scores: &mut [f32]) -> (f32, f32) {
    if scores.is_empty() {
        return (f32::NEG_INFINITY, 0.0);
    }
    // SAFETY: indices from `sixteens`; lanes as the caller's.
    unsafe {
        let mut most = L::splat(f32::NEG_INFINITY);
        let (whole, rest) = scores.as_chunks::<16>();
        for run in whole {
            most = L::load(run.as_ptr()).max(most);
        }
        let m = rest.iter().fold(most.largest(), |m, &x| if x > m { x } else { m });
        let mut sum = L::splat(0.0);
        sixteens!(scores.len(), |i, part| {
            let e = exp_lanes(load::<L>(scores, i, part).sub(L::splat(m)));
            store(e, scores, i, part);
            // Reloading zeroes the lanes past the end.
            sum = sum.add(load(scores, i, part));
        });
        (m, sum.sum())
    }
}

/// Takes the next chunk's partial into `state`.
pub fn merge<const HD: usize>(isa: Isa, state: &mut Partial<HD>, part: &Partial<HD>) {
    #[inline(always)]
    unsafe fn body<L: Lanes, const HD: usize>(state: &mut Partial<HD>, part: &Partial<HD>) {
        let m = if part.m > state.m { part.m } else { state.m };
        let mut weights = [0.0f32; 16];
        (weights[0], weights[1]) = (state.m - m, part.m - m);
        // SAFETY: sixteen floats; indices from `sixteens`; lanes as the caller's.
        unsafe {
            exp_lanes(L::load(weights.as_ptr())).store(weights.as_mut_ptr());
            let (old, new) = (weights[0], weights[1]);
            (state.m, state.l) = (m, part.l.mul_add(new, state.l * old));
            sixteens!(HD, |i, run| {
                let o = load::<L>(&state.o, i, run).mul(L::splat(old));
                store(load::<L>(&part.o, i, run).fma(L::splat(new), o), &mut state.o, i, run);
            });
        }
    }
    if part.l > 0.0 {
        dispatch!(isa, body::<L, HD: usize>(state: &mut Partial<HD>, part: &Partial<HD>))
    }
}
