//! `bench`: every output format has the measurements and the machine's limits.

use crate::support::command::*;
use serde_json::Value;

/// A short run with one thread.
const SHORT: [&str; 9] = ["bench", "-p", "8", "-n", "4", "-r", "1", "-t", "1"];

fn bench(more: &[&str]) -> RunOutput {
    let said = antigravity(SHORT).args(more).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    said
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The fields of a row that are numbers above zero.
fn measured(row: &Value) -> Vec<&str> {
    let fields = row.as_object().expect("a row");
    fields.iter().filter(|(_, v)| v.as_f64().is_some_and(|x| x > 0.0)).map(|(k, _)| k.as_str()).collect()
}

#[test]
fn bench_json_has_limits_and_the_cost_of_depth() {
    let all = json(&bench(&["-d", "0,16", "-o", "json"]).out);
    let read = &all["read_bandwidth"][0];
    assert!(read["threads"] == 1 && read["way"].is_string(), "{read}");
    let read = read["gb_per_s"].as_f64().expect("a bandwidth");
    let peak = all["integer_peak"][0]["gops"].as_f64();
    let rows = all["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().filter_map(|r| r["test"].as_str()).collect();
    assert_eq!(names, ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"]);
    let number = |row: usize, key: &str| rows[row][key].as_f64().unwrap_or_else(|| panic!("{key}: {all}"));
    // Of what was read beside the one repetition, not of the run's median.
    let beside = rows[1]["read_gb_per_s_samples"].as_array().expect("rates");
    assert!(beside.len() == 1 && rows[0]["read_gb_per_s_samples"].is_null(), "{all}");
    let percent = 100.0 * number(1, "gb_per_s") / beside[0].as_f64().expect("a rate");
    assert!((number(1, "bandwidth_percent") / percent - 1.0).abs() < 1e-6);
    match peak {
        Some(peak) => {
            assert!((number(0, "peak_percent") * peak / 100.0 / number(0, "gops") - 1.0).abs() < 1e-6)
        }
        None => assert!(rows[0]["peak_percent"].is_null()),
    }
    // 16 slots more than at depth 0, at the bandwidth of the same run.
    use antigravity::dims::{HEAD_DIM, KV_HEADS, LAYERS};
    let slot = 2 * LAYERS * KV_HEADS * numeric::kv::KvType::Q4.row_bytes(HEAD_DIM);
    let predicted = 1e3 / number(1, "tokens_per_second") + 16.0 * slot as f64 / (read * 1e9) * 1e3;
    assert!((number(3, "predicted_ms_per_token") / predicted - 1.0).abs() < 1e-6);
    assert!((number(3, "ms_per_token") * number(3, "tokens_per_second") / 1e3 - 1.0).abs() < 1e-6);
    let deviation = 100.0 * (number(3, "ms_per_token") / predicted - 1.0);
    assert!((number(3, "deviation_percent") - deviation).abs() < 1e-3);
    assert!((0..3).all(|row| rows[row]["ms_per_token"].is_null()));
    assert!(rows[0]["times_decode"].is_f64());
}

#[test]
fn tables_have_them_too() {
    let short = bench(&["-d", "0,16"]).out;
    mentions(&short, &["| test ", "tokens/s |", "% of limit |", "ms/token |", "| model ", "load ms |"]);
    assert!(short.lines().all(|line| line.matches('|').count() <= 6 && line.len() < 72), "{short}");
    let said = bench(&["-d", "0,16", "-v"]);
    let titles = ["% of memory", "GOPS", "% of peak", "x decode", "ms/token", "predicted", "deviation %"];
    mentions(&said.out, &titles);
    mentions(&said.out, &["read GB/s, 1 thread", "integer peak GOPS, 1 thread"]);
    assert_eq!(said.out.split("\n\n").count(), 3, "{}", said.out);
    let csv = bench(&["-o", "csv"]).out;
    let mut lines = csv.lines().map(|l| l.split(',').collect::<Vec<_>>());
    let titles = lines.next().expect("titles");
    for name in ["peak_percent", "deviation_percent", "read_gb_per_s", "peak_gops"] {
        assert!(titles.contains(&name), "{titles:?}");
    }
    assert_eq!(lines.map(|l| l.len()).collect::<Vec<_>>(), [titles.len(); 2]);
}

#[test]
fn no_peak_without_integer_instructions() {
    let args = [&SHORT[..], &["-o", "jsonl"]].concat();
    let said = antigravity(&args).env("ANTIGRAVITY_SIMD", "scalar").run();
    let lines: Vec<Value> = said.out.lines().map(json).collect();
    assert_eq!(lines.len(), 3, "{}", said.err);
    assert_eq!(lines[0]["integer_peak"], Value::Array(Vec::new()));
    assert!(lines[0]["read_bandwidth"][0]["gb_per_s"].is_f64());
    assert!(measured(&lines[1]).contains(&"gops") && lines[1]["peak_percent"].is_null());
}

#[test]
fn a_token_or_a_prompt_is_traced() {
    let temp = TestDir::new();
    let file = temp.path("trace.json");
    let traced = |n: &str| {
        let args = ["-p", "8", "-n", n, "-r", "1", "-t", "1", "--prefill-chunk", "6", "--trace", &file];
        let said = antigravity(["bench"]).args(args).run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        let trace = json(&std::fs::read_to_string(&file).expect("a trace"));
        let tokens: Vec<u64> = (trace["traceEvents"].as_array().expect("events").iter())
            .map(|e| e["args"]["tokens"].as_u64().expect("a number of tokens"))
            .collect();
        let mut lines = said.err.lines().skip_while(|l| !l.starts_with("trace: "));
        let what = lines.next().expect("a heading").to_string();
        assert!(lines.next().is_some_and(|l| l.starts_with("step ")), "{}", said.err);
        assert!(said.err.lines().any(|l| l.starts_with("gate_up ")), "{}", said.err);
        (what, tokens)
    };
    let (what, tokens) = traced("4");
    assert_eq!(what, "trace: one token of tg4, threads 1, KV q4");
    assert!(tokens.iter().all(|&n| n == 1));
    let (what, tokens) = traced("0");
    assert_eq!(what, "trace: pp8, threads 1, KV q4");
    // A chunk of six tokens and one of two.
    assert!(tokens[0] == 6 && tokens.last() == Some(&2), "{tokens:?}");
}

#[test]
fn a_text_is_measured_with_its_own_tokens() {
    let temp = TestDir::new();
    let text = temp.write("text", "Once upon a time");
    let rows = json(&bench(&["-f", &text, "-d", "16", "-o", "json"]).out)["rows"].clone();
    assert!(rows[0]["test"] == "pp8 @ d16" && measured(&rows[0]).contains(&"tokens_per_second"), "{rows}");
    let long = temp.write("long", "Once upon a time. ".repeat(200));
    assert_eq!(antigravity(SHORT).args(["-f", &long]).run().code, Some(0), "longer than every row");
    for (file, why) in [(temp.write("empty", "\n"), "is empty"), ("/no/such/file".into(), "No such file")] {
        let said = antigravity(SHORT).args(["--prompt-file", &file]).run();
        assert!(said.code == Some(2) && said.err.contains(why), "{}", said.err);
    }
}
