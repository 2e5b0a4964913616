//! Products with tiles of four tokens, interleaved once for all rows of all matrices that read them.

use super::super::super::block_formats::{FourRows, load_scales};
use super::super::super::groups::{Groups, MOST_GROUPS, Q4Group, QUANT_BYTES};
use super::super::super::lanes::Lanes;
use super::super::Neon;
use super::{BIAS, Quad, RUN, load_quad, look_up};
use crate::quant::activations::{ActBlock, ActTile};
use std::arch::aarch64::*;
use std::array::from_fn;

/// Maximum tokens at once: their sums and a quad's weights use all registers.
const TOKENS: usize = 16;

/// The layout of a tile's tokens for an instruction.
trait TileLayout {
    /// Interleaves one block of four tokens.
    fn interleave(acts: [&ActBlock; ActTile::TOKENS]) -> ActTile;

    /// Adds the sums of rows `4r..` in block `b` to `acc`, four tokens from each of the first `T / 4` of `tiles`, which
    /// are advanced to the next block. [`TileLayout::row_sums`] reads the sums in their order.
    ///
    /// # Safety
    ///
    /// `r < 4`, the planes hold block `b`, the tiles can be read, and the CPU has the instructions.
    unsafe fn add_block<const F: usize, const T: usize>(
        w: Q4Group<'_>,
        at: (usize, usize),
        tiles: &mut [*const u8; TOKENS / 4],
        acc: &mut [float32x4_t; T],
    );

    /// Bytes by which the pointers of [`TileLayout::add_block`] precede the tile's first byte.
    const BYTES_BEFORE_TILE: usize;

    /// Returns the sums of token `t`, of sixteen rows in their order.
    fn row_sums<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon;
}

/// Interleaves one block of four tokens, for [`q4_i8mm_groups`] if `I8MM`, else for [`q4_dot_groups`].
pub fn interleave_block<const I8MM: bool>(acts: [&ActBlock; ActTile::TOKENS]) -> ActTile {
    if I8MM { SmmlaTile::interleave(acts) } else { SdotTile::interleave(acts) }
}

/// Multiplies sixteen rows of each group with `T` tokens, in format `F`: `out[group][token]`, `stride` tokens in each.
///
/// # Safety
///
/// `w` has at most [`MOST_GROUPS`] groups, `tiles` is `[T / 4][w.blocks]`, `out` holds the first `T` of `stride` rows
/// for each group, and the CPU has the instructions of `L`.
#[inline(always)]
unsafe fn multiply_groups<L: TileLayout, const F: usize, const T: usize>(
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
                    tiles.wrapping_add(i * w.blocks + first).cast::<u8>().wrapping_sub(L::BYTES_BEFORE_TILE)
                });
                for b in run.clone() {
                    L::add_block::<F, T>(group, (b, r), &mut from, &mut sum);
                }
                *acc = sum;
            }
        }
    }
    for (g, acc) in acc.iter().enumerate() {
        for t in 0..T {
            L::row_sums(acc, t).store(out.add(g * stride + t).cast());
        }
    }
}

/// Four tokens for `sdot`: `start` has one token in all lanes; `q` has the first sixteen columns of each token, then
/// the others; `d` has one scale per token, then zeros.
struct SdotTile;

