//! `chat --session` through the real binary.

use crate::Lines;
use crate::program::*;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

const CHAT: [&str; 8] = ["chat", "--format", "jsonl", "-n", "40", "--seed", "4", "-q"];
const FOX: &str = "Tell me a story about a fox.\n";

fn chat(more: &[&str], input: &str) -> Lines {
    let said = run_with(&[&CHAT[..], more].concat(), input);
    assert_eq!(said.code, Some(0), "{}", said.err);
    Lines::parse(&said.out)
}

#[test]
fn a_restarted_chat_goes_on_as_if_never_left() {
    let temp = Temp::new();
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
    mentions(&fails(&other, 2), &["--session", "--system", "another file"]);
    let args = ["generate", "-p", "x", "--session", &file];
    mentions(&fails(&args, 2), &["--session", "conversation", "chat"]);
    // Forgotten is forgotten, and another system message may come.
    let cat = ["--session", &file, "--system", "You are a cat."];
    chat(&session, "/reset\n");
    let anew = chat(&[&cat[..], &["--temp", "0"]].concat(), FOX);
    assert_eq!(anew.ids, chat(&["--temp", "0", "--system", "You are a cat."], FOX).ids);
}

#[test]
fn a_conversation_longer_than_its_cache_goes_on() {
    let temp = Temp::new();
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
fn a_text_is_no_conversation() {
    let temp = Temp::new();
    let file = temp.path("state");
    greedy(&["--session", &file]);
    mentions(&fails(&["chat", "--session", &file], 2), &["--session", "generate"]);
}

#[test]
fn a_kill_loses_the_running_answer_only() {
    let temp = Temp::new();
    let file = temp.path("state");
    let session = ["--session", file.as_str()];
    let first = chat(&session, FOX);
    let endless = ["chat", "--format", "jsonl", "-q", "--ignore-eos", "--seed", "4", "--session", &file];
    let mut child =
        command(&endless).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the binary starts");
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
