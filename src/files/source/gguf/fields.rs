//! The metadata keys that become fields of a `config.json`.

use serde_json::{Number, Value as Json};

use super::value::Value;
use crate::config::Arch;

/// The required type of a key's value.
#[derive(Clone, Copy)]
pub(super) enum ValueForm {
    Integer,
    /// An integer, or an array of equal integers, one per layer.
    PerLayer,
    /// Like `PerLayer`, but 0 for layers without attention.
    PerAttentionLayer,
    Float,
    Text,
}

use ValueForm::*;

impl ValueForm {
    pub(super) fn name(self) -> &'static str {
        match self {
            Integer => "an integer",
            PerLayer => "an integer, or an array of one integer of 32 bits for every layer, all the same",
            PerAttentionLayer => {
                "an integer, or an array of one integer of 32 bits for every layer, 0 or all the same"
            }
            Float => "a floating-point number",
            Text => "a string",
        }
    }

    /// Converts a value to JSON; `None` if it has another type.
    pub(super) fn to_json(self, value: &Value) -> Option<Json> {
        match (self, value) {
            (Text, _) => value.as_str().map(Json::from),
            (Float, _) => Number::from_f64(value.as_f64()?).map(Json::from),
            (PerLayer | PerAttentionLayer, Value::Array(array)) => {
                let zeros = matches!(self, PerAttentionLayer);
                let mut values = array.iter_int32()?.filter(|value| !zeros || value.as_u64() != Some(0));
                let first = values.next()?;
                if values.all(|value| value == first) { Integer.to_json(&first) } else { None }
            }
            _ => value.as_u64().map(Json::from),
        }
    }
}

const ALL: &[Arch] = &[];
const GRANITE: &[Arch] = &[Arch::Granite, Arch::GraniteMoeHybrid];
const MAMBA: &[Arch] = &[Arch::GraniteMoeHybrid, Arch::FalconH1, Arch::NemotronH];
const LFM2: &[Arch] = &[Arch::Lfm2, Arch::Lfm2Moe];
const QWEN35: &[Arch] = &[Arch::Qwen35, Arch::Qwen35Moe];
const EXPERTS: &[Arch] =
    &[Arch::Qwen3Moe, Arch::Qwen35Moe, Arch::Lfm2Moe, Arch::GptOss, Arch::Gemma4, Arch::GraniteMoeHybrid];
const GEMMA4: &[Arch] = &[Arch::Gemma4];

/// Keys without `ARCH.`, their types, the corresponding fields of `config.json`, and the families that have them; none
/// for all.
pub(super) const FIELDS: [(&str, ValueForm, &str, &[Arch]); 36] = [
    ("block_count", Integer, "num_hidden_layers", ALL),
    ("embedding_length", Integer, "hidden_size", ALL),
    ("feed_forward_length", PerLayer, "intermediate_size", ALL),
    ("attention.head_count", PerLayer, "num_attention_heads", ALL),
    ("attention.head_count_kv", PerLayer, "num_key_value_heads", ALL),
    ("attention.key_length", Integer, "head_dim", ALL),
    ("context_length", Integer, "max_position_embeddings", ALL),
    ("attention.layer_norm_rms_epsilon", Float, "rms_norm_eps", ALL),
    ("attention.layer_norm_epsilon", Float, "rms_norm_eps", &[Arch::Gpt2]),
    ("rope.freq_base", Float, "rope_theta", ALL),
    ("rope.freq_base_swa", Float, "rope_local_base_freq", &[Arch::Gemma3, Arch::Gemma4]),
    (
        "attention.sliding_window",
        Integer,
        "sliding_window",
        &[Arch::Gemma3, Arch::Gemma4, Arch::Phi3, Arch::Olmo3, Arch::Exaone4, Arch::GptOss],
    ),
    ("attention.key_length_swa", Integer, "local_head_dim", GEMMA4),
    ("attention.shared_kv_layers", Integer, "num_kv_shared_layers", GEMMA4),
    ("embedding_length_per_layer_input", Integer, "hidden_size_per_layer_input", GEMMA4),
    ("final_logit_softcapping", Float, "final_logit_softcapping", GEMMA4),
    ("attention.scale", Float, "attention_multiplier", GRANITE),
    ("embedding_scale", Float, "embedding_multiplier", GRANITE),
    ("residual_scale", Float, "residual_multiplier", GRANITE),
    ("logit_scale", Float, "logits_scaling", GRANITE),
    ("hidden_activation", Text, "hidden_act", ALL),
    ("shortconv.l_cache", Integer, "conv_L_cache", LFM2),
    ("ssm.conv_kernel", Integer, "linear_conv_kernel_dim", QWEN35),
    ("ssm.state_size", Integer, "linear_key_head_dim", QWEN35),
    ("ssm.group_count", Integer, "linear_num_key_heads", QWEN35),
    ("ssm.time_step_rank", Integer, "linear_num_value_heads", QWEN35),
    ("ssm.conv_kernel", Integer, "mamba_d_conv", MAMBA),
    ("ssm.state_size", Integer, "mamba_d_state", MAMBA),
    ("ssm.group_count", Integer, "mamba_n_groups", MAMBA),
    ("ssm.time_step_rank", Integer, "mamba_n_heads", MAMBA),
    ("full_attention_interval", Integer, "full_attention_interval", QWEN35),
    ("expert_count", Integer, "num_experts", EXPERTS),
    ("expert_used_count", Integer, "num_experts_per_tok", EXPERTS),
    ("expert_feed_forward_length", Integer, "moe_intermediate_size", EXPERTS),
    (
        "expert_shared_feed_forward_length",
        Integer,
        "shared_expert_intermediate_size",
        &[Arch::Qwen35Moe, Arch::GraniteMoeHybrid],
    ),
    ("leading_dense_block_count", Integer, "num_dense_layers", &[Arch::Lfm2Moe]),
];

/// Keys besides the epsilon's that a file of this family must have, though a `config.json` has defaults for them.
pub(super) fn required_keys(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::Lfm2 => &["shortconv.l_cache", "attention.head_count_kv"],
        Arch::Lfm2Moe => &[
            "shortconv.l_cache",
            "attention.head_count_kv",
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
            "leading_dense_block_count",
        ],
        Arch::GptOss => &[
            "attention.key_length",
            "attention.sliding_window",
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
        ],
        Arch::Qwen3Moe => &["expert_count", "expert_used_count", "expert_feed_forward_length"],
        Arch::Qwen35 | Arch::Qwen35Moe => &[
            "rope.dimension_count",
            "ssm.conv_kernel",
            "ssm.state_size",
            "ssm.group_count",
            "ssm.time_step_rank",
            "ssm.inner_size",
        ],
        Arch::GraniteMoeHybrid | Arch::FalconH1 | Arch::NemotronH => &[
            "attention.head_count_kv",
            "ssm.conv_kernel",
            "ssm.state_size",
            "ssm.group_count",
            "ssm.time_step_rank",
            "ssm.inner_size",
        ],
        Arch::Gemma4 => &["attention.key_length", "attention.key_length_swa", "attention.sliding_window"],
        _ => &[],
    }
}
