//! Fields of other servers that change a text or what is said of it, and that this one does not follow: each is refused,
//! unless its value is one that changes nothing. What only hints, such as `service_tier` or `thinking`, is not here.

use super::error::{ApiError, ApiResult};
use serde_json::Value;

/// Kind of a request, as far as its parameters are read differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Goes on until the model ends it.
    Chat,
    Completion,
    /// Goes on too, and biases may name texts.
    LlamaCppCompletion,
}

/// Fields of every kind of request, with the values that change nothing, as JSON.
const FIELDS: &[(&str, &str)] = &[
    // OpenAI's.
    ("audio", ""),
    ("background", "false"),
    ("function_call", "\"none\" \"auto\""),
    ("functions", "[]"),
    ("modalities", "[\"text\"]"),
    ("suffix", "\"\""),
    // vLLM's.
    ("allowed_token_ids", ""),
    ("chat_template", ""),
    ("documents", "[]"),
    ("guided_whitespace_pattern", ""),
    ("include_stop_str_in_output", "false"),
    ("length_penalty", "1"),
    ("logits_processors", "[]"),
    ("prompt_logprobs", ""),
    ("return_token_ids", "false"),
    ("return_tokens_as_token_ids", "false"),
    ("skip_special_tokens", "true"),
    ("thinking_token_budget", ""),
    ("truncate_prompt_tokens", ""),
    ("use_beam_search", "false"),
    ("vllm_xargs", "{}"),
    // llama.cpp's.
    ("adaptive_target", "-1"),
    ("dynatemp_range", "0"),
    ("grammar_lazy", "false"),
    ("image_data", "[]"),
    ("lora", "[]"),
    ("min_keep", "0"),
    ("mirostat", "0"),
    ("n_indent", "0"),
    ("parse_tool_calls", "true"),
    ("post_sampling_probs", "false"),
    ("reasoning_budget", "-1"),
    ("reasoning_format", "\"auto\" \"deepseek\""),
    ("t_max_predict_ms", "0 -1"),
    ("tfs_z", "1"),
    ("thinking_budget_tokens", "-1"),
    ("top_n_sigma", "-1 0"),
    // Of others: SGLang, OpenRouter, text-generation-webui.
    ("ebnf", "\"\""),
    ("guidance_scale", "1"),
    ("mirostat_mode", "0"),
    ("negative_prompt", "\"\""),
    ("no_repeat_ngram_size", "0"),
    ("stop_regex", "\"\" []"),
    ("top_a", "0"),
];

/// llama.cpp's order of stages, which may be named. Ours is the specification's.
const SAMPLERS: [&str; 9] =
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// Fields that some kinds of requests follow, with the values that change nothing for the others.
fn fields_of_kind(kind: RequestKind) -> &'static [(&'static str, &'static str)] {
    match kind {
        RequestKind::Chat => &[("add_special_tokens", "false"), ("echo", "false")],
        RequestKind::Completion => &[("add_special_tokens", "true")],
        RequestKind::LlamaCppCompletion => &[("add_special_tokens", "true"), ("echo", "false")],
    }
}

/// Refuses fields that would not be followed.
pub fn check_fields(body: &Value, kind: RequestKind) -> ApiResult<()> {
    for (field, neutral) in FIELDS.iter().chain(fields_of_kind(kind)) {
        let Some(value) = body.get(field).filter(|value| !value.is_null()) else { continue };
        if !neutral.split(' ').any(|text| is_json(value, text)) {
            return Err(ApiError::for_field(*field, remedy(neutral)));
        }
    }
    Ok(())
}

/// Refuses another order of the sampler's stages.
pub fn check_samplers(samplers: &[String]) -> ApiResult<()> {
    let own = SAMPLERS.iter().filter(|name| samplers.iter().any(|of| of == *name));
    if samplers.iter().eq(own) && samplers.iter().any(|name| name == "temperature") {
        return Ok(());
    }
    let why = "the order of the stages cannot be changed here; leave it out, and turn stages off by their own fields";
    Err(ApiError::for_field("samplers", why))
}

fn remedy(neutral: &str) -> String {
    match neutral {
        "" => "is not followed by this server; leave it out".to_owned(),
        all => {
            let all = all.split(' ').collect::<Vec<_>>().join(" or ");
            format!("is not followed by this server; leave it out, or use {all}")
        }
    }
}

/// Whether a value is this JSON; 0.0 is 0.
fn is_json(value: &Value, json: &str) -> bool {
    let Ok(wanted) = serde_json::from_str::<Value>(json) else { return false };
    *value == wanted || value.as_f64().is_some_and(|number| Some(number) == wanted.as_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        for (field, neutral) in FIELDS {
            assert!(
                neutral.split(' ').all(|text| text.is_empty() || serde_json::from_str::<Value>(text).is_ok()),
                "{field}"
            );
        }
    }
}
