//! The record of a run: measurements and derived figures. Its JSON is the output; tables are made from it.

use super::device::DeviceFigures;
use super::limits::{MachineLimits, median};
use super::measure::Samples;
use super::rows::BenchRow;
use crate::dims;
use crate::model::device::read_bytes;
use crate::model::weights::{TensorRole, model_tensors};
use crate::run::engine::Engine;
use crate::run::system;
use serde::Serialize;
use serde_json::{Value, json};

/// All output of a run.
#[derive(Serialize)]
pub struct BenchResult {
    pub environment: Environment,
    /// Figures of the OpenCL device, if one runs the model.
    pub device: Option<DeviceFigures>,
    pub load_ms: f64,
    pub peak_rss_bytes: Option<u64>,
    #[serde(flatten)]
    pub limits: MachineLimits,
    pub rows: Vec<MeasuredRow>,
}

/// Machine, program and model.
#[derive(Serialize)]
pub struct Environment {
    pub version: &'static str,
    pub model: String,
    pub weight_type: String,
    pub cpu: String,
    pub isa: String,
    pub kernel: String,
    /// The thread counts that were measured.
    pub threads: Vec<usize>,
    pub weight_bytes_per_token: usize,
}

impl Environment {
    pub fn new(engine: &Engine, rows: &[BenchRow]) -> Self {
        let o = engine.options();
        let mut threads: Vec<usize> = rows.iter().map(|r| r.threads).collect();
        threads.sort_unstable();
        threads.dedup();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            model: dims::MODEL.into(),
            weight_type: o.weight_type.to_string(),
            cpu: system::this_cpu(),
            isa: o.isa.map_or("?", |i| i.name()).into(),
            kernel: system::kernel_name(),
            threads,
            weight_bytes_per_token: engine.weights().bytes_per_token,
        }
    }

    /// The environment as one line of text.
    pub fn summary_line(&self) -> String {
        let threads: Vec<String> = self.threads.iter().map(usize::to_string).collect();
        format!("{}, {}, threads {}, {}", self.cpu, self.isa, threads.join("/"), self.kernel)
    }
}

/// One row with its results.
#[derive(Default, Serialize)]
pub struct MeasuredRow {
    pub test: String,
    n_prompt: usize,
    n_gen: usize,
    batch: usize,
    depth: usize,
    pub kv_type: String,
    pub threads: usize,
    /// The median of the samples.
    pub tokens_per_second: f64,
    min: f64,
    max: f64,
    /// Tokens per second of each repetition.
    samples: Vec<f64>,
    /// The read bandwidth around each repetition.
    read_gb_per_s_samples: Option<Vec<f64>>,
    /// Decode: 1e9 bytes read per second.
    gb_per_s: Option<f64>,
    /// `gb_per_s` in percent of the read bandwidth with as many threads: the bandwidth around each repetition if it was
    /// measured, else that of the run.
    bandwidth_percent: Option<f64>,
    /// Prefill: 1e9 matrix-product operations per second.
    gops: Option<f64>,
    /// `gops` in percent of the integer peak with as many threads.
    peak_percent: Option<f64>,
    /// Decode at a depth above 0, if depth 0 was measured too.
    ms_per_token: Option<f64>,
    /// The time at depth 0 plus the time to read the earlier slots at the machine's read bandwidth.
    predicted_ms_per_token: Option<f64>,
    /// Measured time above the predicted one, in percent.
    deviation_percent: Option<f64>,
    /// Prefill: speed relative to decode from the same state.
    times_decode: Option<f64>,
}

/// Multiplications and additions of the matrix products for a prompt of `n` tokens. Only the last token goes through
/// the head.
fn prefill_ops(n: usize) -> f64 {
    let matrices = model_tensors().into_iter().filter(|spec| spec.role == TensorRole::Matrix);
    let macs = matrices.map(|spec| {
        let tokens = if spec.name == "lm_head.weight" { 1 } else { n };
        spec.share_of_token((spec.rows * spec.cols) as u64) as f64 * tokens as f64
    });
    2.0 * macs.sum::<f64>()
}

/// Bytes of the cache that each decoded token reads on average: the slots filled before, and those of the tokens so
/// far.
fn cache_bytes(row: &BenchRow) -> f64 {
    read_bytes(row.kv_types, row.depth as f64 + (row.n_gen as f64 + 1.0) / 2.0)
}

