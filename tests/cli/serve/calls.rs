//! Tool calls in all three APIs: whole, streamed and required.

use super::client::Server;
use crate::support::command::*;
use serde_json::{Value, json};

const ASK: &str = "What time is it?";

#[test]
fn a_call_that_comes_at_once_has_its_name_first_in_a_stream() {
    let temp = TestDir::new();
    let call = r#"<tool_call>{"arguments": {"zone": "UTC"}, "name": "now"}</tool_call>"#;
    let server = Server::start(&["-m", &temp.model_that_says(call)]);
    let tool = json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}});
    let body = |stream: bool| {
        json!({
            "messages": [{"role": "user", "content": ASK}], "tools": [tool], "max_tokens": 1, "temperature": 0,
            "logit_bias": {"1": 10000}, "ignore_eos": true, "stream": stream,
        })
    };
    let whole = server.post("/v1/chat/completions", &body(false)).json();
    let made = &whole["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(made["function"], json!({"name": "now", "arguments": "{\"zone\": \"UTC\"}"}), "{whole}");
    let deltas: Vec<_> = server
        .post("/v1/chat/completions", &body(true))
        .events()
        .iter()
        .filter_map(|e| e.pointer("/choices/0/delta/tool_calls/0").cloned())
        .collect();
    let first = json!({
        "index": 0, "id": made["id"], "type": "function", "function": {"name": "now", "arguments": ""},
    });
    assert_eq!(deltas, [first, json!({"index": 0, "function": {"arguments": "{\"zone\": \"UTC\"}"}})]);
}

#[test]
fn a_call_that_is_cut_is_said_once_and_the_same_whole_and_streamed() {
    let temp = TestDir::new();
    let open = r#"<tool_call>{"name": "now", "arguments": {"n": 1, "zone": "U"#;
    let server = Server::start(&["-m", &temp.model_that_says(open)]);
    let parameters = json!({"type": "object"});
    let function = json!({"name": "now", "parameters": parameters});
    // The second token is in a string, and ends it.
    let arguments = r#"{"n": 1, "zone": "U"#.to_owned() + open;
    let messages = json!([{"role": "user", "content": ASK}]);
    for (path, tool, [whole_at, streamed_at], [ended_at, ended]) in [
        (
            "/v1/chat/completions",
            json!({"type": "function", "function": function}),
            [
                "/choices/0/message/tool_calls/0/function/arguments",
                "/choices/0/delta/tool_calls/0/function/arguments",
            ],
            ["/choices/0/finish_reason", "length"],
        ),
        (
            "/v1/responses",
            json!({"type": "function", "name": "now", "parameters": parameters}),
            ["/output/0/arguments", "/delta"],
            ["/output/0/status", "incomplete"],
        ),
        (
            "/v1/messages",
            json!({"name": "now", "input_schema": parameters}),
            ["/content/0/input", "/delta/partial_json"],
            ["/stop_reason", "max_tokens"],
        ),
    ] {
        let ask = |stream: bool| {
            let body = json!({
                "messages": messages, "input": ASK, "tools": [tool], "max_tokens": 2, "temperature": 0,
                "logit_bias": {"1": 10000}, "ignore_eos": true, "stream": stream,
            });
            server.post(path, &body)
        };
        let reply = ask(false);
        let whole = reply.json();
        match path {
            // What is whole of them.
            "/v1/messages" => assert_eq!(whole.pointer(whole_at), Some(&json!({"n": 1})), "{whole}"),
            _ => assert_eq!(whole.pointer(whole_at), Some(&json!(arguments)), "{whole}"),
        }
        assert_eq!(whole.pointer(ended_at), Some(&json!(ended)), "{whole}");
        let streamed = ask(true);
        let events = streamed.events();
        let pieces: Vec<_> = events
            .iter()
            .filter_map(|event| Some(event.pointer(streamed_at)?.as_str()?.to_owned()))
            .collect();
        assert_eq!(pieces.concat(), arguments, "{streamed:?}");
        for text in [&reply.body, &streamed.body] {
            let says = |field: &str| text.contains(&format!("\"{field}\":\"<"));
            assert!(!says("content") && !says("text") && text.contains(ended), "{path}: {text}");
        }
    }
}

