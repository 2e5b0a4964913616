//! The kernels of Q4_0 with `smlal`, `sdot` and `smmla`; those with the last two compute IQ4_NL and IQ4_XS too.
//!
//! A kernel computes sixteen rows as four quads. For one token all four stay in registers. For more tokens it computes
//! one quad at a time over a run of blocks, so that weights are unpacked once for all tokens. From four tokens on,
//! `sdot` and `smmla` read [tiles] of four tokens, interleaved once for all rows of all matrices that read them.
//!
//! The tables of the kernels give the cost of one block of 32 columns x 16 rows x 1 token: instructions of the loops
//! over blocks, and their cycles by the models of llvm-mca 19 for Neoverse V2 (Cortex-X3, the same core, has no model),
//! Cortex-A710 (which uses the model of Neoverse N2) and Neoverse V1:
//!
//! ```text
//! cargo rustc --release --package antigravity-numeric --target aarch64-unknown-linux-gnu -- --emit asm -C
//! symbol-mangling-version=v0 llvm-mca-19 -mtriple=aarch64 -mattr=+v8.6a -mcpu=neoverse-v2 -iterations=200 <the loop>
//! ```
//!
//! Nothing was measured on Arm hardware. A decoded token of Llama-3.2-1B takes 2,413,568 such blocks: with base NEON
//! 442 million instructions and 111, 197 and 102 million cycles (V2, A710, V1), with dotprod 245 million and 53, 106
//! and 53. i8mm needs two tokens, so it decodes with dotprod.

mod tiles;

pub use tiles::{interleave_block, q4_dot_groups, q4_i8mm_groups};

use super::super::block_formats::{FourRows, load_scales};
use super::super::groups::{Q4, Q4Group, QUANT_BYTES, level_table};
use super::super::lanes::Lanes;
use super::super::unrolled;
use super::Neon;
use crate::quant::activations::ActBlock;
use std::arch::aarch64::*;
use std::array::{from_fn, from_mut};

/// Blocks computed for one quad before the next; their weights and activations stay in the first-level cache.
const RUN: usize = 16;

/// The bits of 1.5 * 2^23. A block's sum is below 2^22. If it starts from here and is then read as a float, it is
/// 1.5 * 2^23 plus the sum, so one exact subtraction converts it. `scvtf` runs on fewer pipes.
const BIAS: i32 = 0x4b40_0000;

/// Converts sums that started from [`BIAS`] to floats.
#[inline(always)]
fn sums_to_floats(isum: int32x4_t) -> float32x4_t {
    // SAFETY: NEON is part of every aarch64 target.
    unsafe { vsubq_f32(vreinterpretq_f32_s32(isum), vdupq_n_f32(f32::from_bits(BIAS as u32))) }
}

/// Four rows of one block: columns `4v..` of each in `low[v]`, `16 + 4v..` in `high[v]`, and their scales.
struct Quad {
    low: [uint8x16_t; 4],
    high: [uint8x16_t; 4],
    scale: float32x4_t,
}

/// Replaces nibbles by their levels of [`level_table`].
#[inline(always)]
unsafe fn look_up<const F: usize>(nibbles: uint8x16_t) -> uint8x16_t {
    match const { level_table::<F>() } {
        Some(table) => vqtbl1q_u8(vld1q_u8(table.as_ptr()), nibbles),
        None => nibbles,
    }
}

/// Loads rows `4r..` of block `b`.
///
/// # Safety
///
/// `r < 4`, and the planes hold block `b`.
#[inline(always)]
unsafe fn load_quad<const F: usize>(w: Q4Group<'_>, b: usize, r: usize) -> Quad {
    let quants = w.quants.as_ptr().add(b * QUANT_BYTES + r * 16);
    let raw: [uint8x16_t; 4] = from_fn(|v| vld1q_u8(quants.add(v * 64)));
    let mask = vdupq_n_u8(15);
    Quad {
        low: raw.map(|x| look_up::<F>(vandq_u8(x, mask))),
        high: raw.map(|x| look_up::<F>(vshrq_n_u8::<4>(x))),
        scale: load_scales::<FourRows<true>, F>(w.scales.as_ptr(), 4 * r, b).d,
    }
}

