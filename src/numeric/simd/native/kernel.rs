//! The kernel of all formats and instruction sets: sixteen rows at a time, some tokens, [`RUN`] blocks.

use super::super::{prefetch, unrolled};
use super::NativeGroups;
use super::rows::Rows;
use crate::quant::act::ActBlock;
use crate::quant::native::Format;
use files::blocks::BLOCK;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Blocks that one register of rows is taken through before the next: their weights and activations stay in the
/// first-level cache. In the formats of superblocks they share a run of scales.
const RUN: usize = 8;
/// Blocks of activations that are laid out at once: 64 of one token, eight of eight tokens.
const ACTS: usize = 64;

/// Some tokens of a product.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// `[token][block]`, from the first of these tokens on.
    pub acts: &'a [ActBlock],
    /// Where these are in `out[group][token][row]`.
    pub first: usize,
    /// How many: at most those of the kernel.
    pub count: usize,
    /// All of `out`.
    pub of: usize,
}

/// A block of activations as the kernel reads it.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Act {
    q: [i8; BLOCK],
    /// Scale.
    d: f32,
    /// What the minimums of a block are multiplied with: `sum(q) * d` and its sign.
    floor: f32,
    /// What the sums of the two halves are counted up from; of the whole block the first.
    start: [i32; 2],
}

impl Act {
    const ZERO: Self = Self { q: [0; BLOCK], d: 0.0, floor: 0.0, start: [0; 2] };

    #[inline(always)]
    unsafe fn new<R: Rows, const F: usize>(act: &ActBlock) -> Self {
        let sum = (-act.offset / 8) as f32;
        let floor = match const { Format::ALL[F] } {
            Format::Q4_1 | Format::Q5_1 => act.d * sum,
            Format::Q4_K | Format::Q5_K => -(act.d * sum),
            _ => 0.0,
        };
        let [first, second] = match const { Format::ALL[F] } {
            Format::Q5_0 => [2 * act.offset; 2],
            Format::Q8_0 if !R::SIGNED => [16 * act.offset; 2],
            Format::Q6_K => {
                // SAFETY: a block holds 32 values; the instruction set is the caller's.
                let first = -32 * unsafe { R::total(act.q.as_ptr()) };
                [first, 4 * act.offset - first]
            }
            _ => [0; 2],
        };
        Self { q: act.q, d: act.d, floor, start: [first + R::START, second + R::START] }
    }
}

/// All groups times `x.count <= T` tokens, where `F` is the format's place among [`Format::ALL`]. Of the
/// activations of tokens that are not there zeros are taken.
///
/// Activations are laid out for as many blocks as there is room for, which serves all groups; between these sweeps
/// sums lie in `out`.
///
/// # Safety
///
/// The CPU has the set of `R`; the planes hold `w.groups` groups of `w.blocks` blocks, `x.acts` holds `x.count` tokens
/// of as many, and `out` `w.groups * x.of` runs of sixteen rows.
#[inline(always)]
pub unsafe fn tile<R: Rows, const F: usize, const T: usize>(
    w: NativeGroups<'_>,
    x: Tokens<'_>,
    out: *mut [f32; 16],
) {
    const { assert!(T <= 8 && ACTS / T >= RUN && 16 % R::ROWS == 0) };
    let (quants, scales) = Format::ALL[F].group_bytes(w.blocks * BLOCK);
    let mut acts = [const { MaybeUninit::<Act>::uninit() }; ACTS];
    let sweep = ACTS / T / RUN * RUN;
    for first in (0..w.blocks).step_by(sweep) {
        let end = w.blocks.min(first + sweep);
        // SAFETY: the instruction set is the caller's; there is room for T tokens of `sweep` blocks.
        unsafe { lay_out::<R, F, T>(&mut acts, x, (w.blocks, first..end)) };
        for g in 0..w.groups {
            for b in (first..end).step_by(RUN) {
                let at = Format::ALL[F].group_bytes(b * BLOCK);
                for row in (0..16).step_by(R::ROWS) {
                    // SAFETY: as the caller's; the blocks `b..end` and the rows `row..row + ROWS` are in group `g`, and
                    // their activations were laid out.
                    unsafe {
                        let part = Part {
                            quants: w.quants.as_ptr().add(g * quants + at.0),
                            scales: w.scales.as_ptr().add(g * scales + at.1),
                            acts: acts.as_ptr().cast::<Act>().add((b - first) * T),
                            blocks: b..end.min(b + RUN),
                            row,
                        };
                        let out = out.add(g * x.of + x.first).cast::<f32>().add(row);
                        part.onto::<R, F, T>(out, x.count);
                    }
                }
            }
        }
    }
}

