//! AVX-512 (F, BW, VL, DQ, VNNI): sixteen lanes in one register, and the Q4_0 kernel with `vpdpbusd`.

use super::groups::{Q4, Q4Group, QUANT_BYTES, SCALE_BYTES, prefetch_block, prefetch_distance};
use super::lanes::Lanes;
use crate::quant::activations::ActBlock;
use std::arch::x86_64::*;

/// All sixteen lanes.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

// SAFETY: every intrinsic below belongs to the features of `Isa::Avx512`; memory accesses are unaligned and stay within
// the trait's contract.
unsafe impl Lanes for Avx512 {
    const WIDE: bool = true;
    type PartialSums = Self;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Avx512(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Avx512(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        let x = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        let low = _mm512_and_si512(x, _mm512_set1_epi32(15));
        (Avx512(_mm512_cvtepi32_ps(low)), Avx512(_mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(x))))
    }
    #[inline(always)]
    unsafe fn load_q4(p: *const u8, scale: Self) -> (Self, Self) {
        let values = _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
        let table = _mm512_mul_ps(values, scale.0);
        // The permutation uses only the low four bits of each index.
        let x = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(x), table);
        (Avx512(_mm512_permutexvar_ps(x, table)), Avx512(high))
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self {
        Avx512(_mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read_unaligned())))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        _mm512_storeu_ps(p, self.0)
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0)))
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Avx512(_mm512_fmadd_ps(self.0, b.0, c.0))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        Avx512(_mm512_add_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        Avx512(_mm512_sub_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        Avx512(_mm512_mul_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        Avx512(_mm512_div_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        Avx512(_mm512_max_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        Avx512(_mm512_min_ps(self.0, b.0))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Avx512(_mm512_abs_ps(self.0))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Avx512(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0))
    }
    #[inline(always)]
    unsafe fn pow2(n: Self) -> Self {
        let n = _mm512_add_epi32(_mm512_cvtps_epi32(n.0), _mm512_set1_epi32(127));
        Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
    }
    #[inline(always)]
    unsafe fn where_ge(self, x: Self, limit: Self) -> Self {
        Avx512(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x.0, limit.0), self.0))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let x = self.0;
        let v = _mm512_add_ps(x, _mm512_shuffle_f32x4::<0b11_10_11_10>(x, x));
        let v = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0b01_01_01_01>(v, v));
        let v = _mm512_castps512_ps128(v);
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        _mm512_reduce_max_ps(self.0)
    }
    #[inline(always)]
    unsafe fn fold(self) -> Self {
        self
    }
    #[inline(always)]
    unsafe fn folded_sums(rows: &[Self; 16]) -> Self {
        // 16 -> 8: halves of rows a and b side by side; 8 -> 4: quarters of rows i, i + 4, i + 8, i + 12.
        macro_rules! eight {
            ($a:expr, $b:expr) => {{
                let (a, b) = (rows[$a].0, rows[$b].0);
                let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
                _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
            }};
        }
        macro_rules! four {
            ($i:literal) => {{
                let (a, b) = (eight!($i, $i + 4), eight!($i + 8, $i + 12));
                let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
            }};
        }
        // 4 -> 2 and 2 -> 1 inside the quarters.
        macro_rules! two {
            ($a:expr, $b:expr) => {{
                let (a, b) = ($a, $b);
                let low = _mm512_shuffle_ps::<0b01_00_01_00>(a, b);
                _mm512_add_ps(low, _mm512_shuffle_ps::<0b11_10_11_10>(a, b))
            }};
        }
        let (a, b) = (two!(four!(0), four!(1)), two!(four!(2), four!(3)));
        let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
        Avx512(_mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(a, b)))
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; 16]) {
        let mut t = [_mm512_setzero_ps(); 16];
        // 4 x 4 floats inside the quarters: t[4i + c] holds column c of each quarter of rows 4i..4i + 4.
        for i in 0..4 {
            let [a, b, c, d] = [rows[4 * i].0, rows[4 * i + 1].0, rows[4 * i + 2].0, rows[4 * i + 3].0];
            let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
            t[4 * i] = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            t[4 * i + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
            t[4 * i + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            t[4 * i + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
        }
        // 4 x 4 quarters.
        for c in 0..4 {
            let [a, b, d, e] = [t[c], t[4 + c], t[8 + c], t[12 + c]];
            let (low, high) =
                (_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b10_00_10_00>(d, e));
            rows[c].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            rows[8 + c].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
            let (low, high) =
                (_mm512_shuffle_f32x4::<0b11_01_11_01>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(d, e));
            rows[4 + c].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            rows[12 + c].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
        }
    }
}

/// Multiplies sixteen Q4_0 rows with `T` tokens; see [`super::products::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub unsafe fn q4<const T: usize>(w: Q4Group<'_>, activations: *const ActBlock, out: *mut [f32; 16]) {
    let (mask, near) = (_mm512_set1_epi8(15), prefetch_distance(T));
    let mut acc = [_mm512_setzero_ps(); T];
    for b in 0..w.blocks {
        let quants = w.quants.as_ptr().add(b * QUANT_BYTES);
        let scales = w.scales.as_ptr().add(b * SCALE_BYTES);
        prefetch_block::<Q4>(w.quants.as_ptr(), w.scales.as_ptr(), b, near);
        let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
        let (mut low, mut high) = ([mask; 4], [mask; 4]);
        for v in 0..4 {
            let x = _mm512_loadu_si512(quants.add(v * 64).cast());
            low[v] = _mm512_and_si512(x, mask);
            high[v] = _mm512_and_si512(_mm512_srli_epi16::<4>(x), mask);
        }
        // Unrolled by hand so that the accumulators stay in registers: LLVM does not unroll a loop of sixteen.
        macro_rules! tokens {
                ($($t:literal)*) => {$(
                    if $t < T {
                        let act = &*activations.add($t * w.blocks + b);
                        let q = act.q.as_ptr().cast::<i32>();
                        let mut isum = _mm512_set1_epi32(act.offset);
                        for v in 0..4 {
                            let a = _mm512_set1_epi32(q.add(v).read_unaligned());
                            isum = _mm512_dpbusd_epi32(isum, low[v], a);
                            let a = _mm512_set1_epi32(q.add(4 + v).read_unaligned());
                            isum = _mm512_dpbusd_epi32(isum, high[v], a);
                        }
                        let d = _mm512_mul_ps(scale, _mm512_set1_ps(act.d));
                        acc[$t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum), d, acc[$t]);
                    }
                )*};
            }
        tokens!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }
    for (t, acc) in acc.iter().enumerate() {
        _mm512_storeu_ps(out.add(t).cast(), *acc);
    }
}