/// Sets `top` and `bottom` to the products of the low and the high eight bytes of two vectors.
macro_rules! smull {
    ($top:ident, $bottom:ident, $w:expr, $a:expr) => {
        std::arch::asm!(
            "smull {x:v}.8h, {w:v}.8b, {a:v}.8b",
            "smull2 {y:v}.8h, {w:v}.16b, {a:v}.16b",
            x = out(vreg) $top, y = lateout(vreg) $bottom, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

/// Adds the products of the low and the high eight bytes of two vectors to `top` and `bottom`.
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
unsafe fn add_block_smlal(w: &Quad, act: &ActBlock, acc: &mut float32x4_t) {
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
    *acc = vfmaq_f32(*acc, sums_to_floats(isum), vmulq_n_f32(w.scale, act.d));
}

/// Adds the sum of four products to each 32-bit lane of `acc`; `lane` of `a` is broadcast.
macro_rules! sdot {
    ($acc:expr, $w:expr, $a:expr, $lane:literal) => {
        std::arch::asm!(
            concat!("sdot {acc:v}.4s, {w:v}.16b, {a:v}.4b[", $lane, "]"),
            acc = inout(vreg) $acc, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

pub(in super::super) use {sdot, smlal, smull};

/// A block of activations in registers.
struct ActRegisters {
    /// Initial value of its sums.
    start: int32x4_t,
    q: [int8x16_t; 2],
    d: f32,
}

impl ActRegisters {
    #[inline(always)]
    fn load(act: &ActBlock) -> Self {
        // SAFETY: NEON is part of every aarch64 target, and both halves are read within the block.
        unsafe {
            let half = |i| vld1q_s8(act.q.as_ptr().add(i));
            Self { start: vdupq_n_s32(act.offset + BIAS), q: [half(0), half(16)], d: act.d }
        }
    }
}

/// Adds the sums of one block of `Q` quads to the accumulators of `T` tokens each with `sdot`, interleaved.
///
/// # Safety
///
/// The CPU has dotprod.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "unrolled over several arrays at once")]
unsafe fn add_blocks_sdot<const Q: usize, const T: usize>(
    w: [Quad; Q],
    acts: &[ActRegisters; T],
    acc: &mut [[float32x4_t; T]; Q],
) {
    let mut isum = [from_fn::<_, T, _>(|t| acts[t].start); Q];
    macro_rules! step {
        ($half:ident, $v:literal, $i:literal, $lane:literal) => {
            for q in 0..Q {
                for t in 0..T {
                    sdot!(isum[q][t], w[q].$half[$v], acts[t].q[$i], $lane);
                }
            }
        };
    }
    step!(low, 0, 0, 0);
    step!(low, 1, 0, 1);
    step!(low, 2, 0, 2);
    step!(low, 3, 0, 3);
    step!(high, 0, 1, 0);
    step!(high, 1, 1, 1);
    step!(high, 2, 1, 2);
    step!(high, 3, 1, 3);
    for q in 0..Q {
        for t in 0..T {
            acc[q][t] = vfmaq_f32(acc[q][t], sums_to_floats(isum[q][t]), vmulq_n_f32(w[q].scale, acts[t].d));
        }
    }
}

/// Adds the sums of block `b` to those of sixteen rows with `sdot`. Two quads are interleaved, since in-order cores
/// would wait for each product of a single one.
///
/// # Safety
///
/// The planes hold block `b`, and the CPU has dotprod.
#[inline(always)]
unsafe fn add_block_sdot<const F: usize, const T: usize>(
    w: Q4Group<'_>,
    b: usize,
    acts: [&ActBlock; T],
    acc: &mut [[float32x4_t; T]; 4],
) {
    let (acts, acc) = (acts.map(ActRegisters::load), acc.as_chunks_mut::<2>().0);
    unrolled!(2, |p| {
        add_blocks_sdot([load_quad::<F>(w, b, 2 * p), load_quad::<F>(w, b, 2 * p + 1)], &acts, &mut acc[p]);
        // A barrier for loads: more rows at once would need more registers than there are.
        std::arch::asm!("", options(nostack, preserves_flags));
    });
}

/// Multiplies sixteen rows with `T` tokens, with `sdot` or `smlal`.
///
/// # Safety
///
/// The planes hold `w.blocks` blocks, `activations` holds T rows of as many, `out` holds T rows, and if `DOT` the CPU
/// has dotprod and T is at most 2. Without it, `F` is Q4_0: other levels would overflow.
#[inline(always)]
unsafe fn multiply_rows<const F: usize, const T: usize, const DOT: bool>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
    let mut acc = [[vdupq_n_f32(0.0); T]; 4];
    let acts = |b: usize| from_fn(|t| &*activations.add(t * w.blocks + b));
    if T == 1 && DOT {
        // Two blocks at a time.
        let even = w.blocks / 2 * 2;
        for b in (0..even).step_by(2) {
            add_block_sdot::<F, T>(w, b, acts(b), &mut acc);
            add_block_sdot::<F, T>(w, b + 1, acts(b + 1), &mut acc);
        }
        if even < w.blocks {
            add_block_sdot::<F, T>(w, even, acts(even), &mut acc);
        }
    } else if T == 1 {
        for b in 0..w.blocks {
            for (r, acc) in acc.iter_mut().enumerate() {
                add_block_smlal(&load_quad::<F>(w, b, r), &*activations.add(b), &mut acc[0]);
            }
        }
    } else {
        for first in (0..w.blocks).step_by(RUN) {
            for (r, acc) in acc.iter_mut().enumerate() {
                let mut sum = *acc;
                for b in first..w.blocks.min(first + RUN) {
                    let (rows, acts) = (load_quad::<F>(w, b, r), acts(b));
                    if DOT {
                        add_blocks_sdot([rows], &acts.map(ActRegisters::load), from_mut(&mut sum));
                    } else {
                        unrolled!(T, |t| { add_block_smlal(&rows, acts[t], &mut sum[t]) });
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

/// Multiplies sixteen rows with `T` tokens, with base NEON; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      1 |          183 |        46.1 |        81.5 |        42.1 |
/// |      4 |          165 |        39.1 |        68.2 |        35.1 |
#[target_feature(enable = "neon")]
pub unsafe fn q4<const T: usize>(w: Q4Group<'_>, activations: *const ActBlock, out: *mut [f32; 16]) {
    multiply_rows::<Q4, T, false>(w, activations, out)
}

/// Multiplies sixteen rows of format `F` with one or two tokens, with dotprod; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      1 |        101.5 |        21.9 |        43.8 |        21.9 |
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot<const F: usize, const T: usize>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
    multiply_rows::<F, T, true>(w, activations, out)
}
