//! Tests of the effect of chat commands on the conversation.

use crate::support::command::*;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const FOX: &str = "Tell me a story about a fox.\n";

/// The ids of one answer and the line that ends it.
type Answer = (Vec<u64>, Value);

fn answers(said: &RunOutput) -> Vec<Answer> {
    let (mut all, mut ids) = (Vec::new(), Vec::new());
    for line in said.out.lines().map(|l| serde_json::from_str::<Value>(l).expect("JSON")) {
        match line["t"].as_str() {
            Some("token") => ids.extend(line["id"].as_u64()),
            Some("stats") => all.push((std::mem::take(&mut ids), line)),
            other => panic!("{other:?}"),
        }
    }
    all
}

/// Runs a chat with this seed and input, and checks that stderr stays empty.
#[track_caller]
fn chat(more: &[&str], input: &str) -> Vec<Answer> {
    let said = antigravity(["chat", "--format", "jsonl", "-n", "30"]).args(more).stdin(input).run();
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    answers(&said)
}

/// Selects the parts of an answer that equal answers share: ids, logits and stop reason, but no times.
fn essence((ids, stats): &Answer) -> (&[u64], &Value, &Value) {
    (ids, &stats["logits"], &stats["stop"])
}

#[test]
fn undo_leaves_no_trace() {
    for sampler in [&["--temp", "0"][..], &["--seed", "4", "--temp", "1.2"]] {
        let never = chat(sampler, &format!("{FOX}Go on.\nAnd then?\n"));
        let once = chat(sampler, &format!("{FOX}Who are you?\n/undo\nGo on.\nThe end?\n/undo\nAnd then?\n"));
        assert_eq!((once.len(), never.len()), (5, 3));
        for (undone, plain) in [(2, 1), (4, 2)] {
            assert_eq!(essence(&once[undone]), essence(&never[plain]));
            // Nothing is computed that the cache has had.
            let computed = |answer: &Answer| answer.1["prompt_tokens"].as_u64().expect("a number");
            assert!(computed(&once[undone]) <= computed(&never[plain]) && computed(&never[plain]) < 25);
        }
        // All the way back, and what is beyond.
        let all = antigravity(["chat", "--format", "jsonl", "-n", "30"])
            .args(sampler)
            .stdin(format!("Who are you?\nGo on.\n/undo\n/undo\n/undo\n{FOX}"))
            .run();
        assert_eq!(all.err, "/undo: no message yet\n");
        assert_eq!(essence(&answers(&all)[2]), essence(&never[0]));
    }
}

#[test]
fn undo_with_eviction_goes_on() {
    let sampler = ["--temp", "0", "--eviction-policy", "sliding", "-c", "96", "--eviction-window", "64"];
    let said = antigravity(["chat", "--format", "jsonl", "-n", "40"])
        .args(sampler)
        .stdin(format!("{}/undo\n{FOX}/stats\n", FOX.repeat(4)))
        .run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(said.out.lines().filter(|l| l.contains("\"stats\"")).count(), 5);
    mentions(&said.err, &["of 96 tokens", "messages: 4"]);
    assert!(!said.err.contains("evictions: 0"), "{}", said.err);
}

#[test]
fn retry_draws_again() {
    let greedy = chat(&["--temp", "0"], &format!("{FOX}/retry\nGo on.\n"));
    assert_eq!(greedy[0].0, greedy[1].0);
    let plain = chat(&["--temp", "0"], &format!("{FOX}Go on.\n"));
    assert_eq!(essence(&greedy[2]), essence(&plain[1]));

    let sampler = ["--seed", "4", "--temp", "1.2"];
    let drawn = chat(&sampler, &format!("{FOX}/retry\n/undo\n{FOX}/retry\n"));
    assert_ne!(drawn[0].0, drawn[1].0);
    // Only the last answer is there, and its question was asked once.
    assert_eq!((&drawn[0].0, &drawn[1].0), (&drawn[2].0, &drawn[3].0));
    assert_eq!(drawn[1].1["prompt_tokens"], 1);

    let said = antigravity(["chat"]).stdin("/retry\n").run();
    assert_eq!((said.code, said.err.as_str()), (Some(0), "/retry: no message yet\n"));
}

#[test]
fn a_message_that_did_not_fit_is_asked_again() {
    let args = ["chat", "--temp", "0", "-c", "48", "-q"];
    let fresh = antigravity(args).stdin("And then?\n").run();
    let said = antigravity(args).stdin(format!("{FOX}And then?\n/undo\n/retry\n")).run();
    assert_eq!(said.code, Some(0));
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!((answers.len(), answers[1], format!("{}\n", answers[2])), (3, "", fresh.out));
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    mentions(
        &said.err,
        &["context is full (", " of 48 tokens)", "/retry", "--eviction-policy", "--session FILE"],
    );
    // With JSON lines the message is a line too.
    let lines = antigravity(args).args(["--format", "jsonl"]).stdin(format!("{FOX}And then?\n")).run().out;
    let last: Value = serde_json::from_str(lines.lines().last().expect("lines")).expect("JSON");
    assert_eq!((&last["t"], &last["slots"]), (&"unanswered".into(), &48.into()), "{last}");
    assert!(last["needed"].as_u64() > Some(48), "{last}");
    // What another message was asked after is forgotten.
    let said = antigravity(args).stdin(format!("{FOX}And then?\n/reset\nHi\n/retry\n")).run();
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!((answers.len(), answers[2]), (4, answers[3]));
}

