//! Answers of each form, cut everywhere.

mod families;

use super::*;
use crate::chat::{Jinja, Template};
use crate::tokenizer::Tokenizer;

fn tokenizer() -> Tokenizer {
    Tokenizer::open(&crate::project().join("models/story"), 4096).expect("loads")
}

/// The form of a template that has this text.
fn form(source: &str) -> OutputFormat {
    let source = format!("{{# {source} #}}");
    OutputFormat::for_template(
        &Template::Jinja(Jinja::new("t", source, vec![]).expect("compiles")),
        &tokenizer(),
    )
}

fn qwen() -> OutputFormat {
    form("<think> reasoning_content </think> <tool_call> tool_calls")
}

fn llama() -> OutputFormat {
    form("\"parameters\" <|eot_id|> tool_calls")
}

fn text(t: &str) -> AnswerPart {
    AnswerPart::Text(t.into())
}

fn thinking(t: &str) -> AnswerPart {
    AnswerPart::Thinking(t.into())
}

fn call(n: usize, name: &str, arguments: &str) -> AnswerPart {
    AnswerPart::ToolCall(ToolCall { id: format!("call_{n}"), name: name.into(), arguments: arguments.into() })
}

/// Neighbours of the same kind as one.
fn joined(parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
    let mut all: Vec<AnswerPart> = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (Some(AnswerPart::Text(a)), AnswerPart::Text(b))
            | (Some(AnswerPart::Thinking(a)), AnswerPart::Thinking(b)) => *a += &b,
            (_, part) => all.push(part),
        }
    }
    all
}

fn read(form: OutputFormat, prompt: &str, pieces: &[&str]) -> Vec<AnswerPart> {
    let mut reader = OutputParser::new(form, prompt);
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish());
    assert!(
        parts.iter().all(|p| !matches!(p, AnswerPart::Text(t) | AnswerPart::Thinking(t) if t.is_empty())),
        "{parts:?}"
    );
    joined(whole(parts))
}

/// Without the parts of calls, which are those of the calls that follow them.
fn whole(parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
    let (mut all, mut begun) = (Vec::new(), None);
    for part in parts {
        match (part, &mut begun) {
            (AnswerPart::ToolCallStart { id, name }, _) => {
                begun = Some(ToolCall { id, name, arguments: String::new() })
            }
            (AnswerPart::ToolCallDelta(more), Some(call)) => {
                assert!(!more.is_empty());
                call.arguments += &more;
            }
            (AnswerPart::ToolCallDelta(more), None) => panic!("{more:?} are of no call"),
            (part @ (AnswerPart::ToolCall(_) | AnswerPart::ToolCallCut { .. }), _) => {
                let (AnswerPart::ToolCall(call) | AnswerPart::ToolCallCut { call, .. }) = &part else {
                    continue;
                };
                assert_eq!(begun.take().as_ref(), Some(call));
                all.push(part);
            }
            (part, _) => all.push(part),
        }
    }
    assert_eq!(begun, None);
    all
}

fn cut(n: usize, name: &str, (arguments, written): (&str, &str)) -> AnswerPart {
    let AnswerPart::ToolCall(call) = call(n, name, arguments) else { unreachable!("a call") };
    AnswerPart::ToolCallCut { call, written: written.into() }
}

/// Reads `answer` as a whole, in two pieces wherever it is cut, and character by character.
#[track_caller]
fn is(form: OutputFormat, prompt: &str, answer: &str, parts: &[AnswerPart]) {
    assert_eq!(read(form, prompt, &[answer]), parts, "{answer:?}");
    let cuts: Vec<usize> = answer.char_indices().map(|(at, _)| at).collect();
    for &at in &cuts {
        let (a, b) = answer.split_at(at);
        assert_eq!(read(form, prompt, &[a, b]), parts, "{a:?} {b:?}");
    }
    let characters: Vec<String> = answer.chars().map(String::from).collect();
    let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
    assert_eq!(read(form, prompt, &pieces), parts, "{answer:?} in characters");
}

