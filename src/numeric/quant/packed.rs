//! The packed Q4_0 layout, the same bytes for every device.
//!
//! Rows are taken in groups of 16. For each group and each block `b` of 32 columns:
//!
//! - `scales[group][b][row]`: sixteen f16, 32 bytes
//! - `quants[group][b]`: 256 bytes = four 64-byte vectors; vector `v` holds for each row one 32-bit
//!   lane of four bytes, byte `k` = nibble of column `4v + k` (low) and of column `16 + 4v + k` (high)
//!
//! A last group that is not full is padded with rows of zeros (scale 0, nibbles 8).

use files::blocks::{BLOCK, BlockQ4};
use files::mapped::Plane;
use half::f16;
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

    /// Writes one row's values, exactly, into `x` of `COLS`.
    pub fn row(&self, row: usize, x: &mut [f32]) {
        assert!(row < ROWS && x.len() == COLS);
        let (group, lane) = (row / GROUP_ROWS, row % GROUP_ROWS);
        let (quants, scales) = (self.quants(group..group + 1), self.scales(group..group + 1));
        let blocks = quants.chunks_exact(QUANT_BYTES).zip(scales.chunks_exact(SCALE_BYTES));
        for ((quants, scales), x) in blocks.zip(x.as_chunks_mut::<BLOCK>().0) {
            let d = f16::from_le_bytes([scales[lane * 2], scales[lane * 2 + 1]]).to_f32();
            for (column, x) in x.iter_mut().enumerate() {
                *x = d * (i32::from(nibble(quants, lane, column)) - 8) as f32;
            }
        }
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
    put_nibbles(&mut quants[b * QUANT_BYTES..][..QUANT_BYTES], lane, &block.qs);
}

/// Writes sixteen bytes as row `lane` of one block's quants: byte `z` holds the nibbles of columns `z` and `z + 16`,
/// which is what a packed byte holds too.
#[inline(always)]
pub(super) fn put_nibbles(quants: &mut [u8], lane: usize, qs: &[u8]) {
    for v in 0..4 {
        quants[v * 64 + lane * 4..][..4].copy_from_slice(&qs[v * 4..][..4]);
    }
}

/// The nibble of `column` of row `lane`, from one block's quants.
#[inline(always)]
pub(super) fn nibble(quants: &[u8], lane: usize, column: usize) -> u8 {
    let (half, v, k) = (column / 16, column % 16 / 4, column % 4);
    quants[v * 64 + lane * 4 + k] >> (4 * half) & 15
}

/// Writes a row of stored Q4_0 blocks, `[block][18]`, as row `lane` of one group's planes, bit for bit; false when a
/// scale is not finite.
pub fn put_row(quants: &mut [u8], scales: &mut [u8], lane: usize, row: &[u8]) -> bool {
    let mut finite = true;
    for (b, stored) in row.as_chunks().0.iter().enumerate() {
        let block = BlockQ4::from_bytes(stored);
        finite &= block.d.is_finite();
        put_block(quants, scales, (b, lane), &block);
    }
    finite
}

#[cfg(test)]
mod tests {
    use super::*;
    use files::blocks::BlockType;
    use files::blocks::gguf::decode;
    use files::mapped::AlignedBytes;

    #[test]
    fn stored_blocks_are_packed_bit_for_bit() {
        const BLOCKS: usize = 3;
        let mut state = 1u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let (mut quants, mut scales) = (vec![0x88; BLOCKS * QUANT_BYTES], vec![0; BLOCKS * SCALE_BYTES]);
        let rows: Vec<Vec<u8>> =
            (0..GROUP_ROWS).map(|_| (0..BLOCKS * BlockQ4::BYTES).map(|_| byte()).collect()).collect();
        for (lane, row) in rows.iter().enumerate() {
            let finite = row.chunks(BlockQ4::BYTES).all(|b| f16::from_le_bytes([b[0], b[1]]).is_finite());
            assert_eq!(put_row(&mut quants, &mut scales, lane, row), finite);
        }
        for (lane, row) in rows.iter().enumerate() {
            for (b, stored) in row.as_chunks::<{ BlockQ4::BYTES }>().0.iter().enumerate() {
                assert_eq!(scales[b * SCALE_BYTES + 2 * lane..][..2], stored[..2]);
                let block = BlockQ4::from_bytes(stored);
                for column in 0..BLOCK {
                    // As the module's documentation has it.
                    let (v, k) = (column % 16 / 4, column % 4);
                    let packed = quants[b * QUANT_BYTES + v * 64 + lane * 4 + k];
                    let nibble = if column < 16 { packed & 15 } else { packed >> 4 };
                    assert_eq!(nibble, block.nibble(column), "row {lane}, block {b}, column {column}");
                }
            }
        }
        let plane = |bytes: &[u8]| {
            let mut plane = AlignedBytes::zeroed(bytes.len()).unwrap();
            plane.as_mut_slice().copy_from_slice(bytes);
            plane.into_plane()
        };
        const COLS: usize = BLOCKS * BLOCK;
        let matrix = Packed::<GROUP_ROWS, COLS>::new(plane(&quants), plane(&scales)).unwrap();
        for (i, row) in rows.iter().enumerate() {
            let (mut found, mut want) = ([0.0; COLS], [0.0; COLS]);
            matrix.row(i, &mut found);
            decode(BlockType::Q4_0, row, &mut want);
            assert_eq!(found.map(f32::to_bits), want.map(f32::to_bits), "row {i}");
        }
        let mut infinite = rows[0].clone();
        infinite[BlockQ4::BYTES..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
        assert!(!put_row(&mut quants, &mut scales, 0, &infinite));
    }
}
