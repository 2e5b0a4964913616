//! Compares with another program: each row of `antigravity bench` and the row of llama.cpp's `llama-bench`, or of
//! another version of this program, in turn.

use crate::command;
use crate::error::{Error, Result};
use crate::table::{Spread, UNKNOWN, format_short, format_table, to_cells};
use files::source::gguf::{find_only_gguf, is_gguf};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The other program, and its model file.
pub struct Peer {
    program: PathBuf,
    model: PathBuf,
    is_ours: bool,
}

/// A row of ours that the peer measures as well.
#[derive(Deserialize)]
struct BenchRow {
    test: String,
    n_prompt: u64,
    n_gen: u64,
    depth: u64,
    threads: u64,
    kv_type: String,
}

impl Peer {
    /// The program in the variable `PEER`.
    pub fn of_environment(model: &Path) -> Result<Option<Peer>> {
        let named = std::env::var_os("PEER").filter(|program| !program.is_empty());
        named.map(|program| Peer::new(program.into(), model)).transpose()
    }

    fn new(program: PathBuf, model: &Path) -> Result<Peer> {
        let is_ours =
            program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("antigravity"));
        if is_ours || is_gguf(model) {
            return Ok(Peer { program, model: model.into(), is_ours });
        }
        let only = find_only_gguf(model).map_err(|e| Error::Failed(e.to_string()))?;
        let no_file = || {
            let model = model.display();
            Error::Usage(format!(
                "PEER: llama-bench reads GGUF files, and {model} has none; give another --model"
            ))
        };
        Ok(Peer { program, model: only.ok_or_else(no_file)?, is_ours })
    }

    /// Measures one row; returns tokens per second and the build of the program.
    fn measure(&self, row: &BenchRow, rest: &[String]) -> Result<(f64, Value)> {
        let mut bench = Command::new(&self.program);
        if self.is_ours {
            bench.args(["bench", "--output", "json", "-m"]).arg(&self.model).args(row.flags()).args(rest);
        } else {
            bench.args(["-o", "json", "-ngl", "0", "-m"]).arg(&self.model).args(row.llama_bench_flags());
            // The only other flag that it shares is the number of repetitions.
            let repetitions =
                rest.iter().position(|word| word == "-r").map(|at| &rest[at..rest.len().min(at + 2)]);
            bench.args(repetitions.unwrap_or_default());
        }
        let out = command::output(&mut bench)?;
        let printed: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        let (speed, build) = if self.is_ours {
            (&printed["rows"][0]["tokens_per_second"], &printed["version"])
        } else {
            (&printed[0]["avg_ts"], &printed[0]["build_commit"])
        };
        if let Some(speed) = speed.as_f64().filter(|speed| out.status.success() && *speed > 0.0) {
            return Ok((speed, build.clone()));
        }
        let why = command::last_line(&String::from_utf8_lossy(&out.stderr));
        let (program, why) = (self.program.display(), why.unwrap_or("no speed in its JSON".into()));
        Err(Error::Failed(format!("PEER={program} ended with {} and gave no result: {why}", out.status)))
    }
}

impl BenchRow {
    /// Parses a row; `None` for batches, which `llama-bench` does not have.
    fn parse(row: &Value) -> Option<BenchRow> {
        serde_json::from_value(row.clone()).ok().filter(|row: &BenchRow| !row.test.contains(" x"))
    }

    /// Flags of `antigravity bench` for this row alone.
    fn flags(&self) -> Vec<String> {
        let numbers = [("-p", self.n_prompt), ("-n", self.n_gen), ("-d", self.depth), ("-t", self.threads)];
        let numbers = numbers.into_iter().flat_map(|(flag, n)| [flag.to_string(), n.to_string()]);
        numbers.chain(["--kv-type".into(), self.kv_type.clone()]).collect()
    }

