//! How a matrix is stored on a device, and what it reads.

use crate::model::weights;
use files::source::gguf::block::BlockType;
use numeric::quant::format::Format;
use std::fmt;

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Blocks in the packed layout.
    Blocks(Format),
    /// f32, row-major.
    F32,
    /// f16, row-major.
    F16,
    /// bf16, row-major.
    Bf16,
}

impl Form {
    /// The number that kernels know it by: `W_TYPE` in `kernels/common.cl`.
    pub fn number(self) -> usize {
        match self {
            Form::Blocks(Format::Q4_0) => 0,
            Form::F32 => 1,
            Form::F16 => 2,
            Form::Bf16 => 3,
            Form::Blocks(Format::Q4_1) => 4,
            Form::Blocks(Format::Q5_0) => 5,
            Form::Blocks(Format::Q5_1) => 6,
            Form::Blocks(Format::Q8_0) => 7,
            Form::Blocks(Format::Q4_K) => 8,
            Form::Blocks(Format::Q5_K) => 9,
            Form::Blocks(Format::Q6_K) => 10,
        }
    }

    /// Bytes of a group of sixteen rows: quants (or rows) and scales.
    pub fn group_bytes(self, cols: usize) -> (usize, usize) {
        self.kept().group_bytes(cols)
    }

    /// The same for the host, whose bytes are the device's.
    fn kept(self) -> weights::Form {
        match self {
            Form::F32 => weights::Form::Rows(BlockType::F32),
            Form::F16 => weights::Form::Rows(BlockType::F16),
            Form::Bf16 => weights::Form::Rows(BlockType::BF16),
            Form::Blocks(format) => weights::Form::Blocks(format),
        }
    }

    /// Whether a floor is added to the weights of a block.
    pub fn floors(self) -> bool {
        use Format::{Q4_1, Q4_K, Q5_1, Q5_K};
        matches!(self, Form::Blocks(Q4_1 | Q5_1 | Q4_K | Q5_K))
    }

    /// What it is multiplied with.
    pub fn reads(self) -> Quantised {
        match self {
            Form::F32 | Form::F16 | Form::Bf16 => Quantised::No,
            Form::Blocks(_) => Quantised::Yes,
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::F32 => f.write_str("F32"),
            Form::F16 => f.write_str("F16"),
            Form::Bf16 => f.write_str("BF16"),
            Form::Blocks(format) => write!(f, "{format:?}"),
        }
    }
}

/// Whether activations are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "they say it")]
pub enum Quantised {
    Yes,
    No,
}
