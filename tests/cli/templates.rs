//! Templates that are given, tools and what models call, and thoughts.

use crate::support::command::*;
use serde_json::{Value, json};

/// As Qwen's: thoughts, tools, calls and results.
const TEMPLATE: &str = "\
{% if tools %}<|im_start|>system\n{{ tools|tojson }}<|im_end|>\n{% endif %}{% for m in messages %}\
{% if m.role == 'tool' and m.name != 'now' %}{{ raise_exception('a result of nothing') }}{% endif %}\
<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}<tool_call>{\"name\": \"{{ call.function.name }}\", \
\"arguments\": {{ call.function.arguments|tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% if begin is defined %}<think>\n{% endif %}\
{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}\
{# reasoning_content #}";
const CALL: &str =
    "<tool_call>{\"name\": \"now\", \"arguments\": {\"zone\": \"UTC\", \"at\": 1}}</tool_call>";
const TOOLS: &str =
    r#"[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]"#;
const THOUGHT: &str = "<think>\nhm\n</think>\n\nYes.";
/// Flags that make the bundled model say its token 1, once.
const SAYS: [&str; 7] = ["--temp", "0", "-n", "1", "--logit-bias", "1+10000", "--ignore-eos"];

impl TestDir {
    /// The bundled model with that template, whose token 1 is this text.
    pub fn model_that_says(&self, text: &str) -> String {
        let dir = self.model_without("tokenizer.json");
        let json = std::fs::read_to_string(model().join("tokenizer.json")).expect("a tokenizer");
        let mut tokenizer: Value = serde_json::from_str(&json).expect("JSON");
        let added = &mut tokenizer["added_tokens"][1];
        (added["content"], added["special"]) = (text.into(), false.into());
        let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
        let id = vocab.remove("<|end_of_text|>").expect("a token");
        vocab.insert(text.into(), id);
        self.write("tokenizer.json", tokenizer.to_string());
        self.write("tokenizer_config.json", r#"{"bos_token": "<|begin_of_text|>", "add_bos_token": true}"#);
        self.write("generation_config.json", r#"{"eos_token_id": 3}"#);
        self.write("chat_template.jinja", TEMPLATE);
        self.write("tools.json", TOOLS);
        dir
    }
}

fn lines(said: &RunOutput) -> Vec<Value> {
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The lines of a kind, joined by one field.
fn all(lines: &[Value], kind: &str, field: &str) -> String {
    lines.iter().filter(|l| l["t"] == kind).filter_map(|l| l[field].as_str()).collect()
}

#[test]
fn a_call_is_a_line_of_json_and_its_result_goes_on() {
    let temp = TestDir::new();
    let dir = temp.model_that_says(CALL);
    let tools = temp.path("tools.json");
    let args = [&["chat", "-m", &dir, "--tools", &tools], &SAYS[..]].concat();
    let input = "What time is it?\n/tool then noon\n/tool now\n/tool now noon\n/undo\n/tool call_0 noon\n";
    let said = antigravity(&args).stdin(input).run();
    let line = "{\"name\": \"now\", \"arguments\": {\"zone\": \"UTC\", \"at\": 1}}\n";
    assert_eq!((said.code, said.out), (Some(0), line.repeat(3)), "{}", said.err);
    assert_eq!(
        said.err,
        "/tool: then was not called; called: now\n/tool: give a name and a text: /tool NAME TEXT\n"
    );
    let said =
        antigravity(&args).args(["--format", "jsonl"]).stdin("What time is it?\n/tool now noon\n").run();
    let lines = lines(&said);
    let calls: Vec<&Value> = lines.iter().filter(|l| l["t"] == "tool_call").collect();
    let call = |id: &str| json!({"t": "tool_call", "id": id, "name": "now", "arguments": "{\"zone\": \"UTC\", \"at\": 1}"});
    assert_eq!(calls, [&call("call_0"), &call("call_1")]);
    assert_eq!(lines.iter().filter(|l| l["t"] == "token" && l["id"] == 1 && l["text"] == "").count(), 2);
    // The result appends to what is computed: its turn, and no more.
    let computed: Vec<u64> = lines.iter().filter_map(|l| l["prompt_tokens"].as_u64()).collect();
    assert!(computed[0] > 50 && computed[1] < 25, "{computed:?}");
    // Nobody gave it a tool: text.
    let said =
        antigravity(["chat", "-m", &dir, "-q"]).args(SAYS).stdin("What time is it?\n/tool now noon\n").run();
    assert_eq!(said.out, format!("{CALL}\n"));
    assert_eq!(said.err, "/tool: the last answer called no function\n");
}

#[test]
fn a_conversation_keeps_its_tools() {
    let temp = TestDir::new();
    let dir = temp.model_that_says(CALL);
    let (tools, state, other) = (temp.path("tools.json"), temp.path("state"), temp.path("other"));
    let args = [&["chat", "-m", &dir, "-q"], &SAYS[..]].concat();
    let session = [&args[..], &["--session", &state]].concat();
    let first = antigravity(&session)
        .args(["--tools", &tools])
        .stdin(format!("What time is it?\n/save {other}\n"))
        .run();
    assert_eq!((first.code, first.err.as_str()), (Some(0), ""));
    let next = antigravity(&session).stdin("/tool now noon\n").run();
    assert_eq!((next.out, next.err.as_str()), (first.out.clone(), ""));
    let loaded = antigravity(&args).stdin(format!("/load {other}\n/tool now noon\n/reset\nAgain?\n")).run();
    assert_eq!((loaded.out, loaded.err.as_str()), (first.out.repeat(2), ""));
    let others = temp.write("others.json", TOOLS.replace("now", "then"));
    antigravity(&session)
        .args(["--tools", &others, "-p", "x"])
        .fails_with(2, &["--session", "different --tools"]);
    // A text may still come in place of the result, or after some.
    let text = antigravity(&session).stdin("Never mind.\n").run();
    assert_eq!((text.code, text.out), (Some(0), first.out));
}

#[test]
fn thoughts_are_apart_from_the_answer() {
    let temp = TestDir::new();
    let dir = temp.model_that_says(THOUGHT);
    let args = [&["chat", "-m", &dir, "-p", "Hi"], &SAYS[..]].concat();
    for (think, err) in
        [(&[][..], ""), (&["--think", "show"], "hm\n"), (&["--think", "hide"], ""), (&["--think", "off"], "")]
    {
        let said = antigravity(&args).args(think).stdin("").run();
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "Yes.\n", err), "{think:?}");
    }
    let json = [&args[..], &["--format", "jsonl", "--logprobs", "1"]].concat();
    let computed = |lines: &[Value]| lines.iter().find_map(|l| l["prompt_tokens"].as_u64()).expect("stats");
    let shown = lines(&antigravity(&json).stdin("").run());
    assert_eq!(
        (all(&shown, "thinking", "text"), all(&shown, "token", "text")),
        ("hm\n".into(), "Yes.".into())
    );
    // The token belongs to the first of its two lines.
    assert_eq!((&shown[0]["id"], &shown[1]["id"]), (&1.into(), &Value::Null));
    assert!(shown[0]["logprobs"].is_object() && shown[1]["logprobs"].is_null(), "{shown:?}");
    let off = lines(&antigravity(&json).args(["--think", "off"]).stdin("").run());
    assert_eq!((all(&off, "thinking", "text"), all(&off, "token", "text")), (String::new(), "Yes.".into()));
    assert!(computed(&off) > computed(&shown), "the template is told");
    let arg = ["--template-arg", "enable_thinking=true", "--think", "off"];
    assert_eq!(
        computed(&lines(&antigravity(&json).args(arg).stdin("").run())),
        computed(&shown),
        "what is said counts"
    );
}

#[test]
fn thoughts_end_with_their_budget_and_the_answer_follows() {
    let temp = TestDir::new();
    let dir = temp.model_that_says("unused");
    let args = [
        "chat",
        "-m",
        &dir,
        "-p",
        "Hi",
        "--temp",
        "0",
        "-n",
        "30",
        "--ignore-eos",
        "--template-arg",
        "begin=1",
    ];
    let json = [&args[..], &["--format", "jsonl"]].concat();
    let ids = |lines: &[Value], kind: &str| -> Vec<u64> {
        lines.iter().filter(|l| l["t"] == kind).filter_map(|l| l["id"].as_u64()).collect()
    };
    let free = lines(&antigravity(&json).stdin("").run());
    assert_eq!((ids(&free, "thinking").len(), ids(&free, "token").len()), (30, 0));
    for budget in [0, 5] {
        let said = lines(&antigravity(&json).args(["--think-budget", &budget.to_string()]).stdin("").run());
        let (thoughts, answer) = (ids(&said, "thinking"), ids(&said, "token"));
        assert_eq!(thoughts[..budget], ids(&free, "thinking")[..budget]);
        // What ends them is a few tokens, of thirty in all.
        assert!(answer.len() >= 10 && thoughts.len() + answer.len() == 30, "{thoughts:?} {answer:?}");
        let text = all(&said, "token", "text");
        assert!(!text.trim().is_empty() && !text.contains("think"), "{text:?}");
        let plain = antigravity(args).args(["--think-budget", &budget.to_string()]).stdin("").run();
        assert_eq!(plain.out, format!("{text}\n"));
    }
    assert_eq!(antigravity(args).stdin("").run().out, "\n", "thoughts that never end are no answer");
}

#[test]
fn another_template_takes_the_place_of_the_models() {
    let temp = TestDir::new();
    let ask = ["chat", "-st", "-p", "Hi", "--temp", "0", "-n", "12"];
    let with = |template: &str| antigravity(ask).args(["--chat-template", template]).text();
    let own = antigravity(ask).text();
    assert_eq!(with("chatml"), own);
    let source = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                  {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    assert_eq!(with(source), own);
    assert_eq!(with(&temp.write("mine.jinja", source)), own);
    assert_ne!(with("llama3"), own);
    // It helps where the model's own is broken.
    let dir = temp.model_without("");
    temp.write("chat_template.jinja", "{{ broken");
    assert_eq!(antigravity(ask).args(["-m", &dir, "--chat-template", "chatml"]).text(), own);
    // What a template does not read is told.
    let said = antigravity(ask)
        .args(["--template-arg", "mood=good", "--think", "hide", "--think-budget", "3"])
        .run();
    mentions(
        &said.err,
        &["warning: --template-arg mood: no effect", "warning: --think: ", "warning: --think-budget: "],
    );
    let quiet = antigravity(ask).args(["-q", "--think", "hide"]).run();
    assert_eq!(quiet.err, "");
    for (template, words) in [
        ("nosuch.jinja", &["--chat-template nosuch.jinja", "no such file", "chatml"][..]),
        (&temp.path(""), &["--chat-template", "directory"]),
    ] {
        antigravity(ask).args(["--chat-template", template]).fails_with(2, words);
    }
    antigravity(ask).args(["--chat-template", "{{ a"]).fails_with(3, &["--chat-template, line 1", "syntax"]);
}

#[test]
fn what_is_wrong_with_tools_or_values_is_one_line() {
    let temp = TestDir::new();
    let dir = temp.model_that_says("unused");
    for (json, words) in [
        ("", &["is not valid JSON"][..]),
        ("{}", &["use a JSON array of tools"]),
        ("[]", &["is empty; give at least one tool"]),
        (r#"[{"type": "function", "function": {"name": "\u001b[2J"}}]"#, &["tool 1: field `function.name`"]),
    ] {
        let file = temp.write("wrong.json", json);
        let line = antigravity(["chat", "-m", &dir, "-p", "x", "--tools", &file]).fails(2);
        mentions(&line, &[&["--tools", "wrong.json"], words].concat());
    }
    antigravity(["chat", "-p", "x", "--tools", "nosuch"]).fails_with(2, &["--tools nosuch"]);
    let tools = temp.path("tools.json");
    antigravity(["chat", "-p", "x", "--tools", &tools])
        .fails_with(2, &["--tools", "does not support tools", "--chat-template"]);
    for (value, words) in
        [("a", "use NAME=VALUE"), ("a-b=1", "not a valid variable name"), ("messages=[]", "another name")]
    {
        antigravity(["chat", "-p", "x", "--template-arg", value]).fails_with(2, &["--template-arg", words]);
    }
    antigravity(["chat", "--chat-template-kwargs", "{}"]).fails_with(2, &["--template-arg NAME=VALUE"]);
}
