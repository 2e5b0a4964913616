//! Element types of tensors.

use super::BlockType;

/// The element types that this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    U8,
}

impl Dtype {
    /// Names of all types, for messages.
    pub const NAMES: &str = "F32, F16, BF16, U8";

    /// Bytes of an element.
    pub fn byte_size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            Dtype::U8 => 1,
        }
    }

    /// The GGUF type; `None` for U8, which GGUF lacks.
    pub fn block_type(self) -> Option<BlockType> {
        match self {
            Dtype::F32 => Some(BlockType::F32),
            Dtype::F16 => Some(BlockType::F16),
            Dtype::BF16 => Some(BlockType::BF16),
            Dtype::U8 => None,
        }
    }

    /// The element type of a GGUF type; `None` for blocks.
    pub fn from_block_type(block: BlockType) -> Option<Self> {
        [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|t| t.block_type() == Some(block))
    }

    /// Widens the first `N` stored values exactly.
    #[inline(always)]
    pub fn widen_array<const N: usize>(self, bytes: &[u8]) -> [f32; N] {
        match self {
            Dtype::F32 => read_values(bytes, f32::from_le_bytes),
            Dtype::F16 => read_values(bytes, |b| half::f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => read_values(bytes, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
            Dtype::U8 => read_values(bytes, |[b]| f32::from(b)),
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
    /// For U8.
    pub fn round_values(self, values: &[f32]) -> Vec<u8> {
        match self {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
            Dtype::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
            Dtype::U8 => panic!("weights are not bytes"),
        }
    }

    /// Widens all values exactly.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(self.byte_size()).map(|b| self.widen_array::<1>(b)[0]).collect()
    }
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