/// gpt-oss: thinking, text before the call, and the call are messages, each with a header; so are those of the history.
#[test]
fn messages_of_channels_are_thinking_text_and_a_call_in_all_three_apis() {
    let temp = TestDir::new();
    let says = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
                <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{\"zone\": \"UTC\"}";
    let template = crate::support::paths::root().join("tests/fixtures/chat/2026/gpt-oss.jinja");
    let template = template.to_str().expect("a path");
    let server =
        Server::start(&["-m", &temp.model_that_says(says), "--chat-template", template, "-c", "2048"]);
    let parameters = json!({"type": "object"});
    let function = json!({"name": "now", "description": "d", "parameters": parameters});
    let arguments = "{\"zone\": \"UTC\"}";
    for (path, tool, history, whole_at, streamed_at) in [
        (
            "/v1/chat/completions",
            json!({"type": "function", "function": function}),
            json!([{"role": "user", "content": ASK}, {"role": "assistant", "content": "I look.", "reasoning_content":
                "Hm.", "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "now", "arguments":
                arguments}}]}, {"role": "tool", "tool_call_id": "call_0", "content": "9"}]),
            [
                "/choices/0/message/reasoning_content",
                "/choices/0/message/content",
                "/choices/0/message/tool_calls/0/function/arguments",
            ],
            [
                "/choices/0/delta/reasoning_content",
                "/choices/0/delta/content",
                "/choices/0/delta/tool_calls/0/function/arguments",
            ],
        ),
        (
            "/v1/messages",
            json!({"name": "now", "description": "d", "input_schema": parameters}),
            json!([{"role": "user", "content": ASK}, {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_0", "name": "now", "input": {"zone": "UTC"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "9"}]}]),
            ["/content/0/thinking", "/content/1/text", "/content/2/input/zone"],
            ["/delta/thinking", "/delta/text", "/delta/partial_json"],
        ),
        (
            "/v1/responses",
            json!({"type": "function", "name": "now", "description": "d", "parameters": parameters}),
            json!([{"role": "user", "content": ASK},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": "I look."},
                {"type": "function_call", "call_id": "call_0", "name": "now", "arguments": arguments},
                {"type": "function_call_output", "call_id": "call_0", "output": "9"}]),
            ["/output/0/content/0/text", "/output/1/content/0/text", "/output/2/arguments"],
            ["", "", ""],
        ),
    ] {
        let ask = |messages: &Value, stream: bool| {
            let body = json!({
                "messages": messages, "input": messages, "tools": [tool], "max_tokens": 1, "temperature": 0,
                "logit_bias": {"1": 10000}, "ignore_eos": true, "stream": stream,
            });
            server.post(path, &body)
        };
        for messages in [&history, &json!([{"role": "user", "content": ASK}])] {
            let whole = ask(messages, false).json();
            let found = whole_at.map(|at| whole.pointer(at).and_then(Value::as_str).unwrap_or_default());
            let call = if path == "/v1/messages" { "UTC" } else { arguments };
            assert_eq!(found, ["Hm.", "I look.", call], "{whole}");
            let events = ask(messages, true).events();
            let joined = streamed_at
                .map(|at| events.iter().filter_map(|event| event.pointer(at)?.as_str()).collect::<String>());
            assert!(streamed_at[0].is_empty() || joined == ["Hm.", "I look.", arguments], "{events:?}");
        }
    }
}

#[test]
fn an_answer_has_one_call_where_a_request_wants_no_more() {
    let temp = TestDir::new();
    let call = r#"<tool_call>{"arguments": {}, "name": "now"}</tool_call>"#;
    let server = Server::start(&["-m", &temp.model_that_says(call)]);
    let body = |field: &str, value: Value| {
        let tool = json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}});
        let mut body = json!({
            "messages": [{"role": "user", "content": ASK}], "tools": [tool], "max_tokens": 3, "temperature": 0,
            "repeat_penalty": 1, "logit_bias": {"1": 10000}, "ignore_eos": true,
        });
        body[field] = value;
        body
    };
    let calls = |body: &Value| {
        let whole = server.post("/v1/chat/completions", body).json();
        whole["choices"][0]["message"]["tool_calls"].as_array().map_or(0, Vec::len)
    };
    assert_eq!(calls(&body("n", json!(1))), 3);
    assert_eq!(calls(&body("parallel_tool_calls", json!(false))), 1);
    let once = json!({"type": "auto", "disable_parallel_tool_use": true});
    assert_eq!(calls(&body("tool_choice", once)), 1);
    let mut streamed = body("parallel_tool_calls", json!(false));
    streamed["stream"] = json!(true);
    let begun = |e: &Value| e.pointer("/choices/0/delta/tool_calls/0/id").is_some();
    let events = server.post("/v1/chat/completions", &streamed).events();
    assert_eq!(events.iter().filter(|e| begun(e)).count(), 1);
}

#[cfg(feature = "grammar")]
mod asked_for {
    use super::*;

    /// The text that is at a place of some events, joined; and how many had it.
    fn joined(events: &[Value], pointer: &str) -> (String, usize) {
        let texts: Vec<_> = events.iter().filter_map(|e| e.pointer(pointer)?.as_str()).collect();
        (texts.concat(), texts.iter().filter(|t| !t.is_empty()).count())
    }

    fn parameters() -> Value {
        json!({
            "type": "object", "properties": {"at": {"enum": ["a red fox", "a small dog"]}, "n": {"type": "integer"}},
            "required": ["at", "n"], "additionalProperties": false,
        })
    }