/// Some blocks of the activations of `x`, of `stride` blocks a token: `[block][token]` of `T` tokens.
///
/// # Safety
///
/// The CPU has the set of `R`, and `acts` has room for `T` tokens.
#[inline(always)]
unsafe fn lay_out<R: Rows, const F: usize, const T: usize>(
    acts: &mut [MaybeUninit<Act>; ACTS],
    x: Tokens<'_>,
    (stride, blocks): (usize, Range<usize>),
) {
    for t in 0..T {
        let to = acts.iter_mut().skip(t).step_by(T);
        if t >= x.count {
            to.take(blocks.len()).for_each(|act| _ = act.write(Act::ZERO));
            continue;
        }
        for (to, act) in to.zip(&x.acts[t * stride..][blocks.clone()]) {
            // SAFETY: the instruction set is the caller's.
            to.write(unsafe { Act::new::<R, F>(act) });
        }
    }
}

/// A register of rows of a run of blocks.
struct Part {
    /// Those of the group's first block here.
    quants: *const u8,
    /// Those of its span.
    scales: *const u8,
    /// `[block][token]`
    acts: *const Act,
    /// Which they are.
    blocks: Range<usize>,
    /// First row.
    row: usize,
}

impl Part {
    /// Takes the run's blocks into the sums of `count` tokens at `out`, `[token][row]`, which begin with the
    /// first block.
    ///
    /// # Safety
    ///
    /// The CPU has the set of `R`; the planes and the activations of `T` tokens hold the blocks.
    #[inline(always)]
    unsafe fn onto<R: Rows, const F: usize, const T: usize>(self, out: *mut f32, count: usize) {
        // SAFETY: as the caller's.
        unsafe {
            let mut acc = [R::splat(0.0); T];
            if self.blocks.start > 0 {
                unrolled!(T, |t| {
                    if t < count {
                        acc[t] = R::floats(out.add(16 * t));
                    }
                });
            }
            self.run::<R, F, T>(&mut acc);
            unrolled!(T, |t| {
                if t < count {
                    R::store(acc[t], out.add(16 * t));
                }
            });
        }
    }

    /// Takes the run's blocks into the sums of `T` tokens.
    ///
    /// # Safety
    ///
    /// As of [`Part::onto`].
    #[inline(always)]
    unsafe fn run<R: Rows, const F: usize, const T: usize>(&self, acc: &mut [R::Floats; T]) {
        // SAFETY: as the caller's.
        unsafe {
            for b in 0..self.blocks.len() {
                let acts = self.acts.add(b * T);
                let format = const { Format::ALL[F] };
                if cfg!(target_arch = "x86_64") && T == 1 && self.row == 0 {
                    self.ahead::<F>(b);
                }
                let w = unpacked::<R, F>(self.quants.add(b * format.quant_bytes() + 4 * self.row));
                let (levels, floor) = self.scale::<R, F>(b);
                unrolled!(T, |t| {
                    let act = acts.add(t);
                    let q = (&raw const (*act).q).cast::<i8>();
                    let d = R::splat((*act).d);
                    if F == const { Format::Q6_K as usize } {
                        let (x, y) = (R::sums((*act).start[0]), R::sums((*act).start[1]));
                        let x = R::half::<6>(x, [w[0], w[1], w[2], w[3]], q);
                        let y = R::half::<6>(y, [w[4], w[5], w[6], w[7]], q.add(16));
                        // Integers below 2^24: exact.
                        let sum = R::fma(R::float(y), levels[1], R::mul(R::float(x), levels[0]));
                        acc[t] = R::fma(sum, R::mul(floor, d), acc[t]);
                    } else {
                        let sum = match format.bits() {
                            4 => R::block::<4>(R::sums((*act).start[0]), w, q),
                            5 => R::block::<5>(R::sums((*act).start[0]), w, q),
                            _ => R::block::<8>(R::sums((*act).start[0]), w, q),
                        };
                        acc[t] = R::fma(R::float(sum), R::mul(levels[0], d), acc[t]);
                        if !matches!(format, Format::Q5_0 | Format::Q8_0) {
                            acc[t] = R::fma(floor, R::splat((*act).floor), acc[t]);
                        }
                    }
                });
            }
        }
    }

