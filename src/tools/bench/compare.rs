//! `--compare`: ratios to the results of an earlier run.

use super::result::BenchResult;
use crate::cli::args::read_text;
use files::error::one_line;
use files::{Error, Result, say};
use serde_json::{Value, json};
use std::path::Path;

/// What an earlier run measured.
pub struct Earlier {
    /// Rows with a test, a number of threads, a KV type and tokens per second.
    rows: Vec<Value>,
    environment: Value,
}

/// Reads the output of `-o json` or `-o jsonl`.
pub fn read(file: &Path) -> Result<Earlier> {
    let bad = |e: String| {
        Error::Usage(format!("--compare {}: {e}; give a file written by bench -o json", file.display()))
    };
    let text = read_text("--compare", file)?;
    parse(&text).ok_or_else(|| bad("holds no results".into()))
}

fn parse(text: &str) -> Option<Earlier> {
    let values: Vec<Value> = match serde_json::from_str::<Value>(text) {
        Ok(one) => vec![one],
        Err(_) => text.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>().ok()?,
    };
    let environment = values.iter().find_map(|v| v.get("environment")).cloned().unwrap_or_default();
    let listed = values.iter().filter_map(|v| v.get("rows")?.as_array()).flatten();
    let is_row =
        |v: &&Value| v["test"].is_string() && v["tokens_per_second"].as_f64().is_some_and(|s| s > 0.0);
    let rows: Vec<Value> = listed.chain(&values).filter(is_row).cloned().collect();
    (!rows.is_empty()).then_some(Earlier { rows, environment })
}

/// Fills in the ratios, and says on stderr what makes them doubtful.
pub fn apply(result: &mut BenchResult, earlier: &Earlier) {
    for line in &mut result.rows {
        let same = |r: &&Value| {
            r["test"] == line.test && r["threads"] == line.threads && r["kv_type"] == line.kv_type
        };
        let then = earlier.rows.iter().find(same).and_then(|r| r["tokens_per_second"].as_f64());
        line.ratio = then.map(|then| line.tokens_per_second / then);
    }
    if result.rows.iter().all(|l| l.ratio.is_none()) {
        say!("--compare: no row has the test, threads and KV type of an earlier one");
    }
    let environment = json!(result.environment);
    for key in ["model", "weight_type", "cpu", "isa"] {
        let now = environment[key].as_str().unwrap_or_default();
        if let Some(then) = earlier.environment[key].as_str().filter(|then| *then != now) {
            say!("--compare: {key} was {}, now {now}", one_line(then, 80));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::result::tests::result;
    use super::*;

    #[test]
    fn ratios_to_both_formats() {
        let before = result();
        for text in [format!("{:#}", before.json()), before.json_lines()] {
            let earlier = parse(&text).expect("results");
            let mut now = result();
            now.rows[0].tokens_per_second *= 2.0;
            now.rows[2].threads = 9;
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
