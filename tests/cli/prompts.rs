//! `generate --prompts`: a JSON line for each prompt, as it is complete.

use crate::support::command::*;
use serde_json::{Value, json};

const LINES: &str = "\"Once upon a time\"\n\n{\"prompt\":\"The cat\",\"max_tokens\":4,\"seed\":9}\n\
                     {\"prompt\":\"Lily\",\"temperature\":0,\"stop\":[\".\",\"!\"],\"max_tokens\":50}\n\"Tom\"\n";

fn answers(text: &str) -> Vec<Value> {
    text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

#[test]
fn each_line_is_what_its_prompt_alone_gives() {
    let temp = TestDir::new();
    let file = temp.write("prompts.jsonl", LINES);
    let args = ["generate", "--prompts", &file, "-n", "12", "--seed", "3"];
    let said = antigravity(args).args(["--batch", "3"]).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    mentions(&said.err, &["prompts: 4, generated: "]);
    let mut found = answers(&said.out);
    assert_eq!(found[0]["index"], 1, "the shortest is complete first: {}", said.out);
    found.sort_by_key(|a| a["index"].as_u64());
    let alone = |args: &[&str]| antigravity(["generate"]).args(args).text();
    let expected = [
        alone(&["-p", "Once upon a time", "-n", "12", "--seed", "3"]),
        alone(&["-p", "The cat", "-n", "4", "--seed", "9"]),
        alone(&["-p", "Lily", "-n", "50", "--temp", "0", "--stop", ".", "--stop", "!"]),
        alone(&["-p", "Tom", "-n", "12", "--seed", "3"]),
    ];
    assert_eq!(
        found.iter().map(|a| &a["text"]).collect::<Vec<_>>(),
        expected.each_ref().map(|t| json!(t)).each_ref()
    );
    assert_eq!((&found[0]["tokens"], &found[0]["stop"]), (&json!(12), &json!("length")));
    assert_eq!(found[2]["stop"], "stop");
    // From stdin, and one after another.
    let in_turn = antigravity(["generate", "--prompts", "-", "-n", "12", "--seed", "3", "--batch", "1"])
        .stdin(LINES)
        .run();
    assert_eq!(answers(&in_turn.out), found);
    let evicting = antigravity(args).args(["--eviction-policy", "sliding", "--eviction-window", "64"]).run();
    let mut evicting = answers(&evicting.out);
    evicting.sort_by_key(|a| a["index"].as_u64());
    assert_eq!(evicting, found);
}

#[test]
fn logprobs_are_those_of_each_prompt_alone() {
    let temp = TestDir::new();
    let file = temp.write("prompts.jsonl", "{\"prompt\":\"Tom\",\"logprobs\":2}\n\"Lily\"\n");
    let args = ["generate", "-n", "3", "--seed", "3"];
    let alone = |prompt, n| {
        let lines = antigravity(args).args(["-p", prompt, "--format", "jsonl", "--logprobs", n]).text();
        answers(&lines)
            .iter()
            .filter(|l| l["t"] == "token")
            .map(|l| l["logprobs"].clone())
            .collect::<Vec<_>>()
    };
    for batch in ["1", "2"] {
        let of = |more: &[&str]| {
            let mut found =
                answers(&antigravity(args).args(["--prompts", &file, "--batch", batch]).args(more).text());
            found.sort_by_key(|a| a["index"].as_u64());
            found
        };
        let found = of(&["--logprobs", "1"]);
        assert_eq!(found[0]["logprobs"], json!(alone("Tom", "2")));
        assert_eq!(found[1]["logprobs"], json!(alone("Lily", "1")));
        assert!(of(&[])[1].get("logprobs").is_none());
    }
}

#[test]
fn an_error_in_a_prompt_line_is_one_line() {
    let temp = TestDir::new();
    for (text, words) in [
        ("\"a\"\n{\"prompt\":\"b\",\"max\":3}\n", &["line 2", "unknown field `max`", "prompt"][..]),
        ("\"a\"\n{\"prompt\":\"b\",\"top_p\":-1}\n", &["line 2", "top-p"]),
        ("\"a\"\n7\n", &["line 2", "neither a JSON string nor a JSON object"]),
    ] {
        let file = temp.write("bad.jsonl", text);
        antigravity(["generate", "--prompts", &file])
            .fails_with(2, &[&["--prompts", &file][..], words].concat());
    }
    let long = temp.write("long.jsonl", format!("\"a\"\n\"{}\"\n", "b c d ".repeat(500)));
    let line = antigravity(["generate", "--prompts", &long, "-c", "64"]).fails(2);
    mentions(&line, &["prompt 1 ", "--max-seq-len"]);
    let bytes = temp.write("bytes.jsonl", b"\"\xff\"\n");
    antigravity(["generate", "--prompts", &bytes]).fails_with(2, &["is not UTF-8"]);
    antigravity(["generate", "--prompts", "/nowhere/p.jsonl"]).fails_with(2, &["--prompts /nowhere/p.jsonl"]);
    antigravity(["generate", "--prompts", &long, "--batch", "0"]).fails_with(2, &["--batch 0"]);
    antigravity(["generate", "--prompts", &long, "-p", "x"]).fails_with(2, &["--prompt"]);
    let empty = temp.write("empty.jsonl", "\n");
    assert_eq!(antigravity(["generate", "--prompts", &empty]).text(), "");
}

#[test]
fn drafts_are_counted_where_prompts_are_decoded_together() {
    let input = "\"one two three one two three one two\"\n\"b\"\n";
    let run = |more: &[&str]| {
        let args = ["generate", "--prompts", "-", "-n", "20", "--seed", "1"];
        antigravity(args).args(more).stdin(input).run()
    };
    let (plain, drafted) = (run(&[]), run(&["--draft", "8"]));
    let sorted = |said: &RunOutput| {
        let mut lines: Vec<String> = said.out.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&plain), sorted(&drafted));
    mentions(&drafted.err, &["draft: ", " tokens accepted ("]);
    assert!(!plain.err.contains("draft: "));
    // A pass that is no longer than the prompts are many has no room.
    let off = run(&["--draft", "8", "--prefill-chunk", "1"]);
    mentions(&off.err, &["--draft 8: off, because a pass has room for only one token"]);
}

