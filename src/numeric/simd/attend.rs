//! Attention of a few queries over one fixed chunk of the KV cache, and the merge of chunks.
//!
//! The slots of a sequence are split into chunks of [`CHUNK`] by slot number. Each chunk gives each query a
//! [`Partial`], and partials are merged in ascending order of chunks. So the result does not depend on the threads or
//! on the number of queries at once.
//!
//! Conditions on constants are constant blocks, so that what they exclude is not compiled either: attention is most of
//! the code of a model.

mod blocks;
mod fused;
mod observe;

pub use observe::{ObservedQueries, SoftmaxState, add_attention_mass};

use super::kv_row::decode_row;
use super::lanes::Lanes;
use super::ops::{exp_lanes, load, sixteens, store};
use super::{Isa, dispatch, prefetch};
use crate::kv::{KvType, KvTypes};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Slots in one chunk.
pub const CHUNK: usize = 128;
/// Maximum queries in one call.
pub const MAX_QUERIES: usize = 64;
/// Up to this many queries, rows are widened in registers if the set has enough of them.
const FEW: usize = 8;
/// Slots whose rows are widened at once.
const ROWS: usize = 16;

/// The softmax-weighted sum over some of the slots. Over all slots, `o / l` is the result of attention.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct Partial<const HD: usize> {
    /// Sum of `e^(score - m) * v`.
    pub o: [f32; HD],
    /// Largest score.
    pub m: f32,
    /// Sum of `e^(score - m)`.
    pub l: f32,
}

/// A buffer aligned to cache lines, so that each run of sixteen floats is in one. Runs across two lines cost attention
/// a third of its speed.
#[repr(C, align(64))]
struct Aligned<T>(T);

impl<const HD: usize> Partial<HD> {
    /// The sum over no slots.
    pub const EMPTY: Self = Self { m: f32::NEG_INFINITY, l: 0.0, o: [0.0; HD] };
}

/// The rows of one chunk of one KV head, contiguous.
#[derive(Clone, Copy)]
pub struct KvChunk<'a> {
    /// `[slot][row bytes]` of the keys.
    pub k: &'a [u8],
    /// `[slot][row bytes]` of the values.
    pub v: &'a [u8],
    pub types: KvTypes,
    /// Slots that a query sees, its own included; [`FULL_ATTENTION`] for full attention.
    pub window: usize,
}

/// The window of full attention.
pub const FULL_ATTENTION: usize = usize::MAX;

/// Slots of the chunk that a query sees: the last `window` of `visible` slots, counted from the chunk's first.
fn visible_range(visible: usize, window: usize) -> Range<usize> {
    let (hidden, end) = (visible.saturating_sub(window), visible.min(CHUNK));
    if hidden < end { hidden..end } else { 0..0 }
}

/// Score of hidden slots, less than any other: their weight `e^(HIDDEN - m)` is 0.
const HIDDEN: f32 = -1e30;

/// Computes attention of at most [`MAX_QUERIES`] queries over one chunk. Query `i` sees the first `visible[i]` slots,
/// counted from the chunk's first (the number may exceed the chunk), limited by the window. Queries are rotated by RoPE
/// and already scaled by `1 / sqrt(head_dim)`.
pub fn attend<const HD: usize>(
    isa: Isa,
    kv: KvChunk<'_>,
    queries: &[[f32; HD]],
    visible: &[usize],
    out: &mut [Partial<HD>],
) {
    let slots = visible.iter().copied().max().unwrap_or(0).min(CHUNK);
    assert!(queries.len() == visible.len() && queries.len() == out.len() && queries.len() <= MAX_QUERIES);
    assert!(kv.k.len() >= slots * kv.types.k.row_bytes(HD) && kv.v.len() >= slots * kv.types.v.row_bytes(HD));
    if queries.len() <= FEW {
        attend_at_most::<HD, FEW>(isa, kv, queries, visible, out)
    } else {
        attend_at_most::<HD, MAX_QUERIES>(isa, kv, queries, visible, out)
    }
}

