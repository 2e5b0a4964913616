//! Fields of other servers that would change a response but are not supported: they are refused unless their value
//! changes nothing. Mere hints, such as `service_tier` or `thinking`, are ignored and not listed.

use super::body::find_value;
use super::error::{ApiError, ApiResult};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// Kind of a request; some parameters depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// No token limit by default.
    Chat,
    Completion,
    /// No token limit by default; biases and prompts may mix ids and text.
    LlamaCppCompletion,
    /// Generates nothing, so that none of the fields matters.
    Rerank,
}

/// Field paths of OpenAI, vLLM, llama.cpp, SGLang, OpenRouter and text-generation-webui, each with the values that
/// change nothing.
static FIELDS: LazyLock<Map<String, Value>> =
    LazyLock::new(|| serde_json::from_str(include_str!("unsupported.json")).unwrap_or_default());

/// llama.cpp's sampler order, the only one accepted. The specification of this engine defines the actual order.
const SAMPLERS: [&str; 9] =
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// Refuses unsupported fields.
pub fn check_fields(body: &Value, kind: RequestKind) -> ApiResult<()> {
    // Fields that are supported only by other kinds of requests.
    let of_kind = match kind {
        RequestKind::Chat => json!({"add_special_tokens": [false], "echo": [false]}),
        RequestKind::Completion => json!({"add_special_tokens": [true]}),
        RequestKind::LlamaCppCompletion => json!({"add_special_tokens": [true], "echo": [false]}),
        RequestKind::Rerank => return Ok(()),
    };
    for (field, neutral) in FIELDS.iter().chain(of_kind.as_object().into_iter().flatten()) {
        let Some(value) = find_value(body, field) else { continue };
        let neutral = neutral.as_array().map_or(&[][..], Vec::as_slice);
        // 0.0 equals 0.
        let is_same = |n: &Value| value == n || value.is_number() && value.as_f64() == n.as_f64();
        if value.is_null() || neutral.iter().any(is_same) {
            continue;
        }
        let values: Vec<_> = neutral.iter().map(Value::to_string).collect();
        let or_use = if values.is_empty() { "" } else { &format!(", or use {}", values.join(" or ")) };
        let why = format!("is not supported; omit it{or_use}");
        return Err(ApiError::for_field(field, why));
    }
    Ok(())
}

/// Refuses any other sampler order.
pub fn check_samplers(samplers: &[String]) -> ApiResult<()> {
    let own = SAMPLERS.iter().filter(|name| samplers.iter().any(|given| given == *name));
    if samplers.iter().eq(own) && samplers.iter().any(|name| name == "temperature") {
        return Ok(());
    }
    let why = "the order of samplers cannot be changed; omit it, and turn samplers off by their own fields";
    Err(ApiError::for_field("samplers", why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_nothing_is_taken_and_the_rest_is_refused_by_its_name() {
        for (body, refused) in [
            (json!({"mirostat": 0.0, "suffix": "", "lora": [], "echo": false, "audio": null}), None),
            (
                json!({"reasoning_effort": "low", "service_tier": "auto", "thinking": {"type": "enabled"}}),
                None,
            ),
            (json!({"mirostat": 2}), Some("mirostat")),
            (json!({"audio": {"voice": "x"}}), Some("audio")),
            (json!({"echo": true}), Some("echo")),
            (json!({"top_n_sigma": 1.5}), Some("top_n_sigma")),
            (json!({"suffix": "x"}), Some("suffix")),
            (
                json!({"structured_outputs": {"structural_tag": "x"}}),
                Some("structured_outputs.structural_tag"),
            ),
        ] {
            let said = check_fields(&body, RequestKind::Chat).err();
            assert_eq!(said.as_ref().and_then(|e| e.param.as_deref()), refused, "{body}: {said:?}");
        }
        for (samplers, taken) in [
            (&SAMPLERS[..], true),
            (&["top_k", "temperature"], true),
            (&["temperature", "top_k"], false),
            (&["top_k"], false),
        ] {
            let samplers: Vec<_> = samplers.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(check_samplers(&samplers).is_ok(), taken, "{samplers:?}");
        }
        assert!(FIELDS.len() > 40 && FIELDS.values().all(Value::is_array));
    }
}
