//! Reads a model's config from a GGUF header.
//!
//! Keys are translated to the fields of a Hugging Face `config.json`, so that the same rules and limits apply; errors
//! name the keys. Keys and defaults are those of llama.cpp (`gguf-py/gguf/constants.py`, `src/llama-model.cpp`).

use serde_json::{Map, Number, Value as Json, json};
use std::cell::RefCell;
use std::collections::HashSet;

use super::header::GgufHeader;
use super::names::{ROPE_FREQS, ROPE_LONG, ROPE_SHORT, split_gguf_name, to_hf_name};
use super::unread;
use super::value::Value;
use crate::blocks::{BlockType, Dtype};
use crate::config::{
    Arch, ConfigError, LongRope, ModelConfig, Norm, QkNorm, RopeScaling, yarn_attention_factor,
};
use crate::error::quote;

/// The required type of a key's value.
#[derive(Clone, Copy)]
enum ValueForm {
    Integer,
    /// An integer, or an array of equal integers, one per layer.
    PerLayer,
    Float,
    Text,
}

use ValueForm::*;

impl ValueForm {
    fn name(self) -> &'static str {
        match self {
            Integer => "an integer",
            PerLayer => "an integer, or an array of one integer of 32 bits for every layer, all the same",
            Float => "a floating-point number",
            Text => "a string",
        }
    }

    /// Converts a value to JSON; `None` if it has another type.
    fn to_json(self, value: &Value) -> Option<Json> {
        match (self, value) {
            (Text, _) => value.as_str().map(Json::from),
            (Float, _) => Number::from_f64(value.as_f64()?).map(Json::from),
            (PerLayer, Value::Array(array)) => {
                let mut values = array.iter_int32()?;
                let first = values.next()?;
                if values.all(|value| value == first) { Integer.to_json(&first) } else { None }
            }
            _ => value.as_u64().map(Json::from),
        }
    }
}

/// Keys without `ARCH.`, their types, and the corresponding fields of `config.json`.
const FIELDS: [(&str, ValueForm, &str); 17] = [
    ("block_count", Integer, "num_hidden_layers"),
    ("embedding_length", Integer, "hidden_size"),
    ("feed_forward_length", PerLayer, "intermediate_size"),
    ("attention.head_count", PerLayer, "num_attention_heads"),
    ("attention.head_count_kv", PerLayer, "num_key_value_heads"),
    ("attention.key_length", Integer, "head_dim"),
    ("context_length", Integer, "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", Float, "rms_norm_eps"),
    ("attention.layer_norm_epsilon", Float, "rms_norm_eps"),
    ("rope.freq_base", Float, "rope_theta"),
    ("rope.freq_base_swa", Float, "rope_local_base_freq"),
    ("attention.sliding_window", Integer, "sliding_window"),
    ("attention.scale", Float, "attention_multiplier"),
    ("embedding_scale", Float, "embedding_multiplier"),
    ("residual_scale", Float, "residual_multiplier"),
    ("logit_scale", Float, "logits_scaling"),
    ("hidden_activation", Text, "hidden_act"),
];