/// [`attend`] for at most `N` queries.
fn attend_at_most<const HD: usize, const N: usize>(
    isa: Isa,
    kv: KvChunk<'_>,
    queries: &[[f32; HD]],
    visible: &[usize],
    out: &mut [Partial<HD>],
) {
    dispatch!(isa, attend_queries::<L, HD: usize, N: usize>(kv: KvChunk<'_>, queries: &[[f32; HD]],
        visible: &[usize], out: &mut [Partial<HD>]))
}

/// Implements [`attend_at_most`].
#[inline(always)]
unsafe fn attend_queries<L: Lanes, const HD: usize, const N: usize>(
    kv: KvChunk<'_>,
    queries: &[[f32; HD]],
    visible: &[usize],
    out: &mut [Partial<HD>],
) {
    let mut ends = [0; N];
    ends.iter_mut().zip(visible).for_each(|(end, &n)| *end = visible_range(n, kv.window).end);
    let ends = &ends[..visible.len()];
    let slots = ends.iter().copied().max().unwrap_or(0);
    let mut scores = Scores::<N>::NONE;
    // Few queries are bound by memory: while keys are read, values are prefetched, then the next chunk's keys.
    let (k_row, v_row) = (kv.types.k.row_bytes(HD), kv.types.v.row_bytes(HD));
    let (values, keys) = if const { N <= FEW } {
        (Prefetch::new(kv.v.as_ptr(), v_row), Prefetch::new(kv.k.as_ptr(), k_row).skip_rows(CHUNK))
    } else {
        (Prefetch::NOTHING, Prefetch::NOTHING)
    };
    let scores = compute_scores::<L, HD, N>((kv.types.k, kv.k, slots), queries, values, &mut scores);
    for ((scores, out), &n) in scores.iter_mut().zip(out.iter_mut()).zip(visible) {
        let range = visible_range(n, kv.window);
        scores[..range.start].fill(HIDDEN);
        (out.m, out.l) = exp_scores::<L>(&mut scores[..range.end]);
        out.o = [0.0; HD];
    }
    let alike = ends.iter().all(|&n| n == slots);
    if const { is_fused::<L, HD, N>() } && alike {
        fused::weighted_sum::<L, HD>(kv.types.v, (kv.v, slots), scores, out, keys);
    } else {
        weighted_sum::<L, HD>(kv.types.v, kv.v, (scores, ends), out, keys);
    }
}

/// A buffer for the scores of `N` queries.
struct Scores<const N: usize>([MaybeUninit<Aligned<[f32; CHUNK]>>; N]);

impl<const N: usize> Scores<N> {
    const NONE: Self = Self([const { MaybeUninit::uninit() }; N]);

    /// Zeroes and returns the scores of the first `n` queries; most calls have fewer than `N`.
    #[inline(always)]
    fn init(&mut self, n: usize) -> &mut [[f32; CHUNK]] {
        let scores = &mut self.0[..n];
        scores.iter_mut().for_each(|s| *s = MaybeUninit::new(Aligned([0.0; CHUNK])));
        // SAFETY: these were just initialised, and `Aligned` adds no padding to whole cache lines.
        unsafe { std::slice::from_raw_parts_mut(scores.as_mut_ptr().cast(), n) }
    }
}

/// Returns true if rows are widened into registers, for at most `N` queries.
const fn is_fused<L: Lanes, const HD: usize, const N: usize>() -> bool {
    L::WIDE && HD.is_multiple_of(64) && N <= FEW
}

/// Computes the dot products of at most `N` queries with the first `slots` rows of `k`. Both implementations give the
/// same bits.
#[inline(always)]
unsafe fn compute_scores<'a, L: Lanes, const HD: usize, const N: usize>(
    (kind, k, slots): (KvType, &[u8], usize),
    queries: &[[f32; HD]],
    ahead: Prefetch,
    scores: &'a mut Scores<N>,
) -> &'a mut [[f32; CHUNK]] {
    let scores = scores.init(queries.len());
    if const { is_fused::<L, HD, N>() } {
        fused::score::<L, HD>(kind, (k, slots), queries, scores, ahead);
    } else {
        score_rows::<L, HD, N>(kind, k, slots, queries, scores, ahead);
    }
    scores
}

