//! The block formats of matrix products, and the packed layout in which all devices read them.
//!
//! Rows are taken in groups of 16. Each group has two planes, `quants` and `scales`, in ascending blocks of 32 columns.
//! Stored integers are kept as they are, except for points of grids, which become codes of single values. Quants of one
//! group and one block are vectors of 64 bytes, with four bytes for each row. Integers of eight bits: byte `k` of a row
//! in vector `v` of eight is column `4v + k`. Smaller ones are the sum of these parts, lowest bits first:
//!
//! - four bits (4, 5 and 6 bits): four vectors; byte `k` in vector `v` holds column `4v + k` in its low nibble and column
//!   `16 + 4v + k` in its high nibble
//! - two bits (2, 3 and 6 bits): two vectors, one for columns 0 to 15 and one for columns 16 to 31; byte `k` has the bits
//!   of column `4v + k` (or `16 + 4v + k`) in bits `2v` and `2v + 1`
//! - one bit (1, 3 and 5 bits): one vector; byte `k` has the bit of column `4v + k` in bit `v` and the bit of column
//!   `16 + 4v + k` in bit `4 + v`
//!
//! Scales come in runs, one for each span of columns that shares them. All f16 are little-endian, and `[16]` means one
//! for each row:
//!
//! | [`ScaleKind`] | run |
//! |---|---|
//! | `Plain` | `d[16]` f16 |
//! | `Minimum` | `d[16]` f16, `m[16]` f16 |
//! | `Blocks` | `d[16]` f16, then for each of eight blocks `scale[16]` i8 |
//! | `Halves` | `d[16]` f16, then for each of eight blocks `scale[16]` i8 of its first 16 columns, `scale[16]` i8 of the others |
//! | `BlockMinimums` | `d[16]` f16, `dmin[16]` f16, then for each of eight blocks `scale[16]` u8, `min[16]` u8 |
//! | `HalfMinimums` | `d[16]` f16, `dmin[16]` f16, then as `Halves` with the scale in the low nibble and the minimum in the high one |
//! | `Exponents` | `e[16]` u8: the scale is `2^(e - 127)`, or `2^-127` if `e` is 0 |
//! | `Minifloats` | `scale[16]` of the block's first 16 columns, `scale[16]` of the others: the upper bits of an f16, from bit 7 on |
//!
//! Bits are those of a weight, scales included, and in the file where they differ. If levels are not named, a weight is
//! the stored integer less the zero point:
//!
//! | format | integer | zero or levels | scales | span | bits | in the file |
//! |---|---:|---|---|---:|---:|---:|
//! | Q4_0, Q5_0, Q8_0 | 4, 5, 8 | 8, 16, signed | `Plain` | 32 | 4.5, 5.5, 8.5 | |
//! | Q4_1, Q5_1 | 4, 5 | 0 | `Minimum` | 32 | 5, 6 | |
//! | Q4_K, Q5_K | 4, 5 | 0 | `BlockMinimums` | 256 | 4.62, 5.62 | 4.5, 5.5 |
//! | Q6_K | 6 | 32 | `Halves` | 256 | 6.56 | |
//! | Q2_K | 2 | 0 | `HalfMinimums` | 256 | 2.62 | |
//! | Q3_K | 3 | 4 | `Halves` | 256 | 3.56 | 3.44 |
//! | IQ4_NL | 4 | table | `Plain` | 32 | 4.5 | |
//! | IQ4_XS | 4 | table | `Blocks` | 256 | 4.31 | 4.25 |
//! | IQ3_XXS, IQ3_S | 4 | magnitudes and signs | `Blocks` | 256 | 4.31 | 3.06, 3.44 |
//! | IQ2_XXS | 3 | magnitudes and signs | `Blocks` | 256 | 3.31 | 2.06 |
//! | IQ2_XS, IQ2_S | 3 | magnitudes and signs | `Halves` | 256 | 3.56 | 2.31, 2.56 |
//! | IQ1_S | 3 | eighths | `Blocks` | 256 | 3.31 | 1.56 |
//! | IQ1_M | 3 | eighths | `Halves` | 256 | 3.56 | 1.75 |
//! | TQ1_0, TQ2_0 | 2 | 1 | `Plain` | 256 | 2.06 | 1.69, 2.06 |
//! | MXFP4 | 4 | E2M1 | `Exponents` | 32 | 4.25 | |
//! | NVFP4 | 4 | E2M1 | `Minifloats` | 32 | 4.5 | |
//! | Q1_0, Q2_0 | 1, 2 | -1 and 1, 1 | `Plain` | 128, 64 | 1.12, 2.25 | |
//!
//! Rows that fill up the last group are zeros: nibbles of 8 in Q4_0, zero bytes otherwise, and scales of 0.
//!
//! # Definition of the product
//!
//! Each row and token has one accumulator. Blocks `b` are added in ascending order. `a` and `d_a` are the
//! [`activations`](super::activations), `q` are integers less their zero point, or levels, and `d` includes the format's
//! constant factor, if it has one, which is a power of two. Every operation is an f32 operation that rounds once:
//!
//! - `Plain`, `Exponents`: `acc = fma(sum(q * a), d * d_a, acc)`
//! - `Blocks`: `acc = fma(sum(q * a), (d * scale) * d_a, acc)`; `d * scale` is exact
//! - `Halves`, `Minifloats`: `x = fma(scale_1, sum_1, scale_0 * sum_0)` with `sum(q * a)` of the two halves of the block,
//!   then `acc = fma(x, d * d_a, acc)`. `x` stays below 2^24 in `Halves`, so it is exact; in `Minifloats` `d` is the
//!   factor alone
//! - `Minimum`: `acc = fma(sum(q * a), d * d_a, acc)`, then `acc = fma(m, s, acc)` with `s = d_a * sum(a)`
//! - `BlockMinimums`: `acc = fma(sum(q * a), (d * scale) * d_a, acc)`, then `acc = fma(-(dmin * min), s, acc)`; `d * scale`
//!   and `dmin * min` are exact
//! - `HalfMinimums`: as `Halves`, then `acc = fma(min_0 * sum_0(a) + min_1 * sum_1(a), -(dmin * d_a), acc)` with the sums
//!   of the halves, an exact integer
//!
//! So the result has the same bits on every device and instruction set.

