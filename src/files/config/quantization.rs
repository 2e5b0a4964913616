//! The object `quantization_config` of a `config.json`: how a checkpoint's matrices were quantised.
//!
//! Bits, groups and zero points follow from the tensors themselves; which of them are quantised, too. The config says
//! how the tensors are to be read.

use super::fields::{ConfigError, Fields};
use crate::text_file::{parse_config_json, strip_bom};
use serde_json::{Map, Value};

pub(super) const FIELD: &str = "quantization_config";

/// Storage of a checkpoint's quantised matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantMethod {
    /// FP8 with a scale for the tensor, or for blocks of `[rows, columns]`.
    Fp8 { block: Option<[usize; 2]> },
    /// Integers, FP8 or FP4, packed along rows, as the library compressed-tensors stores them.
    CompressedTensors { block: Option<[usize; 2]> },
    /// Integers packed along columns.
    Gptq {
        /// Added to every zero point.
        zero_offset: u32,
    },
    /// Four-bit integers of each column packed along rows, in an order of their own.
    Awq,
}

/// Formats of `compressed-tensors`.
const FORMATS: [&str; 8] = [
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
];

impl QuantMethod {
    /// Reads the text of a `config.json`, also of a multimodal model; `None` if nothing is quantised.
    ///
    /// # Errors
    ///
    /// A field is wrong or not supported.
    pub fn parse(json: &str) -> Result<Option<Self>, ConfigError> {
        let parsed = parse_config_json(strip_bom(json).as_bytes());
        let Ok(Value::Object(map)) = parsed else { return Ok(None) };
        match (Self::read(&Fields(&map))?, map.get("text_config")) {
            (None, Some(Value::Object(text))) => Self::read(&Fields(text)),
            (found, _) => Ok(found),
        }
    }

    pub(super) fn read(f: &Fields<'_>) -> Result<Option<Self>, ConfigError> {
        match f.get(FIELD) {
            None => Ok(None),
            // Of experts, whose tensors have names of their own.
            Some(found)
                if found["quant_method"] == "mxfp4"
                    && f.get("model_type").is_some_and(|t| t == "gpt_oss") =>
            {
                Ok(None)
            }
            Some(Value::Object(map)) => in_object(FIELD, map, Self::read_object).map(Some),
            Some(_) => f.unsupported(FIELD, "an object"),
        }
    }

    fn read_object(f: &Fields<'_>) -> Result<Self, ConfigError> {
        match f.get("quant_method").and_then(Value::as_str) {
            Some("fp8") => Ok(Self::Fp8 { block: read_block(f, "weight_block_size")? }),
            Some("compressed-tensors") => read_compressed_tensors(f),
            Some("gptq") => {
                check_bits(f, "bits")?;
                check_word(f, "is_marlin_format", &["false"])?;
                check_word(f, "checkpoint_format", &["gptq", "gptq_v2"])?;
                let is_second = f.get("checkpoint_format").is_some_and(|format| format == "gptq_v2");
                Ok(Self::Gptq { zero_offset: u32::from(!is_second) })
            }
            Some("awq") => {
                check_word(f, "bits", &["4"])?;
                check_word(f, "version", &["gemm", "GEMM"])?;
                check_word(f, "backend", &["autoawq"])?;
                Ok(Self::Awq)
            }
            _ => f.unsupported(
                "quant_method",
                "\"fp8\", \"compressed-tensors\", \"gptq\", \"awq\"; or take the model's unquantised \
                 checkpoint or a GGUF file",
            ),
        }
    }
}

fn read_compressed_tensors(f: &Fields<'_>) -> Result<QuantMethod, ConfigError> {
    check_word(f, "format", &FORMATS)?;
    let mut block = None;
    let groups = f.get("config_groups").and_then(Value::as_object);
    for (name, group) in groups.into_iter().flatten() {
        let Value::Object(group) = group else { continue };
        in_object(&format!("config_groups.{name}"), group, |group| {
            check_word(group, "format", &FORMATS)?;
            let Some(Value::Object(weights)) = group.get("weights") else { return Ok(()) };
            in_object("weights", weights, |weights| {
                check_bits(weights, "num_bits")?;
                check_word(weights, "type", &["int", "float"])?;
                let found = read_block(weights, "block_structure")?;
                if found.is_some() && block.is_some() && block != found {
                    return weights.unsupported("block_structure", "the same in all groups");
                }
                block = found.or(block);
                Ok(())
            })
        })?;
    }
    for (object, field, supported) in
        [("sparsity_config", "format", "dense"), ("transform_config", "config_groups", "{}")]
    {
        if let Some(Value::Object(map)) = f.get(object) {
            in_object(object, map, |f| check_word(f, field, &[supported]))?;
        }
    }
    Ok(QuantMethod::CompressedTensors { block })
}

/// Reads an object's fields; errors name it before the field.
fn in_object<T>(
    name: &str,
    map: &Map<String, Value>,
    read: impl FnOnce(&Fields<'_>) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    read(&Fields(map)).map_err(|e| ConfigError { field: format!("{name}.{}", e.field), ..e })
}

/// Accepts 4 or 8, or no value.
fn check_bits(f: &Fields<'_>, field: &str) -> Result<(), ConfigError> {
    check_word(f, field, &["4", "8"])
}

/// Accepts a field without a value, or with one of these.
fn check_word(f: &Fields<'_>, field: &str, supported: &[&str]) -> Result<(), ConfigError> {
    let found = f.get(field).map(|value| value.as_str().map_or(value.to_string(), str::to_owned));
    match found {
        Some(found) if !supported.contains(&found.as_str()) => f.unsupported(field, &supported.join(", ")),
        _ => Ok(()),
    }
}

/// Rows and columns that share a scale.
fn read_block(f: &Fields<'_>, field: &str) -> Result<Option<[usize; 2]>, ConfigError> {
    if f.get(field).is_none() {
        return Ok(None);
    }
    let size =
        |size: &Value| size.as_u64().filter(|size| (1..=1 << 16).contains(size)).map(|size| size as usize);
    let sizes = f.read_array(field, 2, size, "two positive integers")?;
    Ok(Some([sizes[0], sizes[1]]))
}
