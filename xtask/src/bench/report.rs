//! The results of a benchmark on a device, as Markdown and as JSON. What is not known is `–`, or null.

use super::start::Start;
use super::{Results, Run};
use crate::sensors::sampler::cores_used;
use crate::sensors::{Reading, layout, ranges};
use serde_json::{Value, json};

/// So many runs have a column of their own.
const COLUMNS: usize = 6;

/// Tables: rows, starts, the device's state, its cores.
pub fn markdown(results: &Results) -> String {
    let runs = results.runs.len();
    let mut text = format!(
        "{} on {} ({}), {runs} run{}\n\n",
        results.model,
        results.device,
        results.target,
        if runs == 1 { "" } else { "s" }
    );
    text += &rows(&results.runs);
    text += &format!("\n{}\n{}", starts(&results.runs), states(&results.runs));
    let cores = cores(&results.runs);
    if !cores.is_empty() {
        text += &format!("\n{cores}");
    }
    let known = results.runs.first().map(|r| layout(&r.before.clusters())).unwrap_or_default();
    let mut notes = vec![format!("Cores: {}.", if known.is_empty() { "–" } else { &known })];
    notes.extend(results.notes.iter().cloned());
    text + "\n" + &notes.join("\n") + "\n"
}

/// The same, with every sample.
pub fn json(results: &Results) -> Value {
    let run = |r: &Run| {
        let sample = |s: &crate::sensors::sampler::Sample| {
            json!({"uptime_s": s.uptime, "khz": s.khz, "celsius": s.celsius, "microamps": s.microamps,
                   "available_bytes": s.available, "rss_bytes": s.rss, "pss_bytes": s.pss})
        };
        json!({
            "waited_s": r.waited, "start": r.before.json(), "end": r.after.json(),
            "cold_start": r.cold.as_ref().map(Start::json), "warm_start": r.warm.json(),
            "cores_used": cores_used(&r.samples), "bench": r.bench,
            "sampled": {
                "cores": r.plan.cores,
                "temperatures": r.plan.temperatures.iter().map(|t| &t.name).collect::<Vec<_>>(),
                "samples": r.samples.iter().map(sample).collect::<Vec<_>>(),
            },
        })
    };
    let row = |(name, speeds): (Vec<String>, Vec<Option<f64>>)| {
        let known: Vec<f64> = speeds.iter().flatten().copied().collect();
        let spread = Spread::of(&known);
        json!({"test": name[0], "threads": name[1].parse::<u64>().ok(), "kv_type": name[2],
               "tokens_per_second": spread.map(|s| s.median), "min": spread.map(|s| s.min),
               "max": spread.map(|s| s.max), "runs": speeds})
    };
    json!({
        "schema": 1, "device": results.device, "target": results.target, "model": results.model,
        "rows": speeds(&results.runs).into_iter().map(row).collect::<Vec<_>>(),
        "notes": results.notes,
        "runs": results.runs.iter().map(run).collect::<Vec<_>>(),
    })
}

/// Median and extremes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len().checked_sub(1)?;
        let median = (sorted[n / 2] + sorted[n.div_ceil(2)]) / 2.0;
        Some(Spread { median, min: sorted[0], max: sorted[n] })
    }

    /// Three cells.
    fn cells(spread: Option<Spread>) -> [String; 3] {
        spread.map_or(["–"; 3].map(String::from), |s| [s.median, s.min, s.max].map(short))
    }
}

/// Test, threads and KV type, and the tokens per second of every run.
fn speeds(runs: &[Run]) -> Vec<(Vec<String>, Vec<Option<f64>>)> {
    let mut found: Vec<(Vec<String>, Vec<Option<f64>>)> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        for row in run.bench["rows"].as_array().into_iter().flatten() {
            let text = |key: &str| row[key].as_str().unwrap_or("–").to_string();
            let threads = row["threads"].as_u64().map_or("–".into(), |t| t.to_string());
            let name = vec![text("test"), threads, text("kv_type")];
            let at = found.iter().position(|(n, _)| *n == name).unwrap_or_else(|| {
                found.push((name, vec![None; runs.len()]));
                found.len() - 1
            });
            found[at].1[i] = row["tokens_per_second"].as_f64();
        }
    }
    found
}

fn rows(runs: &[Run]) -> String {
    let each = (2..=COLUMNS).contains(&runs.len());
    let mut titles: Vec<String> =
        ["test", "threads", "KV", "tokens/s", "min", "max"].map(String::from).into();
    titles.extend((1..=runs.len()).filter(|_| each).map(|i| format!("run {i}")));
    let line = |(mut cells, speeds): (Vec<String>, Vec<Option<f64>>)| {
        let known: Vec<f64> = speeds.iter().flatten().copied().collect();
        cells.extend(Spread::cells(Spread::of(&known)));
        cells.extend(speeds.iter().filter(|_| each).map(|s| s.map_or("–".into(), short)));
        cells
    };
    pipes(&titles, &speeds(runs).into_iter().map(line).collect::<Vec<_>>())
}

