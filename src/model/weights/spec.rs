//! The baked model's tensors: names, shapes, roles, and their places in a checkpoint.

use super::storage::choose_more_bits;
use crate::dims::*;
use files::blocks::BLOCK;
use files::config::{Arch, LayerKind, MambaNorm, QkNorm, Router};
use files::source::gguf::names::RowOrder;

/// Use of a tensor, which decides how it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// Looked up by row; stays as in the checkpoint. The head may be tied to it.
    Embedding,
    /// Looked up by row, such as by position; stays as in the checkpoint.
    Table,
    /// Multiplied with activations; may be quantised.
    Matrix,
    /// A norm's weight or a bias; widened to f32.
    Vector,
}

/// One tensor of the model.
#[derive(Debug, Clone)]
pub struct TensorSpec {
    /// Name in the engine and in packed files.
    pub name: String,
    /// Place in the checkpoint. (A tied head reads the embedding.)
    pub stored: CheckpointPlace,
    /// 1 for a vector.
    pub rows: usize,
    pub cols: usize,
    pub role: TensorRole,
    /// True for the embedding and the output head if they are one tensor.
    pub tied: bool,
    /// True for matrices that the type `q4` stores in more bits: see [`choose_more_bits`].
    pub has_more_bits: bool,
}

/// A tensor of a checkpoint, or some rows of it (elements of a vector): some families store several as one.
#[derive(Debug, Clone)]
pub struct CheckpointPlace {
    /// Name in the checkpoint.
    pub name: String,
    /// First row.
    pub first: usize,
    /// Rows of the whole tensor.
    pub of: usize,
    /// Order of the rows in the whole tensor, of all checkpoints of the family.
    pub order: RowOrder,
}

/// Change of a checkpoint's vector when it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueMap {
    Unchanged,
    /// `x + 1`
    AddOne,
    /// `-e^x`
    NegateExp,
}

impl ValueMap {
    pub fn map_value(self, x: f32) -> f32 {
        match self {
            ValueMap::Unchanged => x,
            ValueMap::AddOne => x + 1.0,
            ValueMap::NegateExp => -libm::exp(f64::from(x)) as f32,
        }
    }
}

impl TensorSpec {
    /// True if the weight type Q4_0 quantises this tensor.
    pub fn is_quantised(&self) -> bool {
        self.role == TensorRole::Matrix && self.cols.is_multiple_of(BLOCK) && !self.is_router()
    }

    /// True for a tensor with the rows, or biases, of all experts of a layer, one expert after another.
    pub fn is_expert(&self) -> bool {
        self.name.contains(EXPERTS_OF_LAYER)
    }

    /// True for any tensor of a feed-forward with experts, except its first and its last norm.
    pub fn is_of_experts(&self, layer: usize) -> bool {
        let norms = [EXPERTS_NORM, SHARED_POST_NORM, EXPERTS_POST_NORM];
        has_experts(layer)
            && (self.name.contains(".mlp.") || norms.iter().any(|norm| self.name.contains(norm)))
    }

    /// The share of its bytes, or elements, that a token reads: of experts, those that are chosen.
    pub fn share_of_token(&self, all: u64) -> u64 {
        if self.is_expert() { all / EXPERTS.count as u64 * EXPERTS.used as u64 } else { all }
    }

    /// True for a matrix whose products are scores of experts. It is never quantised, because a score that is a little
    /// off may choose another expert.
    pub fn is_router(&self) -> bool {
        self.name.ends_with(ROUTER) || self.name.ends_with(SHARED_EXPERT_GATE)
    }

    /// True if it has a row for each token of the vocabulary.
    pub fn is_vocabulary(&self) -> bool {
        self.role == TensorRole::Embedding || self.name == HEAD
    }

    /// Change of the values of a checkpoint that is no GGUF file.
    pub fn value_map(&self) -> ValueMap {
        let norm = self.name.ends_with("norm.weight") && !self.name.ends_with(DELTA_NORM);
        match self.role {
            TensorRole::Vector if norm && ARCH.family().norms_add_one => ValueMap::AddOne,
            TensorRole::Vector if self.name.ends_with(DELTA_DECAY) || self.name.ends_with(MAMBA_DECAY) => {
                ValueMap::NegateExp
            }
            _ => ValueMap::Unchanged,
        }
    }

