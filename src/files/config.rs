//! A model's `config.json`, reduced to the fields that the forward pass needs.
//!
//! Field names and defaults are those of the Hugging Face classes, such as `LlamaConfig`. Both the older spelling
//! (`rope_theta`, `rope_scaling`) and the newer one (`rope_parameters`) are read. A model family is a set of switches
//! ([`Family`]); the forward pass reads only the switches.

mod arch;
mod assistant;
mod checkpoint_names;
mod experts;
mod families;
mod fields;
mod layer_kinds;
mod quantization;
mod rope;
mod sizes;
mod switches;
mod written;

pub use arch::Arch;
pub use assistant::AssistantConfig;
pub use experts::{Experts, Router};
pub use families::Family;
pub use fields::ConfigError;
pub(crate) use fields::Fields;
pub use layer_kinds::LayerKind;
pub use quantization::QuantMethod;
pub use rope::{LongRope, Rope, RopeScaling, yarn_attention_factor};
pub use switches::{AttentionGate, MambaNorm, Mlp, Norm, QkNorm};

use crate::text_file::{parse_config_json, strip_bom};
use serde_json::{Map, Value};
use sizes::*;

/// Dimensions and variant switches of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub arch: Arch,
    pub layers: usize,
    pub dim: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// KV heads of full-attention layers, where they are fewer: a divisor of `kv_heads`.
    pub global_kv_heads: usize,
    /// Full-attention layers have no projection of values: theirs are the projected keys, without RoPE.
    pub values_are_keys: bool,
    /// Width of a head; of the widest ones if layers differ.
    pub head_dim: usize,
    /// Width of a head of sliding-window layers.
    pub local_head_dim: usize,
    pub ffn_dim: usize,
    pub vocab: usize,
    pub max_position: usize,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub qk_norm: QkNorm,
    pub attention_gate: AttentionGate,
    /// Each head has a logit that takes part in the softmax, and whose share is dropped.
    pub attention_sinks: bool,
    pub tie_embeddings: bool,
    pub norm: Norm,
    /// The inputs of mixer and feed-forward are normed.
    pub pre_norms: bool,
    /// The outputs of mixer and feed-forward are normed before they are added to the residual.
    pub post_norms: bool,
    pub mlp: Mlp,
    pub norm_eps: f64,
    pub rope: Rope,
    /// One per layer.
    pub layer_kinds: Vec<LayerKind>,
    /// Tokens in the window of a sliding-window layer; 0 if there is no such layer.
    pub sliding_window: usize,
    pub scales: Scales,
    /// Growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Taps of the causal convolutions; 0 if no layer has one.
    pub conv_taps: usize,
    /// Sizes of gated delta nets; zeros if no layer is one.
    pub delta_net: DeltaNetSizes,
    /// Sizes of Mamba2; zeros if no layer has it.
    pub mamba: MambaSizes,
    /// The last layers, this many, read keys and values of the last earlier layer of their kind.
    pub shared_kv_layers: usize,
    /// Width of the feed-forward of those layers.
    pub shared_ffn_dim: usize,
    pub experts: Experts,
    /// Layers with experts, one entry for each layer.
    pub expert_layers: Vec<bool>,
    /// Width of the embedding that each layer has of a token; 0 without.
    pub per_layer_dim: usize,
    /// Values are normed, without weights.
    pub value_norm: bool,
    /// Each layer multiplies the residual with a factor of its own.
    pub layer_scalars: bool,
    /// Logits are `cap * tanh(logits / cap)`; 0 without.
    pub logit_softcap: f64,
}

/// Queries at position `p` are multiplied with `1 + beta * ln(1 + floor(p / original_context))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    pub beta: f64,
    /// The context that the model was trained for before it was extended, in tokens.
    pub original_context: usize,
}

/// Sizes of a gated delta net. A group of consecutive value heads shares a key head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeltaNetSizes {
    pub key_heads: usize,
    pub value_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

/// Sizes of Mamba2. A group of consecutive heads shares `B` and `C`, by which the state is written and read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MambaSizes {
    pub heads: usize,
    pub head_dim: usize,
    /// Rows of the state of a head.
    pub state: usize,
    pub groups: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    pub norm: MambaNorm,
}

