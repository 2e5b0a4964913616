//! Encodes and decodes one head's key or value row in its storage type.

use super::lanes::Lanes;
use super::ops::{load, load_dtype, sixteens, store};
use super::{Isa, dispatch};
use crate::kv::KvType;
use files::blocks::Dtype;
use half::f16;

/// Encodes `x` (one head) to `row`, which has `KvType::row_bytes(x.len())` bytes.
pub fn encode_row(isa: Isa, kind: KvType, x: &[f32], row: &mut [u8]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(kind: KvType, x: &[f32], row: &mut [u8]) {
        let block = KvType::block_len(x.len());
        let bytes = kind.block_bytes(block);
        for (x, out) in x.chunks_exact(block).zip(row.chunks_exact_mut(bytes)) {
            match kind {
                KvType::F32 => {
                    out.as_chunks_mut().0.iter_mut().zip(x).for_each(|(o, x)| *o = x.to_le_bytes());
                }
                KvType::F16 => sixteens!(block, |i, part| {
                    let mut half = [0u8; 32];
                    load::<L>(x, i, part).store_f16(half.as_mut_ptr());
                    let n = part.unwrap_or(16);
                    out[2 * i..][..2 * n].copy_from_slice(&half[..2 * n]);
                }),
                KvType::Q8 => encode_symmetric::<L>(127.0, x, out, |i, q, quants| quants[i] = q as u8),
                KvType::Q6 | KvType::Q5 => {
                    let high = kind.high_bits();
                    out.fill(0);
                    let limit = (8 << high) - 1;
                    encode_symmetric::<L>(limit as f32, x, out, |i, q, quants| {
                        pack_bits(high, (i, x.len()), (i32::from(q) + limit + 1) as u8, quants)
                    });
                }
                KvType::Q4 => encode_q4::<L>(x, out),
            }
        }
    }
    assert_eq!(row.len(), kind.row_bytes(x.len()));
    dispatch!(isa, body::<L>(kind: KvType, x: &[f32], row: &mut [u8]))
}

/// Decodes a stored row of `HD` elements, changes it by `by`, and stores it again.
pub fn update_row<const HD: usize>(isa: Isa, kind: KvType, row: &mut [u8], by: impl FnOnce(&mut [f32; HD])) {
    #[inline(always)]
    unsafe fn body<L: Lanes, const HD: usize>(kind: KvType, row: &mut [u8], x: &mut [f32; HD]) {
        decode_row::<L, HD>(kind, row, x)
    }
    assert_eq!(row.len(), kind.row_bytes(HD));
    let x = &mut [0.0; HD];
    dispatch!(isa, body::<L, HD: usize>(kind: KvType, row: &mut [u8], x: &mut [f32; HD]));
    by(x);
    encode_row(isa, kind, x, row);
}

/// Encodes a row that may have been decoded from this type. If so, the result is that row again (for q4, a row with the
/// same values), unless its scale is so small that it loses bits. The q4 encoder alone does not guarantee this: it
/// tries no scale with which the largest value becomes 7, though it clips 8 to 7.
pub fn reencode_row(isa: Isa, kind: KvType, x: &[f32], row: &mut [u8]) {
    encode_row(isa, kind, x, row);
    if kind == KvType::Q4 {
        let block = KvType::block_len(x.len());
        for (x, out) in x.chunks_exact(block).zip(row.chunks_exact_mut(kind.block_bytes(block))) {
            restore_q4(x, out);
        }
    }
}

/// Maximum distance, in steps, of a value from a stored one. The transformations of keys round a little; 32 unrelated
/// values are not all this close.
const TOLERANCE: f32 = 1.0 / 32.0;

