//! Quantises rows to formats of 4 and 5 bits: of some scales of a block, the one with the smallest weighted sum of squared
//! errors.
//!
//! A scale is tried around the one that gives the block's largest value the largest level, of either sign; the levels
//! nearest to its values then fix a better one by least squares. An error of a weight counts by the mean square of the
//! activations that it is multiplied with, and more for a large weight (as in llama.cpp, by the root of its square and
//! the block's mean square): large errors of small weights spread over many tokens, those of large ones do not.
//!
//! In IQ4_XS a block's scale is an integer of eight bits times the f16 scale of its span. A GGUF file has six of the bits;
//! with all of them the blocks lose no more than those of IQ4_NL, each of which has an f16 scale of its own.
//!
//! All operations are on f32 in a fixed order, and sixteen rows at a time go through the same code, so the bytes are the
//! same on every machine and with any number of threads.

use super::format::{Format, GROUP_ROWS, ScaleKind};
use crate::with_avx2;
use files::blocks::BLOCK;
use files::blocks::gguf::coded::IQ4;
use half::f16;
use std::array::from_fn;

/// One value of each of the group's rows.
type Lanes = [f32; GROUP_ROWS];

/// The levels that a format's integers stand for.
trait Levels {
    /// Largest values of a block, over the scale: tried around the largest level, of either sign.
    const EXTREMES: [f32; 5];
    /// The level nearest to each value.
    fn find_nearest(values: &Lanes) -> Lanes;
    /// The stored integer of the level nearest to a value.
    fn find_code(value: f32) -> u8;
}

/// The levels of IQ4_NL and IQ4_XS, from -127 on.
struct Iq4;

impl Levels for Iq4 {
    const EXTREMES: [f32; 5] = [103.0, 115.0, 127.0, 139.0, 151.0];

    #[inline(always)]
    fn find_nearest(values: &Lanes) -> Lanes {
        let mut levels = [f32::from(IQ4[0]); GROUP_ROWS];
        for k in 1..IQ4.len() {
            let (bound, step) = step_to(k);
            for r in 0..GROUP_ROWS {
                levels[r] += if values[r] > bound { step } else { 0.0 };
            }
        }
        levels
    }

    #[inline(always)]
    fn find_code(value: f32) -> u8 {
        (1..IQ4.len()).map(|k| u8::from(value > step_to(k).0)).sum()
    }
}

/// The levels of Q5_0: -16 to 15.
struct Linear5;

impl Levels for Linear5 {
    const EXTREMES: [f32; 5] = [13.5, 14.5, 15.25, 16.0, 17.0];

    #[inline(always)]
    fn find_nearest(values: &Lanes) -> Lanes {
        values.map(|x| x.round_ties_even().clamp(-16.0, 15.0))
    }

    #[inline(always)]
    fn find_code(value: f32) -> u8 {
        (value.round_ties_even().clamp(-16.0, 15.0) + 16.0) as u8
    }
}

/// The smallest f16.
const LEAST: f32 = 5.960_464_5e-8;

/// Returns true if [`quantise_group`] can quantise to a format.
pub fn is_fitted(format: Format) -> bool {
    matches!(format, Format::IQ4_NL | Format::IQ4_XS | Format::Q5_0)
}

/// Quantises sixteen rows of floats, `[row][cols]`, to the planes of one group of a format of which [`is_fitted`] is
/// true. `importance` has the mean squares of the activations of each column, none of them 0, or is empty if all count
/// alike.
///
/// # Errors
///
/// The first row with a value that is not finite or too large for an f16 scale.
pub fn quantise_group(
    format: Format,
    rows: &[f32],
    importance: &[f32],
    planes: (&mut [u8], &mut [u8]),
) -> Result<(), usize> {
    match format {
        Format::Q5_0 => with_avx2(
            #[inline(always)]
            || fit_group::<Linear5>(format, rows, importance, planes),
        ),
        _ => with_avx2(
            #[inline(always)]
            || fit_group::<Iq4>(format, rows, importance, planes),
        ),
    }
}

