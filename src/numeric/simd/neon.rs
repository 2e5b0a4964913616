//! NEON: sixteen lanes in four registers, and the kernels of Q4_0.
//!
//! Kernels for SVE2 or SME would be further modules, each with a variant of [`super::Isa`]; `smmla` on longer vectors
//! could read the pairs of tokens of `q4` in the existing layout.

mod q4;

pub use q4::{interleave_block, q4, q4_dot, q4_dot_groups, q4_i8mm_groups};
pub(super) use q4::{sdot, smlal, smull};

use super::lanes::Lanes;
use std::arch::aarch64::*;
use std::array::from_fn;
use std::mem::MaybeUninit;

/// Lanes 0-3, 4-7, 8-11 and 12-15.
#[derive(Clone, Copy)]
pub struct Neon([float32x4_t; 4]);

/// Converts sixteen unsigned bytes to floats and subtracts `bias - 2^23`. In the low bits of 2^23 the bytes form floats
/// already, and an exact subtraction removes the 2^23. `scvtf` runs on fewer pipes.
#[inline(always)]
unsafe fn widen_u8(x: uint8x16_t, bias: f32) -> Neon {
    let exponent = vdupq_n_u16(0x4b00);
    let (a, b) = (vmovl_u8(vget_low_u8(x)), vmovl_high_u8(x));
    let quads =
        [vzip1q_u16(a, exponent), vzip2q_u16(a, exponent), vzip1q_u16(b, exponent), vzip2q_u16(b, exponent)];
    Neon(quads.map(|q| vsubq_f32(vreinterpretq_f32_u16(q), vdupq_n_f32(bias))))
}