/// Restores the block from which `x` was decoded, if there is one.
fn restore_q4(x: &[f32], out: &mut [u8]) {
    let largest = x.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    for most in [-8.0, 7.0, -7.0] {
        let quantised = |d: f32| move |x: &f32| (x / d).round_ties_even().clamp(-8.0, 7.0);
        let sums = x.iter().map(|v| (v, quantised(largest / most)(v)));
        let (xq, qq) = sums.fold((0.0, 0.0), |(xq, qq), (x, q)| (xq + x * q, qq + q * q));
        let (stored, _) = store_scale(xq / qq);
        let d = stored.to_f32();
        let q: Vec<f32> = x.iter().map(quantised(d)).collect();
        if d != 0.0 && x.iter().zip(&q).all(|(x, q)| (x - q * d).abs() <= TOLERANCE * d.abs()) {
            let (scale, bytes) = out.split_at_mut(2);
            scale.copy_from_slice(&stored.to_le_bytes());
            let (low, high) = q.split_at(q.len() / 2);
            for (byte, (low, high)) in bytes.iter_mut().zip(low.iter().zip(high)) {
                *byte = (low + 8.0) as u8 | ((high + 8.0) as u8) << 4;
            }
            return;
        }
    }
}

/// Returns the largest magnitude in `x`.
#[inline(always)]
unsafe fn max_abs<L: Lanes>(x: &[f32]) -> f32 {
    let mut max = L::splat(0.0);
    sixteens!(x.len(), |i, part| max = max.max(load::<L>(x, i, part).abs()));
    max.largest()
}

/// Rounds a scale to its stored form (finite f16). Returns it and its inverse, which is 0 if the scale is 0.
fn store_scale(d: f32) -> (f16, f32) {
    let d = f16::from_f32(d.clamp(-65504.0, 65504.0));
    let f = d.to_f32();
    (d, if f == 0.0 { 0.0 } else { 1.0 / f })
}

/// Encodes a block of q8, q6 or q5: `d = max|x| / limit`, `q = round_ties_even(x / d)`. `put(i, q, quants)` stores an
/// integer. More bits gain nothing from trying several scales, as [`encode_q4`] does.
#[inline(always)]
unsafe fn encode_symmetric<L: Lanes>(
    limit: f32,
    x: &[f32],
    out: &mut [u8],
    put: impl Fn(usize, i8, &mut [u8]),
) {
    let (scale, quants) = out.split_at_mut(2);
    let (d, id) = store_scale(max_abs::<L>(x) / limit);
    scale.copy_from_slice(&d.to_le_bytes());
    sixteens!(x.len(), |i, part| {
        let q = load::<L>(x, i, part).mul(L::splat(id)).round();
        let mut bytes = [0i8; 16];
        q.max(L::splat(-limit)).min(L::splat(limit)).store_i8(bytes.as_mut_ptr());
        bytes[..part.unwrap_or(16)].iter().enumerate().for_each(|(j, &q)| put(i + j, q, quants));
    });
}

/// Adds integer `i` of a block of `len` to its zeroed integers: the low four bits as in q4, then `high` bits of each in
/// `len * high / 8` bytes, of which byte `z` has, from its lowest bits on, those of the integers `z`, `z` + that many
/// bytes, and so on.
#[inline(always)]
fn pack_bits(high: usize, (i, len): (usize, usize), q: u8, quants: &mut [u8]) {
    let (nibbles, highs) = quants.split_at_mut(len / 2);
    nibbles[i % (len / 2)] |= (q & 15) << (4 * (i / (len / 2)));
    highs[i % highs.len()] |= (q >> 4) << (high * (i / highs.len()));
}

/// Unpacks what [`pack_bits`] packed, as signed bytes.
#[inline(always)]
fn unpack_bits(high: usize, quants: &[u8], out: &mut [u8]) {
    let (nibbles, highs) = quants.split_at(out.len() / 2);
    let (low, upper) = out.split_at_mut(out.len() / 2);
    for ((low, upper), byte) in low.iter_mut().zip(upper).zip(nibbles) {
        (*low, *upper) = (byte & 15, byte >> 4);
    }
    for (i, part) in out.chunks_mut(highs.len()).enumerate() {
        for (q, bits) in part.iter_mut().zip(highs) {
            *q = (*q | (bits >> (high * i) & ((1 << high) - 1)) << 4).wrapping_sub(8 << high);
        }
    }
}

