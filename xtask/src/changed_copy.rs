//! Copies of models with changed weights, for tests of what a model's numbers can be like.

use crate::error::{AtPath, Error, Result};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Files that are copied as they are, if they are there.
const OTHERS: [&str; 4] =
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];

/// Copies the model in `model` to `dir` with changed bf16 tensors. `change` gets the name and the values of each of
/// them, in no particular order, and returns true if it changed some. Returns false, and writes nothing, if nothing was
/// changed or the model has no `model.safetensors`.
pub fn write_changed_copy(
    model: &Path,
    dir: &Path,
    mut change: impl FnMut(&str, &mut [[u8; 2]]) -> bool,
) -> Result<bool> {
    let file = model.join("model.safetensors");
    let Ok(mut bytes) = fs::read(&file) else { return Ok(false) };
    let damaged = || Error::at(&file, "is not a safetensors file");
    let length = u64::from_le_bytes(*bytes.first_chunk().ok_or_else(damaged)?) as usize;
    let data = 8 + length;
    let header: Value =
        serde_json::from_slice(bytes.get(8..data).ok_or_else(damaged)?).map_err(|_| damaged())?;
    let mut changed = false;
    for (name, entry) in header.as_object().ok_or_else(damaged)? {
        if entry["dtype"] == "BF16" {
            let at = |i: usize| entry["data_offsets"][i].as_u64().map(|n| data + n as usize);
            let range = at(0).ok_or_else(damaged)?..at(1).ok_or_else(damaged)?;
            changed |= change(name, bytes.get_mut(range).ok_or_else(damaged)?.as_chunks_mut().0);
        }
    }
    if changed {
        // Another header makes another fingerprint, which is computed from the header and only samples of the weights.
        bytes.splice(data..data, *b"        ");
        bytes[..8].copy_from_slice(&(length as u64 + 8).to_le_bytes());
        fs::create_dir_all(dir).at(dir)?;
        for name in OTHERS.into_iter().filter(|name| model.join(name).is_file()) {
            fs::copy(model.join(name), dir.join(name)).at(&model.join(name))?;
        }
        let copy = dir.join("model.safetensors");
        fs::write(&copy, bytes).at(&copy)?;
    }
    Ok(changed)
}

/// Value of a bf16.
pub fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Upper half of a float: a bf16, rounded towards zero.
pub fn to_bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}
