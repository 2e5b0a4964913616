//! Tests of stored q4 rows against their definition, computed one number at a time.

use crate::support::random::Random;
use half::f16;
use numeric::kv::KvType;
use numeric::simd::{Isa, kv_row};

/// Elements of a block.
const N: usize = 32;
/// The scales that are tried: the largest value, negative, over each of these.
const DIVISORS: [f32; 9] = [8.0, -8.0, 7.5, -8.5, 8.5, -9.0, 9.0, -9.5, 9.5];
/// Largest relative gap between two scales' sums of squares at which either is right: single precision.
const TIE: f64 = 1e-5;

/// A scale that is tried: what the values round to, and the sum of the squared errors.
struct Tried {
    d: f32,
    q: [i32; N],
    error: f64,
}

impl Tried {
    fn new(x: &[f32; N], divisor: f32) -> Self {
        // The negative one of two as large.
        let largest = x
            .iter()
            .fold(0.0f32, |a, &b| if b.abs() > a.abs() || (b.abs() == a.abs() && b < a) { b } else { a });
        let d = f16::from_f32((-largest / divisor).clamp(-65504.0, 65504.0)).to_f32();
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let q = x.map(|x| (x * inverse).round_ties_even().clamp(-8.0, 7.0) as i32);
        let error = x.iter().zip(q).map(|(&x, q)| (f64::from(q) * f64::from(d) - f64::from(x)).powi(2)).sum();
        Self { d, q, error }
    }

    /// The scale that fits the rounded values best, as stored.
    fn fitted(&self, x: &[f32; N]) -> f16 {
        let xq: f64 = x.iter().zip(self.q).map(|(&x, q)| f64::from(x) * f64::from(q)).sum();
        let qq: f64 = self.q.iter().map(|&q| f64::from(q * q)).sum();
        let d = if qq > 0.0 { xq / qq } else { f64::from(self.d) };
        f16::from_f64(d.clamp(-65504.0, 65504.0))
    }
}

/// The scale and the integers of a stored block.
fn stored(isa: Isa, x: &[f32; N]) -> (f16, [i32; N]) {
    let mut row = [0; 2 + N / 2];
    assert_eq!(row.len(), KvType::Q4.row_bytes(N));
    kv_row::encode_row(isa, KvType::Q4, x, &mut row);
    let nibble = |i: usize| if i < N / 2 { row[2 + i] & 15 } else { row[2 + i - N / 2] >> 4 };
    (f16::from_le_bytes([row[0], row[1]]), std::array::from_fn(|i| i32::from(nibble(i)) - 8))
}

/// Tells whether two numbers are equal or neighbours, since the sums were rounded in between.
fn close(a: f16, b: f16) -> bool {
    (a == b) || (a.is_sign_negative() == b.is_sign_negative() && a.to_bits().abs_diff(b.to_bits()) <= 1)
}

/// Checks one block, and says whether its scale is the very one.
fn check(isa: Isa, x: &[f32; N]) -> bool {
    let tried = DIVISORS.map(|divisor| Tried::new(x, divisor));
    let least = tried.iter().map(|t| t.error).fold(f64::INFINITY, f64::min);
    let (d, q) = stored(isa, x);
    let mut right = tried.iter().filter(|t| t.error <= least * (1.0 + TIE) && t.q == q);
    let right = right.find(|t| close(t.fitted(x), d));
    let right = right.unwrap_or_else(|| panic!("{}: {x:?} is stored as {d} x {q:?}", isa.name()));
    right.fitted(x) == d
}

#[test]
fn blocks_have_the_best_of_nine_scales_fitted_by_least_squares() {
    let mut r = Random(11);
    let blocks: Vec<[f32; N]> =
        (0..400).map(|i| if i % 2 == 0 { r.floats(N) } else { r.unevens(N) }.try_into().unwrap()).collect();
    for isa in Isa::available() {
        let exact = blocks.iter().filter(|x| check(isa, x)).count();
        assert!(exact > 390, "{}: {exact} of 400", isa.name());
    }
}

#[test]
fn extreme_blocks_have_the_best_scale_too() {
    let one = |at: usize, y: f32| std::array::from_fn(|i| if i == at { y } else { 0.0 });
    let mut blocks: Vec<[f32; N]> = vec![
        [0.0; N],
        [-0.0; N],
        one(0, 1.0),
        one(N - 1, -1.0),
        // Two as large, of either sign first.
        std::array::from_fn(|i| if i % 2 == 0 { 3.0 } else { -3.0 }),
        std::array::from_fn(|i| if i % 2 == 0 { -3.0 } else { 3.0 }),
        // Ties of rounding.
        std::array::from_fn(|i| (i as f32 - 16.0) / 2.0),
        // An outlier that takes all resolution.
        std::array::from_fn(|i| if i == 5 { 1000.0 } else { i as f32 * 1e-3 }),
    ];
    // Scales that are subnormal halves, none at all, and the largest.
    for size in [1e-40, 1e-9, 1e-7, 1e-6, 1e-4, 1.0, 3e5, 5.2e5, 1e30] {
        blocks.push([size; N]);
        blocks.push([-size; N]);
        blocks.push(std::array::from_fn(|i| size * (i as f32 - 11.0) / 20.0));
    }
    for isa in Isa::available() {
        blocks.iter().for_each(|x| {
            check(isa, x);
        });
    }
}