    /// What the sums of block `b` are multiplied with, and what its activations' are; of Q6_K the factors of
    /// the two halves, and that of both together.
    #[inline(always)]
    unsafe fn scale<R: Rows, const F: usize>(&self, b: usize) -> ([R::Floats; 2], R::Floats) {
        let (scales, row) = (self.scales, self.row);
        // SAFETY: as the caller's.
        unsafe {
            match const { Format::ALL[F] } {
                Format::Q5_0 | Format::Q8_0 => ([R::f16(scales.add(32 * b + 2 * row)); 2], R::splat(0.0)),
                Format::Q4_1 | Format::Q5_1 => {
                    let at = scales.add(64 * b + 2 * row);
                    ([R::f16(at); 2], R::f16(at.add(32)))
                }
                Format::Q4_K | Format::Q5_K => {
                    let (halves, at) = (scales.add(2 * row), scales.add(64 + 32 * b + row));
                    let level = R::mul(R::f16(halves), R::u8(at));
                    ([level; 2], R::mul(R::f16(halves.add(32)), R::u8(at.add(16))))
                }
                Format::Q6_K => {
                    let at = scales.add(32 + 32 * b + row);
                    ([R::i8(at), R::i8(at.add(16))], R::f16(scales.add(2 * row)))
                }
            }
        }
    }

    /// Prefetches what one token's kernel reads soon, as `simd::ahead` does for Q4_0.
    #[inline(always)]
    fn ahead<const F: usize>(&self, b: usize) {
        const FAR: usize = 4096;
        const NEAR: usize = 1024;
        let format = const { Format::ALL[F] };
        let bytes = format.quant_bytes();
        let quants = self.quants.wrapping_add(b * bytes);
        for line in 0..bytes / 64 {
            prefetch::<2>(quants.wrapping_add(FAR + 64 * line));
            prefetch::<1>(quants.wrapping_add(NEAR + 64 * line));
        }
        let each = format.scale_bytes() * BLOCK / format.span();
        let scales = self.scales.wrapping_add(b * each);
        prefetch::<2>(scales.wrapping_add(FAR / bytes * each));
        prefetch::<1>(scales.wrapping_add(NEAR / bytes * each));
    }
}

/// The integers of one block: columns `4v..` of each row in `[v]`.
#[inline(always)]
unsafe fn unpacked<R: Rows, const F: usize>(p: *const u8) -> [R::Bytes; 8] {
    let bits = const { Format::ALL[F].bits() };
    // SAFETY: as the caller's.
    unsafe {
        let nibble = R::byte(15);
        let mut w = [nibble; 8];
        if bits == 8 {
            unrolled!(8, |v| {
                let x = R::load(p.add(64 * v));
                w[v] = if R::SIGNED { x } else { R::xor(x, R::byte(128)) };
            });
            return w;
        }
        unrolled!(4, |v| {
            let x = R::load(p.add(64 * v));
            w[v] = R::and(x, nibble);
            w[4 + v] = R::and(R::right::<4>(x), nibble);
        });
        if bits == 5 {
            let (x, fifth) = (R::load(p.add(256)), R::byte(16));
            w[0] = R::or(w[0], R::and(R::left::<4>(x), fifth));
            w[1] = R::or(w[1], R::and(R::left::<3>(x), fifth));
            w[2] = R::or(w[2], R::and(R::left::<2>(x), fifth));
            w[3] = R::or(w[3], R::and(R::left::<1>(x), fifth));
            w[4] = R::or(w[4], R::and(x, fifth));
            w[5] = R::or(w[5], R::and(R::right::<1>(x), fifth));
            w[6] = R::or(w[6], R::and(R::right::<2>(x), fifth));
            w[7] = R::or(w[7], R::and(R::right::<3>(x), fifth));
        }
        if bits == 6 {
            unrolled!(2, |half| {
                let (x, upper) = (R::load(p.add(256 + 64 * half)), R::byte(48));
                let w = &mut w[4 * half..][..4];
                w[0] = R::or(w[0], R::and(R::left::<4>(x), upper));
                w[1] = R::or(w[1], R::and(R::left::<2>(x), upper));
                w[2] = R::or(w[2], R::and(x, upper));
                w[3] = R::or(w[3], R::and(R::right::<2>(x), upper));
            });
        }
        w
    }
}