/// Scales that the q4 encoder tries, as divisors of the largest value. The one with the smallest squared error is kept
/// and then fitted to the rounded values ([`fit_scale`]). The values of a rotated block are close to normally
/// distributed, so clipping the tail a little costs less than coarser steps that reach it.
///
/// KL divergence from an f32 cache in nats, SmolLM2-135M, 3 x 512 tokens, keys minus their means: these nine 0.0364,
/// not fitted 0.0406; sixteen from 7 to 10.5, fitted, 0.0380; nine from 7 to 9, not fitted, 0.0411.
const Q4_DIVISORS: [f32; 16] =
    [8.0, -8.0, 7.5, -8.5, 8.5, -9.0, 9.0, -9.5, 9.5, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0];
/// Number of divisors that are tried; the rest fill the lanes.
const CANDIDATES: usize = 9;

/// Computes `round_ties_even(x * id)` in [-8, 7].
#[inline(always)]
unsafe fn round_to_q4<L: Lanes>(x: L, id: f32) -> L {
    x.mul(L::splat(id)).round().max(L::splat(-8.0)).min(L::splat(7.0))
}

/// Encodes a block of q4: `q = round_ties_even(x / d)` in [-8, 7], stored as `q + 8`; element `i` in the low nibble of
/// byte `i`, element `i + half` in the high one.
#[inline(always)]
unsafe fn encode_q4<L: Lanes>(x: &[f32], out: &mut [u8]) {
    let (mut above, mut below) = (L::splat(0.0), L::splat(0.0));
    sixteens!(x.len(), |i, part| {
        let x: L = load(x, i, part);
        (above, below) = (above.max(x), below.max(L::splat(0.0).sub(x)));
    });
    // The largest value with its sign; the negative one of two equal ones, because -8 reaches further than 7.
    let (above, below) = (above.largest(), below.largest());
    let signed = if above > below { above } else { -below };
    // All candidate scales at once, rounded to their stored form.
    let mut stored = [0u8; 32];
    let limit = L::splat(65504.0);
    let d = L::splat(-signed).div(L::load(Q4_DIVISORS.as_ptr()));
    d.max(L::splat(-65504.0)).min(limit).store_f16(stored.as_mut_ptr());
    let d = L::load_f16(stored.as_ptr());
    let id = L::splat(1.0).div(d).where_ge(d.abs(), L::splat(f32::MIN_POSITIVE));
    let (mut ds, mut ids) = ([0.0f32; 16], [0.0f32; 16]);
    d.store(ds.as_mut_ptr());
    id.store(ids.as_mut_ptr());
    // The squared errors of all candidates.
    let mut errors = [L::splat(0.0); 16];
    sixteens!(x.len(), |i, part| {
        let x: L = load(x, i, part);
        for c in 0..CANDIDATES {
            let miss = round_to_q4(x, ids[c]).mul(L::splat(ds[c])).sub(x);
            errors[c] = miss.fma(miss, errors[c]);
        }
    });
    let mut totals = [0.0f32; 16];
    L::sums(&errors).store(totals.as_mut_ptr());
    let (mut best, mut least) = (0, f32::INFINITY);
    for (c, &error) in totals.iter().enumerate().take(CANDIDATES) {
        if error < least {
            (best, least) = (c, error);
        }
    }
    let id = ids[best];
    out[..2].copy_from_slice(&fit_scale::<L>(x, ds[best], id).to_le_bytes());
    let half = x.len() / 2;
    let (low, high) = x.split_at(half);
    sixteens!(half, |i, part| {
        let low: L = round_to_q4(load(low, i, part), id);
        let high: L = round_to_q4(load(high, i, part), id);
        // `low + 8 + 16 * high` is a signed byte, 128 less than the stored one.
        let mut bytes = [0i8; 16];
        high.fma(L::splat(16.0), low.add(L::splat(8.0))).store_i8(bytes.as_mut_ptr());
        let bytes = bytes.map(|b| b as u8 ^ 0x80);
        let n = part.unwrap_or(16);
        out[2 + i..][..n].copy_from_slice(&bytes[..n]);
    });
}

