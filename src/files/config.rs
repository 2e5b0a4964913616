//! A model's `config.json`, reduced to what the forward pass needs.
//!
//! Field names and defaults are those of the Hugging Face classes `LlamaConfig`, `Qwen2Config` and `Qwen3Config`. Both
//! the older spelling (`rope_theta`, `rope_scaling`) and the newer one (`rope_parameters`) are read.

mod fields;
mod rope;

pub use fields::ConfigError;
pub use rope::RopeScaling;

use fields::Fields;
use serde_json::{Map, Value, json};

/// The model families that this program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    Qwen2,
    Qwen3,
}

impl Arch {
    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
        }
    }
}

/// Dimensions and variant switches of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub arch: Arch,
    pub layers: usize,
    pub dim: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn_dim: usize,
    pub vocab: usize,
    pub max_position: usize,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub qk_norm: bool,
    pub tied: bool,
    pub rms_eps: f64,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
}

/// Upper limits, far above any real model of these families. They keep every product of two dimensions far from
/// overflow, and rows small enough for a thread's stack.
const MAX_LAYERS: usize = 1024;
const MAX_DIM: usize = 1 << 16;
const MAX_VOCAB: usize = 1 << 24;
const MAX_HEAD_DIM: usize = 1024;

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// The field that is missing, wrong or not supported.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        let not = |value: String| ConfigError::new("(whole file)", value, "a Hugging Face config.json");
        match serde_json::from_str(json) {
            Ok(Value::Object(map)) => Self::from_map(&map),
            Ok(_) => Err(not("not a JSON object".into())),
            Err(e) => Err(not(format!("not JSON ({e})"))),
        }
    }

    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    ///
    /// As for [`ModelConfig::parse`].
    pub fn from_map(map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let f = Fields(map);
        let arch = match f.present("model_type").and_then(Value::as_str) {
            Some("llama") => Arch::Llama,
            Some("qwen2") => Arch::Qwen2,
            Some("qwen3") => Arch::Qwen3,
            _ => return f.err("model_type", "\"llama\", \"qwen2\", \"qwen3\""),
        };
        check_supported(&f)?;
        let dim = f.size("hidden_size", None, MAX_DIM)?;
        let heads = f.size("num_attention_heads", None, MAX_DIM)?;
        let kv_default = if arch == Arch::Llama { heads } else { 32 };
        let kv_heads = f.size("num_key_value_heads", Some(kv_default), MAX_DIM)?;
        if !heads.is_multiple_of(kv_heads) {
            return f.err("num_key_value_heads", &format!("a divisor of num_attention_heads ({heads})"));
        }
        let head_dim = head_dim(&f, arch, dim, heads)?;
        let bias = f.flag("attention_bias", false)?;
        let (rope_theta, rope_scaling) = rope::parse(&f)?;
        let mut model = Self {
            arch,
            layers: f.size("num_hidden_layers", None, MAX_LAYERS)?,
            dim,
            heads,
            kv_heads,
            head_dim,
            ffn_dim: f.size("intermediate_size", None, MAX_DIM)?,
            vocab: f.size("vocab_size", None, MAX_VOCAB)?,
            max_position: f.size("max_position_embeddings", Some(2048), 1 << 30)?,
            qkv_bias: arch == Arch::Qwen2 || bias,
            o_bias: arch != Arch::Qwen2 && bias,
            qk_norm: arch == Arch::Qwen3,
            tied: f.flag("tie_word_embeddings", false)?,
            rms_eps: f.float("rms_norm_eps", Some(1e-6))?,
            rope_theta,
            rope_scaling,
        };
        match f.present("antigravity").map(Value::as_object) {
            None => {}
            Some(Some(more)) => model.add(&Fields(more))?,
            Some(None) => return f.err("antigravity", "an object"),
        }
        Ok(model)
    }

    /// The first field in which `found` differs from `self`: its name, this value, the other value.
    pub fn difference(&self, found: &Self) -> Option<(&'static str, String, String)> {
        let fields = |m: &Self| {
            [
                ("model_type", format!("{:?}", m.arch)),
                ("num_hidden_layers", m.layers.to_string()),
                ("hidden_size", m.dim.to_string()),
                ("num_attention_heads", m.heads.to_string()),
                ("num_key_value_heads", m.kv_heads.to_string()),
                ("head_dim", m.head_dim.to_string()),
                ("intermediate_size", m.ffn_dim.to_string()),
                ("vocab_size", m.vocab.to_string()),
                ("attention_bias", m.qkv_bias.to_string()),
                ("attention_bias", m.o_bias.to_string()),
                ("use_qk_norm", m.qk_norm.to_string()),
                ("tie_word_embeddings", m.tied.to_string()),
                ("rms_norm_eps", format!("{:?}", m.rms_eps)),
                ("rope_theta", format!("{:?}", m.rope_theta)),
            ]
        };
        let mut pairs = fields(self).into_iter().zip(fields(found));
        if let Some(((name, here), (_, there))) = pairs.find(|(here, there)| here != there) {
            return Some((name, here, there));
        }
        let (here, there) = (self.rope_scaling, found.rope_scaling);
        let table = |scaling| matches!(scaling, RopeScaling::Divisors(_));
        let same = here == there || (table(here) || table(there)) && self.scales_like(found);
        (!same).then(|| ("rope_scaling", format!("{here:?}"), format!("{there:?}")))
    }

    /// Whether all pairs are scaled alike, to the accuracy of a GGUF file's f32 divisors.
    fn scales_like(&self, other: &Self) -> bool {
        (0..self.head_dim / 2).all(|i| {
            let frequency = self.frequency(i);
            let multiplier = |m: &Self| m.rope_scaling.multiplier(i, frequency);
            (multiplier(self) / multiplier(other) - 1.0).abs() < 1e-5
        })
    }

    /// The unscaled frequency of pair `i`, in radians per position.
    pub fn frequency(&self, i: usize) -> f64 {
        self.rope_theta.powf(-2.0 * i as f64 / self.head_dim as f64)
    }

    /// The text of an equivalent `config.json`. Fields that such a file does not have, because they follow from the
    /// family, are in the object `antigravity`, which [`ModelConfig::parse`] reads.
    pub fn to_json(&self) -> String {
        let mut more = json!({"qkv_bias": self.qkv_bias, "o_bias": self.o_bias, "qk_norm": self.qk_norm});
        let mut rope = Value::Null;
        match self.rope_scaling {
            RopeScaling::Plain => {}
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                rope = json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_max_position,
                });
            }
            RopeScaling::Divisors(divisors) => more["rope_divisors"] = json!(divisors),
        }
        let config = json!({
            "model_type": self.arch.name(), "num_hidden_layers": self.layers, "hidden_size": self.dim,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim, "vocab_size": self.vocab,
            "max_position_embeddings": self.max_position, "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.rms_eps, "rope_theta": self.rope_theta, "rope_scaling": rope,
            "antigravity": more,
        });
        config.to_string()
    }

    /// Reads the object `antigravity`; see [`ModelConfig::to_json`].
    fn add(&mut self, more: &Fields<'_>) -> Result<(), ConfigError> {
        self.qkv_bias = more.flag("qkv_bias", self.qkv_bias)?;
        self.o_bias = more.flag("o_bias", self.o_bias)?;
        self.qk_norm = more.flag("qk_norm", self.qk_norm)?;
        if let Some(found) = more.present("rope_divisors") {
            let usable = |x: &Value| x.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
            let divisors: Option<Vec<f32>> = found.as_array().and_then(|a| a.iter().map(usable).collect());
            match divisors.filter(|d| d.len() == self.head_dim / 2) {
                Some(divisors) => self.rope_scaling = RopeScaling::divisors(divisors),
                None => return more.err("rope_divisors", "a positive number for each pair of a head"),
            }
        }
        Ok(())
    }
}

