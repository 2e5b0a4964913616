//! The Q4_0 kernels: with `smlal`, with `sdot` and with `smmla`.
//!
//! A kernel takes sixteen rows as four quads. For one token all four stay in registers. For more tokens it takes one
//! quad at a time over a run of blocks, so that weights are unpacked once for all tokens. From four tokens on, `sdot`
//! and `smmla` read [tiles](ActTile) of four, laid out once for all rows of all matrices that read them.
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
use crate::quant::activations::{ActBlock, ActTile};
use std::arch::aarch64::*;
use std::array::from_fn;

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

/// How the tokens of a tile lie for an instruction.
trait Laid {
    /// The tile of one block of four tokens.
    fn of(acts: [&ActBlock; ActTile::TOKENS]) -> ActTile;

    /// Adds the sums of rows `4r..` in block `b` to `acc`, four tokens from each of the first `T / 4` of `tiles`, which
    /// go to the next block's. The order of sums is that of [`Laid::rows`].
    ///
    /// # Safety
    ///
    /// `r < 4`, the planes hold block `b`, the tiles can be read, and the CPU has the instructions.
    unsafe fn add<const T: usize>(
        w: Q4Group<'_>,
        at: (usize, usize),
        tiles: &mut [*const u8; TOKENS / 4],
        acc: &mut [float32x4_t; T],
    );

    /// From the tile's first byte to where the pointers of [`Laid::add`] stand.
    const BEFORE: usize;

    /// The sums of token `t`, of sixteen rows in their order.
    fn rows<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon;
}

/// One block of four tokens, as [`q4_i8mm_together`] reads it if `PAIRS`, else as [`q4_dot_together`] does.
pub fn laid<const PAIRS: bool>(acts: [&ActBlock; ActTile::TOKENS]) -> ActTile {
    if PAIRS { Pairs::of(acts) } else { Four::of(acts) }
}

