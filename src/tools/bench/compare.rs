//! `--compare`: ratios to the results of an earlier run.

use super::result::BenchResult;
use crate::cli::args::read_text;
use files::error::one_line;
use files::{Error, Result, say};
use serde_json::{Value, json};
use std::path::Path;

/// The JSON objects of an earlier run: one, or one a line.
pub struct Earlier(Vec<Value>);

/// Reads the output of `-o json` or `-o jsonl`.
pub fn read(file: &Path) -> Result<Earlier> {
    let earlier = parse(&read_text("--compare", file)?);
    earlier.filter(|earlier| earlier.rows().next().is_some()).ok_or_else(|| {
        let file = file.display();
        Error::Usage(format!("--compare {file}: holds no results; give a file written by bench -o json"))
    })
}

fn parse(text: &str) -> Option<Earlier> {
    let whole = serde_json::from_str(text).map(|one| vec![one]);
    let lines = || text.lines().map(serde_json::from_str).collect();
    whole.or_else(|_| lines()).ok().map(Earlier)
}

impl Earlier {
    /// Rows with a test and its speed.
    fn rows(&self) -> impl Iterator<Item = &Value> {
        let listed = self.0.iter().filter_map(|v| v.get("rows")?.as_array()).flatten();
        listed.chain(&self.0).filter(|row| {
            row["test"].is_string() && row["tokens_per_second"].as_f64().is_some_and(|speed| speed > 0.0)
        })
    }

    /// Fills in the ratios, and says on stderr what makes them doubtful.
    pub fn fill_ratios(&self, result: &mut BenchResult) {
        for row in &mut result.rows {
            let same = |r: &&Value| {
                r["test"] == row.test && r["threads"] == row.threads && r["kv_type"] == row.kv_type
            };
            let then = self.rows().find(same).and_then(|r| r["tokens_per_second"].as_f64());
            row.ratio = then.map(|then| row.tokens_per_second / then);
        }
        if result.rows.iter().all(|row| row.ratio.is_none()) {
            say!("--compare: no row has the test, threads and KV type of an earlier one");
        }
        let now = json!(result.environment);
        let then = self.0.iter().find_map(|v| v.get("environment")).unwrap_or(&Value::Null);
        for key in ["model", "weight_type", "cpu", "isa"] {
            let now = now[key].as_str().unwrap_or_default();
            if let Some(then) = then[key].as_str().filter(|then| *then != now) {
                say!("--compare: {key} was {}, now {now}", one_line(then, 80));
            }
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
            let mut now = result();
            now.rows[0].tokens_per_second *= 2.0;
            now.rows[2].threads = 9;
            parse(&text).expect("results").fill_ratios(&mut now);
            let ratios: Vec<_> = now.rows.iter().map(|row| row.ratio).collect();
            assert_eq!(ratios, [Some(2.0), Some(1.0), None]);
        }
    }

    #[test]
    fn other_files_are_refused() {
        for text in ["", "{}", "[1]", "not json", "{\"rows\":[{\"test\":\"pp1\"}]}", "{\"rows\":3}"] {
            assert!(parse(text).is_none_or(|earlier| earlier.rows().next().is_none()), "{text}");
        }
        assert!(matches!(read(Path::new("/nowhere/x.json")), Err(Error::Usage(_))));
    }
}
