//! Model families: a row of names, defaults and switches for each.
//!
//! A family that needs no new switch is an [`Arch`], its row in [`Arch::family`], and its names in GGUF files
//! (`files::source::gguf::names`).

use super::checkpoint_names::{
    GEMMA4_TENSORS, GPT2_TENSORS, HUNYUAN_TENSORS, LFM2_TENSORS, LFM3_TENSORS, TEXT_PART,
};
use super::experts::{Experts, Router};
use super::switches::{AttentionGate, Mlp, Norm, QkNorm};

/// The model families that this program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    Mistral,
    Ministral3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen35,
    Qwen35Moe,
    SmolLm3,
    Phi3,
    Granite,
    Gemma3,
    Gemma4,
    Gpt2,
    Ernie45,
    HunyuanDense,
    Olmo2,
    Olmo3,
    Exaone4,
    Lfm2,
    Lfm2Moe,
    Lfm3,
    GptOss,
}

/// A family's names, defaults and switches: see [`Arch::family`].
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
    /// Prefixes that a checkpoint's tensor names may have, and what they replace.
    pub prefixes: &'static [(&'static str, &'static str)],
}

const LLAMA: Family = Family {
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
    prefixes: &[],
};

const MISTRAL: Family = Family { model_type: "mistral", kv_heads: 8, prefixes: TEXT_PART, ..LLAMA };