/// Computes the stored scale with which `q = round_ties_even(x * id)` is closest to `x`: `sum(x q) / sum(q q)`, or `d`
/// if all `q` are zero.
#[inline(always)]
unsafe fn fit_scale<L: Lanes>(x: &[f32], d: f32, id: f32) -> f16 {
    let (mut xq, mut qq) = (L::splat(0.0), L::splat(0.0));
    sixteens!(x.len(), |i, part| {
        let x: L = load(x, i, part);
        let q = round_to_q4(x, id);
        (xq, qq) = (x.fma(q, xq), q.fma(q, qq));
    });
    let qq = qq.sum();
    store_scale(if qq > 0.0 { xq.sum() / qq } else { d }).0
}

/// Decodes one head's row to f32. `row` has `kind.row_bytes(HD)` bytes.
#[inline(always)]
pub(super) unsafe fn decode_row<L: Lanes, const HD: usize>(kind: KvType, row: &[u8], out: &mut [f32; HD]) {
    let block = KvType::block_len(HD);
    let bytes = kind.block_bytes(block);
    match kind {
        KvType::F32 => {
            sixteens!(HD, |i, part| store(load_dtype::<L>(row, Dtype::F32, i, part), out, i, part))
        }
        KvType::F16 => {
            sixteens!(HD, |i, part| store(load_dtype::<L>(row, Dtype::F16, i, part), out, i, part))
        }
        KvType::Q8 => {
            for b in 0..HD / block {
                let p = &row[b * bytes..][..bytes];
                let d = L::splat_f16(p.as_ptr());
                sixteens!(block, |i, part| {
                    let mut copy = [0u8; 16];
                    let q = match part {
                        None => L::load_i8(p.as_ptr().add(2 + i)),
                        Some(n) => {
                            copy[..n].copy_from_slice(&p[2 + i..][..n]);
                            L::load_i8(copy.as_ptr())
                        }
                    };
                    store(q.mul(d), out, b * block + i, part);
                });
            }
        }
        KvType::Q6 | KvType::Q5 => decode_packed::<L, HD>(kind, row, out),
        KvType::Q4 => {
            let half = block / 2;
            for b in 0..HD / block {
                let p = &row[b * bytes..][..bytes];
                let d = L::splat_f16(p.as_ptr());
                sixteens!(half, |i, part| {
                    let mut copy = [0u8; 16];
                    let (low, high) = match part {
                        None => L::load_q4(p.as_ptr().add(2 + i), d),
                        Some(n) => {
                            copy[..n].copy_from_slice(&p[2 + i..][..n]);
                            L::load_q4(copy.as_ptr(), d)
                        }
                    };
                    store(low, out, b * block + i, part);
                    store(high, out, b * block + half + i, part);
                });
            }
        }
    }
}

/// Decodes a row of q6 or q5.
#[inline(always)]
unsafe fn decode_packed<L: Lanes, const HD: usize>(kind: KvType, row: &[u8], out: &mut [f32; HD]) {
    let block = KvType::block_len(HD);
    for (b, p) in row.chunks_exact(kind.block_bytes(block)).enumerate() {
        let (mut q, d) = ([0u8; HD], L::splat_f16(p.as_ptr()));
        unpack_bits(kind.high_bits(), &p[2..], &mut q[..block]);
        sixteens!(block, |i, part| {
            let (mut copy, n) = ([0u8; 16], part.unwrap_or(16));
            copy[..n].copy_from_slice(&q[i..][..n]);
            store(L::load_i8(copy.as_ptr()).mul(d), out, b * block + i, part);
        });
    }
}