#[test]
fn thoughts_are_apart() {
    let form = qwen();
    for (answer, parts) in [
        ("<think>\nhm, größer\n</think>\n\nYes.", &[thinking("hm, größer\n"), text("Yes.")][..]),
        ("<think>\n\n</think>\n\nYes.", &[text("Yes.")]),
        (" \n<think>a</think>    code", &[thinking("a"), text("    code")]),
        // Never ended, or never begun.
        ("<think>\nhm</thin", &[thinking("hm</thin")]),
        ("hm</think>x", &[text("hm</think>x")]),
        ("A tag <think> in a text</think>", &[text("A tag <think> in a text</think>")]),
        ("<thinker>", &[text("<thinker>")]),
        ("  ", &[text("  ")]),
        ("", &[]),
    ] {
        is(form, "assistant\n", answer, parts);
    }
    // They may begin in the prompt.
    is(form, "assistant\n<think>\n", "\nhm\n</think>\n\nYes.", &[thinking("hm\n"), text("Yes.")]);
    is(form, "<think>\n\n</think>\n\n", "Yes.", &[text("Yes.")]);
    assert!(OutputParser::new(form, "<think>\n").is_thinking() && !OutputParser::new(form, "").is_thinking());
    is(
        OutputFormat::default(),
        "<think>",
        "<think>a</think><tool_call>",
        &[text("<think>a</think><tool_call>")],
    );
}

