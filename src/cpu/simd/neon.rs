//! NEON: sixteen lanes in four registers; Q4 dot products by `sdot`, or by `smlal` without dotprod.

use super::Q4Group;
use super::lanes::Lanes;
use crate::quant::act::ActBlock;
use crate::quant::packed::{QUANT_BYTES, SCALE_BYTES};
use std::arch::aarch64::*;
use std::array::from_fn;

/// Lanes 0-3, 4-7, 8-11 and 12-15.
#[derive(Clone, Copy)]
pub struct Neon([float32x4_t; 4]);

/// Sixteen signed bytes as sixteen floats.
#[inline(always)]
unsafe fn widen_i8(x: int8x16_t) -> Neon {
    // SAFETY: NEON is part of every aarch64 target.
    unsafe {
        let (a, b) = (vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)));
        let quads = [vget_low_s16(a), vget_high_s16(a), vget_low_s16(b), vget_high_s16(b)];
        Neon(quads.map(|q| vcvtq_f32_s32(vmovl_s16(q))))
    }
}

/// Four f16 in the low half of a register, widened exactly.
#[inline(always)]
unsafe fn widen_f16(x: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: `fcvtl` is baseline NEON and touches registers only.
    unsafe {
        std::arch::asm!("fcvtl {d:v}.4s, {s:v}.4h", d = lateout(vreg) wide, s = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four floats rounded to f16, nearest even.
#[inline(always)]
unsafe fn narrow_f16(x: float32x4_t) -> uint16x4_t {
    let narrow: uint16x4_t;
    // SAFETY: `fcvtn` is baseline NEON and touches registers only.
    unsafe {
        std::arch::asm!("fcvtn {d:v}.4h, {s:v}.4s", d = lateout(vreg) narrow, s = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    narrow
}

// SAFETY: NEON is part of every aarch64 target; memory accesses are unaligned and stay within what
// the trait's contract grants.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Lanes for Neon {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Neon([vdupq_n_f32(x); 4]) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Neon(from_fn(|i| vld1q_f32(p.add(4 * i)))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        unsafe { Neon(from_fn(|i| widen_f16(vreinterpret_u16_u8(vld1_u8(p.add(8 * i)))))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        unsafe {
            Neon(from_fn(|i| {
                let x = vreinterpret_u16_u8(vld1_u8(p.add(8 * i)));
                vreinterpretq_f32_u32(vshll_n_u16::<16>(x))
            }))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        unsafe { widen_i8(vreinterpretq_s8_u8(vld1q_u8(p))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        unsafe {
            let x = vld1q_u8(p);
            let low = vandq_u8(x, vdupq_n_u8(15));
            (widen_i8(vreinterpretq_s8_u8(low)), widen_i8(vreinterpretq_s8_u8(vshrq_n_u8::<4>(x))))
        }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self {
        unsafe { Neon([widen_f16(vdup_n_u16(p.cast::<u16>().read_unaligned())); 4]) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { (0..4).for_each(|i| vst1q_f32(p.add(4 * i), self.0[i])) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        unsafe { (0..4).for_each(|i| vst1_u8(p.add(8 * i), vreinterpret_u8_u16(narrow_f16(self.0[i])))) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe {
            let q = self.0.map(|x| vmovn_s32(vcvtnq_s32_f32(x)));
            let low = vmovn_s16(vcombine_s16(q[0], q[1]));
            let high = vmovn_s16(vcombine_s16(q[2], q[3]));
            vst1q_s8(p, vcombine_s8(low, high));
        }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Neon(from_fn(|i| vfmaq_f32(c.0[i], self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { Neon(from_fn(|i| vaddq_f32(self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        unsafe { Neon(from_fn(|i| vsubq_f32(self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        unsafe { Neon(from_fn(|i| vmulq_f32(self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        unsafe { Neon(from_fn(|i| vdivq_f32(self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        unsafe { Neon(from_fn(|i| vmaxq_f32(self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        unsafe { Neon(from_fn(|i| vminq_f32(self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Neon(self.0.map(|x| vabsq_f32(x))) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Neon(self.0.map(|x| vrndnq_f32(x))) }
    }
    #[inline(always)]
    unsafe fn pow2(n: Self) -> Self {
        unsafe {
            Neon(n.0.map(|n| {
                let n = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(n))
            }))
        }
    }
    #[inline(always)]
    unsafe fn where_ge(self, x: Self, limit: Self) -> Self {
        unsafe {
            Neon(from_fn(|i| {
                let mask = vcgeq_f32(x.0[i], limit.0[i]);
                vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(self.0[i]), mask))
            }))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let [a, b, c, d] = self.0;
            let v4 = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let v2 = vadd_f32(vget_low_f32(v4), vget_high_f32(v4));
            vget_lane_f32::<0>(v2) + vget_lane_f32::<1>(v2)
        }
    }
    #[inline(always)]
    unsafe fn sums(rows: &[Self; 16]) -> Self {
        unsafe {
            macro_rules! quad {
                ($r:expr) => {{
                    let [a, b, c, d] = rows[$r].0;
                    vreinterpretq_f64_f32(vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d)))
                }};
            }
            // 4 -> 2: lanes (0+2, 1+3) of two rows beside each other; 2 -> 1 pairwise.
            macro_rules! pair {
                ($r:expr) => {{
                    let (a, b) = (quad!($r), quad!($r + 1));
                    let (low, high) = (vtrn1q_f64(a, b), vtrn2q_f64(a, b));
                    vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
                }};
            }
            let mut out = [vdupq_n_f32(0.0); 4];
            for i in 0..4 {
                out[i] = vpaddq_f32(pair!(4 * i), pair!(4 * i + 2));
            }
            Neon(out)
        }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; 16]) {
        unsafe {
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
    }
}

/// `acc + sum of four products` in each 32-bit lane; `lane` of `a` is broadcast.
macro_rules! sdot {
    ($acc:ident, $w:expr, $a:expr, $lane:literal) => {
        std::arch::asm!(
            concat!("sdot {acc:v}.4s, {w:v}.16b, {a:v}.4b[", $lane, "]"),
            acc = inout(vreg) $acc, w = in(vreg) $w, a = in(vreg) $a,
            options(pure, nomem, nostack, preserves_flags))
    };
}

/// Q4_0 rows times activations with dotprod: sixteen rows, `T` tokens; see [`super::q4_group`].
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn q4_dot<const T: usize>(
    w: Q4Group<'_>,
    acts: *const ActBlock,
    stride: usize,
    out: *mut [f32; 16],
) {
    // SAFETY: `super::q4_group` checked that the planes hold `w.blocks` blocks, that `acts` holds T
    // rows `stride` apart, and that `out` holds T rows; `Isa::NeonDot` stands for dotprod.
    unsafe {
        let mask = vdupq_n_u8(15);
        let mut acc = [[vdupq_n_f32(0.0); 4]; T];
        for b in 0..w.blocks {
            let quants = w.quants.as_ptr().add(b * QUANT_BYTES);
            let scales = w.scales.as_ptr().add(b * SCALE_BYTES);
            for r in 0..4 {
                let raw: [uint8x16_t; 4] = from_fn(|v| vld1q_u8(quants.add(v * 64 + r * 16)));
                let low = raw.map(|x| vandq_u8(x, mask));
                let high = raw.map(|x| vshrq_n_u8::<4>(x));
                let scale = widen_f16(vreinterpret_u16_u8(vld1_u8(scales.add(r * 8))));
                for (t, acc) in acc.iter_mut().enumerate() {
                    let act = &*acts.add(t * stride + b);
                    let (a0, a1) = (vld1q_s8(act.q.as_ptr()), vld1q_s8(act.q.as_ptr().add(16)));
                    let mut isum = vdupq_n_s32(act.offset);
                    sdot!(isum, low[0], a0, 0);
                    sdot!(isum, low[1], a0, 1);
                    sdot!(isum, low[2], a0, 2);
                    sdot!(isum, low[3], a0, 3);
                    sdot!(isum, high[0], a1, 0);
                    sdot!(isum, high[1], a1, 1);
                    sdot!(isum, high[2], a1, 2);
                    sdot!(isum, high[3], a1, 3);
                    let d = vmulq_f32(scale, vdupq_n_f32(act.d));
                    acc[r] = vfmaq_f32(acc[r], vcvtq_f32_s32(isum), d);
                }
            }
        }
        for (t, acc) in acc.iter().enumerate() {
            Neon(*acc).store(out.add(t).cast());
        }
    }
}

/// Q4_0 rows times activations without dotprod: sixteen rows, `T` tokens; see [`super::q4_group`].
///
/// Products are summed in i16: eight of at most 15 * 127 a lane, 15,240, so none overflows.
#[target_feature(enable = "neon")]
pub unsafe fn q4<const T: usize>(w: Q4Group<'_>, acts: *const ActBlock, stride: usize, out: *mut [f32; 16]) {
    // SAFETY: `super::q4_group` checked that the planes hold `w.blocks` blocks, that `acts` holds T
    // rows `stride` apart, and that `out` holds T rows.
    unsafe {
        let mask = vdupq_n_u8(15);
        let mut acc = [[vdupq_n_f32(0.0); 4]; T];
        for b in 0..w.blocks {
            let quants = w.quants.as_ptr().add(b * QUANT_BYTES);
            let scales = w.scales.as_ptr().add(b * SCALE_BYTES);
            for r in 0..4 {
                let raw: [uint8x16_t; 4] = from_fn(|v| vld1q_u8(quants.add(v * 64 + r * 16)));
                let low = raw.map(|x| vreinterpretq_s8_u8(vandq_u8(x, mask)));
                let high = raw.map(|x| vreinterpretq_s8_u8(vshrq_n_u8::<4>(x)));
                let scale = widen_f16(vreinterpret_u16_u8(vld1_u8(scales.add(r * 8))));
                for (t, acc) in acc.iter_mut().enumerate() {
                    let act = &*acts.add(t * stride + b);
                    let q = act.q.as_ptr().cast::<i32>();
                    // Rows 4r, 4r+1 and 4r+2, 4r+3: four column sums each.
                    let (mut top, mut bottom) = (vdupq_n_s16(0), vdupq_n_s16(0));
                    for v in 0..4 {
                        let a = vreinterpret_s8_s32(vdup_n_s32(q.add(v).read_unaligned()));
                        top = vmlal_s8(top, vget_low_s8(low[v]), a);
                        bottom = vmlal_s8(bottom, vget_high_s8(low[v]), a);
                        let a = vreinterpret_s8_s32(vdup_n_s32(q.add(4 + v).read_unaligned()));
                        top = vmlal_s8(top, vget_low_s8(high[v]), a);
                        bottom = vmlal_s8(bottom, vget_high_s8(high[v]), a);
                    }
                    let sums = vpaddq_s32(vpaddlq_s16(top), vpaddlq_s16(bottom));
                    let isum = vaddq_s32(sums, vdupq_n_s32(act.offset));
                    let d = vmulq_f32(scale, vdupq_n_f32(act.d));
                    acc[r] = vfmaq_f32(acc[r], vcvtq_f32_s32(isum), d);
                }
            }
        }
        for (t, acc) in acc.iter().enumerate() {
            Neon(*acc).store(out.add(t).cast());
        }
    }
}
