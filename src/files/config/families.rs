//! A row of names, defaults and switches for each model family.

use super::checkpoint_names::{
    FALCON_H1_TENSORS, GEMMA4_TENSORS, GPT2_TENSORS, GRANITE_FUSED, HUNYUAN_TENSORS, LFM2_TENSORS,
    LFM3_TENSORS, NEMOTRON_H_TENSORS, TEXT_PART,
};
use super::experts::{Experts, Router};
use super::switches::{AttentionGate, Mlp, Norm, QkNorm};

/// A family's names, defaults and switches: see [`Arch::family`](super::Arch::family).
#[derive(Clone, Copy)]
pub struct Family {
    /// The `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The `general.architecture` of a GGUF file.
    pub gguf_name: &'static str,
    /// Another `model_type`, whose object `text_config` holds this family's config.
    pub wrapper: &'static str,
    pub norm: Norm,
    /// Norms on the inputs of mixer and feed-forward.
    pub pre_norms: bool,
    /// Norms on their outputs.
    pub post_norms: bool,
    /// A checkpoint stores the weights of norms minus one.
    pub norms_add_one: bool,
    pub qk_norm: QkNorm,
    /// Values are normed, without weights.
    pub value_norm: bool,
    pub attention_gate: AttentionGate,
    /// Projections of attention have biases, unless the config says otherwise.
    pub attention_bias: bool,
    /// Each head has a logit that takes part in the softmax, and whose share is dropped.
    pub attention_sinks: bool,
    pub mlp: Mlp,
    /// Defaults of its mixtures of experts, if it has such; a size of 0 must be in the config.
    pub experts: Option<Experts>,
    /// Each layer multiplies the residual with a factor of its own.
    pub layer_scalars: bool,
    /// RoPE rotates elements `2i` and `2i + 1` of a checkpoint, not `i` and `i + head_dim / 2`.
    pub interleaved_rope: bool,
    pub ties_embeddings: bool,
    pub norm_eps: f64,
    /// Name of the field with the epsilon of norms.
    pub epsilon_field: &'static str,
    pub rope_theta: f64,
    /// Default number of KV heads; 0 for the number of heads.
    pub kv_heads: usize,
    /// Default width of a head; 0 for the width of the model divided by the heads.
    pub head_dim: usize,
    /// Activation functions that the config may name.
    pub activations: &'static [&'static str],
    /// Renames from the engine's tensor names to the checkpoint's, applied in order.
    pub tensor_names: &'static [(&'static str, &'static str)],
    /// Further renames, also applied in order, to names that safetensors files have and GGUF files do not: some are of
    /// one tensor for two of the engine's.
    pub fused_names: &'static [(&'static str, &'static str)],
    /// Prefixes that a checkpoint's tensor names may have, and what they replace.
    pub prefixes: &'static [(&'static str, &'static str)],
}

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    gguf_name: "llama",
    wrapper: "",
    norm: Norm::Rms,
    pre_norms: true,
    post_norms: false,
    norms_add_one: false,
    qk_norm: QkNorm::None,
    value_norm: false,
    attention_gate: AttentionGate::None,
    attention_bias: false,
    attention_sinks: false,
    mlp: Mlp::SwiGlu,
    experts: None,
    layer_scalars: false,
    interleaved_rope: false,
    ties_embeddings: false,
    norm_eps: 1e-6,
    epsilon_field: "rms_norm_eps",
    rope_theta: 10_000.0,
    kv_heads: 0,
    head_dim: 0,
    activations: &["silu", "swish"],
    tensor_names: &[],
    fused_names: &[],
    prefixes: &[],
};

pub(super) const MISTRAL: Family =
    Family { model_type: "mistral", kv_heads: 8, prefixes: TEXT_PART, ..LLAMA };

pub(super) const MINISTRAL_3: Family = Family {
    model_type: "ministral3",
    gguf_name: "mistral3",
    wrapper: "mistral3",
    norm_eps: 1e-5,
    rope_theta: 1e6,
    kv_heads: 8,
    head_dim: 128,
    prefixes: TEXT_PART,
    ..LLAMA
};

pub(super) const QWEN_2: Family = Family { model_type: "qwen2", gguf_name: "qwen2", kv_heads: 32, ..LLAMA };

pub(super) const QWEN_3: Family = Family {
    model_type: "qwen3",
    gguf_name: "qwen3",
    qk_norm: QkNorm::PerHead,
    kv_heads: 32,
    head_dim: 128,
    ..LLAMA
};

pub(super) const QWEN_3_MOE: Family = Family {
    model_type: "qwen3_moe",
    gguf_name: "qwen3moe",
    experts: Some(Experts { count: 128, used: 8, dim: 768, ..Experts::NONE }),
    kv_heads: 4,
    head_dim: 0,
    ..QWEN_3
};

pub(super) const QWEN_3_5: Family = Family {
    model_type: "qwen3_5_text",
    gguf_name: "qwen35",
    wrapper: "qwen3_5",
    norms_add_one: true,
    qk_norm: QkNorm::PerHead,
    attention_gate: AttentionGate::PerElement,
    kv_heads: 4,
    head_dim: 256,
    prefixes: TEXT_PART,
    ..LLAMA
};

pub(super) const QWEN_3_5_MOE: Family = Family {
    model_type: "qwen3_5_moe_text",
    gguf_name: "qwen35moe",
    wrapper: "qwen3_5_moe",
    experts: Some(Experts {
        count: 256,
        used: 8,
        dim: 512,
        shared_dim: 512,
        renormalised: true,
        ..Experts::NONE
    }),
    kv_heads: 2,
    ..QWEN_3_5
};

pub(super) const SMOLLM_3: Family = Family {
    model_type: "smollm3",
    gguf_name: "smollm3",
    ties_embeddings: true,
    rope_theta: 2e6,
    kv_heads: 4,
    ..LLAMA
};

