//! Eight rows in a register of 256 bits: `vpmaddubsw`, or `vpdpbusd` with AVX-VNNI.

use super::rows::BlockKernel;
use std::arch::x86_64::*;

/// Eight rows in a register; `VNNI` selects AVX-VNNI.
pub struct EightRows<const VNNI: bool>;

/// Broadcasts the four activations at `q + 4 * v` to each row.
#[inline(always)]
unsafe fn four(q: *const i8, v: usize) -> __m256i {
    _mm256_set1_epi32(q.cast::<i32>().add(v).read_unaligned())
}

/// Adds the sums of pairs of i16 to `sums`.
#[inline(always)]
unsafe fn widen(sums: __m256i, pairs: __m256i) -> __m256i {
    _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Sums products in pairs to i16, which do not overflow.
///
/// `vpmaddubsw` adds two products of unsigned weights, at most 2 * (2^bits - 1) * 127: 3,810 for 4 bits, 7,874 for 5,
/// 16,002 for 6. So eight such sums fit for 4 bits (30,480), four for 5 bits (31,496) and two for 6 bits (32,004).
#[inline(always)]
unsafe fn add_pairs<const N: usize>(w: [__m256i; N], q: *const i8) -> __m256i {
    let mut pairs = _mm256_maddubs_epi16(w[0], four(q, 0));
    for (v, w) in w.into_iter().enumerate().skip(1) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, four(q, v)));
    }
    pairs
}

// SAFETY: every intrinsic below is AVX2, FMA or F16C, as in `Isa::Avx2`, or AVX-VNNI if `VNNI`; memory accesses are
// unaligned and stay within the trait's contract.
unsafe impl<const VNNI: bool> BlockKernel for EightRows<VNNI> {
    const ROWS: usize = 8;
    const SIGNED: bool = !VNNI;
    type Bytes = __m256i;
    type Sums = __m256i;
    type Floats = __m256;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        _mm256_loadu_si256(p.cast())
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> __m256i {
        _mm256_set1_epi8(x as i8)
    }
    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        _mm256_and_si256(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        _mm256_or_si256(a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: __m256i, b: __m256i) -> __m256i {
        _mm256_xor_si256(a, b)
    }
    #[inline(always)]
    unsafe fn load_table(table: &[u8; 16]) -> __m256i {
        _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()))
    }
    #[inline(always)]
    unsafe fn look_up(table: __m256i, a: __m256i) -> __m256i {
        _mm256_shuffle_epi8(table, a)
    }
    #[inline(always)]
    unsafe fn shift_left<const N: i32>(a: __m256i) -> __m256i {
        _mm256_slli_epi16::<N>(a)
    }
    #[inline(always)]
    unsafe fn shift_right<const N: i32>(a: __m256i) -> __m256i {
        _mm256_srli_epi16::<N>(a)
    }
    #[inline(always)]
    unsafe fn splat_sum(x: i32) -> __m256i {
        _mm256_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn dot_half_block<const BITS: usize>(sums: __m256i, w: [__m256i; 4], q: *const i8) -> __m256i {
        if VNNI {
            let mut sums = sums;
            for (v, w) in w.into_iter().enumerate() {
                sums = _mm256_dpbusd_avx_epi32(sums, w, four(q, v));
            }
            return sums;
        }
        match BITS {
            4 | 5 => widen(sums, add_pairs(w, q)),
            6 => {
                let sums = widen(sums, add_pairs([w[0], w[1]], q));
                widen(sums, add_pairs([w[2], w[3]], q.add(8)))
            }
            // Two products of at most 128 * 127 in magnitude: 32,512, which fits an i16.
            _ => {
                let mut sums = sums;
                for (v, w) in w.into_iter().enumerate() {
                    let a = _mm256_sign_epi8(four(q, v), w);
                    sums = widen(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(w), a));
                }
                sums
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_block<const BITS: usize>(sums: __m256i, w: [__m256i; 8], q: *const i8) -> __m256i {
        if BITS == 4 && !VNNI {
            return widen(sums, add_pairs(w, q));
        }
        let sums = Self::dot_half_block::<BITS>(sums, [w[0], w[1], w[2], w[3]], q);
        Self::dot_half_block::<BITS>(sums, [w[4], w[5], w[6], w[7]], q.add(16))
    }
    #[inline(always)]
    unsafe fn sums_to_floats(sums: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(sums)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load_floats(p: *const f32) -> __m256 {
        _mm256_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(x: __m256, p: *mut f32) {
        _mm256_storeu_ps(p, x)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [__m256; 2] {
        let x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        let low = _mm256_and_si256(x, _mm256_set1_epi32(15));
        [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(x))]
    }
    #[inline(always)]
    unsafe fn load_exponents(p: *const u8) -> __m256 {
        let x = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())));
        _mm256_castsi256_ps(_mm256_max_epi32(x, _mm256_set1_epi32(1 << 22)))
    }
    #[inline(always)]
    unsafe fn load_minifloats(p: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_slli_epi16::<7>(_mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()))))
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn sum_bytes(q: *const i8) -> i32 {
        sum_bytes(q)
    }
}

/// Sums sixteen activations with `vpsadbw` on bytes that are 128 larger.
///
/// # Safety
///
/// `q` holds sixteen bytes.
#[inline(always)]
pub unsafe fn sum_bytes(q: *const i8) -> i32 {
    let x = _mm_xor_si128(_mm_loadu_si128(q.cast()), _mm_set1_epi8(-128));
    let sums = _mm_sad_epu8(x, _mm_setzero_si128());
    _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128
}
