//! The tables of a benchmark's record.

use crate::sensors::format_ranges;
use crate::table::{Spread, UNKNOWN, format_fixed, format_short, format_table, to_cells};
use serde_json::{Value, json};

/// Maximum number of runs that have columns of their own.
const MAX_COLUMNS: usize = 6;
/// Columns of a run's state: title, JSON pointer in its record, decimals.
const STATE: [(&str, &str, usize); 6] = [
    ("waited s", "/waited_s", 0),
    ("°C start", "/start/hottest", 1),
    ("highest", "/hottest", 1),
    ("end", "/end/hottest", 1),
    ("throttling start", "/start/throttling", 0),
    ("end", "/end/throttling", 0),
];

/// One row per test, with the tokens per second of each run.
pub fn rows(runs: &[Value]) -> Vec<Value> {
    let mut found: Vec<([Value; 3], Vec<Option<f64>>)> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        for row in list(&run["bench"]["rows"]) {
            let name = ["test", "threads", "kv_type"].map(|key| row[key].clone());
            let at = found.iter().position(|(n, _)| *n == name).unwrap_or_else(|| {
                found.push((name, vec![None; runs.len()]));
                found.len() - 1
            });
            found[at].1[i] = row["tokens_per_second"].as_f64();
        }
    }
    let row = |([test, threads, kv_type], speeds): ([Value; 3], Vec<Option<f64>>)| {
        let spread = Spread::of(speeds.iter().flatten().copied());
        json!({"test": test, "threads": threads, "kv_type": kv_type, "runs": speeds,
               "tokens_per_second": spread.map(|s| s.median), "min": spread.map(|s| s.min),
               "max": spread.map(|s| s.max)})
    };
    found.into_iter().map(row).collect()
}