const ARCHITECTURE: &str = "general.architecture";
const SCALING: &str = "rope.scaling.type";
const FACTOR: &str = "rope.scaling.factor";
const ORIGINAL: &str = "rope.scaling.original_context_length";
const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";
const YARN_FACTOR: &str = "rope.scaling.yarn_attn_factor";
const YARN_PART: &str = "rope.scaling.yarn_ext_factor";
const YARN_MSCALE: &str = "rope.scaling.yarn_log_multiplier";
const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";
const SPLIT: &str = "split.count";
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// Reads the config of the model in `file`, which has this header.
///
/// # Errors
///
/// A key or tensor is missing, damaged, or of a kind of model that is not supported.
pub fn read_config(header: &GgufHeader, file: &[u8]) -> Result<ModelConfig, ConfigError> {
    let keys = Keys::new(header)?;
    keys.check_supported()?;
    let map = keys.config_json()?;
    let mut model = ModelConfig::from_map(&map).map_err(|e| keys.rename_field(e))?;
    let has = |name: &str| header.tensors.contains_key(name);
    model.qkv_bias |= has("blk.0.attn_q.bias");
    model.o_bias |= has("blk.0.attn_output.bias");
    if model.qk_norm == QkNorm::None && has("blk.0.attn_q_norm.weight") {
        model.qk_norm = QkNorm::PerHead;
    }
    for (key, width) in [
        ("attention.key_length", model.head_dim),
        ("attention.value_length", model.head_dim),
        ("rope.dimension_count", model.rope.dim),
    ] {
        if keys.get(key).is_some_and(|v| v.as_u64() != Some(width as u64)) {
            return keys.unsupported(key, &format!("the width of a head, {width}"));
        }
    }
    check_tensors(header, &model)?;
    let tables = DivisorTables { header, file, pairs: model.rope.dim / 2 };
    if let Some(divisors) = tables.get(ROPE_FREQS)? {
        model.rope.scaling = detect_scaling(&model, divisors);
    }
    let stretched = keys.get(SCALING).and_then(Value::as_str) == Some("longrope");
    if (stretched || has(ROPE_SHORT) || has(ROPE_LONG)) && !(has(ROPE_SHORT) && has(ROPE_LONG)) {
        let supported = format!("\"longrope\" with both tensors {ROPE_SHORT} and {ROPE_LONG}, or neither");
        return keys.unsupported(SCALING, &supported);
    }
    if let (Some(short), Some(long)) = (tables.get(ROPE_SHORT)?, tables.get(ROPE_LONG)?) {
        let Some(beyond) = keys.get(ORIGINAL).and_then(Value::as_u64).filter(|n| *n > 1) else {
            return keys.unsupported(ORIGINAL, "an integer");
        };
        model.rope.scaling = RopeScaling::from_divisors(short);
        model.rope.long = Some(LongRope { divisors: long.leak(), original_context: beyond as usize });
        model.rope.attention_factor = keys.read_float(ATTENTION_FACTOR)?.unwrap_or(1.0);
    }
    keys.check_unread(&model)?;
    Ok(model)
}

/// The metadata keys of one architecture.
struct Keys<'a> {
    header: &'a GgufHeader,
    arch: Arch,
    /// Full names of the keys that were read.
    read: RefCell<HashSet<String>>,
}

impl<'a> Keys<'a> {
    fn new(header: &'a GgufHeader) -> Result<Self, ConfigError> {
        let found = header.metadata.get(ARCHITECTURE);
        let named = found.and_then(Value::as_str);
        match Arch::ALL.into_iter().find(|arch| named == Some(arch.gguf_name())) {
            Some(arch) => Ok(Self { header, arch, read: RefCell::default() }),
            None => {
                let value = found.map_or("missing".into(), Value::to_string);
                Err(ConfigError::new(ARCHITECTURE, value, Arch::list_names(Arch::gguf_name)))
            }
        }
    }

