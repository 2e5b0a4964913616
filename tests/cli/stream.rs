//! Text as it comes: when it stops, in which pieces, in which order.

use crate::support::command::*;
use serde_json::Value;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A prompt that one thread computes in one pass: checks between passes or between prompts would come too late.
fn long_prompt(temp: &TestDir) -> Vec<String> {
    let file = temp.write("prompt.txt", "The dog ran to the park and saw a red ball. ".repeat(100));
    let slow = ["generate", "-t", "1", "-n", "1", "--prefill-chunk", "2048", "-f"];
    slow.iter().map(|s| s.to_string()).chain([file]).collect()
}

#[test]
fn ctrl_c_ends_a_long_prompt_within_a_pass() {
    let temp = TestDir::new();
    let args = long_prompt(&temp);
    let start = |args: &[String]| {
        let mut command = antigravity(args).into_std();
        command.env("ANTIGRAVITY_SIMD", "scalar").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the binary starts")
    };
    let began = Instant::now();
    let whole = RunOutput::new(start(&args).wait_with_output().expect("it ends"));
    let all = began.elapsed();
    assert_eq!(whole.code, Some(0), "{}", whole.err);

    let child = start(&args);
    std::thread::sleep(all / 3);
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("a kill program").success());
    let asked = Instant::now();
    let cut = RunOutput::new(child.wait_with_output().expect("it ends"));
    let took = asked.elapsed();
    assert_eq!(cut.code, Some(130), "{}", cut.err);
    assert!(cut.out.is_empty() && cut.err.contains("stop: interrupt"), "{:?} {}", cut.out, cut.err);
    // Two thirds were left. Most of what it takes is leaving, on a machine that others use.
    assert!(took < all / 5 + Duration::from_millis(300), "{took:?} of {all:?}");
}

/// Text of tokens that are the bytes C3 and A9, as the vocabulary spells them: together é, apart broken.
fn of_bytes(more: &[&str]) -> Vec<String> {
    let tokenizer: Value =
        serde_json::from_slice(&std::fs::read(model().join("tokenizer.json")).expect("a tokenizer"))
            .expect("JSON");
    let id = |token: &str| {
        tokenizer["model"]["vocab"][token].as_u64().unwrap_or_else(|| panic!("no token {token}"))
    };
    let mut args: Vec<String> =
        ["generate", "-n", "60", "-s", "5", "-p", "a", "--repeat-penalty", "1"].map(String::from).into();
    for token in ["Ã", "©"] {
        args.extend(["--logit-bias".into(), format!("{}+60", id(token))]);
    }
    args.extend(more.iter().map(|s| s.to_string()));
    args
}

#[test]
fn pieces_are_whole_characters_and_come_in_order() {
    let said = antigravity(of_bytes(&["--format", "jsonl"])).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    let lines: Vec<Value> = said.out.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let pieces: Vec<&str> = lines.iter().filter_map(|l| l["text"].as_str()).collect();
    let whole = pieces.concat();
    assert!(whole.contains('é') && whole.contains('\u{fffd}'), "{whole:?}");
    // The first half of a character is held back until the next token completes it.
    assert!(pieces.contains(&"") && pieces.contains(&"é"), "{pieces:?}");
    assert_eq!(lines.last().map(|l| l["t"].clone()), Some("stats".into()));

    let mut command = antigravity(of_bytes(&[])).into_std();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary starts");
    let mut out = child.stdout.take().expect("piped");
    // Every piece is one write, and short ones arrive whole.
    let (mut streamed, mut buffer, mut reads) = (String::new(), [0; 4096], 0);
    loop {
        let n = out.read(&mut buffer).expect("a pipe");
        if n == 0 {
            break;
        }
        streamed += std::str::from_utf8(&buffer[..n]).expect("whole characters");
        reads += 1;
    }
    child.wait().expect("it ends");
    assert_eq!(streamed, whole + "\n");
    assert!(reads > 1, "all came at once");
}

#[test]
fn drafts_change_no_text_and_are_counted() {
    let temp = TestDir::new();
    let text = "One two three four five six. ".repeat(8);
    let file = temp.write("prompt.txt", &text);
    let generate = |more: &[&str]| {
        let args = ["generate", "-f", &file, "-n", "60", "--seed", "3", "--stop", "zzz", "--format", "jsonl"];
        let said = antigravity(args).args(more).run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        let lines: Vec<Value> = said.out.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
        let ids: Vec<Value> = lines.iter().filter(|l| l["t"] == "token").map(|l| l["id"].clone()).collect();
        (ids, lines.last().expect("stats").clone(), said.err)
    };
    for sampling in [&["--temp", "0", "--repeat-penalty", "1"][..], &["--temp", "0.7"]] {
        let (ids, stats, _) = generate(sampling);
        assert!(stats.get("draft").is_none());
        let (drafted, counted, err) = generate(&[sampling, &["--draft", "8"]].concat());
        assert_eq!((ids, &stats["logits"]), (drafted, &counted["logits"]));
        mentions(&err, &["draft: ", " tokens accepted ("]);
        let count = |key: &str| counted["draft"][key].as_u64().unwrap_or_else(|| panic!("{key}: {counted}"));
        assert!(count("accepted") <= count("drafted") && count("passes") <= count("drafted"), "{counted}");
    }
    let line = antigravity(["generate", "--draft", "65"]).fails(2);
    mentions(&line, &["--draft 65"]);
    let off =
        antigravity(["generate", "--draft", "4", "--eviction-policy", "h2o", "-n", "2", "-p", "a"]).run();
    mentions(&off.err, &["--draft 4: off"]);
}

