//! Attention: all sets give the scalar bits, which are those of its definition.

use super::{bits, same_bits};
use crate::support::random::Random;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::attend::{CHUNK, FULL_ATTENTION, KvChunk, Partial, attend, merge_partial};
use numeric::simd::{Isa, kv_row, ops};

fn heads<const HD: usize>(r: &mut Random, slots: usize, types: KvTypes) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (kb, vb) = (types.k.row_bytes(HD), types.v.row_bytes(HD));
    let (mut k, mut v) = (vec![0; slots * kb], vec![0; slots * vb]);
    let values = r.unevens(2 * slots * HD);
    for s in 0..slots {
        let (a, b) = values[2 * s * HD..][..2 * HD].split_at(HD);
        kv_row::encode_row(Isa::Scalar, types.k, a, &mut k[s * kb..][..kb]);
        kv_row::encode_row(Isa::Scalar, types.v, b, &mut v[s * vb..][..vb]);
    }
    (k, v, values)
}

fn attention<const HD: usize>(types: KvTypes, window: usize, tolerance: f64) {
    let mut r = Random(HD as u64);
    let slots = 2 * CHUNK + 19;
    let (k, v, values) = heads::<HD>(&mut r, slots, types);
    let queries: Vec<[f32; HD]> =
        (0..5).map(|_| std::array::from_fn(|_| r.uneven() / (HD as f32).sqrt())).collect();
    let seen = [slots, slots - 1, CHUNK, 3, 1];
    let out = same_bits("attention", |isa| {
        let mut states = [Partial::<HD>::EMPTY; 5];
        for chunk in 0..3 {
            let kv = KvChunk {
                k: &k[chunk * CHUNK * types.k.row_bytes(HD)..],
                v: &v[chunk * CHUNK * types.v.row_bytes(HD)..],
                types,
                window,
            };
            let visible = seen.map(|n| n.saturating_sub(chunk * CHUNK));
            let mut parts = [Partial::EMPTY; 5];
            attend::<HD>(isa, kv, &queries, &visible, &mut parts);
            states.iter_mut().zip(&parts).for_each(|(s, p)| merge_partial(isa, s, p));
        }
        states.iter().flat_map(|s| s.o.map(|o| o / s.l)).collect()
    });
    for ((q, &n), out) in queries.iter().zip(&seen).zip(out.chunks(HD)) {
        let dot = |s: usize| -> f64 {
            q.iter().zip(&values[2 * s * HD..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let shown = n.saturating_sub(window)..n;
        let most = shown.clone().map(dot).fold(f64::MIN, f64::max);
        let weights: Vec<f64> = shown.clone().map(|s| libm::exp(dot(s) - most)).collect();
        let total: f64 = weights.iter().sum();
        for (d, &o) in out.iter().enumerate() {
            let want: f64 = shown
                .clone()
                .zip(&weights)
                .map(|(s, w)| w / total * f64::from(values[(2 * s + 1) * HD + d]))
                .sum();
            assert!((f64::from(o) - want).abs() < tolerance, "{types} head {HD} seen {n}: {o} {want}");
        }
    }
}

#[test]
fn attention_has_the_scalar_bits_for_every_kv_type_and_odd_head() {
    attention::<64>(KvTypes::same(KvType::F32), FULL_ATTENTION, 2e-4);
    attention::<12>(KvTypes::same(KvType::F32), FULL_ATTENTION, 2e-4);
    attention::<48>(KvTypes::same(KvType::F16), FULL_ATTENTION, 0.2);
    // Quantised rows are held to the scalar bits here; how good they are is measured as perplexity.
    for (k, v) in [(KvType::Q8, KvType::Q4), (KvType::Q4, KvType::Q8)] {
        attention::<64>(KvTypes { k, v }, FULL_ATTENTION, f64::INFINITY);
        attention::<12>(KvTypes { k, v }, FULL_ATTENTION, f64::INFINITY);
        attention::<80>(KvTypes { k, v }, FULL_ATTENTION, f64::INFINITY);
    }
}

/// Windows that end within a chunk, at its end, and reach over two of them.
#[test]
fn attention_with_a_window_sees_what_the_window_shows() {
    for window in [1, 2, 20, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK] {
        attention::<64>(KvTypes::same(KvType::F32), window, 2e-4);
        attention::<12>(KvTypes::same(KvType::F32), window, 2e-4);
    }
}

/// Definition of `attend` for one query: sixteen lanes of fma, their tree, ascending slots.
fn defined<const HD: usize>(q: &[f32; HD], rows: &[(Vec<f32>, Vec<f32>)]) -> Vec<f32> {
    let tree = |mut lanes: [f32; 16]| {
        for n in [8, 4, 2, 1] {
            (0..n).for_each(|j| lanes[j] += lanes[j + n]);
        }
        lanes[0]
    };
    let mut weights: Vec<f32> = rows
        .iter()
        .map(|(k, _)| {
            let mut lanes = [0.0f32; 16];
            (0..HD).for_each(|i| lanes[i % 16] = k[i].mul_add(q[i], lanes[i % 16]));
            tree(lanes)
        })
        .collect();
    let m = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    weights.iter_mut().for_each(|w| *w -= m);
    ops::exp_in_place(Isa::Scalar, &mut weights);
    let mut sums = [0.0f32; 16];
    weights.iter().enumerate().for_each(|(i, w)| sums[i % 16] += w);
    let mut out = vec![0.0f32; HD];
    for (w, (_, v)) in weights.iter().zip(rows) {
        out.iter_mut().zip(v).for_each(|(o, v)| *o = w.mul_add(*v, *o));
    }
    out.extend([m, tree(sums)]);
    out
}

fn blocks_of_queries<const HD: usize>(kind: KvType) {
    let mut r = Random(70 + HD as u64);
    let types = KvTypes::same(kind);
    let (k, v, _) = heads::<HD>(&mut r, CHUNK, types);
    let row_bytes = kind.row_bytes(HD);
    let rows: Vec<(Vec<f32>, Vec<f32>)> = k
        .chunks(row_bytes)
        .zip(v.chunks(row_bytes))
        .map(|(k, v)| (decoded(kind, k, HD), decoded(kind, v, HD)))
        .collect();
    for count in [1, 2, 3, 4, 7, 8, 9, 11, 16, 23] {
        let mut queries: Vec<[f32; HD]> = (0..count).map(|_| std::array::from_fn(|_| r.uneven())).collect();
        if count > 9 {
            // Its scores are zeros of both signs.
            queries[count / 2] = [-0.0; HD];
        }
        for alike in [true, false] {
            let seen = |i: usize| if alike { 77 } else { (40 + 13 * i) % (CHUNK + 1) };
            let visible: Vec<usize> = (0..count).map(seen).collect();
            let want: Vec<f32> =
                queries.iter().zip(&visible).flat_map(|(q, &n)| defined(q, &rows[..n])).collect();
            for isa in Isa::available() {
                let kv = KvChunk { k: &k, v: &v, types, window: FULL_ATTENTION };
                let mut out = vec![Partial::EMPTY; count];
                attend::<HD>(isa, kv, &queries, &visible, &mut out);
                // A largest score of zero may have either sign, on which nothing else depends.
                let all = |p: &Partial<HD>| p.o.into_iter().chain([p.m + 0.0, p.l]);
                let out: Vec<f32> = out.iter().flat_map(all).collect();
                assert_eq!(bits(&want), bits(&out), "{types} head {HD} x {count} on {}", isa.name());
            }
        }
    }
}

/// Widens a row by the formulas of its type.
fn decoded(kind: KvType, row: &[u8], width: usize) -> Vec<f32> {
    let half = |b: &[u8]| half::f16::from_le_bytes([b[0], b[1]]).to_f32();
    let block = KvType::block_len(width);
    row.chunks(kind.block_bytes(block))
        .flat_map(|b| -> Vec<f32> {
            match kind {
                KvType::F32 => b.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
                KvType::F16 => b.chunks(2).map(half).collect(),
                KvType::Q8 => b[2..].iter().map(|&q| f32::from(q as i8) * half(b)).collect(),
                // The high bits of integer `i`, from the lowest bit of the bytes on, are those of the integers that
                // are as many apart as there are bytes.
                KvType::Q6 | KvType::Q5 => {
                    let (bits, (low, high)) =
                        (if kind == KvType::Q6 { 2 } else { 1 }, b[2..].split_at(block / 2));
                    let integer = |i: usize| {
                        let low = low[i % (block / 2)] >> if i < block / 2 { 0 } else { 4 } & 15;
                        let high = high[i % high.len()] >> (i / high.len() * bits) & ((1 << bits) - 1);
                        f32::from(16 * high + low) - if kind == KvType::Q6 { 32.0 } else { 16.0 }
                    };
                    (0..block).map(|i| integer(i) * half(b)).collect()
                }
                KvType::Q4 => {
                    let low = b[2..].iter().map(|q| q & 15);
                    low.chain(b[2..].iter().map(|q| q >> 4)).map(|q| (f32::from(q) - 8.0) * half(b)).collect()
                }
            }
        })
        .collect()
}

#[test]
fn attention_is_what_it_is_defined_to_be_for_every_block_of_queries() {
    for kind in KvType::ALL {
        blocks_of_queries::<12>(kind);
        blocks_of_queries::<48>(kind);
        blocks_of_queries::<64>(kind);
        blocks_of_queries::<80>(kind);
        blocks_of_queries::<128>(kind);
    }
}
