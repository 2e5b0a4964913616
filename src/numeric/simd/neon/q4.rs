//! The Q4_0 kernels: with `smlal`, with `sdot` and with `smmla`.
//!
//! A kernel takes sixteen rows as four quads. For one token all four stay in registers. For more tokens it takes one
//! quad at a time over a run of blocks, so that weights are unpacked once for all tokens.
//!
//! The tables at the kernels give the cost of one block of 32 columns x 16 rows x 1 token: instructions of the loops
//! over blocks (and of the pairing), and their cycles by the models of llvm-mca 19 for Neoverse V2 (Cortex-X3, the same
//! core, has no model), Cortex-A710 (which uses the model of Neoverse N2) and Neoverse V1:
//!
//! ```text
//! cargo rustc --release --package antigravity-numeric --target aarch64-unknown-linux-gnu -- --emit asm -C
//! symbol-mangling-version=v0 llvm-mca-19 -mtriple=aarch64 -mattr=+v8.6a -mcpu=neoverse-v2 -iterations=200 <the loop>
//! ```
//!
//! Nothing was measured on Arm hardware. A decoded token of Llama-3.2-1B takes 2,413,568 such blocks: with base NEON 442
//! million instructions and 111, 197 and 102 million cycles (V2, A710, V1), with dotprod 253 million and 53, 106 and 53.
//! i8mm needs two tokens, so it decodes with dotprod.

use super::super::groups::{Q4Group, QUANT_BYTES, SCALE_BYTES};
use super::super::lanes::Lanes;
use super::super::unrolled;
use super::{Neon, widen_f16};
use crate::quant::activations::ActBlock;
use std::arch::aarch64::*;
use std::array::from_fn;
use std::mem::MaybeUninit;

/// Blocks that one quad goes through before the next: their weights and activations stay in the
/// first-level cache.
const RUN: usize = 16;
/// Tokens of the largest tile.
const TOKENS: usize = 8;

/// The bits of 1.5 * 2^23. A block's sum is below 2^22. If it starts from here and is then read as a float, it is
/// 1.5 * 2^23 plus the sum, so one exact subtraction converts it. `scvtf` runs on fewer pipes.
const BIAS: i32 = 0x4b40_0000;

/// A sum that started from [`BIAS`], as floats.
#[inline(always)]
fn float(isum: int32x4_t) -> float32x4_t {
    // SAFETY: NEON is part of every aarch64 target.
    unsafe { vsubq_f32(vreinterpretq_f32_s32(isum), vdupq_n_f32(f32::from_bits(BIAS as u32))) }
}

/// Four rows of one block: columns `4v..` of each in `low[v]`, `16 + 4v..` in `high[v]`, and their scales.
struct Quad {
    low: [uint8x16_t; 4],
    high: [uint8x16_t; 4],
    scale: float32x4_t,
}

/// Rows `4r..` of block `b`.
///
/// # Safety
///
/// `r < 4`, and the planes hold block `b`.
#[inline(always)]
unsafe fn quad(w: Q4Group<'_>, b: usize, r: usize) -> Quad {
    let quants = w.quants.as_ptr().add(b * QUANT_BYTES + r * 16);
    let scales = w.scales.as_ptr().add(b * SCALE_BYTES + r * 8);
    let raw: [uint8x16_t; 4] = from_fn(|v| vld1q_u8(quants.add(v * 64)));
    let mask = vdupq_n_u8(15);
    Quad {
        low: raw.map(|x| vandq_u8(x, mask)),
        high: raw.map(|x| vshrq_n_u8::<4>(x)),
        scale: widen_f16(vreinterpret_u16_u8(vld1_u8(scales))),
    }
}

