//! The few queries of one token: rows are widened straight into registers, where all queries use them.
//! Storing widened rows, which pays for many queries, takes half as long as the products of four.
//!
//! For lanes with enough registers ([`Lanes::WIDE`]) and heads of whole runs of 64.

#![allow(clippy::needless_range_loop, reason = "unrolled over several arrays at once")]

use super::{Ahead, CHUNK, Partial, ROWS};
use crate::cpu::simd::kv_row::widen32;
use crate::cpu::simd::lanes::Lanes;
use crate::kv::KvType;

/// Runs `$f::<.., KIND, Q>` for the storage type and the number of queries.
macro_rules! for_kind {
    ($kind:expr, $f:ident::<$l:ident, $hd:ident, $q:literal>($($arg:expr),*)) => {
        match $kind {
            KvType::F32 => $f::<$l, $hd, $q, { KvType::F32 as u8 }>($($arg),*),
            KvType::F16 => $f::<$l, $hd, $q, { KvType::F16 as u8 }>($($arg),*),
            KvType::Q8 => $f::<$l, $hd, $q, { KvType::Q8 as u8 }>($($arg),*),
            KvType::Q4 => $f::<$l, $hd, $q, { KvType::Q4 as u8 }>($($arg),*),
        }
    };
}

/// `o = sum of weight * row` over the first `slots` rows at `rows`, for each query.
///
/// # Safety
///
/// `rows` holds `slots` rows of `kind`, `slots <= CHUNK`, `HD % 64 == 0`, as many scores as outputs;
/// lanes as the caller's.
#[inline(always)]
pub(super) unsafe fn weigh<L: Lanes, const HD: usize>(
    kind: KvType,
    (rows, slots): (&[u8], usize),
    scores: &[[f32; CHUNK]],
    out: &mut [Partial<HD>],
    ahead: Ahead,
) {
    let rows = rows.as_ptr();
    let (fours, rest) = out.as_chunks_mut::<4>();
    let (four_scores, rest_scores) = scores.as_chunks::<4>();
    // SAFETY: as above.
    unsafe {
        let mut ahead = ahead;
        for (out, scores) in fours.iter_mut().zip(four_scores) {
            for_kind!(kind, weighted::<L, HD, 4>((rows, slots), scores, out, ahead));
            ahead = Ahead::NOTHING;
        }
        let (twos, ones) = rest.as_chunks_mut::<2>();
        let (two_scores, one_scores) = rest_scores.as_chunks::<2>();
        for (out, scores) in twos.iter_mut().zip(two_scores) {
            for_kind!(kind, weighted::<L, HD, 2>((rows, slots), scores, out, ahead));
            ahead = Ahead::NOTHING;
        }
        for (out, scores) in ones.as_chunks_mut::<1>().0.iter_mut().zip(one_scores.as_chunks::<1>().0) {
            for_kind!(kind, weighted::<L, HD, 1>((rows, slots), scores, out, ahead));
            ahead = Ahead::NOTHING;
        }
    }
}

#[inline(always)]
unsafe fn weighted<L: Lanes, const HD: usize, const Q: usize, const KIND: u8>(
    (rows, slots): (*const u8, usize),
    scores: &[[f32; CHUNK]; Q],
    out: &mut [Partial<HD>; Q],
    ahead: Ahead,
) {
    let kind = KvType::ALL[KIND as usize];
    let row_bytes = kind.row_bytes(HD);
    // SAFETY: as `weigh`.
    unsafe {
        for at in (0..HD).step_by(64) {
            let mut acc = [[L::splat(0.0); 4]; Q];
            let panel = rows.add(at / 32 * kind.block_bytes(32));
            for slot in 0..slots {
                if at == 0 && slot % ROWS == 0 {
                    ahead.fetch(slot);
                }
                let p = panel.add(slot * row_bytes);
                let (a, b) = widen32::<L, KIND>(p);
                let (c, d) = widen32::<L, KIND>(p.add(kind.block_bytes(32)));
                let row = [a, b, c, d];
                for q in 0..Q {
                    let w = L::splat(scores[q][slot]);
                    for i in 0..4 {
                        acc[q][i] = w.fma(row[i], acc[q][i]);
                    }
                }
            }
            for q in 0..Q {
                for i in 0..4 {
                    acc[q][i].store(out[q].o[at + 16 * i..].as_mut_ptr());
                }
            }
        }
    }
}
