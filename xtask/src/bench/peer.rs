//! llama.cpp beside the program: each row of `antigravity bench` and the same one of `llama-bench`, in turn.

use crate::error::{Error, Result};
use crate::sh;
use crate::table::{Spread, UNKNOWN, cells, markdown, short};
use files::source::gguf::{is_gguf, only_gguf};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// `llama-bench`, and the file that both programs run.
pub struct Peer {
    program: PathBuf,
    gguf: PathBuf,
}

/// A row of ours that it measures as well.
struct Row {
    test: String,
    n_prompt: u64,
    n_gen: u64,
    depth: u64,
    threads: u64,
    kv_type: String,
}

impl Peer {
    /// The program that `PEER` names.
    pub fn of_environment(model: &Path) -> Result<Option<Peer>> {
        let named = std::env::var_os("PEER").filter(|program| !program.is_empty());
        named.map(|program| Peer::new(program.into(), model)).transpose()
    }

    fn new(program: PathBuf, model: &Path) -> Result<Peer> {
        let no_file = || {
            let model = model.display();
            Error::Usage(format!(
                "PEER: llama-bench reads GGUF files, and {model} has none; give --model another"
            ))
        };
        let only = || only_gguf(model).map_err(|e| Error::Failed(e.to_string()));
        let gguf = if is_gguf(model) { Some(model.into()) } else { only()? };
        Ok(Peer { program, gguf: gguf.ok_or_else(no_file)? })
    }

    /// What it prints of one row.
    fn measure(&self, row: &Row, repetitions: Option<&str>) -> Result<Value> {
        let mut bench = Command::new(&self.program);
        bench.args(["-o", "json", "-ngl", "0", "-m"]).arg(&self.gguf);
        bench.args([
            "-p",
            &row.n_prompt.to_string(),
            "-n",
            &row.n_gen.to_string(),
            "-t",
            &row.threads.to_string(),
        ]);
        if row.depth > 0 {
            bench.args(["-d", &row.depth.to_string()]);
        }
        bench.args(repetitions.into_iter().flat_map(|n| ["-r", n]));
        let out = sh::output(&mut bench)?;
        let printed: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        if out.status.success() && speed(&printed[0]).is_some() {
            return Ok(printed[0].clone());
        }
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let why = sh::one_line(
            said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no `avg_ts` in its JSON"),
        );
        let program = self.program.display();
        Err(Error::Failed(format!("PEER={program} ended with {} and gave no result: {why}", out.status)))
    }
}

fn speed(result: &Value) -> Option<f64> {
    result["avg_ts"].as_f64().filter(|speed| *speed > 0.0)
}

impl Row {
    /// `None` for several sequences together, which `llama-bench` does not have.
    fn of(row: &Value) -> Option<Row> {
        let number = |key: &str| row[key].as_u64();
        let row = Row {
            test: row["test"].as_str()?.into(),
            n_prompt: number("n_prompt")?,
            n_gen: number("n_gen")?,
            depth: number("depth")?,
            threads: number("threads")?,
            kv_type: row["kv_type"].as_str()?.into(),
        };
        (!row.test.contains(" x")).then_some(row)
    }

    /// Flags of `antigravity bench` for this row alone.
    fn flags(&self) -> Vec<String> {
        let numbers = [("-p", self.n_prompt), ("-n", self.n_gen), ("-d", self.depth), ("-t", self.threads)];
        let numbers = numbers.into_iter().flat_map(|(flag, n)| [flag.to_string(), n.to_string()]);
        numbers.chain(["--kv-type".into(), self.kv_type.clone()]).collect()
    }
}

