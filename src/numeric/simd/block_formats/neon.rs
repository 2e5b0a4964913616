//! Four rows in a register of 128 bits: `smlal`, or `sdot` with dotprod.
//!
//! Cycles of the loops over blocks with `sdot`, for a block of 32 columns x 16 rows x 1 token, by the model of llvm-mca
//! 19 for Neoverse V2. (The model for N2 gives twice as many, as it does for Q4_0.)
//!
//! | tokens | Q4_0 | Q4_1 | Q5_1 | Q8_0 | Q4_K | Q5_K |
//! |---:|---:|---:|---:|---:|---:|---:|
//! | 1 | 22.1 | 25.9 | 45.0 | 18.3 | 31.9 | 51.0 |
//! | 8 | 12.3 | 15.3 | 17.5 | 12.6 | 15.8 | 18.7 |
//!
//! Tried placing fifth and sixth bits with `bsl`: LLVM knows which bits are zero and emits `and` and `orr` anyway.

use super::super::neon::{sdot, smlal, smull, widen_f16};
use super::rows::BlockKernel;
use std::arch::aarch64::*;

/// Four rows in a register; `DOT` selects dotprod.
pub struct FourRows<const DOT: bool>;

/// Adds the products of vectors of weights with four activations each to `$sums`.
///
/// Products are summed in i16 lanes, one for each of four columns. For 4 and 5 bits eight products fit
/// (8 * 31 * 127 = 31,496), for 6 bits four (4 * 63 * 127 = 32,004), for 8 bits two (2 * 128 * 127 = 32,512).
macro_rules! chain {
    ($sums:expr, [$w:expr, $a:expr] $([$more:expr, $b:expr])*) => {{
        let (mut top, mut bottom): (int16x8_t, int16x8_t);
        smull!(top, bottom, $w, $a);
        $(smlal!(top, bottom, $more, $b);)*
        // Rows 0, 1 and 2, 3: four column sums each.
        vaddq_s32($sums, vpaddq_s32(vpaddlq_s16(top), vpaddlq_s16(bottom)))
    }};
}

/// Broadcasts word `$lane` of the activations.
macro_rules! word {
    ($a:ident, $lane:literal) => {
        vdupq_laneq_s32::<$lane>(vreinterpretq_s32_s8($a))
    };
}

// SAFETY: NEON is part of every aarch64 target, and the CPU has dotprod if `DOT`; memory accesses are unaligned and
// stay within the trait's contract.
unsafe impl<const DOT: bool> BlockKernel for FourRows<DOT> {
    const ROWS: usize = 4;
    const SIGNED: bool = true;
    /// The bits of 1.5 * 2^23. A sum below 2^22 that starts from here and is read as a float is 1.5 * 2^23 plus the
    /// sum, so one exact subtraction converts it. `scvtf` runs on fewer pipes.
    const START: i32 = 0x4b40_0000;
    type Bytes = uint8x16_t;
    type Sums = int32x4_t;
    type Floats = float32x4_t;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> uint8x16_t {
        vld1q_u8(p)
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> uint8x16_t {
        vdupq_n_u8(x)
    }
    #[inline(always)]
    unsafe fn and(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        vandq_u8(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        vorrq_u8(a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        veorq_u8(a, b)
    }
    #[inline(always)]
    unsafe fn load_table(table: &[u8; 16]) -> uint8x16_t {
        vld1q_u8(table.as_ptr())
    }
    #[inline(always)]
    unsafe fn look_up(table: uint8x16_t, a: uint8x16_t) -> uint8x16_t {
        vqtbl1q_u8(table, a)
    }
    #[inline(always)]
    unsafe fn shift_left<const N: i32>(a: uint8x16_t) -> uint8x16_t {
        vshlq_n_u8::<N>(a)
    }
    #[inline(always)]
    unsafe fn shift_right<const N: i32>(a: uint8x16_t) -> uint8x16_t {
        vshrq_n_u8::<N>(a)
    }
    #[inline(always)]
    unsafe fn splat_sum(x: i32) -> int32x4_t {
        vdupq_n_s32(x)
    }
    #[inline(always)]
    unsafe fn dot_half_block<const BITS: usize>(
        sums: int32x4_t,
        w: [uint8x16_t; 4],
        q: *const i8,
    ) -> int32x4_t {
        let (a, mut sums) = (vld1q_s8(q), sums);
        if DOT {
            sdot!(sums, w[0], a, 0);
            sdot!(sums, w[1], a, 1);
            sdot!(sums, w[2], a, 2);
            sdot!(sums, w[3], a, 3);
            return sums;
        }
        if BITS == 8 {
            let sums = chain!(sums, [w[0], word!(a, 0)] [w[1], word!(a, 1)]);
            return chain!(sums, [w[2], word!(a, 2)] [w[3], word!(a, 3)]);
        }
        chain!(sums, [w[0], word!(a, 0)] [w[1], word!(a, 1)] [w[2], word!(a, 2)] [w[3], word!(a, 3)])
    }
    #[inline(always)]
    unsafe fn dot_block<const BITS: usize>(sums: int32x4_t, w: [uint8x16_t; 8], q: *const i8) -> int32x4_t {
        if !DOT && BITS <= 5 {
            let (a, b) = (vld1q_s8(q), vld1q_s8(q.add(16)));
            return chain!(sums,
                    [w[0], word!(a, 0)] [w[1], word!(a, 1)] [w[2], word!(a, 2)] [w[3], word!(a, 3)]
                    [w[4], word!(b, 0)] [w[5], word!(b, 1)] [w[6], word!(b, 2)] [w[7], word!(b, 3)]);
        }
        let sums = Self::dot_half_block::<BITS>(sums, [w[0], w[1], w[2], w[3]], q);
        Self::dot_half_block::<BITS>(sums, [w[4], w[5], w[6], w[7]], q.add(16))
    }
    #[inline(always)]
    unsafe fn sums_to_floats(sums: int32x4_t) -> float32x4_t {
        let bias = vdupq_n_f32(f32::from_bits(Self::START as u32));
        vsubq_f32(vreinterpretq_f32_s32(sums), bias)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }
    #[inline(always)]
    unsafe fn load_floats(p: *const f32) -> float32x4_t {
        vld1q_f32(p)
    }
    #[inline(always)]
    unsafe fn store(x: float32x4_t, p: *mut f32) {
        vst1q_f32(p, x)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> float32x4_t {
        widen_f16(vreinterpret_u16_u8(vld1_u8(p)))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> float32x4_t {
        let x = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(x))))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> float32x4_t {
        let x = vreinterpret_s8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(x))))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [float32x4_t; 2] {
        let x = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
        [vand_u8(x, vdup_n_u8(15)), vshr_n_u8::<4>(x)]
            .map(|x| vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(x)))))
    }
    #[inline(always)]
    unsafe fn load_exponents(p: *const u8) -> float32x4_t {
        let x = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
        let bits = vshlq_n_u32::<23>(vmovl_u16(vget_low_u16(vmovl_u8(x))));
        vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(1 << 22)))
    }
    #[inline(always)]
    unsafe fn load_minifloats(p: *const u8) -> float32x4_t {
        let x = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
        widen_f16(vget_low_u16(vshlq_n_u16::<7>(vmovl_u8(x))))
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    #[inline(always)]
    unsafe fn sum_bytes(q: *const i8) -> i32 {
        i32::from(vaddlvq_s8(vld1q_s8(q)))
    }
}