/// Emits `sdot` of four tokens with the columns of a register.
macro_rules! sdot_four_tokens {
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

/// Adds the quad's sums of four tokens and advances to the next tile. One block of assembly: the compiler would load
/// all tokens first and run out of registers, so that twelve tokens cost 64 instead of 54 instructions per block and
/// token. The registers are named because `ld1` of four needs consecutive ones.
///
/// # Safety
///
/// The CPU has dotprod, the tile can be read, and `acc` has four elements.
#[inline(always)]
unsafe fn sdot_four(w: &Quad, tile: &mut *const u8, acc: &mut [float32x4_t]) {
    let [s0, s1, s2, s3] = acc else { unreachable!("invariant: four tokens") };
    std::arch::asm!(
        "ld1 {{v16.4s, v17.4s, v18.4s, v19.4s}}, [{tile}], #64",
        "ld1 {{v20.4s, v21.4s, v22.4s, v23.4s}}, [{tile}], #64",
        sdot_four_tokens!("l0", "0"),
        sdot_four_tokens!("l1", "1"),
        sdot_four_tokens!("l2", "2"),
        sdot_four_tokens!("l3", "3"),
        "ld1 {{v20.4s, v21.4s, v22.4s, v23.4s}}, [{tile}], #64",
        sdot_four_tokens!("h0", "0"),
        sdot_four_tokens!("h1", "1"),
        sdot_four_tokens!("h2", "2"),
        sdot_four_tokens!("h3", "3"),
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

impl TileLayout for SdotTile {
    const BYTES_BEFORE_TILE: usize = 0;

    fn interleave(acts: [&ActBlock; 4]) -> ActTile {
        let d = acts.map(|act| act.d);
        ActTile {
            start: acts.map(|act| [act.offset + BIAS; 4]),
            q: from_fn(|i| from_fn(|k| acts[i % 4].q[16 * (i / 4) + k])),
            d: [d, [0.0; 4]],
        }
    }

    #[inline(always)]
    unsafe fn add_block<const F: usize, const T: usize>(
        w: Q4Group<'_>,
        (b, r): (usize, usize),
        tiles: &mut [*const u8; TOKENS / 4],
        acc: &mut [float32x4_t; T],
    ) {
        let rows = load_quad::<F>(w, b, r);
        for (tile, acc) in tiles.iter_mut().zip(acc.chunks_exact_mut(4)) {
            sdot_four(&rows, tile, acc);
        }
    }

    #[inline(always)]
    fn row_sums<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon {
        Neon(acc.map(|acc| acc[t]))
    }
}

/// Multiplies groups of sixteen rows with `T` tokens, a multiple of four, with dotprod; see
/// [`super::super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 | Neoverse N1 |
/// |-------:|-------------:|------------:|------------:|------------:|------------:|
/// |      4 |           65 |        13.6 |        27.1 |        13.6 |        27.1 |
/// |      8 |           57 |        12.3 |        24.5 |        12.3 |        24.5 |
/// |     12 |           54 |        11.9 |        23.7 |        11.9 |        23.7 |
///
/// # Safety
///
/// See [`multiply_groups`].
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot_groups<const F: usize, const T: usize>(
    w: Groups<'_>,
    tiles: *const ActTile,
    out: (*mut [f32; 16], usize),
) {
    multiply_groups::<SdotTile, F, T>(w, tiles, out)
}

/// Two pairs of tokens for `smmla`: `start` has first, second, first, second of a pair, twice, because loads are
/// cheaper than moves; `q` has columns `8k..` of a pair's first token, then of its second; `d` has scales in the order
/// of `start`, once.
struct SmmlaTile;

/// Adds the sums of a pair of tokens, whose parts are at these offsets; the last one includes the end of the address.
macro_rules! smmla_pair {
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

impl TileLayout for SmmlaTile {
    /// The load of the second pair's scales advances the pointer by its own offset.
    const BYTES_BEFORE_TILE: usize = 16;

    fn interleave(acts: [&ActBlock; 4]) -> ActTile {
        let start = |i: usize| from_fn(|k| acts[2 * i + k % 2].offset + BIAS);
        ActTile {
            start: [start(0), start(0), start(1), start(1)],
            q: from_fn(|i| from_fn(|k| acts[i / 4 * 2 + k / 8].q[8 * (i % 4) + k % 8])),
            d: from_fn(|i| from_fn(|k| acts[2 * i + k % 2].d)),
        }
    }

    /// Each pair of tokens has two elements: rows 0 and 1 of the quad, each for both tokens, then rows 2 and 3.
    #[inline(always)]
    unsafe fn add_block<const F: usize, const T: usize>(
        w: Q4Group<'_>,
        (b, r): (usize, usize),
        tiles: &mut [*const u8; TOKENS / 4],
        acc: &mut [float32x4_t; T],
    ) {
        let quants = w.quants.as_ptr().add(b * QUANT_BYTES + r * 16);
        let raw: [uint32x4_t; 4] = from_fn(|v| vld1q_u32(quants.add(v * 64).cast()));
        let mask = vdupq_n_u8(15);
        // Eight consecutive columns of two rows: low nibbles have columns 0 and 8, high ones 16 and 24.
        let split = |x0, x1| {
            let (x0, x1) = (vreinterpretq_u8_u32(x0), vreinterpretq_u8_u32(x1));
            [vandq_u8(x0, mask), vandq_u8(x1, mask), vshrq_n_u8::<4>(x0), vshrq_n_u8::<4>(x1)]
                .map(|x| look_up::<F>(x))
        };
        let top = split(vzip1q_u32(raw[0], raw[1]), vzip1q_u32(raw[2], raw[3]));
        let bottom = split(vzip2q_u32(raw[0], raw[1]), vzip2q_u32(raw[2], raw[3]));
        let scale = load_scales::<FourRows<true>, F>(w.scales.as_ptr(), 4 * r, b).d;
        let (top_d, bottom_d) = (vzip1q_f32(scale, scale), vzip2q_f32(scale, scale));
        let bias = vdupq_n_s32(BIAS);
        for (tile, acc) in tiles.iter_mut().zip(acc.chunks_exact_mut(4)) {
            let [s0, s1, s2, s3] = acc else { unreachable!("invariant: four tokens") };
            std::arch::asm!(
                smmla_pair!(["16", "80", "112", "208]"], "s0", "s1"),
                smmla_pair!(["48", "144", "176", "224]!"], "s2", "s3"),
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
    fn row_sums<const T: usize>(acc: &[[float32x4_t; T]; 4], t: usize) -> Neon {
        let half = |r: usize| {
            let [top, bottom] = [acc[r][t & !1], acc[r][t | 1]];
            // SAFETY: NEON is part of every aarch64 target.
            unsafe { if t & 1 == 0 { vuzp1q_f32(top, bottom) } else { vuzp2q_f32(top, bottom) } }
        };
        Neon(from_fn(half))
    }
}

/// Multiplies groups of sixteen rows with `T` tokens, a multiple of four, with i8mm; see
/// [`super::super::super::products::multiply`].
///
/// | tokens | instructions | Neoverse V2 | Cortex-A710 | Neoverse V1 |
/// |-------:|-------------:|------------:|------------:|------------:|
/// |      4 |           59 |        11.1 |        22.1 |        11.1 |
/// |      8 |           48 |         9.0 |        18.0 |         9.0 |
/// |     16 |           42 |         8.0 |        16.0 |         8.0 |
///
/// One or two tokens use [`q4_dot`], which needs no interleaving.
///
/// # Safety
///
/// See [`multiply_groups`].
#[target_feature(enable = "neon,dotprod,i8mm")]
pub unsafe fn q4_i8mm_groups<const F: usize, const T: usize>(
    w: Groups<'_>,
    tiles: *const ActTile,
    out: (*mut [f32; 16], usize),
) {
    multiply_groups::<SmmlaTile, F, T>(w, tiles, out)
}