    /// True for the weights of a convolution, which are a matrix in a checkpoint.
    pub fn is_conv(&self) -> bool {
        matches!(self.stored.order, RowOrder::Transposed { .. })
    }

    /// True if a checkpoint stores the matrix transposed (`Conv1D`), or the matrix of each expert.
    pub fn is_transposed(&self) -> bool {
        let is_stored_so = match ARCH {
            Arch::Gpt2 => self.name != HEAD,
            Arch::GptOss => self.is_expert(),
            _ => false,
        };
        is_stored_so && self.role == TensorRole::Matrix
    }
}

/// Every tensor of the baked model, in the order of a forward pass.
pub fn model_tensors() -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    let mut put = |name: String, (rows, cols): (usize, usize), role: TensorRole| {
        let stored = checkpoint_place(&name, if role == TensorRole::Vector { cols } else { rows });
        let tied = TIED && (name == EMBED || name == HEAD);
        specs.push(TensorSpec { name, stored, rows, cols, role, tied, has_more_bits: false });
    };
    put(EMBED.into(), (VOCAB, DIM), TensorRole::Embedding);
    if LEARNED_POSITIONS {
        put(POSITIONS.into(), (MAX_POSITION, DIM), TensorRole::Table);
    }
    if HAS_PER_LAYER {
        put(PER_LAYER_TABLE.into(), (VOCAB, PER_LAYER_ROW), TensorRole::Table);
        put(PER_LAYER_PROJECTION.into(), (PER_LAYER_ROW, DIM), TensorRole::Matrix);
        put(PER_LAYER_NORM.into(), (1, PER_LAYER_DIM), TensorRole::Vector);
    }
    for l in 0..LAYERS {
        put_layer(&mut put, &|part| format!("model.layers.{l}.{part}"), l);
    }
    put_norm(&mut put, "model.norm".into());
    put(HEAD.into(), (VOCAB, DIM), TensorRole::Matrix);
    choose_more_bits(&mut specs);
    specs
}

/// Adds a tensor of this name, shape and role.
type PutTensor<'a> = &'a mut dyn FnMut(String, (usize, usize), TensorRole);

/// Adds a norm of the residual.
fn put_norm(put: PutTensor<'_>, name: String) {
    put(format!("{name}.weight"), (1, DIM), TensorRole::Vector);
    if NORM_BIAS {
        put(format!("{name}.bias"), (1, DIM), TensorRole::Vector);
    }
}

/// Adds the tensors of a layer like layer `like`, whose names `at` completes.
pub(super) fn put_layer(put: PutTensor<'_>, at: &dyn Fn(&str) -> String, like: usize) {
    if PRE_NORMS && has_mixer(like) {
        put_norm(put, at("input_layernorm"));
    }
    if LAYER_KINDS[like].is_attention() {
        put_attention(put, at, like);
    }
    if is_recurrent(like) {
        put_recurrent(put, at, LAYER_KINDS[like]);
    }
    if POST_NORMS {
        put_norm(put, at(ATTN_POST_NORM));
    }
    if PRE_NORMS && has_ffn(like) {
        put_norm(put, at(FFN_NORM));
    }
    if has_experts(like) {
        put_experts(put, at);
    } else if has_ffn(like) {
        put_feed_forward(put, &|part| at(&format!("mlp.{part}")), ffn_dim(like));
    }
    if POST_NORMS {
        put_norm(put, at(FFN_POST_NORM));
    }
    if HAS_PER_LAYER {
        put(at(PER_LAYER_GATE), (PER_LAYER_DIM, DIM), TensorRole::Matrix);
        put(at(PER_LAYER_OUT), (DIM, PER_LAYER_DIM), TensorRole::Matrix);
        put_norm(put, at(PER_LAYER_POST_NORM));
    }
    if LAYER_SCALARS {
        put(at(LAYER_SCALAR), (1, 1), TensorRole::Vector);
    }
}

