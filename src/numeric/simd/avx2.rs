//! AVX2 with FMA and F16C: sixteen lanes in two registers, and the Q4_0 kernel with `vpmaddubsw`.

use super::groups::{Q4, Q4Group, QUANT_BYTES, SCALE_BYTES, prefetch_block, prefetch_distance};
use super::lanes::Lanes;
use crate::quant::activations::ActBlock;
use files::blocks::BLOCK;
use std::arch::x86_64::*;

/// Lanes 0-7 and 8-15.
#[derive(Clone, Copy)]
pub struct Avx2(__m256, __m256);

macro_rules! both {
    ($op:ident, $a:expr, $b:expr) => {
        Avx2($op($a.0, $b.0), $op($a.1, $b.1))
    };
}

/// Transposes half `$half` of eight rows from `$first` on.
macro_rules! transposed8 {
    ($rows:ident, $first:literal, $half:tt) => {{
        let mut t = [_mm256_setzero_ps(); 8];
        for i in 0..2 {
            // Rows 4i..4i + 4, 4 x 4 floats inside the halves.
            let at = $first + 4 * i;
            let (a, b) = ($rows[at].$half, $rows[at + 1].$half);
            let (c, d) = ($rows[at + 2].$half, $rows[at + 3].$half);
            let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
            t[4 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            t[4 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let (ab, cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
            t[4 * i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            t[4 * i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
        }
        for i in 0..4 {
            let (a, b) = (t[i], t[4 + i]);
            t[i] = _mm256_permute2f128_ps::<0x20>(a, b);
            t[4 + i] = _mm256_permute2f128_ps::<0x31>(a, b);
        }
        t
    }};
}

// SAFETY: every intrinsic below is AVX2, FMA or F16C, as in `Isa::Avx2`; memory accesses are unaligned and stay within
// the trait's contract.
unsafe impl Lanes for Avx2 {
    type PartialSums = __m256;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
        Avx2(
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
        )
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        let x = _mm_loadu_si128(p.cast());
        Avx2(
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x))),
        )
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        let x = _mm_loadu_si128(p.cast());
        let mask = _mm_set1_epi8(15);
        let low = _mm_and_si128(x, mask);
        let high = _mm_and_si128(_mm_srli_epi16::<4>(x), mask);
        (widen_u8(low), widen_u8(high))
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self {
        let x = _mm256_cvtph_ps(_mm_set1_epi16(p.cast::<i16>().read_unaligned()));
        Avx2(x, x)
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        _mm256_storeu_ps(p, self.0);
        _mm256_storeu_ps(p.add(8), self.1);
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        _mm_storeu_si128(p.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        let w = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
        let w = _mm256_permute4x64_epi64::<0b11_01_10_00>(w);
        let b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256::<1>(w));
        _mm_storeu_si128(p.cast(), b);
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        both!(_mm256_add_ps, self, b)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        both!(_mm256_sub_ps, self, b)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        both!(_mm256_mul_ps, self, b)
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        both!(_mm256_div_ps, self, b)
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        both!(_mm256_max_ps, self, b)
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        both!(_mm256_min_ps, self, b)
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        let sign = _mm256_set1_ps(-0.0);
        Avx2(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        Avx2(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1))
    }
    #[inline(always)]
    unsafe fn pow2(n: Self) -> Self {
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias));
        let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias));
        Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
    }
    #[inline(always)]
    unsafe fn where_ge(self, x: Self, limit: Self) -> Self {
        Avx2(
            _mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_GE_OQ>(x.0, limit.0)),
            _mm256_and_ps(self.1, _mm256_cmp_ps::<_CMP_GE_OQ>(x.1, limit.1)),
        )
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let v8 = _mm256_add_ps(self.0, self.1);
        let v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps::<1>(v8));
        let v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
        _mm_cvtss_f32(_mm_add_ss(v2, _mm_shuffle_ps::<1>(v2, v2)))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let v8 = _mm256_max_ps(self.0, self.1);
        let v4 = _mm_max_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps::<1>(v8));
        let v2 = _mm_max_ps(v4, _mm_movehl_ps(v4, v4));
        _mm_cvtss_f32(_mm_max_ss(v2, _mm_shuffle_ps::<1>(v2, v2)))
    }
    #[inline(always)]
    unsafe fn fold(self) -> __m256 {
        _mm256_add_ps(self.0, self.1)
    }
    #[inline(always)]
    unsafe fn folded_sums(rows: &[__m256; 16]) -> Self {
        Avx2(sums8(&rows[..8]), sums8(&rows[8..]))
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; 16]) {
        let (top_left, top_right) = (transposed8!(rows, 0, 0), transposed8!(rows, 0, 1));
        let (low_left, low_right) = (transposed8!(rows, 8, 0), transposed8!(rows, 8, 1));
        for i in 0..8 {
            rows[i] = Avx2(top_left[i], low_left[i]);
            rows[8 + i] = Avx2(top_right[i], low_right[i]);
        }
    }
}

