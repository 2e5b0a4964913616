//! GGUF's block formats in a packed layout of their own, for matrices that are multiplied with as they are stored.
//!
//! As in [`packed`](super::packed), rows are taken in groups of 16, and each group has two planes, `quants` and
//! `scales`, in ascending blocks of 32 columns. Stored integers are kept as they are:
//!
//! - 4 bits: the 256 bytes of [`packed`](super::packed): vector `v` holds for each row four bytes, byte `k` = columns
//!   `4v + k` (low nibble) and `16 + 4v + k` (high)
//! - 5 bits: the same, then one vector of 64 bytes with the fifth bits: byte `k` of a row has that of column `4v + k` in
//!   bit `v` and that of column `16 + 4v + k` in bit `4 + v`
//! - 6 bits: the same, then two vectors with the upper two bits, of columns 0 to 15 and of columns 16 to 31: byte `k` of
//!   a row has those of column `4v + k` (and `16 + 4v + k`) in bits `2v` and `2v + 1`
//! - 8 bits: eight vectors, byte `k` of a row in vector `v` = column `4v + k`
//!
//! Scales, a run for each span of columns that shares them (all f16 little-endian, `[16]` = one for each row):
//!
//! | format | span | run |
//! |---|---|---|
//! | Q5_0, Q8_0 | 32 | `d[16]` f16 |
//! | Q4_1, Q5_1 | 32 | `d[16]` f16, `m[16]` f16 |
//! | Q4_K, Q5_K | 256 | `d[16]` f16, `dmin[16]` f16, then of each of eight blocks `scale[16]` u8, `min[16]` u8 |
//! | Q6_K | 256 | `d[16]` f16, then of each of eight blocks `scale[16]` i8 of its first 16 columns, `scale[16]` i8 of the others |
//!
//! A last group that is not full is padded with rows of zero bytes, which stand for zeros (Q5_0 and Q6_K by their scale).
//!
//! # What is computed
//!
//! One accumulator a row and token, blocks `b` in ascending order, `a` and `d_a` the activations of
//! [`act`](super::act), every operation an f32 one that rounds once:
//!
//! - Q5_0, Q8_0: `acc = fma(sum(q * a), d * d_a, acc)`, where 16 is taken from a stored `q` of Q5_0
//! - Q6_K: the same with `scale_0 * sum(q * a) + scale_1 * sum(q * a)` of the two halves of the block, where 32 is
//!   taken from a stored `q`; below 2^24, so it is exact
//! - Q4_1, Q5_1: `acc = fma(sum(q * a), d * d_a, acc)`, then `acc = fma(m, s, acc)` with `s = d_a * sum(a)`
//! - Q4_K, Q5_K: `acc = fma(sum(q * a), (d * scale) * d_a, acc)`, then `acc = fma(-(dmin * min), s, acc)`; `d * scale`
//!   and `dmin * min` are exact
//!
//! So the result is the same bits everywhere, like that of Q4_0.

use super::packed::{GROUP_ROWS, nibble, put_nibbles};
use files::blocks::{BLOCK, BlockType};
use files::mapped::Plane;
use half::f16;
use std::array::from_fn;
use std::ops::Range;

