//! `chat --session` through the real binary.

use super::Lines;
use crate::support::command::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

const CHAT: [&str; 8] = ["chat", "--format", "jsonl", "-n", "40", "--seed", "4", "-q"];
const FOX: &str = "Tell me a story about a fox.\n";

fn chat(more: &[&str], input: &str) -> Lines {
    let said = antigravity(CHAT).args(more).stdin(input).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    Lines::parse(&said.out)
}

#[test]
fn a_restarted_chat_goes_on_as_if_never_left() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let session = ["--session", file.as_str()];
    let system = [&session[..], &["--system", "You are a fox."]].concat();
    let whole = chat(&["--system", "You are a fox."], &format!("{FOX}Go on.\nAnd then?\n"));
    let parts = chat(&system, FOX).then(chat(&session, "Go on.\n")).then(chat(&system, "And then?\n"));
    assert_eq!((&parts.ids, &parts.text), (&whole.ids, &whole.text));
    for name in ["logits", "prompt_tokens", "stop"] {
        assert_eq!(parts.stat(name), whole.stat(name), "{name}");
    }
    let other = ["chat", "--session", &file, "--system", "You are a cat."];
    antigravity(other).fails_with(2, &["--session", "--system", "another file"]);
    let args = ["generate", "-p", "x", "--session", &file];
    antigravity(args).fails_with(2, &["--session", "conversation", "chat"]);
    // Forgotten is forgotten, and another system message may come.
    let cat = ["--session", &file, "--system", "You are a cat."];
    chat(&session, "/reset\n");
    let anew = chat(&[&cat[..], &["--temp", "0"]].concat(), FOX);
    assert_eq!(anew.ids, chat(&["--temp", "0", "--system", "You are a cat."], FOX).ids);
}

#[test]
fn a_conversation_longer_than_its_cache_goes_on() {
    let temp = TestDir::new();
    for policy in ["sliding", "snapkv", "h2o"] {
        let file = temp.path(policy);
        let evict = ["--eviction-policy", policy, "-c", "96", "--eviction-window", "64"];
        let parts = (0..6).map(|_| chat(&[&evict[..], &["--session", &file]].concat(), FOX));
        let parts = parts.fold(Lines::default(), Lines::then);
        let whole = chat(&evict, &FOX.repeat(6));
        assert!(whole.evictions > 3 && whole.stats.len() == 6, "{policy}: {} evictions", whole.evictions);
        assert_eq!((&parts.ids, parts.evictions), (&whole.ids, whole.evictions), "{policy}");
        for name in ["logits", "prompt_tokens"] {
            assert_eq!(parts.stat(name), whole.stat(name), "{policy} {name}");
        }
    }
}

#[test]
fn a_conversation_that_was_saved_and_loaded_goes_on() {
    let temp = TestDir::new();
    let file = temp.path("a file");
    let whole = chat(&[], &format!("{FOX}Go on.\n"));
    let script = format!("{FOX}/save {file}\n/reset\nWho are you?\n/load {file}\nGo on.\n");
    let same = chat(&[], &script);
    // Another process, whose system message gives way.
    let other = chat(&["--system", "You are a cat."], &format!("Who are you?\n/load {file}\nGo on.\n"));
    for parts in [same, other] {
        let last = parts.stats.len() - 1;
        for name in ["logits", "prompt_tokens", "tokens", "stop"] {
            assert_eq!(parts.stats[last][name], whole.stats[1][name], "{name}");
        }
        let tokens = whole.stats[1]["tokens"].as_u64().expect("a number") as usize;
        let end = |lines: &Lines| lines.ids[lines.ids.len() - tokens..].to_vec();
        assert_eq!(end(&parts), end(&whole));
    }
}

#[test]
fn a_failed_load_changes_nothing() {
    let temp = TestDir::new();
    let (text, damaged) = (temp.path("text"), temp.path("damaged"));
    greedy().args(["--session", &text]).text();
    chat(&[], &format!("{FOX}/save {damaged}\n"));
    let mut bytes = std::fs::read(&damaged).expect("a session");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(&damaged, bytes).expect("written");
    let whole = chat(&[], &format!("{FOX}Go on.\n"));
    let missing = temp.path("missing");
    for (file, words) in [(&text, "generate"), (&damaged, "is damaged"), (&missing, "no such file")] {
        let said = antigravity(CHAT).stdin(format!("{FOX}/load {file}\n/save {missing}/x\nGo on.\n")).run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        let lines: Vec<&str> = said.err.lines().collect();
        assert_eq!(lines.len(), 2, "{}", said.err);
        mentions(lines[0], &["/load: ", file, words]);
        assert!(!lines[0].contains("--session"), "{}", lines[0]);
        mentions(lines[1], &["/save: ", "missing/x"]);
        let parts = Lines::parse(&said.out);
        assert_eq!((&parts.ids, parts.stat("logits")), (&whole.ids, whole.stat("logits")), "{words}");
    }
}

#[test]
fn an_interrupted_answer_stays_as_far_as_it_came() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let args = ["chat", "--format", "jsonl", "-q", "--ignore-eos", "--temp", "0", "--session", &file];
    let mut child = antigravity(args)
        .into_std()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(FOX.as_bytes()).expect("it reads");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut said = String::new();
    (0..5).for_each(|_| assert!(out.read_line(&mut said).expect("a token") > 0));
    let status = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(status.expect("a kill program").success());
    out.read_to_string(&mut said).expect("the rest");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    let cut = Lines::parse(&said);
    assert_eq!(cut.stat("stop"), ["interrupt"]);

    let go_on = |file: &str| chat(&["--session", file, "--temp", "0"], "Go on.\n");
    let after = go_on(&file);
    let file = temp.path("other");
    let count = cut.ids.len().to_string();
    let short = [&args[..args.len() - 1], &[&file, "-n", &count]].concat();
    assert_eq!(Lines::parse(&antigravity(&short).stdin(FOX).run().out).ids, cut.ids);
    assert_eq!(after.ids, go_on(&file).ids);
    assert!(after.computed() < 25, "{}", after.computed());
}

#[test]
fn a_saved_text_is_refused_as_a_conversation() {
    let temp = TestDir::new();
    let file = temp.path("state");
    greedy().args(["--session", &file]).text();
    antigravity(["chat", "--session", &file]).fails_with(2, &["--session", "generate"]);
}

#[test]
fn a_kill_loses_the_running_answer_only() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let session = ["--session", file.as_str()];
    let first = chat(&session, FOX);
    let endless = ["chat", "--format", "jsonl", "-q", "--ignore-eos", "--seed", "4", "--session", &file];
    let mut child = antigravity(endless)
        .into_std()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(b"Go on.\n").expect("it reads");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    assert!(out.read_line(&mut String::new()).expect("a token") > 0);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let both = first.then(chat(&session, "And then?\n"));
    let whole = chat(&[], &format!("{FOX}And then?\n"));
    assert_eq!((both.ids, both.text), (whole.ids, whole.text));
}