const MINISTRAL_3: Family = Family {
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

const QWEN_2: Family = Family { model_type: "qwen2", gguf_name: "qwen2", kv_heads: 32, ..LLAMA };

const QWEN_3: Family = Family {
    model_type: "qwen3",
    gguf_name: "qwen3",
    qk_norm: QkNorm::PerHead,
    kv_heads: 32,
    head_dim: 128,
    ..LLAMA
};

const QWEN_3_MOE: Family = Family {
    model_type: "qwen3_moe",
    gguf_name: "qwen3moe",
    experts: Some(Experts { count: 128, used: 8, dim: 768, ..Experts::NONE }),
    kv_heads: 4,
    head_dim: 0,
    ..QWEN_3
};

const QWEN_3_5: Family = Family {
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

const QWEN_3_5_MOE: Family = Family {
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

const SMOLLM_3: Family = Family {
    model_type: "smollm3",
    gguf_name: "smollm3",
    ties_embeddings: true,
    rope_theta: 2e6,
    kv_heads: 4,
    ..LLAMA
};

const PHI_3: Family = Family { model_type: "phi3", gguf_name: "phi3", norm_eps: 1e-5, ..LLAMA };

const GRANITE: Family = Family { model_type: "granite", gguf_name: "granite", ..LLAMA };

const GEMMA_3: Family = Family {
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

const GEMMA_4: Family = Family {
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

const GPT_2: Family = Family {
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

const ERNIE_4_5: Family = Family {
    model_type: "ernie4_5",
    gguf_name: "ernie4_5",
    interleaved_rope: true,
    ties_embeddings: true,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    ..LLAMA
};

const HUNYUAN_DENSE: Family = Family {
    model_type: "hunyuan_v1_dense",
    gguf_name: "hunyuan-dense",
    qk_norm: QkNorm::AfterRope,
    norm_eps: 1e-5,
    tensor_names: HUNYUAN_TENSORS,
    ..LLAMA
};

const OLMO_2: Family = Family {
    model_type: "olmo2",
    gguf_name: "olmo2",
    pre_norms: false,
    post_norms: true,
    qk_norm: QkNorm::Whole,
    norm_eps: 1e-5,
    ..LLAMA
};

const OLMO_3: Family = Family { model_type: "olmo3", ..OLMO_2 };

const EXAONE_4: Family = Family {
    model_type: "exaone4",
    gguf_name: "exaone4",
    pre_norms: false,
    post_norms: true,
    qk_norm: QkNorm::PerHead,
    norm_eps: 1e-5,
    ..LLAMA
};

const LFM_2: Family = Family {
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

const LFM_2_MOE: Family = Family {
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

const LFM_3: Family = Family {
    model_type: "lfm3",
    gguf_name: "lfm3",
    post_norms: true,
    attention_gate: AttentionGate::PerHead,
    tensor_names: LFM3_TENSORS,
    ..LFM_2
};

const GPT_OSS: Family = Family {
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

impl Arch {
    pub const ALL: [Arch; 23] = [
        Arch::Llama,
        Arch::Mistral,
        Arch::Ministral3,
        Arch::Qwen2,
        Arch::Qwen3,
        Arch::Qwen3Moe,
        Arch::Qwen35,
        Arch::Qwen35Moe,
        Arch::SmolLm3,
        Arch::Phi3,
        Arch::Granite,
        Arch::Gemma3,
        Arch::Gemma4,
        Arch::Gpt2,
        Arch::Ernie45,
        Arch::HunyuanDense,
        Arch::Olmo2,
        Arch::Olmo3,
        Arch::Exaone4,
        Arch::Lfm2,
        Arch::Lfm2Moe,
        Arch::Lfm3,
        Arch::GptOss,
    ];

    /// The family's row.
    pub const fn family(self) -> Family {
        match self {
            Arch::Llama => LLAMA,
            Arch::Mistral => MISTRAL,
            Arch::Ministral3 => MINISTRAL_3,
            Arch::Qwen2 => QWEN_2,
            Arch::Qwen3 => QWEN_3,
            Arch::Qwen3Moe => QWEN_3_MOE,
            Arch::Qwen35 => QWEN_3_5,
            Arch::Qwen35Moe => QWEN_3_5_MOE,
            Arch::SmolLm3 => SMOLLM_3,
            Arch::Phi3 => PHI_3,
            Arch::Granite => GRANITE,
            Arch::Gemma3 => GEMMA_3,
            Arch::Gemma4 => GEMMA_4,
            Arch::Gpt2 => GPT_2,
            Arch::Ernie45 => ERNIE_4_5,
            Arch::HunyuanDense => HUNYUAN_DENSE,
            Arch::Olmo2 => OLMO_2,
            Arch::Olmo3 => OLMO_3,
            Arch::Exaone4 => EXAONE_4,
            Arch::Lfm2 => LFM_2,
            Arch::Lfm2Moe => LFM_2_MOE,
            Arch::Lfm3 => LFM_3,
            Arch::GptOss => GPT_OSS,
        }
    }

    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.family().model_type
    }

    /// The `model_type` of the family whose files this one's are like, where only names differ.
    pub(super) fn compatible_name(self) -> &'static str {
        match self {
            Arch::Mistral => Arch::Llama.name(),
            Arch::Olmo3 => Arch::Olmo2.name(),
            arch => arch.name(),
        }
    }

    /// Translates the engine's name of a tensor, or a part of it, to a checkpoint's.
    pub fn checkpoint_name(self, name: &str) -> String {
        self.family().tensor_names.iter().fold(name.into(), |name, (from, to)| name.replace(from, to))
    }

    /// True for Qwen 3.5, with or without experts.
    pub const fn is_qwen35(self) -> bool {
        matches!(self, Arch::Qwen35 | Arch::Qwen35Moe)
    }

    /// True for LFM2, with or without experts.
    pub(crate) fn is_lfm2(self) -> bool {
        matches!(self, Arch::Lfm2 | Arch::Lfm2Moe)
    }

    /// True if the RoPE of sliding-window layers is another than that of full-attention layers.
    pub(super) fn has_local_rope(self) -> bool {
        matches!(self, Arch::Gemma3 | Arch::Gemma4 | Arch::Lfm3 | Arch::Olmo3)
    }

    /// The `general.architecture` of a GGUF file.
    pub fn gguf_name(self) -> &'static str {
        self.family().gguf_name
    }

    /// Lists the names of all families for errors.
    pub fn list_names(name: impl Fn(Arch) -> &'static str) -> String {
        let mut names = Self::ALL.map(|arch| format!("{:?}", name(arch))).to_vec();
        names.dedup();
        names.join(", ")
    }

    /// Translates a field name of Llama's config to this family's.
    pub(crate) fn field_name(self, name: &'static str) -> &'static str {
        match (self, name) {
            (_, "rms_norm_eps") => self.epsilon_field(),
            (Arch::Gpt2, "hidden_size") => "n_embd",
            (Arch::Gpt2, "num_attention_heads") => "n_head",
            (Arch::Gpt2, "num_hidden_layers") => "n_layer",
            (Arch::Gpt2, "intermediate_size") => "n_inner",
            (Arch::Gpt2, "max_position_embeddings") => "n_positions",
            (Arch::Gemma4, "num_experts_per_tok") => "top_k_experts",
            (Arch::GptOss, "num_experts") => "num_local_experts",
            (Arch::GptOss, "moe_intermediate_size") => "intermediate_size",
            _ => name,
        }
    }

    /// Name of the field with the epsilon of norms.
    pub(crate) fn epsilon_field(self) -> &'static str {
        self.family().epsilon_field
    }
}
