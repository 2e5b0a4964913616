//! `--compare`: ratios to the results of an earlier run.

use super::result::Report;
use files::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// What an earlier run measured.
pub(super) struct Earlier {
    /// Test, threads, KV type -> tokens per second.
    rows: Vec<((String, u64, String), f64)>,
    environment: Value,
}

/// Reads the output of `-o json` or `-o jsonl`.
pub(super) fn read(file: &Path) -> Result<Earlier> {
    let bad = |e: String| {
        Error::Usage(format!("--compare {}: {e}; give a file written by bench -o json", file.display()))
    };
    let text = std::fs::read_to_string(file).map_err(|e| bad(e.to_string()))?;
    parse(&text).ok_or_else(|| bad("holds no results".into()))
}

fn parse(text: &str) -> Option<Earlier> {
    let values: Vec<Value> = match serde_json::from_str::<Value>(text) {
        Ok(one) => vec![one],
        Err(_) => text.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>().ok()?,
    };
    let environment = values.iter().find_map(|v| v.get("environment")).cloned().unwrap_or_default();
    let listed = values.iter().filter_map(|v| v.get("rows")?.as_array()).flatten();
    let rows: Vec<_> = listed.chain(&values).filter_map(row).collect();
    (!rows.is_empty()).then_some(Earlier { rows, environment })
}

fn row(v: &Value) -> Option<((String, u64, String), f64)> {
    let text = |key: &str| v.get(key)?.as_str().map(String::from);
    let speed = v.get("tokens_per_second")?.as_f64().filter(|s| *s > 0.0)?;
    Some(((text("test")?, v.get("threads")?.as_u64()?, text("kv_type")?), speed))
}

/// Fills the ratios in, and says on stderr what makes them doubtful.
pub(super) fn apply(report: &mut Report, earlier: &Earlier) {
    for line in &mut report.rows {
        let key = (line.row.name(), line.row.threads as u64, line.row.kv_types.to_string());
        let found = earlier.rows.iter().find(|(k, _)| *k == key);
        line.ratio = found.map(|(_, speed)| line.speed.median / speed);
    }
    if report.rows.iter().all(|l| l.ratio.is_none()) {
        eprintln!("--compare: no row has the test, threads and KV type of an earlier one");
    }
    let e = &report.environment;
    for (key, now) in [("model", &e.model), ("weight_type", &e.weight_type), ("cpu", &e.cpu), ("isa", &e.isa)]
    {
        if let Some(then) = earlier.environment.get(key).and_then(Value::as_str).filter(|then| then != now) {
            eprintln!("--compare: {key} was {}, now {now}", crate::cli::report::tame(then, 80));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::result::tests::report;
    use super::*;

    #[test]
    fn ratios_to_both_formats() {
        let before = report();
        for text in [format!("{:#}", before.json()), before.json_lines()] {
            let earlier = parse(&text).expect("results");
            let mut now = report();
            now.rows[0].speed.median *= 2.0;
            now.rows[2].row.threads = 9;
            apply(&mut now, &earlier);
            let ratios: Vec<_> = now.rows.iter().map(|l| l.ratio).collect();
            assert_eq!(ratios, [Some(2.0), Some(1.0), None]);
        }
    }

    #[test]
    fn other_files_are_refused() {
        for text in ["", "{}", "[1]", "not json", "{\"rows\":[{\"test\":\"pp1\"}]}", "{\"rows\":3}"] {
            assert!(parse(text).is_none(), "{text}");
        }
        assert!(matches!(read(Path::new("/nowhere/x.json")), Err(Error::Usage(_))));
    }
}
