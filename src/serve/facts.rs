//! What the server is and does: `/v1/models`, `/props`, `/slots`, `/metrics`.

use super::hub::{Hub, Served};
use crate::dims::{LAYERS, MAX_POSITION, VOCAB};
use crate::run::generate::scheduler::{BOUNDS, Histogram, SchedulerStats};
use crate::run::options::GenerateOptions;
use serde_json::{Value, json};
use std::fmt::Write;
use text::chat::Template;

/// The one model.
pub fn model(hub: &Hub) -> Value {
    let served = hub.loaded();
    let context = served.map(|served| served.engine.options().max_seq_len);
    let meta = context.map(
        |context| json!({"n_vocab": VOCAB, "n_ctx": context, "n_ctx_train": MAX_POSITION, "n_layer": LAYERS}),
    );
    // vLLM's and OpenRouter's names, by which clients know how long a text may be.
    json!({
        "id": hub.model, "object": "model", "created": hub.created, "owned_by": "antigravity", "meta": meta,
        "max_model_len": context, "context_length": context,
    })
}

/// All models: that one.
pub fn models(hub: &Hub) -> Value {
    json!({"object": "list", "data": [model(hub)]})
}

/// A number as it was written, not as its bits are in twice as many.
pub fn short(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// What texts are generated with, in llama.cpp's names; the seed is left out.
pub fn settings(options: &GenerateOptions) -> Value {
    let s = &options.sampler;
    let most = options.max_tokens.map_or(json!(-1), Value::from);
    let bias = |&(token, bias): &(u32, f32)| json!({"token": token, "bias": short(bias)});
    json!({
        "temperature": short(s.temperature), "top_k": s.top_k, "top_p": short(s.top_p), "min_p": short(s.min_p),
        "typical_p": short(s.typical_p), "xtc_probability": short(s.xtc.probability),
        "xtc_threshold": short(s.xtc.threshold), "repeat_penalty": short(s.repetition_penalty),
        "repeat_last_n": s.repetition_window, "presence_penalty": short(s.presence_penalty),
        "frequency_penalty": short(s.frequency_penalty), "dry_multiplier": short(s.dry.multiplier),
        "dry_base": short(s.dry.base), "dry_allowed_length": s.dry.allowed_length,
        "dry_penalty_last_n": s.dry.window.map_or(json!(-1), Value::from), "dry_sequence_breakers": s.dry.breakers,
        "logit_bias": s.logit_bias.iter().map(bias).collect::<Vec<_>>(), "n_predict": most, "max_tokens": most,
        "n_probs": options.logprobs.unwrap_or(0), "stop": options.stop, "ignore_eos": options.ignore_eos,
    })
}

/// `GET /props`.
pub fn props(served: &Served) -> Value {
    let (o, options) = (served.engine.options(), &served.defaults);
    let template = match served.engine.template() {
        Ok(Template::Jinja(jinja)) => jinja.source().to_owned(),
        Ok(other) => other.name(),
        Err(_) => String::new(),
    };
    // Where it lies concerns nobody.
    let file = o.model.file_name().map_or(served.name.clone().into(), |file| file.to_string_lossy());
    let mut params = settings(options);
    params["seed"] = served.seeded.then_some(options.sampler.seed).into();
    json!({
        "default_generation_settings": {"n_ctx": o.max_seq_len, "params": params},
        "total_slots": o.batch, "model": served.name, "model_alias": served.name,
        "model_path": file, "chat_template": template,
        "bos_token": served.engine.tokenizer().bos_token(), "kv_type": o.kv_types.to_string(),
        "build_info": concat!("antigravity ", env!("CARGO_PKG_VERSION")), "system_fingerprint": served.fingerprint,
    })
}

/// `GET /slots`.
pub fn slots(served: &Served) -> Value {
    let one = |(id, slot): (usize, &crate::run::generate::scheduler::SlotStats)| {
        json!({
            "id": id, "n_ctx": slot.slots, "is_processing": slot.prompt > 0, "n_prompt_tokens": slot.prompt,
            "n_decoded": slot.generated, "n_filled": slot.filled,
        })
    };
    served.scheduler.stats().slots.iter().enumerate().map(one).collect()
}

/// `GET /metrics`: Prometheus's text.
pub fn metrics(served: &Served) -> String {
    let numbers = served.scheduler.stats();
    let o = served.engine.options();
    let mut page = Page { model: label(&served.name), text: String::new() };
    let filled = numbers.filled();
    page.gauge("vllm:num_requests_running", "Requests that run", numbers.running() as f64);
    page.gauge("vllm:num_requests_waiting", "Requests that wait for a slot", numbers.waiting as f64);
    page.gauge("vllm:kv_cache_usage_perc", "Part of all rows that is filled, 1 is all", filled);
    page.gauge("vllm:gpu_cache_usage_perc", "The same", filled);
    let hits = numbers.cached_tokens;
    for (name, what, number) in [
        (
            "gpu_prefix_cache_queries",
            "Tokens of prompts that were looked for among rows kept",
            numbers.prompt_tokens,
        ),
        ("gpu_prefix_cache_hits", "Those of them that were found", hits),
        (
            "prefix_cache_queries",
            "Tokens of prompts that were looked for among rows kept",
            numbers.prompt_tokens,
        ),
        ("prefix_cache_hits", "Those of them that were found", hits),
        ("prompt_tokens", "Tokens of prompts", numbers.prompt_tokens),
        ("generation_tokens", "Tokens generated", numbers.generated_tokens),
        ("request_success", "Texts that have ended", numbers.ended),
    ] {
        page.counter(&format!("vllm:{name}_total"), what, number);
    }
    let info = format!(
        "block_size=\"1\",num_gpu_blocks=\"{}\",cache_dtype=\"{}\",enable_prefix_caching=\"{}\"",
        o.batch * o.max_seq_len,
        o.kv_types,
        o.prefix_cache > 0
    );
    page.head("vllm:cache_config_info", "The cache", "gauge");
    let _ = writeln!(page.text, "vllm:cache_config_info{{model_name=\"{}\",{info}}} 1", page.model);
    page.histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", &numbers.first);
    page.histogram("vllm:time_per_output_token_seconds", "Between two tokens of a text", &numbers.between);
    page.histogram("vllm:inter_token_latency_seconds", "Between two tokens of a text", &numbers.between);
    page.histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", &numbers.whole);
    twins(&mut page, &numbers);
    page.text
}

/// llama.cpp's names for the common ones, as it writes them: without labels.
fn twins(page: &mut Page, numbers: &SchedulerStats) {
    let rate = |count: u64, of: &Histogram| if of.sum > 0.0 { count as f64 / of.sum } else { 0.0 };
    let computed = numbers.prompt_tokens - numbers.cached_tokens;
    let (first, between, drafts) = (&numbers.first, &numbers.between, numbers.drafts);
    for (name, what, kind, value) in [
        ("prompt_tokens_total", "Tokens of prompts that were computed", "counter", computed as f64),
        ("prompt_tokens_cached_total", "Those that were copied", "counter", numbers.cached_tokens as f64),
        ("prompt_seconds_total", "From arrivals to first tokens", "counter", first.sum),
        ("tokens_predicted_total", "Tokens generated", "counter", numbers.generated_tokens as f64),
        ("tokens_predicted_seconds_total", "Between tokens", "counter", between.sum),
        ("predicted_tokens_seconds", "Tokens of one text in a second", "gauge", rate(between.count, between)),
        (
            "prompt_tokens_seconds",
            "Tokens of one prompt in a second, waiting included",
            "gauge",
            rate(numbers.prompt_tokens, first),
        ),
        ("requests_processing", "Requests that run", "gauge", numbers.running() as f64),
        ("requests_deferred", "Requests that wait for a slot", "gauge", numbers.waiting as f64),
        ("n_decode_total", "Passes", "counter", numbers.passes as f64),
        (
            "n_busy_slots_per_decode",
            "Texts of a pass",
            "gauge",
            numbers.busy as f64 / numbers.passes.max(1) as f64,
        ),
        ("n_tokens_max", "Tokens of the longest text", "counter", numbers.longest as f64),
        ("spec_decode_num_drafts_total", "Passes with drafts", "counter", drafts.passes as f64),
        ("spec_decode_num_draft_tokens_total", "Tokens that were drafted", "counter", drafts.drafted as f64),
        (
            "spec_decode_num_accepted_tokens_total",
            "Those that were chosen",
            "counter",
            drafts.accepted as f64,
        ),
        ("kv_cache_usage_ratio", "Part of all rows that is filled", "gauge", numbers.filled()),
    ] {
        page.head(&format!("llamacpp:{name}"), what, kind);
        let _ = writeln!(page.text, "llamacpp:{name} {value}");
    }
    page.gauge("antigravity:prefix_cache_bytes", "Rows kept of texts that have ended", numbers.kept as f64);
}

/// Prometheus's text, whose labels name the model.
struct Page {
    /// As a label holds it.
    model: String,
    text: String,
}

/// A text inside of a label's quotes.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Page {
    fn head(&mut self, name: &str, what: &str, kind: &str) {
        let _ = writeln!(self.text, "# HELP {name} {what}.\n# TYPE {name} {kind}");
    }

    fn gauge(&mut self, name: &str, what: &str, value: f64) {
        self.head(name, what, "gauge");
        let _ = writeln!(self.text, "{name}{{model_name=\"{}\"}} {value}", self.model);
    }

    fn counter(&mut self, name: &str, what: &str, value: u64) {
        self.head(name, what, "counter");
        let _ = writeln!(self.text, "{name}{{model_name=\"{}\"}} {value}", self.model);
    }

    fn histogram(&mut self, name: &str, what: &str, of: &Histogram) {
        self.head(name, what, "histogram");
        let model = &self.model;
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(of.counts) {
            below += count;
            let _ = writeln!(self.text, "{name}_bucket{{model_name=\"{model}\",le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(self.text, "{name}_bucket{{model_name=\"{model}\",le=\"+Inf\"}} {}", of.count);
        let _ = writeln!(self.text, "{name}_sum{{model_name=\"{model}\"}} {}", of.sum);
        let _ = writeln!(self.text, "{name}_count{{model_name=\"{model}\"}} {}", of.count);
    }
}