/// A format of this layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs, reason = "the field's own names")]
pub enum Format {
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 7] = {
        use Format::*;
        [Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K]
    };

    /// The format that a file's blocks have, if they are kept in this layout.
    pub fn of(block: BlockType) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.block() == block)
    }

    /// The blocks of a file.
    pub const fn block(self) -> BlockType {
        match self {
            Format::Q4_1 => BlockType::Q4_1,
            Format::Q5_0 => BlockType::Q5_0,
            Format::Q5_1 => BlockType::Q5_1,
            Format::Q8_0 => BlockType::Q8_0,
            Format::Q4_K => BlockType::Q4_K,
            Format::Q5_K => BlockType::Q5_K,
            Format::Q6_K => BlockType::Q6_K,
        }
    }

    /// Bits of a stored integer.
    pub const fn bits(self) -> usize {
        match self {
            Format::Q4_1 | Format::Q4_K => 4,
            Format::Q5_0 | Format::Q5_1 | Format::Q5_K => 5,
            Format::Q6_K => 6,
            Format::Q8_0 => 8,
        }
    }

    /// What is taken from a stored integer. (Those of Q8_0 have a sign of their own.)
    pub const fn zero(self) -> i32 {
        match self {
            Format::Q5_0 => 16,
            Format::Q6_K => 32,
            _ => 0,
        }
    }

    /// Bytes of quants of one group and one block of 32 columns.
    pub const fn quant_bytes(self) -> usize {
        64 * self.bits()
    }

    /// Columns that share a run of scales.
    pub const fn span(self) -> usize {
        match self {
            Format::Q4_K | Format::Q5_K | Format::Q6_K => 256,
            _ => BLOCK,
        }
    }

    /// Bytes of scales of one group and one span.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Format::Q5_0 | Format::Q8_0 => 32,
            Format::Q4_1 | Format::Q5_1 => 64,
            Format::Q4_K | Format::Q5_K => 64 + 8 * 32,
            Format::Q6_K => 32 + 8 * 32,
        }
    }

    /// Bytes of f16s, with which a run of scales begins.
    pub const fn half_bytes(self) -> usize {
        if self.has_floor() { 64 } else { 32 }
    }

    /// Whether something is added to the products.
    const fn has_floor(self) -> bool {
        matches!(self, Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K)
    }

    /// Bytes of the quants and of the scales of one group of rows of `cols` columns, a multiple of the span.
    pub const fn group_bytes(self, cols: usize) -> (usize, usize) {
        (cols / BLOCK * self.quant_bytes(), cols / self.span() * self.scale_bytes())
    }

    /// Writes a stored row, whole blocks of a file, as row `lane` of one group's planes, which hold zeros there;
    /// false when a scale is not finite.
    pub fn put_row(self, quants: &mut [u8], scales: &mut [u8], lane: usize, row: &[u8]) -> bool {
        match self {
            Format::Q4_1 => each(row, |b, block: &[u8; 20]| {
                put_nibbles(block_of(quants, self, b), lane, &block[4..]);
                put_halves(&mut scales[b * 64..], lane, &block[..4])
            }),
            Format::Q5_0 => each(row, |b, block: &[u8; 22]| {
                put_five(block_of(quants, self, b), lane, &block[6..], &block[2..6]);
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q5_1 => each(row, |b, block: &[u8; 24]| {
                put_five(block_of(quants, self, b), lane, &block[8..], &block[4..8]);
                put_halves(&mut scales[b * 64..], lane, &block[..4])
            }),
            Format::Q8_0 => each(row, |b, block: &[u8; 34]| {
                put_bytes(block_of(quants, self, b), lane, &block[2..]);
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q4_K => each(row, |s, block: &[u8; 144]| {
                for p in 0..8 {
                    let q = from_fn::<_, BLOCK, _>(|i| block[16 + p / 2 * 32 + i] >> (p % 2 * 4) & 15);
                    put_low(block_of(quants, self, 8 * s + p), lane, &q);
                }
                put_parts(&mut scales[s * self.scale_bytes()..], lane, block.first_chunk().expect("16 bytes"))
            }),
            Format::Q5_K => each(row, |s, block: &[u8; 176]| {
                for p in 0..8 {
                    let q = from_fn::<_, BLOCK, _>(|i| {
                        block[48 + p / 2 * 32 + i] >> (p % 2 * 4) & 15 | (block[16 + i] >> p & 1) << 4
                    });
                    put_wide::<1>(block_of(quants, self, 8 * s + p), lane, &q);
                }
                put_parts(&mut scales[s * self.scale_bytes()..], lane, block.first_chunk().expect("16 bytes"))
            }),
            Format::Q6_K => each(row, |s, block: &[u8; 210]| {
                let scales = &mut scales[s * self.scale_bytes()..];
                for p in 0..8 {
                    let (half, part) = (p / 4, p % 4);
                    let q = from_fn::<_, BLOCK, _>(|i| {
                        let low = block[64 * half + part % 2 * 32 + i] >> (part / 2 * 4) & 15;
                        low | (block[128 + 32 * half + i] >> (2 * part) & 3) << 4
                    });
                    put_wide::<2>(block_of(quants, self, 8 * s + p), lane, &q);
                    for h in 0..2 {
                        scales[32 + p * 32 + h * 16 + lane] = block[192 + 2 * p + h];
                    }
                }
                put_halves(scales, lane, &block[208..])
            }),
        }
    }

    /// Stored integer of `column` of row `lane`, its zero taken away, from one block's quants.
    pub fn quant(self, quants: &[u8], lane: usize, column: usize) -> i32 {
        let (half, v, k) = (column / 16, column % 16 / 4, column % 4);
        if self == Format::Q8_0 {
            return i32::from(quants[column / 4 * 64 + lane * 4 + k] as i8);
        }
        let at = lane * 4 + k;
        let low = nibble(quants, lane, column);
        let high = match self.bits() {
            5 => quants[256 + at] >> (4 * half + v) & 1,
            6 => quants[256 + 64 * half + at] >> (2 * v) & 3,
            _ => 0,
        };
        i32::from(low | high << 4) - self.zero()
    }

    /// What the integers of block `b` of row `lane` are multiplied with, in its first and its second half, and what is
    /// added then: value = level * integer + floor. `scales` are those of one group.
    pub fn scale(self, scales: &[u8], lane: usize, b: usize) -> ([f32; 2], f32) {
        let half = |at: usize| f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
        let run = b * BLOCK / self.span() * self.scale_bytes();
        let d = half(run + 2 * lane);
        let part = b % (self.span() / BLOCK) * 32 + lane;
        match self {
            Format::Q5_0 | Format::Q8_0 => ([d; 2], 0.0),
            Format::Q4_1 | Format::Q5_1 => ([d; 2], half(run + 32 + 2 * lane)),
            Format::Q4_K | Format::Q5_K => {
                let (level, min) = (scales[run + 64 + part], scales[run + 64 + part + 16]);
                ([d * f32::from(level); 2], -(half(run + 32 + 2 * lane) * f32::from(min)))
            }
            Format::Q6_K => {
                let levels = [scales[run + 32 + part], scales[run + 32 + part + 16]];
                (levels.map(|level| d * f32::from(level as i8)), 0.0)
            }
        }
    }
}

/// A `ROWS` x `COLS` matrix in this layout. `COLS` is a multiple of the format's span.
#[derive(Clone)]
pub struct Native<const ROWS: usize, const COLS: usize> {
    format: Format,
    quants: Plane, // [group][block][quant_bytes]
    scales: Plane, // [group][span][scale_bytes]
}

impl<const ROWS: usize, const COLS: usize> Native<ROWS, COLS> {
    /// Groups of 16 rows.
    pub const GROUPS: usize = ROWS.div_ceil(GROUP_ROWS);

    /// Takes the two planes; `None` when a length is not what format and shape need.
    pub fn new(format: Format, quants: Plane, scales: Plane) -> Option<Self> {
        let (of_quants, of_scales) = format.group_bytes(COLS);
        let fits = COLS.is_multiple_of(format.span())
            && quants.bytes().len() == Self::GROUPS * of_quants
            && scales.bytes().len() >= Self::GROUPS * of_scales;
        fits.then_some(Self { format, quants, scales })
    }

    /// How it is stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Writes one row's values, as the file has them, into `x` of `COLS`.
    pub fn row(&self, row: usize, x: &mut [f32]) {
        assert!(row < ROWS && x.len() == COLS);
        let (group, lane) = (row / GROUP_ROWS, row % GROUP_ROWS);
        let (quants, scales) = (self.quants(group..group + 1), self.scales(group..group + 1));
        let blocks = quants.chunks_exact(self.format.quant_bytes());
        for (b, (quants, x)) in blocks.zip(x.as_chunks_mut::<BLOCK>().0).enumerate() {
            let (levels, floor) = self.format.scale(scales, lane, b);
            for (column, x) in x.iter_mut().enumerate() {
                let product = levels[column / 16] * self.format.quant(quants, lane, column) as f32;
                // A zero that were added would take the sign of another.
                *x = if self.format.has_floor() { product + floor } else { product };
            }
        }
    }

    /// Says that these bytes of a mapped file are not needed soon; see [`Plane::release`].
    pub fn release(&self) {
        self.quants.release();
        self.scales.release();
    }

    /// Quants of some groups.
    #[inline]
    pub fn quants(&self, groups: Range<usize>) -> &[u8] {
        let len = self.format.group_bytes(COLS).0;
        &self.quants.bytes()[groups.start * len..groups.end * len]
    }

    /// Scales of some groups.
    #[inline]
    pub fn scales(&self, groups: Range<usize>) -> &[u8] {
        let len = self.format.group_bytes(COLS).1;
        &self.scales.bytes()[groups.start * len..groups.end * len]
    }
}

/// `put(index, block)` for each block of a row; true when all were.
fn each<const BYTES: usize>(row: &[u8], mut put: impl FnMut(usize, &[u8; BYTES]) -> bool) -> bool {
    row.as_chunks().0.iter().enumerate().fold(true, |all, (b, block)| put(b, block) & all)
}

/// The quants of block `b`.
fn block_of(quants: &mut [u8], format: Format, b: usize) -> &mut [u8] {
    &mut quants[b * format.quant_bytes()..][..format.quant_bytes()]
}

/// The low four bits of 32 integers.
fn put_low(quants: &mut [u8], lane: usize, q: &[u8; BLOCK]) {
    put_nibbles(quants, lane, &from_fn::<_, 16, _>(|z| q[z] & 15 | q[z + 16] << 4));
}

/// 32 integers of four bits and `UPPER` more.
fn put_wide<const UPPER: usize>(quants: &mut [u8], lane: usize, q: &[u8; BLOCK]) {
    put_low(quants, lane, q);
    for (column, q) in q.iter().enumerate() {
        let (half, v, k) = (column / 16, column % 16 / 4, column % 4);
        match UPPER {
            1 => quants[256 + lane * 4 + k] |= (q >> 4 & 1) << (4 * half + v),
            _ => quants[256 + 64 * half + lane * 4 + k] |= (q >> 4 & 3) << (2 * v),
        }
    }
}

/// Nibbles, and the fifth bits of columns in ascending order.
fn put_five(quants: &mut [u8], lane: usize, qs: &[u8], high: &[u8]) {
    let nibble = |z: usize| if z < 16 { qs[z] & 15 } else { qs[z - 16] >> 4 };
    put_wide::<1>(quants, lane, &from_fn(|z| nibble(z) | (high[z / 8] >> (z % 8) & 1) << 4));
}

fn put_bytes(quants: &mut [u8], lane: usize, qs: &[u8]) {
    for v in 0..8 {
        quants[v * 64 + lane * 4..][..4].copy_from_slice(&qs[v * 4..][..4]);
    }
}

/// The f16s of a row, each into an array of sixteen; false when one is not finite.
fn put_halves(run: &mut [u8], lane: usize, halves: &[u8]) -> bool {
    halves.as_chunks().0.iter().enumerate().fold(true, |all, (i, half)| {
        run[i * 32 + lane * 2..][..2].copy_from_slice(half);
        all & f16::from_le_bytes(*half).is_finite()
    })
}

/// Scales and minimums of Q4_K and Q5_K, from a block's first sixteen bytes.
fn put_parts(run: &mut [u8], lane: usize, head: &[u8; 16]) -> bool {
    let packed = head.last_chunk().expect("twelve bytes");
    for p in 0..8 {
        let (level, min) = files::blocks::gguf::superblock::six_bits(packed, p);
        run[64 + p * 32 + lane] = level;
        run[64 + p * 32 + 16 + lane] = min;
    }
    put_halves(run, lane, &head[..4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use files::blocks::gguf::decode;
    use files::mapped::AlignedBytes;

    /// Bytes without a pattern, of which no f16 is infinite.
    fn bytes(len: usize, seed: u32) -> Vec<u8> {
        let mut state = seed;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8 & 0xbf
        };
        (0..len).map(|_| byte()).collect()
    }

    #[test]
    fn packed_rows_hold_the_values_of_the_file() {
        const COLS: usize = 512;
        for format in Format::ALL {
            let block = format.block();
            let (quants, scales) = format.group_bytes(COLS);
            let (mut quants, mut scales) =
                (AlignedBytes::zeroed(quants).unwrap(), AlignedBytes::zeroed(scales).unwrap());
            let stored = |lane| bytes(COLS / block.values() * block.bytes(), lane as u32 + 1);
            for lane in 0..GROUP_ROWS {
                let planes = (quants.as_mut_slice(), scales.as_mut_slice());
                assert!(format.put_row(planes.0, planes.1, lane, &stored(lane)), "{format:?}");
            }
            let matrix = Native::<GROUP_ROWS, COLS>::new(format, quants.into_plane(), scales.into_plane());
            let matrix = matrix.expect("planes of these lengths");
            for row in 0..GROUP_ROWS {
                let (mut found, mut want) = ([0.0; COLS], [0.0; COLS]);
                matrix.row(row, &mut found);
                decode(block, &stored(row), &mut want);
                assert_eq!(found.map(f32::to_bits), want.map(f32::to_bits), "{format:?} row {row}");
            }
        }
    }

    #[test]
    fn a_scale_that_is_not_finite_is_seen() {
        for format in Format::ALL {
            let block = format.block();
            let (quants, scales) = format.group_bytes(256);
            for blocks in [0, 256 / block.values() - 1] {
                let mut row = bytes(256 / block.values() * block.bytes(), 7);
                let d = if format == Format::Q6_K { 208 } else { 0 };
                row[blocks * block.bytes() + d..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
                let (mut quants, mut scales) = (vec![0; quants], vec![0; scales]);
                assert!(!format.put_row(&mut quants, &mut scales, 3, &row), "{format:?}");
            }
        }
    }
}
