//! Steps that multiply with matrices: their shapes, the storage of a matrix, and the activations it reads.

use super::defines::{FFN_PAD, GLOBAL_QKV, LOCAL_QKV, SCORES};
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
    /// `Qkv` of layers with local heads.
    LocalQkv,
    /// `Out` of such layers.
    LocalOut,
    /// `GateUp` of layers with a wider feed-forward.
    WideGateUp,
    /// `Down` of such layers.
    WideDown,
    /// Projection of a token's usual embedding for the embeddings that all layers have of it.
    PerLayerInputs,
    /// Gate of the embedding that a layer has of a token.
    PerLayerGate,
    /// Projection of the gated embedding to the residual.
    PerLayerOut,
    /// Scores of the experts and of the shared expert's gate.
    Router,
    /// `GateUp` of the experts that a token has chosen.
    ExpertGateUp,
    /// `Down` of these experts.
    ExpertDown,
    /// `GateUp` of the shared expert, or of another feed-forward beside the experts.
    SharedGateUp,
    /// Its `Down`.
    SharedDown,
}

impl Step {
    /// Products before and after each mixer of a layer.
    pub fn of_mixers(layer: usize) -> Vec<[Step; 2]> {
        let local = has_local_heads(layer);
        let attention = if local { [Step::LocalQkv, Step::LocalOut] } else { [Step::Qkv, Step::Out] };
        let attention = has_attention(layer).then_some(attention);
        attention.into_iter().chain(is_recurrent(layer).then_some([Step::Mix, Step::MixOut])).collect()
    }