    /// Each API's path, its body with tools `look` and `now`, and its words for any of them and for `now`.
    fn apis() -> [(&'static str, Value, [Value; 2]); 3] {
        let function = |name: &str| json!({"name": name, "parameters": parameters()});
        let both = |tool: &dyn Fn(&str) -> Value| json!([tool("look"), tool("now")]);
        let typed = |name: &str| json!({"type": "function", "name": name, "parameters": parameters()});
        let messages = json!([{"role": "user", "content": ASK}]);
        [
            (
                "/v1/chat/completions",
                json!({
                    "messages": messages, "max_tokens": 200,
                    "tools": both(&|name| json!({"type": "function", "function": function(name)})),
                }),
                [json!("required"), json!({"type": "function", "function": {"name": "now"}})],
            ),
            (
                "/v1/responses",
                json!({"input": ASK, "max_output_tokens": 200, "tools": both(&typed)}),
                [json!("required"), json!({"type": "function", "name": "now"})],
            ),
            (
                "/v1/messages",
                json!({
                    "messages": messages, "max_tokens": 200,
                    "tools": both(&|name| json!({"name": name, "input_schema": parameters()})),
                }),
                [json!({"type": "any"}), json!({"type": "tool", "name": "now"})],
            ),
        ]
    }

    /// Name and arguments of the call in an answer, and how that ended.
    fn call(answer: &Value) -> (String, String, Value) {
        let text = |pointer: &str| answer.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let of = |name: &str, arguments: Option<String>, why: Value| Some((text(name)?, arguments?, why));
        let chat = "/choices/0/message/tool_calls/0/function";
        of(
            &format!("{chat}/name"),
            text(&format!("{chat}/arguments")),
            answer["choices"][0]["finish_reason"].clone(),
        )
        .or_else(|| of("/output/0/name", text("/output/0/arguments"), answer["status"].clone()))
        .or_else(|| {
            of(
                "/content/0/name",
                Some(answer["content"][0]["input"].to_string()),
                answer["stop_reason"].clone(),
            )
        })
        .unwrap_or_else(|| panic!("{answer}"))
    }

    #[test]
    fn an_answer_is_the_call_that_is_asked_for_and_a_stream_has_it_piece_by_piece() {
        let temp = TestDir::new();
        let server = Server::start(&["-m", &temp.model_that_says("<tool_call>"), "--seed", "7"]);
        for (path, body, choices) in apis() {
            for (i, choice) in choices.into_iter().enumerate() {
                let ask = |stream: bool| {
                    let mut body = body.clone();
                    (body["tool_choice"], body["stream"]) = (choice.clone(), json!(stream));
                    server.post(path, &body)
                };
                let whole = ask(false).json();
                let (name, arguments, why) = call(&whole);
                assert!(name == "now" || (i == 0 && name == "look"), "{whole}");
                let read: Value = serde_json::from_str(&arguments).expect("JSON");
                assert!(
                    read["n"].is_i64() && read["at"].as_str().is_some_and(|at| at.starts_with("a ")),
                    "{read}"
                );
                assert!(
                    ["tool_calls", "tool_use", "completed"].contains(&why.as_str().unwrap_or("")),
                    "{why}"
                );
                let events = ask(true).events();
                let (pieces, count) = match path {
                    "/v1/messages" => joined(&events, "/delta/partial_json"),
                    "/v1/responses" => joined(&events, "/delta"),
                    _ => joined(&events, "/choices/0/delta/tool_calls/0/function/arguments"),
                };
                match path {
                    "/v1/messages" => assert_eq!(serde_json::from_str::<Value>(&pieces).expect("JSON"), read),
                    _ => assert_eq!(pieces, arguments),
                }
                assert!(count > 3, "{path}: {count} pieces");
            }
        }
    }

    #[test]
    fn tool_choices_without_such_a_tool_are_refused() {
        let temp = TestDir::new();
        let server = Server::start(&["-m", &temp.model_that_says("<tool_call>")]);
        let (path, good, _) = apis().into_iter().next().expect("three");
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let schema = json!({"type": "json_object"});
        for (choice, tools, format, part) in [
            (named("then"), true, None, "\"then\""),
            (json!("required"), false, None, "no `tools`"),
            (json!("required"), true, Some(schema), "response_format"),
            (json!("always"), true, None, "\"required\""),
        ] {
            let mut body = good.clone();
            body["tool_choice"] = choice;
            body["response_format"] = format.unwrap_or(Value::Null);
            if !tools {
                body["tools"] = json!([]);
            }
            let error = server.post(path, &body).error();
            assert_eq!(error["param"], "tool_choice", "{error}");
            mentions(error["message"].as_str().unwrap_or(""), &[part]);
        }
    }
}

#[cfg(not(feature = "grammar"))]
#[test]
fn a_program_without_grammars_says_what_to_do_where_a_call_is_asked_for() {
    let temp = TestDir::new();
    let server = Server::start(&["-m", &temp.model_that_says("<tool_call>")]);
    let tool = json!({"type": "function", "function": {"name": "now"}});
    let body =
        json!({"messages": [{"role": "user", "content": ASK}], "tools": [tool], "tool_choice": "required"});
    let error = server.post("/v1/chat/completions", &body).error();
    assert_eq!(error["param"], "tool_choice", "{error}");
    mentions(error["message"].as_str().unwrap_or(""), &["no grammars", "\"auto\""]);
}
