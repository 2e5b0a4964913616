//! Rows of a file's blocks, written to the packed layout.

use super::Format;
use files::blocks::gguf::coded::{ScaleCode, Words, extract_bits, join_bits};
use files::blocks::gguf::superblock::unpack_scale_min;
use files::blocks::{BLOCK, BlockQ4};
use half::f16;
use std::array::from_fn;

impl Format {
    /// Copies a row of a file's blocks bit for bit to row `lane` of one group's planes, which must hold
    /// [`Format::padding_byte`] and zeros there. Returns false if a scale is not finite.
    pub fn put_row(self, quants: &mut [u8], scales: &mut [u8], lane: usize, row: &[u8]) -> bool {
        match self {
            Format::Q4_0 | Format::IQ4_NL => put_each(row, |b, block: &[u8; 18]| {
                put_nibbles(block_of(quants, self, b), lane, &block[2..]);
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q4_1 => put_each(row, |b, block: &[u8; 20]| {
                put_nibbles(block_of(quants, self, b), lane, &block[4..]);
                put_halves(&mut scales[b * 64..], lane, &block[..4])
            }),
            Format::Q5_0 => put_each(row, |b, block: &[u8; 22]| {
                put_words::<5>(block_of(quants, self, b), lane, join_fifth_bits(&block[6..], &block[2..6]));
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q5_1 => put_each(row, |b, block: &[u8; 24]| {
                put_words::<5>(block_of(quants, self, b), lane, join_fifth_bits(&block[8..], &block[4..8]));
                put_halves(&mut scales[b * 64..], lane, &block[..4])
            }),
            Format::Q8_0 => put_each(row, |b, block: &[u8; 34]| {
                put_bytes(block_of(quants, self, b), lane, &block[2..]);
                put_halves(&mut scales[b * 32..], lane, &block[..2])
            }),
            Format::Q4_K => put_each(row, |s, block: &[u8; 144]| {
                for p in 0..8 {
                    let q = extract_bits::<4>(&block[16 + p / 2 * 32..], p % 2 * 4);
                    put_words::<4>(block_of(quants, self, 8 * s + p), lane, q);
                }
                put_parts(&mut scales[s * self.scale_bytes()..], lane, block.first_chunk().expect("16 bytes"))
            }),
            Format::Q5_K => put_each(row, |s, block: &[u8; 176]| {
                for p in 0..8 {
                    let q = extract_bits::<4>(&block[48 + p / 2 * 32..], p % 2 * 4);
                    let q = join_bits::<4>(q, extract_bits::<1>(&block[16..], p));
                    put_words::<5>(block_of(quants, self, 8 * s + p), lane, q);
                }
                put_parts(&mut scales[s * self.scale_bytes()..], lane, block.first_chunk().expect("16 bytes"))
            }),
            Format::Q6_K => put_each(row, |s, block: &[u8; 210]| {
                let scales = &mut scales[s * self.scale_bytes()..];
                for p in 0..8 {
                    let (half, part) = (p / 4, p % 4);
                    let q = extract_bits::<4>(&block[64 * half + part % 2 * 32..], part / 2 * 4);
                    let q = join_bits::<4>(q, extract_bits::<2>(&block[128 + 32 * half..], 2 * part));
                    put_words::<6>(block_of(quants, self, 8 * s + p), lane, q);
                    for h in 0..2 {
                        scales[32 + p * 32 + h * 16 + lane] = block[192 + 2 * p + h];
                    }
                }
                put_halves(scales, lane, &block[208..])
            }),
            _ => self.put_coded_row(quants, scales, lane, row),
        }
    }

    /// Writes the stored integers of a block of 4 or 5 bits as row `lane` of one group's quants.
    #[inline(always)]
    pub(crate) fn put_codes(self, quants: &mut [u8], b: usize, lane: usize, codes: &[u8; BLOCK]) {
        let words = from_fn(|v| u32::from_le_bytes(from_fn(|k| codes[4 * v + k])));
        match self.stored_bits() {
            5 => put_words::<5>(block_of(quants, self, b), lane, words),
            _ => put_words::<4>(block_of(quants, self, b), lane, words),
        }
    }

    /// Implements [`Format::put_row`] for block types with a [`Code`](files::blocks::gguf::coded::Code).
    fn put_coded_row(self, quants: &mut [u8], scales: &mut [u8], lane: usize, row: &[u8]) -> bool {
        let block_type = self.block_type();
        let code = block_type.get_code().expect("invariant: all other types are coded");
        let (parts, mut finite) = (block_type.values_per_block() / BLOCK, true);
        for (b, block) in row.chunks_exact(block_type.bytes_per_block()).enumerate() {
            let halves = (code.read_halves)(block).map(f16::to_le_bytes);
            let of_run = b * parts * BLOCK / self.scale_span() * self.scale_bytes();
            finite &=
                put_halves(&mut scales[of_run..], lane, &halves.as_flattened()[..self.half_bytes() / 16]);
            for p in 0..parts {
                let (part, b) = ((code.read_part)(block, p), b * parts + p);
                let quants = block_of(quants, self, b);
                match self.stored_bits() {
                    1 => put_words::<1>(quants, lane, part.codes),
                    2 => put_words::<2>(quants, lane, part.codes),
                    3 => put_words::<3>(quants, lane, part.codes),
                    _ => put_words::<4>(quants, lane, part.codes),
                }
                for (h, byte) in part.scales.iter().enumerate().take(self.block_scale_bytes() / 16) {
                    scales[self.block_scales_at(b) + 16 * h + lane] = *byte;
                }
                finite &= code.scale != ScaleCode::Exponent || self.are_scales_finite(&part.scales);
            }
        }
        finite
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

/// Writes integers of `BITS` bits as row `lane` of one block's quants.
#[inline(always)]
fn put_words<const BITS: usize>(quants: &mut [u8], lane: usize, q: Words) {
    let mut vectors = quants.chunks_exact_mut(64);
    let mut put = |word: u32| {
        let vector = vectors.next().expect("invariant: a vector for each bit");
        vector[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    };
    if BITS & 4 != 0 {
        let low = q.map(|q| q & 0x0f0f_0f0f);
        (0..4).for_each(|v| put(low[v] | low[4 + v] << 4));
    }
    if BITS & 2 != 0 {
        let two = q.map(|q| q >> (BITS & 4) & 0x0303_0303);
        (0..2).for_each(|half| put((0..4).fold(0, |all, v| all | two[4 * half + v] << (2 * v))));
    }
    if BITS & 1 != 0 {
        let one = q.map(|q| q >> (BITS & 6) & 0x0101_0101);
        put((0..8).fold(0, |all, v| all | one[v] << v));
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
        let (block_scale, min) = unpack_scale_min(packed, p);
        run[64 + p * 32 + lane] = block_scale;
        run[64 + p * 32 + 16 + lane] = min;
    }
    put_halves(run, lane, &head[..4])
}
