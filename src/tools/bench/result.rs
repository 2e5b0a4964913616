//! The record of a run: what was measured and what follows from it. Its JSON is the output; the tables are made from it.

use super::ceiling::Ceilings;
use super::device::OnDevice;
use super::growth::{self, Growth};
use super::rows::{Row, Test};
use super::spread::{Spread, Timed};
use crate::dims;
use crate::model::weights::{Role, table};
use crate::run::engine::Engine;
use crate::run::system;
use serde::Serialize;
use serde_json::{Value, json};

/// Everything that is printed.
#[derive(Serialize)]
pub struct BenchResult {
    pub environment: Environment,
    /// The OpenCL device, if one runs the model.
    pub device: Option<OnDevice>,
    pub load_ms: f64,
    pub peak_rss_bytes: Option<u64>,
    #[serde(flatten)]
    pub ceilings: Ceilings,
    pub rows: Vec<Line>,
}

/// What the measurements were made on.
#[derive(Serialize)]
pub struct Environment {
    pub version: &'static str,
    pub model: String,
    pub weight_type: String,
    pub cpu: String,
    pub isa: String,
    pub kernel: String,
    /// Every number of threads measured with.
    pub threads: Vec<usize>,
    pub weight_bytes_per_token: usize,
}

impl Environment {
    pub fn new(engine: &Engine, rows: &[Row]) -> Self {
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
            kernel: system::kernel(),
            threads,
            weight_bytes_per_token: engine.weights().bytes_per_token,
        }
    }

    /// For people.
    pub fn line(&self) -> String {
        let threads: Vec<String> = self.threads.iter().map(usize::to_string).collect();
        format!("{}, {}, threads {}, {}", self.cpu, self.isa, threads.join("/"), self.kernel)
    }
}

/// One row with its results.
#[derive(Serialize)]
pub struct Line {
    pub test: String,
    n_prompt: usize,
    n_gen: usize,
    batch: usize,
    depth: usize,
    pub kv_type: String,
    pub threads: usize,
    /// The median; [`Line::min`] and [`Line::max`] are its spread.
    pub tokens_per_second: f64,
    min: f64,
    max: f64,
    /// Tokens per second of each repetition.
    samples: Vec<f64>,
    /// The read bandwidth measured beside each repetition.
    read_gb_per_s_samples: Option<Vec<f64>>,
    /// Decode: bytes read per second, in units of 1e9.
    gb_per_s: Option<f64>,
    /// `gb_per_s` in percent of the read bandwidth with as many threads: of each repetition's own if it was measured
    /// beside them, else of the run's.
    bandwidth_percent: Option<f64>,
    /// Prefill: operations of the matrix products per second, in units of 1e9.
    gops: Option<f64>,
    /// `gops` in percent of the integer peak with as many threads.
    peak_percent: Option<f64>,
    /// Decode at some depth: what the cache cost.
    #[serde(flatten)]
    growth: Growth,
    /// Prefill: speed relative to decode from the same state.
    times_decode: Option<f64>,
    /// Speed relative to an earlier run's.
    pub ratio: Option<f64>,
}

/// Multiplications and additions of the matrix products of a prompt of `n` tokens. Only its last token goes through the
/// head.
fn prefill_ops(n: usize) -> f64 {
    let macs = |head: bool| -> f64 {
        let specs = table().into_iter().filter(|s| s.role == Role::Matrix);
        let specs = specs.filter(|s| (s.name == "lm_head.weight") == head);
        specs.map(|s| s.rows as f64 * s.cols as f64).sum()
    };
    2.0 * (macs(false) * n as f64 + macs(true))
}

/// The median over repetitions of one rate in percent of the other.
fn paired(rates: impl Iterator<Item = f64>, bests: &[f64]) -> Option<f64> {
    let percents: Vec<f64> = rates.zip(bests).map(|(rate, best)| 100.0 * rate / best).collect();
    (!percents.is_empty()).then(|| Spread::of(&percents).median)
}

