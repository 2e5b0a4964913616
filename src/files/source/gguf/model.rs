//! Reads a model's config from a GGUF header.
//!
//! Keys are translated to the fields of a Hugging Face `config.json`, so that the same rules and limits apply; errors
//! name the keys. Keys and defaults are those of llama.cpp (`gguf-py/gguf/constants.py`, `src/llama-model.cpp`).

mod layers;

use serde_json::{Map, Value as Json, json};
use std::cell::RefCell;
use std::collections::HashSet;

use super::divisors::{DivisorTables, detect_scaling};
use super::fields::{FIELDS, ValueForm, required_keys};
use super::header::GgufHeader;
use super::names::{ROPE_FREQS, ROPE_LONG, ROPE_SHORT, split_gguf_name, to_hf_name};
use super::unread;
use super::value::Value;
use crate::config::{
    Arch, ConfigError, LongRope, ModelConfig, Norm, QkNorm, RopeScaling, yarn_attention_factor,
};
use crate::error::quote;

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
const RECURRENT: &str = "attention.recurrent_layers";
const KV_HEADS: &str = "attention.head_count_kv";
const QUERY_GROWTH: &str = "attention.temperature_scale";
const FFN_WIDTHS: &str = "feed_forward_length";
const INNER: &str = "ssm.inner_size";
const ROPE_IN_USE: &str = "rope.scaling.finetuned";
const EXTRA_BLOCKS: &str = "nextn_predict_layers";
const SPLIT: &str = "split.count";
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";
const POSITIONS: &str = "position_embd.weight";
const NORM_BIAS: &str = "output_norm.bias";

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
        // Nemotron-H rotates nothing, and its files have the width of the model divided by the heads.
        let is_unused = model.arch == Arch::NemotronH && key == "rope.dimension_count";
        if keys.get(key).is_some_and(|v| v.as_u64() != Some(width as u64)) && !is_unused {
            return keys.unsupported(key, &format!("the width of a head, {width}"));
        }
    }
    check_tensors(&keys, &model)?;
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
    model.rope = model.rope.shared_by_layers_of(model.arch);
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
            Some(arch) => {
                let mut keys = Self { header, arch, read: RefCell::default() };
                // Their files differ in nothing else.
                if arch == Arch::Olmo2 && keys.has_window() {
                    keys.arch = Arch::Olmo3;
                }
                Ok(keys)
            }
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

    /// Reads a positive number; `None` if the key is missing or 0.
    fn read_nonzero(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        if self.get(key).is_some_and(|value| value.as_f64() == Some(0.0)) {
            Ok(None)
        } else {
            self.read_float(key)
        }
    }

    fn has_window(&self) -> bool {
        self.get(WINDOW).is_some_and(|window| window.as_u64() != Some(0))
    }

    /// Number of blocks behind the layers, which predict further tokens: they are left out.
    fn extra_blocks(&self) -> usize {
        let found = Some(EXTRA_BLOCKS).filter(|_| self.arch.is_qwen35()).and_then(|key| self.get(key));
        found.and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
    }

    /// Key of the epsilon of norms. It is optional in `config.json` but required in a GGUF file.
    fn epsilon_key(&self) -> &'static str {
        const RMS: &str = "attention.layer_norm_rms_epsilon";
        match self.arch {
            Arch::Gpt2 => "attention.layer_norm_epsilon",
            // As in llama.cpp.
            Arch::NemotronH if self.get(RMS).is_none() => "attention.layer_norm_epsilon",
            _ => RMS,
        }
    }

    /// Returns true if the family reads this field of `config.json` from this key.
    fn has_field(&self, key: &str, field: &str, families: &[Arch]) -> bool {
        match field {
            "rms_norm_eps" => key == self.epsilon_key(),
            _ => families.is_empty() || families.contains(&self.arch),
        }
    }

    /// Replaces the field of `config.json` in an error by the key.
    fn rename_field(&self, e: ConfigError) -> ConfigError {
        let field = |field: &'static str| self.arch.field_name(field);
        if e.field == self.arch.epsilon_field() {
            return ConfigError { field: self.full_key(self.epsilon_key()), ..e };
        }
        match FIELDS.iter().find(|(_, _, name, _)| field(name) == e.field) {
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
        let mut required =
            std::iter::once(self.epsilon_key()).chain(required_keys(self.arch).iter().copied());
        match required.find(|key| self.get(key).is_none()) {
            Some(key) => self.unsupported(key, "a positive number"),
            None => Ok(()),
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

    /// Builds `rope_scaling` of `config.json`, with the growth of queries.
    fn rope_scaling(&self) -> Result<Json, ConfigError> {
        let mut scaling = self.frequency_scaling()?;
        let beta = match self.arch {
            Arch::Ministral3 => self.read_nonzero(QUERY_GROWTH)?,
            _ => None,
        };
        if let Some(beta) = beta {
            if scaling.is_null() {
                scaling = json!({"rope_type": "default"});
            }
            scaling["llama_4_scaling_beta"] = json!(beta);
            if let Some(original) = self.get(ORIGINAL).and_then(Value::as_u64) {
                scaling["original_max_position_embeddings"] = json!(original);
            }
        }
        Ok(scaling)
    }

    /// Builds `rope_scaling` of `config.json`, as far as frequencies are concerned.
    fn frequency_scaling(&self) -> Result<Json, ConfigError> {
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
        let mut scaling =
            json!({"rope_type": "yarn", "factor": factor, "truncate": self.arch != Arch::GptOss});
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
        let scaled = self.read_nonzero(YARN_MSCALE)?;
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

    /// Builds the equivalent `config.json`.
    fn config_json(&self) -> Result<Map<String, Json>, ConfigError> {
        let mut map = Map::new();
        map.insert("model_type".into(), self.arch.name().into());
        for (key, form, field, families) in FIELDS {
            let differs = self.arch == Arch::Gemma4 && [FFN_WIDTHS, KV_HEADS].contains(&key);
            let value = Some(key).filter(|key| self.has_field(key, field, families) && !differs);
            if let Some(value) = value.and_then(|key| self.get(key)) {
                let zeros = match self.arch {
                    Arch::Lfm2 | Arch::Lfm2Moe | Arch::GraniteMoeHybrid => key == KV_HEADS,
                    Arch::NemotronH => key == KV_HEADS || key == FFN_WIDTHS,
                    _ => false,
                };
                let form = if zeros { ValueForm::PerAttentionLayer } else { form };
                let Some(value) = form.to_json(value) else { return self.unsupported(key, form.name()) };
                // As in llama.cpp, a scale or window of 0 counts as unset.
                let unset = field.ends_with("_multiplier") && value.as_f64() == Some(0.0);
                if !unset && (key != WINDOW || self.has_window()) {
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
        self.add_family_fields(&mut map)?;
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
fn check_tensors(keys: &Keys<'_>, model: &ModelConfig) -> Result<(), ConfigError> {
    let known = |name: &str| to_hf_name(model.arch, name).is_some();
    let long = model.arch == Arch::Phi3;
    let biases = model.norm == Norm::Layer;
    let has_bias = |rest: &str| match rest {
        "ssm_dt.bias" | "exp_probs_b.bias" => true,
        "ssm_conv1d.bias" => model.mamba.conv_bias,
        rest => biases || model.arch == Arch::GptOss && rest.starts_with("ffn_"),
    };
    let left_out = model.layers..model.layers.saturating_add(keys.extra_blocks());
    let read = |name: &str| match split_gguf_name(name) {
        None if matches!(name, ROPE_SHORT | ROPE_LONG) => long,
        None => name == ROPE_FREQS || known(name) && (biases || !matches!(name, POSITIONS | NORM_BIAS)),
        Some((layer, _)) if layer >= model.layers => left_out.contains(&layer),
        Some((_, "attn_q.bias" | "attn_k.bias" | "attn_v.bias")) => model.qkv_bias,
        Some((_, "attn_output.bias")) => model.o_bias,
        Some((_, "attn_q_norm.weight" | "attn_k_norm.weight")) => model.qk_norm != QkNorm::None,
        Some((_, rest)) => known(name) && (!rest.ends_with(".bias") || has_bias(rest)),
    };
    match keys.header.tensors.keys().find(|name| !read(name)) {
        None => Ok(()),
        Some(name) => {
            let supported = format!("those of a {} model with {} layers", model.arch.name(), model.layers);
            Err(ConfigError::new("tensors", quote(name), supported))
        }
    }
}