#[test]
fn a_text_that_is_cut_in_a_draft_goes_on_as_if_it_were_not() {
    let temp = TestDir::new();
    let (file, state) =
        (temp.write("prompt.txt", "One two three four five six. ".repeat(6)), temp.path("state"));
    let args = ["--temp", "0.5", "--seed", "4", "--repeat-penalty", "1"];
    let whole = antigravity(["generate", "-f", &file, "-n", "57"]).args(args).text();
    let part = ["generate", "-n", "19", "--draft", "9", "--session", &state];
    let first = antigravity(part).args(["-f", &file]).args(args).text();
    let rest: String = (0..2).map(|_| antigravity(part).args(args).text()).collect();
    assert_eq!(whole, first + &rest);
}

/// Arguments that let the small model guess in every pass.
fn drafting() -> Option<Vec<String>> {
    let program = crate::support::paths::draft_program()?;
    let flags = ["--draft-when", "always", "--draft-model", program.to_str().expect("UTF-8")];
    Some(flags.map(str::to_owned).into())
}

#[test]
fn a_model_that_drafts_changes_no_text_of_any_command() {
    let Some(flags) = drafting() else { return };
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let same = |args: &[&str], input: &str| {
        let (plain, drafted) =
            (antigravity(args).stdin(input).run(), antigravity(args).args(&flags).stdin(input).run());
        assert_eq!((plain.code, drafted.code), (Some(0), Some(0)), "{}", drafted.err);
        assert_eq!(plain.out, drafted.out, "{args:?}");
        drafted.err
    };
    let err = same(&["generate", "-p", "Once upon a time", "-n", "90", "--seed", "2", "--stop", "zzz"], "");
    mentions(&err, &["draft: ", "; draft model: "]);
    let talk = "Tell me a story.\n/retry\nWho is in it?\n/undo\nAnd then?\n";
    same(&["chat", "--seed", "3", "-n", "40"], talk);
    // The answers come as they are complete, which drafts may change.
    let prompts = ["generate", "--prompts", "-", "-n", "30", "--seed", "4", "--batch", "1"];
    same(&prompts, "\"Once\"\n\"One day\"\n\"Lily\"\n");
    #[cfg(feature = "grammar")]
    same(
        &["generate", "-p", "A list:", "--seed", "5", "-n", "60", "--json-schema", "{\"type\":\"array\"}"],
        "",
    );
    let pays = antigravity(["generate", "-p", "Once", "-n", "60", "--temp", "0"]).args(&flags[2..]).run();
    assert_eq!(pays.text(), antigravity(["generate", "-p", "Once", "-n", "60", "--temp", "0"]).text());
}

#[test]
fn a_session_that_a_model_drafts_for_goes_on_as_if_it_did_not() {
    let Some(flags) = drafting() else { return };
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let temp = TestDir::new();
    let state = temp.path("state");
    let args = ["--seed", "8", "-p", "One day"];
    let whole = antigravity(["generate", "-n", "57"]).args(args).text();
    let part = ["generate", "-n", "19", "--session", &state];
    let first = antigravity(part).args(args).args(&flags).text();
    let rest: String = (0..2).map(|_| antigravity(part).args(["--seed", "8"]).args(&flags).text()).collect();
    assert_eq!(whole, first + &rest);
}

#[test]
fn draft_flags_without_effect_get_a_warning() {
    let said =
        |more: &[&str]| antigravity(["generate", "-p", "a", "-n", "2", "--temp", "0"]).args(more).run().err;
    mentions(&said(&["--draft", "0", "--draft-model", "x"]), &["--draft-model: no effect at --draft 0"]);
    mentions(&said(&["--draft-when", "always"]), &["--draft-when: no effect without a --draft-model"]);
    antigravity(["generate", "--draft-model", "/nowhere/x"]).fails_with(2, &["--draft-model /nowhere/x"]);
    let temp = TestDir::new();
    let (ids, out) = (temp.write("ids.json", "[1, 2]"), temp.path("out"));
    let logits = antigravity([
        "logits",
        "--tokens",
        &ids,
        "--out",
        &out,
        "--draft",
        "3",
        "--draft-model",
        "/nowhere/x",
    ])
    .run();
    mentions(&logits.err, &["--draft: no effect", "--draft-model: no effect"]);
    let program = binary();
    let plan = antigravity(["plan", "--draft-model", program.to_str().expect("UTF-8")]).run();
    mentions(&plan.out, &["draft model", " plan"]);
    let own = antigravity(["draft"]).stdin("{}\n").run();
    assert_eq!(own.code, Some(2));
    assert!(own.out.starts_with("{\"antigravity_draft\":1,"), "{}", own.out);
    mentions(&own.err, &["stdin: not a message"]);
    let far = r#"{"id":1,"sequence":1,"keep":0,"tokens":[1],"draft":2,"least":0}"#;
    mentions(
        &antigravity(["draft"]).stdin(format!("{far}\n")).run().err,
        &["stdin: sequence 1: this program has only 1"],
    );
    let keeps = far.replace("\"sequence\":1,\"keep\":0", "\"sequence\":0,\"keep\":9");
    mentions(&antigravity(["draft"]).stdin(format!("{keeps}\n")).run().err, &["stdin: keep 9 of 0 tokens"]);
    let good = far.replace("\"sequence\":1", "\"sequence\":0");
    let said = antigravity(["draft"]).stdin(format!("{good}\n")).run();
    assert_eq!((said.code, said.out.lines().count()), (Some(0), 2), "{}", said.err);
}
