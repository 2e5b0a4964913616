//! Names in which the checkpoints of some families differ: renames of the engine's names, and prefixes.

/// Prefixes of the text part of a multimodal model.
pub(super) const TEXT_PART: &[(&str, &str)] = &[("language_model.", ""), ("model.language_model.", "model.")];

/// Names of LFM2's tensors.
pub(super) const LFM2_TENSORS: &[(&str, &str)] = &[
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("mlp.", "feed_forward."),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
];

/// Names of LFM3's tensors.
pub(super) const LFM3_TENSORS: &[(&str, &str)] = &[
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_attention_layernorm", "post_operator_norm"),
    ("post_feedforward_layernorm", "post_ffn_norm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
];

/// Names of the tensors of Gemma 4's experts, which are beside its usual feed-forward.
pub(super) const GEMMA4_TENSORS: &[(&str, &str)] = &[
    ("mlp.gate.", "router.proj."),
    ("mlp.router_scale", "router.scale"),
    ("mlp.expert_scale", "router.per_expert_scale"),
    ("mlp.experts.", "experts."),
    ("mlp.shared_expert.", "mlp."),
];

/// Names of Hunyuan's tensors.
pub(super) const HUNYUAN_TENSORS: &[(&str, &str)] =
    &[("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")];

/// Names in the files of Granite 4, whose gates and ups are one tensor.
pub(super) const GRANITE_FUSED: &[(&str, &str)] = &[
    ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ("mlp.gate.", "block_sparse_moe.router.layer."),
    ("mlp.shared_expert.", "shared_mlp."),
    (".mlp.", ".shared_mlp."),
    ("gate_proj", "input_linear"),
    ("up_proj", "input_linear"),
    ("down_proj", "output_linear"),
];

/// Names of Falcon-H1's tensors.
pub(super) const FALCON_H1_TENSORS: &[(&str, &str)] = &[
    ("model.norm.", "model.final_layernorm."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("mlp.", "feed_forward."),
];

/// Names of Nemotron-H's tensors.
pub(super) const NEMOTRON_H_TENSORS: &[(&str, &str)] = &[
    ("model.norm.", "backbone.norm_f."),
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.layers.", "backbone.layers."),
    ("input_layernorm", "norm"),
    ("post_attention_layernorm", "norm"),
    ("mlp.", "mixer."),
    ("self_attn.", "mixer."),
    ("mamba.", "mixer."),
];

/// Names of GPT-2's tensors.
pub(super) const GPT2_TENSORS: &[(&str, &str)] = &[
    ("model.embed_tokens", "wte"),
    ("model.embed_positions", "wpe"),
    ("model.layers.", "h."),
    ("model.norm", "ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.qkv_proj", "attn.c_attn"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("mlp.up_proj", "mlp.c_fc"),
    ("mlp.down_proj", "mlp.c_proj"),
    ("model.", ""),
];