/// Widens four f16 in the low half of a register exactly.
#[inline(always)]
pub(super) unsafe fn widen_f16(x: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    std::arch::asm!("fcvtl {d:v}.4s, {s:v}.4h", d = lateout(vreg) wide, s = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    wide
}

/// Widens the four f16 in the high half of a register exactly.
#[inline(always)]
unsafe fn widen_high_f16(x: uint16x8_t) -> float32x4_t {
    let wide: float32x4_t;
    std::arch::asm!("fcvtl2 {d:v}.4s, {s:v}.8h", d = lateout(vreg) wide, s = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    wide
}

/// Rounds four floats to f16, nearest even.
#[inline(always)]
unsafe fn narrow_f16(x: float32x4_t) -> uint16x4_t {
    let narrow: uint16x4_t;
    std::arch::asm!("fcvtn {d:v}.4h, {s:v}.4s", d = lateout(vreg) narrow, s = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    narrow
}

/// Sums of eight rows and four queries: `[query][row / 4]`.
type Eight = [[float32x4_t; 2]; 4];

#[inline(always)]
unsafe fn add_eight(a: Eight, b: Eight) -> Eight {
    from_fn(|q| from_fn(|i| vaddq_f32(a[q][i], b[q][i])))
}

/// Hides a value from the optimiser.
macro_rules! hidden {
    ($x:expr) => {{
        let mut x = $x;
        std::arch::asm!("/* {} */", inout(reg) x, options(pure, nomem, nostack, preserves_flags));
        x
    }};
}

/// Computes one lane of [`Lanes::dots_of_four`] and those 4, 8 and 12 after it, for eight rows: so many sums stay in
/// registers.
#[inline(always)]
unsafe fn four_lanes<const HD: usize>(rows: *const f32, queries: *const [f32; 4]) -> Eight {
    let lane = |lane: usize| {
        // Hidden: otherwise it is addressed from the first lane, out of reach of two-register loads.
        let (rows, queries) = (hidden!(rows.add(HD * lane)), queries.add(HD / 16 * lane));
        let mut sums = [[vdupq_n_f32(0.0); 2]; 4];
        for e in 0..HD / 16 {
            let of_queries = vld1q_f32(queries.add(e).cast());
            for i in 0..2 {
                let of_rows = vld1q_f32(rows.add(16 * e + 4 * i));
                macro_rules! add {
                    ($q:literal) => {
                        // The first product is not added to zero, so a zero may be negative.
                        sums[$q][i] = match e {
                            0 => vmulq_laneq_f32::<$q>(of_rows, of_queries),
                            _ => vfmaq_laneq_f32::<$q>(sums[$q][i], of_rows, of_queries),
                        }
                    };
                }
                add!(0);
                add!(1);
                add!(2);
                add!(3);
            }
        }
        sums
    };
    add_eight(add_eight(lane(0), lane(8)), add_eight(lane(4), lane(12)))
}

// SAFETY: NEON is part of every aarch64 target; memory accesses are unaligned and stay within the trait's contract.
unsafe impl Lanes for Neon {
    const BY_ELEMENT: bool = true;
    type PartialSums = float32x4_t;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Neon([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Neon(from_fn(|i| vld1q_f32(p.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        let [a, b] = [p, p.add(16)].map(|p| vreinterpretq_u16_u8(vld1q_u8(p)));
        let low = |x| widen_f16(vget_low_u16(x));
        Neon([low(a), widen_high_f16(a), low(b), widen_high_f16(b)])
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        Neon(from_fn(|i| {
            let x = vreinterpret_u16_u8(vld1_u8(p.add(8 * i)));
            vreinterpretq_f32_u32(vshll_n_u16::<16>(x))
        }))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // Flipping the sign bit adds 128, which makes the bytes unsigned.
        widen_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)), 8_388_736.0)
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        let x = vld1q_u8(p);
        let low = vandq_u8(x, vdupq_n_u8(15));
        (widen_u8(low, 8_388_608.0), widen_u8(vshrq_n_u8::<4>(x), 8_388_608.0))
    }
    #[inline(always)]
    unsafe fn load_q4(p: *const u8, scale: Self) -> (Self, Self) {
        // The 8 is subtracted together with the 2^23.
        let (x, wide) = (vld1q_u8(p), |x| widen_u8(x, 8_388_616.0).mul(scale));
        (wide(vandq_u8(x, vdupq_n_u8(15))), wide(vshrq_n_u8::<4>(x)))
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self {
        Neon([widen_f16(vdup_n_u16(p.cast::<u16>().read_unaligned())); 4])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        (0..4).for_each(|i| vst1q_f32(p.add(4 * i), self.0[i]))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        (0..4).for_each(|i| vst1_u8(p.add(8 * i), vreinterpret_u8_u16(narrow_f16(self.0[i]))))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        let q = self.0.map(|x| vmovn_s32(vcvtnq_s32_f32(x)));
        let low = vmovn_s16(vcombine_s16(q[0], q[1]));
        let high = vmovn_s16(vcombine_s16(q[2], q[3]));
        vst1q_s8(p, vcombine_s8(low, high));
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Neon(from_fn(|i| vfmaq_f32(c.0[i], self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn fma_one<const I: i32>(self, b: *const f32, c: Self) -> Self {
        // The compiler loads the four once for all their uses.
        let b = vld1q_f32(b);
        Neon(from_fn(|i| vfmaq_laneq_f32::<I>(c.0[i], self.0[i], b)))
    }
    #[inline(always)]
    unsafe fn dots_of_four<const HD: usize>(
        rows: &[[f32; 16]; HD],
        queries: &[[f32; 4]; HD],
        to: [*mut f32; 4],
    ) {
        for half in 0..2 {
            let rows = rows.as_ptr().cast::<f32>().add(8 * half);
            // Sums of the first four lanes, and of all even lanes.
            let (mut four, mut even) = (MaybeUninit::<Eight>::uninit(), MaybeUninit::<Eight>::uninit());
            for lane in [0, 2, 1, 3] {
                // Hidden: otherwise the compiler unrolls the loop.
                let lane = hidden!(lane);
                let at = HD / 16 * lane;
                let mut sums = four_lanes::<HD>(rows.add(16 * at), queries.as_ptr().add(at));
                if lane < 2 {
                    four.write(sums);
                    continue;
                }
                sums = add_eight(four.assume_init(), sums);
                if lane == 2 {
                    even.write(sums);
                    continue;
                }
                sums = add_eight(even.assume_init(), sums);
                for (sums, to) in sums.into_iter().zip(to) {
                    vst1q_f32(to.add(8 * half), sums[0]);
                    vst1q_f32(to.add(8 * half + 4), sums[1]);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        Neon(from_fn(|i| vaddq_f32(self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        Neon(from_fn(|i| vsubq_f32(self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        Neon(from_fn(|i| vmulq_f32(self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        Neon(from_fn(|i| vdivq_f32(self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        Neon(from_fn(|i| vmaxq_f32(self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        Neon(from_fn(|i| vminq_f32(self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Neon(self.0.map(|x| vabsq_f32(x)))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Neon(self.0.map(|x| vrndnq_f32(x)))
    }
    #[inline(always)]
    unsafe fn pow2(n: Self) -> Self {
        Neon(n.0.map(|n| {
            let n = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(n))
        }))
    }
    #[inline(always)]
    unsafe fn where_ge(self, x: Self, limit: Self) -> Self {
        Neon(from_fn(|i| {
            let mask = vcgeq_f32(x.0[i], limit.0[i]);
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(self.0[i]), mask))
        }))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let v4 = self.fold();
        let v2 = vadd_f32(vget_low_f32(v4), vget_high_f32(v4));
        vget_lane_f32::<0>(v2) + vget_lane_f32::<1>(v2)
    }
    #[inline(always)]
    unsafe fn fold(self) -> float32x4_t {
        let [a, b, c, d] = self.0;
        vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d))
    }
    #[inline(always)]
    unsafe fn folded_sums(rows: &[float32x4_t; 16]) -> Self {
        // 4 -> 2: lanes (0+2, 1+3) of two rows next to each other.
        let two = |r: usize| {
            let [a, b] = [rows[r], rows[r + 1]].map(|row| vreinterpretq_f64_f32(row));
            let (low, high) = (vzip1q_f64(a, b), vzip2q_f64(a, b));
            vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
        };
        Neon(from_fn(|i| vpaddq_f32(two(4 * i), two(4 * i + 2))))
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; 16]) {
        let old = *rows;
        for i in 0..4 {
            for j in 0..4 {
                // Quad j of rows 4i..4i + 4 becomes quad i of rows 4j..4j + 4.
                let (a, b) = (old[4 * i].0[j], old[4 * i + 1].0[j]);
                let (c, d) = (old[4 * i + 2].0[j], old[4 * i + 3].0[j]);
                let even = [vtrn1q_f32(a, b), vtrn1q_f32(c, d)].map(|x| vreinterpretq_f64_f32(x));
                let odd = [vtrn2q_f32(a, b), vtrn2q_f32(c, d)].map(|x| vreinterpretq_f64_f32(x));
                rows[4 * j].0[i] = vreinterpretq_f32_f64(vtrn1q_f64(even[0], even[1]));
                rows[4 * j + 1].0[i] = vreinterpretq_f32_f64(vtrn1q_f64(odd[0], odd[1]));
                rows[4 * j + 2].0[i] = vreinterpretq_f32_f64(vtrn2q_f64(even[0], even[1]));
                rows[4 * j + 3].0[i] = vreinterpretq_f32_f64(vtrn2q_f64(odd[0], odd[1]));
            }
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let [a, b, c, d] = self.0;
        vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, c), vmaxnmq_f32(b, d)))
    }
}