/// Computes the results of all rows. A decode pass reads `weight_bytes` of weights.
pub fn compute_results(
    rows: &[BenchRow],
    samples: Vec<Samples>,
    limits: &MachineLimits,
    weight_bytes: usize,
) -> Vec<MeasuredRow> {
    let speeds: Vec<(BenchRow, f64)> =
        rows.iter().zip(&samples).map(|(row, samples)| (*row, median(&samples.speeds))).collect();
    let speed_of =
        |is: &dyn Fn(&BenchRow) -> bool| speeds.iter().find(|(r, _)| is(r)).map(|(_, speed)| *speed);
    let mut results = Vec::new();
    for (row, samples) in rows.iter().zip(samples) {
        let mut result = MeasuredRow::new(row, samples, limits, weight_bytes);
        if !row.is_decode() {
            let decode = speed_of(&|r| r.is_decode() && r.shares_caches(row));
            result.times_decode = decode.map(|speed| result.tokens_per_second / speed);
        }
        let shallow = BenchRow { depth: 0, ..*row };
        let twin =
            speed_of(&|r| *r == shallow).filter(|_| row.is_decode() && row.batch == 1 && row.depth > 0);
        if let Some((speed, read)) = twin.zip(limits.read_gb_per_s(row.threads)) {
            // The row at depth 0 also reads the slots of its own tokens.
            let added = (cache_bytes(row) - cache_bytes(&shallow)) / (1e9 * read);
            let (ms, predicted) = (1e3 / result.tokens_per_second, 1e3 * (1.0 / speed + added));
            result.ms_per_token = Some(ms);
            result.predicted_ms_per_token = Some(predicted);
            result.deviation_percent = Some(100.0 * (ms / predicted - 1.0));
        }
        results.push(result);
    }
    results
}

impl MeasuredRow {
    /// A row with the figures that follow from its own samples.
    fn new(row: &BenchRow, samples: Samples, limits: &MachineLimits, weight_bytes: usize) -> Self {
        let Samples { speeds, reads } = samples;
        let speed = median(&speeds);
        let percent = |is: Option<f64>, limit: Option<f64>| Some(100.0 * is? / limit?);
        let mut result = Self {
            test: row.name(),
            n_prompt: row.n_prompt,
            n_gen: row.n_gen,
            batch: row.batch,
            depth: row.depth,
            kv_type: row.kv_types.to_string(),
            threads: row.threads,
            tokens_per_second: speed,
            min: speeds.iter().copied().fold(f64::INFINITY, f64::min),
            max: speeds.iter().copied().fold(0.0, f64::max),
            ..Self::default()
        };
        if row.is_decode() {
            // All weights once for all sequences, plus the filled slots.
            let bytes_per_token = weight_bytes as f64 / row.batch as f64 + cache_bytes(row);
            let paired = |(speed, read): (&f64, &f64)| 100.0 * speed * bytes_per_token / read;
            let paired: Vec<f64> = speeds.iter().zip(&reads).map(paired).collect();
            result.gb_per_s = Some(speed * bytes_per_token / 1e9);
            result.bandwidth_percent = match &paired[..] {
                [] => percent(result.gb_per_s, limits.read_gb_per_s(row.threads)),
                paired => Some(median(paired)),
            };
        } else {
            let prompts_per_second = speed / row.n_prompt as f64;
            result.gops = Some(prompts_per_second * prefill_ops(row.n_prompt) / 1e9);
            result.peak_percent = percent(result.gops, limits.peak_gops(row.threads));
        }
        result.samples = speeds;
        result.read_gb_per_s_samples =
            (!reads.is_empty()).then(|| reads.iter().map(|rate| rate / 1e9).collect());
        result
    }
}

impl BenchResult {
    /// The record as one object.
    pub fn to_json(&self) -> Value {
        json!(self)
    }