#[test]
fn wrong_chat_commands_are_refused_with_their_syntax() {
    let wrong: &[(&str, &[&str])] = &[
        ("/undo 1", &["/undo takes no argument", "/help"]),
        ("/save", &["/save FILE"]),
        ("/load ", &["/load FILE"]),
        ("/system", &["/system TEXT"]),
        ("/set temperature", &["/set NAME VALUE"]),
        ("/tool", &["/tool NAME TEXT"]),
        ("/usr/bin is what?", &["Unknown command /usr/bin.", "/help", "space"]),
        ("/etc\u{1b}[2J is", &["Unknown command /etc\\u{1b}[2J."]),
    ];
    let plain = chat(&["--temp", "0"], &format!("{FOX}Go on.\n"));
    let lines: String = wrong.iter().map(|(line, _)| format!("{line}\n")).collect();
    let args = ["chat", "--format", "jsonl", "-n", "30", "--temp", "0"];
    let said = antigravity(args).stdin(format!("{FOX}{lines}Go on.\n /usr/bin\n")).run();
    let errors: Vec<&str> = said.err.lines().collect();
    assert_eq!((said.code, errors.len()), (Some(0), wrong.len()), "{}", said.err);
    wrong.iter().zip(errors).for_each(|((_, words), error)| mentions(error, words));
    let said = answers(&said);
    assert_eq!((said.len(), essence(&said[1])), (3, essence(&plain[1])));
}

#[test]
fn ctrl_c_between_two_answers_ends_a_piped_chat() {
    let mut chat =
        antigravity(["chat", "--temp", "0", "-n", "300", "--ignore-eos", "--format", "jsonl"]).into_std();
    let chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut chat = chat.spawn().expect("the binary starts");
    let (mut input, output) = (chat.stdin.take().expect("piped"), chat.stdout.take().expect("piped"));
    input.write_all(FOX.as_bytes()).expect("it reads its input");
    let mut lines = BufReader::new(output).lines().map(|line| line.expect("UTF-8"));
    assert!(lines.any(|line| line.contains("\"stats\"")));
    let kill = Command::new("kill").args(["-INT", &chat.id().to_string()]).status();
    assert!(kill.expect("a kill program").success());
    // The commands give the signal time to arrive; the chat may have left before it has read them.
    let _ = input.write_all(format!("{}{FOX}", "/stats\n".repeat(8000)).as_bytes());
    drop(input);
    lines.for_each(drop);
    assert_eq!(chat.wait().expect("it ends").code(), Some(130));
}

#[test]
fn settings_and_the_system_message_change_on_the_way() {
    let sampler = ["--seed", "4", "--temp", "1.2"];
    let cold = chat(&["--temp", "0"], FOX);
    let set = chat(&sampler, &format!("/set temperature 0\n{FOX}"));
    assert_eq!(essence(&set[0]), essence(&cold[0]));
    let seed = chat(&["--seed", "5", "--temp", "1.2"], FOX);
    assert_eq!(essence(&chat(&sampler, &format!("/set seed 5\n{FOX}"))[0]), essence(&seed[0]));
    assert_eq!(chat(&sampler, &format!("/set num-tokens 3\n{FOX}"))[0].0.len(), 3);

    let brief = chat(&["--temp", "0", "--system", "Be brief."], FOX);
    let system = chat(&["--temp", "0"], &format!("Hi\n/system Be brief.\n{FOX}"));
    assert_eq!(essence(&system[1]), essence(&brief[0]));

    let said = antigravity(["chat"]).stdin("/set temperatur 1\n/set top-k -3\n/set trace x\n/set\n").run();
    let lines: Vec<&str> = said.err.lines().collect();
    assert_eq!((said.code, lines.len()), (Some(0), 4), "{}", said.err);
    mentions(lines[0], &["/set: ", "did you mean --temperature?"]);
    mentions(lines[1], &["/set: ", "--top-k -3"]);
    mentions(lines[2], &["/set: ", "--trace"]);
    mentions(lines[3], &["temperature 0.7", "top-k 40", "num-tokens -1"]);
}

#[test]
fn several_lines_can_be_one_message() {
    let one = chat(&["--temp", "0"], "Tell me\\\na story\n");
    let quoted = chat(&["--temp", "0"], "\"\"\"\nTell me\na story\n\"\"\"\n");
    assert_eq!((one.len(), essence(&one[0])), (1, essence(&quoted[0])));
    let commands = chat(&["--temp", "0"], "\"\"\"/exit\nnow\"\"\"\n");
    assert_eq!(commands.len(), 1);
}