fn starts(runs: &[Run]) -> String {
    let titles = ["start", "first token ms", "min", "max", "of it load ms", "prompt to token ms"];
    let line = |name: &str, starts: Vec<&Start>| {
        let all = |f: fn(&Start) -> Option<f64>| starts.iter().filter_map(|s| f(s)).collect::<Vec<_>>();
        let median = |f| Spread::cells(Spread::of(&all(f)))[0].clone();
        let mut cells = vec![name.to_string()];
        cells.extend(Spread::cells(Spread::of(&all(|s| s.first_token))));
        cells.extend([median(|s| Some(s.load)), median(|s| Some(s.ttft))]);
        cells
    };
    let cold = line("cold", runs.iter().filter_map(|r| r.cold.as_ref()).collect());
    pipes(&titles.map(String::from), &[cold, line("warm", runs.iter().map(|r| &r.warm).collect())])
}

/// The device before, during and after each run.
fn states(runs: &[Run]) -> String {
    let titles = [
        "run",
        "waited s",
        "°C start",
        "highest",
        "end",
        "throttling start",
        "end",
        "battery %",
        "cores used",
    ];
    let degrees = |c: Option<f64>| c.map_or("–".into(), |c| format!("{c:.1}"));
    let line = |(i, r): (usize, &Run)| {
        let during = r.samples.iter().flat_map(|s| s.celsius.iter().flatten().copied());
        let ends = [r.before.hottest(), r.after.hottest()].into_iter().flatten();
        let used = ranges(&cores_used(&r.samples));
        let percent = |r: &Reading| r.battery.percent.map_or("–".into(), |p| format!("{p:.0}"));
        let battery = match (percent(&r.before), percent(&r.after)) {
            (a, b) if a == b => a,
            (a, b) => format!("{a} to {b}"),
        };
        let throttling = |r: &Reading| r.throttling().unwrap_or("–".into());
        vec![
            (i + 1).to_string(),
            format!("{:.0}", r.waited),
            degrees(r.before.hottest()),
            degrees(during.chain(ends).max_by(f64::total_cmp)),
            degrees(r.after.hottest()),
            throttling(&r.before),
            throttling(&r.after),
            battery,
            if used.is_empty() { "–".into() } else { used },
        ]
    };
    pipes(&titles.map(String::from), &runs.iter().enumerate().map(line).collect::<Vec<_>>())
}

/// Clocks in GHz, core by core: at the start, the median while it ran, and at the end. Empty where no core
/// tells any.
fn cores(runs: &[Run]) -> String {
    let Some(first) = runs.first() else { return String::new() };
    if first.before.cores.iter().all(|c| c.max_khz.is_none() && c.khz.is_none()) {
        return String::new();
    }
    let ghz = |khz: Option<u64>| khz.map_or("–".into(), |k| format!("{:.2}", k as f64 / 1e6));
    let shown = &runs[..runs.len().min(COLUMNS)];
    let mut titles: Vec<String> = ["cpu", "capacity", "max GHz"].map(String::from).into();
    titles.extend((1..=shown.len()).flat_map(|i| [format!("run {i} start"), "running".into(), "end".into()]));
    let line = |(at, core): (usize, &crate::sensors::Core)| {
        let capacity = core.capacity.map_or("–".into(), |c| c.to_string());
        let mut cells = vec![core.number.to_string(), capacity, ghz(core.max_khz)];
        for run in shown {
            let clock =
                |r: &Reading| ghz(r.cores.iter().find(|c| c.number == core.number).and_then(|c| c.khz));
            let during =
                run.samples.iter().filter_map(|s| *s.khz.get(at)?).map(|k| k as f64).collect::<Vec<_>>();
            let during = Spread::of(&during).map(|s| s.median as u64);
            cells.extend([clock(&run.before), ghz(during), clock(&run.after)]);
        }
        cells
    };
    pipes(&titles, &first.before.cores.iter().enumerate().map(line).collect::<Vec<_>>())
}

/// Three significant digits or all of the integer part.
fn short(x: f64) -> String {
    let digits = match x.abs() {
        x if x >= 100.0 => 1,
        x if x >= 1.0 => 2,
        _ => 4,
    };
    format!("{x:.digits$}")
}

