//! The key/value cache's element types and its bookkeeping of slots and positions.
//!
//! A *slot* is an index in the cache. A *position* is the one by which RoPE rotated a key. They differ as soon as a
//! slot is evicted, so no code here assumes that they are equal.

use files::{Error, Result};
use half::f16;
use std::str::FromStr;

/// The storage type of a key or value row.
///
/// Five and six bits are there because q8 keys with q4 values, 6.5 bits a value, lose more than either: KL divergence
/// of the story model from an f32 cache 0.000062 nats, q6 0.000007 and q5, with 5.5 bits, 0.000026.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Blocks of an f16 scale and signed bytes.
    Q8,
    /// Blocks of an f16 scale, the low four bits of integers, and their high two bits.
    Q6,
    /// Blocks of an f16 scale, the low four bits of integers, and their high bit.
    Q5,
    /// Blocks of an f16 scale and four-bit integers.
    Q4,
}

impl KvType {
    /// All types, most exact first.
    pub const ALL: [KvType; 6] = [KvType::F32, KvType::F16, KvType::Q8, KvType::Q6, KvType::Q5, KvType::Q4];

    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8 => "q8",
            KvType::Q6 => "q6",
            KvType::Q5 => "q5",
            KvType::Q4 => "q4",
        }
    }

    /// Elements that share one scale: 32, or the whole head if its width is not a multiple of 32.
    pub const fn block_len(head_dim: usize) -> usize {
        if head_dim.is_multiple_of(32) { 32 } else { head_dim }
    }

    /// Bytes of one quantised block, scale included.
    pub const fn block_bytes(self, block: usize) -> usize {
        match self {
            KvType::F32 => 4 * block,
            KvType::F16 => 2 * block,
            KvType::Q8 => 2 + block,
            KvType::Q6 | KvType::Q5 | KvType::Q4 => 2 + block / 2 + (self.high_bits() * block).div_ceil(8),
        }
    }

    /// Bits of each integer that are stored after the low four bits of all.
    pub const fn high_bits(self) -> usize {
        match self {
            KvType::Q6 => 2,
            KvType::Q5 => 1,
            _ => 0,
        }
    }

    /// Returns true if rows are stored in blocks that share a scale.
    pub const fn is_in_blocks(self) -> bool {
        !matches!(self, KvType::F32 | KvType::F16)
    }

    /// Bytes of one head's row.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        let block = Self::block_len(head_dim);
        head_dim / block * self.block_bytes(block)
    }

    /// Finds the first NaN or infinity stored in rows of `head_dim` elements: in elements, or in block scales.
    pub fn find_not_finite(self, rows: &[u8], head_dim: usize) -> Option<f32> {
        let bits_of = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let is_found = |bits: &u16| bits & 0x7C00 == 0x7C00;
        let found = match self {
            KvType::F32 => {
                let mut floats = rows.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                return floats.find(|x| !x.is_finite());
            }
            KvType::F16 => {
                // Without an early exit within a part, so that it vectorises.
                let mut parts = rows.chunks(64 * 2).map(|part| part.chunks_exact(2).map(bits_of));
                let part = parts.find(|part| part.clone().fold(false, |found, bits| found | is_found(&bits)));
                part?.find(is_found)
            }
            _ => rows.chunks_exact(self.block_bytes(Self::block_len(head_dim))).map(bits_of).find(is_found),
        };
        found.map(|bits| f16::from_bits(bits).to_f32())
    }

    /// Returns true if rows of this type are rotated by a Walsh-Hadamard transform before they are stored.
    ///
    /// The rotation spreads outliers over the block, which helps if an outlier takes resolution from all other values.
    /// Measured on the story model, with whole keys (`eval`, 40 x 512 tokens, f32 weights, f32 cache): KL divergence of
    /// q4 0.000202 nats with it, 0.000414 without; perplexity +0.036 % and +0.038 %. q8 gains nothing (0.000001 either
    /// way).
    ///
    /// The model's mean key of the layer and KV head is subtracted from rotated keys before they are stored. Attention
    /// does not change, since all scores of a query change alike (a cap on scores would break this), and the blocks
    /// have a smaller range. Before the rotation each channel of the keys is multiplied by a scale, and that of the
    /// queries by its inverse. Perplexity of SmolLM2-135M over 31 x 512 tokens, against an f32 cache: +1.9 % with both,
    /// +3.2 % with the means alone, +5.9 % without.
    pub const fn is_rotated(self) -> bool {
        matches!(self, KvType::Q6 | KvType::Q5 | KvType::Q4)
    }
}

