//! Quantises rows of a checkpoint to Q4_0: one loop, compiled for the vectors that CPUs have.

use super::format::put_block;
use crate::widely;
use files::blocks::{BLOCK, BlockQ4, Dtype};

/// Quantises a stored row into row `lane` of one group's planes. False when a value is not finite or too large for an
/// f16 scale.
pub fn quantise(dtype: Dtype, row: &[u8], lane: usize, quants: &mut [u8], scales: &mut [u8]) -> bool {
    widely(
        #[inline(always)]
        || match dtype {
            Dtype::BF16 => blocks(Dtype::BF16, row, lane, quants, scales),
            other => blocks(other, row, lane, quants, scales),
        },
    )
}

/// Inlined for each type, so that the choice is out of the loop.
#[inline(always)]
fn blocks(dtype: Dtype, row: &[u8], lane: usize, quants: &mut [u8], scales: &mut [u8]) -> bool {
    let mut finite = true;
    for (b, stored) in row.chunks_exact(BLOCK * dtype.size()).enumerate() {
        let block = BlockQ4::quantise(&dtype.widen::<BLOCK>(stored));
        finite &= put_block(quants, scales, b, lane, &block);
    }
    finite
}