/// Converts sixteen unsigned bytes to floats.
#[inline(always)]
unsafe fn widen_u8(x: __m128i) -> Avx2 {
    Avx2(
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(x))),
    )
}

/// Sums eight folded rows, one per lane, with the additions of [`Lanes::sum`].
#[inline(always)]
unsafe fn sums8(rows: &[__m256]) -> __m256 {
    // 8 -> 4: the low half of the result holds row a's four sums, the high half row b's.
    macro_rules! pair {
        ($a:literal, $b:literal) => {{
            let (a, b) = (rows[$a], rows[$b]);
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
        }};
    }
    // 4 -> 2: lanes (0+2, 1+3) of two rows next to each other.
    macro_rules! four {
        ($a:expr, $b:expr) => {{
            let (a, b) = ($a, $b);
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
            _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(a, b))
        }};
    }
    let a = four!(pair!(0, 4), pair!(1, 5));
    let b = four!(pair!(2, 6), pair!(3, 7));
    // 2 -> 1.
    _mm256_add_ps(_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b))
}

/// The body of a kernel of eight lanes; `$dot(low, high, activations)` computes the exact sums of a block.
///
/// For one token it reads the weights once, with two registers of sums. For several tokens it computes the two halves
/// of the rows one after the other, which leaves registers for more tokens.
macro_rules! q4_by_eight {
    ($T:ident, $blocks:expr, $w:ident, $activations:ident, $out:ident, $dot:ident) => {{
        let mask = _mm256_set1_epi8(15);
        macro_rules! block {
            ($b:expr, $half:expr, |$t:ident| $acc:expr) => {
                let quants = $w.quants.as_ptr().add($b * QUANT_BYTES + $half * 32);
                let scales = $w.scales.as_ptr().add($b * SCALE_BYTES + $half * 16);
                let scale = _mm256_cvtph_ps(_mm_loadu_si128(scales.cast()));
                let (mut low, mut high) = ([mask; 4], [mask; 4]);
                for v in 0..4 {
                    let x = _mm256_loadu_si256(quants.add(v * 64).cast());
                    low[v] = _mm256_and_si256(x, mask);
                    high[v] = _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask);
                }
                for $t in 0..$T {
                    let act = &*$activations.add($t * ($blocks) + $b);
                    let isum = $dot!(low, high, act);
                    let d = _mm256_mul_ps(scale, _mm256_set1_ps(act.d));
                    $acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum), d, $acc);
                }
            };
        }
        let near = prefetch_distance($T);
        if $T == 1 {
            let mut acc = [_mm256_setzero_ps(); 2];
            for b in 0..$blocks {
                prefetch_block::<Q4>($w.quants.as_ptr(), $w.scales.as_ptr(), b, near);
                block!(b, 0, |t| acc[0]);
                block!(b, 1, |t| acc[1]);
            }
            _mm256_storeu_ps($out.cast(), acc[0]);
            _mm256_storeu_ps($out.cast::<f32>().add(8), acc[1]);
            return;
        }
        for half in 0..2 {
            let mut acc = [_mm256_setzero_ps(); $T];
            for b in 0..$blocks {
                if half == 0 {
                    prefetch_block::<Q4>($w.quants.as_ptr(), $w.scales.as_ptr(), b, near);
                }
                block!(b, half, |t| acc[t]);
            }
            for (t, acc) in acc.iter().enumerate() {
                _mm256_storeu_ps($out.add(t).cast::<f32>().add(half * 8), *acc);
            }
        }
    }};
}
pub(super) use q4_by_eight;

/// Multiplies sixteen Q4_0 rows with `T` tokens; see [`super::products::multiply`].
///
/// Per block, nibbles (at most 15) times activations (at most 127) are added in pairs to i16. Eight such sums are at
/// most 8 * 2 * 15 * 127 = 30,480, so they fit without saturating.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn q4<const T: usize, const COLS: usize>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
    macro_rules! dot {
        ($low:ident, $high:ident, $act:ident) => {{
            let q = $act.q.as_ptr().cast::<i32>();
            let mut sum = _mm256_setzero_si256();
            for v in 0..4 {
                let a = _mm256_set1_epi32(q.add(v).read_unaligned());
                sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16($low[v], a));
                let a = _mm256_set1_epi32(q.add(4 + v).read_unaligned());
                sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16($high[v], a));
            }
            let sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
            _mm256_add_epi32(sum, _mm256_set1_epi32($act.offset))
        }};
    }
    q4_by_eight!(T, COLS / BLOCK, w, activations, out, dot)
}