    fn llama_bench_flags(&self) -> Vec<String> {
        let depth = Some(("-d", self.depth)).filter(|(_, depth)| *depth > 0);
        let numbers = [("-p", self.n_prompt), ("-n", self.n_gen), ("-t", self.threads)];
        numbers.into_iter().chain(depth).flat_map(|(flag, n)| [flag.to_string(), n.to_string()]).collect()
    }
}

/// Measures each row with both programs in turn, `runs` times. `ours` runs `antigravity bench` with the given flags.
pub fn measure_beside(
    peer: &Peer,
    (rows, runs): (&[Value], u64),
    flags: &[String],
    mut ours: impl FnMut(&[String]) -> Result<Value>,
) -> Result<Value> {
    let rest = remove_lists(flags);
    let rows: Vec<BenchRow> = rows.iter().filter_map(BenchRow::parse).collect();
    let mut speeds = vec![(Vec::new(), Vec::new()); rows.len()];
    let mut build = Value::Null;
    for i in 0..runs {
        for (row, (mine, theirs)) in rows.iter().zip(&mut speeds) {
            eprintln!("{} and {}: run {} of {runs}", row.test, peer.program.display(), i + 1);
            // The programs take turns in being first.
            for peers_turn in [i % 2 == 1, i % 2 == 0] {
                if peers_turn {
                    let (speed, of) = peer.measure(row, &rest)?;
                    theirs.push(speed);
                    build = of;
                } else {
                    let found = ours(&[row.flags(), rest.clone()].concat())?;
                    mine.extend(found["rows"][0]["tokens_per_second"].as_f64());
                }
            }
        }
    }
    let line = |(row, (mine, theirs)): (&BenchRow, &(Vec<f64>, Vec<f64>))| {
        let ratios = Spread::of(mine.iter().zip(theirs).map(|(mine, theirs)| mine / theirs));
        json!({"test": row.test, "threads": row.threads, "kv_type": row.kv_type, "ours": mine, "theirs": theirs,
               "ratio": ratios.map(|r| r.median), "min": ratios.map(|r| r.min), "max": ratios.map(|r| r.max)})
    };
    let lines: Vec<Value> = rows.iter().zip(&speeds).map(line).collect();
    Ok(json!({"program": peer.program.display().to_string(), "build": build, "rows": lines}))
}

/// Flags with lists of values, one for each row.
const LISTS: [&str; 11] = [
    "-p",
    "--n-prompt",
    "-n",
    "--n-gen",
    "-d",
    "--depth",
    "--n-depth",
    "-t",
    "--threads",
    "--kv-type",
    "--batch",
];
const REPETITIONS: [&str; 2] = ["-r", "--repetitions"];

/// The flags without [`LISTS`], and the number of repetitions at the end.
fn remove_lists(flags: &[String]) -> Vec<String> {
    let (mut rest, mut repetitions) = (Vec::new(), None);
    let mut words = flags.iter();
    while let Some(word) = words.next() {
        let name = LISTS.iter().chain(&REPETITIONS).find(|name| {
            let more = word.strip_prefix(**name);
            more.is_some_and(|more| more.is_empty() || more.starts_with('=') || !name.starts_with("--"))
        });
        let Some(name) = name else {
            rest.push(word.clone());
            continue;
        };
        let inline = word[name.len()..].trim_start_matches('=');
        let value = if inline.is_empty() { words.next().cloned() } else { Some(inline.into()) };
        repetitions = if REPETITIONS.contains(name) { value } else { repetitions };
    }
    rest.extend(repetitions.into_iter().flat_map(|n| ["-r".to_string(), n]));
    rest
}