/// Sixteen rows of each group, `T` tokens: `out[group][token]`, `stride` tokens in each.
///
/// # Safety
///
/// `w` has at most [`MOST_GROUPS`] groups, `tiles` is `[T / 4][w.blocks]`, `out` holds the first `T` of `stride` rows
/// for each group, and the CPU has the instructions of `L`.
#[inline(always)]
unsafe fn together<L: Laid, const T: usize>(
    w: Groups<'_>,
    tiles: *const ActTile,
    (out, stride): (*mut [f32; 16], usize),
) {
    const { assert!(T.is_multiple_of(4) && T <= TOKENS) };
    let mut acc = [[[vdupq_n_f32(0.0); T]; 4]; MOST_GROUPS];
    let acc = &mut acc[..w.groups];
    for first in (0..w.blocks).step_by(RUN) {
        let run = first..w.blocks.min(first + RUN);
        for (g, acc) in acc.iter_mut().enumerate() {
            let group = w.q4(g);
            for (r, acc) in acc.iter_mut().enumerate() {
                let mut sum = *acc;
                let mut from = from_fn(|i| {
                    tiles.wrapping_add(i * w.blocks + first).cast::<u8>().wrapping_sub(L::BEFORE)
                });
                for b in run.clone() {
                    L::add(group, (b, r), &mut from, &mut sum);
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

/// Four tokens for `sdot`: `start` has a token in all lanes; `q` the first sixteen columns of each token, then the
/// others; `d` one scale each, then nothing.
struct Four;

/// `sdot` of four tokens with the columns of a register.
macro_rules! four_dots {
    ($w:literal, $lane:literal) => {
        concat!(
            "sdot v16.4s, {",
            $w,
            ":v}.16b, v20.4b[",
            $lane,
            "]\n",
            "sdot v17.4s, {",
            $w,
            ":v}.16b, v21.4b[",
            $lane,
            "]\n",
            "sdot v18.4s, {",
            $w,
            ":v}.16b, v22.4b[",
            $lane,
            "]\n",
            "sdot v19.4s, {",
            $w,
            ":v}.16b, v23.4b[",
            $lane,
            "]",
        )
    };
}

/// Adds the quad's sums of four tokens, and moves on to the next tile. One piece of assembly: left to the compiler, the
/// loads of all tokens come first, registers do not suffice, and twelve tokens cost 64 instead of 54 instructions a
/// block and token. The registers are named because `ld1` of four wants neighbours.
///
/// # Safety
///
/// The CPU has dotprod, the tile can be read, and `acc` has four elements.
#[inline(always)]
unsafe fn dot_four(w: &Quad, tile: &mut *const u8, acc: &mut [float32x4_t]) {
    let [s0, s1, s2, s3] = acc else { unreachable!("invariant: four tokens") };
    std::arch::asm!(
        "ld1 {{v16.4s, v17.4s, v18.4s, v19.4s}}, [{tile}], #64",
        "ld1 {{v20.4s, v21.4s, v22.4s, v23.4s}}, [{tile}], #64",
        four_dots!("l0", "0"),
        four_dots!("l1", "1"),
        four_dots!("l2", "2"),
        four_dots!("l3", "3"),
        "ld1 {{v20.4s, v21.4s, v22.4s, v23.4s}}, [{tile}], #64",
        four_dots!("h0", "0"),
        four_dots!("h1", "1"),
        four_dots!("h2", "2"),
        four_dots!("h3", "3"),
        "ldr q20, [{tile}], #32",
        "fsub v16.4s, v16.4s, {bias:v}.4s",
        "fsub v17.4s, v17.4s, {bias:v}.4s",
        "fsub v18.4s, v18.4s, {bias:v}.4s",
        "fsub v19.4s, v19.4s, {bias:v}.4s",
        "fmul v21.4s, {scale:v}.4s, v20.s[0]",
        "fmul v22.4s, {scale:v}.4s, v20.s[1]",
        "fmul v23.4s, {scale:v}.4s, v20.s[2]",
        "fmul v20.4s, {scale:v}.4s, v20.s[3]",
        "fmla {s0:v}.4s, v16.4s, v21.4s",
        "fmla {s1:v}.4s, v17.4s, v22.4s",
        "fmla {s2:v}.4s, v18.4s, v23.4s",
        "fmla {s3:v}.4s, v19.4s, v20.4s",
        l0 = in(vreg) w.low[0], l1 = in(vreg) w.low[1], l2 = in(vreg) w.low[2], l3 = in(vreg) w.low[3],
        h0 = in(vreg) w.high[0], h1 = in(vreg) w.high[1], h2 = in(vreg) w.high[2], h3 = in(vreg) w.high[3],
        scale = in(vreg) w.scale, bias = in(vreg) vdupq_n_s32(BIAS), tile = inout(reg) *tile,
        out("v16") _, out("v17") _, out("v18") _, out("v19") _,
        out("v20") _, out("v21") _, out("v22") _, out("v23") _,
        s0 = inout(vreg) *s0, s1 = inout(vreg) *s1, s2 = inout(vreg) *s2, s3 = inout(vreg) *s3,
        options(pure, readonly, nostack, preserves_flags)
    );
}

impl Laid for Four {
    const BEFORE: usize = 0;

    fn of(acts: [&ActBlock; 4]) -> ActTile {
        let d = acts.map(|act| act.d);
        ActTile {
            start: acts.map(|act| [act.offset + BIAS; 4]),
            q: from_fn(|i| from_fn(|k| acts[i % 4].q[16 * (i / 4) + k])),
            d: [d, [0.0; 4]],
        }
    }

    #[inline(always)]
    unsafe fn add<const T: usize>(
        w: Q4Group<'_>,
        (b, r): (usize, usize),
        tiles: &mut [*const u8; TOKENS / 4],
        acc: &mut [float32x4_t; T],
    ) {
        let rows = quad(w, b, r);
        for (tile, acc) in tiles.iter_mut().zip(acc.chunks_exact_mut(4)) {
            dot_four(&rows, tile, acc);
        }
    }

    #[inline(always)]
    fn rows<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon {
        Neon(acc.map(|acc| acc[t]))
    }
}

/// With dotprod: groups of sixteen rows, `T` tokens, a multiple of four; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 | Neoverse N1 |
/// |-------:|-------------:|------------:|------------:|------------:|------------:|
/// |      4 |           65 |        13.6 |        27.1 |        13.6 |        27.1 |
/// |      8 |           57 |        12.3 |        24.5 |        12.3 |        24.5 |
/// |     12 |           54 |        11.9 |        23.7 |        11.9 |        23.7 |
///
/// # Safety
///
/// That of [`together`].
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot_together<const T: usize>(
    w: Groups<'_>,
    tiles: *const ActTile,
    out: (*mut [f32; 16], usize),
) {
    together::<Four, T>(w, tiles, out)
}

/// Two pairs of tokens for `smmla`: `start` has first, second, first, second of a pair, twice, because loads are cheaper
/// than moves; `q` columns `8k..` of a pair's first token, then of its second; `d` scales in the order of `start`, once.
struct Pairs;

/// Adds the sums of a pair of tokens, whose parts lie at these offsets; the last one ends the address.
macro_rules! pair {
    ([$start:literal, $q:literal, $q2:literal, $d:literal], $sx:literal, $sy:literal) => {
        concat!(
            "ldp {x:q}, {y:q}, [{tile}, #",
            $start,
            "]\n",
            "ldp {a:q}, {b:q}, [{tile}, #",
            $q,
            "]\n",
            "smmla {x:v}.4s, {t0:v}.16b, {a:v}.16b\n",
            "smmla {y:v}.4s, {b0:v}.16b, {a:v}.16b\n",
            "smmla {x:v}.4s, {t1:v}.16b, {b:v}.16b\n",
            "smmla {y:v}.4s, {b1:v}.16b, {b:v}.16b\n",
            "ldp {a:q}, {b:q}, [{tile}, #",
            $q2,
            "]\n",
            "smmla {x:v}.4s, {t2:v}.16b, {a:v}.16b\n",
            "smmla {y:v}.4s, {b2:v}.16b, {a:v}.16b\n",
            "smmla {x:v}.4s, {t3:v}.16b, {b:v}.16b\n",
            "smmla {y:v}.4s, {b3:v}.16b, {b:v}.16b\n",
            "ldr {b:q}, [{tile}, #",
            $d,
            "\n",
            "fsub {x:v}.4s, {x:v}.4s, {bias:v}.4s\n",
            "fsub {y:v}.4s, {y:v}.4s, {bias:v}.4s\n",
            "fmul {a:v}.4s, {td:v}.4s, {b:v}.4s\n",
            "fmul {b:v}.4s, {bd:v}.4s, {b:v}.4s\n",
            "fmla {",
            $sx,
            ":v}.4s, {x:v}.4s, {a:v}.4s\n",
            "fmla {",
            $sy,
            ":v}.4s, {y:v}.4s, {b:v}.4s",
        )
    };
}

impl Laid for Pairs {
    /// The second pair's scales move the pointer: a load can add to it what lies before what it loads.
    const BEFORE: usize = 16;

    fn of(acts: [&ActBlock; 4]) -> ActTile {
        let start = |i: usize| from_fn(|k| acts[2 * i + k % 2].offset + BIAS);
        ActTile {
            start: [start(0), start(0), start(1), start(1)],
            q: from_fn(|i| from_fn(|k| acts[i / 4 * 2 + k / 8].q[8 * (i % 4) + k % 8])),
            d: from_fn(|i| from_fn(|k| acts[2 * i + k % 2].d)),
        }
    }

    /// Each pair of tokens has two elements: rows 0 and 1 of the quad, each for both tokens, then rows 2 and 3.
    #[inline(always)]
    unsafe fn add<const T: usize>(
        w: Q4Group<'_>,
        (b, r): (usize, usize),
        tiles: &mut [*const u8; TOKENS / 4],
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
        for (tile, acc) in tiles.iter_mut().zip(acc.chunks_exact_mut(4)) {
            let [s0, s1, s2, s3] = acc else { unreachable!("invariant: four tokens") };
            std::arch::asm!(
                pair!(["16", "80", "112", "208]"], "s0", "s1"),
                pair!(["48", "144", "176", "224]!"], "s2", "s3"),
                t0 = in(vreg) top[0], t1 = in(vreg) top[1], t2 = in(vreg) top[2], t3 = in(vreg) top[3],
                b0 = in(vreg) bottom[0], b1 = in(vreg) bottom[1],
                b2 = in(vreg) bottom[2], b3 = in(vreg) bottom[3],
                td = in(vreg) top_d, bd = in(vreg) bottom_d, bias = in(vreg) bias,
                tile = inout(reg) *tile,
                x = out(vreg) _, y = out(vreg) _, a = out(vreg) _, b = out(vreg) _,
                s0 = inout(vreg) *s0, s1 = inout(vreg) *s1, s2 = inout(vreg) *s2, s3 = inout(vreg) *s3,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
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

/// With i8mm: groups of sixteen rows, `T` tokens, a multiple of four; see [`super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      4 |           59 |        11.1 |        22.1 |        11.1 |
/// |      8 |           48 |         9.0 |        18.0 |         9.0 |
/// |     16 |           42 |         8.0 |        16.0 |         8.0 |
///
/// One or two tokens take [`q4_dot`], for which nothing is laid out.
///
/// # Safety
///
/// That of [`together`].
#[target_feature(enable = "neon,dotprod,i8mm")]
pub unsafe fn q4_i8mm_together<const T: usize>(
    w: Groups<'_>,
    tiles: *const ActTile,
    out: (*mut [f32; 16], usize),
) {
    together::<Pairs, T>(w, tiles, out)
}
