//! `GET /metrics`: Prometheus's text.

use super::state::ServerModel;
use crate::run::generate::scheduler::{BOUNDS, Histogram, SchedulerStats};
use std::fmt::Write;

/// Name, description, and value of a metric.
type Metric<T> = (&'static str, &'static str, fn(&SchedulerStats) -> T);

/// Name, description, and distribution of a time.
type TimeMetric = (&'static str, &'static str, fn(&SchedulerStats) -> &Histogram);

/// Metrics in vLLM's names, which routers read. They are labelled with the model's name.
const GAUGES: [Metric<f64>; 5] = [
    ("vllm:num_requests_running", "Requests that run", |n| n.running() as f64),
    ("vllm:num_requests_waiting", "Requests that wait for a slot", |n| n.waiting as f64),
    ("vllm:kv_cache_usage_perc", "Part of all rows that is filled, 1 is all", SchedulerStats::filled),
    ("vllm:gpu_cache_usage_perc", "Part of all rows that is filled, 1 is all", SchedulerStats::filled),
    ("antigravity:prefix_cache_bytes", "Rows kept of texts that have ended", |n| n.kept as f64),
];
const COUNTERS: [Metric<u64>; 7] = [
    ("vllm:gpu_prefix_cache_queries_total", "Tokens of prompts, looked for in the cache", |n| {
        n.prompt_tokens
    }),
    ("vllm:gpu_prefix_cache_hits_total", "Tokens of prompts, found in the cache", |n| n.cached_tokens),
    ("vllm:prefix_cache_queries_total", "Tokens of prompts, looked for in the cache", |n| n.prompt_tokens),
    ("vllm:prefix_cache_hits_total", "Tokens of prompts, found in the cache", |n| n.cached_tokens),
    ("vllm:prompt_tokens_total", "Tokens of prompts", |n| n.prompt_tokens),
    ("vllm:generation_tokens_total", "Tokens generated", |n| n.generated_tokens),
    ("vllm:request_success_total", "Texts that have ended", |n| n.ended),
];
const HISTOGRAMS: [TimeMetric; 4] = [
    ("vllm:time_to_first_token_seconds", "From arrival to the first token", |n| &n.first),
    ("vllm:time_per_output_token_seconds", "Between two tokens of a text", |n| &n.between),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a text", |n| &n.between),
    ("vllm:e2e_request_latency_seconds", "From arrival to the end", |n| &n.whole),
];

/// Metrics in llama.cpp's names, without labels as it writes them. Those that end with `_total` or `_max` are counters.
const LLAMA_CPP_METRICS: [Metric<f64>; 16] = [
    ("prompt_tokens_total", "Tokens of prompts that were computed", |n| {
        (n.prompt_tokens - n.cached_tokens) as f64
    }),
    ("prompt_tokens_cached_total", "Tokens of prompts that were copied", |n| n.cached_tokens as f64),
    ("prompt_seconds_total", "From arrivals to first tokens", |n| n.first.sum),
    ("tokens_predicted_total", "Tokens generated", |n| n.generated_tokens as f64),
    ("tokens_predicted_seconds_total", "Between tokens", |n| n.between.sum),
    ("predicted_tokens_seconds", "Tokens of one text in a second", |n| {
        per_second(n.between.count, &n.between)
    }),
    ("prompt_tokens_seconds", "Tokens of one prompt in a second, waiting included", |n| {
        per_second(n.prompt_tokens, &n.first)
    }),
    ("requests_processing", "Requests that run", |n| n.running() as f64),
    ("requests_deferred", "Requests that wait for a slot", |n| n.waiting as f64),
    ("n_decode_total", "Passes", |n| n.passes as f64),
    ("n_busy_slots_per_decode", "Texts of a pass", |n| n.busy as f64 / n.passes.max(1) as f64),
    ("n_tokens_max", "Tokens of the longest text", |n| n.longest as f64),
    ("spec_decode_num_drafts_total", "Passes with drafts", |n| n.drafts.passes as f64),
    ("spec_decode_num_draft_tokens_total", "Tokens that were drafted", |n| n.drafts.drafted as f64),
    ("spec_decode_num_accepted_tokens_total", "Drafted tokens that were chosen", |n| {
        n.drafts.accepted as f64
    }),
    ("kv_cache_usage_ratio", "Part of all rows that is filled", SchedulerStats::filled),
];

/// Events per second of what a histogram has timed.
fn per_second(count: u64, of: &Histogram) -> f64 {
    if of.sum > 0.0 { count as f64 / of.sum } else { 0.0 }
}

/// All metrics.
pub fn render_metrics(model: &ServerModel) -> String {
    let numbers = model.scheduler.stats();
    let name = model.name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut page = Page { label: format!("model_name=\"{name}\""), text: String::new() };
    for (name, help, value) in GAUGES {
        page.write_labelled(name, (help, "gauge"), value(&numbers));
    }
    for (name, help, value) in COUNTERS {
        page.write_labelled(name, (help, "counter"), value(&numbers));
    }
    for (name, help, value) in HISTOGRAMS {
        page.write_histogram(name, help, value(&numbers));
    }
    page.write_cache_config(model);
    for (name, help, value) in LLAMA_CPP_METRICS {
        let is_counter = name.ends_with("_total") || name.ends_with("_max");
        let name = format!("llamacpp:{name}");
        page.write_head(&name, (help, if is_counter { "counter" } else { "gauge" }));
        let _ = writeln!(page.text, "{name} {}", value(&numbers));
    }
    page.text
}

/// Prometheus's text.
struct Page {
    /// The model's name, as all labelled metrics have it.
    label: String,
    text: String,
}

impl Page {
    fn write_head(&mut self, name: &str, (help, kind): (&str, &str)) {
        let _ = writeln!(self.text, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    }

    fn write_labelled(&mut self, name: &str, about: (&str, &str), value: impl std::fmt::Display) {
        self.write_head(name, about);
        let _ = writeln!(self.text, "{name}{{{}}} {value}", self.label);
    }

    fn write_histogram(&mut self, name: &str, help: &str, of: &Histogram) {
        self.write_head(name, (help, "histogram"));
        let Self { label, text } = self;
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(of.counts) {
            below += count;
            let _ = writeln!(text, "{name}_bucket{{{label},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(text, "{name}_bucket{{{label},le=\"+Inf\"}} {}", of.count);
        let _ = writeln!(text, "{name}_sum{{{label}}} {}\n{name}_count{{{label}}} {}", of.sum, of.count);
    }

    fn write_cache_config(&mut self, model: &ServerModel) {
        let (name, o) = ("vllm:cache_config_info", model.engine.options());
        self.write_head(name, ("The cache", "gauge"));
        let (blocks, kv_types, caches) = (o.batch * o.max_seq_len, o.kv_types, o.prefix_cache > 0);
        let _ = writeln!(
            self.text,
            "{name}{{{},block_size=\"1\",num_gpu_blocks=\"{blocks}\",cache_dtype=\"{kv_types}\",\
             enable_prefix_caching=\"{caches}\"}} 1",
            self.label,
        );
    }
}
