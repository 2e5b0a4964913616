//! Writes a config as the text of a `config.json`, as stored in a file packed from GGUF.

use super::LayerKind;
use super::arch::Arch;
use super::experts::{Experts, Router};
use super::fields::{ConfigError, Fields, positive_float};
use super::rope::{LongRope, RopeScaling, read_divisors};
use super::switches::QkNorm;
use super::{DeltaNetSizes, MambaNorm, MambaSizes, ModelConfig, QueryGrowth, Scales};
use serde_json::{Value, json};

/// The field `rope_scaling`: null unless it is Llama 3's.
fn scaling_json(scaling: &RopeScaling) -> Value {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } = scaling
    else {
        return Value::Null;
    };
    json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_max_position,
    })
}

impl ModelConfig {
    /// Formats an equivalent `config.json`. Fields that `config.json` lacks because they follow from the family are in
    /// the object `antigravity`, which [`ModelConfig::parse`] reads.
    pub fn to_json(&self) -> String {
        let Scales { embedding, attention, residual, logits, .. } = self.scales;
        let mut more = json!({
            "qkv_bias": self.qkv_bias, "o_bias": self.o_bias, "qk_norm": self.qk_norm != QkNorm::None,
            "scales": [embedding, attention, residual, logits],
        });
        if self.layer_kinds.iter().any(|kind| *kind != LayerKind::FullAttention) {
            more["layer_kinds"] = self.layer_kinds.iter().map(|kind| kind.name()).collect();
        }
        if let Some(LongRope { divisors, original_context: beyond }) = self.rope.long {
            more["rope_long"] = json!(divisors);
            more["rope_long_beyond"] = json!(beyond);
        }
        if self.rope.attention_factor != 1.0 {
            more["rope_attention_factor"] = json!(self.rope.attention_factor);
        }
        if self.arch.has_local_rope() && self.rope.local_scaling != RopeScaling::Unscaled {
            let local = self.rope.for_sliding_window();
            let divisor =
                |i: usize| (1.0 / local.scaling.frequency_multiplier(i, local.base_frequency(i))) as f32;
            more["rope_local_divisors"] = json!((0..local.dim / 2).map(divisor).collect::<Vec<_>>());
        }
        if self.arch.has_local_rope() && self.rope.local_attention_factor != 1.0 {
            more["rope_local_attention_factor"] = json!(self.rope.local_attention_factor);
        }
        if let RopeScaling::Divisors(divisors) = &self.rope.scaling {
            more["rope_divisors"] = json!(divisors);
        }
        let mut config = json!({
            "model_type": self.arch.name(), "num_key_value_heads": self.kv_heads, "head_dim": self.local_head_dim,
            "vocab_size": self.vocab, "tie_word_embeddings": self.tie_embeddings, "rope_theta": self.rope.theta,
            "rope_local_base_freq": self.rope.local_theta, "rope_scaling": scaling_json(&self.rope.scaling), "antigravity": more,
        });
        for (field, size) in [
            ("num_hidden_layers", self.layers),
            ("hidden_size", self.dim),
            ("num_attention_heads", self.heads),
            ("intermediate_size", self.ffn_dim),
            ("max_position_embeddings", self.max_position),
        ] {
            config[self.arch.field_name(field)] = json!(size);
        }
        config[self.arch.epsilon_field()] = json!(self.norm_eps);
        self.write_layers(&mut config);
        self.write_experts(&mut config);
        if self.arch == Arch::Phi3 || self.arch.is_qwen35() {
            config["partial_rotary_factor"] = json!(self.rope.dim as f64 / self.head_dim as f64);
        }
        config.sort_all_objects();
        config.to_string()
    }

    /// Writes the fields of windows and of recurrent layers.
    fn write_layers(&self, config: &mut Value) {
        if self.sliding_window > 0 {
            config["sliding_window"] = json!(self.sliding_window);
        }
        let named = [Arch::Lfm3, Arch::Olmo3, Arch::Exaone4, Arch::Gemma4, Arch::GptOss];
        let names = || self.layer_kinds.iter().map(|kind| kind.hf_name()).collect::<Value>();
        if named.contains(&self.arch) || self.arch.is_qwen35() || self.arch.is_lfm2() {
            config["layer_types"] = names();
        }
        self.write_mamba(config, names);
        if self.arch == Arch::Gemma4 {
            config["global_head_dim"] = json!(self.head_dim);
            config["num_kv_shared_layers"] = json!(self.shared_kv_layers);
            config["use_double_wide_mlp"] = json!(self.shared_ffn_dim != self.ffn_dim);
            config["hidden_size_per_layer_input"] = json!(self.per_layer_dim);
            config["final_logit_softcapping"] = json!(Some(self.logit_softcap).filter(|cap| *cap > 0.0));
        }
        if self.values_are_keys {
            config["num_global_key_value_heads"] = json!(self.global_kv_heads);
            config["attention_k_eq_v"] = json!(true);
        }
        if self.arch == Arch::Lfm2 {
            config["block_auto_adjust_ff_dim"] = json!(false);
        }
        if self.conv_taps > 0 {
            config["conv_L_cache"] = json!(self.conv_taps);
            config["linear_conv_kernel_dim"] = json!(self.conv_taps);
        }
        if self.delta_net.value_heads > 0 {
            let DeltaNetSizes { key_heads, value_heads, key_dim, value_dim } = self.delta_net;
            config["linear_num_key_heads"] = json!(key_heads);
            config["linear_num_value_heads"] = json!(value_heads);
            config["linear_key_head_dim"] = json!(key_dim);
            config["linear_value_head_dim"] = json!(value_dim);
        }
        if let Some(QueryGrowth { beta, original_context }) = self.query_growth {
            config["antigravity"]["query_growth"] = json!([beta, original_context]);
        }
    }

