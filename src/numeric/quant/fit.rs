//! Quantises rows to IQ4_NL: of some scales of a block, the one with the smallest weighted sum of squared errors.
//!
//! A scale is tried around the one that gives the block's largest value the largest level, of either sign; the levels
//! nearest to its values then fix a better one by least squares. An error of a weight counts by the mean square of the
//! activations that it is multiplied with, and more for a large weight (as in llama.cpp, by the root of its square and
//! the block's mean square): large errors of small weights spread over many tokens, those of large ones do not.
//!
//! All operations are on f32 in a fixed order, and sixteen rows at a time go through the same code, so the bytes are the
//! same on every machine and with any number of threads.

use super::format::{Format, GROUP_ROWS};
use crate::with_avx2;
use files::blocks::BLOCK;
use files::blocks::gguf::coded::IQ4;
use half::f16;
use std::array::from_fn;

/// One value of each of the group's rows.
type Lanes = [f32; GROUP_ROWS];

/// Largest values of a block, over the scale: tried around the largest level, -127.
const EXTREMES: [f32; 5] = [103.0, 115.0, 127.0, 139.0, 151.0];
/// The smallest f16.
const LEAST: f32 = 5.960_464_5e-8;

/// Quantises sixteen rows of floats, `[row][cols]`, to the planes of one group. `importance` has the mean squares of
/// the activations of each column, none of them 0, or is empty if all count alike.
///
/// # Errors
///
/// The first row with a value that is not finite or too large for an f16 scale.
pub fn quantise_group(
    rows: &[f32],
    importance: &[f32],
    quants: &mut [u8],
    scales: &mut [u8],
) -> Result<(), usize> {
    let cols = rows.len() / GROUP_ROWS;
    let mut stored = vec![0u8; rows.len() / BLOCK * 18];
    with_avx2(
        #[inline(always)]
        || {
            for b in 0..cols / BLOCK {
                let x: [Lanes; BLOCK] = from_fn(|j| from_fn(|r| rows[r * cols + b * BLOCK + j]));
                let importance = importance.get(b * BLOCK..).and_then(|rest| rest.first_chunk());
                let d = fit_scales(&x, importance.unwrap_or(&[1.0; BLOCK]));
                for r in 0..GROUP_ROWS {
                    let block = &mut stored[(r * cols / BLOCK + b) * 18..][..18];
                    block[..2].copy_from_slice(&f16::from_f32(d[r]).to_le_bytes());
                    for (j, byte) in block[2..].iter_mut().enumerate() {
                        let code = |j: usize| nearest_code(x[j][r], d[r]);
                        *byte = code(j) | code(j + BLOCK / 2) << 4;
                    }
                }
            }
        },
    );
    let rows = stored.chunks_exact(cols / BLOCK * 18).enumerate();
    for (lane, row) in rows {
        if !Format::IQ4_NL.put_row(quants, scales, lane, row) {
            return Err(lane);
        }
    }
    Ok(())
}

/// Scales of a block of each row, rounded to f16.
#[inline(always)]
fn fit_scales(x: &[Lanes; BLOCK], importance: &[f32; BLOCK]) -> Lanes {
    let (mut largest, mut squares) = ([0.0f32; GROUP_ROWS], [0.0f32; GROUP_ROWS]);
    for x in x {
        for r in 0..GROUP_ROWS {
            largest[r] = if x[r].abs() > largest[r].abs() { x[r] } else { largest[r] };
            squares[r] += x[r] * x[r] / BLOCK as f32;
        }
    }
    let weights: [Lanes; BLOCK] =
        from_fn(|j| from_fn(|r| importance[j] * (squares[r] + x[j][r] * x[j][r]).sqrt()));
    // NaN, which is refused, where no error is a number.
    let (mut best, mut least) = ([f32::NAN; GROUP_ROWS], [f32::INFINITY; GROUP_ROWS]);
    for extreme in EXTREMES.into_iter().flat_map(|extreme| [-extreme, extreme]) {
        let first = largest.map(|x| x / extreme);
        let (products, level_squares) = sum_levels(x, &weights, &first);
        let d: Lanes = from_fn(|r| round_scale(products[r] / level_squares[r], largest[r]));
        let (products, level_squares) = sum_levels(x, &weights, &d);
        for r in 0..GROUP_ROWS {
            // The weighted sum of squared errors, less that of the values themselves.
            let error = d[r] * (d[r] * level_squares[r] - 2.0 * products[r]);
            if error < least[r] {
                (best[r], least[r]) = (d[r], error);
            }
        }
    }
    best
}