/// The rows with their results. A decode pass reads `weight_bytes` of weights.
pub fn lines(rows: &[Row], timed: Vec<Timed>, ceilings: &Ceilings, weight_bytes: usize) -> Vec<Line> {
    let median = |timed: &Timed| Spread::of(&timed.speeds).median;
    let speeds: Vec<(Row, f64)> = rows.iter().copied().zip(timed.iter().map(median)).collect();
    let lines = rows.iter().zip(timed).map(|(row, timed)| {
        let mut line = Line::new(row, timed, ceilings, weight_bytes);
        let read = ceilings.read(row.threads);
        line.growth = read.and_then(|read| growth::of(row, &speeds, read * 1e9)).unwrap_or_default();
        if matches!(row.test, Test::Prefill(_)) {
            let decodes = |r: &Row| matches!(r.test, Test::Decode(_)) && Row { test: row.test, ..*r } == *row;
            let decode = speeds.iter().find(|(r, _)| decodes(r));
            line.times_decode = decode.map(|(_, speed)| line.tokens_per_second / speed);
        }
        line
    });
    lines.collect()
}

impl Line {
    /// A row with what follows from its own speed.
    fn new(row: &Row, timed: Timed, ceilings: &Ceilings, weight_bytes: usize) -> Self {
        let Spread { median, min, max } = Spread::of(&timed.speeds);
        let (n, batch) = (row.test.tokens() / row.batch(), row.batch());
        // A token's bytes: all weights once for all sequences, and the slots filled so far.
        let bytes = weight_bytes as f64 / batch as f64 + growth::kv_bytes(row, n);
        let (n_prompt, n_gen, bytes, gops) = match row.test {
            Test::Prefill(_) => (n, 0, None, Some(median / n as f64 * prefill_ops(n) / 1e9)),
            Test::Decode(_) | Test::Together(..) => (0, n, Some(bytes), None),
        };
        let gb_per_s = bytes.map(|bytes| median * bytes / 1e9);
        let beside = bytes.and_then(|b| paired(timed.speeds.iter().map(|speed| speed * b), &timed.reads));
        let percent = |is: Option<f64>, best: Option<f64>| is.zip(best).map(|(is, best)| 100.0 * is / best);
        let reads: Vec<f64> = timed.reads.iter().map(|rate| rate / 1e9).collect();
        Self {
            test: row.name(),
            n_prompt,
            n_gen,
            batch,
            depth: row.depth,
            kv_type: row.kv_types.to_string(),
            threads: row.threads,
            tokens_per_second: median,
            min,
            max,
            samples: timed.speeds,
            read_gb_per_s_samples: (!reads.is_empty()).then_some(reads),
            gb_per_s,
            bandwidth_percent: beside.or(percent(gb_per_s, ceilings.read(row.threads))),
            gops,
            peak_percent: percent(gops, ceilings.peak(row.threads)),
            growth: Growth::default(),
            times_decode: None,
            ratio: None,
        }
    }
}

impl BenchResult {
    /// One object.
    pub fn json(&self) -> Value {
        json!(self)
    }