/// Adds the tensors of layer `layer`'s attention, whose names `at` completes.
fn put_attention(put: PutTensor<'_>, at: &dyn Fn(&str) -> String, layer: usize) {
    use TensorRole::{Matrix, Vector};
    let (q_dim, kv_dim) = (HEADS * head_dim(layer), kv_heads(layer) * head_dim(layer));
    let has_keys = has_cache(layer);
    for (part, rows) in [("q", q_dim), ("k", kv_dim), ("v", kv_dim)] {
        if part != "q" && !has_keys || part == "v" && values_are_keys(layer) {
            continue;
        }
        put(at(&format!("self_attn.{part}_proj.weight")), (rows, DIM), Matrix);
        if QKV_BIAS {
            put(at(&format!("self_attn.{part}_proj.bias")), (1, rows), Vector);
        }
    }
    let norms = match QK_NORM {
        QkNorm::None => None,
        QkNorm::PerHead | QkNorm::AfterRope => Some([head_dim(layer); 2]),
        QkNorm::Whole => Some([q_dim, kv_dim]),
    };
    if let Some([q_norm, k_norm]) = norms {
        put(at("self_attn.q_norm.weight"), (1, q_norm), Vector);
        if has_keys {
            put(at("self_attn.k_norm.weight"), (1, k_norm), Vector);
        }
    }
    if HAS_ATTENTION_GATE {
        put(at(ATTENTION_GATE_NAME), (GATE_DIM, DIM), Matrix);
    }
    if ATTENTION_SINKS {
        put(at(SINKS), (1, HEADS), Vector);
    }
    put(at("self_attn.o_proj.weight"), (DIM, q_dim), Matrix);
    if O_BIAS {
        put(at("self_attn.o_proj.bias"), (1, DIM), Vector);
    }
}

/// Adds the tensors of a mixture of experts, and of the feed-forward beside them.
fn put_experts(put: PutTensor<'_>, at: &dyn Fn(&str) -> String) {
    use TensorRole::{Matrix, Vector};
    put(at(ROUTER), (EXPERTS.count, DIM), Matrix);
    if EXPERTS.router == Router::BiasedSigmoid {
        put(at(CHOICE_BIAS), (1, EXPERTS.count), Vector);
    }
    if EXPERT_BIAS {
        put(at(ROUTER_BIAS), (1, EXPERTS.count), Vector);
    }
    for (part, rows, cols) in
        [("gate", EXPERT_ROWS, DIM), ("up", EXPERT_ROWS, DIM), ("down", EXPERT_DOWN_ROWS, EXPERTS.dim)]
    {
        put(at(&format!("mlp.experts.{part}_proj.weight")), (rows, cols), Matrix);
        if EXPERT_BIAS {
            put(at(&format!("mlp.experts.{part}_proj.bias")), (1, rows), Vector);
        }
    }
    if HAS_BRANCHES {
        put(at(ROUTER_SCALE), (1, DIM), Vector);
        put(at(EXPERT_SCALE), (1, EXPERTS.count), Vector);
        [EXPERTS_NORM, SHARED_POST_NORM, EXPERTS_POST_NORM].iter().for_each(|norm| put_norm(put, at(norm)));
    }
    if HAS_SHARED_EXPERT_GATE {
        put(at(SHARED_EXPERT_GATE), (1, DIM), Matrix);
    }
    if EXPERTS.shared_dim != 0 {
        put_feed_forward(put, &|part| at(&format!("mlp.shared_expert.{part}")), EXPERTS.shared_dim);
    }
}

/// Adds the tensors of a feed-forward of this width, whose names `at` completes.
fn put_feed_forward(put: PutTensor<'_>, at: &dyn Fn(&str) -> String, width: usize) {
    use TensorRole::{Matrix, Vector};
    if HAS_GATE {
        put(at("gate_proj.weight"), (width, DIM), Matrix);
    }
    put(at("up_proj.weight"), (width, DIM), Matrix);
    if MLP_BIAS {
        put(at("up_proj.bias"), (1, width), Vector);
    }
    put(at("down_proj.weight"), (DIM, width), Matrix);
    if MLP_BIAS {
        put(at("down_proj.bias"), (1, DIM), Vector);
    }
}