pub(super) const PHI_3: Family = Family { model_type: "phi3", gguf_name: "phi3", norm_eps: 1e-5, ..LLAMA };

pub(super) const GRANITE: Family = Family { model_type: "granite", gguf_name: "granite", ..LLAMA };

pub(super) const GRANITE_MOE_HYBRID: Family = Family {
    model_type: "granitemoehybrid",
    gguf_name: "granitehybrid",
    experts: Some(Experts {
        count: 8,
        used: 2,
        dim: 11_008,
        shared_dim: 1024,
        renormalised: true,
        ..Experts::NONE
    }),
    fused_names: GRANITE_FUSED,
    ..GRANITE
};

pub(super) const FALCON_H1: Family = Family {
    model_type: "falcon_h1",
    gguf_name: "falcon-h1",
    norm_eps: 1e-5,
    kv_heads: 8,
    tensor_names: FALCON_H1_TENSORS,
    ..LLAMA
};

pub(super) const NEMOTRON_H: Family = Family {
    model_type: "nemotron_h",
    gguf_name: "nemotron_h",
    mlp: Mlp::SquaredRelu,
    norm_eps: 1e-5,
    epsilon_field: "layer_norm_epsilon",
    kv_heads: 8,
    head_dim: 128,
    activations: &["relu2"],
    tensor_names: NEMOTRON_H_TENSORS,
    ..LLAMA
};

pub(super) const GEMMA_3: Family = Family {
    model_type: "gemma3_text",
    gguf_name: "gemma3",
    wrapper: "gemma3",
    post_norms: true,
    norms_add_one: true,
    qk_norm: QkNorm::PerHead,
    mlp: Mlp::GeGlu,
    ties_embeddings: true,
    rope_theta: 1e6,
    kv_heads: 4,
    head_dim: 256,
    activations: &["gelu_pytorch_tanh"],
    prefixes: TEXT_PART,
    ..LLAMA
};

pub(super) const GEMMA_4: Family = Family {
    model_type: "gemma4_text",
    gguf_name: "gemma4",
    wrapper: "gemma4",
    norms_add_one: false,
    value_norm: true,
    layer_scalars: true,
    experts: Some(Experts { renormalised: true, own_norms: true, ..Experts::NONE }),
    tensor_names: GEMMA4_TENSORS,
    ..GEMMA_3
};

pub(super) const GPT_2: Family = Family {
    model_type: "gpt2",
    gguf_name: "gpt2",
    norm: Norm::Layer,
    mlp: Mlp::Gelu,
    ties_embeddings: true,
    norm_eps: 1e-5,
    epsilon_field: "layer_norm_epsilon",
    activations: &["gelu_new", "gelu_pytorch_tanh"],
    tensor_names: GPT2_TENSORS,
    prefixes: &[("transformer.", "")],
    ..LLAMA
};

pub(super) const ERNIE_4_5: Family = Family {
    model_type: "ernie4_5",
    gguf_name: "ernie4_5",
    interleaved_rope: true,
    ties_embeddings: true,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    ..LLAMA
};

pub(super) const HUNYUAN_DENSE: Family = Family {
    model_type: "hunyuan_v1_dense",
    gguf_name: "hunyuan-dense",
    qk_norm: QkNorm::AfterRope,
    norm_eps: 1e-5,
    tensor_names: HUNYUAN_TENSORS,
    ..LLAMA
};

pub(super) const OLMO_2: Family = Family {
    model_type: "olmo2",
    gguf_name: "olmo2",
    pre_norms: false,
    post_norms: true,
    qk_norm: QkNorm::Whole,
    norm_eps: 1e-5,
    ..LLAMA
};

pub(super) const OLMO_3: Family = Family { model_type: "olmo3", ..OLMO_2 };

pub(super) const EXAONE_4: Family = Family {
    model_type: "exaone4",
    gguf_name: "exaone4",
    pre_norms: false,
    post_norms: true,
    qk_norm: QkNorm::PerHead,
    norm_eps: 1e-5,
    ..LLAMA
};

pub(super) const LFM_2: Family = Family {
    model_type: "lfm2",
    gguf_name: "lfm2",
    qk_norm: QkNorm::PerHead,
    ties_embeddings: true,
    norm_eps: 1e-5,
    epsilon_field: "norm_eps",
    rope_theta: 1e6,
    kv_heads: 8,
    tensor_names: LFM2_TENSORS,
    ..LLAMA
};

pub(super) const LFM_2_MOE: Family = Family {
    model_type: "lfm2_moe",
    gguf_name: "lfm2moe",
    experts: Some(Experts {
        count: 32,
        used: 4,
        dim: 1792,
        router: Router::BiasedSigmoid,
        renormalised: true,
        ..Experts::NONE
    }),
    ..LFM_2
};

pub(super) const LFM_3: Family = Family {
    model_type: "lfm3",
    gguf_name: "lfm3",
    post_norms: true,
    attention_gate: AttentionGate::PerHead,
    tensor_names: LFM3_TENSORS,
    ..LFM_2
};

pub(super) const GPT_OSS: Family = Family {
    model_type: "gpt_oss",
    gguf_name: "gpt-oss",
    attention_bias: true,
    attention_sinks: true,
    mlp: Mlp::ClampedSwiGlu,
    experts: Some(Experts {
        count: 128,
        used: 4,
        dim: 2880,
        renormalised: true,
        limit: 7.0,
        ..Experts::NONE
    }),
    norm_eps: 1e-5,
    rope_theta: 150_000.0,
    kv_heads: 8,
    head_dim: 64,
    tensor_names: &[("mlp.gate", "mlp.router")],
    ..LLAMA
};
