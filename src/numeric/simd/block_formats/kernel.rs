//! The product kernel for all formats and instruction sets. It takes sixteen rows, some tokens and [`RUN`] blocks at a
//! time.

use super::super::unrolled;
use super::rows::BlockKernel;
use crate::quant::activations::ActBlock;
use crate::quant::format::Format;
use crate::simd::groups::Groups;
#[cfg(target_arch = "x86_64")]
use crate::simd::groups::{prefetch_block, prefetch_distance};
use files::blocks::BLOCK;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Blocks computed for one register of rows before the next register; their weights and activations stay in the
/// first-level cache. In formats with superblocks they share a run of scales.
pub const RUN: usize = 8;
/// Blocks of activations laid out at once: 256 of one token, or 32 of each of eight tokens. With 64, four groups of
/// 8,192 columns in memory alternate too often to be prefetched: Q4_K on AVX2 at 16 GB/s.
const ACTS: usize = 256;

/// Some tokens of a product.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// `[token][block]`, from the first of these tokens on.
    pub activations: &'a [ActBlock],
    /// Index of the first token in `out[group][token][row]`.
    pub first: usize,
    /// Number of tokens, at most that of the kernel.
    pub count: usize,
    /// Number of tokens in `out`.
    pub total: usize,
}

/// A block of activations, prepared for the kernel.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct PreparedAct {
    q: [i8; BLOCK],
    /// Scale.
    d: f32,
    /// Factor of a block's minimums: `sum(q) * d`, negated for Q4_K and Q5_K.
    minimum: f32,
    /// Initial values of the sums of the two halves. The sum of a whole block starts from the first.
    start: [i32; 2],
}

impl PreparedAct {
    const ZERO: Self = Self { q: [0; BLOCK], d: 0.0, minimum: 0.0, start: [0; 2] };

    #[inline(always)]
    unsafe fn new<R: BlockKernel, const F: usize>(act: &ActBlock) -> Self {
        let sum = (-act.offset / 8) as f32;
        let minimum = match const { Format::ALL[F] } {
            Format::Q4_1 | Format::Q5_1 => act.d * sum,
            Format::Q4_K | Format::Q5_K => -(act.d * sum),
            _ => 0.0,
        };
        let [first, second] = match const { Format::ALL[F] } {
            Format::Q4_0 => [act.offset; 2],
            Format::Q5_0 => [2 * act.offset; 2],
            Format::Q8_0 if !R::SIGNED => [16 * act.offset; 2],
            Format::Q6_K => {
                let first = -32 * R::sum_bytes(act.q.as_ptr());
                [first, 4 * act.offset - first]
            }
            _ => [0; 2],
        };
        Self { q: act.q, d: act.d, minimum, start: [first + R::START, second + R::START] }
    }
}

/// Multiplies all groups with `x.count <= T` tokens; missing tokens count as zeros. `F` is the format's index in
/// [`Format::ALL`].
///
/// A sweep lays out the activations of as many blocks as there is room for, once for all groups. Between sweeps the
/// sums are kept in `out`.
///
/// # Safety
///
/// The CPU has the set of `R`. The planes hold `w.groups` groups of `w.blocks` blocks, `x.activations` holds as many
/// blocks for each of `x.count` tokens, and `out` holds `w.groups * x.of` runs of sixteen rows.
#[inline(always)]
pub unsafe fn tile<R: BlockKernel, const F: usize, const T: usize>(
    w: Groups<'_>,
    x: Tokens<'_>,
    out: *mut [f32; 16],
) {
    const { assert!(T <= 8 && ACTS / T >= RUN && 16 % R::ROWS == 0) };
    let (quants, scales) = Format::ALL[F].group_bytes(w.blocks * BLOCK);
    let mut acts = [const { MaybeUninit::<PreparedAct>::uninit() }; ACTS];
    let sweep = ACTS / T / RUN * RUN;
    for first in (0..w.blocks).step_by(sweep) {
        let end = w.blocks.min(first + sweep);
        prepare_acts::<R, F, T>(&mut acts, x, (w.blocks, first..end));
        for g in 0..w.groups {
            for b in (first..end).step_by(RUN) {
                let at = Format::ALL[F].group_bytes(b * BLOCK);
                for row in (0..16).step_by(R::ROWS) {
                    let part = RowSpan {
                        quants: w.quants.as_ptr().add(g * quants + at.0),
                        scales: w.scales.as_ptr().add(g * scales + at.1),
                        acts: acts.as_ptr().cast::<PreparedAct>().add((b - first) * T),
                        blocks: b..end.min(b + RUN),
                        row,
                    };
                    let out = out.add(g * x.total + x.first).cast::<f32>().add(row);
                    part.add_to_sums::<R, F, T>(out, x.count);
                }
            }
        }
    }
}

