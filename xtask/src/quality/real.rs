//! `cargo xtask quality --model NAME`: a real model on real text, as tables in the README of the story model.

use super::{README, Row, lines, prediction_cells, result, run_eval};
use crate::error::{AtPath, Error, Result};
use crate::{command, fetch};
use files::atomic_file;
use std::fs;
use std::path::{Path, PathBuf};

/// Types of the weights and of the cache, with their settings; the first is the baseline.
const TYPES: [(&str, &str, &str); 9] = [
    ("native", "f32", "weights=native,kv=f32"),
    ("native", "f16", "weights=native,kv=f16"),
    ("native", "q8", "weights=native,kv=q8"),
    ("native", "q8 keys, q4 values", "weights=native,k=q8,v=q4"),
    ("native", "q4", "weights=native,kv=q4"),
    ("q4_0", "f32", "weights=q4_0,kv=f32"),
    ("iq4_nl", "f32", "weights=iq4_nl,kv=f32"),
    ("q4", "f32", "weights=q4,kv=f32"),
    ("f32", "f32", "weights=f32,kv=f32"),
];
const TYPES_HEAD: &str = "| weights | KV cache | perplexity | change | KL, nats | same top token |\n\
                          |---|---|---:|---:|---:|---:|\n";

/// Policies with their windows and protected prefixes.
const EVICTING: [(&str, usize, usize); 9] = [
    ("sliding", 256, 4),
    ("snapkv", 256, 4),
    ("h2o", 256, 4),
    ("sliding", 256, 0),
    ("snapkv", 256, 0),
    ("h2o", 256, 0),
    ("sliding", 1024, 4),
    ("snapkv", 1024, 4),
    ("h2o", 1024, 0),
];
const EVICTING_HEAD: &str = "| policy | window | protected prefix | perplexity | change | KL, nats | same top token | \
                             recall 400 | 1,300 |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|\n";
/// Tokens between a fact and its question in `recall.json`.
const DISTANCES: [usize; 2] = [400, 1300];

fn type_rows() -> Vec<Row> {
    TYPES.map(|(weights, kv, settings)| Row::new(&[weights, kv], settings)).into()
}

fn eviction_rows() -> Vec<Row> {
    let whole = Row::new(&["none", "–", "–"], "weights=native,kv=q8,policy=none");
    let evicting = EVICTING.map(|(policy, window, prefix)| {
        let settings = format!("weights=native,kv=q8,policy={policy},window={window},prefix={prefix}");
        Row::new(&[policy, &window.to_string(), &prefix.to_string()], settings)
    });
    [whole].into_iter().chain(evicting).collect()
}

/// Measures with `program`, and writes the tables to `out` or into the README.
pub fn run(model: &Path, program: &Path, out: Option<&Path>) -> Result<()> {
    let (text, recall) = (golden(model, "text.txt"), golden(model, "recall.json"));
    let (text, recall) = (text.display().to_string(), recall.display().to_string());
    let rows = type_rows();
    let found = run_eval(program, model, &["--file", &text, "--chunk", "512"], &rows)?;
    let types = types_table(&rows, &result::parse_predictions(&found, rows.len())?);
    let rows = eviction_rows();
    let inputs = ["--file", &text, "--chunk", "2048", "--limit", "3", "--recall", &recall];
    let found = run_eval(program, model, &inputs, &rows)?;
    let evictions = evictions_table(&rows, &result::parse(&found, rows.len())?);
    let tables = [types, evictions].join("\n");
    write_tables(&tables, &model.file_name().unwrap_or_default().to_string_lossy(), out)
}

/// Writes tables to `out`, or to the place in the README with this name.
pub fn write_tables(tables: &str, name: &str, out: Option<&Path>) -> Result<()> {
    if let Some(file) = out {
        return atomic_file::write_file(file, tables.as_bytes()).at(file);
    }
    let page = command::root().join(README);
    let old = fs::read_to_string(&page).at(&page)?;
    let new = replace_tables(&old, name, tables).ok_or_else(|| {
        Error::Failed(format!("{README} has no place for the tables of {name}: {} and {END}", begin(name)))
    })?;
    atomic_file::write_file(&page, new.as_bytes()).at(&page)?;
    eprintln!("written: the tables of {name} in {README}");
    Ok(())
}

/// Checks that a model has weights and questions.
pub fn check(model: &Path) -> Result<()> {
    if let Some(file) = ["text.txt", "recall.json"].iter().find(|file| !golden(model, file).is_file()) {
        let file = golden(model, file);
        let why = format!("{}: missing; the quality of this model cannot be measured", file.display());
        return Err(Error::Usage(why));
    }
    match fetch::find_fetch_command(model) {
        Some(remedy) => Err(Error::Usage(format!("{}: has no weights; {remedy}", model.display()))),
        None => Ok(()),
    }
}

fn golden(model: &Path, file: &str) -> PathBuf {
    model.join("golden").join(file)
}

const END: &str = "<!-- end of quality -->";

fn begin(name: &str) -> String {
    format!("<!-- quality of {name} -->")
}

/// The page with new tables of a model; `None` if it has no place for them.
fn replace_tables(page: &str, name: &str, tables: &str) -> Option<String> {
    let begin = begin(name);
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}\n\n{tables}\n{END}{after}"))
}

fn types_table(rows: &[Row], found: &[result::Measurement]) -> String {
    format!("{TYPES_HEAD}{}", lines(rows, found, |row| prediction_cells(row, 3).into()))
}

fn evictions_table(rows: &[Row], found: &[result::Measurement]) -> String {
    let cells = |row: &result::Measurement| {
        let recalled =
            DISTANCES.map(|distance| row.recall.of(|group| group.distance == distance).to_string());
        [&prediction_cells(row, 3)[..], &recalled].concat()
    };
    format!("{EVICTING_HEAD}{}", lines(rows, found, cells))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::model_dir;

    #[test]
    fn tables_replace_the_old_ones_of_their_model() {
        let page = "a\n<!-- quality of one -->\nold\n<!-- end of quality -->\nb\n<!-- quality of two -->\nold\n\
                    <!-- end of quality -->\nc\n";
        let new = replace_tables(page, "two", "| new |\n").unwrap();
        assert_eq!(
            new,
            "a\n<!-- quality of one -->\nold\n<!-- end of quality -->\nb\n<!-- quality of two -->\n\n| new |\n\n\
             <!-- end of quality -->\nc\n"
        );
        assert_eq!(replace_tables(&new, "two", "| new |\n").as_ref(), Some(&new), "again is the same");
        assert_eq!(replace_tables(page, "three", ""), None);
        let found = |rows: &[Row]| {
            let against = Some((0.05, 0.25, 0.5));
            vec![result::Measurement { perplexity: 21.0, against, ..Default::default() }; rows.len()]
        };
        let types = types_table(&type_rows(), &found(&type_rows()));
        assert_eq!(types.lines().nth(3), Some("| native | f16 | 21.000 | +5.000 % | 0.2500 | 50.00 % |"));
        let evictions = evictions_table(&eviction_rows(), &found(&eviction_rows()));
        let snapkv = "| snapkv | 256 | 4 | 21.000 | +5.000 % | 0.2500 | 50.00 % | 0/0 | 0/0 |";
        assert_eq!(evictions.lines().nth(4), Some(snapkv));
        let e = check(&model_dir("qwen2.5-0.5b").unwrap()).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("text.txt: missing"), "{e}");
    }
}
