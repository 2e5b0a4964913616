//! The product kernel for all formats and instruction sets. It takes sixteen rows, some tokens and [`RUN`] blocks at a
//! time.

use super::super::unrolled;
use super::rows::BlockKernel;
use crate::quant::activations::ActBlock;
use crate::quant::format::{BlockScales, Format, ScaleKind};
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
    /// See [`add_block`].
    start: [i32; 2],
}

impl PreparedAct {
    const ZERO: Self = Self { q: [0; BLOCK], d: 0.0, start: [0; 2] };

    #[inline(always)]
    unsafe fn new<R: BlockKernel, const F: usize>(act: &ActBlock) -> Self {
        let format = const { Format::ALL[F] };
        let sum = -act.offset / 8;
        let first = if format.has_half_scales() { R::sum_bytes(act.q.as_ptr()) } else { sum };
        let start = match format.scale_kind() {
            ScaleKind::Minimum => [(act.d * sum as f32).to_bits() as i32, 0],
            ScaleKind::BlockMinimums => [(-(act.d * sum as f32)).to_bits() as i32, 0],
            ScaleKind::HalfMinimums => [first, sum - first].map(|sum| (sum as f32).to_bits() as i32),
            _ => [first, sum - first].map(|sum| R::START - zero_point::<R, F>() * sum),
        };
        Self { q: act.q, d: act.d, start }
    }
}

/// Zero point of the bytes that [`unpack`] returns.
#[inline(always)]
pub fn zero_point<R: BlockKernel, const F: usize>() -> i32 {
    let format = const { Format::ALL[F] };
    if R::SIGNED && format.weight_bits() == 8 { 0 } else { format.zero_point() }
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
            let scales = load_scales::<R, F>(self.scales, self.row, b);
            unrolled!(T, |t| {
                let act = acts.add(t);
                let q = (&raw const (*act).q).cast::<i8>();
                acc[t] = add_block::<R, F>(acc[t], &w, &scales, (q, (*act).d, (*act).start));
            });
        }
    }
}

/// Adds a block of a token to the sums of the rows of a register, given the activations' integers, their scale, and
/// the initial values of the sums of the two halves. The sum of a whole block starts from the first. In formats with a
/// minimum, whose zero point is 0, they are bits of floats: the factor of the block's minimums, or the sums of the
/// activations of the halves.
///
/// # Safety
///
/// The CPU has the set of `R`; `q` holds 32 activations.
#[inline(always)]
pub(super) unsafe fn add_block<R: BlockKernel, const F: usize>(
    acc: R::Floats,
    w: &[R::Bytes; 8],
    scales: &BlockScales<R::Floats>,
    (q, d, start): (*const i8, f32, [i32; 2]),
) -> R::Floats {
    let format = const { Format::ALL[F] };
    let of_sums = |start: i32| R::splat_sum(if format.has_minimum() { R::START } else { start });
    let factor = R::mul(scales.d, R::splat(d));
    let float = |bits: i32| R::splat(f32::from_bits(bits as u32));
    if format.has_half_scales() {
        let (low, high) = ([w[0], w[1], w[2], w[3]], [w[4], w[5], w[6], w[7]]);
        let (x, y) = match format.weight_bits() {
            4 | 5 => (
                R::dot_half_block::<5>(of_sums(start[0]), low, q),
                R::dot_half_block::<5>(of_sums(start[1]), high, q.add(16)),
            ),
            6 => (
                R::dot_half_block::<6>(of_sums(start[0]), low, q),
                R::dot_half_block::<6>(of_sums(start[1]), high, q.add(16)),
            ),
            _ => (
                R::dot_half_block::<8>(of_sums(start[0]), low, q),
                R::dot_half_block::<8>(of_sums(start[1]), high, q.add(16)),
            ),
        };
        let x = R::mul(R::sums_to_floats(x), scales.halves[0]);
        let sum = R::fma(R::sums_to_floats(y), scales.halves[1], x);
        let acc = R::fma(sum, factor, acc);
        if format.has_minimum() {
            // Integers: exact.
            let x = R::mul(scales.minimums[0], float(start[0]));
            let minimum = R::fma(scales.minimums[1], float(start[1]), x);
            return R::fma(minimum, R::mul(scales.minimum, R::splat(-d)), acc);
        }
        return acc;
    }
    let sum = match format.weight_bits() {
        4 => R::dot_block::<4>(of_sums(start[0]), *w, q),
        5 => R::dot_block::<5>(of_sums(start[0]), *w, q),
        _ => R::dot_block::<8>(of_sums(start[0]), *w, q),
    };
    let acc = R::fma(R::sums_to_floats(sum), factor, acc);
    if format.has_minimum() { R::fma(scales.minimum, float(start[0]), acc) } else { acc }
}