/// Adds the tensors of a short convolution, a delta net or Mamba2.
fn put_recurrent(put: PutTensor<'_>, at: &dyn Fn(&str) -> String, kind: LayerKind) {
    use TensorRole::{Matrix, Vector};
    if kind == LayerKind::ShortConv {
        put(at("conv.in_proj.weight"), (3 * DIM, DIM), Matrix);
        put(at(SHORT_CONV), (1, CONV_TAPS * CONV_CHANNELS), Vector);
        put(at("conv.out_proj.weight"), (DIM, DIM), Matrix);
        return;
    }
    if kind.has_mamba() {
        put(at("mamba.in_proj.weight"), (MAMBA_ROWS, DIM), Matrix);
        put(at(MAMBA_CONV), (1, CONV_TAPS * CONV_CHANNELS), Vector);
        if MAMBA.conv_bias {
            put(at(MAMBA_CONV_BIAS), (1, CONV_CHANNELS), Vector);
        }
        for name in [MAMBA_BIAS, MAMBA_DECAY, MAMBA_SKIP] {
            put(at(name), (1, MAMBA.heads), Vector);
        }
        if MAMBA.norm != MambaNorm::None {
            put(at(MAMBA_NORM), (1, MAMBA_DIM), Vector);
        }
        put(at("mamba.out_proj.weight"), (DIM, MAMBA_DIM), Matrix);
        return;
    }
    let heads = DELTA_NET.value_heads;
    put(at("linear_attn.in_proj_qkv.weight"), (CONV_CHANNELS, DIM), Matrix);
    put(at("linear_attn.in_proj_z.weight"), (DELTA_VALUE_DIM, DIM), Matrix);
    put(at("linear_attn.in_proj_b.weight"), (heads, DIM), Matrix);
    put(at("linear_attn.in_proj_a.weight"), (heads, DIM), Matrix);
    put(at(DELTA_CONV), (1, CONV_TAPS * CONV_CHANNELS), Vector);
    put(at(DELTA_BIAS), (1, heads), Vector);
    put(at(DELTA_DECAY), (1, heads), Vector);
    put(at(DELTA_NORM), (1, DELTA_NET.value_dim), Vector);
    put(at("linear_attn.out_proj.weight"), (DIM, DELTA_VALUE_DIM), Matrix);
}

/// Place in a checkpoint of the engine's tensor `name` with this number of rows.
pub(super) fn checkpoint_place(name: &str, rows: usize) -> CheckpointPlace {
    if name == HEAD && TIED {
        return checkpoint_place(EMBED, rows);
    }
    let whole = |name: String| CheckpointPlace { name, first: 0, of: rows, order: RowOrder::Unchanged };
    let family = ARCH.family();
    // Fused tensors: the rows of q, k and v one after another, and of gate and up.
    let qkv = || {
        let first = [("q_proj", 0), ("k_proj", Q_DIM), ("v_proj", Q_DIM + KV_DIM)];
        let (part, first) = first.into_iter().find(|(part, _)| name.contains(part))?;
        Some(CheckpointPlace {
            name: ARCH.checkpoint_name(&name.replace(part, "qkv_proj")),
            first,
            of: Q_DIM + 2 * KV_DIM,
            order: RowOrder::Unchanged,
        })
    };
    match ARCH {
        Arch::Phi3 => {
            let gate_up = |(part, first): (&str, usize)| {
                let fused = name.contains(part).then(|| name.replace(part, "gate_up_proj"))?;
                Some(CheckpointPlace { name: fused, first, of: 2 * FFN_DIM, order: RowOrder::Unchanged })
            };
            let halves = [("gate_proj", 0), ("up_proj", FFN_DIM)];
            let found = qkv().or_else(|| halves.into_iter().find_map(gate_up));
            found.unwrap_or_else(|| whole(name.into()))
        }
        Arch::Gpt2 => qkv().unwrap_or_else(|| whole(ARCH.checkpoint_name(name))),
        // Each head's rows of q, then those of its gate.
        Arch::Qwen35 | Arch::Qwen35Moe
            if name.ends_with("self_attn.q_proj.weight") || name.ends_with(ATTENTION_GATE_NAME) =>
        {
            let part = usize::from(name.ends_with(ATTENTION_GATE_NAME));
            let order = RowOrder::HeadPart { head_dim: HEAD_DIM, part, parts: 2 };
            CheckpointPlace { name: name.replace(".gate_proj.", ".q_proj."), first: 0, of: 2 * Q_DIM, order }
        }
        _ => {
            let is_rotated = name.contains("self_attn.q_proj") || name.contains("self_attn.k_proj");
            let is_conv = [SHORT_CONV, DELTA_CONV, MAMBA_CONV].iter().any(|end| name.ends_with(end));
            let order = if is_conv {
                RowOrder::Transposed { cols: CONV_TAPS, rows: CONV_CHANNELS }
            } else if family.interleaved_rope && is_rotated {
                RowOrder::Interleaved { head_dim: HEAD_DIM }
            } else {
                RowOrder::Unchanged
            };
            CheckpointPlace { order, ..whole(ARCH.checkpoint_name(name)) }
        }
    }
}

