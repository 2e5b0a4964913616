//! All sixteen rows in a register of 512 bits: `vpdpbusd`.

use super::rows::Rows;
use std::arch::x86_64::*;

/// Sixteen rows.
pub struct Sixteen;

// SAFETY: every intrinsic below belongs to the features `Isa::Avx512` stands for; memory accesses are unaligned and
// stay within what the trait's contract grants.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Rows for Sixteen {
    const ROWS: usize = 16;
    const SIGNED: bool = false;
    type Bytes = __m512i;
    type Sums = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn byte(x: u8) -> __m512i {
        unsafe { _mm512_set1_epi8(x as i8) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn left<const N: i32>(a: __m512i) -> __m512i {
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(N)) }
    }
    #[inline(always)]
    unsafe fn right<const N: i32>(a: __m512i) -> __m512i {
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(N)) }
    }
    #[inline(always)]
    unsafe fn sums(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn half<const BITS: usize>(mut sums: __m512i, w: [__m512i; 4], q: *const i8) -> __m512i {
        unsafe {
            for (v, w) in w.into_iter().enumerate() {
                let a = _mm512_set1_epi32(q.cast::<i32>().add(v).read_unaligned());
                sums = _mm512_dpbusd_epi32(sums, w, a);
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn float(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn floats(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(x: __m512, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn u8(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn i8(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn total(q: *const i8) -> i32 {
        unsafe { super::avx2::total(q) }
    }
}