use files::blocks::gguf::coded::{ScaleCode, Words};
use files::blocks::{BLOCK, BlockType};
use half::f16;
use std::array::from_fn;

mod pack;

pub use pack::put_block;

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
    Q2_K,
    Q3_K,
    IQ4_NL,
    IQ4_XS,
    IQ3_XXS,
    IQ3_S,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

/// Layout of the scales of a span; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the module has the table")]
pub enum ScaleKind {
    Plain,
    Minimum,
    Blocks,
    Halves,
    BlockMinimums,
    HalfMinimums,
    Exponents,
    Minifloats,
}

/// A row of the table of formats.
struct Traits {
    block_type: BlockType,
    /// Bits of a stored integer.
    bits: usize,
    /// Bits of the integers that are multiplied, zero point included.
    weight_bits: usize,
    /// Difference between the integers that are multiplied and the weights.
    zero_point: i32,
    scales: ScaleKind,
    /// Columns that share a run of scales.
    span: usize,
}

impl Format {
    #[rustfmt::skip]
    pub const ALL: [Format; 25] = {
        use Format::*;
        [
            Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S, IQ2_XXS,
            IQ2_XS, IQ2_S, IQ1_S, IQ1_M, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0,
        ]
    };

    const fn list_traits(self) -> Traits {
        use ScaleKind::*;
        let (block_type, bits, weight_bits, zero_point, scales, span) = match self {
            Format::Q4_0 => (BlockType::Q4_0, 4, 4, 8, Plain, 32),
            Format::Q4_1 => (BlockType::Q4_1, 4, 4, 0, Minimum, 32),
            Format::Q5_0 => (BlockType::Q5_0, 5, 5, 16, Plain, 32),
            Format::Q5_1 => (BlockType::Q5_1, 5, 5, 0, Minimum, 32),
            Format::Q8_0 => (BlockType::Q8_0, 8, 8, 128, Plain, 32),
            Format::Q4_K => (BlockType::Q4_K, 4, 4, 0, BlockMinimums, 256),
            Format::Q5_K => (BlockType::Q5_K, 5, 5, 0, BlockMinimums, 256),
            Format::Q6_K => (BlockType::Q6_K, 6, 6, 32, Halves, 256),
            Format::Q2_K => (BlockType::Q2_K, 2, 4, 0, HalfMinimums, 256),
            Format::Q3_K => (BlockType::Q3_K, 3, 4, 4, Halves, 256),
            Format::IQ4_NL => (BlockType::IQ4_NL, 4, 8, 128, Plain, 32),
            Format::IQ4_XS => (BlockType::IQ4_XS, 4, 8, 128, Blocks, 256),
            Format::IQ3_XXS => (BlockType::IQ3_XXS, 4, 8, 128, Blocks, 256),
            Format::IQ3_S => (BlockType::IQ3_S, 4, 5, 16, Blocks, 256),
            Format::IQ2_XXS => (BlockType::IQ2_XXS, 3, 8, 128, Blocks, 256),
            Format::IQ2_XS => (BlockType::IQ2_XS, 3, 8, 128, Halves, 256),
            Format::IQ2_S => (BlockType::IQ2_S, 3, 8, 128, Halves, 256),
            Format::IQ1_S => (BlockType::IQ1_S, 3, 5, 16, Blocks, 256),
            Format::IQ1_M => (BlockType::IQ1_M, 3, 5, 16, Halves, 256),
            Format::TQ1_0 => (BlockType::TQ1_0, 2, 4, 1, Plain, 256),
            Format::TQ2_0 => (BlockType::TQ2_0, 2, 4, 1, Plain, 256),
            Format::MXFP4 => (BlockType::MXFP4, 4, 5, 16, Exponents, 32),
            Format::NVFP4 => (BlockType::NVFP4, 4, 5, 16, Minifloats, 32),
            Format::Q1_0 => (BlockType::Q1_0, 1, 4, 8, Plain, 128),
            Format::Q2_0 => (BlockType::Q2_0, 2, 4, 1, Plain, 64),
        };
        Traits { block_type, bits, weight_bits, zero_point, scales, span }
    }

