//! Quantised matrices of safetensors files: integers or small floats, with a scale for each group of columns.
//!
//! A weight is `(code - zero) * scale`, computed in f32; small floats have no zero point. `g` is the group of a column:
//!
//! | method | codes | scales | zero points |
//! |---|---|---|---|
//! | FP8 | `weight[row][col]` | `weight_scale_inv`, of the tensor or of blocks | |
//! | compressed-tensors | `weight[row][col]`, FP8 or I8 | `weight_scale[row][g]` | `weight_zero_point[row][g]` |
//! | | `weight_packed[row]`, lowest bits first | `weight_scale[row][g]` | `weight_zero_point[row / n][g]` |
//! | GPTQ | `qweight[col / n][row]`, `n` columns in a word | `scales[g][row]` | `qzeros[g]`, lowest bits first |
//! | AWQ | `qweight[col]`, eight rows in a word | `scales[g][row]` | `qzeros[g]`, as the codes |

mod parts;

use super::{Safetensors, Tensor};
use crate::Result;
use crate::blocks::{BLOCK, BlockType, Dtype};
use half::f16;
use parts::TensorParts;

/// Magnitudes of FP4 (E2M1).
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Nibble of AWQ's words that holds row `i` of eight.
const AWQ_NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A quantised matrix, from whose rows blocks are made. Only the codes stay in the mapped file.
#[derive(Debug)]
pub struct QuantisedTensor {
    pub codes: Tensor,
    /// Bytes of a row's codes; 0 if they are spread over the whole tensor.
    pub row_bytes: usize,
    pub block: BlockType,
    /// Why the blocks differ from the matrix, if they do.
    pub loss: Option<Loss>,
    order: CodeOrder,
    kind: CodeKind,
    /// Group of each column.
    groups: Vec<u32>,
    group_count: usize,
    /// `[row][group]`
    scales: Vec<f32>,
    /// `[row][group]`
    zeros: Vec<i16>,
}

/// Why no block format holds a matrix exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    Fp8,
    /// FP4 whose scales have a factor of their own.
    Nvfp4,
    /// Groups in act-order, or of another size than a multiple of 32 columns.
    Groups,
    /// Eight-bit integers with zero points have nine bits.
    ZeroPoints,
    /// Only the scales are rounded.
    Scales,
}

impl Loss {
    /// The rest of a sentence that begins with a number of tensors.
    pub fn describe(self) -> &'static str {
        match self {
            Loss::Fp8 => "in FP8 become Q8_0",
            Loss::Nvfp4 => "in NVFP4 become Q8_0",
            Loss::Groups => "with act-order or groups that are no multiple of 32 columns become Q8_0",
            Loss::ZeroPoints => "of 8-bit integers with zero points become Q8_0",
            Loss::Scales => "have scales that are rounded to f16",
        }
    }
}

/// Meaning of codes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum CodeKind {
    /// Unsigned integers of four or eight bits.
    Unsigned(usize),
    /// Signed integers of eight bits.
    Signed,
    /// FP4.
    E2m1,
    Float(Dtype),
}

impl CodeKind {
    fn code_bits(self) -> usize {
        match self {
            CodeKind::Unsigned(bits) => bits,
            CodeKind::E2m1 => 4,
            CodeKind::Signed | CodeKind::Float(_) => 8,
        }
    }
}

/// Place of code `[a][b]`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum CodeOrder {
    /// The codes of an `a` follow each other, lowest bits first, in this many bytes.
    Along(usize),
    /// So in AWQ's order of eight.
    Awq(usize),
    /// A word of 32 bits has consecutive `a`, lowest bits first; there are this many `b`.
    Across(usize),
}

impl CodeOrder {
    #[inline(always)]
    fn read_code(self, bytes: &[u8], bits: usize, (a, b): (usize, usize)) -> u8 {
        let (start, bit) = match self {
            CodeOrder::Along(len) => (a * len, b * bits),
            CodeOrder::Awq(len) => (a * len, ((b & !7) | AWQ_NIBBLES[b & 7]) * bits),
            CodeOrder::Across(width) => (4 * (a / (32 / bits) * width + b), a % (32 / bits) * bits),
        };
        bytes[start + bit / 8] >> (bit % 8) & (u8::MAX >> (8 - bits))
    }
}

impl Safetensors {
    /// The quantised matrix in place of a tensor `name`; `None` if it is not quantised.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model): one of its tensors is missing or wrong.
    pub fn find_quantised(&self, name: &str, shape: (usize, usize)) -> Result<Option<QuantisedTensor>> {
        let Some((method, stem)) = self.quant_method().zip(name.strip_suffix("weight")) else {
            return Ok(None);
        };
        TensorParts::new(self, stem, method, shape).read_tensor()
    }
}

