//! `cargo xtask quality --model NAME`: a real model on real text, as tables in the page that has the story model's.

use super::README;
use super::result::{self, Measurement, Score};
use super::table::format_signed;
use crate::error::{Error, Result};
use crate::{command, fetch};
use files::atomic_file;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Types of the weights and of the cache; the first is the one that the others are held against.
const TYPES: [(&str, &str, &str); 7] = [
    ("native", "f32", "weights=native,kv=f32"),
    ("native", "f16", "weights=native,kv=f16"),
    ("native", "q8", "weights=native,kv=q8"),
    ("native", "q8 keys, q4 values", "weights=native,k=q8,v=q4"),
    ("native", "q4", "weights=native,kv=q4"),
    ("q4_0", "f32", "weights=q4_0,kv=f32"),
    ("f32", "f32", "weights=f32,kv=f32"),
];

/// A policy, its window and its protected prefix.
#[derive(Clone, Copy)]
struct Evicting(&'static str, usize, usize);

const WHOLE: &str = "weights=native,kv=q8,policy=none";
const EVICTING: [Evicting; 9] = [
    Evicting("sliding", 256, 4),
    Evicting("snapkv", 256, 4),
    Evicting("h2o", 256, 4),
    Evicting("sliding", 256, 0),
    Evicting("snapkv", 256, 0),
    Evicting("h2o", 256, 0),
    Evicting("sliding", 1024, 4),
    Evicting("snapkv", 1024, 4),
    Evicting("h2o", 1024, 0),
];

impl Evicting {
    fn settings(self) -> String {
        let Evicting(policy, window, prefix) = self;
        format!("weights=native,kv=q8,policy={policy},window={window},prefix={prefix}")
    }
}

/// Tokens between a fact and its question, as in the questions.
const DISTANCES: [usize; 2] = [400, 1300];

/// Measures with `program`, and writes the tables to `out` or into the page.
pub fn run(model: &Path, program: &Path, out: Option<&Path>) -> Result<()> {
    let tables = [types(model, program)?, evictions(model, program)?].join("\n");
    let Some(file) = out else {
        let page = command::root().join(README);
        let name = model.file_name().unwrap_or_default().to_string_lossy();
        let old = fs::read_to_string(&page).map_err(|e| Error::at(&page, e))?;
        let new = replace_tables(&old, &name, &tables).ok_or_else(|| {
            Error::Failed(format!("{README}: has no place for tables of {name}: {} and {END}", begin(&name)))
        })?;
        atomic_file::write(&page, new.as_bytes()).map_err(|e| Error::at(&page, e))?;
        eprintln!("written: the tables of {name} in {README}");
        return Ok(());
    };
    atomic_file::write(file, tables.as_bytes()).map_err(|e| Error::at(file, e))
}

/// Refuses a model whose weights or questions are not there.
pub fn check(model: &Path) -> Result<()> {
    if let Some(file) = ["text.txt", "recall.json"].iter().find(|file| !golden(model, file).is_file()) {
        let file = golden(model, file);
        return Err(Error::Usage(format!(
            "{}: is missing, so its quality can't be measured",
            file.display()
        )));
    }
    match fetch::remedy(model) {
        Some(remedy) => Err(Error::Usage(format!("{}: has no weights; {remedy}", model.display()))),
        None => Ok(()),
    }
}

fn golden(model: &Path, file: &str) -> std::path::PathBuf {
    model.join("golden").join(file)
}

const END: &str = "<!-- end of quality -->";

fn begin(name: &str) -> String {
    format!("<!-- quality of {name} -->")
}

/// The page with other tables of this model; `None` where it has no place for them.
fn replace_tables(page: &str, name: &str, tables: &str) -> Option<String> {
    let begin = begin(name);
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}\n\n{tables}\n{END}{after}"))
}

/// Runs `eval` on the rows, the first of which the others are held against.
fn run_eval(model: &Path, program: &Path, (more, rows): (&[&str], &[String])) -> Result<String> {
    let mut command = Command::new(program);
    super::without_settings(&mut command);
    command.args(["eval", "-q", "--format", "jsonl", "-m"]).arg(model);
    command.arg("--file").arg(golden(model, "text.txt")).args(more);
    for (i, row) in rows.iter().enumerate() {
        command.arg(if i == 0 { "--against" } else { "--settings" }).arg(row);
    }
    eprintln!("$ {}", command::show(&command));
    Ok(String::from_utf8_lossy(&command::stdout(&mut command)?).into_owned())
}

fn types(model: &Path, program: &Path) -> Result<String> {
    let rows = TYPES.map(|(_, _, settings)| settings.to_string());
    let lines = run_eval(model, program, (&["--chunk", "512"], &rows))?;
    Ok(types_table(&result::parse_predictions(&lines, rows.len())?))
}

fn types_table(found: &[Measurement]) -> String {
    let head = "| weights | KV cache | perplexity | change | KL, nats | same top token |\n\
                |---|---|---:|---:|---:|---:|\n";
    let line = |((weights, kv, _), row): (&(&str, &str, &str), &Measurement)| {
        format!("| {weights} | {kv} | {} |\n", cells(row).join(" | "))
    };
    TYPES.iter().zip(found).map(line).fold(head.to_string(), |text, line| text + &line)
}

fn evictions(model: &Path, program: &Path) -> Result<String> {
    let rows: Vec<String> = [WHOLE.into()].into_iter().chain(EVICTING.map(Evicting::settings)).collect();
    let recall = golden(model, "recall.json").display().to_string();
    let more = ["--chunk", "2048", "--limit", "3", "--recall", &recall];
    let lines = run_eval(model, program, (&more, &rows))?;
    Ok(evictions_table(&result::parse(&lines, rows.len())?))
}

fn evictions_table(found: &[Measurement]) -> String {
    let mut text =
        "| policy | window | protected prefix | perplexity | change | KL, nats | same top token | \
                    recall 400 | 1,300 |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
            .to_string();
    let whole = ["none".to_string(), "–".into(), "–".into()];
    let names = EVICTING
        .map(|Evicting(policy, window, prefix)| [policy.to_string(), window.to_string(), prefix.to_string()]);
    for (name, row) in [whole].iter().chain(&names).zip(found) {
        let of = |Score { kept, full }| format!("{kept}/{full}");
        let recalled = DISTANCES.map(|distance| of(row.recall.of(|group| group.distance == distance)));
        let line = [&name[..], &cells(row), &recalled].concat().join(" | ");
        text += &format!("| {line} |\n");
    }
    text
}

/// Perplexity, and how far it is from the first row's.
fn cells(row: &Measurement) -> [String; 4] {
    let perplexity = format!("{:.3}", row.perplexity);
    match row.against {
        None => [perplexity, "–".into(), "–".into(), "–".into()],
        Some((change, kl, top)) => {
            [perplexity, format_signed(100.0 * change), format!("{kl:.4}"), format!("{:.2} %", 100.0 * top)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::model_dir;

    #[test]
    fn tables_take_the_place_of_those_of_their_model() {
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
        let rows = |n| vec![Measurement::default(); n];
        let (types, evictions) =
            (types_table(&rows(TYPES.len())), evictions_table(&rows(1 + EVICTING.len())));
        for (table, lines, cells) in [(&types, TYPES.len() + 2, 6), (&evictions, EVICTING.len() + 3, 9)] {
            assert_eq!(table.lines().count(), lines, "{table}");
            assert!(table.lines().all(|line| line.matches('|').count() == cells + 1), "{table}");
        }
        let e = check(&model_dir("qwen2.5-0.5b").unwrap()).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("text.txt: is missing"), "{e}");
    }
}
