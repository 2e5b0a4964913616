//! `GET /metrics`: metrics in Prometheus's text format.

use super::state::ServerModel;
use crate::run::generate::scheduler::{BOUNDS, Histogram, SchedulerStats};
use std::fmt::Write;

/// Name, description, and value of a metric. Names that end in `_total` or `_max` are counters, others gauges.
type Metric = (&'static str, &'static str, fn(&SchedulerStats) -> f64);

/// Metrics that routers read, labelled with the model's name as vLLM does.
const VLLM_METRICS: [Metric; 12] = [
    ("vllm:num_requests_running", "Running requests", |n| n.count_running() as f64),
    ("vllm:num_requests_waiting", "Requests waiting for a slot", |n| n.waiting as f64),
    ("vllm:kv_cache_usage_perc", "KV cache usage (0 to 1)", SchedulerStats::filled_fraction),
    ("vllm:gpu_cache_usage_perc", "KV cache usage (0 to 1)", SchedulerStats::filled_fraction),
    ("antigravity:prefix_cache_bytes", "Size of the prefix cache", |n| n.prefix_cache_bytes as f64),
    ("vllm:gpu_prefix_cache_queries_total", "Prompt tokens looked up", |n| n.prompt_tokens as f64),
    ("vllm:gpu_prefix_cache_hits_total", "Prompt tokens found", |n| n.cached_tokens as f64),
    ("vllm:prefix_cache_queries_total", "Prompt tokens looked up", |n| n.prompt_tokens as f64),
    ("vllm:prefix_cache_hits_total", "Prompt tokens found", |n| n.cached_tokens as f64),
    ("vllm:prompt_tokens_total", "Prompt tokens", |n| n.prompt_tokens as f64),
    ("vllm:generation_tokens_total", "Generated tokens", |n| n.generated_tokens as f64),
    ("vllm:request_success_total", "Finished texts", |n| n.ended as f64),
];

/// Name, description, and values of a histogram.
type HistogramMetric = (&'static str, &'static str, fn(&SchedulerStats) -> &Histogram);

const HISTOGRAMS: [HistogramMetric; 4] = [
    ("vllm:time_to_first_token_seconds", "Time to first token, including queueing", |n| &n.time_to_first),
    ("vllm:time_per_output_token_seconds", "Time between two tokens of a text", |n| &n.time_between_tokens),
    ("vllm:inter_token_latency_seconds", "Time between two tokens of a text", |n| &n.time_between_tokens),
    ("vllm:e2e_request_latency_seconds", "Time from arrival to the last token", |n| &n.total_time),
];

/// Metrics of llama.cpp's server, without labels.
const LLAMA_CPP_METRICS: [Metric; 16] = [
    ("prompt_tokens_total", "Prompt tokens processed", |n| (n.prompt_tokens - n.cached_tokens) as f64),
    ("prompt_tokens_cached_total", "Prompt tokens from the cache", |n| n.cached_tokens as f64),
    ("prompt_seconds_total", "Time to first tokens", |n| n.time_to_first.sum),
    ("tokens_predicted_total", "Generated tokens", |n| n.generated_tokens as f64),
    ("tokens_predicted_seconds_total", "Time between tokens", |n| n.time_between_tokens.sum),
    ("predicted_tokens_seconds", "Generation speed of one text, in tokens/s", |n| {
        per_second(n.time_between_tokens.count, &n.time_between_tokens)
    }),
    ("prompt_tokens_seconds", "Prompt processing speed with queueing, in tokens/s", |n| {
        per_second(n.prompt_tokens, &n.time_to_first)
    }),
    ("requests_processing", "Running requests", |n| n.count_running() as f64),
    ("requests_deferred", "Requests waiting for a slot", |n| n.waiting as f64),
    ("n_decode_total", "Forward passes", |n| n.passes as f64),
    ("n_busy_slots_per_decode", "Texts per pass", |n| n.slot_passes as f64 / n.passes.max(1) as f64),
    ("n_tokens_max", "Length of the longest text in tokens", |n| n.longest as f64),
    ("spec_decode_num_drafts_total", "Passes with drafts", |n| n.drafts.passes as f64),
    ("spec_decode_num_draft_tokens_total", "Draft tokens", |n| n.drafts.drafted as f64),
    ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens", |n| n.drafts.accepted as f64),
    ("kv_cache_usage_ratio", "KV cache usage (0 to 1)", SchedulerStats::filled_fraction),
];

/// Events per second of a histogram's total time.
fn per_second(count: u64, times: &Histogram) -> f64 {
    if times.sum > 0.0 { count as f64 / times.sum } else { 0.0 }
}

/// Renders all metrics.
pub fn render_metrics(model: &ServerModel) -> String {
    let stats = model.scheduler.stats();
    let name = model.name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut page = MetricsText { label: format!("model_name=\"{name}\""), text: String::new() };
    for (name, help, value) in VLLM_METRICS {
        page.write_head(name, help, metric_kind(name));
        let _ = writeln!(page.text, "{name}{{{}}} {}", page.label, value(&stats));
    }
    for (name, help, values) in HISTOGRAMS {
        page.write_histogram(name, help, values(&stats));
    }
    page.write_cache_config(model);
    for (name, help, value) in LLAMA_CPP_METRICS {
        let name = format!("llamacpp:{name}");
        page.write_head(&name, help, metric_kind(&name));
        let _ = writeln!(page.text, "{name} {}", value(&stats));
    }
    page.text
}

fn metric_kind(name: &str) -> &'static str {
    if name.ends_with("_total") || name.ends_with("_max") { "counter" } else { "gauge" }
}

/// Metrics text.
struct MetricsText {
    /// Label with the model's name.
    label: String,
    text: String,
}

impl MetricsText {
    fn write_head(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    }

    fn write_histogram(&mut self, name: &str, help: &str, values: &Histogram) {
        self.write_head(name, help, "histogram");
        let Self { label, text } = self;
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(values.counts) {
            below += count;
            let _ = writeln!(text, "{name}_bucket{{{label},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(text, "{name}_bucket{{{label},le=\"+Inf\"}} {}", values.count);
        let Histogram { sum, count, .. } = values;
        let _ = writeln!(text, "{name}_sum{{{label}}} {sum}\n{name}_count{{{label}}} {count}");
    }

    fn write_cache_config(&mut self, model: &ServerModel) {
        let (name, o) = ("vllm:cache_config_info", model.engine.options());
        self.write_head(name, "KV cache configuration", "gauge");
        let (blocks, kv_types, caches) = (o.batch * o.max_seq_len, o.kv_types, o.prefix_cache > 0);
        let _ = writeln!(
            self.text,
            "{name}{{{},block_size=\"1\",num_gpu_blocks=\"{blocks}\",cache_dtype=\"{kv_types}\",\
             enable_prefix_caching=\"{caches}\"}} 1",
            self.label,
        );
    }
}
