//! Attention of the few queries of one token: rows are widened directly into registers and used by all queries. Storing
//! widened rows takes half as long as the products of four queries, so it pays only for many queries.
//!
//! For lanes with enough registers ([`Lanes::WIDE`]) and head sizes that are a multiple of 64.

#![allow(clippy::needless_range_loop, reason = "unrolled over several arrays at once")]

use super::{Aligned, CHUNK, Partial, Prefetch, ROWS};
use crate::kv::KvType;
use crate::simd::kv_row::widen32;
use crate::simd::lanes::Lanes;
use std::mem::MaybeUninit;

/// Runs `$f::<.., KIND, Q>` for the storage type and the number of queries.
macro_rules! for_kind {
    ($kind:expr, $f:ident::<$l:ident, $hd:ident, $q:literal>($($arg:expr),*)) => {
        match $kind {
            KvType::F32 => $f::<$l, $hd, $q, { KvType::F32 as u8 }>($($arg),*),
            KvType::F16 => $f::<$l, $hd, $q, { KvType::F16 as u8 }>($($arg),*),
            KvType::Q8 => $f::<$l, $hd, $q, { KvType::Q8 as u8 }>($($arg),*),
            KvType::Q6 => $f::<$l, $hd, $q, { KvType::Q6 as u8 }>($($arg),*),
            KvType::Q5 => $f::<$l, $hd, $q, { KvType::Q5 as u8 }>($($arg),*),
            KvType::Q4 => $f::<$l, $hd, $q, { KvType::Q4 as u8 }>($($arg),*),
        }
    };
}

/// Runs `$f` on two slices of one element per query, in batches of four, two and one. Only the first batch prefetches.
macro_rules! in_batches_of_4 {
    ($kind:expr, $f:ident::<$l:ident, $hd:ident>($rows:expr, $a:expr, $b:expr, $ahead:expr)) => {{
        let mut ahead = $ahead;
        let (fours_a, rest_a) = $a.as_chunks::<4>();
        let (fours_b, rest_b) = $b.as_chunks_mut::<4>();
        for (a, b) in fours_a.iter().zip(fours_b) {
            for_kind!($kind, $f::<$l, $hd, 4>($rows, a, b, ahead));
            ahead = Prefetch::NOTHING;
        }
        let (twos_a, ones_a) = rest_a.as_chunks::<2>();
        let (twos_b, ones_b) = rest_b.as_chunks_mut::<2>();
        for (a, b) in twos_a.iter().zip(twos_b) {
            for_kind!($kind, $f::<$l, $hd, 2>($rows, a, b, ahead));
            ahead = Prefetch::NOTHING;
        }
        for (a, b) in ones_a.as_chunks::<1>().0.iter().zip(ones_b.as_chunks_mut::<1>().0) {
            for_kind!($kind, $f::<$l, $hd, 1>($rows, a, b, ahead));
            ahead = Prefetch::NOTHING;
        }
    }};
}

/// Computes the dot products of the queries with the first `slots` rows at `rows`; later scores are unspecified.
///
/// # Safety
///
/// See [`weighted_sum`]; there are as many scores as queries.
#[inline(always)]
pub(super) unsafe fn score<L: Lanes, const HD: usize>(
    kind: KvType,
    (rows, slots): (&[u8], usize),
    queries: &[[f32; HD]],
    scores: &mut [[f32; CHUNK]],
    ahead: Prefetch,
) {
    if slots > 0 {
        let rows = CacheRows { first: rows.as_ptr(), slots };
        in_batches_of_4!(kind, score_batch::<L, HD>(rows, queries, scores, ahead))
    }
}

/// Computes `o`, the sum of `weight * row` over the first `slots` rows at `rows`, for each query.
///
/// # Safety
///
/// `rows` holds `slots` rows of `kind`, `slots <= CHUNK`, `HD % 64 == 0`, there are as many scores as outputs, and the
/// CPU has the set of `L`.
#[inline(always)]
pub(super) unsafe fn weighted_sum<L: Lanes, const HD: usize>(
    kind: KvType,
    (rows, slots): (&[u8], usize),
    scores: &[[f32; CHUNK]],
    out: &mut [Partial<HD>],
    ahead: Prefetch,
) {
    if slots > 0 {
        let rows = CacheRows { first: rows.as_ptr(), slots };
        in_batches_of_4!(kind, weighted_sum_batch::<L, HD>(rows, scores, out, ahead))
    }
}