    fn full_key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.gguf_name())
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        let full = self.full_key(key);
        let value = self.header.metadata.get(&full);
        self.read.borrow_mut().insert(full);
        value
    }

    fn unsupported<T>(&self, key: &str, supported: &str) -> Result<T, ConfigError> {
        let value = self.get(key).map_or("missing".into(), Value::to_string);
        Err(ConfigError::new(self.full_key(key), value, supported))
    }

    /// Reads a positive number; `None` if the key is missing.
    fn read_float(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.get(key).map(|value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0)) {
            None => Ok(None),
            Some(Some(x)) => Ok(Some(x)),
            Some(None) => self.unsupported(key, "a positive number"),
        }
    }

    /// Key of the epsilon of norms. It is optional in `config.json` but required in a GGUF file.
    fn epsilon_key(&self) -> &'static str {
        if self.arch == Arch::Gpt2 {
            "attention.layer_norm_epsilon"
        } else {
            "attention.layer_norm_rms_epsilon"
        }
    }

    /// Returns true if the family has this field of `config.json` and reads it from this key.
    fn has_field(&self, key: &str, field: &str) -> bool {
        match field {
            "rms_norm_eps" => key == self.epsilon_key(),
            "attention_multiplier" | "embedding_multiplier" | "residual_multiplier" | "logits_scaling" => {
                self.arch == Arch::Granite
            }
            "rope_local_base_freq" => self.arch == Arch::Gemma3,
            "sliding_window" => matches!(self.arch, Arch::Gemma3 | Arch::Phi3),
            _ => true,
        }
    }

    /// Replaces the field of `config.json` in an error by the key.
    fn rename_field(&self, e: ConfigError) -> ConfigError {
        let field = |field: &'static str| self.arch.field_name(field);
        if e.field == self.arch.epsilon_field() {
            return ConfigError { field: self.full_key(self.epsilon_key()), ..e };
        }
        match FIELDS.iter().find(|(.., name)| field(name) == e.field) {
            Some((key, ..)) => ConfigError { field: self.full_key(key), ..e },
            None => e,
        }
    }

    /// Rejects models whose features are not implemented.
    fn check_supported(&self) -> Result<(), ConfigError> {
        if let Some(parts) = self.header.metadata.get(SPLIT).filter(|v| !matches!(v.as_u64(), Some(0 | 1))) {
            let supported = "a whole model; join its parts with llama-gguf-split --merge";
            return Err(ConfigError::new(SPLIT, parts.to_string(), supported));
        }
        if !self.get("rope.scale_linear").is_none_or(|v| v.as_f64() == Some(1.0)) {
            return self
                .unsupported("rope.scale_linear", "1; give rope.scaling.type and rope.scaling.factor");
        }
        let one = |v: &Value| matches!(v.as_f64(), Some(0.0 | 1.0));
        if self.get(SCALING).is_none() && !self.get(FACTOR).is_none_or(one) {
            return self.unsupported(FACTOR, "1, or a rope.scaling.type of \"none\", \"linear\" or \"yarn\"");
        }
        if self.get(self.epsilon_key()).is_none() {
            self.unsupported(self.epsilon_key(), "a positive number")
        } else {
            Ok(())
        }
    }

    /// Rejects a key that was not read, unless its value has no effect.
    fn check_unread(&self, model: &ModelConfig) -> Result<(), ConfigError> {
        let prefix = self.full_key("");
        let read = self.read.borrow();
        for (full, value) in self.header.metadata.iter().filter(|(key, _)| !read.contains(*key)) {
            let Some(key) = full.strip_prefix(&prefix) else { continue };
            if let Some(supported) = unread::check_unread_key(key, value, model) {
                return Err(ConfigError::new(full, value.to_string(), supported));
            }
        }
        Ok(())
    }

    /// Builds `rope_scaling` of `config.json`.
    fn rope_scaling(&self) -> Result<Json, ConfigError> {
        let Some(kind) = self.get(SCALING) else { return Ok(Json::Null) };
        let factor = self.read_float(FACTOR)?;
        match (kind.as_str(), factor) {
            (Some("none" | "longrope"), _) => Ok(Json::Null),
            (Some("linear"), Some(factor)) => Ok(json!({"rope_type": "linear", "factor": factor})),
            (Some("yarn"), Some(factor)) => self.yarn_scaling(factor),
            (Some("linear" | "yarn"), None) => self.unsupported(FACTOR, "a positive number"),
            _ => self.unsupported(SCALING, "\"none\", \"linear\", \"yarn\", or rope_freqs.weight"),
        }
    }

    /// Builds the `rope_scaling` of YaRN.
    fn yarn_scaling(&self, factor: f64) -> Result<Json, ConfigError> {
        let mut scaling = json!({"rope_type": "yarn", "factor": factor});
        for (key, field) in
            [("rope.scaling.yarn_beta_fast", "beta_fast"), ("rope.scaling.yarn_beta_slow", "beta_slow")]
        {
            if let Some(beta) = self.read_float(key)? {
                scaling[field] = json!(beta);
            }
        }
        // Below 0 means unset: llama.cpp writes such files, and then also writes 1 as attention factor.
        let part = self.get(YARN_PART).map(|value| value.as_f64());
        let unset = part.is_some_and(|part| part.is_some_and(|part| part < 0.0));
        if !unset && !matches!(part, None | Some(Some(1.0))) {
            return self.unsupported(YARN_PART, "1");
        }
        let scaled = self.get(YARN_MSCALE).filter(|value| value.as_f64() != Some(0.0));
        let scaled = scaled.and_then(|_| self.read_float(YARN_MSCALE).transpose()).transpose()?;
        let own = self.read_float(YARN_FACTOR)?.filter(|_| !unset);
        let attention = own.unwrap_or_else(|| {
            yarn_attention_factor(factor, 1.0) / scaled.map_or(1.0, |m| yarn_attention_factor(factor, m))
        });
        let times = self.read_float(ATTENTION_FACTOR)?.unwrap_or(1.0);
        scaling["attention_factor"] = json!(attention * times);
        if let Some(original) = self.get(ORIGINAL).and_then(Value::as_u64) {
            scaling["original_max_position_embeddings"] = json!(original);
        }
        Ok(scaling)
    }

    /// Builds `layer_types` of Gemma 3's `config.json`; all layers have full attention if there is no window.
    fn layer_types(&self, layers: usize) -> Result<Vec<&'static str>, ConfigError> {
        let name = |local: bool| if local { "sliding_attention" } else { "full_attention" };
        let pattern = self.get(PATTERN);
        if self.get(WINDOW).is_none_or(|window| window.as_u64() == Some(0)) {
            return Ok(vec![name(false); layers]);
        }
        let every = match pattern {
            None => 6,
            Some(Value::Array(array)) => {
                let local = |value: Value| match (&value, value.as_u64()) {
                    (Value::Bool(local), _) => Some(name(*local)),
                    (_, Some(number @ 0..=1)) => Some(name(number == 1)),
                    _ => None,
                };
                let kinds: Option<Vec<_>> = array.iter().map(local).collect();
                return match kinds.filter(|kinds| kinds.len() == layers) {
                    Some(kinds) => Ok(kinds),
                    None => self.unsupported(PATTERN, &format!("a boolean for each of {layers} layers")),
                };
            }
            Some(number) => match number.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(every) => every,
                None => return self.unsupported(PATTERN, "an integer, or a boolean for each layer"),
            },
        };
        // Every `every`-th layer has full attention; none if it is 0.
        Ok((1..=layers).map(|layer| name(every == 0 || !layer.is_multiple_of(every))).collect())
    }

    /// Builds the equivalent `config.json`.
    fn config_json(&self) -> Result<Map<String, Json>, ConfigError> {
        let mut map = Map::new();
        map.insert("model_type".into(), self.arch.name().into());
        for (key, form, field) in FIELDS {
            let value = Some(key).filter(|key| self.has_field(key, field)).and_then(|key| self.get(key));
            if let Some(value) = value {
                let Some(value) = form.to_json(value) else { return self.unsupported(key, form.name()) };
                // As in llama.cpp, a scale of 0 counts as unset.
                if !(field.ends_with("_multiplier") && value.as_f64() == Some(0.0)) {
                    map.insert(self.arch.field_name(field).into(), value);
                }
            }
        }
        // Hugging Face has other defaults.
        let heads = map.get(self.arch.field_name("num_attention_heads")).cloned();
        if let Some(heads) = &heads {
            map.entry("num_key_value_heads").or_insert(heads.clone());
        }
        if let (Some(dim), Some(heads @ 1..)) = (
            map.get(self.arch.field_name("hidden_size")).and_then(Json::as_u64),
            heads.as_ref().and_then(Json::as_u64),
        ) && dim.is_multiple_of(heads)
        {
            map.entry("head_dim").or_insert((dim / heads).into());
            // GGUF files lack it. The largest model, with 62 layers, differs (see `gemma3` in llama.cpp).
            let largest = map.get("num_hidden_layers").and_then(Json::as_u64) == Some(62);
            let scalar = if largest { (dim / heads).into() } else { map["head_dim"].clone() };
            map.insert("query_pre_attn_scalar".into(), scalar);
        } else if let Some(head_dim) = map.get("head_dim").cloned() {
            map.insert("query_pre_attn_scalar".into(), head_dim);
        }
        if let (Arch::Phi3, Some(rotated), Some(head_dim @ 1..)) = (
            self.arch,
            self.get("rope.dimension_count").and_then(Value::as_u64),
            map.get("head_dim").and_then(Json::as_u64),
        ) {
            map.insert("partial_rotary_factor".into(), (rotated as f64 / head_dim as f64).into());
        }
        if let (Arch::Gemma3, Some(layers)) = (self.arch, map.get("num_hidden_layers").and_then(Json::as_u64))
        {
            // The config rejects larger numbers of layers.
            let layers = usize::try_from(layers).unwrap_or(0).min(1 << 16);
            map.insert("layer_types".into(), json!(self.layer_types(layers)?));
        }
        match (self.arch, map.get("head_dim").and_then(Json::as_u64)) {
            (Arch::Granite, Some(head_dim @ 1..)) => {
                let scale = f64::from(1.0 / (head_dim as f32).sqrt());
                map.entry("attention_multiplier").or_insert(scale.into());
            }
            (Arch::SmolLm3, _) => drop(map.entry("rope_theta").or_insert(10_000.0.into())),
            _ => {}
        }
        map.insert("rope_scaling".into(), self.rope_scaling()?);
        map.insert("vocab_size".into(), self.vocab_size()?.into());
        map.insert("tie_word_embeddings".into(), (!self.header.tensors.contains_key(HEAD)).into());
        Ok(map)
    }

    /// Rows of the embedding. Many files lack the key `vocab_size`.
    fn vocab_size(&self) -> Result<usize, ConfigError> {
        let found = self.header.tensors.get(EMBEDDING).map(|entry| entry.shape.as_slice());
        if let Some(&[rows, _]) = found {
            return Ok(rows);
        }
        let value = found.map_or("missing".into(), |shape| format!("of shape {shape:?}"));
        Err(ConfigError::new(EMBEDDING, value, "a matrix with a row for every token"))
    }
}

