//! Steps that multiply with matrices: their shapes, the storage of a matrix, and the activations it reads.

use super::defines::{FFN_PAD, QKV};
use crate::dims::*;
use crate::model::weights::Storage as HostStorage;
use files::blocks::BlockType;
use numeric::quant::format::{Format, GROUP_ROWS};
use std::fmt;

/// A step that multiplies with one or more matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are the steps' names")]
pub enum Step {
    Qkv,
    Out,
    GateUp,
    Down,
    Head,
    /// Inputs of a recurrent layer, in place of `Qkv`.
    Mix,
    /// Output of a recurrent layer, in place of `Out`.
    MixOut,
}

impl Step {
    /// All steps.
    pub const ALL: [Step; 7] =
        [Step::Qkv, Step::Out, Step::GateUp, Step::Down, Step::Head, Step::Mix, Step::MixOut];

    /// Products before and after a layer's mixer.
    pub fn of_mixer(is_recurrent: bool) -> [Step; 2] {
        if is_recurrent { [Step::Mix, Step::MixOut] } else { [Step::Qkv, Step::Out] }
    }

    /// Index among the steps of a layer.
    ///
    /// # Panics
    ///
    /// For the head, which belongs to no layer.
    pub fn index_in_layer(self) -> usize {
        match self {
            Step::Qkv | Step::Mix => 0,
            Step::Out | Step::MixOut => 1,
            Step::GateUp => 2,
            Step::Down => 3,
            Step::Head => unreachable!("invariant: a step of a layer"),
        }
    }

    /// Name of the step, and its macro.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Step::Qkv => ("qkv", "STEP_QKV"),
            Step::Out => ("out", "STEP_OUT"),
            Step::GateUp => ("gate_up", "STEP_GATE_UP"),
            Step::Down => ("down", "STEP_DOWN"),
            Step::Head => ("head", "STEP_HEAD"),
            Step::Mix => ("mix", "STEP_MIX"),
            Step::MixOut => ("mix_out", "STEP_MIX_OUT"),
        }
    }

    /// Rows of the result, and columns; for gate and up those of one matrix.
    pub const fn rows_and_cols(self) -> (usize, usize) {
        match self {
            Step::Qkv => (QKV, DIM),
            Step::Out => (DIM, Q_DIM),
            Step::GateUp => (FFN_DIM, DIM),
            Step::Down => (DIM, FFN_DIM),
            Step::Head => (VOCAB, DIM),
            Step::Mix => (MIX, DIM),
            Step::MixOut => (DIM, MIXED),
        }
    }

    /// Number of matrices side by side whose rows the step combines.
    pub const fn matrix_count(self) -> usize {
        if matches!(self, Step::GateUp) && HAS_GATE { 2 } else { 1 }
    }

    /// Groups of sixteen result rows.
    pub const fn row_groups(self) -> usize {
        match self {
            Step::GateUp => FFN_PAD / GROUP_ROWS,
            step => step.rows_and_cols().0.div_ceil(GROUP_ROWS),
        }
    }
}

/// Storage of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatrixStorage {
    /// Blocks in the packed layout.
    Blocks(Format),
    /// f32, row-major.
    F32,
    /// f16, row-major.
    F16,
    /// bf16, row-major.
    Bf16,
}

impl MatrixStorage {
    /// Number in kernels: `W_TYPE` in `kernels/common.cl`.
    pub fn kernel_number(self) -> usize {
        match self {
            MatrixStorage::Blocks(Format::Q4_0) => 0,
            MatrixStorage::F32 => 1,
            MatrixStorage::F16 => 2,
            MatrixStorage::Bf16 => 3,
            MatrixStorage::Blocks(Format::Q4_1) => 4,
            MatrixStorage::Blocks(Format::Q5_0) => 5,
            MatrixStorage::Blocks(Format::Q5_1) => 6,
            MatrixStorage::Blocks(Format::Q8_0) => 7,
            MatrixStorage::Blocks(Format::Q4_K) => 8,
            MatrixStorage::Blocks(Format::Q5_K) => 9,
            MatrixStorage::Blocks(Format::Q6_K) => 10,
        }
    }

    /// Bytes of a group of sixteen rows: quants (or rows) and scales.
    pub fn group_bytes(self, cols: usize) -> (usize, usize) {
        // The device stores the host's bytes.
        let form = match self {
            MatrixStorage::F32 => HostStorage::Rows(BlockType::F32),
            MatrixStorage::F16 => HostStorage::Rows(BlockType::F16),
            MatrixStorage::Bf16 => HostStorage::Rows(BlockType::BF16),
            MatrixStorage::Blocks(format) => HostStorage::Blocks(format),
        };
        form.group_bytes(cols)
    }

    /// True if a minimum is added to the weights of a block.
    pub fn has_minimums(self) -> bool {
        matches!(self, MatrixStorage::Blocks(format) if format.has_minimum())
    }

    /// Form of activations that it is multiplied with.
    pub fn activation_form(self) -> Activations {
        match self {
            MatrixStorage::F32 | MatrixStorage::F16 | MatrixStorage::Bf16 => Activations::Floats,
            MatrixStorage::Blocks(_) => Activations::Quantised,
        }
    }
}

impl fmt::Display for MatrixStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatrixStorage::F32 => f.write_str("F32"),
            MatrixStorage::F16 => f.write_str("F16"),
            MatrixStorage::Bf16 => f.write_str("BF16"),
            MatrixStorage::Blocks(format) => write!(f, "{format:?}"),
        }
    }
}

/// Form of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activations {
    /// As computed.
    Floats,
    /// Quantised to 8 bits, in blocks.
    Quantised,
    /// Quantised integers, held as floats.
    Integers,
}