/// Measures the rows of a run of ours again, each beside the peer's, `runs` times. `ours` runs `antigravity bench` with
/// these flags.
pub fn beside(
    peer: &Peer,
    rows: &[Value],
    runs: u64,
    flags: &[String],
    mut ours: impl FnMut(&[String]) -> Result<Value>,
) -> Result<Value> {
    let (rest, repetitions) = without_lists(flags);
    let rows: Vec<Row> = rows.iter().filter_map(Row::of).collect();
    let mut speeds = vec![(Vec::new(), Vec::new()); rows.len()];
    let mut build = Value::Null;
    for i in 0..runs {
        for (row, (mine, theirs)) in rows.iter().zip(&mut speeds) {
            eprintln!("{} beside {}: run {} of {runs}", row.test, peer.program.display(), i + 1);
            let mut first = |peer_first: bool| -> Result<()> {
                if peer_first == (i % 2 == 1) {
                    let found = peer.measure(row, repetitions.as_deref())?;
                    theirs.extend(speed(&found));
                    build = found["build_commit"].clone();
                } else {
                    let found = ours(&[row.flags(), rest.clone()].concat())?;
                    mine.extend(found["rows"][0]["tokens_per_second"].as_f64());
                }
                Ok(())
            };
            first(true)?;
            first(false)?;
        }
    }
    let line = |(row, (mine, theirs)): (&Row, &(Vec<f64>, Vec<f64>))| {
        let ratios = Spread::of(mine.iter().zip(theirs).map(|(mine, theirs)| mine / theirs));
        json!({"test": row.test, "threads": row.threads, "kv_type": row.kv_type, "ours": mine, "theirs": theirs,
               "ratio": ratios.map(|r| r.median), "min": ratios.map(|r| r.min), "max": ratios.map(|r| r.max)})
    };
    let lines: Vec<Value> = rows.iter().zip(&speeds).map(line).collect();
    Ok(json!({"program": peer.program.display().to_string(), "build": build, "rows": lines}))
}

/// Flags whose lists make the rows.
const LISTS: [&str; 13] = [
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
    "-r",
    "--repetitions",
];

/// The other flags, and the number of repetitions.
fn without_lists(flags: &[String]) -> (Vec<String>, Option<String>) {
    let (mut rest, mut repetitions) = (Vec::new(), None);
    let mut words = flags.iter();
    while let Some(word) = words.next() {
        let name = LISTS.iter().find(|name| {
            let more = word.strip_prefix(**name);
            more.is_some_and(|more| more.is_empty() || more.starts_with('=') || !name.starts_with("--"))
        });
        let Some(name) = name else {
            rest.push(word.clone());
            continue;
        };
        let inline = word[name.len()..].trim_start_matches('=');
        let value = if inline.is_empty() { words.next().cloned() } else { Some(inline.into()) };
        if ["-r", "--repetitions"].contains(name) {
            repetitions = value;
        }
    }
    // Ours needs it again; it makes no row.
    rest.extend(repetitions.iter().flat_map(|n| ["-r".to_string(), n.clone()]));
    (rest, repetitions)
}