/// Widens the 32 elements of the block at `p`, of type `KvType::ALL[KIND]`. `d` is its scale, if the type has one.
#[inline(always)]
pub(super) unsafe fn widen32<L: Lanes, const KIND: u8>(p: *const u8, d: L) -> (L, L) {
    match KvType::ALL[KIND as usize] {
        KvType::F32 => (L::load(p.cast()), L::load(p.cast::<f32>().add(16))),
        KvType::F16 => (L::load_f16(p), L::load_f16(p.add(32))),
        KvType::Q8 => (L::load_i8(p.add(2)).mul(d), L::load_i8(p.add(18)).mul(d)),
        kind @ (KvType::Q6 | KvType::Q5) => {
            let mut q = [0u8; 32];
            let quants = std::slice::from_raw_parts(p.add(2), kind.block_bytes(32) - 2);
            unpack_bits(kind.high_bits(), quants, &mut q);
            (L::load_i8(q.as_ptr()).mul(d), L::load_i8(q.as_ptr().add(16)).mul(d))
        }
        KvType::Q4 => L::load_q4(p.add(2), d),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decoded rows of many magnitudes, and the rows that `stores` makes of them.
    fn widened_rows(kind: KvType, stores: impl Fn(&[f32; 32], &mut [u8])) -> Vec<([f32; 32], Vec<u8>)> {
        let mut state = 7u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as f32 / 2_147_483_648.0 - 1.0
        };
        let row = |i: i32| {
            let size = 2f32.powi(i % 20 - 9);
            let x: [f32; 32] = std::array::from_fn(|_| size * (random() + random() + random()));
            let mut row = vec![0; kind.row_bytes(32)];
            encode_row(Isa::Scalar, kind, &x, &mut row);
            let mut wide = [0.0; 32];
            update_row(Isa::Scalar, kind, &mut row.clone(), |x| wide = *x);
            stores(&wide, &mut row);
            (wide, row)
        };
        (0..4000).map(row).collect()
    }

    #[test]
    fn encoding_a_decoded_row_again_gives_the_same_values() {
        for kind in KvType::ALL {
            // Keys come back with rounding errors of other arithmetic.
            for noise in [0.0, 1e-6] {
                let noise = if kind.is_rotated() { noise } else { 0.0 };
                let again = widened_rows(kind, |x, row| {
                    let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    let mut sign = noise;
                    let near = x.map(|x| {
                        sign = -sign;
                        x + sign * most
                    });
                    reencode_row(Isa::Scalar, kind, &near, row);
                });
                for (before, mut row) in again {
                    update_row(Isa::Scalar, kind, &mut row, |after| {
                        assert!(*after == before, "{}", kind.name())
                    });
                }
            }
        }
        // `encode_row` alone does not give the same values.
        let encoded = widened_rows(KvType::Q4, |x, row| encode_row(Isa::Scalar, KvType::Q4, x, row));
        let others = encoded.into_iter().filter(|(before, row)| {
            let mut other = false;
            update_row(Isa::Scalar, KvType::Q4, &mut row.clone(), |after| other = after != before);
            other
        });
        let others = others.count();
        assert!(others > 100, "{others}");
    }

    #[test]
    fn encode_again_equals_encode_for_other_values() {
        let x: [f32; 32] = std::array::from_fn(|i| (i * 37 % 101) as f32 - 47.3);
        for kind in KvType::ALL {
            let (mut a, mut b) = (vec![0; kind.row_bytes(32)], vec![0; kind.row_bytes(32)]);
            encode_row(Isa::Scalar, kind, &x, &mut a);
            reencode_row(Isa::Scalar, kind, &x, &mut b);
            assert_eq!(a, b);
        }
    }

    fn widened(isa: Isa, bits: u16) -> u32 {
        #[inline(always)]
        unsafe fn body<L: Lanes>(bits: u16) -> u32 {
            let mut x = [0.0f32; 16];
            L::splat_f16(bits.to_le_bytes().as_ptr()).store(x.as_mut_ptr());
            assert!(x.iter().all(|y| y.to_bits() == x[0].to_bits()));
            x[0].to_bits()
        }
        dispatch!(isa, body::<L>(bits: u16) -> u32)
    }

    #[test]
    fn every_finite_scale_widens_exactly() {
        for (isa, bits) in Isa::available().into_iter().flat_map(|i| (0..=u16::MAX).map(move |b| (i, b))) {
            let h = f16::from_bits(bits);
            if h.is_finite() {
                assert_eq!(widened(isa, bits), h.to_f32().to_bits(), "{bits:04x} on {}", isa.name());
            }
        }
    }
}