/// Rows of the KV cache to prefetch.
#[derive(Clone, Copy)]
struct Prefetch {
    rows: *const u8,
    /// 0 if there are none.
    row_bytes: usize,
}

impl Prefetch {
    const NOTHING: Self = Self { rows: std::ptr::null(), row_bytes: 0 };

    fn new(rows: *const u8, row_bytes: usize) -> Self {
        Self { rows, row_bytes }
    }

    /// Skips `rows` rows.
    fn skip_rows(self, rows: usize) -> Self {
        Self { rows: self.rows.wrapping_add(rows * self.row_bytes), ..self }
    }

    /// Returns true if each row is prefetched when its turn comes, false if sixteen are in a burst. Row by row,
    /// products do not wait behind the burst: with a 1B model at 8,192 slots on a Zen 5 EPYC, attention in decode takes
    /// 0.8 of the time for f32 and 0.6 to 0.85 for f16. Rows that are not whole cache lines are small, and a prefetch
    /// for each costs more than the burst, which takes 0.85 of the time for q4.
    const fn by_row<const HD: usize, const KIND: u8>() -> bool {
        KvType::ALL[KIND as usize].row_bytes(HD).is_multiple_of(64)
    }

    /// Prefetches `rows` rows from row `first` on, which may be past the end.
    #[inline(always)]
    fn prefetch_rows(self, first: usize, rows: usize) {
        let from = self.rows.wrapping_add(first * self.row_bytes);
        for at in (0..rows * self.row_bytes).step_by(64) {
            prefetch::<2>(from.wrapping_add(at));
        }
    }
}

/// Computes the dot products of the queries with the first `slots` rows of `k`, widened in memory.
#[inline(always)]
unsafe fn score_rows<L: Lanes, const HD: usize, const N: usize>(
    kind: KvType,
    k: &[u8],
    slots: usize,
    queries: &[[f32; HD]],
    scores: &mut [[f32; CHUNK]],
    ahead: Prefetch,
) {
    let Aligned(rows) = &mut Aligned([[0.0f32; HD]; ROWS]);
    let from = const { blocks::min_queries_to_transpose(HD) };
    let mut room = [const { MaybeUninit::uninit() }; MAX_QUERIES / 4];
    let fours = if const { may_transpose::<HD, N>() && L::BY_ELEMENT } && queries.len() >= from {
        blocks::group_by_four::<L, HD>(queries, &mut room)
    } else {
        &[]
    };
    for first in (0..slots).step_by(ROWS) {
        ahead.prefetch_rows(first, ROWS);
        let rows = widen_rows::<L, HD>(kind, k, first..slots.min(first + ROWS), rows);
        if const { may_transpose::<HD, N>() } && queries.len() >= from {
            blocks::scores::<L, HD>(rows, first, (queries, fours), scores);
        } else if const { HD.is_multiple_of(16) && L::BY_ELEMENT } {
            blocks::scores_by_row::<L, HD>(rows, first, queries, scores);
        } else {
            // Tried for AVX2: four queries at once are faster, one alone is slower, and the code takes 30 KB.
            for (q, scores) in queries.iter().zip(scores.iter_mut()) {
                dot_rows::<L, HD>(q, rows).store(scores[first..].as_mut_ptr());
            }
        }
    }
}

/// Returns true if keys may be transposed for at most `N` queries.
const fn may_transpose<const HD: usize, const N: usize>() -> bool {
    HD.is_multiple_of(16) && N >= blocks::min_queries_to_transpose(HD)
}

/// Computes the dot products of one query with sixteen rows.
#[inline(always)]
unsafe fn dot_rows<L: Lanes, const HD: usize>(q: &[f32; HD], rows: &[[f32; HD]; ROWS]) -> L {
    let mut acc = [L::splat(0.0); ROWS];
    for (acc, row) in acc.iter_mut().zip(rows) {
        sixteens!(HD, |i, part| *acc = load::<L>(row, i, part).fma(load(q, i, part), *acc));
    }
    L::sums(&acc)
}