/// Constant factors of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scales {
    /// Factor of embedding rows.
    pub embedding: f64,
    /// Factor of the dot products of queries and keys.
    pub attention: f64,
    /// Factor of the values that are added to the residual.
    pub residual: f64,
    /// Factor of logits.
    pub logits: f64,
    /// Factor of attention's output, besides `residual`, like the next ones.
    pub attention_out: f64,
    /// Factors of the feed-forward's gate and of its output.
    pub mlp: [f64; 2],
    /// Factors of what Mamba2 reads: its gate, `x`, `B`, `C` and the time steps.
    pub ssm_in: [f64; 5],
    /// Factor of its output.
    pub ssm_out: f64,
}

impl Scales {
    /// Without any factors.
    const NONE: Self = Self {
        embedding: 1.0,
        attention: 1.0,
        residual: 1.0,
        logits: 1.0,
        attention_out: 1.0,
        mlp: [1.0; 2],
        ssm_in: [1.0; 5],
        ssm_out: 1.0,
    };
}

/// Upper limits, far above any real model of these families. They keep every product of two dimensions far from
/// overflow, and rows small enough for a thread's stack.
const MAX_LAYERS: usize = 1024;
const MAX_DIM: usize = 1 << 16;
const MAX_VOCAB: usize = 1 << 24;
const MAX_HEAD_DIM: usize = 1024;
const MAX_TAPS: usize = 64;

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// A field is missing, wrong or not supported.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        Self::from_map(&parse_object(json)?)
    }

    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    ///
    /// See [`ModelConfig::parse`].
    pub fn from_map(map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let f = Fields(map);
        let named = f.get("model_type").and_then(Value::as_str).filter(|name| !name.is_empty());
        if let (Some(Value::Object(text)), Some(arch)) = (
            f.get("text_config"),
            Arch::ALL.into_iter().find(|arch| named.is_some_and(|name| name == arch.family().wrapper)),
        ) {
            // A multimodal model: only its text part is used.
            let mut text = text.clone();
            if arch == Arch::Gemma3 || !text.contains_key("model_type") {
                text.insert("model_type".into(), arch.name().into());
            }
            for field in ["tie_word_embeddings", quantization::FIELD] {
                if let Some(outer) = f.get(field) {
                    text.entry(field).or_insert(outer.clone());
                }
            }
            return Self::from_map(&text);
        }
        let Some(arch) = Arch::ALL.into_iter().find(|arch| named == Some(arch.name())) else {
            return f.unsupported("model_type", &Arch::list_names(Arch::name));
        };
        let mut model = Self::read_family(&f, arch)?;
        match f.get("antigravity").map(Value::as_object) {
            None => {}
            Some(Some(more)) => model.apply_overrides(&Fields(more))?,
            Some(None) => return f.unsupported("antigravity", "an object"),
        }
        Ok(model)
    }

    /// Reads the fields of one family, with its defaults.
    fn read_family(f: &Fields<'_>, arch: Arch) -> Result<Self, ConfigError> {
        check_supported(f, arch)?;
        // Configs of the larger Gemma 3 models omit fields that have the default value.
        let gemma = |default: usize| (arch == Arch::Gemma3).then_some(default);
        let family = arch.family();
        let dim = f.read_size(arch.field_name("hidden_size"), gemma(2304), MAX_DIM)?;
        let (heads, kv_heads) = read_heads(f, arch)?;
        let values_are_keys = f.read_bool("attention_k_eq_v", false)?;
        let local_head_dim = read_head_dim(f, family.head_dim, dim, heads)?;
        let head_dim = read_widest_head_dim(f, arch, local_head_dim)?;
        let layers = layer_kinds::read_layer_count(f, arch)?;
        let bias = arch == Arch::Gpt2 || f.read_bool("attention_bias", family.attention_bias)?;
        let layer_kinds = layer_kinds::read_layer_kinds(f, arch, layers)?;
        let rope = rope::read_rope(f, arch, (head_dim, local_head_dim))?;
        let (experts, expert_layers) = experts::read_experts(f, arch, (layers, dim))?;
        let ffn_dim = if expert_layers.contains(&false) { read_ffn_dim(f, arch, dim)? } else { experts.dim };
        let shared_kv_layers = read_shared_kv_layers(f, arch, &layer_kinds)?;
        Ok(Self {
            arch,
            layers,
            dim,
            heads,
            kv_heads,
            global_kv_heads: if values_are_keys { read_global_kv_heads(f, kv_heads)? } else { kv_heads },
            values_are_keys,
            head_dim,
            local_head_dim,
            ffn_dim,
            vocab: f.read_size("vocab_size", gemma(262_208), MAX_VOCAB)?,
            max_position: read_max_position(f, arch)?,
            qkv_bias: arch == Arch::Qwen2 || bias,
            o_bias: arch != Arch::Qwen2 && bias,
            qk_norm: if f.read_bool("use_qk_norm", true)? { family.qk_norm } else { QkNorm::None },
            attention_gate: family.attention_gate,
            attention_sinks: family.attention_sinks,
            tie_embeddings: f.read_bool("tie_word_embeddings", family.ties_embeddings)?,
            norm: family.norm,
            pre_norms: family.pre_norms,
            post_norms: family.post_norms,
            mlp: family.mlp,
            norm_eps: f.read_float(arch.epsilon_field(), Some(family.norm_eps))?,
            rope,
            query_growth: rope::read_query_growth(f)?,
            conv_taps: read_conv_taps(f, arch, &layer_kinds)?,
            delta_net: read_delta_net(f, &layer_kinds)?,
            mamba: read_mamba(f, arch, dim, &layer_kinds)?,
            sliding_window: layer_kinds::read_window(f, &layer_kinds)?,
            layer_kinds,
            scales: read_scales(f, arch, (dim, head_dim))?,
            shared_kv_layers,
            shared_ffn_dim: read_shared_ffn_dim(f, shared_kv_layers, ffn_dim)?,
            experts,
            expert_layers,
            per_layer_dim: read_per_layer_dim(f, arch, layers)?,
            value_norm: family.value_norm,
            layer_scalars: family.layer_scalars,
            logit_softcap: read_softcap(f)?,
        })
    }

    /// Finds the first field in which `found` differs from `self`: its name, the value here, the value there.
    pub fn find_difference(&self, found: &Self) -> Option<(&'static str, String, String)> {
        let local_theta = |m: &Self| (m.sliding_window > 0).then_some(m.rope.local_theta as f32);
        let fields = |m: &Self| {
            [
                ("model_type", m.arch.compatible_name().into()),
                ("num_hidden_layers", m.layers.to_string()),
                ("hidden_size", m.dim.to_string()),
                ("num_attention_heads", m.heads.to_string()),
                ("num_key_value_heads", m.kv_heads.to_string()),
                ("num_global_key_value_heads", m.global_kv_heads.to_string()),
                ("attention_k_eq_v", m.values_are_keys.to_string()),
                ("head_dim", m.local_head_dim.to_string()),
                ("global_head_dim", m.head_dim.to_string()),
                ("intermediate_size", m.ffn_dim.to_string()),
                ("use_double_wide_mlp", m.shared_ffn_dim.to_string()),
                ("num_experts", format!("{:?}", m.experts)),
                ("mlp_only_layers", format!("{:?}", m.expert_layers)),
                ("num_kv_shared_layers", m.shared_kv_layers.to_string()),
                ("hidden_size_per_layer_input", m.per_layer_dim.to_string()),
                ("final_logit_softcapping", format!("{:?}", m.logit_softcap as f32)),
                ("vocab_size", m.vocab.to_string()),
                ("attention_bias", m.qkv_bias.to_string()),
                ("attention_bias", m.o_bias.to_string()),
                ("use_qk_norm", format!("{:?}", m.qk_norm)),
                ("tie_word_embeddings", m.tie_embeddings.to_string()),
                ("norm", format!("{:?}", m.norm)),
                ("hidden_act", format!("{:?}", m.mlp)),
                (m.arch.epsilon_field(), format!("{:?}", m.norm_eps)),
                ("rope_theta", format!("{:?}", m.rope.theta as f32)),
                ("partial_rotary_factor", m.rope.dim.to_string()),
                ("layer_types", format!("{:?}", m.layer_kinds)),
                ("sliding_window", m.sliding_window.to_string()),
                ("conv_L_cache", m.conv_taps.to_string()),
                ("linear_num_value_heads", format!("{:?}", m.delta_net)),
                (m.arch.field_name("mamba_n_heads"), format!("{:?}", m.mamba)),
                ("attention_out_multiplier", format!("{:?}", m.scales.attention_out as f32)),
                ("mlp_multipliers", format!("{:?}", m.scales.mlp.map(|x| x as f32))),
                ("ssm_multipliers", format!("{:?}", m.scales.ssm_in.map(|x| x as f32))),
                (
                    "llama_4_scaling_beta",
                    format!("{:?}", m.query_growth.map(|g| (g.beta as f32, g.original_context))),
                ),
                ("rope_local_base_freq", format!("{:?}", local_theta(m))),
                ("embedding_multiplier", format!("{:?}", m.scales.embedding as f32)),
                ("attention_multiplier", format!("{:?}", m.scales.attention as f32)),
                ("residual_multiplier", format!("{:?}", m.scales.residual as f32)),
                ("logits_scaling", format!("{:?}", m.scales.logits as f32)),
                // With RoPE the number of positions is only a limit.
                ("n_positions", if m.rope.dim == 0 { m.max_position.to_string() } else { String::new() }),
            ]
        };
        let mut pairs = fields(self).into_iter().zip(fields(found));
        if let Some(((name, here), (_, there))) = pairs.find(|(here, there)| here != there) {
            return Some((name, here, there));
        }
        self.find_rope_difference(found)
    }

    fn find_rope_difference(&self, found: &Self) -> Option<(&'static str, String, String)> {
        let shown = |rope: &Rope| match *rope {
            Rope { scaling, long: None, attention_factor: 1.0, .. } => format!("{scaling:?}"),
            Rope { scaling, long, attention_factor, .. } => {
                format!("{scaling:?}, {long:?}, {attention_factor:?}")
            }
        };
        let differ = |name, here: &Rope, there: &Rope| {
            (!here.scales_like(there)).then(|| (name, shown(here), shown(there)))
        };
        differ("rope_scaling", &self.rope, &found.rope).or_else(|| {
            let local = differ(
                "rope_parameters.sliding_attention",
                &self.rope.for_sliding_window(),
                &found.rope.for_sliding_window(),
            );
            local.filter(|_| self.sliding_window > 0)
        })
    }
}

