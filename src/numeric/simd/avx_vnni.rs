//! AVX-VNNI: the AVX2 kernel with `vpdpbusd` on 256 bits, for CPUs without AVX-512.

use super::avx2::q4_by_eight;
use super::{Q4Group, ahead};
use crate::quant::act::ActBlock;
use crate::quant::packed::{QUANT_BYTES, SCALE_BYTES};
use std::arch::x86_64::*;

/// Q4_0 rows times activations: sixteen rows, `T` tokens; see [`super::q4_groups`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub unsafe fn q4<const T: usize>(w: Q4Group<'_>, acts: *const ActBlock, stride: usize, out: *mut [f32; 16]) {
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
    // SAFETY: `super::q4_tile` checked that `acts` holds T rows `stride` apart and `out` T rows; `w` holds
    // its blocks.
    unsafe { q4_by_eight!(T, w, acts, stride, out, dot) }
}
