//! A model's config from a GGUF header.
//!
//! Keys are translated to the fields of a Hugging Face `config.json`, so that the same rules and limits hold; errors
//! name the keys. Keys and defaults are those of llama.cpp (`gguf-py/gguf/constants.py`, `src/llama-model.cpp`).

use serde_json::{Map, Number, Value as Json};

use super::header::Header;
use super::names::{ROPE_FREQS, part, plain};
use super::value::Value;
use crate::blocks::{BlockType, Dtype};
use crate::config::{ConfigError, ModelConfig, RopeScaling};
use crate::error::quoted;

/// What the value of a key may be.
#[derive(Clone, Copy)]
enum Form {
    Integer,
    /// An integer, or an array of one for each layer.
    PerLayer,
    Float,
}

use Form::*;

impl Form {
    fn name(self) -> &'static str {
        match self {
            Integer => "an integer",
            PerLayer => "an integer, or an array of one integer of 32 bits for every layer, all the same",
            Float => "a floating-point number",
        }
    }

    /// The number, if the value has this form.
    fn read(self, value: &Value) -> Option<Number> {
        match (self, value) {
            (Float, _) => Number::from_f64(value.as_f64()?),
            (PerLayer, Value::Array(array)) => {
                let mut values = array.integers32()?;
                let first = values.next()?;
                if values.all(|value| value == first) { Integer.read(&first) } else { None }
            }
            _ => value.as_u64().map(Number::from),
        }
    }
}

/// Keys, without `ARCH.`, what they may be, and the fields of `config.json` that they stand for.
const FIELDS: [(&str, Form, &str); 9] = [
    ("block_count", Integer, "num_hidden_layers"),
    ("embedding_length", Integer, "hidden_size"),
    ("feed_forward_length", PerLayer, "intermediate_size"),
    ("attention.head_count", PerLayer, "num_attention_heads"),
    ("attention.head_count_kv", PerLayer, "num_key_value_heads"),
    ("attention.key_length", Integer, "head_dim"),
    ("context_length", Integer, "max_position_embeddings"),
    (EPSILON, Float, "rms_norm_eps"),
    ("rope.freq_base", Float, "rope_theta"),
];

/// The only key that `config.json` may lack and a GGUF file may not.
const EPSILON: &str = "attention.layer_norm_rms_epsilon";
const ARCHITECTURE: &str = "general.architecture";
const SPLIT: &str = "split.count";
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// The config of the model in `file`, which has this header.
///
/// # Errors
///
/// A key or tensor that is missing, damaged, or of a kind of model that is not supported.
pub fn config(header: &Header, file: &[u8]) -> Result<ModelConfig, ConfigError> {
    let keys = Keys::new(header)?;
    keys.check_supported()?;
    let map = keys.config_json()?;
    let mut model = ModelConfig::from_map(&map).map_err(|e| keys.renamed(e))?;
    let has = |name: &str| header.tensors.contains_key(name);
    model.qkv_bias |= has("blk.0.attn_q.bias");
    model.o_bias |= has("blk.0.attn_output.bias");
    model.qk_norm |= has("blk.0.attn_q_norm.weight");
    for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        if keys.get(key).is_some_and(|v| v.as_u64() != Some(model.head_dim as u64)) {
            return keys.err(key, &format!("the width of a head, {}", model.head_dim));
        }
    }
    check_tensors(header, &model)?;
    model.rope_scaling = scaling(header, &model, file)?;
    Ok(model)
}

/// The keys of one architecture.
struct Keys<'a> {
    header: &'a Header,
    arch: &'a str,
}

impl<'a> Keys<'a> {
    fn new(header: &'a Header) -> Result<Self, ConfigError> {
        let found = header.metadata.get(ARCHITECTURE);
        match found.and_then(Value::as_str) {
            Some(arch @ ("llama" | "qwen2" | "qwen3")) => Ok(Self { header, arch }),
            _ => {
                let value = found.map_or("missing".into(), Value::to_string);
                Err(ConfigError::new(ARCHITECTURE, value, "\"llama\", \"qwen2\", \"qwen3\""))
            }
        }
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.header.metadata.get(&self.full(key))
    }

    fn err<T>(&self, key: &str, supported: &str) -> Result<T, ConfigError> {
        let value = self.get(key).map_or("missing".into(), Value::to_string);
        Err(ConfigError::new(self.full(key), value, supported))
    }

    /// The error with the key instead of the field of `config.json`.
    fn renamed(&self, e: ConfigError) -> ConfigError {
        match FIELDS.iter().find(|(.., field)| *field == e.field) {
            Some((key, ..)) => ConfigError { field: self.full(key), ..e },
            None => e,
        }
    }

