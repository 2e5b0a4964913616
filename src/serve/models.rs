//! `/v1/models`, `/props` and `/slots`.

use super::error::{ApiError, ApiResult};
use super::state::{ServerModel, ServerState, SlotsEndpoint};
use crate::dims::{LAYERS, MAX_POSITION, VOCAB};
use crate::run::generate::scheduler::SlotStats;
use crate::run::options::GenerateOptions;
use serde_json::{Value, json};
use text::chat::Template;

/// `GET /v1/models`.
pub fn list_models(state: &ServerState) -> Value {
    json!({"object": "list", "data": [describe_model(state)]})
}

/// `GET /v1/models/NAME`.
pub fn find_model(state: &ServerState, path: &str) -> ApiResult<Value> {
    if path.ends_with(&format!("/models/{}", state.model_name)) {
        return Ok(describe_model(state));
    }
    Err(ApiError::new(404, format!("unknown model; this server has {:?}", state.model_name)))
}

fn describe_model(state: &ServerState) -> Value {
    let context = state.loaded_model().ok().map(|model| model.engine.options().max_seq_len);
    let meta = context.map(
        |context| json!({"n_vocab": VOCAB, "n_ctx": context, "n_ctx_train": MAX_POSITION, "n_layer": LAYERS}),
    );
    // vLLM and OpenRouter report the context size under these two names.
    json!({
        "id": state.model_name, "object": "model", "created": state.start_time, "owned_by": "antigravity", "meta": meta,
        "max_model_len": context, "context_length": context,
    })
}

/// Shortest decimal of an `f32`: 0.7 instead of 0.699999988079071.
pub fn short_number(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// llama.cpp's `generation_settings`, without the seed.
pub fn generation_settings(options: &GenerateOptions) -> Value {
    let s = &options.sampler;
    let most = options.max_tokens.map_or(json!(-1), Value::from);
    let bias = |&(token, bias): &(u32, f32)| json!({"token": token, "bias": short_number(bias)});
    json!({
        "temperature": short_number(s.temperature), "top_k": s.top_k, "top_p": short_number(s.top_p),
        "min_p": short_number(s.min_p), "typical_p": short_number(s.typical_p),
        "xtc_probability": short_number(s.xtc.probability), "xtc_threshold": short_number(s.xtc.threshold),
        "repeat_penalty": short_number(s.repetition_penalty), "repeat_last_n": s.repetition_window,
        "presence_penalty": short_number(s.presence_penalty), "frequency_penalty": short_number(s.frequency_penalty),
        "dry_multiplier": short_number(s.dry.multiplier), "dry_base": short_number(s.dry.base),
        "dry_allowed_length": s.dry.allowed_length,
        "dry_penalty_last_n": s.dry.window.map_or(json!(-1), Value::from), "dry_sequence_breakers": s.dry.breakers,
        "logit_bias": s.logit_bias.iter().map(bias).collect::<Vec<_>>(), "n_predict": most, "max_tokens": most,
        "n_probs": options.logprobs.unwrap_or(0), "stop": options.stop, "ignore_eos": options.ignore_eos,
    })
}

/// `GET /props`.
pub fn describe_props(model: &ServerModel) -> Value {
    let (o, defaults) = (model.engine.options(), &model.defaults);
    let template = match model.engine.template() {
        Ok(Template::Jinja(jinja)) => jinja.source().to_owned(),
        Ok(other) => other.name(),
        Err(_) => String::new(),
    };
    // Hides the directory.
    let file = o.model.file_name().map_or(model.name.clone().into(), |file| file.to_string_lossy());
    let mut params = generation_settings(defaults);
    params["seed"] = model.has_fixed_seed.then_some(defaults.sampler.seed).into();
    json!({
        "default_generation_settings": {"n_ctx": o.max_seq_len, "params": params},
        "total_slots": o.batch, "model": model.name, "model_alias": model.name,
        "model_path": file, "chat_template": template,
        "bos_token": model.engine.tokenizer().bos_token(), "kv_type": o.kv_types.to_string(),
        "build_info": concat!("antigravity ", env!("CARGO_PKG_VERSION")), "system_fingerprint": model.fingerprint,
    })
}

/// `GET /slots`.
pub fn describe_slots(state: &ServerState) -> ApiResult<Value> {
    if state.slots_endpoint == SlotsEndpoint::Hidden {
        return Err(ApiError::new(501, "this endpoint is disabled; start the server with --slots-endpoint"));
    }
    let one = |(id, slot): (usize, &SlotStats)| {
        json!({
            "id": id, "n_ctx": slot.slots, "is_processing": slot.prompt > 0, "n_prompt_tokens": slot.prompt,
            "n_decoded": slot.generated, "n_filled": slot.filled,
        })
    };
    Ok(state.loaded_model()?.scheduler.stats().slots.iter().enumerate().map(one).collect())
}