/// The table of a record of [`measure_beside`].
pub fn table(record: &Value) -> String {
    let rows = record["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let text = |value: &Value| value.as_str().map_or_else(|| UNKNOWN.to_string(), command::one_line);
    let median = |speeds: &Value| {
        let speeds = speeds.as_array().into_iter().flatten().filter_map(Value::as_f64);
        format_short(Spread::of(speeds).map(|s| s.median))
    };
    let line = |row: &Value| {
        let mut cells = vec![text(&row["test"]), row["threads"].to_string(), text(&row["kv_type"])];
        cells.extend(["ours", "theirs"].map(|key| median(&row[key])));
        cells.extend(["ratio", "min", "max"].map(|key| format_short(row[key].as_f64())));
        cells
    };
    let titles = ["test", "threads", "KV", "tokens/s", "peer", "ratio", "min", "max"];
    let (program, build) = (text(&record["program"]), text(&record["build"]));
    let head = format!("In turn with {program} (build {build}); llama.cpp's cache has its default type\n\n");
    head + &format_table(to_cells(titles), rows.iter().map(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    /// A fake `llama-bench` in a folder with a GGUF file.
    fn stand_in(name: &str, script: &str) -> (PathBuf, Peer) {
        let dir = std::env::temp_dir().join(format!("xtask-peer-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let program = dir.join("llama-bench");
        fs::write(dir.join("m.gguf"), "").unwrap();
        command::write_script(&program, &format!("echo \"theirs $*\" >> {}/log\n{script}", dir.display()));
        let peer = Peer::new(program, &dir).unwrap();
        (dir, peer)
    }

    #[test]
    fn rows_of_both_programs_alternate_and_ratios_compare_one_turn() {
        let (dir, peer) = stand_in("rows", "echo '[{\"avg_ts\": 50.0, \"build_commit\": \"abc123\"}]'");
        let row = |test: &str, n_gen: u64, depth: u64| json!({"test": test, "n_prompt": 0, "n_gen": n_gen, "depth": depth, "threads": 2, "kv_type": "q4"});
        let rows = [row("tg32 @ d64", 32, 64), row("tg32 x8", 32, 0)];
        let mut speed = 100.0;
        let flags = words("-p 512 -n32 -d 0,64 -r 3 --backend cpu");
        let record = measure_beside(&peer, (&rows, 2), &flags, |flags| {
            let log = dir.join("log");
            let before = fs::read_to_string(&log).unwrap_or_default();
            fs::write(&log, format!("{before}ours {}\n", flags.join(" "))).unwrap();
            speed += 50.0;
            Ok(json!({"rows": [{"tokens_per_second": speed}]}))
        });
        let record = record.unwrap();
        let theirs =
            format!("theirs -o json -ngl 0 -m {} -p 0 -n 32 -t 2 -d 64 -r 3", dir.join("m.gguf").display());
        let ours = "ours -p 0 -n 32 -d 64 -t 2 --kv-type q4 --backend cpu -r 3";
        let log = fs::read_to_string(dir.join("log")).unwrap();
        assert_eq!(log.lines().collect::<Vec<_>>(), [ours, &theirs, &theirs, ours]);
        assert_eq!((&record["rows"][0]["ratio"], &record["build"]), (&json!(3.5), &json!("abc123")));
        assert!(table(&record).contains(" 175.0 | 50.00 |  3.50 | 3.00 | 4.00 |"), "{}", table(&record));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_peer_that_fails_is_named_in_a_line_and_lists_are_taken_out() {
        let (dir, peer) = stand_in("fails", "echo 'error: no such model' >&2; exit 1");
        let row =
            json!({"test": "pp8", "n_prompt": 8, "n_gen": 0, "depth": 0, "threads": 1, "kv_type": "q4"});
        let ours = |_: &[String]| Ok(json!({"rows": [{"tokens_per_second": 1.0}]}));
        let said = measure_beside(&peer, (&[row], 1), &[], ours).unwrap_err().to_string();
        assert!(said.contains("PEER=") && said.ends_with("error: no such model"), "{said}");
        fs::remove_dir_all(dir).unwrap();
        let said = Peer::new("llama-bench".into(), &command::root().join("models/story")).err().unwrap();
        assert!(said.exit_code() == 2 && said.to_string().contains("GGUF"), "{said}");
        let rest = remove_lists(&words("-p 1,2 --n-gen=4 -t2 --pin 1 -r=7 --kv-type q8 --prompt-file x"));
        assert_eq!(rest, words("--pin 1 --prompt-file x -r 7"));
    }
}
