//! The kernels of the forward pass, by task.

use super::defines::LayerView;
use super::storage::{Activations, MatrixStorage, Step};
use super::variants::{BASELINE, Variant};
use crate::dims::*;

/// A kernel, identified by its task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelName {
    /// Product of one token and a matrix; `gate_up` stores its result as `next` reads it.
    Gemv {
        step: Step,
        storage: MatrixStorage,
        input: MatmulInput,
        next: Activations,
        variant: &'static Variant,
    },
    /// Product of many tokens and a matrix.
    Gemm(Step, MatrixStorage, &'static Variant),
    /// Product of at most [`MAX_FEW_TOKENS`](super::shapes::MAX_FEW_TOKENS) tokens and a matrix of blocks.
    GemmFew(Step, MatrixStorage),
    /// Converts the input of a `gemm` to the form that its matrix reads.
    Activations(MatmulInput, Activations),
    /// RoPE, and new rows of the cache.
    Rope(LayerView),
    /// Attention of many tokens.
    Attend(LayerView),
    /// RoPE and attention of one token, in chunks.
    AttendOne(LayerView),
    /// Attention of several runs with one token each.
    AttendBatch(LayerView),
    /// Merges the chunks of one token.
    Merge,
    /// Merges the chunks of several runs.
    MergeBatch,
    /// Adds attention to the mass of slots.
    Observe(Observed, LayerView),
    /// Norm of an output before it is added to the residual.
    PostNorm,
    /// Norm of all queries, and of all keys, of a token.
    QkNorm,
    /// Gate of attention's output.
    Gate,
    /// A step of a recurrent layer.
    Recurrent(RecurrentStep),
    /// Embeddings of a token for all layers.
    EmbedLayers,
    /// Gate of a layer's embedding of a token.
    GateLayer,
    /// A step of a mixture of experts between its products.
    Experts(ExpertStep),
    /// Eviction.
    CompactKv,
}

/// Steps of a mixture of experts between its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertStep {
    /// Chooses and weighs the experts of a token.
    Choose,
    /// Lists the choices of each expert.
    Sort,
    /// Adds their outputs to the residual.
    Add,
}

impl ExpertStep {
    /// Name of its kernel, and its macro.
    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            ExpertStep::Choose => ("choose_experts", "CHOOSE"),
            ExpertStep::Sort => ("sort_choices", "SORT"),
            ExpertStep::Add => ("add_experts", "ADD"),
        }
    }
}

/// Steps of a recurrent layer between its products; a short convolution has only the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecurrentStep {
    /// Causal convolution.
    Convolve,
    /// Lengths of queries and keys of a delta net, and factors of updates.
    Prepare,
    /// Update of the state of a delta net or of Mamba2.
    Update,
    /// Gate of its output, and norm.
    Gate,
}

impl RecurrentStep {
    /// Name of its kernel, and its macro.
    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            RecurrentStep::Convolve => ("convolve", "CONVOLVE"),
            RecurrentStep::Prepare => ("prepare_update", "PREPARE"),
            RecurrentStep::Update => ("update_state", "UPDATE"),
            RecurrentStep::Gate => ("gate_mixed", "GATE"),
        }
    }
}

/// Attention that `observe` follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "they say it")]
pub enum Observed {
    OneToken,
    ManyTokens,
}

/// Source of a matrix's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatmulInput {
    /// Normed residual.
    Norm,
    /// Residual.
    Residual,
    /// Chunks of attention over the last `window` positions; over all slots if it is 0.
    Merge {
        /// Positions.
        window: usize,
    },
    /// Attention's output.
    Att,
    /// Output of a recurrent layer.
    Mixed,
    /// silu(gate) * up: as stored by `gemv`, or still to be computed from both.
    Ffn,
    /// `Att` of layers with narrower heads.
    LocalAtt,
    /// `Ffn` of layers with a wider feed-forward.
    WideFfn,
    /// `Ffn` of each choice of an expert.
    ExpertFfn,
    /// `Ffn` beside the experts.
    SharedFfn,
    /// A layer's embedding of a token times its gate.
    PerLayer,
}

impl MatmulInput {
    /// Number of columns.
    pub(super) fn column_count(self) -> usize {
        match self {
            MatmulInput::Norm | MatmulInput::Residual => DIM,
            MatmulInput::Merge { .. } | MatmulInput::Att => Q_DIM,
            MatmulInput::Ffn => FFN_DIM,
            MatmulInput::Mixed => MIXED,
            MatmulInput::LocalAtt => LOCAL_Q_DIM,
            MatmulInput::WideFfn => SHARED_FFN_DIM,
            MatmulInput::ExpertFfn => EXPERTS.dim,
            MatmulInput::SharedFfn => EXPERTS.shared_dim,
            MatmulInput::PerLayer => PER_LAYER_DIM,
        }
    }
}

/// Variant that computes a product.
pub(super) fn variant_of(name: KernelName) -> &'static Variant {
    match name {
        KernelName::Gemv { variant, .. } | KernelName::Gemm(_, _, variant) => variant,
        _ => BASELINE,
    }
}

pub(super) fn kernel_symbol(name: KernelName) -> &'static str {
    match name {
        KernelName::Gemv { .. } => "gemv",
        KernelName::Gemm(..) | KernelName::GemmFew(..) => "gemm",
        KernelName::Activations(..) => "activations",
        KernelName::Rope(_) => "rope",
        KernelName::Attend(_) => "attend",
        KernelName::AttendOne(_) | KernelName::AttendBatch(_) => "attend_one",
        KernelName::Merge | KernelName::MergeBatch => "merge",
        KernelName::Observe(..) => "observe",
        KernelName::PostNorm => "post_norm",
        KernelName::QkNorm => "qk_norm",
        KernelName::Gate => "gate",
        KernelName::Recurrent(step) => step.names().0,
        KernelName::EmbedLayers => "embed_layers",
        KernelName::GateLayer => "gate_layer",
        KernelName::Experts(step) => step.names().0,
        KernelName::CompactKv => "compact_kv",
    }
}

pub(super) fn input_flag(input: MatmulInput) -> &'static str {
    match input {
        MatmulInput::Norm => "INPUT_NORM",
        MatmulInput::Residual => "INPUT_RESIDUAL",
        MatmulInput::Merge { .. } => "INPUT_MERGE",
        MatmulInput::Att | MatmulInput::LocalAtt => "INPUT_ATT",
        MatmulInput::Mixed | MatmulInput::PerLayer => "INPUT_ROWS",
        MatmulInput::Ffn | MatmulInput::WideFfn | MatmulInput::ExpertFfn | MatmulInput::SharedFfn => {
            "INPUT_FFN"
        }
    }
}
