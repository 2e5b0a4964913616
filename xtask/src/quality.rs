//! `cargo xtask quality`: what the KV cache's types and eviction policies cost, measured on the bundled model and
//! written as Markdown. The engine's bits are the same on every machine, and so is every byte of this.

mod result;
mod table;

use crate::args::Args;
use crate::error::{Error, Result};
use crate::{build, sh};
use result::Measured;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Rows that are measured together and held against the first.
pub struct Group {
    /// What the weights are.
    weights: &'static str,
    /// What the table is about.
    about: &'static str,
    rows: Vec<Spec>,
}

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

/// First tokens that sliding keeps besides: attention sinks. Without them it forgets as much, and predicts worse.
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
    fn settings(self, weights: &str) -> String {
        let (k, v) = self.kv;
        format!("k={k},v={v},weights={weights},{}", self.policy.settings())
    }

    /// As the table says it.
    fn kv_name(self) -> String {
        match self.kv {
            (k, v) if k == v => k.into(),
            (k, v) => format!("{k} keys, {v} values"),
        }
    }
}

/// Every policy with every type, with the weights as they were trained: what the cache alone does.
fn all() -> Group {
    let policies = [&[Policy::None][..], &EVICTING].concat();
    let rows = policies.iter().flat_map(|&policy| TYPES.map(|kv| Spec { policy, kv }));
    Group {
        weights: "f32",
        about: "Weights as they were trained: what the cache alone does.",
        rows: rows.collect(),
    }
}

/// Every policy as the program runs unless told otherwise.
fn usual() -> Group {
    let q4 = ("q4", "q4");
    let mut rows =
        vec![Spec { policy: Policy::None, kv: ("f32", "f32") }, Spec { policy: Policy::None, kv: q4 }];
    rows.extend(EVICTING.map(|policy| Spec { policy, kv: q4 }));
    Group { weights: "q4_0", about: "Weights in Q4_0, as they are unless told otherwise.", rows }
}

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, &["--out", "--program"], &["--quick"])?;
    args.no_rest()?;
    let program = match args.value("--program") {
        Some(program) => PathBuf::from(program),
        None => built()?,
    };
    let groups = if args.has("--quick") { vec![usual()] } else { vec![all(), usual()] };
    let mut text = String::from(table::HOW_TO_READ);
    for group in &groups {
        text += &table::markdown(group, &measure(&program, group)?);
    }
    match args.value("--out") {
        Some(file) => fs::write(file, text).map_err(|e| Error::at(Path::new(file), e)),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

/// The program for the bundled model.
fn built() -> Result<PathBuf> {
    sh::run(&mut build::quick(&build::model_dir("story")?))?;
    Ok(build::quick_binary())
}

/// One result for each row of the group.
fn measure(program: &Path, group: &Group) -> Result<Vec<Measured>> {
    let mut command = eval(program)?;
    let golden = build::model_dir("story")?.join("golden");
    command.arg("--recall").arg(golden.join("recall.json"));
    let (first, others) = group.rows.split_first().expect("a group has rows");
    command.arg("--against").arg(first.settings(group.weights));
    others.iter().for_each(|row| {
        command.arg("--settings").arg(row.settings(group.weights));
    });
    eprintln!("$ {}", sh::show(&command));
    let lines = sh::stdout(&mut command)?;
    result::parse(&String::from_utf8_lossy(&lines), group.rows.len())
}

/// `eval` of the held-out tokens, free of settings from this process's environment.
fn eval(program: &Path) -> Result<Command> {
    let mut command = Command::new(program);
    for (key, _) in std::env::vars_os().filter(|(k, _)| k.to_string_lossy().starts_with("ANTIGRAVITY_")) {
        command.env_remove(key);
    }
    let model = build::model_dir("story")?;
    command.args(["eval", "-q", "--format", "jsonl", "-m"]).arg(&model);
    command.arg("--tokens").arg(model.join("golden/eval_tokens.json"));
    Ok(command)
}

/// How far a four-bit cache's perplexity may be from that of a single-precision one.
const Q4_CHANGE: f64 = 0.01;
/// What SnapKV must keep of the recall of a full cache, and sliding does not.
const KEPT: f64 = 0.9;

/// Measures the rows that users get and returns what was promised of them, each with whether it holds: the promises of
/// the cache, and that the README's table is what this machine measures.
pub fn promises() -> Result<Vec<(String, bool)>> {
    let group = usual();
    let found = measure(&built()?, &group)?;
    print!("{}", table::markdown(&group, &found));
    let readme = sh::root().join("README.md");
    let readme = fs::read_to_string(&readme).map_err(|e| Error::at(&readme, e))?;
    let mut promises = held(&group, &found)?;
    for line in table::lines(&group, &found) {
        let holds = readme.lines().any(|l| l == line);
        promises.push((format!("README.md has what `cargo xtask quality` measures: {line}"), holds));
    }
    Ok(promises)
}

/// The promises of the cache.
fn held(group: &Group, found: &[Measured]) -> Result<Vec<(String, bool)>> {
    let of = |policy: &str, kv: &str| {
        let row = group.rows.iter().position(|r| r.policy.name() == policy && r.kv == (kv, kv));
        row.map(|i| &found[i]).ok_or_else(|| Error::Failed(format!("no row for {policy} with {kv}")))
    };
    let (full, q4) = (of("none", "f32")?, of("none", "q4")?);
    let change = (q4.perplexity / full.perplexity - 1.0).abs();
    let share = |policy| Ok::<f64, Error>(of(policy, "q4")?.all.kept as f64 / full.all.kept as f64);
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
    use result::Score;

    #[test]
    fn every_policy_is_measured_with_every_type() {
        let (all, usual) = (all(), usual());
        assert_eq!(all.rows.len(), 20);
        for group in [&all, &usual] {
            let full = Spec { policy: Policy::None, kv: ("f32", "f32") };
            assert_eq!(group.rows[0], full, "what the others are held against");
        }
        assert_eq!(all.rows[0].settings("f32"), "k=f32,v=f32,weights=f32,policy=none");
        assert_eq!(
            usual.rows[2].settings("q4_0"),
            "k=q4,v=q4,weights=q4_0,policy=sliding,window=25%,prefix=4"
        );
        assert_eq!(all.rows[3].kv_name(), "q8 keys, q4 values");
    }

    #[test]
    fn promises_can_be_broken() {
        let group = usual();
        let with = |perplexities: [f64; 2], kept: [usize; 3]| {
            let row = |perplexity, kept| Measured {
                perplexity,
                all: Score { kept, full: 47 },
                ..Measured::default()
            };
            let rows = vec![
                row(perplexities[0], 46),
                row(perplexities[1], 46),
                row(1.5, kept[0]),
                row(1.5, kept[1]),
                row(1.5, kept[2]),
            ];
            held(&group, &rows).unwrap().iter().map(|(_, holds)| *holds).collect::<Vec<_>>()
        };
        assert_eq!(with([1.5, 1.514], [3, 42, 0]), [true, true, true]);
        assert_eq!(with([1.5, 1.516], [42, 41, 47]), [false, false, false]);
        assert_eq!(with([1.5, 1.484], [41, 47, 0]), [false, true, true]);
    }
}
