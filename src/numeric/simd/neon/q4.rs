//! The Q4_0 kernels: with `smlal`, with `sdot` and with `smmla`.
//!
//! A kernel takes sixteen rows as four quads. For one token all four stay in registers. For more tokens it takes one
//! quad at a time over a run of blocks, so that weights are unpacked once for all tokens. From four tokens on, `sdot`
//! and `smmla` have the activations of a run laid out first, once for all groups of rows.
//!
//! The tables at the kernels give the cost of one block of 32 columns x 16 rows x 1 token: instructions of the loops
//! over blocks, and their cycles by the models of llvm-mca 19 for Neoverse V2 (Cortex-X3, the same
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

use super::super::groups::{Groups, MOST_GROUPS, Q4Group, QUANT_BYTES, SCALE_BYTES};
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
/// Tokens of the largest tile: with their sums and a quad's weights all registers are taken.
const TOKENS: usize = 16;

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
/// The planes hold `w.blocks` blocks, `activations` holds T rows of as many, `out` holds T rows, and when `DOT` the CPU
/// has dotprod and T is at most 2.
#[inline(always)]
unsafe fn quads<const T: usize, const DOT: bool>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
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
                    if DOT {
                        dot(&rows, [act(0), act(1)], &mut sum);
                    } else {
                        unrolled!(T, |t| { mul(&rows, act(t), &mut sum[t]) });
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

/// With dotprod: sixteen rows, one token or two; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      1 |          105 |        22.1 |        44.1 |        22.1 |
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot<const T: usize>(w: Q4Group<'_>, activations: *const ActBlock, out: *mut [f32; 16]) {
    quads::<T, true>(w, activations, out)
}

/// Activations of some tokens of one block, laid out for a kernel.
trait Laid: Copy {
    /// Tokens of one.
    const TOKENS: usize;

    /// Of the tokens whose block `t` gives.
    fn of<'a>(t: impl Fn(usize) -> &'a ActBlock) -> Self;

    /// Adds the sums of rows `4r..` in block `b` to `acc`; the order of sums is that of [`Laid::rows`].
    ///
    /// # Safety
    ///
    /// `r < 4`, the planes hold block `b`, `acts` holds `T` tokens, and the CPU has the instructions.
    unsafe fn add<const T: usize>(
        w: Q4Group<'_>,
        at: (usize, usize),
        acts: *const Self,
        acc: &mut [float32x4_t; T],
    );

    /// The sums of token `t`, of sixteen rows in their order.
    fn rows<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon;
}

/// Sixteen rows of each group, `T` tokens, whose activations are laid out once for all groups of a run of blocks:
/// `out[group][token]`, `stride` tokens in each.
///
/// # Safety
///
/// `w` has at most [`MOST_GROUPS`] groups, `activations` holds T rows of `w.blocks`, `out` holds the first `T` of
/// `stride` rows for each group, and the CPU has the instructions of `L`.
#[inline(always)]
unsafe fn together<L: Laid, const T: usize>(
    w: Groups<'_>,
    activations: *const ActBlock,
    (out, stride): (*mut [f32; 16], usize),
) {
    const { assert!(T.is_multiple_of(L::TOKENS) && T <= TOKENS) };
    let each = T / L::TOKENS;
    let mut laid = [const { MaybeUninit::<L>::uninit() }; RUN * TOKENS / 2];
    let laid = laid.as_mut_ptr().cast::<L>();
    let mut acc = [[[vdupq_n_f32(0.0); T]; 4]; MOST_GROUPS];
    let acc = &mut acc[..w.groups];
    for first in (0..w.blocks).step_by(RUN) {
        let run = RUN.min(w.blocks - first);
        for i in 0..each {
            let rows = activations.add(i * L::TOKENS * w.blocks + first);
            for b in 0..run {
                laid.add(b * each + i).write(L::of(|t| &*rows.add(t * w.blocks + b)));
            }
        }
        for (g, acc) in acc.iter_mut().enumerate() {
            let w = w.q4(g);
            for (r, acc) in acc.iter_mut().enumerate() {
                let mut sum = *acc;
                for b in 0..run {
                    L::add(w, (first + b, r), laid.add(b * each), &mut sum);
                }
                *acc = sum;
            }
        }
    }
    for (g, acc) in acc.iter().enumerate() {
        for t in 0..T {
            L::rows(acc, t).store(out.add(g * stride + t).cast());
        }
    }
}

/// Four tokens of one block, for `sdot`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Four {
    /// The first sixteen columns of each token, then the others.
    q: [[[i8; 16]; 4]; 2],
    /// [`BIAS`] plus the offset of each token, in all lanes.
    start: [[i32; 4]; 4],
    /// Scales.
    d: [f32; 4],
}

/// `sdot` of four tokens with the columns of a register.
macro_rules! four_dots {
    ($w:literal, $lane:literal) => {
        concat!(
            "sdot {x0:v}.4s, {",
            $w,
            ":v}.16b, {a0:v}.4b[",
            $lane,
            "]\n",
            "sdot {x1:v}.4s, {",
            $w,
            ":v}.16b, {a1:v}.4b[",
            $lane,
            "]\n",
            "sdot {x2:v}.4s, {",
            $w,
            ":v}.16b, {a2:v}.4b[",
            $lane,
            "]\n",
            "sdot {x3:v}.4s, {",
            $w,
            ":v}.16b, {a3:v}.4b[",
            $lane,
            "]",
        )
    };
}

