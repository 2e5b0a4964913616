//! What was measured and what follows from it.

use super::ceiling::Ceiling;
use super::device::OnDevice;
use super::growth::{self, Growth};
use super::measure::Timed;
use super::rows::{Row, Test};
use crate::dims;
use crate::model::weights::{Role, table};
use crate::run::engine::Engine;
use crate::run::system;
use serde_json::{Value, json};
use std::time::Duration;

/// What the measurements were made on.
pub(super) struct Environment {
    pub model: String,
    pub weight_type: String,
    pub cpu: String,
    pub isa: String,
    pub kernel: String,
    /// Every number of threads measured with.
    pub threads: Vec<usize>,
    pub bytes_per_token: usize,
}

impl Environment {
    pub fn new(engine: &Engine, rows: &[Row]) -> Self {
        let o = engine.options();
        let mut threads: Vec<usize> = rows.iter().map(|r| r.threads).collect();
        threads.sort_unstable();
        threads.dedup();
        Self {
            model: dims::MODEL.into(),
            weight_type: o.weight_type.to_string(),
            cpu: system::this_cpu(),
            isa: o.isa.map_or("?", |i| i.name()).into(),
            kernel: system::kernel(),
            threads,
            bytes_per_token: engine.weights().bytes_per_token,
        }
    }

    /// For people.
    pub fn line(&self) -> String {
        let threads: Vec<String> = self.threads.iter().map(usize::to_string).collect();
        format!("{}, {}, threads {}, {}", self.cpu, self.isa, threads.join("/"), self.kernel)
    }

    fn json(&self) -> Value {
        json!({
            "version": env!("CARGO_PKG_VERSION"), "model": self.model, "weight_type": self.weight_type,
            "cpu": self.cpu, "isa": self.isa, "kernel": self.kernel, "threads": self.threads,
            "weight_bytes_per_token": self.bytes_per_token,
        })
    }
}

/// Median and spread of tokens per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Self { median, min: sorted[0], max: sorted[n - 1] }
    }
}

/// One row with its results.
pub(super) struct Line {
    pub row: Row,
    pub timed: Timed,
    pub speed: Spread,
    /// Decode: bytes read per second, in units of 1e9.
    pub gb_per_s: Option<f64>,
    /// That in percent of the read bandwidth with as many threads: of each repetition's own where it was
    /// measured beside them, else of the run's.
    pub percent: Option<f64>,
    /// Prefill: operations of the matrix products per second, in units of 1e9.
    pub gops: Option<f64>,
    /// That in percent of the integer peak with as many threads.
    pub peak_percent: Option<f64>,
    /// The read bandwidth with as many threads, in units of 1e9 bytes per second.
    pub read: Option<f64>,
    /// The integer peak with as many threads, in units of 1e9 operations per second.
    pub peak: Option<f64>,
    /// Decode at some depth: what the cache cost.
    pub growth: Option<Growth>,
    /// Prefill: speed relative to decode from the same state.
    pub times_decode: Option<f64>,
    /// Speed relative to that of an earlier run.
    pub ratio: Option<f64>,
}

/// Everything that is printed.
pub(super) struct Report {
    pub environment: Environment,
    /// The OpenCL device, where one runs the model.
    pub device: Option<OnDevice>,
    pub load: Duration,
    pub peak_rss: Option<u64>,
    /// By number of threads.
    pub ceilings: Vec<Ceiling>,
    pub rows: Vec<Line>,
}

/// Multiplications and additions of the matrix products of a prompt of `n` tokens. Only its last token
/// goes through the head.
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

impl Report {
    /// Adds the rows with their repetitions.
    pub fn add(&mut self, rows: &[Row], timed: Vec<Timed>, bytes_per_token: usize) {
        for (&row, timed) in rows.iter().zip(timed) {
            let line = self.line(row, timed, bytes_per_token);
            self.rows.push(line);
        }
        let speeds: Vec<(Row, f64)> = self.rows.iter().map(|l| (l.row, l.speed.median)).collect();
        for line in &mut self.rows {
            line.growth = line.read.and_then(|read| growth::of(&line.row, &speeds, read * 1e9));
            let same = |r: &Row| Row { test: line.row.test, ..*r } == line.row;
            let mut decodes = speeds.iter().filter(|(r, _)| matches!(r.test, Test::Decode(_)));
            if matches!(line.row.test, Test::Prefill(_)) {
                line.times_decode = decodes.find(|(r, _)| same(r)).map(|(_, d)| line.speed.median / d);
            }
        }
    }