    /// One object a line: all but the rows, then the rows.
    pub fn json_lines(&self) -> String {
        let tagged = |tag: &str, mut value: Value| {
            value["t"] = tag.into();
            format!("{value}\n")
        };
        let mut head = self.json();
        head.as_object_mut().map(|head| head.shift_remove("rows"));
        let rows = self.rows.iter().map(|l| tagged("row", json!(l)));
        std::iter::once(tagged("environment", head)).chain(rows).collect()
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::ceiling::{IntegerPeak, ReadBandwidth};
    use super::super::rows::tests::row;
    use super::*;
    use crate::dims::*;

    fn ceilings() -> Ceilings {
        Ceilings {
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
        let rows = [row(Test::Prefill(4), 0), row(Test::Decode(3), 0), row(Test::Decode(3), 8)];
        let timed = [vec![40.0, 60.0], vec![3.0, 1.0, 2.0], vec![1.0]].map(alone);
        let rows = lines(&rows, timed.to_vec(), &ceilings(), 1000);
        let (load_ms, peak_rss_bytes) = (5.0, Some(3 << 20));
        BenchResult { environment, device: None, load_ms, peak_rss_bytes, ceilings: ceilings(), rows }
    }

    /// Repetitions without a bandwidth measured beside them.
    fn alone(speeds: Vec<f64>) -> Timed {
        Timed { speeds, reads: Vec::new() }
    }

    #[test]
    fn operations_are_counted_from_the_dims() {
        let layer = DIM * (Q_DIM + 2 * KV_DIM) + Q_DIM * DIM + 3 * DIM * FFN_DIM;
        assert_eq!(prefill_ops(5), 2.0 * (5 * LAYERS * layer + VOCAB * DIM) as f64);
    }

    #[test]
    fn rates_follow_from_the_speeds() {
        let result = result();
        let [prefill, decode, deep] = &result.rows[..] else { panic!("three rows") };
        assert_eq!(prefill.tokens_per_second, 50.0);
        assert_eq!(prefill.times_decode, Some(25.0));
        assert_eq!(prefill.gops, Some(50.0 / 4.0 * prefill_ops(4) / 1e9));
        assert!(prefill.gb_per_s.is_none() && decode.gops.is_none() && decode.times_decode.is_none());
        let slot = row(Test::Decode(3), 0).kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as f64;
        // Three tokens read 1, 2 and 3 slots.
        assert_eq!(decode.gb_per_s, Some(2.0 * (1000.0 + 2.0 * slot) / 1e9));
        assert_eq!(deep.gb_per_s, Some((1000.0 + 10.0 * slot) / 1e9));
        assert_eq!(decode.bandwidth_percent.map(|p| p / 100.0 * 10.0), decode.gb_per_s);
        assert_eq!(prefill.peak_percent, prefill.gops.map(|g| 100.0 * g / 20.0));
        assert!(decode.peak_percent.is_none());
        assert_eq!([prefill.growth, decode.growth], [Growth::default(); 2]);
        // At depth 0 a token took 500 ms.
        assert_eq!(deep.growth, Growth::new(1000.0, 1e3 * (0.5 + 8.0 * slot / 10e9)));
    }

    #[test]
    fn a_machine_that_slows_down_changes_no_percent() {
        let percent = |rates: &[f64], bests: &[f64]| paired(rates.iter().copied(), bests);
        assert_eq!(percent(&[8.0, 8.0], &[10.0, 10.0]), Some(80.0));
        assert_eq!(percent(&[8.0, 4.0], &[10.0, 5.0]), Some(80.0));
        assert_eq!(percent(&[9.0, 3.0, 7.0], &[10.0, 10.0, 10.0]), Some(70.0));
        assert_eq!(percent(&[8.0], &[]), None);
        // Of the rates beside them, not of the run's.
        let timed = Timed { speeds: vec![2.0, 1.0], reads: vec![8e9, 4e9] };
        let line = Line::new(&row(Test::Decode(3), 0), timed, &ceilings(), 2_000_000_000);
        let own = line.gb_per_s.expect("decode reads") / 1.5 * 2.0 / 8.0;
        assert!((line.bandwidth_percent.expect("paired") / (100.0 * own) - 1.0).abs() < 1e-9);
        assert_eq!(json!(line)["read_gb_per_s_samples"], json!([8.0, 4.0]));
    }

    #[test]
    fn weights_are_read_once_for_all_sequences() {
        let row = row(Test::Together(3, 4), 0);
        let together = Line::new(&row, alone(vec![8.0]), &ceilings(), 1000);
        let slot = row.kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as f64;
        assert_eq!(together.gb_per_s, Some((2.0 * 1000.0 + 8.0 * 2.0 * slot) / 1e9));
        assert_eq!((together.n_gen, together.batch), (3, 4));
    }

    #[test]
    fn json_has_every_row() {
        let result = result();
        let all = result.json();
        assert_eq!(all["rows"].as_array().map(Vec::len), Some(3));
        let deep = &all["rows"][2];
        assert_eq!(deep["test"], "tg3 @ d8");
        assert_eq!(deep["ms_per_token"], 1000.0);
        assert!(deep["predicted_ms_per_token"].is_f64() && deep["deviation_percent"].is_f64(), "{deep}");
        assert!(deep["read_gb_per_s_samples"].is_null(), "{deep}");
        assert!(all["rows"][1]["deviation_percent"].is_null() && all["rows"][0]["peak_percent"].is_f64());
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
