//! The packed Q4_0 layout, the same bytes for every device.
//!
//! Rows are taken in groups of 16. For each group and each block `b` of 32 columns:
//!
//! - `scales[group][b][row]`: sixteen f16, 32 bytes
//! - `quants[group][b]`: 256 bytes = four 64-byte vectors; vector `v` holds for each row one 32-bit
//!   lane of four bytes, byte `k` = nibble of column `4v + k` (low) and of column `16 + 4v + k` (high)
//!
//! A last group that is not full is padded with rows of zeros (scale 0, nibbles 8).

use super::{BLOCK, BlockQ4};
use crate::weights::region::Plane;
use std::ops::Range;

/// Rows in one group.
pub const GROUP_ROWS: usize = 16;
/// Bytes of quants of one group and one block.
pub const QUANT_BYTES: usize = 256;
/// Bytes of scales of one group and one block.
pub const SCALE_BYTES: usize = 32;

/// A `ROWS` x `COLS` matrix in the packed layout. `COLS` is a multiple of 32.
#[derive(Clone)]
pub struct Packed<const ROWS: usize, const COLS: usize> {
    quants: Plane, // [group][block][256], u8
    scales: Plane, // [group][block][16], f16
}

impl<const ROWS: usize, const COLS: usize> Packed<ROWS, COLS> {
    /// Groups of 16 rows.
    pub const GROUPS: usize = ROWS.div_ceil(GROUP_ROWS);
    /// Blocks of 32 columns.
    pub const BLOCKS: usize = COLS / BLOCK;
    /// Bytes of the quants plane.
    pub const QUANTS_LEN: usize = Self::GROUPS * Self::BLOCKS * QUANT_BYTES;
    /// Bytes of the scales plane.
    pub const SCALES_LEN: usize = Self::GROUPS * Self::BLOCKS * SCALE_BYTES;

    /// Takes the two planes; `None` when a length is not what the shape needs.
    pub fn new(quants: Plane, scales: Plane) -> Option<Self> {
        let fits = COLS.is_multiple_of(BLOCK)
            && quants.bytes().len() == Self::QUANTS_LEN
            && scales.bytes().len() >= Self::SCALES_LEN;
        fits.then_some(Self { quants, scales })
    }

    /// Says that these bytes of a mapped file are not needed soon; see [`Plane::release`].
    pub fn release(&self) {
        self.quants.release();
        self.scales.release();
    }

    /// Quants of some groups: `[group][block][256]`.
    #[inline]
    pub fn quants(&self, groups: Range<usize>) -> &[u8] {
        let len = Self::BLOCKS * QUANT_BYTES;
        &self.quants.bytes()[groups.start * len..groups.end * len]
    }

    /// Scales of some groups: `[group][block][16]` f16, little endian.
    #[inline]
    pub fn scales(&self, groups: Range<usize>) -> &[u8] {
        let len = Self::BLOCKS * SCALE_BYTES;
        &self.scales.bytes()[groups.start * len..groups.end * len]
    }
}

/// Writes block `b` of row `lane` into one group's planes.
#[inline(always)]
pub fn put_block(quants: &mut [u8], scales: &mut [u8], (b, lane): (usize, usize), block: &BlockQ4) {
    scales[b * SCALE_BYTES + lane * 2..][..2].copy_from_slice(&block.d.to_le_bytes());
    // Byte `z` holds the nibbles of columns z and z + 16, which is what a packed byte holds too.
    let quants = &mut quants[b * QUANT_BYTES..][..QUANT_BYTES];
    for v in 0..4 {
        quants[v * 64 + lane * 4..][..4].copy_from_slice(&block.qs[v * 4..][..4]);
    }
}
