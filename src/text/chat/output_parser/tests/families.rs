//! Thinking and calls in the form of each family of 2026, by its published template.

use super::*;

/// The form of a model with this template.
fn published(name: &str) -> OutputFormat {
    let file = crate::project().join("tests/fixtures/chat/2026").join(format!("{name}.jinja"));
    let source = std::fs::read_to_string(file).expect("a fixture");
    let template = Template::Jinja(Jinja::new(name, source, vec![]).expect("compiles"));
    let form = OutputFormat::for_template(&template, &tokenizer());
    // There only the vocabulary tells.
    if name == "lfm2.5" { self::form("<think> <|tool_call_start|>") } else { form }
}

const NAMES: [&str; 7] = ["gemma4", "gpt-oss", "granite4", "lfm2.5", "minicpm5", "ministral3", "qwen3.5"];

#[test]
fn each_family_thinks_and_calls_in_its_own_form() {
    let weather = |n| call(n, "get_weather", r#"{"city": "Busan", "days": 2}"#);
    for (name, prompt, answer, parts) in [
        (
            "qwen3.5",
            "<think>\n",
            "Hm.\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBusan\n</parameter>\n\
             <parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n\
             </tool_call>",
            &[thinking("Hm.\n"), text("I look.\n\n"), weather(0), call(1, "now", "{}")][..],
        ),
        (
            "qwen3.5",
            "",
            "<tool_call>\n<function=f>\n<parameter=code>\nif a:\n  \"</tool_call>\"\n\n</parameter>\n<parameter=b>\n\
             {\"x\": [true]}\n</parameter>\n<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>ok",
            &[
                call(0, "f", r#"{"code": "if a:\n  \"</tool_call>\"\n", "b": {"x": [true]}, "c": true}"#),
                text("ok"),
            ],
        ),
        (
            "gemma4",
            "",
            "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:get_weather{city:<|\"|>Busan<|\"|>,days:2}\
             <tool_call|><|tool_call>call:f{a:[<|\"|>}\n<|\"|>,{b:null}],c:-1.5}<tool_call|>",
            &[
                thinking("Hm.\n"),
                text("I look."),
                weather(0),
                call(1, "f", r#"{"a": ["}\n", {"b": null}], "c": -1.5}"#),
            ],
        ),
        (
            "lfm2.5",
            "",
            "<think>Hm.</think><|tool_call_start|>[get_weather(city='Busan', days=2), now()]<|tool_call_end|>Wait.",
            &[thinking("Hm."), weather(0), call(1, "now", "{}"), text("Wait.")],
        ),
        (
            "lfm2.5",
            "",
            "<|tool_call_start|>[{\"name\": \"now\", \"arguments\": {}}]<|tool_call_end|>",
            &[call(0, "now", "{}")],
        ),
        (
            "minicpm5",
            "<think>\n",
            "Hm.\n</think>\n\n<function name=\"get_weather\"><param name=\"city\">Busan</param><param name=\"days\">2\
             </param></function>\n<function name=\"f\"><param name=\"a\"><![CDATA[1 < 2</function>\n]]></param>\
             <param name=\"b\">[1, 'x']</param></function>",
            &[thinking("Hm.\n"), weather(0), call(1, "f", r#"{"a": "1 < 2</function>\n", "b": [1, "x"]}"#)],
        ),
        (
            "ministral3",
            "",
            "[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Busan\", \"days\": 2}[TOOL_CALLS]f\
             [CALL_ID]abc[ARGS]{\"a\": {\"b\": \"}\"}}",
            &[thinking("Hm."), text("I look."), weather(0), call(1, "f", r#"{"a": {"b": "}"}}"#)],
        ),
        (
            "granite4",
            "",
            "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Busan\", \"days\": 2}}\n\
             </tool_call>",
            &[text("I look.\n"), weather(0)],
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm. to=functions.x<|end|><|start|>assistant<|channel|>commentary<|message|>\
             I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json\
             <|message|>{\"city\": \"Busan\", \"days\": 2}",
            &[thinking("Hm. to=functions.x"), text("I look."), weather(0)],
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            " to=functions.get_weather<|channel|>commentary json<|message|>{\"city\": \"Busan\", \"days\": 2}",
            &[weather(0)],
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>to \
             [f](to=functions.f)",
            &[thinking("Hm."), text("to [f](to=functions.f)")],
        ),
    ] {
        is(published(name), prompt, answer, parts);
    }
    for name in NAMES {
        let form = published(name);
        assert_eq!(form.has_thinking(), name != "granite4", "{name}");
        let call = "<tool_call>[TOOL_CALLS]f[ARGS]{}";
        is(form.without_tools(), "", call, &[text(call)]);
    }
    let end = published("gpt-oss").end_of_thinking();
    assert_eq!(end.as_deref(), Some("<|end|><|start|>assistant<|channel|>final<|message|>"));
    let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {}}]";
    is(form("[TOOL_CALLS]"), "", list, &[call(0, "f", "{}"), call(1, "g", "{}")]);
}

#[test]
fn strings_of_schemas_are_strings() {
    let tools = r#"[{"function": {"name": "f", "parameters": {"properties": {"zip": {"type": "string"}}}}}]"#;
    let tools = Tools::parse_json(tools).expect("tools");
    for (name, answer) in [
        (
            "qwen3.5",
            "<tool_call><function=f><parameter=zip>\n0123\n</parameter><parameter=n>12</parameter></function></tool_call>",
        ),
        (
            "minicpm5",
            "<function name=\"f\"><param name=\"zip\">0123</param><param name=\"n\">12</param></function>",
        ),
        ("minicpm5", "<function name=\"f\"><param name=\"zip\">0123</param><param name=\"n\">12</param>"),
    ] {
        let mut parser = OutputParser::new(published(name), "").with_tools(Some(&tools));
        let parts: Vec<_> = parser.push(answer).into_iter().chain(parser.finish()).collect();
        assert_eq!(whole(parts), [call(0, "f", r#"{"zip": "0123", "n": 12}"#)], "{answer}");
    }
}

#[test]
fn what_breaks_off_is_a_call_once_it_has_a_name() {
    for (name, answer, arguments) in [
        ("qwen3.5", "<tool_call><function=f>\n<parameter=a>\n1", ""),
        ("gemma4", "<|tool_call>call:f{a:<|\"|>b", ""),
        ("lfm2.5", "<|tool_call_start|>[f(a=", ""),
        ("minicpm5", "<function name=\"f\"><param", ""),
        ("ministral3", "[TOOL_CALLS]f[ARGS]{\"a\": \"b", "{\"a\": \"b"),
    ] {
        is(published(name), "", answer, &[cut(0, "f", (arguments, answer))]);
    }
    let answer = "to=functions.f<|channel|>commentary json<|message|>{\"a\"";
    is(published("gpt-oss"), "", answer, &[cut(0, "f", ("{\"a\"", answer))]);
    for (name, answer) in [
        ("qwen3.5", "<tool_call><function=f"),
        ("qwen3.5", "<tool_call><function=a b>\n</function></tool_call>"),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("lfm2.5", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2.5", "<|tool_call_start|>[f(a=1) g()]<|tool_call_end|>"),
        ("minicpm5", "<function name=\"f\">1</function>"),
        ("ministral3", "[TOOL_CALLS]f[ARGS][1]"),
        ("ministral3", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]"),
        ("ministral3", "[TOOL_CALLS][ARGS]{}"),
    ] {
        is(published(name), "", answer, &[text(answer)]);
    }
}

/// Any four of the parts of a form, in any order.
#[test]
fn nothing_that_a_model_writes_is_read_in_two_ways() {
    for (name, pieces) in [
        (
            "gemma4",
            &[
                "<|channel>thought\n",
                "<channel|>",
                "<|tool_call>",
                "call:f{",
                "a:<|\"|>",
                "}",
                "<tool_call|>",
                "é",
            ][..],
        ),
        (
            "gpt-oss",
            &[
                "<|channel|>analysis",
                "<|message|>",
                "<|end|>",
                "<|start|>assistant",
                " to=functions.f",
                "<|channel|>commentary",
                "{\"a\":",
                "}",
                "é",
            ],
        ),
        (
            "lfm2.5",
            &["<|tool_call_start|>", "<|tool_call_end|>", "[f(", "a='", "'", ")]", "\\", "</think>", "é"],
        ),
        (
            "minicpm5",
            &[
                "<function name=\"",
                "f\">",
                "<param name=\"",
                "a\">",
                "<![CDATA[",
                "]]>",
                "</param>",
                "</function>",
            ],
        ),
        ("ministral3", &["[TOOL_CALLS]", "f", "[ARGS]", "{\"a\": ", "}", "\"", "[THINK]", "[/THINK]", "é"]),
        (
            "qwen3.5",
            &[
                "<tool_call>",
                "<function=f>",
                "<parameter=a>",
                "\n",
                "</parameter>",
                "</function>",
                "</tool_call>",
                "</think>",
            ],
        ),
    ] {
        let form = published(name);
        for n in 0..pieces.len().pow(4) {
            let piece = |i: u32| pieces[n / pieces.len().pow(i) % pieces.len()];
            let answer = [0, 1, 2, 3].map(piece).concat();
            let characters: Vec<String> = answer.chars().map(String::from).collect();
            let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
            assert_eq!(read(form, "", &characters), read(form, "", &[&answer]), "{name} {answer:?}");
        }
    }
}