    /// Writes the fields of families with Mamba2.
    fn write_mamba(&self, config: &mut Value, layer_names: impl Fn() -> Value) {
        match self.arch {
            Arch::GraniteMoeHybrid => {
                config["layer_types"] = layer_names();
                config["num_local_experts"] = json!(self.experts.count);
                let has_rope = self.layer_kinds.contains(&LayerKind::FullAttention);
                config["position_embedding_type"] = json!(if has_rope { "rope" } else { "nope" });
            }
            Arch::NemotronH => config["layers_block_type"] = layer_names(),
            Arch::FalconH1 => {
                let Scales { attention_out, mlp, ssm_in, ssm_out, .. } = self.scales;
                config["attention_out_multiplier"] = json!(attention_out);
                config["mlp_multipliers"] = json!(mlp);
                config["ssm_multipliers"] = json!(ssm_in);
                config["ssm_out_multiplier"] = json!(ssm_out);
                config["mamba_rms_norm"] = json!(self.mamba.norm != MambaNorm::None);
                config["mamba_norm_before_gate"] = json!(self.mamba.norm == MambaNorm::BeforeGate);
            }
            _ => return,
        }
        let MambaSizes { heads, head_dim, state, groups, conv_bias, .. } = self.mamba;
        if heads > 0 {
            for (field, size) in [
                ("mamba_n_heads", heads),
                ("mamba_d_head", head_dim),
                ("mamba_d_state", state),
                ("mamba_n_groups", groups),
                ("mamba_d_conv", self.conv_taps),
                ("mamba_d_ssm", heads * head_dim),
            ] {
                config[self.arch.field_name(field)] = json!(size);
            }
            config[self.arch.field_name("mamba_conv_bias")] = json!(conv_bias);
        }
    }

    /// Writes the fields of experts.
    fn write_experts(&self, config: &mut Value) {
        let Experts { count, used, dim, shared_dim, own_norms, router, renormalised, scale, limit } =
            self.experts;
        if count == 0 {
            return;
        }
        let dense: Vec<usize> = (0..self.layers).filter(|layer| !self.expert_layers[*layer]).collect();
        config[self.arch.field_name("num_experts")] = json!(count);
        config[self.arch.field_name("num_experts_per_tok")] = json!(used);
        config[self.arch.field_name("moe_intermediate_size")] = json!(dim);
        config["norm_topk_prob"] = json!(renormalised);
        if own_norms {
            config["enable_moe_block"] = json!(true);
            config["intermediate_size"] = json!(shared_dim);
        } else if shared_dim > 0 {
            config[self.arch.field_name("shared_expert_intermediate_size")] = json!(shared_dim);
        }
        if limit > 0.0 {
            config["swiglu_limit"] = json!(limit);
        }
        if self.arch == Arch::Lfm2Moe {
            config["num_dense_layers"] = json!(dense.len());
            config["use_expert_bias"] = json!(router == Router::BiasedSigmoid);
            config["routed_scaling_factor"] = json!(scale);
        } else {
            config["mlp_only_layers"] = json!(dense);
        }
    }

    /// Reads the object `antigravity`; see [`ModelConfig::to_json`].
    pub(super) fn apply_overrides(&mut self, more: &Fields<'_>) -> Result<(), ConfigError> {
        self.qkv_bias = more.read_bool("qkv_bias", self.qkv_bias)?;
        self.o_bias = more.read_bool("o_bias", self.o_bias)?;
        let normed = more.read_bool("qk_norm", self.qk_norm != QkNorm::None)?;
        self.qk_norm = match self.qk_norm {
            _ if !normed => QkNorm::None,
            QkNorm::None => QkNorm::PerHead,
            kind => kind,
        };
        let pairs = self.rope.dim / 2;
        if more.get("rope_divisors").is_some() {
            self.rope.scaling = RopeScaling::from_divisors(read_divisors(more, "rope_divisors", pairs)?);
        }
        if more.get("rope_long").is_some() {
            let beyond = more.read_size("rope_long_beyond", None, 1 << 30)?;
            self.rope.long = Some(LongRope {
                divisors: read_divisors(more, "rope_long", pairs)?.leak(),
                original_context: beyond,
            });
        }
        self.rope.attention_factor =
            more.read_float("rope_attention_factor", Some(self.rope.attention_factor))?;
        self.rope = self.rope.shared_by_layers_of(self.arch);
        if more.get("rope_local_divisors").is_some() {
            self.rope.local_scaling =
                RopeScaling::from_divisors(read_divisors(more, "rope_local_divisors", pairs)?);
        }
        let local = Some(self.rope.local_attention_factor);
        self.rope.local_attention_factor = more.read_float("rope_local_attention_factor", local)?;
        if more.get("layer_kinds").is_some() {
            let kind = |kind: &Value| kind.as_str().and_then(LayerKind::from_name);
            self.layer_kinds = more.read_array("layer_kinds", self.layers, kind, "a kind for every layer")?;
        }
        if more.get("query_growth").is_some() {
            let growth = more.read_array("query_growth", 2, positive_float, "two positive numbers")?;
            self.query_growth = Some(QueryGrowth { beta: growth[0], original_context: growth[1] as usize });
        }
        if more.get("scales").is_some() {
            let scales = more.read_array("scales", 4, positive_float, "four positive numbers")?;
            let &[embedding, attention, residual, logits] = &scales[..] else { unreachable!("four numbers") };
            self.scales = Scales { embedding, attention, residual, logits, ..self.scales };
        }
        Ok(())
    }
}