/// A Markdown table that is also legible as it is; the first column is left-aligned.
fn pipes(titles: &[String], rows: &[Vec<String>]) -> String {
    // Names come from the device: no cell may end its column or its line.
    let tame = |s: &String| s.replace('|', "/").replace(char::is_control, " ");
    let rows: Vec<Vec<String>> = rows.iter().map(|r| r.iter().map(tame).collect()).collect();
    let width = |c: usize| {
        let cells = rows.iter().map(|r| &r[c]).chain([&titles[c]]);
        cells.map(|s| s.chars().count()).max().unwrap_or(0).max(3)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: &[String]| {
        let cell = |(c, (cell, w)): (usize, (&String, &usize))| {
            if c == 0 { format!(" {cell:<w$} |") } else { format!(" {cell:>w$} |") }
        };
        format!("|{}\n", cells.iter().zip(&widths).enumerate().map(cell).collect::<String>())
    };
    let rule =
        |(c, &w): (usize, &usize)| if c == 0 { "-".repeat(w) } else { format!("{}:", "-".repeat(w - 1)) };
    let rule: Vec<String> = widths.iter().enumerate().map(rule).collect();
    line(titles) + &line(&rule) + &rows.iter().map(|r| line(r)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sensors::sampler::{Plan, Sample};
    use crate::sensors::{Core, Temperature};
    use std::time::Duration;

    fn reading(celsius: f64) -> Reading {
        let core = |number| Core { number, capacity: Some(1024), khz: Some(1_500_000), ..Core::default() };
        let temperatures = vec![Temperature { name: "cpu|x".into(), celsius, zone: Some(0) }];
        Reading { cores: vec![core(0), core(1)], temperatures, thermal_status: Some(0), ..Reading::default() }
    }

    fn run(speed: f64, cold: Option<f64>) -> Run {
        let start = |ms| Start { first_token: Some(ms), load: 1.0, ttft: 2.0 };
        let sample =
            Sample { khz: vec![Some(2_000_000), None], celsius: vec![Some(61.5)], ..Sample::default() };
        let row = json!({"test": "tg8", "threads": 2, "kv_type": "q4", "tokens_per_second": speed});
        Run {
            before: reading(40.0),
            after: reading(50.0),
            plan: Plan::of(&reading(40.0), Duration::from_secs(1)),
            samples: vec![sample],
            cold: cold.map(start),
            warm: start(20.0),
            bench: json!({"rows": [row]}),
            waited: 0.0,
        }
    }

    fn results(runs: Vec<Run>) -> Results {
        let notes = vec!["A note.".to_string()];
        Results { device: "d".into(), target: "t".into(), model: "m".into(), runs, notes }
    }

    #[test]
    fn tables_are_whole() {
        let text = markdown(&results(vec![run(10.0, Some(80.0)), run(12.0, None)]));
        let tables: Vec<&str> = text.split("\n\n").filter(|t| t.starts_with('|')).collect();
        assert_eq!(tables.len(), 4, "{text}");
        for table in &tables {
            let table = table.lines().filter(|l| l.starts_with('|'));
            let pipes: Vec<usize> = table.map(|l| l.matches('|').count()).collect();
            assert!(pipes.iter().all(|p| *p == pipes[0]), "{text}");
        }
        let cells = |line: &str| line.split('|').map(|c| c.trim().to_string()).collect::<Vec<_>>();
        let row = cells(tables[0].lines().nth(2).unwrap());
        assert_eq!(row[1..9], ["tg8", "2", "q4", "11.00", "10.00", "12.00", "10.00", "12.00"]);
        let cold = cells(tables[1].lines().nth(2).unwrap());
        assert_eq!(cold[1..6], ["cold", "80.00", "80.00", "80.00", "1.00"]);
        let state = cells(tables[2].lines().nth(2).unwrap());
        assert_eq!(state[1..8], ["1", "0", "40.0", "61.5", "50.0", "none", "none"]);
        let core = cells(tables[3].lines().nth(2).unwrap());
        assert_eq!(core[1..7], ["0", "1024", "–", "1.50", "2.00", "1.50"]);
        assert!(text.ends_with("A note.\n"), "{text}");
    }

    #[test]
    fn a_device_that_tells_nothing_gets_dashes() {
        let mut one = run(10.0, None);
        (one.before, one.after, one.samples) = (Reading::default(), Reading::default(), Vec::new());
        let text = markdown(&results(vec![one]));
        assert!(text.contains("| cold  |              – |"), "{text}");
        assert!(!text.contains("capacity") && text.contains("Cores: –."), "{text}");
    }

    #[test]
    fn json_can_be_read_back() {
        let value = json(&results(vec![run(10.0, Some(80.0)), run(12.0, None)]));
        let back: Value = serde_json::from_str(&value.to_string()).unwrap();
        assert_eq!(back["schema"], 1);
        assert_eq!(back["rows"][0]["tokens_per_second"], 11.0);
        assert_eq!(back["rows"][0]["runs"], json!([10.0, 12.0]));
        assert_eq!(back["runs"][0]["cold_start"]["first_token_ms"], 80.0);
        assert!(back["runs"][1]["cold_start"].is_null());
        assert_eq!(back["runs"][0]["sampled"]["samples"][0]["khz"], json!([2_000_000, null]));
        assert_eq!(back["runs"][0]["start"]["temperatures"][0]["name"], "cpu|x");
    }

    #[test]
    fn hostile_cells_stay_in_their_column() {
        let table = pipes(&["a".into(), "b".into()], &[vec!["x|y\n|".into(), "\u{1b}[2J".into()]]);
        assert_eq!(table.lines().count(), 3);
        assert!(table.lines().all(|l| l.matches('|').count() == 3) && !table.contains('\u{1b}'), "{table}");
    }
}
