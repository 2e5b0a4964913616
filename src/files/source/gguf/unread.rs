//! Architecture keys that the config does not read.
//!
//! Such a key is an error, because it may change the model's results, unless the table here says that its value has no
//! effect. Keys and their meanings are llama.cpp's.

use super::value::Value;
use crate::config::{Arch, ModelConfig, Router};

/// Values of a key that have no effect.
#[derive(Clone, Copy)]
enum Neutral {
    Any,
    /// 0, a negative number, false or an empty string: the mechanism is off.
    Off,
    /// This number, or 0 (unset).
    Number(f64),
    True,
}

use Neutral::{Any, Number, Off, True};

/// Prefixes of keys of mechanisms that have their own tensors. Without the tensors the keys have no effect; with them
/// the model is rejected.
const WITH_TENSORS: [&str; 22] = [
    "adapters.",
    "attention.indexer.",
    "classifier.",
    "convnext.",
    "decoder_",
    "dense_",
    "expert",
    "hyper_connection.",
    "interleave_moe_layer_step",
    "kda.",
    "leading_dense_block_count",
    "mm.",
    "moe_",
    "ple.",
    "posnet.",
    "router_logit_softcapping",
    "shortconv.",
    "ssm.",
    "time_",
    "token_shift_count",
    "vision.",
    "wkv.",
];

/// Values of a key (without its prefix) that have no effect in this model; `None` for an unknown key.
fn neutral_values(key: &str, model: &ModelConfig) -> Option<Neutral> {
    let (scales, has_experts) = (&model.scales, model.experts.count > 0);
    Some(match key {
        "vocab_size" | "tensor_data_layout" | "pooling_type" => Any,
        "expert_gating_func" if has_experts => {
            Number(if model.experts.router == Router::Softmax { 1.0 } else { 2.0 })
        }
        "expert_weights_scale" if has_experts => Number(model.experts.scale),
        "expert_weights_norm" if has_experts => True,
        // One group is none.
        "expert_group_count" | "expert_group_used_count" if has_experts => Number(1.0),
        "expert_shared_count" if has_experts => Off,
        "expert_count" | "nextn_predict_layers" | "n_deepstack_layers" | "deepstack_mapping" => Off,
        "embedding_length_out" => Number(model.dim as f64),
        "embedding_length_per_layer_input" | "features_length" => Off,
        "use_parallel_residual" | "swin_norm" | "rescale_every_n_layers" => Off,
        "swiglu_clamp_exp" | "swiglu_clamp_shexp" => Off,
        "num_loops" => Number(1.0),
        "attn_logit_softcapping" | "final_logit_softcapping" => Off,
        "embedding_scale" => Number(scales.embedding),
        "residual_scale" => Number(scales.residual),
        "logit_scale" => Number(scales.logits),
        "attention.scale" => Number(scales.attention),
        "attention.output_scale" | "attention.value_scale" => Number(1.0),
        "attention.temperature_scale" | "attention.clamp_kqv" | "attention.max_alibi_bias" => Off,
        "attention.causal" | "attention.rope_pattern" => True,
        // The model's own kind of norm reads its key; the other one is ignored.
        "attention.layer_norm_epsilon" | "attention.layer_norm_rms_epsilon" => Any,
        "attention.group_norm_epsilon" | "attention.group_norm_groups" => Any,
        "attention.sliding_window" => Off,
        // Unused without a window.
        "attention.sliding_window_pattern" | "rope.freq_base_swa" => Any,
        "attention.key_length_swa" | "attention.value_length_swa" => Number(model.local_head_dim as f64),
        "rope.dimension_count_swa" => Number(model.rope.local_dim as f64),
        // For images: in a text, all sections have the same position.
        "rope.dimension_sections" if model.arch.is_qwen35() => Any,
        "rope.dimension_sections" | "attention.recurrent_layers" | "attention.shared_kv_layers" => Off,
        "attention.key_length_mla" | "attention.value_length_mla" | "attention.compress_ratios" => Off,
        "rope.scaling.original_context_length" => Any,
        "rope.scaling.yarn_beta_fast" | "rope.scaling.yarn_beta_slow" => Any,
        "rope.scaling.yarn_ext_factor" | "rope.scaling.yarn_log_multiplier" => Off,
        "rope.scaling.attn_factor" | "rope.scaling.yarn_attn_factor" | "rope.scaling.alpha" => Number(1.0),
        // In Granite it switches RoPE on.
        "rope.scaling.finetuned" if model.arch == Arch::Granite => True,
        "rope.scaling.finetuned" => Any,
        key if key.ends_with("_lora_rank") => Off,
        key if WITH_TENSORS.iter().any(|begin| key.starts_with(begin)) => Any,
        _ => return None,
    })
}

/// Converts a number or boolean to f64.
fn to_number(value: &Value) -> Option<f64> {
    match *value {
        Value::Unsigned(n) => Some(n as f64),
        Value::Signed(n) => Some(n as f64),
        Value::Bool(truth) => Some(f64::from(u8::from(truth))),
        _ => value.as_f64(),
    }
}

impl Neutral {
    fn allows(self, value: &Value) -> bool {
        if let Value::Array(array) = value {
            return array.iter().all(|value| self.allows(&value));
        }
        match (self, to_number(value)) {
            (Any, _) => true,
            (Off, Some(x)) => x <= 0.0,
            (Off, None) => value.as_str() == Some(""),
            (Number(neutral), Some(x)) => x == 0.0 || (x / neutral - 1.0).abs() < 1e-5,
            (True, Some(x)) => x == 1.0,
            (Number(_) | True, None) => false,
        }
    }

    fn describe_supported(self) -> String {
        let only = match self {
            Any | Off => "0".into(),
            Number(x) => format!("{x}"),
            True => "true".into(),
        };
        format!("{only}, or no such key: other values change the model's results")
    }
}

/// Describes the supported values if this value, or this unknown key, may change the model's results.
pub(super) fn check_unread_key(key: &str, value: &Value, model: &ModelConfig) -> Option<String> {
    match neutral_values(key, model) {
        Some(neutral) => (!neutral.allows(value)).then(|| neutral.describe_supported()),
        None => Some(
            "no such key: this program does not know it, and it may change the model's results; use a file without it"
                .into(),
        ),
    }
}
