//! AVX-VNNI: the kernel of Q4_0 and IQ4_NL with `vpdpbusd` on 256 bits, for CPUs without AVX-512.

use super::avx2::q4_by_eight;
use super::groups::{Q4, Q4Group, QUANT_BYTES, SCALE_BYTES, prefetch_block, prefetch_distance};
use crate::quant::activations::ActBlock;
use crate::quant::format::Format;
use files::blocks::BLOCK;
use std::arch::x86_64::*;

/// Replaces nibbles by the levels of `F`, if it has any, made unsigned by its zero point.
#[inline(always)]
unsafe fn look_up<const F: usize>(nibbles: __m256i) -> __m256i {
    let format = const { Format::ALL[F] };
    let Some(levels) = (const { Format::ALL[F].levels() }) else { return nibbles };
    let table = levels.map(|level| (i32::from(level) + format.zero_point()) as u8);
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), nibbles)
}

/// Multiplies sixteen rows with `T` tokens, in Q4_0 or IQ4_NL (`F`); see [`super::products::multiply`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub unsafe fn q4<const F: usize, const T: usize, const COLS: usize>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
    macro_rules! dot {
        ($low:ident, $high:ident, $act:ident) => {{
            let q = $act.q.as_ptr().cast::<i32>();
            let mut sum = _mm256_set1_epi32($act.offset * const { Format::ALL[F].zero_point() / 8 });
            for v in 0..4 {
                let a = _mm256_set1_epi32(q.add(v).read_unaligned());
                sum = _mm256_dpbusd_avx_epi32(sum, $low[v], a);
                let a = _mm256_set1_epi32(q.add(4 + v).read_unaligned());
                sum = _mm256_dpbusd_avx_epi32(sum, $high[v], a);
            }
            sum
        }};
    }
    q4_by_eight!(T, COLS / BLOCK, w, activations, out, look_up::<F>, dot)
}
