//! Tests of what a successful run prints to stdout and stderr, and of what must not change it.

use crate::support::command::*;
use crate::support::paths;
use crate::support::test_dir::TestDir;
use std::io::Read;
use std::time::{Duration, Instant};

/// A number with this many decimals.
#[track_caller]
fn number(text: &str, decimals: usize) -> f64 {
    let (_, after) = text.split_once('.').unwrap_or_else(|| panic!("{text:?} has no decimals"));
    assert_eq!(after.len(), decimals, "{text:?}");
    text.parse().unwrap_or_else(|_| panic!("{text:?} is no number"))
}

#[test]
fn text_on_stdout_and_times_first_on_stderr() {
    let said = antigravity(["generate", "-p", "Once upon a time", "-n", "8", "--seed", "1"]).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(!said.out.is_empty() && !said.out.contains("TTFT"), "{:?}", said.out);
    let mut lines = said.err.lines();
    let (first, second) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let ttft = first.strip_prefix("TTFT: ").and_then(|l| l.strip_suffix(" ms")).expect("the first line");
    assert!(number(ttft, 2) > 0.0);
    let tbt = second.strip_prefix("Avg TBT: ").and_then(|l| l.strip_suffix(" tokens/sec)"));
    let (tbt, speed) = tbt.and_then(|l| l.split_once(" ms (")).expect("the second line");
    let product = number(tbt, 2) * number(speed, 1);
    assert!((900.0..1100.0).contains(&product), "{second}");
    assert_eq!(lines.next(), Some("stop: length"));
    mentions(lines.next().unwrap_or(""), &["prompt: 5 tokens (", " tokens/sec), generated: 8 tokens"]);
    assert!(said.out.ends_with('\n') && !said.text().ends_with('\n'), "{:?}", said.out);
    assert_eq!(antigravity(["generate", "-q", "-p", "a", "-n", "1"]).run().err, "");
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let with = |more: &[&str]| {
        let mut args = vec!["generate", "-p", "The cat", "-n", "24", "--temp", "1.2"];
        args.extend(more);
        antigravity(&args).text()
    };
    let reference = with(&["--seed", "7"]);
    assert_eq!(reference, with(&["--seed", "7", "--threads", "1"]));
    assert_eq!(reference, with(&["--seed", "7", "--threads", "3"]));
    assert_eq!(reference, with(&["--seed", "7", "--prefill-chunk", "1"]));
    assert_ne!(reference, with(&["--seed", "8"]));
    // A drawn seed is printed, and repeats the run.
    let said = antigravity(["generate", "-p", "The cat", "-n", "24", "--temp", "1.2"]).run();
    let seed = said.err.lines().find_map(|l| l.strip_prefix("seed: ")).expect("a seed");
    assert_eq!(said.text(), with(&["--seed", seed]));
}

#[test]
fn a_prompt_is_the_same_from_flag_file_and_pipe() {
    let reference = greedy().text();
    let temp = TestDir::new();
    let file = temp.write("prompt.txt", "Once upon a time\n");
    let args = ["generate", "--temp", "0", "-n", "12"];
    assert_eq!(reference, antigravity(args).args(["-f", &file]).text());
    assert_eq!(reference, antigravity(args).stdin("Once upon a time\n").run().text());
    assert_eq!(reference, antigravity(args).args(["-f", "-"]).stdin("Once upon a time\r\n").run().text());
    let hello = antigravity(["generate", "--temp", "0", "-n", "12", "-p", "Hello, world! I am a"]).text();
    assert_eq!(hello, antigravity(args).text());
}

#[test]
fn stop_strings_are_held_back() {
    let whole = greedy().text();
    // A stop string of several tokens, from the middle of the text.
    let middle = whole.len() / 3;
    let stop = &whole[middle..middle + 9];
    let at = whole.find(stop).expect("it is from the text");
    assert_eq!(greedy().args(["--stop", stop]).text(), &whole[..at]);
    assert_eq!(greedy().args(["-r", "not in it", "-r", stop]).text(), &whole[..at]);
    let said =
        antigravity(["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12", "--stop", stop]).run();
    mentions(&said.err, &["stop: stop"]);
    // What could have become one is shown in the end.
    let almost = format!("{}~", &whole[whole.len() - 3..]);
    assert_eq!(greedy().args(["--stop", &almost]).text(), whole);
}

