//! The block formats of matrix products, and the packed layout in which all devices read them.
//!
//! Rows are taken in groups of 16. Each group has two planes, `quants` and `scales`, in ascending blocks of 32 columns.
//! Stored integers are kept as they are. Quants of one group and one block:
//!
//! - 4 bits: four vectors of 64 bytes. Vector `v` has four bytes for each row; byte `k` holds column `4v + k` in its
//!   low nibble and column `16 + 4v + k` in its high nibble
//! - 5 bits: the same, then one vector with the fifth bits: byte `k` of a row has the bit of column `4v + k` in bit `v`
//!   and the bit of column `16 + 4v + k` in bit `4 + v`
//! - 6 bits: the 4-bit vectors, then two vectors with the upper two bits, one for columns 0 to 15 and one for columns
//!   16 to 31: byte `k` of a row has the bits of column `4v + k` (or `16 + 4v + k`) in bits `2v` and `2v + 1`
//! - 8 bits: eight vectors; byte `k` of a row in vector `v` is column `4v + k`
//!
//! Scales come in runs, one for each span of columns that shares them. All f16 are little-endian, and `[16]` means one
//! for each row:
//!
//! | format | span | run |
//! |---|---|---|
//! | Q4_0, Q5_0, Q8_0 | 32 | `d[16]` f16 |
//! | Q4_1, Q5_1 | 32 | `d[16]` f16, `m[16]` f16 |
//! | Q4_K, Q5_K | 256 | `d[16]` f16, `dmin[16]` f16, then for each of eight blocks `scale[16]` u8, `min[16]` u8 |
//! | Q6_K | 256 | `d[16]` f16, then for each of eight blocks `scale[16]` i8 of its first 16 columns, `scale[16]` i8 of the others |
//!
//! Rows that fill up the last group are zeros: nibbles of 8 in Q4_0, zero bytes otherwise, and scales of 0.
//!
//! # Definition of the product
//!
//! Each row and token has one accumulator. Blocks `b` are added in ascending order. `a` and `d_a` are the
//! [`activations`](super::activations). Every operation is an f32 operation that rounds once:
//!
//! - Q4_0, Q5_0, Q8_0: `acc = fma(sum(q * a), d * d_a, acc)`. From a stored `q`, Q4_0 takes away 8 and Q5_0 16
//! - Q6_K: the same with `scale_0 * sum(q * a) + scale_1 * sum(q * a)` of the two halves of the block, where 32 is
//!   taken away from a stored `q`. This stays below 2^24, so it is exact
//! - Q4_1, Q5_1: `acc = fma(sum(q * a), d * d_a, acc)`, then `acc = fma(m, s, acc)` with `s = d_a * sum(a)`
//! - Q4_K, Q5_K: `acc = fma(sum(q * a), (d * scale) * d_a, acc)`, then `acc = fma(-(dmin * min), s, acc)`; `d * scale`
//!   and `dmin * min` are exact
//!
//! So the result has the same bits on every device and instruction set.

use files::blocks::{BLOCK, BlockQ4, BlockType};
use half::f16;
use std::array::from_fn;

/// Rows in one group.
pub const GROUP_ROWS: usize = 16;

/// A block format, with its name in GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs, reason = "the field's own names")]
pub enum Format {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Format {
    pub const ALL: [Format; 8] = {
        use Format::*;
        [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K]
    };