/// The scales of sixteen rows, `[row][block]`.
///
/// Widening a single scale where it is used costs as much as the rest of its block. So scalar moves collect the scales
/// of the next rows while these rows are computed, and then sixteen are widened at a time. Tried collecting them
/// sixteen rows earlier, so that no load waits for the stores before it: no faster.
struct Scales<const HD: usize> {
    next: Aligned<[u16; HD]>,
    now: Aligned<[f32; HD]>,
}

impl<const HD: usize> Scales<HD> {
    /// Loads the scales of the first rows at `rows`, in blocks of `KIND`.
    #[inline(always)]
    unsafe fn load_first<L: Lanes, const KIND: u8>(rows: CacheRows, blocks: usize) -> Self {
        let mut scales = Self { next: Aligned([0; HD]), now: Aligned([0.0; HD]) };
        for r in 0..ROWS {
            scales.collect::<KIND>(r, rows.at::<HD, KIND>(r), blocks);
        }
        scales.advance::<L, KIND>(blocks);
        scales
    }

    /// Collects the scales of the first blocks at `p` as row `r` of the next sixteen.
    #[inline(always)]
    unsafe fn collect<const KIND: u8>(&mut self, r: usize, p: *const u8, blocks: usize) {
        let kind = KvType::ALL[KIND as usize];
        if kind.is_in_blocks() {
            for b in 0..blocks {
                let scale = p.add(b * kind.block_bytes(32)).cast::<u16>().read_unaligned();
                // Volatile: otherwise the compiler builds vectors lane by lane. In bounds: `blocks <= HD / 32`.
                self.next.0.as_mut_ptr().add(r * blocks + b).write_volatile(scale);
            }
        }
    }

    /// Advances to the next sixteen rows.
    #[inline(always)]
    unsafe fn advance<L: Lanes, const KIND: u8>(&mut self, blocks: usize) {
        if KvType::ALL[KIND as usize].is_in_blocks() {
            for i in (0..ROWS * blocks).step_by(16) {
                L::load_f16(self.next.0.as_ptr().add(i).cast()).store(self.now.0.as_mut_ptr().add(i));
            }
        }
    }
}

/// Rows of the KV cache, at least one.
#[derive(Clone, Copy)]
struct CacheRows {
    first: *const u8,
    slots: usize,
}

impl CacheRows {
    /// Pointer to row `slot`, or to the last row if there are fewer.
    #[inline(always)]
    fn at<const HD: usize, const KIND: u8>(self, slot: usize) -> *const u8 {
        self.first.wrapping_add(slot.min(self.slots - 1) * KvType::ALL[KIND as usize].row_bytes(HD))
    }
}

/// Widens 64 elements at `p`, two blocks with the scales at `scales`.
#[inline(always)]
unsafe fn widen64<L: Lanes, const KIND: u8>(p: *const u8, scales: *const f32) -> [L; 4] {
    let (a, b) = widen32::<L, KIND>(p, L::splat(*scales));
    let next = p.add(KvType::ALL[KIND as usize].block_bytes(32));
    let (c, d) = widen32::<L, KIND>(next, L::splat(*scales.add(1)));
    [a, b, c, d]
}

/// Multiplies the queries with two rows, `[query][row]`; the lanes of each product are not added up yet. Two rows at a
/// time halve the loads of queries.
#[inline(always)]
unsafe fn multiply_two_rows<L: Lanes, const HD: usize, const Q: usize, const KIND: u8>(
    rows: [*const u8; 2],
    scales: [*const f32; 2],
    queries: &[[f32; HD]; Q],
) -> [[L; 2]; Q] {
    let block_bytes = KvType::ALL[KIND as usize].block_bytes(32);
    let mut acc = [[L::splat(0.0); 2]; Q];
    for at in (0..HD).step_by(64) {
        let mut row = [[L::splat(0.0); 4]; 2];
        for i in 0..2 {
            row[i] = widen64::<L, KIND>(rows[i].add(at / 32 * block_bytes), scales[i].add(at / 32));
        }
        for q in 0..Q {
            for run in 0..4 {
                let x = L::load(queries[q][at + 16 * run..].as_ptr());
                for i in 0..2 {
                    acc[q][i] = row[i][run].fma(x, acc[q][i]);
                }
            }
        }
    }
    acc
}

