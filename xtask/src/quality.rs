//! `cargo xtask quality`: measures the cost of KV cache types and eviction policies on the bundled model or on a real
//! one, as Markdown. The engine is bit-exact on every machine, and so are these tables.

mod cache_types;
mod hard_keys;
mod real;
mod result;

use crate::error::{AtPath, Error, Result};
use crate::{build, command};
use clap::Args;
use files::atomic_file;
use result::{Measurement, Score};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Args)]
pub struct QualityArgs {
    /// story, or smollm2-135m, whose tables go into models/story/README.md
    #[arg(long, value_name = "M", default_value = "story")]
    model: String,
    /// Write the tables to this file instead
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure this program [default: the test build]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Measure only the rows that tests check
    #[arg(long)]
    quick: bool,
    /// Measure what each type of the cache costs on three models, for a table in models/story/README.md
    #[arg(long, conflicts_with_all = ["model", "program", "quick"])]
    cache_types: bool,
}

/// A row of a table: its first cells, and its settings for `eval`.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    labels: Vec<String>,
    settings: String,
}

impl Row {
    fn new(labels: &[&str], settings: impl Into<String>) -> Row {
        Row { labels: labels.iter().map(|label| label.to_string()).collect(), settings: settings.into() }
    }
}

const SHARE: &str = "25%";
/// Policies with the number of first tokens that each keeps. Attention sinks help sliding: perplexity 1.688, and 1.719
/// without them (f32 cache). Policies that use attention scores find the sinks by themselves: H2O has 1.556 either way.
const EVICTING: [(&str, usize); 3] = [("sliding", 4), ("snapkv", 0), ("h2o", 0)];
/// Types of keys and values; the first is lossless.
const TYPES: [(&str, &str); 5] = [("f32", "f32"), ("f16", "f16"), ("q8", "q8"), ("q8", "q4"), ("q4", "q4")];
/// The default type.
const DEFAULT: &str = "q4";

/// Every policy with every type; the first row is the baseline.
fn all_rows() -> Vec<Row> {
    let evicting =
        EVICTING.map(|(name, prefix)| (name, format!("policy={name},window={SHARE},prefix={prefix}")));
    let policies = [("none", "policy=none".to_string())].into_iter().chain(evicting);
    let row = |(k, v): (&str, &str), name: &str, policy: &str| {
        let kv = if k == v { k.to_string() } else { format!("{k} keys, {v} values") };
        Row::new(&[name, &kv], format!("k={k},v={v},{policy}"))
    };
    policies.flat_map(|(name, policy)| TYPES.map(|kv| row(kv, name, &policy))).collect()
}

/// The rows that tests check.
fn quick_rows() -> Vec<Row> {
    let rows = all_rows();
    rows.iter().filter(|row| **row == rows[0] || row.labels[1] == DEFAULT).cloned().collect()
}