    /// One object per line: everything but the rows, then each row.
    pub fn json_lines(&self) -> String {
        let tagged = |tag: &str, mut value: Value| {
            value["t"] = tag.into();
            format!("{value}\n")
        };
        let mut head = self.to_json();
        head.as_object_mut().map(|head| head.shift_remove("rows"));
        let rows = self.rows.iter().map(|row| tagged("row", json!(row)));
        std::iter::once(tagged("environment", head)).chain(rows).collect()
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::limits::{IntegerPeak, ReadBandwidth};
    use super::super::rows::tests::{decode, prompt};
    use super::*;
    use crate::dims::*;

    fn limits() -> MachineLimits {
        MachineLimits {
            read_bandwidth: vec![ReadBandwidth { threads: 2, gb_per_s: 10.0, way: "w".into() }],
            integer_peak: vec![IntegerPeak { threads: 2, gops: 20.0 }],
        }
    }

    pub fn result() -> BenchResult {
        let environment = Environment {
            version: "0",
            model: "m".into(),
            weight_type: "q4_0".into(),
            cpu: "c".into(),
            isa: "scalar".into(),
            kernel: "k".into(),
            threads: vec![2],
            weight_bytes_per_token: 1000,
        };
        let rows = [prompt(4), decode(3, 0), decode(3, 8)];
        let samples = [vec![40.0, 60.0], vec![3.0, 1.0, 2.0], vec![1.0]].map(alone);
        let rows = compute_results(&rows, samples.to_vec(), &limits(), 1000);
        let (load_ms, peak_rss_bytes) = (5.0, Some(3 << 20));
        BenchResult { environment, device: None, load_ms, peak_rss_bytes, limits: limits(), rows }
    }

    /// Repetitions without a bandwidth measured beside them.
    fn alone(speeds: Vec<f64>) -> Samples {
        Samples { speeds, reads: Vec::new() }
    }

    #[test]
    fn rates_follow_from_the_speeds() {
        let layer = DIM * (Q_DIM + 2 * KV_DIM) + Q_DIM * DIM + 3 * DIM * FFN_DIM;
        assert_eq!(prefill_ops(5), 2.0 * (5 * LAYERS * layer + VOCAB * DIM) as f64);
        let result = result();
        let [prefill, shallow, deep] = &result.rows[..] else { panic!("three rows") };
        assert_eq!((prefill.tokens_per_second, prefill.min, prefill.max), (50.0, 40.0, 60.0));
        assert_eq!(prefill.times_decode, Some(25.0));
        assert_eq!(prefill.gops, Some(50.0 / 4.0 * prefill_ops(4) / 1e9));
        assert!(prefill.gb_per_s.is_none() && shallow.gops.is_none() && shallow.times_decode.is_none());
        let slot = decode(3, 0).kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as f64;
        // Three tokens read 1, 2 and 3 slots.
        assert_eq!(shallow.gb_per_s, Some(2.0 * (1000.0 + 2.0 * slot) / 1e9));
        assert_eq!(deep.gb_per_s, Some((1000.0 + 10.0 * slot) / 1e9));
        assert_eq!(shallow.bandwidth_percent.map(|p| p / 100.0 * 10.0), shallow.gb_per_s);
        assert_eq!(prefill.peak_percent, prefill.gops.map(|g| 100.0 * g / 20.0));
        assert!(shallow.peak_percent.is_none());
        assert!(prefill.ms_per_token.is_none() && shallow.ms_per_token.is_none());
        // At depth 0 a token took 500 ms.
        let predicted = 1e3 * (0.5 + 8.0 * slot / 10e9);
        assert_eq!((deep.ms_per_token, deep.predicted_ms_per_token), (Some(1000.0), Some(predicted)));
        assert_eq!(deep.deviation_percent, Some(100.0 * (1000.0 / predicted - 1.0)));
    }

    #[test]
    fn a_machine_that_slows_down_changes_no_percent() {
        // The rates measured beside the repetitions count, not the run's.
        let samples = Samples { speeds: vec![2.0, 1.0], reads: vec![8e9, 4e9] };
        let result = MeasuredRow::new(&decode(3, 0), samples, &limits(), 2_000_000_000);
        let own = result.gb_per_s.expect("decode reads") / 1.5 * 2.0 / 8.0;
        assert!((result.bandwidth_percent.expect("paired") / (100.0 * own) - 1.0).abs() < 1e-9);
        assert_eq!(json!(result)["read_gb_per_s_samples"], json!([8.0, 4.0]));
    }

    #[test]
    fn weights_are_read_once_for_all_sequences() {
        let row = BenchRow { batch: 4, ..decode(3, 0) };
        let together = MeasuredRow::new(&row, alone(vec![8.0]), &limits(), 1000);
        let slot = row.kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as f64;
        assert_eq!(together.gb_per_s, Some((2.0 * 1000.0 + 8.0 * 2.0 * slot) / 1e9));
        assert_eq!((together.n_gen, together.batch), (3, 4));
    }

    #[test]
    fn json_has_every_row() {
        let result = result();
        let all = result.to_json();
        assert_eq!(all["rows"].as_array().map(Vec::len), Some(3));
        let deep = &all["rows"][2];
        assert!(deep["test"] == "tg3 @ d8" && deep["read_gb_per_s_samples"].is_null(), "{deep}");
        assert_eq!(all["read_bandwidth"][0], json!({"threads": 2, "gb_per_s": 10.0, "way": "w"}));
        assert_eq!(all["integer_peak"][0], json!({"threads": 2, "gops": 20.0}));
        let lines = result.json_lines();
        let lines: Vec<Value> =
            lines.lines().map(|l| serde_json::from_str(l).expect("each line is JSON")).collect();
        let tags: Vec<&Value> = lines.iter().map(|l| &l["t"]).collect();
        assert_eq!(tags, ["environment", "row", "row", "row"]);
        assert!(lines[0].get("rows").is_none());
    }
}
