//! What a model's `config.json` says, reduced to what the forward pass needs.
//!
//! This file is compiled twice: into the library, which compares a model found at run time with the
//! baked one, and into `build.rs`, which bakes it. So it imports nothing of the crate.
//!
//! Field names and defaults are those of the Hugging Face `LlamaConfig`, `Qwen2Config` and
//! `Qwen3Config` classes; both the older spelling (`rope_theta`, `rope_scaling`) and the newer
//! (`rope_parameters`) are read.

use serde_json::{Map, Value, json};

/// One unusable field, as a line a person can act on.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigError {
    /// The field's name in `config.json`.
    pub field: String,
    /// What it holds, as JSON.
    pub value: String,
    /// What would be accepted.
    pub supported: String,
}

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "field `{}` is {}; supported: {}", self.field, self.value, self.supported)
    }
}

/// The model families this engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    Qwen2,
    Qwen3,
}

impl Arch {
    /// The `model_type` of `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
        }
    }
}

/// How RoPE frequencies are changed for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    Plain,
    /// Llama 3.1's piecewise scaling (`rope_type: "llama3"`).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: usize,
    },
    /// Every pair's frequency is divided by its own number, as GGUF files have it. `head_dim / 2` of them.
    Divisors(&'static [f32]),
}

impl RopeScaling {
    fn is_table(self) -> bool {
        matches!(self, RopeScaling::Divisors(_))
    }

    /// What the `frequency` (radians per position) of pair `i` is multiplied with.
    ///
    /// Llama 3.1: wavelengths up to `original / high` stay, those beyond `original / low` are stretched by `factor`,
    /// those between are blended.
    pub fn multiplier(self, i: usize, frequency: f64) -> f64 {
        match self {
            RopeScaling::Plain => 1.0,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let turns = original_max_position as f64 * frequency / std::f64::consts::TAU;
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                (1.0 - smooth) / factor + smooth
            }
            RopeScaling::Divisors(divisors) => 1.0 / f64::from(divisors[i]),
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

/// Upper limits that no real model of these families comes near; they keep every product of two
/// dimensions far from overflow and rows small enough for a thread's stack.
const MAX_LAYERS: usize = 1024;
const MAX_DIM: usize = 1 << 16;
const MAX_VOCAB: usize = 1 << 24;

struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn present(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn err<T>(&self, field: &str, supported: &str) -> Result<T, ConfigError> {
        let value = self.0.get(field).map_or("missing".to_string(), |v| {
            let mut text = v.to_string();
            if text.len() > 120 {
                let cut = (0..=120).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
                text.truncate(cut);
                text.push('…');
            }
            text
        });
        Err(ConfigError { field: field.into(), value, supported: supported.into() })
    }

    fn size(&self, field: &str, default: Option<usize>, max: usize) -> Result<usize, ConfigError> {
        match (self.present(field), default) {
            (None, Some(d)) => Ok(d),
            (Some(v), _) => match v.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) if (1..=max).contains(&n) => Ok(n),
                _ => self.err(field, &format!("an integer from 1 to {max}")),
            },
            (None, None) => self.err(field, &format!("an integer from 1 to {max}")),
        }
    }

    fn float(&self, field: &str, default: Option<f64>) -> Result<f64, ConfigError> {
        match (self.present(field).and_then(Value::as_f64), default) {
            (Some(x), _) if x.is_finite() && x > 0.0 && (x as f32).is_finite() && x as f32 > 0.0 => Ok(x),
            (None, Some(d)) if self.present(field).is_none() => Ok(d),
            _ => self.err(field, "a positive number"),
        }
    }

    fn flag(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.present(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => self.err(field, "true or false"),
        }
    }
}

