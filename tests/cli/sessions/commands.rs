//! `generate --session` through the real binary.

use super::Lines;
use crate::support::command::*;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

const PROMPT: &str =
    "Once upon a time there was a girl who lived in a house by the sea with her cat. One day she";

fn lines(args: &[&str]) -> Lines {
    Lines::parse(&antigravity([&["generate", "--format", "jsonl", "-q"], args].concat()).text())
}

#[test]
fn every_kv_type_goes_on_bit_for_bit() {
    let temp = TestDir::new();
    let types =
        [&["--kv-type", "f32"][..], &["--kv-type", "f16"], &["--kv-type", "q8"], &["--kv-type", "q4"]];
    for (i, kv) in types.into_iter().chain([&["-ctk", "q8", "-ctv", "f16"][..]]).enumerate() {
        let file = temp.path(&i.to_string());
        let run = |more: &[&str]| lines(&[&["--seed", "3", "--ignore-eos"], kv, more].concat());
        let whole = run(&["-p", PROMPT, "-n", "100"]);
        let first = run(&["-p", PROMPT, "-n", "50", "--session", &file]);
        let second = run(&["-n", "50", "--session", &file]);
        assert_eq!(second.computed(), 1);
        let both = first.then(second);
        assert_eq!((both.ids.len(), &both.ids, &both.text), (100, &whole.ids, &whole.text), "{kv:?}");
        assert_eq!(both.stat("logits")[1], whole.stat("logits")[0], "{kv:?}");
    }
}

/// Slots are evicted every five tokens, so that the cuts fall before, at and after an eviction.
#[test]
fn evicted_sessions_go_on_bit_for_bit() {
    let temp = TestDir::new();
    for policy in ["sliding", "snapkv", "h2o"] {
        let window = ["-c", "64", "--eviction-window", "40", "--protected-prefix", "4"];
        let evict = [&window[..], &["--eviction-policy", policy, "--seed", "3", "--ignore-eos"]].concat();
        for kv in ["f32", "f16", "q8", "q4"] {
            let run = |more: &[&str]| lines(&[&evict[..], &["--kv-type", kv], more].concat());
            let whole = run(&["-p", PROMPT, "-n", "100"]);
            assert!(whole.evictions > 5, "{policy}: {} evictions", whole.evictions);
            for cut in if kv == "q4" { 46..51 } else { 50..51 } {
                let file = temp.path(&format!("{policy}-{kv}-{cut}"));
                let first = run(&["-p", PROMPT, "-n", &cut.to_string(), "--session", &file]);
                let second = run(&["-n", &(100 - cut).to_string(), "--session", &file]);
                let both = first.then(second);
                assert_eq!((&both.ids, &both.text), (&whole.ids, &whole.text), "{policy} {kv} {cut}");
                assert_eq!(both.stat("logits")[1], whole.stat("logits")[0], "{policy} {kv} {cut}");
                assert_eq!(both.evictions, whole.evictions, "{policy} {kv} {cut}");
            }
        }
    }
}

#[test]
fn what_the_session_holds_of_a_prompt_is_not_computed_again() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let run =
        |prompt: &str, more: &[&str]| lines(&[&["--temp", "0", "-n", "8", "-p", prompt], more].concat());
    let session = ["--session", file.as_str()];
    let first = run(PROMPT, &session);
    assert!(first.computed() > 20);
    // The text so far and more: only the rest, and the same as without the session.
    let longer = format!("{PROMPT}{} Then the cat said", first.text);
    let (second, fresh) = (run(&longer, &session), run(&longer, &[]));
    assert!(second.computed() < 10 && fresh.computed() > 30, "{} {}", second.computed(), fresh.computed());
    assert_eq!((&second.ids, second.stat("logits")), (&fresh.ids, fresh.stat("logits")));
    // Within a word: the ids differ at the seam only.
    let longer = format!("{longer}{}ing", second.text);
    let (third, fresh) = (run(&longer, &session), run(&longer, &[]));
    assert!(third.computed() < 10, "{}", third.computed());
    assert_eq!((&third.ids, third.stat("logits")), (&fresh.ids, fresh.stat("logits")));
    // Nothing new.
    let held = format!("{longer}{}", third.text);
    let same = run(&held, &session);
    assert!(same.computed() < 4, "{}", same.computed());
    // Another text is appended.
    let appended = run(" The end. Once", &session);
    assert!((2..10).contains(&appended.computed()), "{}", appended.computed());
    let all = run(&format!("{held}{} The end. Once", same.text), &[]);
    assert_eq!(appended.text, all.text);
}