    /// Products of a layer's feed-forward.
    pub fn of_ffn(layer: usize) -> &'static [Step] {
        if !has_ffn(layer) {
            &[]
        } else if has_experts(layer) && HAS_FFN_BESIDE {
            &[Step::ExpertGateUp, Step::ExpertDown, Step::Router, Step::SharedGateUp, Step::SharedDown]
        } else if has_experts(layer) {
            &[Step::ExpertGateUp, Step::ExpertDown, Step::Router]
        } else if ffn_dim(layer) == FFN_DIM {
            &[Step::GateUp, Step::Down]
        } else {
            &[Step::WideGateUp, Step::WideDown]
        }
    }

    /// Products of a layer: of its mixers, of its feed-forward, and with its own embedding of a token, if it has one.
    pub fn of_layer(layer: usize) -> Vec<Step> {
        let embedding: &[Step] = if HAS_PER_LAYER { &[Step::PerLayerGate, Step::PerLayerOut] } else { &[] };
        [Step::of_mixers(layer).as_flattened(), Step::of_ffn(layer), embedding].concat()
    }

    /// The second half of the feed-forward whose first half this is.
    pub fn matching_down(self) -> Step {
        match self {
            Step::WideGateUp => Step::WideDown,
            Step::ExpertGateUp => Step::ExpertDown,
            Step::SharedGateUp => Step::SharedDown,
            _ => Step::Down,
        }
    }

    /// True for the first half of the feed-forward.
    pub const fn is_gate_up(self) -> bool {
        matches!(self, Step::GateUp | Step::WideGateUp | Step::ExpertGateUp | Step::SharedGateUp)
    }

    /// True if only the experts that a token has chosen are multiplied with it.
    pub const fn is_chosen(self) -> bool {
        matches!(self, Step::ExpertGateUp | Step::ExpertDown)
    }

    /// Experts of which each token has a product of its own, if the step is one of a mixture of experts.
    pub const fn experts_of_token(self) -> Option<usize> {
        match self {
            Step::ExpertGateUp | Step::ExpertDown => Some(EXPERTS.used),
            Step::SharedGateUp | Step::SharedDown => Some(1),
            _ => None,
        }
    }

    /// Groups of sixteen rows that stay together when matrices are split: `gate_up` writes blocks of 32, and an
    /// expert is not divided.
    pub const fn unsplit_groups(self) -> usize {
        match self {
            Step::ExpertGateUp => EXPERTS.dim / GROUP_ROWS,
            Step::ExpertDown => DIM / GROUP_ROWS,
            _ => 2,
        }
    }

    /// True if heads are narrower than those of the cache.
    pub fn has_local_heads(self) -> bool {
        matches!(self, Step::LocalQkv | Step::LocalOut)
    }

    /// Name of the step, and its macro.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Step::Qkv | Step::LocalQkv => ("qkv", "STEP_QKV"),
            Step::Out | Step::LocalOut => ("out", "STEP_OUT"),
            Step::GateUp | Step::WideGateUp => ("gate_up", "STEP_GATE_UP"),
            Step::Down | Step::WideDown => ("down", "STEP_DOWN"),
            Step::Head => ("head", "STEP_HEAD"),
            Step::Mix => ("mix", "STEP_MIX"),
            Step::Router => ("router", "STEP_MIX"),
            Step::ExpertGateUp | Step::SharedGateUp => ("experts' gate_up", "STEP_GATE_UP"),
            Step::ExpertDown | Step::SharedDown => ("experts' down", "STEP_DOWN"),
            Step::MixOut => ("mix_out", "STEP_MIX_OUT"),
            Step::PerLayerInputs => ("per_layer_inputs", "STEP_PROJECT"),
            Step::PerLayerGate => ("per_layer_gate", "STEP_PROJECT"),
            Step::PerLayerOut => ("per_layer_out", "STEP_MIX_OUT"),
        }
    }

    /// Rows of the result, and columns; for gate and up those of one matrix.
    pub const fn rows_and_cols(self) -> (usize, usize) {
        match self {
            Step::Qkv => (GLOBAL_QKV, DIM),
            Step::Out => (DIM, Q_DIM),
            Step::GateUp => (FFN_DIM, DIM),
            Step::Down => (DIM, FFN_DIM),
            Step::Head => (VOCAB, DIM),
            Step::Mix => (MIX, DIM),
            Step::MixOut => (DIM, MIXED),
            Step::LocalQkv => (LOCAL_QKV, DIM),
            Step::LocalOut => (DIM, LOCAL_Q_DIM),
            Step::WideGateUp => (SHARED_FFN_DIM, DIM),
            Step::WideDown => (DIM, SHARED_FFN_DIM),
            Step::PerLayerInputs => (PER_LAYER_ROW, DIM),
            Step::PerLayerGate => (PER_LAYER_DIM, DIM),
            Step::PerLayerOut => (DIM, PER_LAYER_DIM),
            Step::Router => (SCORES, DIM),
            Step::ExpertGateUp => (EXPERTS.dim, DIM),
            Step::ExpertDown => (DIM, EXPERTS.dim),
            Step::SharedGateUp => (EXPERTS.shared_dim, DIM),
            Step::SharedDown => (DIM, EXPERTS.shared_dim),
        }
    }

    /// Number of matrices side by side whose rows the step combines.
    pub const fn matrix_count(self) -> usize {
        if self.is_gate_up() && HAS_GATE { 2 } else { 1 }
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
    /// Compiler options of kernels that read such a matrix of `cols` columns: `W_TYPE` in `kernels/common.cl`, and what `kernels/blocks.cl`
    /// needs.
    pub fn kernel_options(self, cols: usize) -> String {
        let format = match self {
            MatrixStorage::F32 => return " -DW_TYPE=1".into(),
            MatrixStorage::F16 => return " -DW_TYPE=2".into(),
            MatrixStorage::Bf16 => return " -DW_TYPE=3".into(),
            MatrixStorage::Blocks(format) => format,
        };
        let mut options = format!(" -DW_TYPE=0 -DW_FACTOR={:e}f", format.scale_factor());
        for (name, value) in [
            ("BITS", format.stored_bits()),
            ("WEIGHT_BITS", format.weight_bits()),
            ("ZERO", format.zero_point() as usize),
            ("SCALES", format.scale_kind() as usize),
            ("SUPERBLOCK", format.scale_span()),
            ("SCALE_BYTES", format.scale_bytes()),
            ("GROUP_BYTES", format.group_bytes(cols).1),
        ] {
            options += &format!(" -DW_{name}={value}");
        }
        let levels =
            format.code_levels().map(|levels| levels.map(|x| (i32::from(x) + format.zero_point()) as u8));
        for (i, word) in levels.iter().flat_map(|levels| levels.as_chunks().0).enumerate() {
            options += &format!(" -DW_LEVELS_{i}={:#x}u", u32::from_le_bytes(*word));
        }
        options
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

    /// Floats that a block needs for each row while its products wait to be added up: the sum and the scale, and those
    /// of its minimums.
    pub fn floats_per_product(self) -> usize {
        match self {
            MatrixStorage::Blocks(format) if format.has_minimum() => {
                3 + usize::from(format.has_half_scales())
            }
            _ => 2,
        }
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