/// Parses the text of a `config.json`, which must be an object.
fn parse_object(json: &str) -> Result<Map<String, Value>, ConfigError> {
    let not = |value: String| ConfigError::new("(whole file)", value, "a Hugging Face config.json");
    match parse_config_json(strip_bom(json).as_bytes()) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(not("not a JSON object".into())),
        Err(e) => Err(not(format!("not JSON ({e})"))),
    }
}

/// Rejects configs whose features are not implemented.
fn check_supported(f: &Fields<'_>, arch: Arch) -> Result<(), ConfigError> {
    let activations = arch.family().activations;
    for field in ["hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"] {
        if !f.get(field).is_none_or(|act| act.as_str().is_some_and(|act| activations.contains(&act))) {
            return f.unsupported(field, &format!("{:?}", activations[0]));
        }
    }
    // Optional features that are not implemented.
    let mut off = vec![
        "mlp_bias",
        "use_sliding_window",
        "lm_head_bias",
        "add_cross_attention",
        "use_bidirectional_attention",
        "use_bias",
        "conv_bias",
        "mamba_proj_bias",
        "projectors_bias",
    ];
    // Its multipliers are not those of biases.
    off.extend(["attention_bias"].iter().filter(|_| arch == Arch::FalconH1));
    if arch != Arch::Gemma4 {
        off.extend(["enable_moe_block", "attention_k_eq_v"]);
    }
    if arch.family().attention_gate != AttentionGate::None {
        for field in ["attn_output_gate", "use_attention_gate", "use_sandwich_norm"] {
            if !f.read_bool(field, true)? {
                return f.unsupported(field, "true");
            }
        }
    }
    off.extend(
        ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"].iter().filter(|_| arch == Arch::Gpt2),
    );
    for field in off {
        if f.read_bool(field, false)? {
            return f.unsupported(field, "false");
        }
    }
    for field in ["attn_logit_softcapping", "final_logit_softcapping"] {
        let is_read = arch == Arch::Gemma4 && field == "final_logit_softcapping";
        if f.get(field).is_some() && !is_read {
            return f.unsupported(field, "null");
        }
    }
    if arch == Arch::Gpt2 && !f.read_bool("scale_attn_weights", true)? {
        return f.unsupported("scale_attn_weights", "true");
    }
    let window = f.get("sliding_window").filter(|_| arch == Arch::Phi3).and_then(Value::as_u64);
    let positions = f.get("max_position_embeddings").and_then(Value::as_u64).unwrap_or(2048);
    if window.is_some_and(|window| window < positions) {
        return f.unsupported(
            "sliding_window",
            &format!("null, or at least max_position_embeddings ({positions})"),
        );
    }
    QuantMethod::read(f).map(|_| ())
}

#[cfg(test)]
mod tests;
