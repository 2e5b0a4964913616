//! Every kernel of every instruction set against the scalar reference, bit for bit, on odd sizes; the
//! reference itself against plain formulas in f64.

mod attention;

use crate::support::random::Random;
use files::blocks::{BLOCK, BlockQ4};
use numeric::kv::{self, KvType};
use numeric::quant::activations::{ActBlock, ActTile};
use numeric::quant::format::{Format, put_block};
use numeric::simd::groups::Groups;
use numeric::simd::products::{interleave, multiply};
use numeric::simd::{Isa, kv_row, ops};
use std::io::Write;

fn others() -> Vec<Isa> {
    Isa::available().into_iter().filter(|&i| i != Isa::Scalar).collect()
}

/// Says which sets were covered, past the capture of output, and holds them against `EXPECTED_SETS` where
/// that is given: an emulated CPU must not silently lose one.
#[test]
fn no_instruction_set_goes_uncovered() {
    let sets: Vec<&str> = Isa::available().iter().map(|i| i.name()).collect();
    let sets = sets.join(" ");
    let cpu = std::env::var("QEMU_CPU").map_or(String::new(), |cpu| format!(" on {cpu}"));
    writeln!(std::io::stderr(), "\ninstruction sets covered{cpu}: {sets}").expect("a standard error");
    if let Ok(expected) = std::env::var("EXPECTED_SETS") {
        assert_eq!(sets, expected);
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

const SIZES: [usize; 12] = [1, 2, 6, 15, 16, 17, 31, 32, 48, 64, 100, 257];

/// Runs `op` for the scalar lanes and each other set and compares the bits of what it returns.
fn same_bits(what: &str, op: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let reference = op(Isa::Scalar);
    for isa in others() {
        assert_eq!(bits(&reference), bits(&op(isa)), "{what} on {}", isa.name());
    }
    reference
}

#[test]
fn exp_is_exact_to_two_ulp() {
    let mut x: Vec<f32> = (0..400_000).map(|i| -87.3 + i as f32 * (87.3 + 88.0) / 400_000.0).collect();
    x.extend([-0.0, 0.0, -87.3, 88.0, f32::MIN_POSITIVE, -1e-20]);
    let y = same_bits("exp", |isa| {
        let mut y = x.clone();
        ops::exp_in_place(isa, &mut y);
        y
    });
    for (&x, &y) in x.iter().zip(&y) {
        let exact = libm::exp(x as f64);
        let ulp = (exact as f32).next_up() as f64 - exact as f32 as f64;
        assert!((y as f64 - exact).abs() <= 2.0 * ulp, "exp({x}) = {y}, not {exact}");
    }
    let mut edge = [f32::NEG_INFINITY, -1e30, -87.4, 100.0];
    ops::exp_in_place(Isa::Scalar, &mut edge);
    assert_eq!(edge[..3], [0.0; 3]);
    assert!(edge[3].is_finite());
}

#[test]
fn gelu_and_layer_norm_have_the_scalar_bits() {
    let mut r = Random(2);
    for n in SIZES {
        let w = r.unevens(n);
        // Far beyond where GELU is x or 0, too.
        let x: Vec<f32> = r.unevens(n).iter().map(|x| 8.0 * x).collect();
        let gelus = same_bits("gelu", |isa| {
            let mut y = x.clone();
            ops::gelu(isa, &mut y);
            y
        });
        let products = same_bits("gelu_mul", |isa| {
            let mut y = x.clone();
            ops::gelu_mul(isa, &mut y, &w);
            y
        });
        for (i, (&x, &y)) in x.iter().zip(&gelus).enumerate() {
            let wide = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
            let want = 0.5 * wide * (1.0 + libm::tanh(inner));
            assert!((f64::from(y) - want).abs() <= 1e-6 * (1.0 + want.abs()), "gelu({x}): {y} {want}");
            assert_eq!(products[i], y * w[i]);
        }
        let wb: Vec<f32> = w.iter().chain(&x).copied().collect();
        let normed = same_bits("layer_norm", |isa| {
            let mut h = vec![0.0; n];
            ops::layer_norm(isa, &x, &wb, 1e-5, &mut h);
            h
        });
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
        let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n as f64;
        for (i, &y) in normed.iter().enumerate() {
            let want =
                (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt() * f64::from(w[i]) + f64::from(x[i]);
            assert!((f64::from(y) - want).abs() <= 1e-4 * (1.0 + want.abs()), "layer_norm: {y} {want}");
        }
    }
}

#[test]
fn norm_add_silu_and_rope_have_the_scalar_bits() {
    let mut r = Random(1);
    for n in SIZES {
        let (x, w) = (r.unevens(3 * n), r.unevens(n));
        let y = same_bits("norm", |isa| {
            let mut h = vec![0.0; 3 * n];
            ops::rms_norm(isa, &x, &w, 1e-5, &mut h);
            h
        });
        for (row, out) in x.chunks(n).zip(y.chunks(n)) {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n as f64;
            for ((&v, &w), &o) in row.iter().zip(&w).zip(out) {
                let want = f64::from(v) / (mean + 1e-5).sqrt() * f64::from(w);
                assert!((f64::from(o) - want).abs() <= 1e-5 * (1.0 + want.abs()), "norm {n}");
            }
        }
        same_bits("add", |isa| {
            let mut a = x[..n].to_vec();
            ops::add_in_place(isa, &mut a, &w);
            a
        });
        let y = same_bits("silu", |isa| {
            let mut gate = x[..n].to_vec();
            ops::silu_mul(isa, &mut gate, &w);
            gate
        });
        for ((&g, &u), &y) in x.iter().zip(&w).zip(&y) {
            let want = f64::from(g) / (1.0 + libm::exp(-f64::from(g))) * f64::from(u);
            assert!((f64::from(y) - want).abs() <= 1e-5 * (1.0 + want.abs()), "silu({g}) * {u}");
        }
        let angles = r.unevens(n);
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles.iter().map(|a| (libm::cosf(*a), libm::sinf(*a))).unzip();
        let heads = r.unevens(4 * n);
        let y = same_bits("rope", |isa| {
            let mut x = heads.clone();
            ops::apply_rope(isa, &mut x, &cos, &sin);
            x
        });
        for (x, y) in heads.chunks(2 * n).zip(y.chunks(2 * n)) {
            for i in 0..n {
                let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                let (a, b) = (f64::from(x[i]), f64::from(x[i + n]));
                assert!((f64::from(y[i]) - (a * c - b * s)).abs() < 1e-4);
                assert!((f64::from(y[i + n]) - (b * c + a * s)).abs() < 1e-4);
            }
        }
    }
}

#[test]
fn activations_quantise_like_the_reference() {
    let mut r = Random(2);
    let mut x = r.unevens(BLOCK * 200);
    x[..BLOCK].fill(0.0);
    x[BLOCK..2 * BLOCK].fill(1e-30);
    x[2 * BLOCK] = 3e38;
    let reference: Vec<ActBlock> = x.as_chunks().0.iter().map(ActBlock::quantise).collect();
    for isa in Isa::available() {
        let mut out = vec![ActBlock::ZERO; 200];
        ops::quantise_activations(isa, &x, &mut out);
        assert_eq!(out, reference, "{}", isa.name());
    }
}

/// Groups of packed rows with seeded weights, and the same rows decoded: `[row][column]`.
fn packed(r: &mut Random, groups: usize, blocks: usize) -> (Vec<u8>, Vec<u8>, Vec<Vec<f32>>) {
    let (of_quants, of_scales) = Format::Q4_0.group_bytes(blocks * BLOCK);
    let (mut quants, mut scales) = (vec![0u8; groups * of_quants], vec![0u8; groups * of_scales]);
    let mut rows = vec![Vec::new(); 16 * groups];
    for (row, decoded) in rows.iter_mut().enumerate() {
        let (group, lane) = (row / 16, row % 16);
        let (quants, scales) = (&mut quants[group * of_quants..], &mut scales[group * of_scales..]);
        for b in 0..blocks {
            let mut v: [f32; BLOCK] = std::array::from_fn(|_| r.uneven());
            if lane == 3 {
                v.fill(-1.0); // the extreme nibble everywhere
            }
            let block = BlockQ4::quantise(&v);
            put_block(quants, scales, b, lane, &block);
            decoded.extend(block.decode());
        }
    }
    (quants, scales, rows)
}

#[test]
fn q4_products_have_the_scalar_bits_for_every_number_of_tokens() {
    let mut r = Random(3);
    // One group or several, within and beyond what a kernel unpacks at once.
    q4_products::<BLOCK>(&mut r, 1);
    q4_products::<{ 2 * BLOCK }>(&mut r, 2);
    q4_products::<{ 3 * BLOCK }>(&mut r, 3);
    q4_products::<{ 8 * BLOCK }>(&mut r, 1);
    q4_products::<{ 17 * BLOCK }>(&mut r, 4);
    q4_products::<{ 64 * BLOCK }>(&mut r, 1);
    q4_products::<{ 67 * BLOCK }>(&mut r, 2);
    q4_products::<{ 131 * BLOCK }>(&mut r, 4);
}

fn q4_products<const COLS: usize>(r: &mut Random, groups: usize) {
    let blocks = COLS / BLOCK;
    let (quants, scales, rows) = packed(r, groups, blocks);
    let w = Groups { format: Format::Q4_0, quants: &quants, scales: &scales, groups, blocks };
    // Of IQ4_XS: f16 of sixteen rows, then bytes for up to eight blocks.
    let (_, of_group) = Format::IQ4_XS.group_bytes(COLS);
    let mut span_scales: Vec<u8> = (0..groups * of_group).map(|_| (r.bits() >> 16) as u8).collect();
    for run in span_scales.chunks_mut(of_group).flat_map(|group| group.chunks_mut(32 + 8 * 16)) {
        run[..32].copy_from_slice(&scales[..32]);
    }
    let sizes = if blocks < 64 { 1..=50 } else { 31..=33 };
    for tokens in sizes {
        let mut acts = Vec::new();
        for t in 0..tokens {
            for _ in 0..blocks {
                let v: [f32; BLOCK] = std::array::from_fn(|_| if t == 1 { 5.0 } else { r.uneven() });
                acts.push(ActBlock::quantise(&v));
            }
        }
        let [out, ..] = [
            w,
            Groups { format: Format::IQ4_NL, ..w },
            Groups { format: Format::IQ4_XS, scales: &span_scales, ..w },
        ]
        .map(|w| {
            same_bits(&format!("{:?}", w.format), |isa| {
                let mut out = vec![[f32::NAN; 16]; groups * tokens];
                multiply::<COLS>(isa, w, &acts, &tiles(isa, &acts, blocks), &mut out);
                out.into_flattened()
            })
        });
        for (out, rows) in out.chunks(16 * tokens).zip(rows.chunks(16)) {
            for (out, acts) in out.chunks(16).zip(acts.chunks(blocks)) {
                check(out, acts, rows);
            }
        }
    }
}

/// The whole tiles of the tokens of `acts`, if this instruction set reads any.
fn tiles(isa: Isa, acts: &[ActBlock], blocks: usize) -> Vec<ActTile> {
    let mut tiles = vec![ActTile::ZERO; isa.act_tiles(acts.len() / blocks) * blocks];
    for (acts, tiles) in acts.chunks(ActTile::TOKENS * blocks).zip(tiles.chunks_mut(blocks)) {
        interleave(isa, acts, tiles);
    }
    tiles
}

/// Holds sixteen dot products of one token against f64.
fn check(out: &[f32], acts: &[ActBlock], rows: &[Vec<f32>]) {
    let x: Vec<f64> = acts.iter().flat_map(|a| a.q.iter().map(|&q| f64::from(q) * f64::from(a.d))).collect();
    for (o, row) in out.iter().zip(rows) {
        let want: f64 = x.iter().zip(row).map(|(a, w)| a * f64::from(*w)).sum();
        let size: f64 = x.iter().zip(row).map(|(a, w)| (a * f64::from(*w)).abs()).sum();
        assert!((f64::from(*o) - want).abs() <= 1e-5 * (1e-3 + size), "{o} {want}");
    }
}

#[test]
fn kv_rows_encode_the_same_and_lose_little() {
    let mut r = Random(9);
    for n in [2, 12, 16, 32, 48, 64, 80, 96, 128] {
        for kind in KvType::ALL {
            for _ in 0..20 {
                let x = r.unevens(n);
                let encode = |isa| {
                    let mut row = vec![0; kind.row_bytes(n)];
                    kv_row::encode_row(isa, kind, &x, &mut row);
                    row
                };
                let reference = encode(Isa::Scalar);
                for isa in others() {
                    assert_eq!(reference, encode(isa), "{} head {n} on {}", kind.name(), isa.name());
                }
            }
        }
    }
}

#[test]
fn kv_rows_are_within_half_a_step() {
    let mut r = Random(10);
    for (kind, limit) in [(KvType::Q8, 127.0), (KvType::Q6, 31.0), (KvType::Q5, 15.0)] {
        for _ in 0..50 {
            let x: [f32; 64] = r.unevens(64).try_into().unwrap();
            let mut row = vec![0; kind.row_bytes(64)];
            kv_row::encode_row(Isa::Scalar, kind, &x, &mut row);
            kv_row::update_row::<64>(Isa::Scalar, kind, &mut row, |stored| {
                for (x, stored) in x.chunks(32).zip(stored.chunks(32)) {
                    let step = x.iter().fold(0.0f32, |most, x| most.max(x.abs())) / limit;
                    // The step is rounded to half precision.
                    let close = |(x, y): (&f32, &f32)| (x - y).abs() <= 0.51 * step + x.abs() / 2048.0 + 1e-7;
                    assert!(x.iter().zip(stored).all(close), "{}: {x:?} {stored:?}", kind.name());
                }
            });
        }
    }
}

#[test]
fn rotation_is_its_own_inverse_and_keeps_dot_products() {
    let mut r = Random(4);
    for n in [2, 12, 64, 96, 128] {
        let (a, b) = (r.unevens(n), r.unevens(n));
        let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let (mut c, mut d) = (a.clone(), b.clone());
        kv::hadamard_transform(&mut c);
        kv::hadamard_transform(&mut d);
        let size = dot(&a, &a).sqrt() * dot(&b, &b).sqrt();
        assert!((dot(&a, &b) - dot(&c, &d)).abs() <= 1e-5 * (1.0 + size));
        kv::hadamard_transform(&mut c);
        assert!(a.iter().zip(&c).all(|(a, c)| (a - c).abs() <= 1e-4 * (1.0 + a.abs())));
    }
}