impl ModelConfig {
    /// Reads the text of a `config.json`.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        let root: Value = serde_json::from_str(json).map_err(|e| ConfigError {
            field: "(whole file)".into(),
            value: format!("not JSON ({e})"),
            supported: "a Hugging Face config.json".into(),
        })?;
        let Value::Object(map) = &root else {
            return Err(ConfigError {
                field: "(whole file)".into(),
                value: "not a JSON object".into(),
                supported: "a Hugging Face config.json".into(),
            });
        };
        Self::from_map(map)
    }

    /// Reads the fields of a `config.json`.
    pub fn from_map(map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let f = Fields(map);
        let arch = match f.present("model_type").and_then(Value::as_str) {
            Some("llama") => Arch::Llama,
            Some("qwen2") => Arch::Qwen2,
            Some("qwen3") => Arch::Qwen3,
            _ => return f.err("model_type", "\"llama\", \"qwen2\", \"qwen3\""),
        };
        match f.present("hidden_act").map(Value::as_str) {
            None | Some(Some("silu" | "swish")) => {}
            Some(_) => return f.err("hidden_act", "\"silu\""),
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

        let dim = f.size("hidden_size", None, MAX_DIM)?;
        let heads = f.size("num_attention_heads", None, MAX_DIM)?;
        let kv_default = if arch == Arch::Llama { heads } else { 32 };
        let kv_heads = f.size("num_key_value_heads", Some(kv_default), MAX_DIM)?;
        if !heads.is_multiple_of(kv_heads) {
            return f.err("num_key_value_heads", &format!("a divisor of num_attention_heads ({heads})"));
        }
        let head_dim = match f.present("head_dim") {
            None if arch == Arch::Qwen3 => 128,
            None if dim % heads != 0 => {
                return f.err(
                    "num_attention_heads",
                    &format!("a divisor of hidden_size ({dim}), or an explicit head_dim"),
                );
            }
            None => dim / heads,
            Some(_) => f.size("head_dim", None, 1024)?,
        };
        if head_dim % 2 != 0 || head_dim > 1024 {
            return f.err("head_dim", "an even number up to 1024");
        }
        if heads * head_dim > MAX_DIM {
            return f.err("num_attention_heads", &format!("heads x head_dim up to {MAX_DIM}"));
        }
        let bias = f.flag("attention_bias", false)?;
        let (rope_theta, rope_scaling) = rope(&f)?;
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

    /// The first field in which `found` differs from `self`: name, this value, the other's value.
    pub fn difference(&self, found: &Self) -> Option<(&'static str, String, String)> {
        macro_rules! compare {
            ($($field:ident = $name:literal),* $(,)?) => {$(
                if self.$field != found.$field {
                    return Some(($name, format!("{:?}", self.$field), format!("{:?}", found.$field)));
                }
            )*};
        }
        compare!(
            arch = "model_type",
            layers = "num_hidden_layers",
            dim = "hidden_size",
            heads = "num_attention_heads",
            kv_heads = "num_key_value_heads",
            head_dim = "head_dim",
            ffn_dim = "intermediate_size",
            vocab = "vocab_size",
            qkv_bias = "attention_bias",
            o_bias = "attention_bias",
            qk_norm = "use_qk_norm",
            tied = "tie_word_embeddings",
            rms_eps = "rms_norm_eps",
            rope_theta = "rope_theta",
        );
        let (here, there) = (self.rope_scaling, found.rope_scaling);
        let same = here == there || (here.is_table() || there.is_table()) && self.turns_like(found);
        (!same).then(|| ("rope_scaling", format!("{here:?}"), format!("{there:?}")))
    }

    /// Whether all pairs are scaled alike, as near as a GGUF file's f32 divisors tell.
    fn turns_like(&self, other: &Self) -> bool {
        (0..self.head_dim / 2).all(|i| {
            let frequency = self.rope_theta.powf(-2.0 * i as f64 / self.head_dim as f64);
            let multiplier = |m: &Self| m.rope_scaling.multiplier(i, frequency);
            (multiplier(self) / multiplier(other) - 1.0).abs() < 1e-5
        })
    }

    /// The text of a `config.json` that says the same. What such a file cannot say, since every family has its own
    /// rules, is in the object `antigravity`, which [`ModelConfig::parse`] reads.
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

    /// What [`ModelConfig::to_json`] adds.
    fn add(&mut self, more: &Fields<'_>) -> Result<(), ConfigError> {
        self.qkv_bias = more.flag("qkv_bias", self.qkv_bias)?;
        self.o_bias = more.flag("o_bias", self.o_bias)?;
        self.qk_norm = more.flag("qk_norm", self.qk_norm)?;
        if let Some(found) = more.present("rope_divisors") {
            let usable = |x: &Value| x.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
            let divisors: Option<Vec<f32>> = found.as_array().and_then(|a| a.iter().map(usable).collect());
            match divisors.filter(|d| d.len() == self.head_dim / 2) {
                // Kept for good: a few hundred bytes, once a file.
                Some(divisors) => self.rope_scaling = RopeScaling::Divisors(divisors.leak()),
                None => return more.err("rope_divisors", "a positive number for each pair of a head"),
            }
        }
        Ok(())
    }
}

/// Theta and scaling from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`.
fn rope(f: &Fields<'_>) -> Result<(f64, RopeScaling), ConfigError> {
    let field = if f.present("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let empty = Map::new();
    let inner = match f.present(field) {
        None => Fields(&empty),
        Some(Value::Object(map)) => Fields(map),
        Some(_) => return f.err(field, "an object or null"),
    };
    for outer in [f, &inner] {
        if outer.present("partial_rotary_factor").is_some_and(|x| x.as_f64() != Some(1.0)) {
            return outer.err("partial_rotary_factor", "1.0");
        }
    }
    let theta = if inner.present("rope_theta").is_some() {
        inner.float("rope_theta", None)?
    } else {
        f.float("rope_theta", Some(10_000.0))?
    };
    let kind = inner.present("rope_type").or_else(|| inner.present("type"));
    let named = |e: ConfigError| ConfigError { field: format!("{field}.{}", e.field), ..e };
    match kind.map(Value::as_str) {
        None | Some(Some("default")) => Ok((theta, RopeScaling::Plain)),
        Some(Some("llama3")) => {
            let scaling = RopeScaling::Llama3 {
                factor: inner.float("factor", None).map_err(named)?,
                low_freq_factor: inner.float("low_freq_factor", None).map_err(named)?,
                high_freq_factor: inner.float("high_freq_factor", None).map_err(named)?,
                original_max_position: inner
                    .size("original_max_position_embeddings", None, 1 << 30)
                    .map_err(named)?,
            };
            match scaling {
                RopeScaling::Llama3 { low_freq_factor, high_freq_factor, .. }
                    if low_freq_factor >= high_freq_factor =>
                {
                    inner.err("high_freq_factor", "more than low_freq_factor").map_err(named)
                }
                _ => Ok((theta, scaling)),
            }
        }
        Some(_) => f.err(field, "rope_type \"default\" or \"llama3\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100"#;

    fn parse(more: &str) -> Result<ModelConfig, ConfigError> {
        ModelConfig::parse(&format!("{LLAMA}{more}}}"))
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let m = parse("").unwrap();
        assert_eq!((m.kv_heads, m.head_dim, m.tied), (4, 16, false));
        assert_eq!((m.rms_eps, m.rope_theta, m.rope_scaling), (1e-6, 10_000.0, RopeScaling::Plain));
        assert!(!m.qkv_bias && !m.o_bias && !m.qk_norm);
        let m = parse(r#", "attention_bias": true, "head_dim": 20"#).unwrap();
        assert!(m.qkv_bias && m.o_bias && m.head_dim == 20);
    }

    #[test]
    fn rope_in_both_spellings() {
        let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192"#;
        let old =
            parse(&format!(r#", "rope_theta": 5e5, "rope_scaling": {{"rope_type": "llama3", {scaling}}}"#));
        let new = parse(&format!(
            r#", "rope_parameters": {{"rope_type": "llama3", "rope_theta": 5e5, {scaling}}}"#
        ));
        assert_eq!(old, new);
        assert!(matches!(old.unwrap().rope_scaling, RopeScaling::Llama3 { .. }));
    }

    #[test]
    fn a_table_of_divisors_equals_the_formula_it_comes_from() {
        let llama3 = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 64,
        };
        let formula = ModelConfig { rope_scaling: llama3, ..parse("").unwrap() };
        let frequency = |i: usize| formula.rope_theta.powf(-2.0 * i as f64 / formula.head_dim as f64);
        let mut divisors: Vec<f32> =
            (0..formula.head_dim / 2).map(|i| (1.0 / llama3.multiplier(i, frequency(i))) as f32).collect();
        let table = |divisors: &[f32]| ModelConfig {
            rope_scaling: RopeScaling::Divisors(divisors.to_vec().leak()),
            ..formula.clone()
        };
        assert_eq!(formula.difference(&table(&divisors)), None);
        assert_eq!(table(&divisors).difference(&formula), None);
        divisors[5] *= 1.00002;
        for (one, other) in [(&formula, &table(&divisors)), (&table(&divisors), &formula)] {
            assert_eq!(one.difference(other).map(|d| d.0), Some("rope_scaling"));
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let plain = parse("").unwrap();
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let odd = ModelConfig {
            qkv_bias: true,
            qk_norm: true,
            tied: true,
            rms_eps: 1e-5f32.into(),
            ..plain.clone()
        };
        let divisors = RopeScaling::Divisors(&[1.0, 1.1, 1.0, 2.5, 1.0, 1.0, 32.0, 32.0]);
        for rope_scaling in [RopeScaling::Plain, llama3, divisors] {
            for model in [&plain, &odd] {
                let model = ModelConfig { rope_scaling, ..model.clone() };
                assert_eq!(ModelConfig::parse(&model.to_json()), Ok(model));
            }
        }
    }

    #[test]
    fn errors_name_field_value_and_what_is_supported() {
        for (more, field, value) in [
            (r#", "hidden_act": "gelu""#, "hidden_act", "\"gelu\""),
            (r#", "num_key_value_heads": 3"#, "num_key_value_heads", "3"),
            (r#", "head_dim": 15"#, "head_dim", "15"),
            (r#", "mlp_bias": true"#, "mlp_bias", "true"),
            (r#", "rms_norm_eps": 0"#, "rms_norm_eps", "0"),
            (r#", "rope_scaling": {"type": "linear", "factor": 2.0}"#, "rope_scaling", "linear"),
            (r#", "layer_types": ["full_attention", "sliding_attention"]"#, "layer_types", "sliding"),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor", "0.5"),
            (r#", "num_attention_heads": 99999"#, "num_attention_heads", "99999"),
            (r#", "antigravity": 1"#, "antigravity", "1"),
            (r#", "antigravity": {"o_bias": 1}"#, "o_bias", "1"),
            (r#", "antigravity": {"rope_divisors": [1, 2]}"#, "rope_divisors", "[1,2]"),
        ] {
            let e = parse(more).unwrap_err();
            assert!(e.field == field && e.value.contains(value) && !e.supported.is_empty(), "{e}");
        }
        assert_eq!(ModelConfig::parse("{}").unwrap_err().value, "missing");
    }
}