/// The tables of speeds, starts, the device's state and its cores.
pub fn tables(record: &Value) -> String {
    let runs = list(&record["runs"]);
    let [model, device, target, layout] =
        ["model", "device", "target", "layout"].map(|key| cell(&record[key], 0));
    let plural = if runs.len() == 1 { "" } else { "s" };
    let notes: String = list(&record["notes"]).iter().map(|note| cell(note, 0) + "\n").collect();
    let parts = [
        format!("{model} on {device} ({target}), {} run{plural}\n", runs.len()),
        speeds(list(&record["rows"]), runs.len()),
        starts(runs),
        states(runs),
        cores(runs),
        format!("Cores: {layout}.\n{notes}"),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A text, or a number with `digits` decimals.
fn cell(value: &Value, digits: usize) -> String {
    value.as_str().map_or_else(|| format_fixed(value.as_f64(), digits), String::from)
}

fn speeds(rows: &[Value], runs: usize) -> String {
    let each = if (2..=MAX_COLUMNS).contains(&runs) { runs } else { 0 };
    let mut titles = to_cells(["test", "threads", "KV", "tokens/s", "min", "max"]);
    titles.extend((1..=each).map(|i| format!("run {i}")));
    let line = |row: &Value| {
        let mut cells: Vec<String> = ["test", "threads", "kv_type"].map(|key| cell(&row[key], 0)).into();
        cells.extend(["tokens_per_second", "min", "max"].map(|key| format_short(row[key].as_f64())));
        cells.extend(list(&row["runs"]).iter().take(each).map(|speed| format_short(speed.as_f64())));
        cells
    };
    format_table(titles, rows.iter().map(line))
}

fn starts(runs: &[Value]) -> String {
    let line = |name: &str| {
        let spread = |field: &str| {
            Spread::of(runs.iter().filter_map(|run| run[format!("{name}_start")][field].as_f64()))
        };
        let first = spread("first_token_ms");
        let medians = ["load_ms", "ttft_ms"].map(|field| spread(field).map(|s| s.median));
        let numbers = [first.map(|s| s.median), first.map(|s| s.min), first.map(|s| s.max)];
        [name.into()].into_iter().chain(numbers.into_iter().chain(medians).map(format_short)).collect()
    };
    let titles = ["start", "first token ms", "min", "max", "of it load ms", "prompt to token ms"];
    format_table(to_cells(titles), ["cold", "warm"].into_iter().map(line))
}

/// The device before, during and after each run.
fn states(runs: &[Value]) -> String {
    let titles = ["run"].into_iter().chain(STATE.map(|(title, ..)| title)).chain(["battery %", "cores used"]);
    let line = |(i, run): (usize, &Value)| {
        let mut cells = vec![(i + 1).to_string()];
        cells
            .extend(STATE.map(|(_, place, digits)| cell(run.pointer(place).unwrap_or(&Value::Null), digits)));
        let [start, end] = ["start", "end"].map(|when| cell(&run[when]["battery"]["percent"], 0));
        cells.push(if start == end { start } else { format!("{start} to {end}") });
        let used: Vec<u32> = serde_json::from_value(run["cores_used"].clone()).unwrap_or_default();
        cells.push(if used.is_empty() { UNKNOWN.into() } else { format_ranges(&used) });
        cells
    };
    format_table(to_cells(titles), runs.iter().enumerate().map(line))
}

/// The table of clocks in GHz per core: at the start, the median while it ran, and at the end. Empty if none is known.
fn cores(runs: &[Value]) -> String {
    let cores = runs.first().map_or(&[][..], |first| list(&first["start"]["cores"]));
    if cores.iter().all(|c| c["max_khz"].is_null() && c["khz"].is_null()) {
        return String::new();
    }
    let shown = &runs[..runs.len().min(MAX_COLUMNS)];
    let mut titles = to_cells(["cpu", "capacity", "max GHz"]);
    titles.extend((1..=shown.len()).flat_map(|i| [format!("run {i} start"), "running".into(), "end".into()]));
    let ghz = |khz: Option<f64>| format_fixed(khz.map(|k| k / 1e6), 2);
    let line = |(at, core): (usize, &Value)| {
        let mut cells =
            vec![cell(&core["cpu"], 0), cell(&core["capacity"], 0), ghz(core["max_khz"].as_f64())];
        for run in shown {
            let clock = |when: &str| {
                let same = list(&run[when]["cores"]).iter().find(|c| c["cpu"] == core["cpu"]);
                ghz(same.and_then(|c| c["khz"].as_f64()))
            };
            let running = list(&run["sampled"]["samples"]).iter().filter_map(|s| s["khz"][at].as_f64());
            cells.extend([clock("start"), ghz(Spread::of(running).map(|s| s.median)), clock("end")]);
        }
        cells
    };
    format_table(titles, cores.iter().enumerate().map(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_every_cell_and_dashes_for_unknown_values() {
        let row =
            |speed: f64| json!([{"test": "tg8", "threads": 2, "kv_type": "q4", "tokens_per_second": speed}]);
        let core = json!([{"cpu": 0, "capacity": 1024, "max_khz": null, "khz": 1_500_000}]);
        let run = |speed: f64, cold: Value| {
            json!({"waited_s": 0.0, "hottest": 61.5, "cores_used": [0], "bench": {"rows": row(speed)},
                   "start": {"cores": core, "hottest": 40.0, "throttling": "none"},
                   "end": {"cores": core, "hottest": 50.0, "throttling": "none"},
                   "sampled": {"samples": [{"khz": [2_000_000]}]},
                   "cold_start": cold, "warm_start": {"first_token_ms": 20.0, "load_ms": 1.0, "ttft_ms": 2.0}})
        };
        let cold = json!({"first_token_ms": 80.0, "load_ms": 1.0, "ttft_ms": 2.0});
        let runs = vec![run(10.0, cold), run(12.0, Value::Null)];
        let record = json!({"device": "d", "target": "t", "model": "m", "rows": rows(&runs), "notes": ["A note."], "runs": runs});
        assert_eq!(
            (&record["rows"][0]["tokens_per_second"], &record["rows"][0]["runs"]),
            (&json!(11.0), &json!([10.0, 12.0]))
        );
        let text = tables(&record);
        let tables: Vec<Vec<&str>> =
            text.split("\n\n").filter(|t| t.starts_with('|')).map(|t| t.lines().collect()).collect();
        assert_eq!(tables.len(), 4, "{text}");
        let cells =
            |table: usize| tables[table][2].split('|').map(|c| c.trim().to_string()).collect::<Vec<_>>();
        assert_eq!(cells(0)[1..9], ["tg8", "2", "q4", "11.00", "10.00", "12.00", "10.00", "12.00"]);
        assert_eq!(cells(1)[1..6], ["cold", "80.00", "80.00", "80.00", "1.00"]);
        assert_eq!(cells(2)[1..8], ["1", "0", "40.0", "61.5", "50.0", "none", "none"]);
        assert_eq!(cells(3)[1..7], ["0", "1024", "–", "1.50", "2.00", "1.50"]);
        assert!(text.contains("Cores: –.") && text.ends_with("A note.\n"), "{text}");
    }
}