/// Rejects tensors that are not read: ignoring them would give wrong results.
fn check_tensors(header: &GgufHeader, model: &ModelConfig) -> Result<(), ConfigError> {
    let known = |name: &str| to_hf_name(model.arch, name).is_some();
    let long = model.arch == Arch::Phi3;
    let biases = model.norm == Norm::Layer;
    let read = |name: &str| match split_gguf_name(name) {
        None => known(name) || name == ROPE_FREQS || long && matches!(name, ROPE_SHORT | ROPE_LONG),
        Some((layer, ..)) if layer >= model.layers => false,
        Some((_, "attn_q" | "attn_k" | "attn_v", "bias")) => model.qkv_bias,
        Some((_, "attn_output", "bias")) => model.o_bias,
        Some((_, "attn_q_norm" | "attn_k_norm", "weight")) => model.qk_norm != QkNorm::None,
        Some((_, _, kind)) => (kind == "weight" || biases) && known(name),
    };
    match header.tensors.keys().find(|name| !read(name)) {
        None => Ok(()),
        Some(name) => {
            let supported = format!("those of a {} model with {} layers", model.arch.name(), model.layers);
            Err(ConfigError::new("tensors", quote(name), supported))
        }
    }
}

/// Access to tensors with one divisor per rotated pair.
struct DivisorTables<'a> {
    header: &'a GgufHeader,
    file: &'a [u8],
    pairs: usize,
}