#[test]
fn json_lines_hold_the_same_text() {
    let whole = greedy().text();
    let lines = greedy().args(["--format", "jsonl"]).text();
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|l| serde_json::from_str(l).expect("a JSON object")).collect();
    let (stats, tokens) = lines.split_last().expect("some lines");
    let pieces: String = tokens.iter().map(|t| t["text"].as_str().expect("a text")).collect();
    assert_eq!(pieces, whole);
    assert!(tokens.iter().all(|t| t["t"] == "token"));
    assert_eq!(tokens.iter().filter(|t| t["id"].is_u64()).count(), 12);
    assert_eq!(
        (&stats["t"], &stats["tokens"], &stats["stop"]),
        (&"stats".into(), &12.into(), &"length".into())
    );
    assert!(stats["prompt_tokens_per_second"].as_f64().is_some_and(|x| x > 0.0), "{stats}");
    assert!(stats["ttft_ms"].as_f64().is_some_and(|x| x > 0.0), "{stats}");
}

/// The lines of the tokens, of greedy text without a penalty.
fn token_lines(more: &[&str]) -> Vec<serde_json::Value> {
    let lines = greedy().args(["--format", "jsonl", "--repeat-penalty", "1"]).args(more).text();
    let lines = lines.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).expect("a JSON object"));
    lines.filter(|l| l["t"] == "token" && l["id"].is_u64()).collect()
}

