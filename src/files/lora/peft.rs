//! Reads adapters that PEFT saved.

use super::{AdapterContent, Factors, MERGE, pair_factors, put_factor};
use crate::config::{ConfigError, Fields};
use crate::mapped::map_file;
use crate::source::gguf::GgufTensor;
use crate::source::json::parse_object;
use crate::source::{Safetensors, Tensor};
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";
/// Prefix of the names of a model's modules.
const MODEL: &str = "base_model.model.";
const MAX_RANK: usize = 1 << 16;

/// Fields that, if set, say that the adapter is more than products of factors.
const UNSUPPORTED: [&str; 14] = [
    "bias",
    "lora_bias",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "ensure_weight_tying",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Initial factors that leave the model's own matrices as they are; others are trained with changed ones.
const INITIAL: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Ranks and scales of an `adapter_config.json`.
struct PeftConfig<'a> {
    fields: Fields<'a>,
    rank: usize,
    alpha: f64,
    /// The scale is alpha over the root of the rank, not over the rank.
    by_root: bool,
}

/// Opens a directory or the safetensors file in it.
pub(super) fn open_peft(path: &Path, scale: f32) -> Result<AdapterContent> {
    let file = if path.is_dir() { path.join(WEIGHTS) } else { path.to_owned() };
    if !file.is_file() {
        let remedy = "give the directory or file of a LoRA adapter in safetensors or GGUF";
        return Err(Error::model(path, format!("has no {WEIGHTS}; {remedy}")));
    }
    let config_file = file.with_file_name(CONFIG);
    if !config_file.is_file() {
        return Err(Error::model(&config_file, "is missing; copy it from the adapter's directory"));
    }
    let err = |e: &dyn std::fmt::Display| Error::model(&config_file, e);
    let map: Map<String, Value> = parse_object(map_file(&config_file)?.bytes()).map_err(|e| err(&e))?;
    let config = PeftConfig::new(&map).map_err(|e| err(&e))?;
    let source = Safetensors::open(&file)?;
    if let Some(tensor) = source.unsupported_tensors().next() {
        return Err(unsupported_type(&file, &tensor.name, &tensor.dtype));
    }
    let mut factors = Factors::new();
    for tensor in source.tensors() {
        let name = tensor.name.strip_prefix(MODEL).unwrap_or_default();
        let module = |end: &str| name.strip_suffix(end).map(|module| format!("{module}.weight"));
        // A copy of the model's own, beside factors for it.
        if name.strip_suffix(".base_layer.weight").is_some_and(|module| has_factors(&source, module)) {
            continue;
        }
        let names = [module(".lora_A.weight"), module(".lora_B.weight")];
        put_factor(&mut factors, &file, as_gguf(tensor)?, names.each_ref().map(Option::as_deref))?;
    }
    let scale_of = |name: &str, rank: usize| {
        config.scale_of(name.strip_suffix(".weight").unwrap_or(name), rank).map_err(|e| err(&e))
    };
    let pairs = pair_factors(&file, factors, scale, scale_of)?;
    Ok(AdapterContent { gguf_architecture: None, hash: source.hash_files(), pairs, file })
}

fn has_factors(source: &Safetensors, module: &str) -> bool {
    source.get(&format!("{MODEL}{module}.lora_A.weight")).is_some()
}

/// A tensor in GGUF's terms.
fn as_gguf(tensor: &Tensor) -> Result<GgufTensor> {
    let Tensor { name, dtype, shape, data, file } = tensor.clone();
    let block = dtype.block_type().ok_or_else(|| unsupported_type(&file, &name, &format!("{dtype:?}")))?;
    Ok(GgufTensor { name, block, shape, data, file })
}

fn unsupported_type(file: &Path, name: &str, dtype: &str) -> Error {
    Error::model(
        file,
        format!("tensor {name} has dtype {dtype}; supported: F32, F16, BF16; save it in one of these"),
    )
}

impl<'a> PeftConfig<'a> {
    fn new(map: &'a Map<String, Value>) -> std::result::Result<Self, ConfigError> {
        let fields = Fields(map);
        if fields.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return fields.unsupported("peft_type", &format!("\"LORA\"; {MERGE}"));
        }
        if let Some(field) = UNSUPPORTED.iter().find(|field| fields.get(field).is_some_and(is_set)) {
            return fields.unsupported(field, &format!("none; {MERGE}"));
        }
        let initial = |v: &Value| v.is_boolean() || v.as_str().is_some_and(|name| INITIAL.contains(&name));
        if !fields.get("init_lora_weights").is_none_or(initial) {
            let remedy = "save it converted to LoRA (path_initial_model_for_weight_conversion)";
            return fields
                .unsupported("init_lora_weights", &format!("true, false, {}; {remedy}", INITIAL.join(", ")));
        }
        Ok(Self {
            rank: fields.read_size("r", None, MAX_RANK)?,
            alpha: fields.read_float("lora_alpha", None)?,
            by_root: fields.read_bool("use_rslora", false)?,
            fields,
        })
    }

    /// Scale of a module whose factors have this rank.
    fn scale_of(&self, module: &str, rank: usize) -> std::result::Result<f64, ConfigError> {
        let (ranks, alphas) =
            (self.find_pattern("rank_pattern", module)?, self.find_pattern("alpha_pattern", module)?);
        let named = ranks.map_or(Some(self.rank as u64), Value::as_u64);
        if named != Some(rank as u64) {
            let field = if ranks.is_some() { "rank_pattern" } else { "r" };
            let found = ranks.map_or(self.rank.to_string(), Value::to_string);
            let supported = format!("{rank}, the rank of the factors of {module}");
            return Err(ConfigError::new(field, found, supported));
        }
        let alpha = match alphas.map(Value::as_f64) {
            None => self.alpha,
            Some(Some(alpha)) => alpha,
            Some(None) => return self.fields.unsupported("alpha_pattern", "a number for each module"),
        };
        Ok(alpha / if self.by_root { (rank as f64).sqrt() } else { rank as f64 })
    }

    /// The value of the first key that names the module, or the end of its path.
    fn find_pattern(&self, field: &str, module: &str) -> std::result::Result<Option<&Value>, ConfigError> {
        let Some(patterns) = self.fields.get(field) else { return Ok(None) };
        let supported = "an object whose keys are names of modules, without regular expressions";
        let Some(patterns) = patterns.as_object() else { return self.fields.unsupported(field, supported) };
        for (key, value) in patterns {
            let (name, whole) = key.strip_prefix('^').map_or((key.as_str(), false), |name| (name, true));
            if name.chars().any(|c| !c.is_alphanumeric() && !"._-".contains(c)) {
                return Err(ConfigError::new(field, key, supported));
            }
            let rest = module.strip_suffix(name);
            if rest.is_some_and(|rest| rest.is_empty() || !whole && rest.ends_with('.')) {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

/// True unless the value says that nothing is to be done.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Bool(on) => *on,
        Value::String(name) => name != "none",
        Value::Array(all) => !all.is_empty(),
        Value::Object(all) => !all.is_empty(),
        _ => true,
    }
}