/// Implements [`quantise_group`] for formats with these levels.
#[inline(always)]
fn fit_group<L: Levels>(
    format: Format,
    rows: &[f32],
    importance: &[f32],
    (quants, scales): (&mut [u8], &mut [u8]),
) -> Result<(), usize> {
    let (cols, of_span) = (rows.len() / GROUP_ROWS, format.scale_span() / BLOCK);
    let values = |b: usize| -> [Lanes; BLOCK] { from_fn(|j| from_fn(|r| rows[r * cols + b * BLOCK + j])) };
    let mut fitted = Vec::with_capacity(of_span);
    for first in (0..cols / BLOCK).step_by(of_span) {
        let blocks = first..(first + of_span).min(cols / BLOCK);
        fitted.clear();
        for b in blocks.clone() {
            let importance = importance.get(b * BLOCK..).and_then(|rest| rest.first_chunk());
            fitted.push(fit_scales::<L>(&values(b), importance.unwrap_or(&[1.0; BLOCK])));
        }
        if let Some(bad) = (0..GROUP_ROWS).find(|r| fitted.iter().any(|d| !d[*r].is_finite())) {
            return Err(bad);
        }
        let halves = match format.scale_kind() {
            ScaleKind::Blocks => share_scales(&mut fitted, |i, r, scale| {
                scales[format.block_scales_at(first + i) + r] = scale as u8;
            }),
            _ => fitted[0],
        };
        let run = first / of_span * format.scale_bytes();
        for (r, half) in halves.iter().enumerate() {
            scales[run + 2 * r..][..2].copy_from_slice(&f16::from_f32(*half).to_le_bytes());
        }
        for (b, d) in blocks.zip(&fitted) {
            let x = values(b);
            for r in 0..GROUP_ROWS {
                let codes = from_fn(|j| L::find_code(if d[r] == 0.0 { 0.0 } else { x[j][r] * (1.0 / d[r]) }));
                format.put_codes(quants, b, r, &codes);
            }
        }
    }
    Ok(())
}

/// Rounds the scales of a span's blocks to integers times a scale of the span, which is returned and is an f16. `put`
/// gets the integer of a block and a row.
#[inline(always)]
fn share_scales(fitted: &mut [Lanes], mut put: impl FnMut(usize, usize, i8)) -> Lanes {
    let largest: Lanes = from_fn(|r| fitted.iter().fold(0.0, |most: f32, d| most.max(d[r].abs())));
    let shared = largest.map(|most| round_scale(most / 127.0, most));
    for (i, d) in fitted.iter_mut().enumerate() {
        for r in 0..GROUP_ROWS {
            let scale = if shared[r] == 0.0 { 0.0 } else { d[r] / shared[r] };
            let scale = scale.round_ties_even().clamp(-127.0, 127.0);
            put(i, r, scale as i8);
            d[r] = shared[r] * scale;
        }
    }
    shared
}