/// Implements [`score`] for `Q` queries.
#[inline(always)]
unsafe fn score_batch<L: Lanes, const HD: usize, const Q: usize, const KIND: u8>(
    rows: CacheRows,
    queries: &[[f32; HD]; Q],
    scores: &mut [[f32; CHUNK]; Q],
    ahead: Prefetch,
) {
    const { assert!(Q <= 4) };
    let blocks = HD / 32;
    let mut scales = Scales::<HD>::load_first::<L, KIND>(rows, blocks);
    let mut products = MaybeUninit::<[[[L; ROWS]; Q]; 2]>::uninit();
    let products: *mut [[L; ROWS]; Q] = products.as_mut_ptr().cast();
    for first in (0..rows.slots).step_by(ROWS) {
        if !Prefetch::by_row::<HD, KIND>() {
            ahead.prefetch_rows(first, ROWS);
        }
        let (now, before) = (products.add(first / ROWS % 2), products.add((first / ROWS + 1) % 2));
        for quarter in 0..4 {
            for r in (4 * quarter..4 * quarter + 4).step_by(2) {
                if Prefetch::by_row::<HD, KIND>() {
                    ahead.prefetch_rows(first + r, 2);
                }
                let rows_at = |r: usize| [rows.at::<HD, KIND>(r), rows.at::<HD, KIND>(r + 1)];
                let next = rows_at(first + ROWS + r);
                scales.collect::<KIND>(r, next[0], blocks);
                scales.collect::<KIND>(r + 1, next[1], blocks);
                let of_row = scales.now.0.as_ptr().add(r * blocks);
                let acc = multiply_two_rows::<L, HD, Q, KIND>(
                    rows_at(first + r),
                    [of_row, of_row.add(blocks)],
                    queries,
                );
                for q in 0..Q {
                    (*now)[q][r] = acc[q][0];
                    (*now)[q][r + 1] = acc[q][1];
                }
            }
            // Adds up the previous sixteen rows here, so that shuffles overlap with products.
            if first > 0 && quarter < Q {
                L::sums(&(*before)[quarter]).store(scores[quarter][first - ROWS..].as_mut_ptr());
            }
        }
        scales.advance::<L, KIND>(blocks);
    }
    let last = (rows.slots - 1) / ROWS;
    for q in 0..Q {
        L::sums(&(*products.add(last % 2))[q]).store(scores[q][last * ROWS..].as_mut_ptr());
    }
}

/// Implements [`weighted_sum`] for `Q` queries.
#[inline(always)]
unsafe fn weighted_sum_batch<L: Lanes, const HD: usize, const Q: usize, const KIND: u8>(
    rows: CacheRows,
    scores: &[[f32; CHUNK]; Q],
    out: &mut [Partial<HD>; Q],
    ahead: Prefetch,
) {
    let block_bytes = KvType::ALL[KIND as usize].block_bytes(32);
    for at in (0..HD).step_by(64) {
        let panel = CacheRows { first: rows.first.add(at / 32 * block_bytes), ..rows };
        let mut scales = Scales::<HD>::load_first::<L, KIND>(panel, 2);
        let mut acc = [[L::splat(0.0); 4]; Q];
        for first in (0..rows.slots).step_by(ROWS) {
            if at == 0 && !Prefetch::by_row::<HD, KIND>() {
                ahead.prefetch_rows(first, ROWS);
            }
            for slot in first..rows.slots.min(first + ROWS) {
                if at == 0 && Prefetch::by_row::<HD, KIND>() {
                    ahead.prefetch_rows(slot, 1);
                }
                let r = slot - first;
                scales.collect::<KIND>(r, panel.at::<HD, KIND>(slot + ROWS), 2);
                let row = widen64::<L, KIND>(panel.at::<HD, KIND>(slot), scales.now.0.as_ptr().add(2 * r));
                for q in 0..Q {
                    let w = L::splat(scores[q][slot]);
                    for i in 0..4 {
                        acc[q][i] = w.fma(row[i], acc[q][i]);
                    }
                }
            }
            scales.advance::<L, KIND>(2);
        }
        for q in 0..Q {
            for i in 0..4 {
                acc[q][i].store(out[q].o[at + 16 * i..].as_mut_ptr());
            }
        }
    }
}