pub(super) const EMBED: &str = "model.embed_tokens.weight";
pub(super) const POSITIONS: &str = "model.embed_positions.weight";
/// Embeddings that each layer has of a token: `[VOCAB][LAYERS][PER_LAYER_DIM]`.
pub(super) const PER_LAYER_TABLE: &str = "model.embed_tokens_per_layer.weight";
pub(super) const PER_LAYER_PROJECTION: &str = "model.per_layer_model_projection.weight";
pub(super) const PER_LAYER_NORM: &str = "model.per_layer_projection_norm.weight";
pub(super) const PER_LAYER_GATE: &str = "per_layer_input_gate.weight";
pub(super) const PER_LAYER_OUT: &str = "per_layer_projection.weight";
pub(super) const PER_LAYER_POST_NORM: &str = "post_per_layer_input_norm";
pub(super) const LAYER_SCALAR: &str = "layer_scalar";
pub(super) const HEAD: &str = "lm_head.weight";
/// Norm before the feed-forward layer. Models with post-norms use its usual name for the norm after attention.
pub(super) const FFN_NORM: &str =
    if POST_NORMS { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
pub(super) const ATTN_POST_NORM: &str = "post_attention_layernorm";
pub(super) const FFN_POST_NORM: &str = "post_feedforward_layernorm";
/// Gate of attention's output.
pub(super) const ATTENTION_GATE_NAME: &str = "self_attn.gate_proj.weight";
/// Part of the names of the matrices of all experts of a layer.
const EXPERTS_OF_LAYER: &str = ".mlp.experts.";
pub(super) const ROUTER: &str = "mlp.gate.weight";
pub(super) const ROUTER_BIAS: &str = "mlp.gate.bias";
/// A logit of each head that takes part in the softmax, but belongs to no token.
pub(super) const SINKS: &str = "self_attn.sinks";
/// Bias by which experts are chosen, but not weighed.
pub(super) const CHOICE_BIAS: &str = "mlp.expert_bias";
pub(super) const SHARED_EXPERT_GATE: &str = "mlp.shared_expert_gate.weight";
/// Factors of the normed residual's elements that the router reads, times the root of [`DIM`].
pub(super) const ROUTER_SCALE: &str = "mlp.router_scale";
/// Factor of each expert's weight.
pub(super) const EXPERT_SCALE: &str = "mlp.expert_scale";
/// Norms before the experts, after the feed-forward beside them, and after the experts.
pub(super) const EXPERTS_NORM: &str = "pre_feedforward_layernorm_2";
pub(super) const SHARED_POST_NORM: &str = "post_feedforward_layernorm_1";
pub(super) const EXPERTS_POST_NORM: &str = "post_feedforward_layernorm_2";
pub(super) const SHORT_CONV: &str = "conv.conv.weight";
pub(super) const DELTA_CONV: &str = "linear_attn.conv1d.weight";
pub(super) const DELTA_BIAS: &str = "linear_attn.dt_bias";
/// Negative decay of each head; its logarithm in a checkpoint.
pub(super) const DELTA_DECAY: &str = "linear_attn.A_log";
pub(super) const DELTA_NORM: &str = "linear_attn.norm.weight";
pub(super) const MAMBA_CONV: &str = "mamba.conv1d.weight";
pub(super) const MAMBA_CONV_BIAS: &str = "mamba.conv1d.bias";
/// Bias of each head's time steps.
pub(super) const MAMBA_BIAS: &str = "mamba.dt_bias";
/// Negative decay of each head; its logarithm in a checkpoint.
pub(super) const MAMBA_DECAY: &str = "mamba.A_log";
/// Factor of each head's input that is added to its output.
pub(super) const MAMBA_SKIP: &str = "mamba.D";
pub(super) const MAMBA_NORM: &str = "mamba.norm.weight";
