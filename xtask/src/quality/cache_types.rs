//! `cargo xtask quality --cache-types`: the cost of each type of the cache on the story model, on the one with hard keys
//! and on SmolLM2, as a table in the README of the story model.

use super::{Row, hard_keys, lines, prediction_cells, real, result, run_eval};
use crate::build;
use crate::error::Result;
use result::Measurement;
use std::path::Path;

/// Types of keys and values with the mean bits of an element, scales included; the first is lossless.
const TYPES: [(&str, &str, &str); 6] = [
    ("f32", "f32", "32"),
    ("q8", "q8", "8.5"),
    ("q6", "q6", "6.5"),
    ("q8", "q4", "6.5"),
    ("q5", "q5", "5.5"),
    ("q4", "q4", "4.5"),
];
const HEAD: &str = "| keys | values | bits | story | KL, nats | hard keys | KL, nats | SmolLM2 | KL, nats |\n\
                    |---|---|---:|---:|---:|---:|---:|---:|---:|\n";
/// Chunks of 512 tokens that SmolLM2 predicts.
const CHUNKS: &str = "2";
/// Name of the table's place in the page.
const PLACE: &str = "cache types";
const SMOLLM: &str = "smollm2-135m";

/// Measures, and writes the table to `out` or into the README.
pub fn run(out: Option<&Path>) -> Result<()> {
    let smollm = build::model_dir(SMOLLM)?;
    real::check(&smollm)?;
    let settings: Vec<String> = TYPES.iter().map(|(k, v, _)| format!("k={k},v={v}")).collect();
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let [story, hard] = hard_keys::measure(&build::build_tested(&build::model_dir("story")?)?, &settings)?;
    let rows: Vec<Row> =
        settings.iter().map(|types| Row::new(&[types], format!("weights=native,{types}"))).collect();
    let text = smollm.join("golden/text.txt").display().to_string();
    let inputs = ["--file", &text, "--chunk", "512", "--limit", CHUNKS];
    let found = run_eval(&build::build_tested(&smollm)?, &smollm, &inputs, &rows)?;
    let smollm = result::parse_predictions(&found, rows.len())?;
    real::write_tables(&format!("{HEAD}{}", table([&story, &hard, &smollm])), PLACE, out)
}

fn table(found: [&[Measurement]; 3]) -> String {
    let rows: Vec<Row> = TYPES.iter().map(|(k, v, bits)| Row::new(&[k, v, bits], "")).collect();
    let all: Vec<[&Measurement; 3]> = (0..rows.len()).map(|i| found.map(|of| &of[i])).collect();
    let cells = |found: &Measurement| {
        let [_, change, kl, _] = prediction_cells(found, 6);
        [change, kl]
    };
    lines(&rows, &all, |of| of.iter().flat_map(|found| cells(found)).collect())
}
