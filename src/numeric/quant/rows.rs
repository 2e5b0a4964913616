//! Quantises rows of a checkpoint to Q4_0.

use super::format::put_block;
use crate::with_avx2;
use files::blocks::{BLOCK, BlockQ4, Dtype};

/// Quantises a stored row into row `lane` of one group's planes. Returns false if a value is not finite or too large
/// for an f16 scale.
pub fn quantise_row(dtype: Dtype, row: &[u8], lane: usize, quants: &mut [u8], scales: &mut [u8]) -> bool {
    with_avx2(
        #[inline(always)]
        || match dtype {
            Dtype::BF16 => quantise_blocks(Dtype::BF16, row, lane, quants, scales),
            other => quantise_blocks(other, row, lane, quants, scales),
        },
    )
}

/// Quantises the blocks of a row. Inlined for each type, so that the match on it is outside the loop.
#[inline(always)]
fn quantise_blocks(dtype: Dtype, row: &[u8], lane: usize, quants: &mut [u8], scales: &mut [u8]) -> bool {
    let mut finite = true;
    for (b, stored) in row.chunks_exact(BLOCK * dtype.byte_size()).enumerate() {
        let block = BlockQ4::quantise(&dtype.widen_array::<BLOCK>(stored));
        finite &= put_block(quants, scales, b, lane, &block);
    }
    finite
}