/// Lays out `blocks` of the activations of `x`, which have `stride` blocks a token, as `[block][token]` of `T` tokens.
///
/// # Safety
///
/// The CPU has the set of `R`, and `acts` has room for `T` tokens.
#[inline(always)]
unsafe fn prepare_acts<R: BlockKernel, const F: usize, const T: usize>(
    acts: &mut [MaybeUninit<PreparedAct>; ACTS],
    x: Tokens<'_>,
    (stride, blocks): (usize, Range<usize>),
) {
    for t in 0..T {
        let to = acts.iter_mut().skip(t).step_by(T);
        if t >= x.count {
            to.take(blocks.len()).for_each(|act| _ = act.write(PreparedAct::ZERO));
            continue;
        }
        for (to, act) in to.zip(&x.activations[t * stride..][blocks.clone()]) {
            to.write(PreparedAct::new::<R, F>(act));
        }
    }
}

/// The rows of one register, over a run of blocks.
struct RowSpan {
    /// Quants of the run's first block, all rows of the group.
    quants: *const u8,
    /// Scales of that block's span.
    scales: *const u8,
    /// `[block][token]`
    acts: *const PreparedAct,
    /// Indices of the blocks in a row of the matrix.
    blocks: Range<usize>,
    /// First row of the register.
    row: usize,
}

impl RowSpan {
    /// Adds the run's blocks to the sums of `count` tokens at `out`, `[token][row]`. Sums start at zero with the
    /// matrix's first block.
    ///
    /// # Safety
    ///
    /// The CPU has the set of `R`; the planes and the activations of `T` tokens hold the blocks.
    #[inline(always)]
    unsafe fn add_to_sums<R: BlockKernel, const F: usize, const T: usize>(self, out: *mut f32, count: usize) {
        let mut acc = [R::splat(0.0); T];
        if self.blocks.start > 0 {
            unrolled!(T, |t| {
                if t < count {
                    acc[t] = R::load_floats(out.add(16 * t));
                }
            });
        }
        self.accumulate::<R, F, T>(&mut acc);
        unrolled!(T, |t| {
            if t < count {
                R::store(acc[t], out.add(16 * t));
            }
        });
    }

    /// Adds the run's blocks to the sums of `T` tokens.
    ///
    /// # Safety
    ///
    /// See [`RowSpan::add_to_sums`].
    #[inline(always)]
    unsafe fn accumulate<R: BlockKernel, const F: usize, const T: usize>(&self, acc: &mut [R::Floats; T]) {
        #[cfg(target_arch = "x86_64")]
        let near = prefetch_distance(T);
        for b in 0..self.blocks.len() {
            let acts = self.acts.add(b * T);
            let format = const { Format::ALL[F] };
            #[cfg(target_arch = "x86_64")]
            if self.row == 0 {
                prefetch_block::<F>(self.quants, self.scales, b, near);
            }
            let w = unpack::<R, F>(self.quants.add(b * format.quant_bytes() + 4 * self.row));
            let (block_scales, minimum) = load_scales::<R, F>(self.scales, self.row, b);
            unrolled!(T, |t| {
                let act = acts.add(t);
                let q = (&raw const (*act).q).cast::<i8>();
                let d = R::splat((*act).d);
                if F == const { Format::Q6_K as usize } {
                    let (x, y) = (R::splat_sum((*act).start[0]), R::splat_sum((*act).start[1]));
                    let x = R::dot_half_block::<6>(x, [w[0], w[1], w[2], w[3]], q);
                    let y = R::dot_half_block::<6>(y, [w[4], w[5], w[6], w[7]], q.add(16));
                    // Integers below 2^24: exact.
                    let sum = R::fma(
                        R::sums_to_floats(y),
                        block_scales[1],
                        R::mul(R::sums_to_floats(x), block_scales[0]),
                    );
                    acc[t] = R::fma(sum, R::mul(minimum, d), acc[t]);
                } else {
                    let sum = match format.extract_bits() {
                        4 => R::dot_block::<4>(R::splat_sum((*act).start[0]), w, q),
                        5 => R::dot_block::<5>(R::splat_sum((*act).start[0]), w, q),
                        _ => R::dot_block::<8>(R::splat_sum((*act).start[0]), w, q),
                    };
                    acc[t] = R::fma(R::sums_to_floats(sum), R::mul(block_scales[0], d), acc[t]);
                    if format.has_minimum() {
                        acc[t] = R::fma(minimum, R::splat((*act).minimum), acc[t]);
                    }
                }
            });
        }
    }
}

