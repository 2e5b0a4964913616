//! Begin-of-text and end-of-text tokens, from the settings files beside `tokenizer.json`.

use super::Tokenizer;
use super::files::{format_json_value, read_settings};
use crate::{Error, Result};
use files::model_dir::ModelDir;
use serde_json::{Map, Value};

/// The begin-of-text and end-of-text tokens.
#[derive(Debug, Default, PartialEq)]
pub(super) struct BoundaryTokens {
    /// `bos_token` of tokenizer_config.json: `None` if missing, `Some(None)` if explicitly none.
    pub bos: Option<Option<u32>>,
    /// `add_bos_token` of tokenizer_config.json.
    pub add_bos: bool,
    /// Every end-of-text id, each once.
    pub eos: Vec<u32>,
}

/// Reads the settings files in `folder`, all of them optional, for a tokenizer with ids below `limit`.
pub(super) fn load_boundary_tokens(
    folder: &ModelDir,
    limit: usize,
    tokenizer: &Tokenizer,
) -> Result<BoundaryTokens> {
    let mut settings = BoundaryTokens::default();
    for name in ["generation_config.json", "config.json"] {
        if let Some(map) = read_settings(folder, name)? {
            read_eos_ids(&map, limit, &mut settings.eos)
                .map_err(|why| Error::model(&folder.path(name), why))?;
        }
    }
    let name = "tokenizer_config.json";
    if let Some(map) = read_settings(folder, name)? {
        read_tokenizer_config(&map, tokenizer, &mut settings)
            .map_err(|why| Error::model(&folder.path(name), why))?;
    }
    let mut seen = std::collections::HashSet::new();
    settings.eos.retain(|id| seen.insert(*id));
    Ok(settings)
}

fn read_eos_ids(
    map: &Map<String, Value>,
    limit: usize,
    eos: &mut Vec<u32>,
) -> std::result::Result<(), String> {
    let field = map.get("eos_token_id").unwrap_or(&Value::Null);
    let ids = match field {
        Value::Null => &[],
        Value::Array(ids) => ids.as_slice(),
        one => std::slice::from_ref(one),
    };
    for id in ids {
        match id.as_u64().filter(|&n| n < limit as u64) {
            Some(n) => eos.push(n as u32),
            None => {
                return Err(format!(
                    "field `eos_token_id` is {}; supported: an id below {limit}, a list of ids, or null",
                    format_json_value(field)
                ));
            }
        }
    }
    Ok(())
}

fn read_tokenizer_config(
    map: &Map<String, Value>,
    tokenizer: &Tokenizer,
    settings: &mut BoundaryTokens,
) -> std::result::Result<(), String> {
    let lookup = |token: &str| tokenizer.token_to_id(token);
    let text = |name: &str| token_text(name, map.get(name).unwrap_or(&Value::Null));
    if map.contains_key("bos_token") {
        settings.bos = Some(text("bos_token")?.and_then(lookup));
    }
    settings.add_bos = match map.get("add_bos_token") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(add)) => *add,
        Some(other) => {
            return Err(format!(
                "field `add_bos_token` is {}; supported: true or false",
                format_json_value(other)
            ));
        }
    };
    if settings.add_bos && settings.bos.is_none_or(|id| id.is_none()) {
        let bos = map.get("bos_token").map_or("missing".into(), format_json_value);
        return Err(format!(
            "field `add_bos_token` is true, but `bos_token` is {bos}, not a token of tokenizer.json"
        ));
    }
    if let Some(eos) = text("eos_token")? {
        let missing = || {
            format!("field `eos_token` is {}, not a token of tokenizer.json", format_json_value(&eos.into()))
        };
        settings.eos.push(lookup(eos).ok_or_else(missing)?);
    }
    // A padding token that is a control token only comes after the end. Qwen's chat models pad with the token that
    // ends a document, and name only the one that ends a turn as `eos_token`.
    if let Some(pad) = text("pad_token")?.filter(|&pad| text("unk_token").ok().flatten() != Some(pad)) {
        settings.eos.extend(lookup(pad).filter(|&id| tokenizer.is_special(id)));
    }
    Ok(())
}

/// Reads a token, written as its text or as an object with `content`.
fn token_text<'a>(name: &str, field: &'a Value) -> std::result::Result<Option<&'a str>, String> {
    match field {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text)),
        Value::Object(map) if map.get("content").is_some_and(Value::is_string) => Ok(map["content"].as_str()),
        _ => {
            Err(format!("field `{name}` is {}; supported: a token's text or null", format_json_value(field)))
        }
    }
}