impl FromStr for KvType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "f32" => Ok(KvType::F32),
            "f16" => Ok(KvType::F16),
            "q8" | "q8_0" => Ok(KvType::Q8),
            "q6" => Ok(KvType::Q6),
            "q5" | "q5_0" => Ok(KvType::Q5),
            "q4" | "q4_0" => Ok(KvType::Q4),
            other => Err(Error::Usage(format!("KV type {other}: use f32, f16, q8, q6, q5 or q4"))),
        }
    }
}

/// Element types of keys and of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvTypes {
    pub k: KvType,
    pub v: KvType,
}

impl KvTypes {
    /// One type for both keys and values.
    pub fn same(t: KvType) -> Self {
        Self { k: t, v: t }
    }

    /// Bytes of one slot over `layers` layers and `kv_heads` heads of width `head_dim`.
    pub fn slot_bytes(self, layers: usize, kv_heads: usize, head_dim: usize) -> usize {
        layers * kv_heads * (self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim))
    }
}

impl std::fmt::Display for KvTypes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.k == self.v {
            f.write_str(self.k.name())
        } else {
            write!(f, "{}/{}", self.k.name(), self.v.name())
        }
    }
}

/// Rejects a capacity below the `len` filled slots.
pub fn check_capacity(capacity: usize, len: usize) -> Result<()> {
    if capacity >= len {
        return Ok(());
    }
    Err(Error::Usage(format!("cannot shrink the context to {capacity} tokens: {len} are in use")))
}

/// Rejects a list of slots to keep that does not ascend or names slots beyond the `len` filled ones.
pub fn check_kept_slots(slots: &[u32], len: usize) -> Result<()> {
    let ascending = slots.windows(2).all(|w| w[0] < w[1]);
    if ascending && slots.last().is_none_or(|&s| (s as usize) < len) {
        return Ok(());
    }
    Err(Error::Other("slots to keep must ascend and be filled".into()))
}

/// Applies the Walsh-Hadamard transform in place to each run of `2^n` elements, where `2^n` is the largest power of two
/// that divides the width. Scaled to be its own inverse.
///
/// Only additions and subtractions, then one product, so any vectorisation gives the same bits. Two rounds at a time
/// halve the loads and stores, and vectorise the rounds of neighbours too: 64 elements take 425 instructions on Arm and
/// 38 ns on an EPYC; one round at a time took 2,064 and 84.
pub fn hadamard_transform(head: &mut [f32]) {
    let run = 1 << head.len().trailing_zeros();
    let scale = 1.0 / (run as f32).sqrt();
    for part in head.chunks_exact_mut(run) {
        let mut half = 1;
        while 4 * half <= run {
            match half {
                1 => part.as_chunks_mut::<4>().0.iter_mut().for_each(|four| two_rounds(1, four)),
                4 => part.as_chunks_mut::<16>().0.iter_mut().for_each(|four| two_rounds(4, four)),
                _ => part.chunks_exact_mut(4 * half).for_each(|four| two_rounds(half, four)),
            }
            half *= 4;
        }
        if half < run {
            let (a, b) = part.split_at_mut(half);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        part.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Two rounds, with distances `half` and `2 * half`, for four runs of `half` elements.
#[inline(always)]
fn two_rounds(half: usize, four: &mut [f32]) {
    let (ab, cd) = four.split_at_mut(2 * half);
    let ((a, b), (c, d)) = (ab.split_at_mut(half), cd.split_at_mut(half));
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        let (s, t, u, v) = (*a + *b, *a - *b, *c + *d, *c - *d);
        (*a, *b, *c, *d) = (s + u, t + v, s - u, t - v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_nan_or_infinity_is_found_in_rows_of_every_type() {
        const DIM: usize = 64;
        for kind in KvType::ALL {
            let row = kind.row_bytes(DIM);
            let mut rows = vec![0; 5 * row];
            assert_eq!(kind.find_not_finite(&rows, DIM), None, "{}", kind.name());
            for (at, f16_bits, f32_bits) in [(4, 0x7E00, f32::NAN), (2, 0xFC00, f32::NEG_INFINITY)] {
                match kind {
                    KvType::F32 => rows[at * row..][..4].copy_from_slice(&f32_bits.to_le_bytes()),
                    _ => rows[at * row..][..2].copy_from_slice(&u16::to_le_bytes(f16_bits)),
                }
                let found = kind.find_not_finite(&rows, DIM).map(f32::to_bits);
                assert_eq!(
                    found.map(|bits| bits >> 22),
                    Some(f32_bits.to_bits() >> 22),
                    "{}, row {at}",
                    kind.name()
                );
            }
        }
    }
}