/// Adds the quad's sums of four tokens. One piece of assembly: left to the compiler, the loads of all tokens come first,
/// registers do not suffice, and twelve tokens cost 64 instead of 58 instructions a block and token.
///
/// # Safety
///
/// The CPU has dotprod, `four` can be read, and `acc` has four elements.
#[inline(always)]
unsafe fn dot_four(w: &Quad, four: *const Four, acc: &mut [float32x4_t]) {
    let [s0, s1, s2, s3] = acc else { unreachable!("invariant: four tokens") };
    std::arch::asm!(
        "ldp {x0:q}, {x1:q}, [{four}, #128]",
        "ldp {x2:q}, {x3:q}, [{four}, #160]",
        "ldp {a0:q}, {a1:q}, [{four}]",
        "ldp {a2:q}, {a3:q}, [{four}, #32]",
        four_dots!("l0", "0"),
        four_dots!("l1", "1"),
        four_dots!("l2", "2"),
        four_dots!("l3", "3"),
        "ldp {a0:q}, {a1:q}, [{four}, #64]",
        "ldp {a2:q}, {a3:q}, [{four}, #96]",
        four_dots!("h0", "0"),
        four_dots!("h1", "1"),
        four_dots!("h2", "2"),
        four_dots!("h3", "3"),
        "ldr {a0:q}, [{four}, #192]",
        "fsub {x0:v}.4s, {x0:v}.4s, {bias:v}.4s",
        "fsub {x1:v}.4s, {x1:v}.4s, {bias:v}.4s",
        "fsub {x2:v}.4s, {x2:v}.4s, {bias:v}.4s",
        "fsub {x3:v}.4s, {x3:v}.4s, {bias:v}.4s",
        "fmul {a1:v}.4s, {scale:v}.4s, {a0:v}.s[0]",
        "fmul {a2:v}.4s, {scale:v}.4s, {a0:v}.s[1]",
        "fmul {a3:v}.4s, {scale:v}.4s, {a0:v}.s[2]",
        "fmul {a0:v}.4s, {scale:v}.4s, {a0:v}.s[3]",
        "fmla {s0:v}.4s, {x0:v}.4s, {a1:v}.4s",
        "fmla {s1:v}.4s, {x1:v}.4s, {a2:v}.4s",
        "fmla {s2:v}.4s, {x2:v}.4s, {a3:v}.4s",
        "fmla {s3:v}.4s, {x3:v}.4s, {a0:v}.4s",
        l0 = in(vreg) w.low[0], l1 = in(vreg) w.low[1], l2 = in(vreg) w.low[2], l3 = in(vreg) w.low[3],
        h0 = in(vreg) w.high[0], h1 = in(vreg) w.high[1], h2 = in(vreg) w.high[2], h3 = in(vreg) w.high[3],
        scale = in(vreg) w.scale, bias = in(vreg) vdupq_n_s32(BIAS), four = in(reg) four,
        x0 = out(vreg) _, x1 = out(vreg) _, x2 = out(vreg) _, x3 = out(vreg) _,
        a0 = out(vreg) _, a1 = out(vreg) _, a2 = out(vreg) _, a3 = out(vreg) _,
        s0 = inout(vreg) *s0, s1 = inout(vreg) *s1, s2 = inout(vreg) *s2, s3 = inout(vreg) *s3,
        options(pure, readonly, nostack, preserves_flags)
    );
}

impl Laid for Four {
    const TOKENS: usize = 4;

    #[inline(always)]
    fn of<'a>(t: impl Fn(usize) -> &'a ActBlock) -> Self {
        Self {
            q: from_fn(|half| from_fn(|i| from_fn(|k| t(i).q[16 * half + k]))),
            start: from_fn(|i| [t(i).offset + BIAS; 4]),
            d: from_fn(|i| t(i).d),
        }
    }

    #[inline(always)]
    unsafe fn add<const T: usize>(
        w: Q4Group<'_>,
        (b, r): (usize, usize),
        acts: *const Self,
        acc: &mut [float32x4_t; T],
    ) {
        let rows = quad(w, b, r);
        unrolled!(T / 4, |i| { dot_four(&rows, acts.add(i), &mut acc[4 * i..4 * i + 4]) });
    }

    #[inline(always)]
    fn rows<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon {
        Neon(acc.map(|acc| acc[t]))
    }
}

/// With dotprod: groups of sixteen rows, `T` tokens, a multiple of four; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      4 |           69 |        13.6 |        27.1 |        13.6 |
/// |      8 |           61 |        12.3 |        24.5 |        12.3 |
/// |     12 |           58 |        11.9 |        23.7 |        11.9 |
///
/// # Safety
///
/// That of [`together`].
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot_together<const T: usize>(
    w: Groups<'_>,
    activations: *const ActBlock,
    out: (*mut [f32; 16], usize),
) {
    together::<Four, T>(w, activations, out)
}