impl QuantisedTensor {
    /// Sets the blocks' type: the one that holds the matrix exactly, else Q8_0.
    fn choose_block(mut self) -> Self {
        let is_aligned = self.groups.chunks(BLOCK).all(|block| block.iter().all(|group| *group == block[0]));
        let zero = 1 << (self.kind.code_bits() - 1);
        let is_symmetric = self.zeros.iter().all(|found| *found == zero);
        let smallest = f32::from_bits(1 << 22);
        let is_e8m0 = || self.scales.iter().all(|scale| scale.to_bits() << 9 == 0 || *scale == smallest);
        let scales = self.scales.iter().all(|scale| f16::from_f32(*scale).to_f32() == *scale);
        let rounded = (!scales).then_some(Loss::Scales);
        (self.block, self.loss) = match self.kind {
            _ if !self.groups.len().is_multiple_of(BLOCK) => (BlockType::F32, None),
            CodeKind::Float(_) => (BlockType::Q8_0, Some(Loss::Fp8)),
            CodeKind::E2m1 if is_aligned && is_e8m0() => (BlockType::MXFP4, None),
            CodeKind::E2m1 => (BlockType::Q8_0, Some(Loss::Nvfp4)),
            _ if !is_aligned => (BlockType::Q8_0, Some(Loss::Groups)),
            CodeKind::Unsigned(4) if is_symmetric => (BlockType::Q4_0, rounded),
            CodeKind::Unsigned(4) => (BlockType::Q5_0, rounded),
            _ if is_symmetric => (BlockType::Q8_0, rounded),
            _ => (BlockType::Q8_0, Some(Loss::ZeroPoints)),
        };
        self
    }

    /// Codes of a row.
    fn read_codes(&self, row: usize) -> Vec<u8> {
        let (bytes, bits, order) = (self.codes.data.bytes(), self.kind.code_bits(), self.order);
        let cols = 0..self.groups.len();
        match order {
            CodeOrder::Along(_) => cols.map(|col| order.read_code(bytes, bits, (row, col))).collect(),
            _ => cols.map(|col| order.read_code(bytes, bits, (col, row))).collect(),
        }
    }

    /// The integer of a code, less its zero point.
    fn level_of(&self, code: u8, at: usize) -> i16 {
        // A signed integer with an offset of 128, as those that are packed.
        let code = if self.kind == CodeKind::Signed { code ^ 0x80 } else { code };
        i16::from(code) - self.zeros[at]
    }

    /// Decodes a row into as many values as there are columns.
    pub fn decode_row(&self, row: usize, values: &mut [f32]) {
        let codes = self.read_codes(row);
        for ((value, code), group) in values.iter_mut().zip(codes).zip(&self.groups) {
            let at = row * self.group_count + *group as usize;
            let unscaled = match self.kind {
                CodeKind::Unsigned(_) | CodeKind::Signed => f32::from(self.level_of(code, at)),
                CodeKind::E2m1 => E2M1[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 },
                CodeKind::Float(dtype) => dtype.widen_array::<1>(&[code])[0],
            };
            *value = unscaled * self.scales[at];
        }
    }

    /// Makes the blocks of a row.
    pub fn encode_row(&self, row: usize) -> Vec<u8> {
        if self.block == BlockType::F32 || self.loss.is_some_and(|loss| loss != Loss::Scales) {
            let mut values = vec![0.0; self.groups.len()];
            self.decode_row(row, &mut values);
            return match self.block {
                BlockType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                _ => values.as_chunks().0.iter().flat_map(quantise_q8_0).collect(),
            };
        }
        let codes = self.read_codes(row);
        let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(self.groups.chunks(BLOCK));
        blocks
            .flat_map(|(codes, groups)| self.encode_block(codes, row * self.group_count + groups[0] as usize))
            .collect()
    }

    /// Makes the block of these codes, which share scale `at`.
    fn encode_block(&self, codes: &[u8; BLOCK], at: usize) -> Vec<u8> {
        let scale = self.scales[at];
        let d = f16::from_f32(scale).to_le_bytes().to_vec();
        let nibbles =
            |q: &[u8; BLOCK]| (0..BLOCK / 2).map(|z| q[z] & 15 | q[z + BLOCK / 2] << 4).collect::<Vec<u8>>();
        match self.block {
            BlockType::MXFP4 => [vec![(scale.to_bits() >> 23) as u8], nibbles(codes)].concat(),
            BlockType::Q4_0 => [d, nibbles(&codes.map(|code| (self.level_of(code, at) + 8) as u8))].concat(),
            BlockType::Q5_0 => {
                let q = codes.map(|code| (self.level_of(code, at) + 16) as u8);
                let high = q.iter().enumerate().fold(0, |high, (i, q)| high | u32::from(q >> 4) << i);
                [d, high.to_le_bytes().to_vec(), nibbles(&q)].concat()
            }
            _ => [d, codes.map(|code| self.level_of(code, at) as u8).to_vec()].concat(),
        }
    }
}

/// Quantises values to a block of Q8_0: `d = max|v| / 127` in f16, `q = round(v / d)` half away from zero. A value that
/// is not finite makes the scale so.
fn quantise_q8_0(values: &[f32; BLOCK]) -> [u8; 34] {
    // Integers compare as the magnitudes of floats do; NaN is the largest.
    let max = values.iter().fold(0, |max: u32, x| max.max(x.to_bits() & 0x7fff_ffff));
    let d = f16::from_f32(f32::from_bits(max) / 127.0);
    let inverse = if d == f16::ZERO { 0.0 } else { 1.0 / d.to_f32() };
    let mut block = [0; 34];
    block[..2].copy_from_slice(&d.to_le_bytes());
    for (q, value) in block[2..].iter_mut().zip(values) {
        *q = (value * inverse).round().clamp(-127.0, 127.0) as i8 as u8;
    }
    block
}

#[cfg(test)]
mod tests;
