//! Argmax, temperature and softmax, bit-identical on every machine.

use numeric::with_avx2;

/// The index of the first of the largest logits. NaN counts as the smallest.
pub fn argmax(logits: &[f32]) -> u32 {
    let most = max_logit(logits);
    if most == f32::NEG_INFINITY {
        return 0;
    }
    // Finds the row first, without an early exit within a row, so that it vectorises.
    const ROW: usize = 64;
    let row = with_avx2(
        #[inline(always)]
        || logits.chunks(ROW).position(|row| row.iter().fold(false, |found, &x| found | (x == most))),
    );
    let first = row.unwrap_or(0) * ROW;
    let within = logits[first..].iter().position(|&logit| logit == most);
    (first + within.unwrap_or(0)) as u32
}

/// True if no logit is NaN or infinite.
pub fn all_finite(logits: &[f32]) -> bool {
    // An early exit would cost more than it saves: this way it vectorises.
    with_avx2(
        #[inline(always)]
        || logits.iter().fold(true, |finite, x| finite & x.is_finite()),
    )
}

/// Number of lanes of a reduction, so that it vectorises and the order of additions is fixed: element `i` belongs to
/// lane `i % LANES`.
const LANES: usize = 16;

/// Number of rows of that length processed at a time: a loop over many elements vectorises best by itself.
const ROWS: usize = 16;

/// Adds elements to their lanes; the first element belongs to lane 0.
#[inline(always)]
fn add_to_lanes(lanes: &mut [f64; LANES], some: &[f32]) {
    for row in some.chunks(LANES) {
        lanes.iter_mut().zip(row).for_each(|(lane, &x)| *lane += f64::from(x));
    }
}

/// The largest logit; NaN is ignored.
fn max_logit(logits: &[f32]) -> f32 {
    with_avx2(
        #[inline(always)]
        || {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let (rows, tail) = logits.as_chunks::<LANES>();
            let mut take = |lane: usize, x: f32| lanes[lane] = if x > lanes[lane] { x } else { lanes[lane] };
            for row in rows {
                (0..LANES).for_each(|i| take(i, row[i]));
            }
            tail.iter().enumerate().for_each(|(i, &x)| take(i, x));
            lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
        },
    )
}

/// `e^x` for `x <= 0`: within 2 ulp where the result is a normal number, 0 below and for NaN. It uses only additions,
/// multiplications and bit patterns, so it is bit-identical everywhere and vectorises (tried `libm::expf`: as portable
/// and eight times slower, which shows with 128k logits).
#[inline(always)]
pub(super) fn exp_approx(x: f32) -> f32 {
    // The smallest normal f32 is e^-87.3.
    let inside = x > -87.3;
    let x = if inside { x } else { 0.0 };
    // x = n ln 2 + r; adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts (Cody and Waite); the product with the first is exact.
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    // Taylor on |r| <= ln 2 / 2, Horner.
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        p = p * r + c;
    }
    let e = (p * r) * r + r + 1.0;
    // 2^n: the low bits of `shifted` hold n.
    let scale = f32::from_bits(shifted.to_bits().wrapping_shl(23).wrapping_add(1.0f32.to_bits()));
    if inside { e * scale } else { 0.0 }
}

/// Turns logits, divided by a positive temperature, into probabilities in place. NaN gets 0; infinity counts as the
/// largest finite number; if every token is ruled out, all are 0.
pub fn softmax(logits: &mut [f32], temperature: f32) {
    let most = max_logit(logits);
    // A shift does not change the softmax. At temperatures near 0 it keeps the quotients from overflowing.
    let shift = if temperature < 1e-3 { most.min(f32::MAX) } else { 0.0 };
    let max = ((most - shift) / temperature).min(f32::MAX);
    let exps = |x: f32| {
        let logit = (x - shift) / temperature;
        // `f32::min` would turn NaN into a number.
        let capped = if logit > f32::MAX { f32::MAX } else { logit };
        exp_approx(capped - max)
    };
    let sum = with_avx2(
        #[inline(always)]
        || {
            let mut lanes = [0.0f64; LANES];
            for some in logits.chunks_mut(ROWS * LANES) {
                some.iter_mut().for_each(|x| *x = exps(*x));
                add_to_lanes(&mut lanes, some);
            }
            lanes.iter().sum::<f64>() as f32
        },
    );
    if sum > 0.0 {
        with_avx2(
            #[inline(always)]
            || logits.iter_mut().for_each(|p| *p /= sum),
        );
    }
}

/// `ln Σ e^logit`: a logit minus this is its log probability; 0 if every token is ruled out. NaN and infinity count as
/// in [`softmax`].
pub(super) fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = max_logit(logits).min(f32::MAX);
    let sum = with_avx2(
        #[inline(always)]
        || {
            let mut lanes = [0.0f64; LANES];
            for some in logits.chunks(ROWS * LANES) {
                let mut exps = [0.0; ROWS * LANES];
                let capped = some.iter().map(|&x| if x > f32::MAX { f32::MAX } else { x });
                exps.iter_mut().zip(capped).for_each(|(e, x)| *e = exp_approx(x - max));
                add_to_lanes(&mut lanes, &exps[..some.len()]);
            }
            lanes.iter().sum::<f64>()
        },
    );
    if sum > 0.0 { f64::from(max) + libm::log(sum) } else { 0.0 }
}