    /// The format for a file's block type; `None` for types that are not stored in this layout.
    pub fn from_block_type(block: BlockType) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.block_type() == block)
    }

    /// The block type in a file.
    pub const fn block_type(self) -> BlockType {
        match self {
            Format::Q4_0 => BlockType::Q4_0,
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
    pub(crate) const fn extract_bits(self) -> usize {
        match self {
            Format::Q4_0 | Format::Q4_1 | Format::Q4_K => 4,
            Format::Q5_0 | Format::Q5_1 | Format::Q5_K => 5,
            Format::Q6_K => 6,
            Format::Q8_0 => 8,
        }
    }

    /// Zero point, subtracted from a stored integer. Those of Q8_0 are signed already.
    pub(crate) const fn zero_point(self) -> i32 {
        match self {
            Format::Q4_0 => 8,
            Format::Q5_0 => 16,
            Format::Q6_K => 32,
            _ => 0,
        }
    }

    /// Value of the quant bytes in rows that fill up the last group.
    pub const fn padding_byte(self) -> u8 {
        if matches!(self, Format::Q4_0) { 0x88 } else { 0 }
    }

    /// Bytes of quants of one group and one block of 32 columns.
    pub(crate) const fn quant_bytes(self) -> usize {
        64 * self.extract_bits()
    }

    /// Columns that share a run of scales.
    pub const fn scale_span(self) -> usize {
        match self {
            Format::Q4_K | Format::Q5_K | Format::Q6_K => 256,
            _ => BLOCK,
        }
    }

    /// Bytes of scales of one group and one span.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => 32,
            Format::Q4_1 | Format::Q5_1 => 64,
            Format::Q4_K | Format::Q5_K => 64 + 8 * 32,
            Format::Q6_K => 32 + 8 * 32,
        }
    }

    /// Bytes of the f16 values at the start of a run of scales.
    pub const fn half_bytes(self) -> usize {
        if self.has_minimum() { 64 } else { 32 }
    }

    /// Returns true if a minimum is added to the products.
    pub const fn has_minimum(self) -> bool {
        matches!(self, Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K)
    }

    /// Bytes of the quants and of the scales of one group of rows with `cols` columns, a multiple of the span.
    pub const fn group_bytes(self, cols: usize) -> (usize, usize) {
        (cols / BLOCK * self.quant_bytes(), cols / self.scale_span() * self.scale_bytes())
    }

    /// Copies a row of a file's blocks bit for bit to row `lane` of one group's planes, which must hold
    /// [`Format::padding_byte`] and zeros there. Returns false if a scale is not finite.
    pub fn put_row(self, quants: &mut [u8], scales: &mut [u8], lane: usize, row: &[u8]) -> bool {
        match self {
            Format::Q4_0 => put_each(row, |b, block: &[u8; 18]| {
                put_nibbles(block_of(quants, self, b), lane, &block[2..]);
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q4_1 => put_each(row, |b, block: &[u8; 20]| {
                put_nibbles(block_of(quants, self, b), lane, &block[4..]);
                put_halves(&mut scales[b * 64..], lane, &block[..4])
            }),
            Format::Q5_0 => put_each(row, |b, block: &[u8; 22]| {
                put_wide::<1>(block_of(quants, self, b), lane, join_fifth_bits(&block[6..], &block[2..6]));
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q5_1 => put_each(row, |b, block: &[u8; 24]| {
                put_wide::<1>(block_of(quants, self, b), lane, join_fifth_bits(&block[8..], &block[4..8]));
                put_halves(&mut scales[b * 64..], lane, &block[..4])
            }),
            Format::Q8_0 => put_each(row, |b, block: &[u8; 34]| {
                put_bytes(block_of(quants, self, b), lane, &block[2..]);
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q4_K => put_each(row, |s, block: &[u8; 144]| {
                for p in 0..8 {
                    let q = extract_bits::<4>(&block[16 + p / 2 * 32..], p % 2 * 4);
                    put_wide::<0>(block_of(quants, self, 8 * s + p), lane, q);
                }
                put_parts(&mut scales[s * self.scale_bytes()..], lane, block.first_chunk().expect("16 bytes"))
            }),
            Format::Q5_K => put_each(row, |s, block: &[u8; 176]| {
                for p in 0..8 {
                    let q = extract_bits::<4>(&block[48 + p / 2 * 32..], p % 2 * 4);
                    let q = join_bits(q, extract_bits::<1>(&block[16..], p));
                    put_wide::<1>(block_of(quants, self, 8 * s + p), lane, q);
                }
                put_parts(&mut scales[s * self.scale_bytes()..], lane, block.first_chunk().expect("16 bytes"))
            }),
            Format::Q6_K => put_each(row, |s, block: &[u8; 210]| {
                let scales = &mut scales[s * self.scale_bytes()..];
                for p in 0..8 {
                    let (half, part) = (p / 4, p % 4);
                    let q = extract_bits::<4>(&block[64 * half + part % 2 * 32..], part / 2 * 4);
                    let q = join_bits(q, extract_bits::<2>(&block[128 + 32 * half..], 2 * part));
                    put_wide::<2>(block_of(quants, self, 8 * s + p), lane, q);
                    for h in 0..2 {
                        scales[32 + p * 32 + h * 16 + lane] = block[192 + 2 * p + h];
                    }
                }
                put_halves(scales, lane, &block[208..])
            }),
        }
    }

    /// Decodes the integers of row `lane` from one block's quants, with [`Format::zero_point`] subtracted.
    pub(crate) fn decode_integers(self, quants: &[u8], lane: usize) -> [i8; BLOCK] {
        let (mut row, words) = ([0; BLOCK], quants.chunks_exact(4 * GROUP_ROWS));
        let bits = self.extract_bits();
        for (v, word) in words.take(if bits == 8 { 8 } else { 4 }).enumerate() {
            for k in 0..4 {
                let at = lane * 4 + k;
                if bits == 8 {
                    row[4 * v + k] = word[at] as i8;
                    continue;
                }
                for half in 0..2 {
                    let high = match bits {
                        5 => quants[256 + at] >> (4 * half + v) & 1,
                        6 => quants[256 + 64 * half + at] >> (2 * v) & 3,
                        _ => 0,
                    };
                    let integer = word[at] >> (4 * half) & 15 | high << 4;
                    row[16 * half + 4 * v + k] = integer as i8 - self.zero_point() as i8;
                }
            }
        }
        row
    }

    /// Decodes the scales of the two halves of block `b` of row `lane`, and its minimum: value = scale * integer +
    /// minimum.
    /// `scales` are those of one group.
    pub(crate) fn decode_scale(self, scales: &[u8], lane: usize, b: usize) -> ([f32; 2], f32) {
        let half = |at: usize| f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
        let run = b * BLOCK / self.scale_span() * self.scale_bytes();
        let d = half(run + 2 * lane);
        let part = b % (self.scale_span() / BLOCK) * 32 + lane;
        match self {
            Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => ([d; 2], 0.0),
            Format::Q4_1 | Format::Q5_1 => ([d; 2], half(run + 32 + 2 * lane)),
            Format::Q4_K | Format::Q5_K => {
                let (block_scale, min) = (scales[run + 64 + part], scales[run + 64 + part + 16]);
                ([d * f32::from(block_scale); 2], -(half(run + 32 + 2 * lane) * f32::from(min)))
            }
            Format::Q6_K => {
                let block_scales = [scales[run + 32 + part], scales[run + 32 + part + 16]];
                (block_scales.map(|block_scale| d * f32::from(block_scale as i8)), 0.0)
            }
        }
    }
}

/// Writes a quantised block as block `b` of row `lane` of one group's planes, in Q4_0. Returns false if its scale is
/// not finite.
#[inline(always)]
pub fn put_block(quants: &mut [u8], scales: &mut [u8], b: usize, lane: usize, block: &BlockQ4) -> bool {
    put_nibbles(block_of(quants, Format::Q4_0, b), lane, &block.qs);
    put_halves(&mut scales[b * Format::Q4_0.scale_bytes()..], lane, &block.d.to_le_bytes())
}

/// Writes sixteen bytes as row `lane` of one block's quants. Byte `z` holds the nibbles of columns `z` and `z + 16`, as
/// in the packed layout.
#[inline(always)]
fn put_nibbles(quants: &mut [u8], lane: usize, qs: &[u8]) {
    for v in 0..4 {
        quants[v * 64 + lane * 4..][..4].copy_from_slice(&qs[v * 4..][..4]);
    }
}

/// Calls `put(index, block)` for each block of a row; returns true if every call did.
fn put_each<const BYTES: usize>(row: &[u8], mut put: impl FnMut(usize, &[u8; BYTES]) -> bool) -> bool {
    row.as_chunks().0.iter().enumerate().fold(true, |all, (b, block)| put(b, block) & all)
}

/// The quants of block `b`.
#[inline(always)]
fn block_of(quants: &mut [u8], format: Format, b: usize) -> &mut [u8] {
    &mut quants[b * format.quant_bytes()..][..format.quant_bytes()]
}

/// 32 integers of a row's block: byte `k` of word `v` is column `4v + k`. Packing K-quants integer by integer took
/// about five times as long.
type Words = [u32; BLOCK / 4];

/// Extracts the `N` bits from bit `shift` on of each of the first 32 bytes.
#[inline(always)]
fn extract_bits<const N: usize>(bytes: &[u8], shift: usize) -> Words {
    let words = bytes[..BLOCK].as_chunks().0;
    from_fn(|v| u32::from_le_bytes(words[v]) >> shift & (0x0101_0101 * ((1 << N) - 1)))
}

/// Puts the bits of `high` above the four bits of `low`.
#[inline(always)]
fn join_bits(low: Words, high: Words) -> Words {
    from_fn(|v| low[v] | high[v] << 4)
}

/// Writes integers of `4 + UPPER` bits as row `lane` of one block's quants.
#[inline(always)]
fn put_wide<const UPPER: usize>(quants: &mut [u8], lane: usize, q: Words) {
    let mut put = |at: usize, word: u32| quants[at + 4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    let low = q.map(|q| q & 0x0f0f_0f0f);
    for v in 0..4 {
        put(64 * v, low[v] | low[4 + v] << 4);
    }
    let high = q.map(|q| q >> 4 & 0x0f0f_0f0f);
    let joined = |from: usize, n: usize| (0..n).fold(0, |all, v| all | high[from + v] << (UPPER * v));
    match UPPER {
        0 => {}
        1 => put(256, joined(0, 8)),
        _ => {
            put(256, joined(0, 4));
            put(256 + 64, joined(4, 4));
        }
    }
}

/// Joins nibbles with fifth bits, which are in ascending order of columns.
fn join_fifth_bits(qs: &[u8], high: &[u8]) -> Words {
    let nibble = |z: usize| if z < 16 { qs[z] & 15 } else { qs[z - 16] >> 4 };
    from_fn(|v| {
        let q = |k: usize| nibble(4 * v + k) | (high[v / 2] >> (v % 2 * 4 + k) & 1) << 4;
        u32::from_le_bytes(from_fn(q))
    })
}

fn put_bytes(quants: &mut [u8], lane: usize, qs: &[u8]) {
    for v in 0..8 {
        quants[v * 64 + lane * 4..][..4].copy_from_slice(&qs[v * 4..][..4]);
    }
}

/// Writes the f16 values of a row, each into an array of sixteen; returns false if one is not finite.
#[inline(always)]
fn put_halves(run: &mut [u8], lane: usize, halves: &[u8]) -> bool {
    halves.as_chunks().0.iter().enumerate().fold(true, |all, (i, half)| {
        run[i * 32 + lane * 2..][..2].copy_from_slice(half);
        all & f16::from_le_bytes(*half).is_finite()
    })
}

/// Writes the scales and minimums of Q4_K and Q5_K from a block's first sixteen bytes. Returns false if one is not
/// finite.
fn put_parts(run: &mut [u8], lane: usize, head: &[u8; 16]) -> bool {
    let packed = head.last_chunk().expect("twelve bytes");
    for p in 0..8 {
        let (block_scale, min) = files::blocks::gguf::superblock::unpack_scale_min(packed, p);
        run[64 + p * 32 + lane] = block_scale;
        run[64 + p * 32 + 16 + lane] = min;
    }
    put_halves(run, lane, &head[..4])
}

#[cfg(test)]
mod tests;