/// Two tokens of one block, for `smmla`. Written as words, so that the integer pipes do the work.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pair {
    /// Columns `8k..` of the first token, then of the second.
    q: [[u64; 2]; 4],
    /// [`BIAS`] plus the offsets of first, second, first, second. Twice, because loads are cheaper than moves.
    start: [[u64; 2]; 2],
    /// Scales in the same order.
    d: [u64; 2],
}

impl Laid for Pair {
    const TOKENS: usize = 2;

    #[inline(always)]
    fn of<'a>(t: impl Fn(usize) -> &'a ActBlock) -> Self {
        let (a, b) = (t(0), t(1));
        let word = |x: &ActBlock, i: usize| u64::from_ne_bytes(from_fn(|k| x.q[8 * i + k] as u8));
        let both = |a: u32, b: u32| [u64::from(a) | u64::from(b) << 32; 2];
        Self {
            q: from_fn(|i| [word(a, i), word(b, i)]),
            start: [both((a.offset + BIAS) as u32, (b.offset + BIAS) as u32); 2],
            d: both(a.d.to_bits(), b.d.to_bits()),
        }
    }

    /// Each pair of tokens has two elements: rows 0 and 1 of the quad, each for both tokens, then rows 2 and 3.
    #[inline(always)]
    unsafe fn add<const T: usize>(
        w: Q4Group<'_>,
        (b, r): (usize, usize),
        pairs: *const Self,
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
        let bias = vdupq_n_s32(BIAS);
        unrolled!(T / 2, |p| {
            let [x, y] = &mut acc[2 * p..2 * p + 2] else { unreachable!("invariant: two") };
            std::arch::asm!(
                "ldp {x:q}, {y:q}, [{pair}, #64]",
                "ldp {a:q}, {b:q}, [{pair}]",
                "smmla {x:v}.4s, {t0:v}.16b, {a:v}.16b",
                "smmla {y:v}.4s, {b0:v}.16b, {a:v}.16b",
                "smmla {x:v}.4s, {t1:v}.16b, {b:v}.16b",
                "smmla {y:v}.4s, {b1:v}.16b, {b:v}.16b",
                "ldp {a:q}, {b:q}, [{pair}, #32]",
                "smmla {x:v}.4s, {t2:v}.16b, {a:v}.16b",
                "smmla {y:v}.4s, {b2:v}.16b, {a:v}.16b",
                "smmla {x:v}.4s, {t3:v}.16b, {b:v}.16b",
                "smmla {y:v}.4s, {b3:v}.16b, {b:v}.16b",
                "ldr {b:q}, [{pair}, #96]",
                "fsub {x:v}.4s, {x:v}.4s, {bias:v}.4s",
                "fsub {y:v}.4s, {y:v}.4s, {bias:v}.4s",
                "fmul {a:v}.4s, {td:v}.4s, {b:v}.4s",
                "fmul {b:v}.4s, {bd:v}.4s, {b:v}.4s",
                "fmla {sx:v}.4s, {x:v}.4s, {a:v}.4s",
                "fmla {sy:v}.4s, {y:v}.4s, {b:v}.4s",
                t0 = in(vreg) top[0], t1 = in(vreg) top[1], t2 = in(vreg) top[2], t3 = in(vreg) top[3],
                b0 = in(vreg) bottom[0], b1 = in(vreg) bottom[1],
                b2 = in(vreg) bottom[2], b3 = in(vreg) bottom[3],
                td = in(vreg) top_d, bd = in(vreg) bottom_d, bias = in(vreg) bias, pair = in(reg) pairs.add(p),
                x = out(vreg) _, y = out(vreg) _, a = out(vreg) _, b = out(vreg) _,
                sx = inout(vreg) *x, sy = inout(vreg) *y,
                options(pure, readonly, nostack, preserves_flags)
            );
        });
    }

    #[inline(always)]
    fn rows<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon {
        let half = |r: usize| {
            let [top, bottom] = [acc[r][t & !1], acc[r][t | 1]];
            // SAFETY: NEON is part of every aarch64 target.
            unsafe { if t & 1 == 0 { vuzp1q_f32(top, bottom) } else { vuzp2q_f32(top, bottom) } }
        };
        Neon(from_fn(half))
    }
}

/// With i8mm: groups of sixteen rows, `T` tokens, an even number; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      4 |           61 |        11.1 |        22.1 |        11.1 |
/// |      8 |           50 |         9.0 |        18.0 |         9.0 |
/// |     16 |           44 |         8.0 |        16.0 |         8.0 |
///
/// Laying out a pair is 23 instructions, once for four groups: 3 more a block and token. One or two tokens take
/// [`q4_dot`], for which nothing is laid out.
///
/// # Safety
///
/// That of [`together`].
#[target_feature(enable = "neon,dotprod,i8mm")]
pub unsafe fn q4_i8mm_together<const T: usize>(
    w: Groups<'_>,
    activations: *const ActBlock,
    out: (*mut [f32; 16], usize),
) {
    together::<Pair, T>(w, activations, out)
}