    /// The format for a file's block type; `None` for types that are not stored in this layout.
    pub fn from_block_type(block: BlockType) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.block_type() == block)
    }

    /// The block type in a file.
    pub const fn block_type(self) -> BlockType {
        self.list_traits().block_type
    }

    /// The format with whose kernels this one is multiplied: they differ in their file alone.
    pub(crate) const fn kernel_format(self) -> Self {
        match self {
            Format::TQ1_0 => Format::TQ2_0,
            Format::IQ2_XS => Format::IQ2_S,
            other => other,
        }
    }

    /// Returns true if instruction sets that interleave activations to tiles read these for it.
    pub const fn reads_tiles(self) -> bool {
        matches!(self, Format::Q4_0 | Format::IQ4_NL | Format::IQ4_XS)
    }

    /// Bits of a stored integer.
    pub const fn stored_bits(self) -> usize {
        self.list_traits().bits
    }

    /// Bits of the integers that are multiplied. Those of eight bits are signed if the instruction set multiplies
    /// signed bytes, and then have no zero point; all others are unsigned.
    pub const fn weight_bits(self) -> usize {
        self.list_traits().weight_bits
    }

    /// Zero point of the integers that are multiplied. Those of [`Format::code_levels`] become unsigned by it.
    pub const fn zero_point(self) -> i32 {
        self.list_traits().zero_point
    }

    /// Levels of stored integers, in formats whose levels are not the integers less the zero point.
    pub const fn code_levels(self) -> Option<[i8; 16]> {
        let Some(code) = self.block_type().get_code() else { return None };
        let mut i = 0;
        while i < 1 << self.stored_bits() {
            if code.levels[i] as i32 != i as i32 - self.zero_point() {
                return Some(code.levels);
            }
            i += 1;
        }
        None
    }

    /// Power of two by which all scales are multiplied.
    pub const fn scale_factor(self) -> f32 {
        match self.block_type().get_code() {
            Some(code) => code.factor,
            None => 1.0,
        }
    }

    /// Value of the quant bytes in rows that fill up the last group.
    pub const fn padding_byte(self) -> u8 {
        if matches!(self, Format::Q4_0) { 0x88 } else { 0 }
    }

    /// Bytes of quants of one group and one block of 32 columns.
    pub(crate) const fn quant_bytes(self) -> usize {
        64 * self.stored_bits()
    }

    /// Layout of the scales of a span.
    pub const fn scale_kind(self) -> ScaleKind {
        self.list_traits().scales
    }

    /// Columns that share a run of scales.
    pub const fn scale_span(self) -> usize {
        self.list_traits().span
    }

    /// Bytes of scales of one group and one span.
    pub const fn scale_bytes(self) -> usize {
        let of_blocks = match self.scale_kind() {
            ScaleKind::Plain | ScaleKind::Minimum => 0,
            ScaleKind::Blocks => 8 * 16,
            ScaleKind::Halves | ScaleKind::BlockMinimums | ScaleKind::HalfMinimums => 8 * 32,
            ScaleKind::Exponents => 16,
            ScaleKind::Minifloats => 32,
        };
        self.half_bytes() + of_blocks
    }

    /// Bytes of the f16 values at the start of a run of scales.
    pub const fn half_bytes(self) -> usize {
        match self.scale_kind() {
            ScaleKind::Exponents | ScaleKind::Minifloats => 0,
            _ if self.has_minimum() => 64,
            _ => 32,
        }
    }

    /// Returns true if a minimum is added to the products.
    pub const fn has_minimum(self) -> bool {
        matches!(self.scale_kind(), ScaleKind::Minimum | ScaleKind::BlockMinimums | ScaleKind::HalfMinimums)
    }

    /// Returns true if the halves of a block have scales of their own.
    pub const fn has_half_scales(self) -> bool {
        matches!(self.scale_kind(), ScaleKind::Halves | ScaleKind::HalfMinimums | ScaleKind::Minifloats)
    }

    /// Checks that all scales of a group are finite, and small enough that weights are.
    pub fn are_scales_finite(self, scales: &[u8]) -> bool {
        match self.scale_kind() {
            // The largest level is 12 and the factor a half: 12 * 2^(252 - 128) is below the largest f32.
            ScaleKind::Exponents => scales.iter().all(|e| *e <= 252),
            ScaleKind::Minifloats => scales.iter().all(|x| *x < 128),
            _ if self.half_bytes() == self.scale_bytes() => is_finite_f16(scales),
            _ => scales.chunks(self.scale_bytes()).all(|run| is_finite_f16(&run[..self.half_bytes()])),
        }
    }

    /// Bytes of the quants and of the scales of one group of rows with `cols` columns, a multiple of 32. The last span,
    /// and with it its run of scales, may be cut short.
    pub const fn group_bytes(self, cols: usize) -> (usize, usize) {
        let (whole, rest) = (cols / self.scale_span(), cols % self.scale_span());
        let halves = if rest > 0 { self.half_bytes() } else { 0 };
        let scales = whole * self.scale_bytes() + halves + rest / BLOCK * self.block_scale_bytes();
        (cols / BLOCK * self.quant_bytes(), scales)
    }

    /// Bytes of scales that belong to one block of 32 columns and one group.
    const fn block_scale_bytes(self) -> usize {
        (self.scale_bytes() - self.half_bytes()) * BLOCK / self.scale_span()
    }

    /// Offset of the scales that belong to block `b` alone.
    pub(crate) const fn block_scales_at(self, b: usize) -> usize {
        let of_span = self.scale_span() / BLOCK;
        b / of_span * self.scale_bytes() + self.half_bytes() + b % of_span * self.block_scale_bytes()
    }

    /// Decodes the weights of row `lane` from one block's quants: integers less their zero point, or `levels`, which are
    /// [`Format::code_levels`].
    #[inline(always)]
    pub(crate) fn decode_integers(
        self,
        quants: &[u8],
        lane: usize,
        levels: Option<&[i8; 16]>,
    ) -> [i8; BLOCK] {
        let (bits, mut vectors) = (self.stored_bits(), quants.chunks_exact(64));
        let mut next = || {
            let vector = vectors.next().expect("invariant: a vector for each bit");
            u32::from_le_bytes(from_fn(|k| vector[4 * lane + k]))
        };
        if bits == 8 {
            let bytes: [[u8; 4]; 8] = from_fn(|_| next().to_le_bytes());
            return from_fn(|column| bytes[column / 4][column % 4] as i8);
        }
        let mut q: Words = [0; BLOCK / 4];
        if bits & 4 != 0 {
            for v in 0..4 {
                let word = next();
                (q[v], q[4 + v]) = (word & 0x0f0f_0f0f, word >> 4 & 0x0f0f_0f0f);
            }
        }
        if bits & 2 != 0 {
            for half in q.as_chunks_mut::<4>().0 {
                let word = next();
                half.iter_mut()
                    .enumerate()
                    .for_each(|(v, q)| *q |= (word >> (2 * v) & 0x0303_0303) << (bits & 4));
            }
        }
        if bits & 1 != 0 {
            let word = next();
            q.iter_mut().enumerate().for_each(|(v, q)| *q |= (word >> v & 0x0101_0101) << (bits & 6));
        }
        let zero_point = self.zero_point() as i8;
        let integers = q.map(u32::to_le_bytes);
        let integer = |column: usize| integers[column / 4][column % 4];
        match levels {
            Some(levels) => from_fn(|column| levels[usize::from(integer(column) & 15)]),
            None => from_fn(|column| integer(column) as i8 - zero_point),
        }
    }

    /// Decodes the scales of block `b` of row `lane`; `scales` are those of one group.
    #[inline(always)]
    pub(crate) fn decode_scales(self, scales: &[u8], lane: usize, b: usize) -> BlockScales<f32> {
        let half = |at: usize| f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
        let run = b * BLOCK / self.scale_span() * self.scale_bytes();
        let d = if self.half_bytes() > 0 { half(run + 2 * lane) } else { 1.0 } * self.scale_factor();
        let minimum = if self.has_minimum() { half(run + 32 + 2 * lane) } else { 0.0 };
        let byte = |h: usize| scales[self.block_scales_at(b) + 16 * h + lane];
        let plain = BlockScales { d, halves: [1.0; 2], minimum, minimums: [1.0; 2] };
        let of_halves = |code: ScaleCode| {
            let [low, high] = [0, 1].map(|h| code.decode(byte(h)));
            BlockScales { halves: [low.0, high.0], minimum: -minimum, minimums: [low.1, high.1], ..plain }
        };
        match self.scale_kind() {
            ScaleKind::Plain | ScaleKind::Minimum => plain,
            ScaleKind::Blocks => BlockScales { d: d * f32::from(byte(0) as i8), ..plain },
            ScaleKind::BlockMinimums => {
                let minimum = -(minimum * f32::from(byte(1)));
                BlockScales { d: d * f32::from(byte(0)), minimum, ..plain }
            }
            ScaleKind::Halves => of_halves(ScaleCode::Signed),
            ScaleKind::HalfMinimums => of_halves(ScaleCode::WithMinimum),
            ScaleKind::Exponents => BlockScales { d: d * ScaleCode::Exponent.decode(byte(0)).0, ..plain },
            ScaleKind::Minifloats => of_halves(ScaleCode::Minifloat),
        }
    }
}

/// Scales of a block. Columns of half `h` have the values `d * halves[h] * integer + minimum * minimums[h]`.
#[derive(Clone, Copy)]
pub(crate) struct BlockScales<F> {
    pub d: F,
    /// 1 in formats whose halves have no scales of their own.
    pub halves: [F; 2],
    pub minimum: F,
    pub minimums: [F; 2],
}

/// Checks that all f16 values are finite: none has all exponent bits set.
fn is_finite_f16(bytes: &[u8]) -> bool {
    // Without an early exit, so that it vectorises.
    bytes.as_chunks::<2>().0.iter().fold(0u16, |bad, b| bad | u16::from(b[1] & 0x7c == 0x7c)) == 0
}

#[cfg(test)]
mod tests;