#[test]
fn calls_in_tags() {
    let form = qwen();
    let weather = r#"{"name": "get_weather", "arguments": {"city": "Zürich </b>", "n": [1, {"a": "}"}]}}"#;
    let arguments = r#"{"city": "Zürich </b>", "n": [1, {"a": "}"}]}"#;
    let tagged = format!("<tool_call>\n{weather}\n</tool_call>");
    is(form, "", &tagged, &[call(0, "get_weather", arguments)]);
    is(
        form,
        "",
        &format!("<think>\nhm\n</think>\n\nI look.\n{tagged}\n{tagged}\n"),
        &[
            thinking("hm\n"),
            text("I look.\n"),
            call(0, "get_weather", arguments),
            call(1, "get_weather", arguments),
        ],
    );
    // A string may hold what ends a call.
    let marked = r#"{"a": "</tool_call>\""}"#;
    is(
        form,
        "",
        &format!(r#"<tool_call>{{"name": "f", "arguments": {marked}}}</tool_call> x"#),
        &[call(0, "f", marked), text(" x")],
    );
    // The end of the answer ends a call too.
    is(form, "", &tagged.replace("\n</tool_call>", ""), &[call(0, "get_weather", arguments)]);
    is(form, "", &format!("{tagged}\nDone."), &[call(0, "get_weather", arguments), text("Done.")]);
    // Arguments in a text, and none at all.
    is(
        form,
        "",
        r#"<tool_call>{"arguments": "{\"a\": 1}", "name": "f"}</tool_call>"#,
        &[call(0, "f", "{\"a\": 1}")],
    );
    is(form, "", r#"<tool_call>{"name": "f"}</tool_call>"#, &[call(0, "f", "{}")]);
    let deep = format!(r#"{{"name": "f", "arguments": {{"a": {}{}}}}}"#, "[".repeat(5000), "]".repeat(5000));
    for broken in [
        "{",
        "",
        "no JSON",
        r#"{"name": "f", "arguments": [1]}"#,
        r#"{"name": "a b", "arguments": {}}"#,
        r#"{"name": 5}"#,
        r#"[{"name": "f"}"#,
        "[]",
    ] {
        let answer = format!("a <tool_call>{broken}</tool_call> b");
        is(form, "", &answer, &[text(&answer)]);
    }
    let answer = format!("<tool_call>{deep}</tool_call>");
    assert!(
        matches!(&read(form, "", &[&answer])[..], [AnswerPart::ToolCallCut { written, .. }] if answer.starts_with(written))
    );
    is(form, "", "a <tool_call> b", &[text("a <tool_call> b")]);
    // Without tools, calls are text.
    is(form.without_tools(), "", &tagged, &[text(&tagged)]);
}

#[test]
fn calls_as_llama_writes_them() {
    let form = llama();
    let one = r#"{"name": "f", "parameters": {"a": "1"}}"#;
    is(form, "", one, &[call(0, "f", r#"{"a": "1"}"#)]);
    is(form, "", &format!("<|python_tag|>{one}"), &[call(0, "f", r#"{"a": "1"}"#)]);
    for between in ["; ", "\n", ";", " "] {
        let two = [call(0, "f", r#"{"a": "1"}"#), call(1, "f", r#"{"a": "1"}"#)];
        is(form, "", &format!("\n{one}{between}{one}"), &two);
        is(form, "", &format!("<|python_tag|>{one}{between}{one}"), &two);
    }
    is(form, "", r#"{"type": "function", "function": "f", "parameters": {}}"#, &[call(0, "f", "{}")]);
    is(form, "", &format!("{one};\n"), &[call(0, "f", r#"{"a": "1"}"#)]);
    is(form, "", &format!("{one} It rains."), &[call(0, "f", r#"{"a": "1"}"#), text(" It rains.")]);
    for answer in [
        r#"{"name": "Ann", "age": 5}"#.replace("\"name\": \"Ann\"", "\"name\": \"An n\""),
        r#"{"name": "f", "parameters": 5} x"#.into(),
        r#"{"name": "f", "param"#.into(),
        r#"{"city": "Paris"}"#.into(),
        "{ a set }".into(),
        "{".into(),
        format!("It is {one}"),
        "<|python_tag|>print(1)".into(),
    ] {
        is(form, "", &answer, &[text(&answer)]);
    }
}

#[test]
fn only_what_may_become_a_marker_is_held_back() {
    let mut reader = OutputParser::new(llama(), "");
    assert_eq!(reader.push("{ \"cit"), [text("{ \"cit")]);
    let mut reader = OutputParser::new(qwen(), "");
    assert_eq!(reader.push("Hello <"), [text("Hello ")]);
    assert_eq!(reader.push("b> <tool"), [text("<b> ")]);
    assert_eq!(reader.push("box>"), [text("<toolbox>")]);
    assert_eq!(reader.finish(), []);
    let mut reader = OutputParser { calls: 3, first: 3, ..OutputParser::new(qwen(), "") };
    let parts = reader.push("<tool_call>{\"name\": \"f\"}</tool_call>");
    assert_eq!(whole(parts), [call(3, "f", "{}")]);
}

#[test]
fn arguments_come_as_they_are_written() {
    let more = |text: &str| AnswerPart::ToolCallDelta(text.into());
    let begun = || AnswerPart::ToolCallStart { id: "call_0".into(), name: "f".into() };
    let args = r#"{"a": "{", "b": [1]}"#;
    for (form, open, close) in [
        (qwen(), "<tool_call>\n", "\n</tool_call>"),
        (form("<|tool_call|>"), "<|tool_call|>[", ", {\"name\": \"g\"}]"),
        (llama(), "", ""),
        (llama(), "<|python_tag|>", ""),
    ] {
        let mut reader = OutputParser::new(form, "");
        let name = if form == llama() { "parameters" } else { "arguments" };
        let head = format!("{open}{{\"type\": \"function\", \"name\": \"f\", \"{name}\": ");
        assert_eq!(reader.push(&head), [], "{head}");
        assert_eq!(reader.push("{\"a\": \""), [begun(), more("{\"a\": \"")]);
        assert_eq!(reader.push("{\", \"b\": "), [more("{\", \"b\": ")]);
        let mut parts = reader.push(&format!("[1]}}}}{close}"));
        parts.extend(reader.finish());
        assert_eq!(parts[..2], [more("[1]}"), call(0, "f", args)], "{open}");
    }
    // A name after the arguments, arguments in a text: all at once.
    let mut reader = OutputParser::new(qwen(), "");
    assert_eq!(reader.push("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}"), []);
}

#[test]
fn a_call_that_breaks_off_behind_its_name_is_a_call_with_what_came_of_its_arguments() {
    let granite = form("<|tool_call|>");
    for (form, open, inner, arguments) in [
        (qwen(), "<tool_call>", r#"{"name": "f", "arguments": {"a": "x </tool"#, r#"{"a": "x </tool"#),
        (qwen(), "<tool_call>", r#"{"name": "f", "arguments": {"a": 1"#, r#"{"a": 1"#),
        (qwen(), "<tool_call>", r#"{"name": "f", "arguments": {"a": 1}"#, r#"{"a": 1}"#),
        (qwen(), "<tool_call>", r#"{"name": "f", "argu"#, ""),
        (qwen(), "<tool_call>", r#"{"name": "f", "arguments": {}, "parameters": {}}"#, "{}"),
        (granite, "<|tool_call|>", r#"[{"name": "f", "arguments": {"a": [1, 2"#, r#"{"a": [1, 2"#),
        (llama(), "<|python_tag|>", r#"{"name": "f", "parameters": {"#, "{"),
        (llama(), "", r#"{"name": "f", "parameters": {"a": "#, r#"{"a": "#),
    ] {
        let answer = [open, inner].concat();
        is(form, "", &answer, &[cut(0, "f", (arguments, &answer))]);
    }
    // Where the model itself ends it, and goes on; what is cut is the last of several.
    let broken = r#"{"name": "f", "arguments": {"a": }}"#;
    is(
        qwen(),
        "",
        &format!("I <tool_call>{broken}</tool_call> b"),
        &[text("I "), cut(0, "f", ("{\"a\": }", &format!("<tool_call>{broken}"))), text(" b")],
    );
    is(
        llama(),
        "",
        r#"{"name": "f", "parameters": {"a": }} b"#,
        &[cut(0, "f", ("{\"a\": }", r#"{"name": "f", "parameters": {"a": }}"#)), text(" b")],
    );
    let one = r#"{"name": "f", "arguments": {}}"#;
    is(qwen(), "", &format!("<tool_call>{one} and more"), &[call(0, "f", "{}"), text("and more")]);
    let second = r#"{"name": "g", "arguments": {"x": 1"#;
    is(
        granite,
        "",
        &format!("<|tool_call|>[{one}, {second}"),
        &[call(0, "f", "{}"), cut(1, "g", ("{\"x\": 1", second))],
    );
}

/// Looking through all of a call for each of its pieces would take minutes.
#[test]
fn the_time_of_a_call_is_in_proportion_to_its_length() {
    let list = "{\"x\": [1, \"</tool_cal\"]}, ".repeat(200);
    let args = format!("{{\"a\": \"{}\", \"b\": [{list}0]}}", "</tool_call> ".repeat(60_000));
    for (form, open, close) in [
        (qwen(), "<tool_call>", "</tool_call>"),
        (form("<|tool_call|>"), "<|tool_call|>[", "]"),
        (llama(), "<|python_tag|>", ""),
        (llama(), "", ""),
    ] {
        let answer = format!("{open}{{\"name\": \"f\", \"arguments\": {args}}}{close}");
        let mut parser = OutputParser::new(form, "");
        let began = std::time::Instant::now();
        let pieces = answer.as_bytes().chunks(4).map(|piece| std::str::from_utf8(piece).expect("ASCII"));
        let mut parts: Vec<AnswerPart> = pieces.flat_map(|piece| parser.push(piece)).collect();
        parts.extend(parser.finish());
        assert!(began.elapsed().as_secs() < 20, "{open}: {:?}", began.elapsed());
        assert!(joined(whole(parts)) == [call(0, "f", &args)], "{open}");
    }
}

#[test]
fn lists_of_calls_and_models_that_know_no_calls() {
    // Granite's and Phi's markers are control tokens, which the story model lacks.
    let granite = form("<|tool_call|>");
    let list = r#"<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]"#;
    is(granite, "", list, &[call(0, "f", "{}"), call(1, "g", r#"{"x": 1}"#)]);
    is(granite, "", "<|tool_call|>[{", &[text("<|tool_call|>[{")]);
    assert_eq!(form("nothing"), OutputFormat::default());
    assert_eq!(OutputFormat::for_template(&Template::PLAIN, &tokenizer()), OutputFormat::default());
    assert!(
        OutputFormat::for_template(&Template::built_in_named("gemma").expect("is built in"), &tokenizer())
            .calls
            .is_none()
    );
    assert!(form("</think>").has_thinking() && !llama().has_thinking());
    let ids = tokenizer().encode_plain("<tool_call>x").expect("ids");
    assert_eq!(qwen().decode_answer(&tokenizer(), &ids), "<tool_call>x");
}