impl DivisorTables<'_> {
    fn get(&self, name: &str) -> Result<Option<Vec<f32>>, ConfigError> {
        let Some(entry) = self.header.tensors.get(name) else { return Ok(None) };
        let pairs = self.pairs;
        let err = |value: String| {
            Err(ConfigError::new(name, value, format!("{pairs} positive numbers of type F32")))
        };
        if entry.block != BlockType::F32 || entry.shape != [pairs] {
            return err(format!("of type {} and shape {:?}", entry.block.name(), entry.shape));
        }
        let divisors = Dtype::F32.to_f32(&self.file[entry.range.clone()]);
        match divisors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
            Some(bad) => err(format!("{bad:?}")),
            None => Ok(Some(divisors)),
        }
    }
}

/// Determines the scaling in `rope_freqs.weight`: a published model's formula if it gives these divisors.
fn detect_scaling(model: &ModelConfig, divisors: Vec<f32>) -> RopeScaling {
    let is = |scaling: &RopeScaling| {
        let off = |(i, x): (usize, &f32)| {
            f64::from(*x) * scaling.frequency_multiplier(i, model.rope.base_frequency(i)) - 1.0
        };
        divisors.iter().enumerate().map(off).all(|off| off.abs() < 1e-5)
    };
    let known = [RopeScaling::Unscaled, llama3_scaling(8.0), llama3_scaling(32.0)].into_iter().find(is);
    known.unwrap_or_else(|| RopeScaling::from_divisors(divisors))
}

/// The scaling of Llama 3.1 (`factor` 8) and 3.2 (32).
fn llama3_scaling(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 }
}