    /// Refuses what would be computed wrongly.
    fn check_supported(&self) -> Result<(), ConfigError> {
        if let Some(parts) = self.header.metadata.get(SPLIT).filter(|v| !matches!(v.as_u64(), Some(0 | 1))) {
            let supported = "a whole model; join its parts with llama-gguf-split --merge";
            return Err(ConfigError::new(SPLIT, parts.to_string(), supported));
        }
        for key in ["expert_count", "attention.sliding_window"] {
            if self.get(key).is_some_and(|v| v.as_u64() != Some(0)) {
                return self.err(key, "0");
            }
        }
        for key in ["rope.scaling.type", "rope.scale_linear"] {
            let none = |v: &Value| v.as_str() == Some("none") || v.as_f64() == Some(1.0);
            if !self.get(key).is_none_or(none) {
                return self.err(key, "no scaling, or rope_freqs.weight");
            }
        }
        let off = self.get("rope.scaling.type").is_some(); // then it is "none": see above
        let one = |v: &Value| matches!(v.as_f64(), Some(0.0 | 1.0));
        if !off && !self.get("rope.scaling.factor").is_none_or(one) {
            return self.err("rope.scaling.factor", "1, or a rope.scaling.type of \"none\"");
        }
        if self.get(EPSILON).is_none() { self.err(EPSILON, "a positive number") } else { Ok(()) }
    }

    /// The equivalent `config.json`.
    fn config_json(&self) -> Result<Map<String, Json>, ConfigError> {
        let mut map = Map::new();
        map.insert("model_type".into(), self.arch.into());
        for (key, form, field) in FIELDS {
            if let Some(value) = self.get(key) {
                let Some(number) = form.read(value) else { return self.err(key, form.name()) };
                map.insert(field.into(), number.into());
            }
        }
        // The defaults of Hugging Face are others.
        let heads = map.get("num_attention_heads").cloned();
        if let Some(heads) = &heads {
            map.entry("num_key_value_heads").or_insert(heads.clone());
        }
        if let (Some(dim), Some(heads @ 1..)) =
            (map.get("hidden_size").and_then(Json::as_u64), heads.as_ref().and_then(Json::as_u64))
            && dim.is_multiple_of(heads)
        {
            map.entry("head_dim").or_insert((dim / heads).into());
        }
        map.insert("vocab_size".into(), self.vocab()?.into());
        map.insert("tie_word_embeddings".into(), (!self.header.tensors.contains_key(HEAD)).into());
        Ok(map)
    }

    /// Rows of the embedding. Many files lack the key `vocab_size`.
    fn vocab(&self) -> Result<usize, ConfigError> {
        let found = self.header.tensors.get(EMBEDDING).map(|entry| entry.shape.as_slice());
        if let Some(&[rows, _]) = found {
            return Ok(rows);
        }
        let value = found.map_or("missing".into(), |shape| format!("of shape {shape:?}"));
        Err(ConfigError::new(EMBEDDING, value, "a matrix with a row for every token"))
    }
}

/// Refuses tensors that no step reads: such a model computes something else.
fn check_tensors(header: &Header, model: &ModelConfig) -> Result<(), ConfigError> {
    let read = |name: &str| match part(name) {
        None => plain(name).is_some() || name == ROPE_FREQS,
        Some((layer, ..)) if layer >= model.layers => false,
        Some((_, "attn_q" | "attn_k" | "attn_v", "bias")) => model.qkv_bias,
        Some((_, "attn_output", "bias")) => model.o_bias,
        Some((_, "attn_q_norm" | "attn_k_norm", "weight")) => model.qk_norm,
        Some((_, _, kind)) => kind == "weight" && plain(name).is_some(),
    };
    match header.tensors.keys().find(|name| !read(name)) {
        None => Ok(()),
        Some(name) => {
            let supported = format!("those of a {} model with {} layers", model.arch.name(), model.layers);
            Err(ConfigError::new("tensors", quoted(name), supported))
        }
    }
}

/// The scaling in `rope_freqs.weight`: a published model's formula if the divisors are its results.
fn scaling(header: &Header, model: &ModelConfig, file: &[u8]) -> Result<RopeScaling, ConfigError> {
    let Some(entry) = header.tensors.get(ROPE_FREQS) else { return Ok(RopeScaling::Plain) };
    let pairs = model.head_dim / 2;
    let err = |value: String| {
        Err(ConfigError::new(ROPE_FREQS, value, format!("{pairs} positive numbers of type F32")))
    };
    if entry.block != BlockType::F32 || entry.shape != [pairs] {
        return err(format!("of type {} and shape {:?}", entry.block.name(), entry.shape));
    }
    let divisors = Dtype::F32.to_f32(&file[entry.range.clone()]);
    if let Some(bad) = divisors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
        return err(format!("{bad:?}"));
    }
    let is = |scaling: &RopeScaling| {
        let off = |(i, x): (usize, &f32)| f64::from(*x) * scaling.multiplier(i, model.frequency(i)) - 1.0;
        divisors.iter().enumerate().map(off).all(|off| off.abs() < 1e-5)
    };
    let known = [RopeScaling::Plain, llama3(8.0), llama3(32.0)].into_iter().find(is);
    Ok(known.unwrap_or_else(|| RopeScaling::divisors(divisors)))
}

/// The scaling of Llama 3.1 (8) and 3.2 (32).
fn llama3(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 }
}
