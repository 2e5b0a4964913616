//! AVX-VNNI: the Q4_0 kernel of AVX2 with `vpdpbusd` on 256 bits, for CPUs without AVX-512.

use super::avx2::q4_by_eight;
use super::groups::{Q4, Q4Group, QUANT_BYTES, SCALE_BYTES, prefetch_block, prefetch_distance};
use crate::quant::activations::ActBlock;
use files::blocks::BLOCK;
use std::arch::x86_64::*;

/// Multiplies sixteen Q4_0 rows with `T` tokens; see [`super::products::multiply`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub unsafe fn q4<const T: usize, const COLS: usize>(
    w: Q4Group<'_>,
    activations: *const ActBlock,
    out: *mut [f32; 16],
) {
    macro_rules! dot {
        ($low:ident, $high:ident, $act:ident) => {{
            let q = $act.q.as_ptr().cast::<i32>();
            let mut sum = _mm256_set1_epi32($act.offset);
            for v in 0..4 {
                let a = _mm256_set1_epi32(q.add(v).read_unaligned());
                sum = _mm256_dpbusd_avx_epi32(sum, $low[v], a);
                let a = _mm256_set1_epi32(q.add(4 + v).read_unaligned());
                sum = _mm256_dpbusd_avx_epi32(sum, $high[v], a);
            }
            sum
        }};
    }
    q4_by_eight!(T, COLS / BLOCK, w, activations, out, dot)
}