/// Loads the factor of the integer sums of block `b` of a run, and its minimum. For Q6_K: the factors of the two
/// halves, and the factor of both. `scales` are those of the run's first block, `row` is the first row of the register.
///
/// # Safety
///
/// The CPU has the set of `R`; `scales` holds those of block `b`.
#[inline(always)]
pub unsafe fn load_scales<R: BlockKernel, const F: usize>(
    scales: *const u8,
    row: usize,
    b: usize,
) -> ([R::Floats; 2], R::Floats) {
    match const { Format::ALL[F] } {
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => {
            ([R::load_f16(scales.add(32 * b + 2 * row)); 2], R::splat(0.0))
        }
        Format::Q4_1 | Format::Q5_1 => {
            let at = scales.add(64 * b + 2 * row);
            ([R::load_f16(at); 2], R::load_f16(at.add(32)))
        }
        Format::Q4_K | Format::Q5_K => {
            let (halves, at) = (scales.add(2 * row), scales.add(64 + 32 * b + row));
            let block_scale = R::mul(R::load_f16(halves), R::load_u8(at));
            ([block_scale; 2], R::mul(R::load_f16(halves.add(32)), R::load_u8(at.add(16))))
        }
        Format::Q6_K => {
            let at = scales.add(32 + 32 * b + row);
            ([R::load_i8(at), R::load_i8(at.add(16))], R::load_f16(scales.add(2 * row)))
        }
    }
}

/// Unpacks the integers of one block: element `v` has columns `4v..4v + 4` of each row.
///
/// # Safety
///
/// The CPU has the set of `R`; `p` holds the block's quants, from the register's first row on.
#[inline(always)]
pub unsafe fn unpack<R: BlockKernel, const F: usize>(p: *const u8) -> [R::Bytes; 8] {
    let bits = const { Format::ALL[F].extract_bits() };
    let nibble = R::splat_byte(15);
    let mut w = [nibble; 8];
    if bits == 8 {
        unrolled!(8, |v| {
            let x = R::load(p.add(64 * v));
            w[v] = if R::SIGNED { x } else { R::xor(x, R::splat_byte(128)) };
        });
        return w;
    }
    unrolled!(4, |v| {
        let x = R::load(p.add(64 * v));
        w[v] = R::and(x, nibble);
        w[4 + v] = R::and(R::shift_right::<4>(x), nibble);
    });
    if bits == 5 {
        let (x, fifth) = (R::load(p.add(256)), R::splat_byte(16));
        w[0] = R::or(w[0], R::and(R::shift_left::<4>(x), fifth));
        w[1] = R::or(w[1], R::and(R::shift_left::<3>(x), fifth));
        w[2] = R::or(w[2], R::and(R::shift_left::<2>(x), fifth));
        w[3] = R::or(w[3], R::and(R::shift_left::<1>(x), fifth));
        w[4] = R::or(w[4], R::and(x, fifth));
        w[5] = R::or(w[5], R::and(R::shift_right::<1>(x), fifth));
        w[6] = R::or(w[6], R::and(R::shift_right::<2>(x), fifth));
        w[7] = R::or(w[7], R::and(R::shift_right::<3>(x), fifth));
    }
    if bits == 6 {
        unrolled!(2, |half| {
            let (x, upper) = (R::load(p.add(256 + 64 * half)), R::splat_byte(48));
            let w = &mut w[4 * half..][..4];
            w[0] = R::or(w[0], R::and(R::shift_left::<4>(x), upper));
            w[1] = R::or(w[1], R::and(R::shift_left::<2>(x), upper));
            w[2] = R::or(w[2], R::and(x, upper));
            w[3] = R::or(w[3], R::and(R::shift_right::<2>(x), upper));
        });
    }
    w
}
