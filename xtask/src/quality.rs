//! `cargo xtask quality`: the cost of the KV cache's types and eviction policies, measured on the bundled model, or on a
//! real one, and written as Markdown. The engine's bits are the same on every machine, and so is every byte of this.

mod real;
mod result;
mod table;

use crate::error::{Error, Result};
use crate::{build, command};
use clap::Args;
use files::atomic_file;
use result::Measurement;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Settings of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spec {
    policy: Policy,
    /// Of keys, and of values.
    kv: (&'static str, &'static str),
}

/// A policy with its numbers, at the share of the slots that it keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Policy {
    None,
    /// Name, first tokens that always stay.
    Keeps(&'static str, usize),
}

/// First tokens that sliding always keeps, attention sinks: perplexity 1.688, without them 1.719 (f32 cache). Policies
/// that look at attention find them by themselves: H2O 1.556 either way.
const SINKS: usize = 4;
const SHARE: &str = "25%";
const EVICTING: [Policy; 3] =
    [Policy::Keeps("sliding", SINKS), Policy::Keeps("snapkv", 0), Policy::Keeps("h2o", 0)];
const TYPES: [(&str, &str); 5] = [("f32", "f32"), ("f16", "f16"), ("q8", "q8"), ("q8", "q4"), ("q4", "q4")];

impl Policy {
    fn settings(self) -> String {
        match self {
            Policy::None => "policy=none".into(),
            Policy::Keeps(name, prefix) => format!("policy={name},window={SHARE},prefix={prefix}"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::Keeps(name, _) => name,
        }
    }
}

impl Spec {
    const fn new(policy: Policy, kv: (&'static str, &'static str)) -> Self {
        Self { policy, kv }
    }

    /// As `eval` reads it.
    fn settings(self) -> String {
        let (k, v) = self.kv;
        format!("k={k},v={v},{}", self.policy.settings())
    }

