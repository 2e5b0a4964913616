//! Element types of tensors.

use super::BlockType;

/// The element types that this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the file format's names")]
pub enum Dtype {
    F32,
    F16,
    BF16,
    U8,
    I8,
    I32,
    I64,
    F8_E4M3,
    F8_E5M2,
}

impl Dtype {
    /// Names of the types that need no `quantization_config`, for messages.
    pub const NAMES: &str = "F32, F16, BF16, U8";

    /// Bytes of an element.
    pub fn byte_size(self) -> usize {
        match self {
            Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            Dtype::U8 | Dtype::I8 | Dtype::F8_E4M3 | Dtype::F8_E5M2 => 1,
        }
    }

    /// The GGUF type; `None` for the types that are no weights by themselves.
    pub fn block_type(self) -> Option<BlockType> {
        match self {
            Dtype::F32 => Some(BlockType::F32),
            Dtype::F16 => Some(BlockType::F16),
            Dtype::BF16 => Some(BlockType::BF16),
            _ => None,
        }
    }

    /// The element type of a GGUF type; `None` for blocks.
    pub fn from_block_type(block: BlockType) -> Option<Self> {
        [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|t| t.block_type() == Some(block))
    }

    /// Widens the first `N` stored values exactly, but for integers of more than 24 bits.
    #[inline(always)]
    pub fn widen_array<const N: usize>(self, bytes: &[u8]) -> [f32; N] {
        match self {
            Dtype::F32 => read_values(bytes, f32::from_le_bytes),
            Dtype::F16 => read_values(bytes, |b| half::f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => read_values(bytes, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
            Dtype::U8 => read_values(bytes, |[b]| f32::from(b)),
            Dtype::I8 => read_values(bytes, |[b]| f32::from(b as i8)),
            Dtype::I32 => read_values(bytes, |b| i32::from_le_bytes(b) as f32),
            Dtype::I64 => read_values(bytes, |b| i64::from_le_bytes(b) as f32),
            Dtype::F8_E4M3 => read_values(bytes, |[b]| widen_e4m3(b)),
            Dtype::F8_E5M2 => read_values(bytes, |[b]| half::f16::from_bits(u16::from(b) << 8).to_f32()),
        }
    }

    /// Widens values exactly, sixteen at a time so that the compiler vectorises the loop.
    #[inline(always)]
    pub fn widen_slice(self, bytes: &[u8], values: &mut [f32]) {
        const RUN: usize = 16;
        let (runs, rest) = values.as_chunks_mut::<RUN>();
        let from = runs.len() * RUN * self.byte_size();
        for (run, stored) in runs.iter_mut().zip(bytes.chunks_exact(RUN * self.byte_size())) {
            *run = self.widen_array(stored);
        }
        for (value, stored) in rest.iter_mut().zip(bytes[from..].chunks_exact(self.byte_size())) {
            [*value] = self.widen_array(stored);
        }
    }

    /// Rounds values to the nearest of this type, to even between two; the inverse of [`Dtype::to_f32`].
    ///
    /// # Panics
    ///
    /// For types that are no weights by themselves.
    pub fn round_values(self, values: &[f32]) -> Vec<u8> {
        match self {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
            Dtype::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => panic!("{self:?} is no type of weights by itself"),
        }
    }

    /// Widens all values exactly.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(self.byte_size()).map(|b| self.widen_array::<1>(b)[0]).collect()
    }
}

/// A sign, four bits of exponent and three of fraction, with NaN but no infinity.
fn widen_e4m3(byte: u8) -> f32 {
    if byte & 0x7f == 0x7f {
        return f32::NAN;
    }
    // The fields of an f16, whose exponent is biased by 8 more.
    let bits = u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7f) << 7;
    half::f16::from_bits(bits).to_f32() * 256.0
}

/// Reads the first `N` values of `SIZE` bytes each.
#[inline(always)]
fn read_values<const N: usize, const SIZE: usize>(bytes: &[u8], one: impl Fn([u8; SIZE]) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
        *o = one(*b);
    }
    out
}