#[test]
fn logprobs_of_the_chosen_and_of_the_most_probable() {
    let without = token_lines(&[]);
    assert!(without.iter().all(|l| l["logprobs"].is_null()));
    let lines = token_lines(&["--logprobs", "3"]);
    let ids = |lines: &[serde_json::Value]| lines.iter().map(|l| l["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&lines), ids(&without));
    for line in &lines {
        let (chosen, top) =
            (&line["logprobs"]["chosen"], line["logprobs"]["top"].as_array().expect("a list"));
        assert_eq!((&chosen["id"], top.len()), (&line["id"], 3), "{line}");
        // Greedy without penalties.
        assert_eq!(*chosen, top[0], "{line}");
        let values: Vec<f64> = top.iter().map(|p| p["logprob"].as_f64().expect("a number")).collect();
        assert!(values.is_sorted_by(|a, b| a >= b) && values[0] <= 1e-6, "{line}");
        assert!(values.iter().map(|x| x.exp()).sum::<f64>() <= 1.0 + 1e-6, "{line}");
        assert!(top.iter().all(|p| p["text"].is_string()), "{line}");
    }
    // They are the model's, whatever the samplers do to the logits.
    let first = lines[0]["id"].as_u64().expect("an id");
    let other = token_lines(&["--logprobs", "1", "--logit-bias", &format!("{first}-inf")]);
    assert_eq!(other[0]["logprobs"]["top"][0], lines[0]["logprobs"]["top"][0]);
    assert_eq!(other[0]["logprobs"]["chosen"], lines[0]["logprobs"]["top"][1]);
    let none = token_lines(&["--logprobs", "0"]);
    assert_eq!(none[0]["logprobs"]["chosen"], lines[0]["logprobs"]["chosen"]);
    assert!(none.iter().all(|l| l["logprobs"]["top"].as_array().is_some_and(Vec::is_empty)));
}

#[test]
fn biased_tokens_come_always_or_never() {
    let ids = |more: &[&str]| token_lines(more).iter().filter_map(|l| l["id"].as_u64()).collect::<Vec<_>>();
    let first = ids(&[])[0];
    assert_eq!(ids(&["--logit-bias", &format!("{first}+1000")]), [first; 12]);
    let (less, more) = (format!("{first}+1000"), format!("{first}-2000.5"));
    let never = ids(&["--logit-bias", &less, "--logit-bias", &more]);
    assert!(!never.is_empty() && !never.contains(&first), "{never:?}");
    assert_eq!(ids(&["--logit-bias", &format!("{first}-inf")]), never);
    assert_eq!(ids(&["--logit-bias", &format!("{first}+0")]), ids(&[]));
}

#[test]
fn other_samplers_are_off_until_asked_for() {
    let with = |more: &[&str]| {
        antigravity(["generate", "-p", "The cat", "-n", "24", "--temp", "1.2", "--seed", "7"])
            .args(more)
            .text()
    };
    let reference = with(&[]);
    let off = ["--typical", "1", "--xtc-threshold", "0.2", "--dry-base", "2", "--dry-allowed-length", "1"];
    assert_eq!(with(&off), reference);
    let on: &[&[&str]] = &[
        &["--typical", "0.2"],
        &["--xtc-probability", "1", "--xtc-threshold", "0.05"],
        &["--presence-penalty", "4"],
        &["--frequency-penalty", "4"],
        &["--dry-multiplier", "9", "--dry-allowed-length", "1", "--dry-sequence-breaker", "none"],
    ];
    for flags in on {
        let text = with(flags);
        assert_eq!(text, with(&[&["--threads", "1"], *flags].concat()), "{flags:?}");
        // Not every short text has something to penalise.
        assert!(
            text != reference || flags[0].ends_with("penalty") || flags[0].starts_with("--dry"),
            "{flags:?}"
        );
    }
}

#[test]
fn text_ends_for_the_reason_that_is_said() {
    assert_eq!(antigravity(["generate", "-n", "0", "-p", "Once"]).text(), "");
    let ends = |args: &[&str]| {
        let mut all = vec!["generate", "--temp", "0", "-n", "-1", "-p", "Once upon a time"];
        all.extend(args);
        let said = antigravity(&all).run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        said.err.lines().nth(2).unwrap_or("").to_string()
    };
    assert_eq!(ends(&["-c", "32"]), "stop: context");
    assert_eq!(ends(&["-c", "32", "--ignore-eos"]), "stop: context");
    assert_eq!(ends(&[]), "stop: eos");
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let args = ["generate", "-n", "-1", "--ignore-eos", "-p", "Once"];
    let mut child = antigravity(args).spawn();
    let mut byte = [0];
    let mut out = child.stdout.take().expect("piped");
    out.read_exact(&mut byte).expect("some text");
    drop(out);
    let said = RunOutput::new(child.wait_with_output().expect("it ends"));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
}

#[test]
fn an_interrupt_keeps_the_text() {
    interrupted(&["generate", "-n", "-1", "--ignore-eos", "-p", "Once"]);
}

#[test]
fn an_interrupt_keeps_the_text_of_drafts_and_ends_the_program_that_drafts() {
    let Some(program) = paths::draft_program() else { return };
    let temp = TestDir::new();
    let script = format!("echo $$ > \"$0.pid\"\nexec \"{}\" \"$@\"", program.display());
    let own = temp.script("draft", &script).display().to_string();
    let args = ["--draft-model", &own, "--draft-when", "always"];
    let err = interrupted(&[&["generate", "-n", "-1", "--ignore-eos", "-p", "Once"], &args[..]].concat());
    assert!(!err.contains("continuing without it"), "{err}");
    let id = std::fs::read_to_string(format!("{own}.pid")).expect("it ran");
    let there = || std::path::Path::new("/proc").join(id.trim()).join("exe").exists();
    let began = Instant::now();
    while there() && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!there(), "{id} still runs");
}

/// Runs until the first text appears, interrupts, and returns the output.
fn interrupted(args: &[&str]) -> String {
    let mut child = antigravity(args).spawn();
    let mut out = child.stdout.take().expect("piped");
    let mut text = vec![0];
    out.read_exact(&mut text).expect("some text");
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("a kill program").success());
    out.read_to_end(&mut text).expect("the rest");
    let said = RunOutput::new(child.wait_with_output().expect("it ends"));
    assert_eq!(said.code, Some(130), "{}", said.err);
    assert!(String::from_utf8(text).is_ok_and(|t| !t.is_empty()));
    mentions(&said.err, &["TTFT: ", "stop: interrupt"]);
    said.err
}

#[test]
fn help_lists_every_command_and_version_names_the_model() {
    use antigravity::dims::{DIM, LAYERS, MODEL, VOCAB};
    let version = antigravity(["--version"]).text();
    let dims = [format!("{LAYERS} layers"), format!("dim {DIM}"), format!("vocab {VOCAB}")];
    mentions(&version, &[MODEL, &dims[0], &dims[1], &dims[2]]);
    assert_eq!(version.lines().count(), 1);
    let help = antigravity(["--help"]).text();
    let commands = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let commands: Vec<&str> = commands.filter_map(|l| l.split_whitespace().next()).collect();
    for command in ["generate", "chat", "eval", "logits", "pack"] {
        assert!(commands.contains(&command), "{commands:?}");
    }
    for command in commands {
        mentions(&antigravity([command, "--help"]).text(), &["Usage: antigravity", command]);
    }
}