/// Adds `weight * row` to `o` for each weight in turn.
#[inline(always)]
unsafe fn add_weighted<L: Lanes, const HD: usize>(
    weights: &[f32],
    rows: &[[f32; HD]; ROWS],
    o: &mut [f32; HD],
) {
    sixteens!(HD, |i, part| {
        let mut sum: L = load(o, i, part);
        for (w, row) in weights.iter().zip(rows) {
            sum = L::splat(*w).fma(load(row, i, part), sum);
        }
        store(sum, o, i, part);
    });
}

/// Widens the rows `slots` to floats. If they are fewer than sixteen, unspecified rows follow.
#[inline(always)]
unsafe fn widen_rows<'a, L: Lanes, const HD: usize>(
    kind: KvType,
    bytes: &'a [u8],
    slots: Range<usize>,
    rows: &'a mut [[f32; HD]; ROWS],
) -> &'a [[f32; HD]; ROWS] {
    let row_bytes = kind.row_bytes(HD);
    if kind == KvType::F32 && slots.len() == ROWS {
        let floats =
            bytes[slots.start * row_bytes..][..ROWS * row_bytes].as_ptr().cast::<[[f32; HD]; ROWS]>();
        if floats.is_aligned() {
            return &*floats;
        }
    }
    for (row, slot) in rows.iter_mut().zip(slots) {
        decode_row::<L, HD>(kind, &bytes[slot * row_bytes..][..row_bytes], row);
    }
    rows
}

/// Adds the weighted rows of `v` to the sums of the queries that see them.
#[inline(always)]
unsafe fn weighted_sum<L: Lanes, const HD: usize>(
    kind: KvType,
    v: &[u8],
    (scores, visible): (&[[f32; CHUNK]], &[usize]),
    out: &mut [Partial<HD>],
    ahead: Prefetch,
) {
    let slots = visible.iter().copied().max().unwrap_or(0);
    let Aligned(rows) = &mut Aligned([[0.0f32; HD]; ROWS]);
    for first in (0..slots).step_by(ROWS) {
        ahead.prefetch_rows(first, ROWS);
        let rows = widen_rows::<L, HD>(kind, v, first..slots.min(first + ROWS), rows);
        if const { !HD.is_multiple_of(16) } {
            for ((scores, out), &seen) in scores.iter().zip(out.iter_mut()).zip(visible) {
                let n = seen.saturating_sub(first).min(ROWS);
                add_weighted::<L, HD>(&scores[first..][..n], rows, &mut out.o);
            }
        } else if const { L::WIDE } {
            blocks::weighted_sum::<L, HD, 4, 4>(rows, first, scores, visible, out);
        } else if const { L::BY_ELEMENT } {
            blocks::weighted_sum::<L, HD, 4, 1>(rows, first, scores, visible, out);
        } else {
            blocks::weighted_sum::<L, HD, 2, 2>(rows, first, scores, visible, out);
        }
    }
}

/// Replaces scores by `e^(score - max)`. Returns the maximum and the sum.
#[inline(always)]
unsafe fn exp_scores<L: Lanes>(scores: &mut [f32]) -> (f32, f32) {
    if scores.is_empty() {
        return (f32::NEG_INFINITY, 0.0);
    }
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

/// Merges the next chunk's partial into `state`.
pub fn merge_partial<const HD: usize>(isa: Isa, state: &mut Partial<HD>, part: &Partial<HD>) {
    #[inline(always)]
    unsafe fn body<L: Lanes, const HD: usize>(state: &mut Partial<HD>, part: &Partial<HD>) {
        let m = if part.m > state.m { part.m } else { state.m };
        let mut weights = [0.0f32; 16];
        (weights[0], weights[1]) = (state.m - m, part.m - m);
        exp_lanes(L::load(weights.as_ptr())).store(weights.as_mut_ptr());
        let (old, new) = (weights[0], weights[1]);
        (state.m, state.l) = (m, part.l.mul_add(new, state.l * old));
        sixteens!(HD, |i, run| {
            let o = load::<L>(&state.o, i, run).mul(L::splat(old));
            store(load::<L>(&part.o, i, run).fma(L::splat(new), o), &mut state.o, i, run);
        });
    }
    if part.l > 0.0 {
        dispatch!(isa, body::<L, HD: usize>(state: &mut Partial<HD>, part: &Partial<HD>))
    }
}