/// Refuses what would be computed wrongly.
fn check_supported(f: &Fields<'_>) -> Result<(), ConfigError> {
    if !f.present("hidden_act").is_none_or(|act| matches!(act.as_str(), Some("silu" | "swish"))) {
        return f.err("hidden_act", "\"silu\"");
    }
    for field in ["mlp_bias", "use_sliding_window"] {
        if f.flag(field, false)? {
            return f.err(field, "false");
        }
    }
    let full = |layer: &Value| layer.as_str() == Some("full_attention");
    if !f.present("layer_types").is_none_or(|l| l.as_array().is_some_and(|l| l.iter().all(full))) {
        return f.err("layer_types", "\"full_attention\" for every layer");
    }
    if f.present("quantization_config").is_some() {
        return f.err("quantization_config", "unquantised BF16, F16 or F32 checkpoints");
    }
    Ok(())
}

fn head_dim(f: &Fields<'_>, arch: Arch, dim: usize, heads: usize) -> Result<usize, ConfigError> {
    let head_dim = if f.present("head_dim").is_some() {
        f.size("head_dim", None, MAX_HEAD_DIM)?
    } else if arch == Arch::Qwen3 {
        128
    } else if dim.is_multiple_of(heads) {
        dim / heads
    } else {
        let supported = format!("a divisor of hidden_size ({dim}), or an explicit head_dim");
        return f.err("num_attention_heads", &supported);
    };
    if head_dim % 2 != 0 || head_dim > MAX_HEAD_DIM {
        return f.err("head_dim", &format!("an even number up to {MAX_HEAD_DIM}"));
    }
    if heads * head_dim > MAX_DIM {
        return f.err("num_attention_heads", &format!("heads x head_dim up to {MAX_DIM}"));
    }
    Ok(head_dim)
}

#[cfg(test)]
mod tests;