#[cfg(feature = "grammar")]
#[test]
fn a_grammar_that_nothing_ends_is_named_before_anything_runs() {
    let temp = TestDir::new();
    let file = temp.write("prompts.jsonl", "\"a\"\n{\"prompt\":\"b\",\"ignore_eos\":true}\n");
    for batch in ["1", "2"] {
        let line = antigravity([
            "generate",
            "--prompts",
            &file,
            "--json-schema",
            "{\"type\":\"null\"}",
            "--batch",
            batch,
        ])
        .fails(2);
        mentions(&line, &["--prompts", "prompt 1 (from 0)", "--ignore-eos"]);
    }
}

#[cfg(feature = "grammar")]
#[test]
fn a_prompt_that_fails_ends_alone() {
    let temp = TestDir::new();
    let file = temp.write("prompts.jsonl", "\"a\"\n\"b\"\n");
    let bias: Vec<String> = (0..4).map(|id| format!("--logit-bias={id}-inf")).collect();
    let grammar = temp.write("end.gbnf", "root ::= \"a\"");
    let args = ["generate", "--prompts", &file, "--grammar", &grammar, "--temp", "0"];
    // After its only letter it must end, and nothing can end it.
    let said =
        antigravity(args.iter().copied().chain(bias.iter().map(String::as_str)).collect::<Vec<_>>()).run();
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{}", said.err);
    mentions(
        &said.err,
        &["prompts.jsonl: prompt 0 (from 0): the grammar", "prompts.jsonl: prompt 1 (from 0): the grammar"],
    );
}