    /// A row with what follows from its own speed.
    fn line(&self, row: Row, timed: Timed, bytes_per_token: usize) -> Line {
        let speed = Spread::of(&timed.speeds);
        let (mut bytes, mut gops) = (None, None);
        // A token's bytes: all weights once for all sequences, and the slots filled so far.
        match row.test {
            Test::Decode(n) => bytes = Some(bytes_per_token as f64 + growth::kv_bytes(&row, n)),
            Test::Together(n, batch) => {
                bytes = Some(bytes_per_token as f64 / batch as f64 + growth::kv_bytes(&row, n));
            }
            Test::Prefill(n) => gops = Some(speed.median / n as f64 * prefill_ops(n) / 1e9),
        }
        let gb_per_s = bytes.map(|bytes| speed.median * bytes / 1e9);
        let beside = bytes.and_then(|b| paired(timed.speeds.iter().map(|speed| speed * b), &timed.reads));
        let ceiling = self.ceilings.iter().find(|c| c.threads == row.threads);
        let read = ceiling.and_then(|c| c.read.as_ref()).map(|(rate, _)| rate / 1e9);
        let peak = ceiling.and_then(|c| c.ops).map(|ops| ops / 1e9);
        let percent = |is: Option<f64>, best: Option<f64>| is.zip(best).map(|(is, best)| 100.0 * is / best);
        Line {
            row,
            timed,
            speed,
            gb_per_s,
            percent: beside.or(percent(gb_per_s, read)),
            gops,
            peak_percent: percent(gops, peak),
            read,
            peak,
            growth: None,
            times_decode: None,
            ratio: None,
        }
    }

    /// All but the rows.
    fn head(&self) -> Value {
        let read = |c: &Ceiling| {
            let (rate, way) = c.read.as_ref()?;
            Some(json!({"threads": c.threads, "gb_per_s": rate / 1e9, "way": way}))
        };
        let peak = |c: &Ceiling| Some(json!({"threads": c.threads, "gops": c.ops? / 1e9}));
        json!({
            "environment": self.environment.json(),
            "device": self.device.as_ref().map(OnDevice::json),
            "load_ms": self.load.as_secs_f64() * 1e3,
            "peak_rss_bytes": self.peak_rss,
            "read_bandwidth": self.ceilings.iter().filter_map(read).collect::<Vec<_>>(),
            "integer_peak": self.ceilings.iter().filter_map(peak).collect::<Vec<_>>(),
        })
    }

    /// One object.
    pub fn json(&self) -> Value {
        let mut all = self.head();
        all["rows"] = self.rows.iter().map(Line::json).collect();
        all
    }

    /// One object a line: the environment, then the rows.
    pub fn json_lines(&self) -> String {
        let tagged = |tag: &str, mut value: Value| {
            value["t"] = tag.into();
            format!("{value}\n")
        };
        let rows = self.rows.iter().map(|l| tagged("row", l.json()));
        std::iter::once(tagged("environment", self.head())).chain(rows).collect()
    }
}