/// Rounds a scale to f16. One that is no number, as of zeros, becomes the least for a value, or 0 for none.
#[inline(always)]
fn round_scale(d: f32, largest: f32) -> f32 {
    let rounded = f16::from_f32(d).to_f32();
    if rounded != 0.0 && !rounded.is_nan() {
        rounded
    } else if largest == 0.0 {
        0.0
    } else {
        LEAST
    }
}

/// Weighted sums of value times level, and of squared levels, with the levels nearest to the values over `d`.
#[inline(always)]
fn sum_levels(x: &[Lanes; BLOCK], weights: &[Lanes; BLOCK], d: &Lanes) -> (Lanes, Lanes) {
    let inverse = d.map(|d| if d == 0.0 { 0.0 } else { 1.0 / d });
    let (mut products, mut squares) = ([0.0; GROUP_ROWS], [0.0; GROUP_ROWS]);
    for (x, weights) in x.iter().zip(weights) {
        let scaled: Lanes = from_fn(|r| x[r] * inverse[r]);
        let mut levels = [f32::from(IQ4[0]); GROUP_ROWS];
        for k in 1..IQ4.len() {
            let (bound, step) = step_to(k);
            for r in 0..GROUP_ROWS {
                levels[r] += if scaled[r] > bound { step } else { 0.0 };
            }
        }
        for r in 0..GROUP_ROWS {
            products[r] += weights[r] * x[r] * levels[r];
            squares[r] += weights[r] * levels[r] * levels[r];
        }
    }
    (products, squares)
}

/// Bound between level `k` and the one before, and their distance.
#[inline(always)]
fn step_to(k: usize) -> (f32, f32) {
    let (below, above) = (f32::from(IQ4[k - 1]), f32::from(IQ4[k]));
    ((below + above) / 2.0, above - below)
}

/// Index of the level nearest to `x / d`.
#[inline(always)]
fn nearest_code(x: f32, d: f32) -> u8 {
    let scaled = if d == 0.0 { 0.0 } else { x * (1.0 / d) };
    (1..IQ4.len()).map(|k| u8::from(scaled > step_to(k).0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..n).map(|_| next() + next() + next()).collect()
    }

    /// Scales of the blocks of quantised rows: `[block][row]`.
    fn quantise(rows: &[f32], importance: &[f32]) -> Vec<f32> {
        let (quants, scales) = Format::IQ4_NL.group_bytes(rows.len() / GROUP_ROWS);
        let (mut quants, mut scales) = (vec![0; quants], vec![0; scales]);
        quantise_group(rows, importance, &mut quants, &mut scales).unwrap();
        scales.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
    }

    /// Sum of squared errors with these scales, each weighted by the importance of its column.
    fn error(rows: &[f32], scales: &[f32], importance: &[f32]) -> f64 {
        let cols = rows.len() / GROUP_ROWS;
        let of_value = |(i, x): (usize, &f32)| {
            let d = scales[i % cols / BLOCK * GROUP_ROWS + i / cols];
            let error = x - d * f32::from(IQ4[usize::from(nearest_code(*x, d))]);
            f64::from(importance[i % cols] * error * error)
        };
        rows.iter().enumerate().map(of_value).sum()
    }

    #[test]
    fn columns_that_count_more_have_smaller_errors() {
        let rows = numbers(GROUP_ROWS * 64, 7);
        let alike = quantise(&rows, &[1.0; 64]);
        let energy: f64 = rows.iter().map(|x| f64::from(x * x)).sum();
        let of_alike = error(&rows, &alike, &[1.0; 64]);
        assert!(of_alike < 0.0062 * energy, "{}", of_alike / energy);
        let important: Vec<f32> = (0..64).map(|i| if i % 8 == 0 { 20.0 } else { 0.5 }).collect();
        let [weighed, alike] = [quantise(&rows, &important), alike].map(|d| error(&rows, &d, &important));
        assert!(weighed < 0.9 * alike, "{weighed} {alike}");
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_is_refused() {
        let scales = quantise(&[0.0; GROUP_ROWS * 32], &[]);
        assert!(scales.iter().all(|d| *d == 0.0));
        for bad in [f32::NAN, f32::INFINITY, 1e38] {
            let mut rows = numbers(GROUP_ROWS * 32, 3);
            rows[5 * 32 + 9] = bad;
            let (quants, scales) = Format::IQ4_NL.group_bytes(32);
            let found = quantise_group(&rows, &[], &mut vec![0; quants], &mut vec![0; scales]);
            assert_eq!(found, Err(5), "{bad}");
        }
    }
}