/// `top` and `bottom` become the products of the low and the high eight bytes of two vectors.
macro_rules! smull {
    ($top:ident, $bottom:ident, $w:expr, $a:expr) => {
        std::arch::asm!(
            "smull {x:v}.8h, {w:v}.8b, {a:v}.8b",
            "smull2 {y:v}.8h, {w:v}.16b, {a:v}.16b",
            x = out(vreg) $top, y = lateout(vreg) $bottom, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

/// Adds such products to `top` and `bottom`.
macro_rules! smlal {
    ($top:ident, $bottom:ident, $w:expr, $a:expr) => {
        std::arch::asm!(
            "smlal {x:v}.8h, {w:v}.8b, {a:v}.8b",
            "smlal2 {y:v}.8h, {w:v}.16b, {a:v}.16b",
            x = inout(vreg) $top, y = inout(vreg) $bottom, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

/// Adds the quad's sums of one block to `acc`, with `smlal`.
///
/// Products are summed in i16: eight of at most 15 * 127 in each lane, 15,240, so none overflows.
#[inline(always)]
unsafe fn mul(w: &Quad, act: &ActBlock, acc: &mut float32x4_t) {
    let half = |i| vreinterpretq_s32_s8(vld1q_s8(act.q.as_ptr().add(i)));
    // Rows 0, 1 and 2, 3: four column sums each.
    let (mut top, mut bottom): (int16x8_t, int16x8_t);
    let a = half(0);
    smull!(top, bottom, w.low[0], vdupq_laneq_s32::<0>(a));
    smlal!(top, bottom, w.low[1], vdupq_laneq_s32::<1>(a));
    smlal!(top, bottom, w.low[2], vdupq_laneq_s32::<2>(a));
    smlal!(top, bottom, w.low[3], vdupq_laneq_s32::<3>(a));
    let a = half(16);
    smlal!(top, bottom, w.high[0], vdupq_laneq_s32::<0>(a));
    smlal!(top, bottom, w.high[1], vdupq_laneq_s32::<1>(a));
    smlal!(top, bottom, w.high[2], vdupq_laneq_s32::<2>(a));
    smlal!(top, bottom, w.high[3], vdupq_laneq_s32::<3>(a));
    let sums = vpaddq_s32(vpaddlq_s16(top), vpaddlq_s16(bottom));
    let isum = vaddq_s32(sums, vdupq_n_s32(act.offset + BIAS));
    *acc = vfmaq_f32(*acc, float(isum), vmulq_n_f32(w.scale, act.d));
}

/// `acc + sum of four products` in each 32-bit lane; `lane` of `a` is broadcast.
macro_rules! sdot {
    ($acc:expr, $w:expr, $a:expr, $lane:literal) => {
        std::arch::asm!(
            concat!("sdot {acc:v}.4s, {w:v}.16b, {a:v}.4b[", $lane, "]"),
            acc = inout(vreg) $acc, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

pub(in super::super) use {sdot, smlal, smull};

/// Adds the quad's sums of one block to the accumulators of `N` tokens, with `sdot`, side by side.
///
/// # Safety
///
/// The CPU has dotprod.
#[inline(always)]
unsafe fn dot<const N: usize>(w: &Quad, acts: [&ActBlock; N], acc: &mut [float32x4_t]) {
    let half = |i| acts.map(|a| vld1q_s8(a.q.as_ptr().add(i)));
    let mut isum = acts.map(|a| vdupq_n_s32(a.offset + BIAS));
    macro_rules! step {
        ($w:expr, $a:ident, $lane:literal) => {
            for (isum, a) in isum.iter_mut().zip($a) {
                sdot!(*isum, $w, a, $lane);
            }
        };
    }
    let a = half(0);
    step!(w.low[0], a, 0);
    step!(w.low[1], a, 1);
    step!(w.low[2], a, 2);
    step!(w.low[3], a, 3);
    let a = half(16);
    step!(w.high[0], a, 0);
    step!(w.high[1], a, 1);
    step!(w.high[2], a, 2);
    step!(w.high[3], a, 3);
    for ((acc, isum), act) in acc.iter_mut().zip(isum).zip(acts) {
        *acc = vfmaq_f32(*acc, float(isum), vmulq_n_f32(w.scale, act.d));
    }
}

/// Sixteen rows, `T` tokens, with `sdot` or `smlal`.
///
/// # Safety
///
/// The planes hold `w.blocks` blocks, `activations` holds T rows of as many, `out` holds T rows, and the CPU has
/// dotprod when `DOT`.
#[inline(always)]
unsafe fn quads<const T: usize, const DOT: bool>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
    const { assert!((T <= 2 || T.is_multiple_of(4)) && T <= TOKENS) };
    let mut acc = [[vdupq_n_f32(0.0); T]; 4];
    if T == 1 {
        for b in 0..w.blocks {
            for (r, acc) in acc.iter_mut().enumerate() {
                let (rows, act) = (quad(w, b, r), &*activations.add(b));
                if DOT { dot(&rows, [act], acc) } else { mul(&rows, act, &mut acc[0]) }
            }
        }
    } else {
        for first in (0..w.blocks).step_by(RUN) {
            for (r, acc) in acc.iter_mut().enumerate() {
                let mut sum = *acc;
                for b in first..w.blocks.min(first + RUN) {
                    let rows = quad(w, b, r);
                    let act = |t| &*activations.add(t * w.blocks + b);
                    if !DOT {
                        unrolled!(T, |t| { mul(&rows, act(t), &mut sum[t]) });
                    } else if T == 2 {
                        dot(&rows, [act(0), act(1)], &mut sum);
                    } else {
                        unrolled!(T / 4, |i| {
                            let act = [act(4 * i), act(4 * i + 1), act(4 * i + 2), act(4 * i + 3)];
                            dot(&rows, act, &mut sum[4 * i..]);
                        });
                    }
                }
                *acc = sum;
            }
        }
    }
    for t in 0..T {
        Neon(acc.map(|acc| acc[t])).store(out.add(t).cast());
    }
}

/// Baseline: sixteen rows, `T` tokens; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      1 |          183 |        46.1 |        81.5 |        42.1 |
/// |      4 |          165 |        39.1 |        68.2 |        35.1 |
#[target_feature(enable = "neon")]
pub unsafe fn q4<const T: usize>(w: Q4Group<'_>, activations: *const ActBlock, out: *mut [f32; 16]) {
    quads::<T, false>(w, activations, out)
}

/// With dotprod: sixteen rows, `T` tokens; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      1 |          105 |        22.1 |        44.1 |        22.1 |
/// |      4 |           88 |        13.6 |        27.1 |        13.6 |
/// |      8 |           80 |        12.3 |        24.5 |        12.3 |
///
/// Twelve tokens at once took 24.7 cycles on Cortex-A710, eight and four take 25.4: not worth a longer loop.
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot<const T: usize>(w: Q4Group<'_>, activations: *const ActBlock, out: *mut [f32; 16]) {
    quads::<T, true>(w, activations, out)
}

/// `acc + w * a^T` for 2 x 8 bytes each: lane `2 i + j` has row `i` of `w` times row `j` of `a`.
macro_rules! smmla {
    ($acc:ident, $w:expr, $a:expr) => {
        std::arch::asm!(
            "smmla {acc:v}.4s, {w:v}.16b, {a:v}.16b",
            acc = inout(vreg) $acc, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

/// Two tokens of one block, for `smmla`. Written as words, so that the integer pipes do the work.
#[derive(Clone, Copy)]
struct Pair {
    /// Columns `8k..` of the first token, then of the second.
    q: [[u64; 2]; 4],
    /// [`BIAS`] plus the offsets of first, second, first, second. Twice, because loads are cheaper than moves.
    start: [[u64; 2]; 2],
    /// Scales in the same order.
    d: [u64; 2],
}

impl Pair {
    #[inline(always)]
    fn new(a: &ActBlock, b: &ActBlock) -> Self {
        let word = |x: &ActBlock, i: usize| u64::from_ne_bytes(from_fn(|k| x.q[8 * i + k] as u8));
        let both = |a: u32, b: u32| [u64::from(a) | u64::from(b) << 32; 2];
        Self {
            q: from_fn(|i| [word(a, i), word(b, i)]),
            start: [both((a.offset + BIAS) as u32, (b.offset + BIAS) as u32); 2],
            d: both(a.d.to_bits(), b.d.to_bits()),
        }
    }
}

/// Adds the sums of rows `4r..` in block `b` to `acc`, with `smmla`. Each pair of tokens has two elements: rows 0 and 1
/// of the quad, each for both tokens, then rows 2 and 3.
///
/// # Safety
///
/// `r < 4`, the planes hold block `b`, `pairs` holds T / 2 pairs, and the CPU has i8mm.
#[inline(always)]
unsafe fn tiles<const T: usize>(
    w: Q4Group<'_>,
    (b, r): (usize, usize),
    pairs: *const Pair,
    acc: &mut [float32x4_t; T],
) {
    let quants = w.quants.as_ptr().add(b * QUANT_BYTES + r * 16);
    let scales = w.scales.as_ptr().add(b * SCALE_BYTES + r * 8);
    let raw: [uint32x4_t; 4] = from_fn(|v| vld1q_u32(quants.add(v * 64).cast()));
    let mask = vdupq_n_u8(15);
    // Eight consecutive columns of two rows: low nibbles have columns 0 and 8, high ones 16 and 24.
    let split = |x0, x1| {
        let (x0, x1) = (vreinterpretq_u8_u32(x0), vreinterpretq_u8_u32(x1));
        [vandq_u8(x0, mask), vandq_u8(x1, mask), vshrq_n_u8::<4>(x0), vshrq_n_u8::<4>(x1)]
    };
    let top = split(vzip1q_u32(raw[0], raw[1]), vzip1q_u32(raw[2], raw[3]));
    let bottom = split(vzip2q_u32(raw[0], raw[1]), vzip2q_u32(raw[2], raw[3]));
    let scale = widen_f16(vreinterpret_u16_u8(vld1_u8(scales)));
    let (top_d, bottom_d) = (vzip1q_f32(scale, scale), vzip2q_f32(scale, scale));
    unrolled!(T / 2, |p| {
        let act = &*pairs.add(p);
        let (mut x, mut y) =
            (vld1q_s32(act.start[0].as_ptr().cast()), vld1q_s32(act.start[1].as_ptr().cast()));
        for k in 0..4 {
            let a = vld1q_s8(act.q[k].as_ptr().cast());
            smmla!(x, top[k], a);
            smmla!(y, bottom[k], a);
        }
        let d = vld1q_f32(act.d.as_ptr().cast());
        acc[2 * p] = vfmaq_f32(acc[2 * p], float(x), vmulq_f32(top_d, d));
        acc[2 * p + 1] = vfmaq_f32(acc[2 * p + 1], float(y), vmulq_f32(bottom_d, d));
    });
}

/// With i8mm: sixteen rows, `T` tokens, an even number; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      4 |           71 |        13.3 |        24.2 |        14.0 |
/// |      8 |           60 |        11.2 |        20.2 |        11.9 |
///
/// Two tokens take 17.4, 32.4 and 18.1 cycles, [`q4_dot`] takes 16.2, 32.2 and 16.2. Twelve
/// put sums on the stack: 22.0 on Cortex-A710, where eight and four take 21.5.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub unsafe fn q4_i8mm<const T: usize>(w: Q4Group<'_>, activations: *const ActBlock, out: *mut [f32; 16]) {
    const { assert!(T.is_multiple_of(2) && T <= TOKENS) };
    let mut pairs = [const { MaybeUninit::<Pair>::uninit() }; RUN * TOKENS / 2];
    let pairs = pairs.as_mut_ptr().cast::<Pair>();
    let mut acc = [[vdupq_n_f32(0.0); T]; 4];
    for first in (0..w.blocks).step_by(RUN) {
        let run = RUN.min(w.blocks - first);
        for p in 0..T / 2 {
            let token = |t| activations.add(t * w.blocks + first);
            let (a, b) = (token(2 * p), token(2 * p + 1));
            for block in 0..run {
                pairs.add(block * (T / 2) + p).write(Pair::new(&*a.add(block), &*b.add(block)));
            }
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            let mut sum = *acc;
            for b in 0..run {
                tiles(w, (first + b, r), pairs.add(b * (T / 2)), &mut sum);
            }
            *acc = sum;
        }
    }
    for p in 0..T / 2 {
        let (top, bottom) = (acc.map(|acc| acc[2 * p]), acc.map(|acc| acc[2 * p + 1]));
        let row = out.add(2 * p);
        Neon(from_fn(|r| vuzp1q_f32(top[r], bottom[r]))).store(row.cast());
        Neon(from_fn(|r| vuzp2q_f32(top[r], bottom[r]))).store(row.add(1).cast());
    }
}