#[test]
fn random_numbers_go_on_unless_another_seed_is_chosen() {
    let temp = TestDir::new();
    let run = |name: &str, more: &[&str]| {
        let file = temp.path(name);
        lines(&[&["-n", "12", "--temp", "1.2", "--ignore-eos", "--session", &file], more].concat())
    };
    let whole = lines(&["-n", "24", "--temp", "1.2", "--ignore-eos", "--seed", "9", "-p", PROMPT]);
    for (name, again) in [("a", &[][..]), ("b", &["--seed", "9"])] {
        let both = run(name, &["--seed", "9", "-p", PROMPT]).then(run(name, again));
        assert_eq!(both.ids, whole.ids);
        assert_eq!(both.stat("seed"), [9, 9]);
    }
    let other = run("c", &["--seed", "9", "-p", PROMPT]).then(run("c", &["--seed", "10"]));
    assert_eq!((&other.ids[..12], other.stat("seed")), (&whole.ids[..12], vec![&9.into(), &10.into()]));
    assert_ne!(other.ids, whole.ids);
}

#[test]
fn an_interrupted_text_goes_on() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let args = ["generate", "-q", "--format", "jsonl", "--seed", "5", "--ignore-eos", "-p", PROMPT];
    let long = [&args[..], &["-n", "1900", "--session", &file]].concat();
    let mut child = antigravity(&long)
        .into_std()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut said = String::new();
    (0..5).for_each(|_| assert!(out.read_line(&mut said).expect("a line") > 0));
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("a kill program").success());
    out.read_to_string(&mut said).expect("the rest");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    let first = Lines::parse(&said);
    assert!((5..1900).contains(&first.ids.len()), "{}", first.ids.len());
    let both = first.then(lines(&["--seed", "5", "--ignore-eos", "-n", "10", "--session", &file]));
    let n = both.ids.len().to_string();
    assert_eq!(both.ids, Lines::parse(&antigravity([&args[..], &["-n", &n]].concat()).text()).ids);
}

#[test]
fn more_room_goes_on_where_the_context_ended() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let args = ["--temp", "0", "--ignore-eos", "-p", PROMPT];
    let whole = lines(&[&args[..], &["-n", "50"]].concat());
    let first = lines(&[&args[..], &["-n", "-1", "-c", "64", "--session", &file]].concat());
    assert_eq!(first.stat("stop"), ["context"]);
    let n = (50 - first.ids.len()).to_string();
    let both = first.then(lines(&["--temp", "0", "--ignore-eos", "-n", &n, "-c", "128", "--session", &file]));
    assert_eq!((both.ids, both.text), (whole.ids, whole.text));
}

#[test]
fn places_that_cannot_be_written_are_refused_at_once() {
    let temp = TestDir::new();
    let refused = |file: &str, code| antigravity(["generate", "-p", "x", "--session", file]).fails(code);
    mentions(&refused(&temp.path("no/such/state"), 2), &["--session", "no/such/state", "another place"]);
    mentions(&refused("", 2), &["--session"]);
    mentions(&refused(&temp.path(""), 3), &["not a regular file"]);
    // A link stays one, and what nobody else may read stays so.
    let (file, link) = (temp.path("state"), temp.path("link"));
    greedy().args(["--session", &file]).text();
    std::os::unix::fs::symlink("state", &link).expect("a link");
    let mode = || std::fs::metadata(&file).expect("the session").permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    std::fs::set_permissions(&file, Permissions::from_mode(0o640)).expect("a mode");
    greedy().args(["--session", &link]).text();
    assert_eq!(mode(), 0o640);
    assert!(std::fs::symlink_metadata(&link).expect("the link").is_symlink());
}