pub fn run(args: &QualityArgs) -> Result<()> {
    if args.cache_types {
        return cache_types::run(args.out.as_deref());
    }
    let (model, is_story) = (build::model_dir(&args.model)?, args.model == "story");
    if !is_story {
        real::check(&model)?;
        if args.quick {
            return Err(Error::Usage("--quick: only for the story model, which tests check".into()));
        }
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => build::build_tested(&model)?,
    };
    if !is_story {
        return real::run(&model, &program, args.out.as_deref());
    }
    let rows = if args.quick { quick_rows() } else { all_rows() };
    let text = story_tables(&rows, &measure(&program, &rows)?);
    match &args.out {
        Some(file) => atomic_file::write_file(file, text.as_bytes()).at(file),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

/// Runs `eval` on the rows, with the first as the baseline, without settings from the environment.
fn run_eval(program: &Path, model: &Path, inputs: &[&str], rows: &[Row]) -> Result<String> {
    let mut eval = Command::new(program);
    command::remove_settings(&mut eval);
    eval.args(["eval", "-q", "--format", "jsonl", "-m"]).arg(model).args(inputs);
    for (i, row) in rows.iter().enumerate() {
        eval.arg(if i == 0 { "--against" } else { "--settings" }).arg(&row.settings);
    }
    eprintln!("$ {}", command::show(&eval));
    Ok(String::from_utf8_lossy(&command::stdout(&mut eval)?).into_owned())
}

/// Measures the rows on the story model.
fn measure(program: &Path, rows: &[Row]) -> Result<Vec<Measurement>> {
    let model = build::model_dir("story")?;
    let golden = |file: &str| model.join("golden").join(file).display().to_string();
    let inputs = ["--tokens", &golden("eval_tokens.json"), "--recall", &golden("recall.json")];
    result::parse(&run_eval(program, &model, &inputs, rows)?, rows.len())
}

/// The text above the story model's table.
const HOW_TO_READ: &str = "\
Slots and KiB are what is left of the cache after a prompt: everything, or with a policy a quarter of the prompt; means
over 60 prompts of 300 to 1,500 tokens. Perplexity, its change, the KL divergence and how often the most probable token
is the same are over 20,440 held-out predictions in chunks of 512 tokens, in which a policy evicts down to a quarter of
the chunk again and again, against the first row. Recall is of facts stated 300, 800 and 1,400 tokens before the
question that ends the prompt, in plain text and in chats: of the answers that the model gives in single precision with
all of the cache, how many it still gives. So a row without a policy shows what the type costs, and a row with `f32` what
the policy costs.
";

const HEAD: &str = "| policy | KV cache | slots kept | KiB kept | perplexity | change | KL, nats | same top token | \
                    recall 300 | 800 | 1,400 | plain | chat | all |\n\
                    |---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";

/// The story model's table with its explanation.
fn story_tables(rows: &[Row], found: &[Measurement]) -> String {
    format!("{HOW_TO_READ}\n{HEAD}{}", lines(rows, found, story_cells))
}

/// The lines of a table: the labels of each row and the cells of its measurement.
fn lines<T>(rows: &[Row], found: &[T], cells: impl Fn(&T) -> Vec<String>) -> String {
    let line = |(row, found): (&Row, &T)| {
        format!("| {} |\n", [row.labels.clone(), cells(found)].concat().join(" | "))
    };
    rows.iter().zip(found).map(line).collect()
}

fn story_cells(row: &Measurement) -> Vec<String> {
    let recall = &row.recall;
    let (all, share) = (recall.all, 100.0 * recall.all.kept as f64 / recall.all.full as f64);
    let mut cells = vec![format!("{:.1} %", 100.0 * recall.slots), format!("{:.0}", recall.bytes / 1024.0)];
    cells.extend(prediction_cells(row, 6));
    cells.extend([300, 800, 1400].map(|distance| recall.of(|group| group.distance == distance).to_string()));
    cells.extend(["plain", "chat"].map(|form| recall.of(|group| group.form == form).to_string()));
    cells.push(format!("{all} = {share:.1} %"));
    cells
}

/// The cells of a prediction: perplexity with `digits` decimals, its change, KL divergence, equal top tokens.
fn prediction_cells(row: &Measurement, digits: usize) -> [String; 4] {
    let perplexity = format!("{:.digits$}", row.perplexity);
    let Some((change, kl, top)) = row.against else {
        return [perplexity, "–".into(), "–".into(), "–".into()];
    };
    let change = match format!("{:+.3}", 100.0 * change) {
        zero if zero == "-0.000" || zero == "+0.000" => "0.000 %".into(),
        number => format!("{number} %"),
    };
    let kl_digits = digits.max(4);
    [perplexity, change, format!("{kl:.kl_digits$}"), format!("{:.2} %", 100.0 * top)]
}

/// Maximum relative change of perplexity with a four-bit cache.
const MAX_Q4_CHANGE: f64 = 0.01;
/// The share of a full cache's recall that SnapKV keeps, and sliding does not.
const MIN_RECALL: f64 = 0.9;

/// The page with the tables.
const README: &str = "models/story/README.md";

/// Measures the rows of `--quick` and returns promises, each with `true` if it holds: of the cache, and that the table
/// in the story model's README has the measured values.
pub fn promises() -> Result<Vec<(String, bool)>> {
    let rows = quick_rows();
    let program = build::build_tested(&build::model_dir("story")?)?;
    let found = measure(&program, &rows)?;
    print!("{}", story_tables(&rows, &found));
    let readme = command::root().join(README);
    let readme = fs::read_to_string(&readme).at(&readme)?;
    let mut promises = check_promises(&rows, &found)?;
    for line in lines(&rows, &found, story_cells).lines() {
        let holds = readme.lines().any(|l| l == line);
        promises.push((format!("{README} has the results of `cargo xtask quality`: {line}"), holds));
    }
    promises.extend(hard_keys::promises(&program)?);
    Ok(promises)
}

/// The promises of the cache.
fn check_promises(rows: &[Row], found: &[Measurement]) -> Result<Vec<(String, bool)>> {
    let of = |policy: &str, kv: &str| {
        let row = rows.iter().position(|row| row.labels == [policy, kv]);
        row.map(|i| &found[i]).ok_or_else(|| Error::Failed(format!("no row for {policy} with {kv}")))
    };
    let (full, q4) = (of("none", "f32")?, of("none", DEFAULT)?);
    let change = (q4.perplexity / full.perplexity - 1.0).abs();
    let share = |policy| {
        let Score { kept, .. } = of(policy, DEFAULT)?.recall.all;
        Ok::<f64, Error>(kept as f64 / full.recall.all.kept as f64)
    };
    let (snapkv, sliding) = (share("snapkv")?, share("sliding")?);
    Ok(vec![
        (format!("perplexity with q4 within 1.0 % of f32: {:.3} %", 100.0 * change), change <= MAX_Q4_CHANGE),
        (
            format!("SnapKV at {SHARE} keeps 90 % of the recall: {:.1} %", 100.0 * snapkv),
            snapkv >= MIN_RECALL,
        ),
        (format!("sliding at {SHARE} does not: {:.1} %", 100.0 * sliding), sliding < MIN_RECALL),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use result::{Group, Recall};

    #[test]
    fn every_policy_is_measured_with_every_type_and_has_a_cell_for_every_column() {
        let (all, quick) = (all_rows(), quick_rows());
        assert_eq!((all.len(), quick.len(), &all[0]), (20, 5, &quick[0]));
        assert_eq!(all[0], Row::new(&["none", "f32"], "k=f32,v=f32,policy=none"));
        assert_eq!(quick[2].settings, "k=q4,v=q4,policy=sliding,window=25%,prefix=4");
        assert_eq!(all[3].labels[1], "q8 keys, q4 values");
        let score = |kept, full| Score { kept, full };
        let group = |form: &str, distance, score| Group { form: form.into(), distance, score };
        let groups = vec![group("plain", 300, score(2, 2)), group("chat", 800, score(1, 2))];
        let recall = Recall { slots: 1.0, bytes: 2048.0, all: score(3, 4), groups, ..Recall::default() };
        let full = Measurement { perplexity: 1.5, against: None, recall };
        let other = Measurement { against: Some((-0.000001, 0.25, 0.5)), ..full.clone() };
        let text = story_tables(&quick, &[full, other]);
        let lines: Vec<&str> = text.lines().filter(|l| l.starts_with('|')).collect();
        assert!(lines.len() == 4 && lines.iter().all(|l| l.matches('|').count() == 15), "{text}");
        let first = "| none | f32 | 100.0 % | 2 | 1.500000 | – | – | – | 2/2 | 1/2 | 0/0 | 2/2 | 1/2 | 3/4 = 75.0 % |";
        assert_eq!(lines[2], first);
        assert!(lines[3].contains("| 0.000 % | 0.250000 | 50.00 % |"));
    }

    #[test]
    fn a_measurement_that_breaks_a_promise_fails() {
        let with = |perplexities: [f64; 2], kept: [usize; 3]| {
            let row = |perplexity, kept| Measurement {
                perplexity,
                recall: Recall { all: Score { kept, full: 47 }, ..Recall::default() },
                ..Measurement::default()
            };
            let evicting = kept.map(|kept| row(1.5, kept));
            let rows = [vec![row(perplexities[0], 46), row(perplexities[1], 46)], evicting.to_vec()].concat();
            let promises = check_promises(&quick_rows(), &rows).unwrap();
            promises.iter().map(|(_, holds)| *holds).collect::<Vec<_>>()
        };
        assert_eq!(with([1.5, 1.514], [3, 42, 0]), [true, true, true]);
        assert_eq!(with([1.5, 1.516], [42, 41, 47]), [false, false, false]);
        assert_eq!(with([1.5, 1.484], [41, 47, 0]), [false, true, true]);
    }
}