#[test]
fn evictions_are_said_where_they_were_asked_for() {
    const BASE: &[&str] =
        &["generate", "-p", "Once upon a time", "--temp", "0", "--ignore-eos", "-n", "200", "-c", "64"];
    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [BASE, &["--eviction-policy", "sliding"], more].concat()
    }
    let full = antigravity(BASE).run();
    assert!(full.err.contains("stop: context"), "{}", full.err);
    let temp = TestDir::new();
    let trace = temp.path("trace.json");
    let said = antigravity(with(&["-v", "--trace", &trace])).run();
    assert!(said.code == Some(0) && said.err.contains("stop: length"), "{}", said.err);
    assert!(said.err.contains("evicted 8 tokens, 56 left"), "{}", said.err);
    assert!(!antigravity(with(&[])).run().err.contains("evicted 8 tokens"));
    let marks = std::fs::read_to_string(&trace).expect("a trace");
    let marks: serde_json::Value = serde_json::from_str(&marks).expect("JSON");
    let instants = marks["traceEvents"].as_array().expect("events").iter().filter(|e| e["ph"] == "i");
    assert!(instants.filter(|e| e["name"].as_str().is_some_and(|n| n.starts_with("evict"))).count() > 10);
    let lines = antigravity(with(&["--format", "jsonl"])).text();
    let events = lines.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).expect("JSON"));
    let evictions: Vec<_> = events.filter(|e| e["t"] == "evict").collect();
    assert!(evictions.len() > 10 && evictions.iter().all(|e| e["removed"] == 8 && e["slots"] == 56));
    assert_eq!(evictions[0]["why"], "cache full");
    // Text that began in the window is the same as without eviction.
    assert!(said.out.starts_with(full.text()));
}

#[test]
fn first_tokens_that_stay_are_said_in_help_and_before_the_text() {
    mentions(
        &antigravity(["generate", "--help"]).text(),
        &["--protected-prefix", "default: 4 with sliding and"],
    );
    let evict = |policy: &str, more: &[&str]| {
        let args = ["generate", "-p", "a", "-n", "1", "--eviction-policy", policy];
        antigravity(args).args(more).run()
    };
    for policy in ["sliding", "snapkv"] {
        mentions(
            evict(policy, &[]).err.lines().next().expect("a line"),
            &[
                &format!("--eviction-policy {policy}: the first 4 tokens are never evicted; "),
                "--protected-prefix",
            ],
        );
        mentions(&evict(policy, &["-c", "6"]).err, &["the first 2 tokens are never evicted"]);
        for silent in [&["--protected-prefix", "0"][..], &["--keep", "9"], &["-q"]] {
            assert!(!evict(policy, silent).err.contains("never evicted"), "{silent:?}");
        }
    }
    for policy in ["h2o", "none"] {
        assert!(!evict(policy, &[]).err.contains("never evicted"));
    }
}

#[test]
fn four_first_tokens_stay_where_no_number_is_given() {
    let greedy = ["generate", "-p", "Once upon a time", "--temp", "0", "--ignore-eos", "-n", "80", "-q"];
    let evict = |policy: &str, more: &[&str]| {
        antigravity(greedy).args(["-c", "32", "--eviction-policy", policy]).args(more).text()
    };
    for policy in ["sliding", "snapkv"] {
        let [zero, four] = ["0", "4"].map(|n| evict(policy, &["--protected-prefix", n]));
        assert_eq!(evict(policy, &[]), four, "{policy}");
        assert_ne!(zero, four, "{policy}");
    }
    assert_eq!(evict("h2o", &[]), evict("h2o", &["--protected-prefix", "0"]));
    // Narrower than four tokens and two.
    for small in [&["--eviction-window", "2"][..], &["--eviction-window", "5"]] {
        assert!(!evict("sliding", small).is_empty(), "{small:?}");
    }
}