/// The table of a record that [`beside`] made.
pub fn table(record: &Value) -> String {
    let rows = record["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let text = |value: &Value| value.as_str().map_or_else(|| UNKNOWN.to_string(), sh::one_line);
    let median = |speeds: &Value| {
        let speeds = speeds.as_array().into_iter().flatten().filter_map(Value::as_f64);
        short(Spread::of(speeds).map(|s| s.median))
    };
    let line = |row: &Value| {
        let threads = row["threads"].as_u64().unwrap_or(0).to_string();
        let mut cells = vec![text(&row["test"]), threads, text(&row["kv_type"])];
        cells.extend(["ours", "theirs"].map(|key| median(&row[key])));
        cells.extend(["ratio", "min", "max"].map(|key| short(row[key].as_f64())));
        cells
    };
    let titles = ["test", "threads", "KV", "tokens/s", "llama.cpp", "ratio", "min", "max"];
    let (program, build) = (text(&record["program"]), text(&record["build"]));
    let head = format!("In turn with {program} (build {build}), whose cache is of its own default type\n\n");
    head + &markdown(cells(titles), rows.iter().map(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    /// A stand-in for `llama-bench` in a folder with a GGUF file.
    fn stand_in(name: &str, script: &str) -> (PathBuf, Peer) {
        let dir = std::env::temp_dir().join(format!("xtask-peer-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let program = dir.join("llama-bench");
        fs::write(dir.join("m.gguf"), "").unwrap();
        sh::write_script(&program, &format!("echo \"theirs $*\" >> {}/log\n{script}", dir.display()));
        let peer = Peer::new(program, &dir).unwrap();
        (dir, peer)
    }

    #[test]
    fn rows_of_both_programs_alternate_and_ratios_are_theirs_of_one_turn() {
        let (dir, peer) = stand_in("rows", "echo '[{\"avg_ts\": 50.0, \"build_commit\": \"abc123\"}]'");
        let row = |test: &str, n_prompt: u64, n_gen: u64, depth: u64| json!({"test": test, "n_prompt": n_prompt, "n_gen": n_gen, "depth": depth, "threads": 2, "kv_type": "q4"});
        let rows = [row("pp512", 512, 0, 0), row("tg32 @ d64", 0, 32, 64), row("tg32 x8", 0, 32, 0)];
        let mut speed = 100.0;
        let record = beside(&peer, &rows, 2, &words("-p 512 -n32 -d 0,64 -r 3 --backend cpu"), |flags| {
            let log = dir.join("log");
            let before = fs::read_to_string(&log).unwrap_or_default();
            fs::write(&log, format!("{before}ours {}\n", flags.join(" "))).unwrap();
            speed += 50.0;
            Ok(json!({"rows": [{"tokens_per_second": speed}]}))
        });
        let record = record.unwrap();
        let gguf = dir.join("m.gguf");
        let theirs = |more: &str| format!("theirs -o json -ngl 0 -m {} {more} -r 3", gguf.display());
        let ours = |more: &str| format!("ours {more} --kv-type q4 --backend cpu -r 3");
        let (pp, tg) = ("-p 512 -n 0 -d 0 -t 2", "-p 0 -n 32 -d 64 -t 2");
        let (their_pp, their_tg) = ("-p 512 -n 0 -t 2", "-p 0 -n 32 -t 2 -d 64");
        let log = fs::read_to_string(dir.join("log")).unwrap();
        let expected = [
            ours(pp),
            theirs(their_pp),
            ours(tg),
            theirs(their_tg),
            theirs(their_pp),
            ours(pp),
            theirs(their_tg),
            ours(tg),
        ];
        assert_eq!(log.lines().collect::<Vec<_>>(), expected);
        assert_eq!(record["rows"][0]["ours"], json!([150.0, 250.0]));
        assert_eq!((&record["rows"][1]["ratio"], &record["build"]), (&json!(5.0), &json!("abc123")));
        let text = table(&record);
        let cells = |line: &str| line.split('|').map(|c| c.trim().to_string()).collect::<Vec<_>>();
        assert_eq!(
            cells(text.lines().nth(4).unwrap())[1..9],
            ["pp512", "2", "q4", "200.0", "50.00", "4.00", "3.00", "5.00"]
        );
        assert_eq!(text.lines().count(), 6, "{text}");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_peer_that_fails_is_named_in_a_line() {
        for (name, script, why) in [
            ("fails", "echo 'error: no such model' >&2; exit 1", "error: no such model"),
            ("silent", "echo '{}'", "no `avg_ts` in its JSON"),
        ] {
            let (dir, peer) = stand_in(name, script);
            let row =
                json!({"test": "pp8", "n_prompt": 8, "n_gen": 0, "depth": 0, "threads": 1, "kv_type": "q4"});
            let ours = |_: &[String]| Ok(json!({"rows": [{"tokens_per_second": 1.0}]}));
            let said = beside(&peer, &[row], 1, &[], ours).unwrap_err().to_string();
            assert!(said.contains("PEER=") && said.contains(why) && said.lines().count() == 1, "{said}");
            fs::remove_dir_all(dir).unwrap();
        }
        let story = sh::root().join("models/story");
        let said = Peer::new("llama-bench".into(), &story).err().unwrap();
        assert!(said.exit_code() == 2 && said.to_string().contains("GGUF"), "{said}");
    }

    #[test]
    fn lists_are_taken_out_of_the_flags() {
        let (rest, repetitions) =
            without_lists(&words("-p 1,2 --n-gen=4 -t2 --pin 1 -r=7 --kv-type q8 -f x"));
        assert_eq!((rest, repetitions), (words("--pin 1 -f x -r 7"), Some("7".into())));
        assert_eq!(without_lists(&words("--prompt-file x")), (words("--prompt-file x"), None));
    }
}