/// Scales of a block of each row, rounded to f16.
#[inline(always)]
fn fit_scales<L: Levels>(x: &[Lanes; BLOCK], importance: &[f32; BLOCK]) -> Lanes {
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
    for extreme in L::EXTREMES.into_iter().flat_map(|extreme| [-extreme, extreme]) {
        let first = largest.map(|x| x / extreme);
        let (products, level_squares) = sum_levels::<L>(x, &weights, &first);
        let d: Lanes = from_fn(|r| round_scale(products[r] / level_squares[r], largest[r]));
        let (products, level_squares) = sum_levels::<L>(x, &weights, &d);
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
fn sum_levels<L: Levels>(x: &[Lanes; BLOCK], weights: &[Lanes; BLOCK], d: &Lanes) -> (Lanes, Lanes) {
    let inverse = d.map(|d| if d == 0.0 { 0.0 } else { 1.0 / d });
    let (mut products, mut squares) = ([0.0; GROUP_ROWS], [0.0; GROUP_ROWS]);
    for (x, weights) in x.iter().zip(weights) {
        let levels = L::find_nearest(&from_fn(|r| x[r] * inverse[r]));
        for r in 0..GROUP_ROWS {
            products[r] += weights[r] * x[r] * levels[r];
            squares[r] += weights[r] * levels[r] * levels[r];
        }
    }
    (products, squares)
}

/// Bound between level `k` of IQ4 and the one before, and their distance.
#[inline(always)]
fn step_to(k: usize) -> (f32, f32) {
    let (below, above) = (f32::from(IQ4[k - 1]), f32::from(IQ4[k]));
    ((below + above) / 2.0, above - below)
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

    /// The group's rows as they are quantised, or the first row that cannot be.
    fn quantise(format: Format, rows: &[f32], importance: &[f32]) -> Result<Vec<f32>, usize> {
        let cols = rows.len() / GROUP_ROWS;
        let (quants, scales) = format.group_bytes(cols);
        let (mut quants, mut scales) = (vec![0; quants], vec![0; scales]);
        quantise_group(format, rows, importance, (&mut quants, &mut scales))?;
        let value = |i: usize| {
            let (lane, b, column) = (i / cols, i % cols / BLOCK, i % BLOCK);
            let quants = &quants[b * format.quant_bytes()..][..format.quant_bytes()];
            let levels = format.code_levels();
            let q = format.decode_integers(quants, lane, levels.as_ref())[column];
            format.decode_scales(&scales, lane, b).d * f32::from(q)
        };
        Ok((0..rows.len()).map(value).collect())
    }

    /// Sum of squared errors, each weighted by the importance of its column.
    fn error(rows: &[f32], quantised: &[f32], importance: &[f32]) -> f64 {
        let of_value = |(i, (x, y)): (usize, (&f32, &f32))| {
            let error = x - y;
            f64::from(importance[i % importance.len()] * error * error)
        };
        rows.iter().zip(quantised).enumerate().map(of_value).sum()
    }

    /// The formats, with the share of the energy of normal numbers that they may lose.
    const FORMATS: [(Format, f64); 3] =
        [(Format::IQ4_NL, 0.0062), (Format::IQ4_XS, 0.0062), (Format::Q5_0, 0.0018)];

    #[test]
    fn columns_that_count_more_have_smaller_errors() {
        // The last span is cut short.
        let cols = 320;
        let rows = numbers(GROUP_ROWS * cols, 7);
        let energy: f64 = rows.iter().map(|x| f64::from(x * x)).sum();
        let important: Vec<f32> = (0..cols).map(|i| if i % 8 == 0 { 20.0 } else { 0.5 }).collect();
        for (format, bound) in FORMATS {
            let alike = quantise(format, &rows, &vec![1.0; cols]).unwrap();
            let of_alike = error(&rows, &alike, &[1.0]) / energy;
            assert!(of_alike < bound, "{format:?} {of_alike}");
            let weighed = quantise(format, &rows, &important).unwrap();
            let [weighed, alike] = [weighed, alike].map(|values| error(&rows, &values, &important));
            assert!(weighed < 0.9 * alike, "{format:?} {weighed} {alike}");
        }
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_is_refused() {
        for (format, _) in FORMATS {
            assert_eq!(quantise(format, &[0.0; GROUP_ROWS * 32], &[]), Ok(vec![0.0; GROUP_ROWS * 32]));
            for bad in [f32::NAN, f32::INFINITY, 1e38] {
                let mut rows = numbers(GROUP_ROWS * 32, 3);
                rows[5 * 32 + 9] = bad;
                assert_eq!(quantise(format, &rows, &[]), Err(5), "{format:?} {bad}");
            }
        }
    }
}