/// Loads the scales of block `b`; those that the format lacks are zero, and minimums are not negated. `scales` are those
/// of a run's first block, from which `b` counts, `row` is the first row of the register.
///
/// # Safety
///
/// The CPU has the set of `R`; `scales` holds those of block `b`.
#[inline(always)]
pub unsafe fn load_scales<R: BlockKernel, const F: usize>(
    scales: *const u8,
    row: usize,
    b: usize,
) -> BlockScales<R::Floats> {
    let (format, zeros) = (const { Format::ALL[F] }, [R::splat(0.0); 2]);
    let halves = scales.add(b * BLOCK / format.scale_span() * format.scale_bytes() + 2 * row);
    let at = scales.add(format.block_scales_at(b) + row);
    let d = if format.half_bytes() > 0 { R::load_f16(halves) } else { R::splat(1.0) };
    let factor = const { Format::ALL[F].scale_factor() };
    let d = if factor == 1.0 { d } else { R::mul(d, R::splat(factor)) };
    let minimum = if format.has_minimum() { R::load_f16(halves.add(32)) } else { zeros[0] };
    let plain = BlockScales { d, halves: zeros, minimum, minimums: zeros };
    match format.scale_kind() {
        ScaleKind::Plain | ScaleKind::Minimum => plain,
        ScaleKind::Blocks => BlockScales { d: R::mul(d, R::load_i8(at)), ..plain },
        ScaleKind::BlockMinimums => BlockScales {
            d: R::mul(d, R::load_u8(at)),
            minimum: R::mul(minimum, R::load_u8(at.add(16))),
            ..plain
        },
        ScaleKind::Halves => BlockScales { halves: [R::load_i8(at), R::load_i8(at.add(16))], ..plain },
        ScaleKind::HalfMinimums => {
            let ([x, min_x], [y, min_y]) = (R::load_nibbles(at), R::load_nibbles(at.add(16)));
            BlockScales { halves: [x, y], minimums: [min_x, min_y], ..plain }
        }
        ScaleKind::Exponents => BlockScales { d: R::mul(d, R::load_exponents(at)), ..plain },
        ScaleKind::Minifloats => {
            BlockScales { halves: [R::load_minifloats(at), R::load_minifloats(at.add(16))], ..plain }
        }
    }
}

/// Unpacks the weights of one block, [`zero_point`] added: element `v` has columns `4v..4v + 4` of each row.
///
/// # Safety
///
/// The CPU has the set of `R`; `p` holds the block's quants, from the register's first row on.
#[inline(always)]
pub unsafe fn unpack<R: BlockKernel, const F: usize>(p: *const u8) -> [R::Bytes; 8] {
    let format = const { Format::ALL[F] };
    let bits = format.stored_bits();
    let mut w = [R::splat_byte(0); 8];
    if bits == 8 {
        unrolled!(8, |v| {
            let x = R::load(p.add(64 * v));
            w[v] = if R::SIGNED { x } else { R::xor(x, R::splat_byte(128)) };
        });
        return w;
    }
    if bits & 4 != 0 {
        let nibble = R::splat_byte(15);
        unrolled!(4, |v| {
            let x = R::load(p.add(64 * v));
            w[v] = R::and(x, nibble);
            w[4 + v] = R::and(shift_left::<R>(x, -4), nibble);
        });
    }
    if bits & 2 != 0 {
        let (p, at) = (p.add(64 * (bits & 4)), (bits & 4) as i32);
        unrolled!(2, |half| {
            let (x, two) = (R::load(p.add(64 * half)), R::splat_byte(3 << at));
            unrolled!(4, |v| {
                w[4 * half + v] = R::or(w[4 * half + v], R::and(shift_left::<R>(x, at - 2 * v as i32), two));
            });
        });
    }
    if bits & 1 != 0 {
        let (p, at) = (p.add(64 * (bits & 6)), (bits & 6) as i32);
        let (x, one) = (R::load(p), R::splat_byte(1 << at));
        unrolled!(8, |v| {
            w[v] = R::or(w[v], R::and(shift_left::<R>(x, at - v as i32), one));
        });
    }
    if let Some(levels) = const { Format::ALL[F].code_levels() } {
        let zero_point = zero_point::<R, F>();
        let table = R::load_table(&levels.map(|level| (i32::from(level) + zero_point) as u8));
        unrolled!(8, |v| { w[v] = R::look_up(table, w[v]) });
    }
    w
}

/// Shifts bytes by a number of bits that is known where this is inlined, to the right if it is negative. Bits of a
/// neighbour may come in.
#[inline(always)]
unsafe fn shift_left<R: BlockKernel>(x: R::Bytes, by: i32) -> R::Bytes {
    macro_rules! shifts {
        ($($n:literal)*) => {
            match by {
                $(_ if by == $n => R::shift_left::<$n>(x), _ if by == -$n => R::shift_right::<$n>(x),)*
                _ => x,
            }
        };
    }
    shifts!(1 2 3 4 5 6 7)
}