    /// As the table says it.
    fn kv_name(self) -> String {
        match self.kv {
            (k, v) if k == v => k.into(),
            (k, v) => format!("{k} keys, {v} values"),
        }
    }
}

/// The row that the others are held against.
const FULL: Spec = Spec::new(Policy::None, ("f32", "f32"));

/// Every policy with every type.
fn all() -> Vec<Spec> {
    let policies = [&[Policy::None][..], &EVICTING].concat();
    policies.iter().flat_map(|&policy| TYPES.map(|kv| Spec::new(policy, kv))).collect()
}

/// Those that promises are about: the type that users get unless they say otherwise.
fn quick() -> Vec<Spec> {
    all().into_iter().filter(|&row| row == FULL || row.kv == ("q4", "q4")).collect()
}

#[derive(Args)]
pub struct QualityArgs {
    /// story, or smollm2-135m, whose tables are written into models/story/README.md
    #[arg(long, value_name = "M", default_value = "story")]
    model: String,
    /// Write the tables there instead
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measure this program [default: one as tests have it]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Only what promises are about
    #[arg(long)]
    quick: bool,
}

pub fn run(args: &QualityArgs) -> Result<()> {
    let (model, is_story) = (build::model_dir(&args.model)?, args.model == "story");
    if !is_story {
        real::check(&model)?;
        if args.quick {
            return Err(Error::Usage("--quick: only for the story model, whose promises are tested".into()));
        }
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => build::tested(&model)?,
    };
    if !is_story {
        return real::run(&model, &program, args.out.as_deref());
    }
    let rows = if args.quick { quick() } else { all() };
    let text = table::markdown(&rows, &measure(&program, &rows)?);
    match &args.out {
        Some(file) => atomic_file::write(file, text.as_bytes()).map_err(|e| Error::at(file, e)),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

/// Free of settings from this process's environment.
fn without_settings(command: &mut Command) {
    for (key, _) in std::env::vars_os().filter(|(k, _)| k.to_string_lossy().starts_with("ANTIGRAVITY_")) {
        command.env_remove(key);
    }
}

/// One result for each row; the first is [`FULL`].
fn measure(program: &Path, rows: &[Spec]) -> Result<Vec<Measurement>> {
    let mut command = Command::new(program);
    without_settings(&mut command);
    let model = build::model_dir("story")?;
    command.args(["eval", "-q", "--format", "jsonl", "-m"]).arg(&model);
    command.arg("--tokens").arg(model.join("golden/eval_tokens.json"));
    command.arg("--recall").arg(model.join("golden/recall.json"));
    command.arg("--against").arg(FULL.settings());
    for row in rows.iter().filter(|&&row| row != FULL) {
        command.arg("--settings").arg(row.settings());
    }
    eprintln!("$ {}", command::show(&command));
    let lines = command::stdout(&mut command)?;
    result::parse(&String::from_utf8_lossy(&lines), rows.len())
}

/// How far a four-bit cache's perplexity may be from that of a single-precision one.
const Q4_CHANGE: f64 = 0.01;
/// The share of a full cache's recall that SnapKV keeps, and sliding does not.
const KEPT: f64 = 0.9;

/// The page with the table.
const README: &str = "models/story/README.md";

/// Measures the rows of `--quick` and returns promises, each with whether it holds: those of the cache, and that the
/// table in the story model's README is what this machine measures.
pub fn promises() -> Result<Vec<(String, bool)>> {
    let rows = quick();
    let found = measure(&build::tested(&build::model_dir("story")?)?, &rows)?;
    print!("{}", table::markdown(&rows, &found));
    let readme = command::root().join(README);
    let readme = fs::read_to_string(&readme).map_err(|e| Error::at(&readme, e))?;
    let mut promises = check_promises(&rows, &found)?;
    for line in table::lines(&rows, &found) {
        let holds = readme.lines().any(|l| l == line);
        promises.push((format!("{README} has what `cargo xtask quality` measures: {line}"), holds));
    }
    Ok(promises)
}

/// The promises of the cache.
fn check_promises(rows: &[Spec], found: &[Measurement]) -> Result<Vec<(String, bool)>> {
    let of = |policy: &str, kv: &str| {
        let row = rows.iter().position(|r| r.policy.name() == policy && r.kv == (kv, kv));
        row.map(|i| &found[i]).ok_or_else(|| Error::Failed(format!("no row for {policy} with {kv}")))
    };
    let (full, q4) = (of("none", "f32")?, of("none", "q4")?);
    let change = (q4.perplexity / full.perplexity - 1.0).abs();
    let share =
        |policy| Ok::<f64, Error>(of(policy, "q4")?.recall.all.kept as f64 / full.recall.all.kept as f64);
    let (snapkv, sliding) = (share("snapkv")?, share("sliding")?);
    Ok(vec![
        (format!("perplexity with q4 within 1.0 % of f32: {:.3} %", 100.0 * change), change <= Q4_CHANGE),
        (format!("SnapKV at {SHARE} keeps 90 % of the recall: {:.1} %", 100.0 * snapkv), snapkv >= KEPT),
        (format!("sliding at {SHARE} does not: {:.1} %", 100.0 * sliding), sliding < KEPT),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use result::{Recall, Score};

    #[test]
    fn every_policy_is_measured_with_every_type() {
        let (all, quick) = (all(), quick());
        assert_eq!((all.len(), quick.len(), all[0], quick[0]), (20, 5, FULL, FULL));
        assert_eq!(FULL.settings(), "k=f32,v=f32,policy=none");
        assert_eq!(quick[2].settings(), "k=q4,v=q4,policy=sliding,window=25%,prefix=4");
        assert_eq!(all[3].kv_name(), "q8 keys, q4 values");
    }

    #[test]
    fn promises_can_be_broken() {
        let group = quick();
        let with = |perplexities: [f64; 2], kept: [usize; 3]| {
            let row = |perplexity, kept| Measurement {
                perplexity,
                recall: Recall { all: Score { kept, full: 47 }, ..Recall::default() },
                ..Measurement::default()
            };
            let rows = vec![
                row(perplexities[0], 46),
                row(perplexities[1], 46),
                row(1.5, kept[0]),
                row(1.5, kept[1]),
                row(1.5, kept[2]),
            ];
            check_promises(&group, &rows).unwrap().iter().map(|(_, holds)| *holds).collect::<Vec<_>>()
        };
        assert_eq!(with([1.5, 1.514], [3, 42, 0]), [true, true, true]);
        assert_eq!(with([1.5, 1.516], [42, 41, 47]), [false, false, false]);
        assert_eq!(with([1.5, 1.484], [41, 47, 0]), [false, true, true]);
    }
}