impl Line {
    fn json(&self) -> Value {
        let (prompt, generated, batch) = match self.row.test {
            Test::Prefill(n) => (n, 0, 1),
            Test::Decode(n) => (0, n, 1),
            Test::Together(n, batch) => (0, n, batch),
        };
        let reads = &self.timed.reads;
        let reads = (!reads.is_empty()).then(|| reads.iter().map(|rate| rate / 1e9).collect::<Vec<_>>());
        json!({
            "test": self.row.name(), "n_prompt": prompt, "n_gen": generated, "batch": batch, "depth": self.row.depth,
            "kv_type": self.row.kv_types.to_string(), "threads": self.row.threads,
            "tokens_per_second": self.speed.median, "min": self.speed.min, "max": self.speed.max,
            "samples": self.timed.speeds, "read_gb_per_s_samples": reads,
            "gb_per_s": self.gb_per_s, "bandwidth_percent": self.percent,
            "gops": self.gops, "peak_percent": self.peak_percent,
            "ms_per_token": self.growth.map(|g| g.measured_ms),
            "predicted_ms_per_token": self.growth.map(|g| g.predicted_ms),
            "deviation_percent": self.growth.map(|g| g.deviation()), "times_decode": self.times_decode, "ratio": self.ratio,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::rows::tests::row;
    use super::*;
    use crate::dims::*;

    pub fn report() -> Report {
        let environment = Environment {
            model: "m".into(),
            weight_type: "q4_0".into(),
            cpu: "c".into(),
            isa: "scalar".into(),
            kernel: "k".into(),
            threads: vec![2],
            bytes_per_token: 1000,
        };
        let mut report = Report {
            environment,
            device: None,
            load: Duration::from_millis(5),
            peak_rss: Some(3 << 20),
            ceilings: vec![Ceiling { threads: 2, read: Some((10e9, "w".into())), ops: Some(20e9) }],
            rows: Vec::new(),
        };
        let rows = [row(Test::Prefill(4), 0), row(Test::Decode(3), 0), row(Test::Decode(3), 8)];
        let timed = [vec![40.0, 60.0], vec![3.0, 1.0, 2.0], vec![1.0]].map(alone);
        report.add(&rows, timed.to_vec(), 1000);
        report
    }

    /// Repetitions that nothing was read beside.
    fn alone(speeds: Vec<f64>) -> Timed {
        Timed { speeds, reads: Vec::new() }
    }

    #[test]
    fn medians() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Spread::of(&[7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }

    #[test]
    fn operations_are_counted_from_the_dims() {
        let layer = DIM * (Q_DIM + 2 * KV_DIM) + Q_DIM * DIM + 3 * DIM * FFN_DIM;
        assert_eq!(prefill_ops(5), 2.0 * (5 * LAYERS * layer + VOCAB * DIM) as f64);
    }

    #[test]
    fn rates_follow_from_the_speeds() {
        let report = report();
        let [prefill, decode, deep] = &report.rows[..] else { panic!("three rows") };
        assert_eq!(prefill.speed.median, 50.0);
        assert_eq!(prefill.times_decode, Some(25.0));
        assert_eq!(prefill.gops, Some(50.0 / 4.0 * prefill_ops(4) / 1e9));
        assert!(prefill.gb_per_s.is_none() && decode.gops.is_none() && decode.times_decode.is_none());
        let slot = row(Test::Decode(3), 0).kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as f64;
        // Three tokens read 1, 2 and 3 slots.
        assert_eq!(decode.gb_per_s, Some(2.0 * (1000.0 + 2.0 * slot) / 1e9));
        assert_eq!(deep.gb_per_s, Some((1000.0 + 10.0 * slot) / 1e9));
        assert_eq!(decode.percent.map(|p| p / 100.0 * 10.0), decode.gb_per_s);
        assert_eq!(prefill.peak_percent, prefill.gops.map(|g| 100.0 * g / 20.0));
        assert!(decode.peak_percent.is_none() && prefill.growth.is_none() && decode.growth.is_none());
        // At depth 0 a token took 500 ms.
        let growth = Growth { measured_ms: 1000.0, predicted_ms: 1e3 * (0.5 + 8.0 * slot / 10e9) };
        assert_eq!(deep.growth, Some(growth));
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
        let line = report().line(row(Test::Decode(3), 0), timed, 2_000_000_000);
        let own = line.gb_per_s.expect("decode reads") / 1.5 * 2.0 / 8.0;
        assert!((line.percent.expect("paired") / (100.0 * own) - 1.0).abs() < 1e-9);
        assert_eq!(line.json()["read_gb_per_s_samples"], json!([8.0, 4.0]));
        assert_eq!(line.read, Some(10.0));
    }

    #[test]
    fn weights_are_read_once_for_all_sequences() {
        let together = report().line(row(Test::Together(3, 4), 0), alone(vec![8.0]), 1000);
        let slot = together.row.kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as f64;
        assert_eq!(together.gb_per_s, Some((2.0 * 1000.0 + 8.0 * 2.0 * slot) / 1e9));
        assert!(together.growth.is_none());
    }

    #[test]
    fn json_has_every_row() {
        let report = report();
        let all = report.json();
        assert_eq!(all["rows"].as_array().map(Vec::len), Some(3));
        let deep = &all["rows"][2];
        assert_eq!(deep["test"], "tg3 @ d8");
        assert_eq!(deep["ms_per_token"], 1000.0);
        assert!(deep["predicted_ms_per_token"].is_f64() && deep["deviation_percent"].is_f64(), "{deep}");
        assert!(deep["read_gb_per_s_samples"].is_null(), "{deep}");
        assert!(all["rows"][1]["deviation_percent"].is_null() && all["rows"][0]["peak_percent"].is_f64());
        assert_eq!(all["read_bandwidth"][0], json!({"threads": 2, "gb_per_s": 10.0, "way": "w"}));
        assert_eq!(all["integer_peak"][0], json!({"threads": 2, "gops": 20.0}));
        let lines = report.json_lines();
        let tags: Vec<Value> = lines
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).expect("each line is JSON")["t"].clone())
            .collect();
        assert_eq!(tags, ["environment", "row", "row", "row"]);
    }
}
