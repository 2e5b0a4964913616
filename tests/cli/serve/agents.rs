//! Tests of requests from agents: tools of many kinds, histories of other servers, turns that a template refuses.

use super::client::{Server, with};
use crate::support::command::*;
use serde_json::{Value, json};

/// Refuses what some published templates refuse: system messages behind the first one, turns that do not alternate.
/// Arguments must be objects.
const STRICT: &str = "\
{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}\
{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('Turns must alternate.') }}{% endif %}\
[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}({{ k }}={{ v }})\
{% endfor %}{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

/// Text of each kind as it comes.
const PLAIN: &str = "\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}({{ c.function.arguments }}){% endfor %}\
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

fn rendered(server: &Server, messages: &Value, more: Value) -> String {
    let mut body = more;
    body["messages"] = messages.clone();
    let reply = server.post("/apply-template", &body);
    reply.json()["prompt"].as_str().unwrap_or_else(|| panic!("{reply:?}")).to_owned()
}

fn says(role: &str, text: impl Into<Value>) -> Value {
    json!({"role": role, "content": text.into()})
}

fn calls(arguments: impl Into<Value>) -> Value {
    let function = json!({"name": "f", "arguments": arguments.into()});
    json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": function}]})
}

#[test]
fn turns_that_a_template_refuses_are_merged_and_others_are_left_as_they_are() {
    let server = Server::start(&["--chat-template", STRICT]);
    let asked = says("user", "Q");
    for (messages, prompt) in [
        (json!([says("system", "A"), asked, says("system", "B")]), "[system]A\n\nB[user]Q[assistant]"),
        (json!([says("system", "A"), says("developer", "B"), asked]), "[system]A\n\nB[user]Q[assistant]"),
        (json!([asked, says("system", "A")]), "[system]A[user]Q[assistant]"),
        (json!([asked, says("user", "R")]), "[user]Q\n\nR[assistant]"),
        (
            json!([asked, calls("[1"), says("tool", "x")]),
            "[user]Q[assistant](arguments=[1)[tool]x[assistant]",
        ),
        (json!([asked, calls(""), says("tool", "x")]), "[user]Q[assistant][tool]x[assistant]"),
    ] {
        assert_eq!(rendered(&server, &messages, json!({})), prompt, "{messages}");
    }
    // In each API; the answer is that to the merged turns.
    let body = |system: Value, messages: Value| json!({"system": system, "messages": messages, "max_tokens": 4, "temperature": 0});
    let merged = body(json!("A\n\nB"), json!([says("user", "Q\n\nR")]));
    let apart = body(json!("A"), json!([asked, says("system", "B"), says("user", "R")]));
    let answers = [&merged, &apart].map(|body| server.post("/v1/messages", body).json()["content"].clone());
    assert!(answers[0] == answers[1] && answers[0].is_array(), "{answers:?}");
    let counts = [&merged, &apart].map(|body| server.post("/v1/messages/count_tokens", body).json());
    assert!(counts[0] == counts[1] && counts[0]["input_tokens"].is_u64(), "{counts:?}");
    let chat = server.post(
        "/v1/chat/completions",
        &json!({"messages": [says("system", "A"), asked, says("system", "B")], "max_tokens": 1}),
    );
    assert_eq!(chat.status, 200, "{chat:?}");
    drop(server);
    let plain = Server::start(&["--chat-template", PLAIN]);
    let messages = json!([says("system", "A"), says("user", "Q"), says("user", "R"), says("system", "B")]);
    assert_eq!(rendered(&plain, &messages, json!({})), "[system]A[user]Q[user]R[system]B[assistant]");
    drop(plain);
    let temp = TestDir::new();
    let file = temp.write(
        "refuses.jinja",
        "{% if messages[0].content != 's' %}{{ raise_exception('Never.') }}{% endif %}",
    );
    let never = Server::start(&["--chat-template", &file]);
    let error = never.post("/v1/chat/completions", &json!({"messages": [asked]})).error();
    assert_eq!((&error["param"], &error["type"]), (&json!("messages"), &json!("invalid_request_error")));
    assert_eq!(error["message"], "the chat template: refuses these messages: Never.");
    // One that shows no tools names the remedy.
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let body = json!({"messages": [says("user", "s")], "tools": [tool]});
    let error = never.post("/v1/chat/completions", &body).error();
    assert_eq!(error["param"], "tools", "{error}");
}

#[test]
fn tools_of_other_kinds_are_left_out_and_said_once() {
    let server = Server::start(&["--chat-template", STRICT]);
    let kinds = ["namespace", "web_search", "local_shell", "image_generation", "mcp", "odd\u{1b}[2J"];
    let others: Vec<Value> = kinds.iter().map(|kind| json!({"type": kind, "name": "x"})).collect();
    let function = json!({"name": "f", "parameters": {"type": "object"}});
    let with = |own: Value| [others.clone(), vec![own]].concat();
    let messages = json!([says("user", "Q")]);
    let chat = with(json!({"type": "function", "function": function}));
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages, "tools": chat, "max_tokens": 1})),
        (
            "/v1/responses",
            json!({"input": "Q", "tools": with(json!({"type": "function", "name": "f"})), "max_output_tokens": 1}),
        ),
        ("/v1/responses", json!({"input": "Q", "tools": others, "max_output_tokens": 1})),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 1, "tools": [
                {"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"},
            ]}),
        ),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
    }
    let prompt = rendered(&server, &messages, json!({"tools": chat}));
    assert!(prompt.contains("\"f\"") && !prompt.contains("\"x\""), "{prompt}");
    assert_eq!(rendered(&server, &messages, json!({"tools": others})), "[user]Q[assistant]");
    server.said("\"web_search_20250305\"");
    for kind in &kinds[..5] {
        assert_eq!(server.said(&format!("\"{kind}\"")).len(), 1);
    }
    assert_eq!(
        server.said("odd"),
        ["ignoring tools of type \"odd\\u{1b}[2J\": only functions are supported"]
    );
    let allowed =
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]});
    let two: Vec<_> =
        ["f", "g"].iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect();
    let prompt = rendered(&server, &messages, json!({"tools": two, "tool_choice": allowed}));
    assert!(prompt.contains("\"g\"") && !prompt.contains("\"f\""), "{prompt}");
    drop(server);
    let plain = Server::start(&["--chat-template", PLAIN]);
    let error = plain.post("/v1/chat/completions", &json!({"messages": messages, "tools": two})).error();
    assert_eq!(error["param"], "tools");
    mentions(error["message"].as_str().unwrap_or(""), &["no place for tools", "--chat-template"]);
}

#[test]
fn a_history_is_taken_as_it_is_and_the_newest_question_must_be_understood() {
    let server = Server::start(&["--chat-template", PLAIN]);
    let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
    let pictured = says("user", json!([{"type": "text", "text": "Q"}, image]));
    let messages = json!([
        pictured, {"role": "assistant", "content": null, "refusal": "No.", "tool_calls": null, "name": null},
        says("user", "R"), calls("[1"), {"role": "tool", "tool_call_id": "1", "content": [image]},
        says("user", [Value::from("S")].to_vec()),
    ]);
    let prompt =
        "[user]Q[image left out][assistant]No.[user]R[assistant]([1)[tool][image left out][user]S[assistant]";
    assert_eq!(rendered(&server, &messages, json!({})), prompt);
    let refuse = |path: &str, body: Value, param: &str, part: &str| {
        let error = server.post(path, &body).error();
        assert!(error["type"] == "invalid_request_error", "{path}: {error}");
        assert!(path.ends_with("messages") || error["param"] == param, "{path}: {error}");
        mentions(error["message"].as_str().unwrap_or(""), &[param, part]);
    };
    let answered = |body: &Value, path: &str| {
        let reply = server.post(path, body);
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
    };
    refuse(
        "/v1/chat/completions",
        json!({"messages": [pictured]}),
        "messages[0].content[1].type",
        "image_url",
    );

    let call = |kind: &str| json!({"type": kind, "id": "a", "call_id": "1", "name": "f", "status": "completed", "action": {"type": "x"}});
    let image = json!({"type": "input_image", "file_id": "x"});
    let mut items = vec![
        says("user", json!([image])),
        json!({"type": "reasoning", "id": "r", "summary": [], "content": null, "encrypted_content": "x"}),
        json!({"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "m", "status": null}),
        json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1"}),
        json!({"type": "function_call_output", "call_id": "1", "output": [image]}),
        json!({"type": "custom_tool_call", "call_id": "2", "name": "f", "input": "*** Begin"}),
        json!({"type": "custom_tool_call_output", "call_id": "2", "output": "done"}),
        json!({"type": "local_shell_call_output", "id": "1", "output": "done"}),
    ];
    items.extend(["web_search_call", "local_shell_call", "image_generation_call", "unheard_of"].map(call));
    items.push(says("user", "R"));
    let input = |items: &[Value]| json!({"input": items, "max_output_tokens": 1});
    answered(&input(&items), "/v1/responses");
    refuse("/v1/responses", input(&items[..1]), "input[0].content[0].type", "input_image");
    for (body, param) in [
        (json!({"input": [{"type": "item_reference", "id": "m"}]}), "input[0].type"),
        (json!({"input": [{"id": "m"}]}), "input[0].id"),
        (json!({"input": "Q", "previous_response_id": "r"}), "previous_response_id"),
        (json!({"input": "Q", "conversation": "c"}), "conversation"),
    ] {
        refuse("/v1/responses", body, param, "`store: false`");
    }

    let image =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
    let blocks = json!([
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "tool_use", "id": "1", "name": "f", "input": null},
    ]);
    let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [image]});
    let document =
        json!({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}});
    let history =
        [says("user", json!([image])), says("assistant", blocks), says("user", json!([result, document]))];
    answered(
        &json!({"messages": history, "max_tokens": 1, "system": null, "thinking": {"type": "adaptive"}}),
        "/v1/messages",
    );
    let newest = json!({"messages": [says("user", json!([image]))], "max_tokens": 1});
    refuse("/v1/messages", newest, "messages[0].content[0].type", "image");
}

#[test]
fn claude_codes_billing_line_is_no_part_of_the_prompt() {
    let server = Server::start(&["--slots", "1", "-c", "64"]);
    let rule = "Be kind to each little dog and to all of the birds in the big tree.";
    let ask = |system: Value, path: &str| {
        let body =
            json!({"system": system, "messages": [says("user", "Q")], "max_tokens": 1, "temperature": 0});
        server.post(path, &body).json()
    };
    let count = |system: Value| ask(system, "/v1/messages/count_tokens")["input_tokens"].clone();
    let line =
        |cch: &str| format!("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={cch};");
    let blocks = |cch: &str| json!([{"type": "text", "text": line(cch)}, {"type": "text", "text": rule, "cache_control": {"type": "ephemeral"}}]);
    let alone = count(json!(rule));
    assert!(alone.as_u64() > Some(20), "{alone}");
    assert_eq!(
        [count(blocks("0a1b2")), count(json!(format!("{}\n{rule}", line("f"))))],
        [alone.clone(), alone]
    );
    ask(blocks("0a1b2"), "/v1/messages");
    let again = ask(blocks("f9e8d"), "/v1/messages");
    assert!(again["usage"]["cache_read_input_tokens"].as_u64() > Some(20), "{again}");
    // What is too long is said in the words that it looks for.
    let long = json!(rule.repeat(9));
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let error = ask(long.clone(), path)["error"].clone();
        let said = error["message"].as_str().unwrap_or("").to_owned();
        let tokens = said
            .strip_prefix("prompt is too long: ")
            .and_then(|said| said.strip_suffix(" tokens > 64 maximum"));
        assert!(
            tokens.is_some_and(|n| n.parse::<u32>().is_ok_and(|n| n > 64)) || path.ends_with("count_tokens"),
            "{error}"
        );
    }
}

#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let server = Server::start(&[]);
    let ask = |more: Value| with(&json!({"max_tokens": 12, "temperature": 0}), &more);
    let question = says("user", "Tell me of a dog.");
    let chat = |messages: Value, more: Value| {
        let mut body = ask(more);
        body["messages"] = messages;
        server.post("/v1/chat/completions", &body).json()["choices"][0]["message"]["content"].clone()
    };
    let whole = chat(json!([question]), json!({}));
    let whole = whole.as_str().expect("a text").to_owned();
    let (at, _) = whole.match_indices(' ').nth(3).expect("four words");
    let (begun, rest) = whole.split_at(at);
    let open = json!([question, says("assistant", begun)]);
    let go_on = json!({"continue_final_message": true, "add_generation_prompt": false});
    let continued = chat(open.clone(), go_on.clone());
    assert!(continued.as_str().is_some_and(|text| text.starts_with(rest)), "{begun:?} {rest:?} {continued}");
    let mut body = ask(json!({}));
    body["messages"] = open.clone();
    assert_eq!(server.post("/v1/messages", &body).json()["content"][0]["text"], continued);
    let prompt = rendered(&server, &open, go_on.clone());
    assert!(prompt.ends_with(&format!("<|im_start|>assistant\n{begun}")), "{prompt}");
    // Without the flag it is a turn that has ended.
    let ended = rendered(&server, &open, json!({}));
    assert!(ended.ends_with("<|im_end|>\n<|im_start|>assistant\n"), "{ended}");
    let mut body = ask(go_on);
    body["messages"] = json!([question, calls("{}")]);
    assert_eq!(server.post("/v1/chat/completions", &body).json()["error"]["param"], "continue_final_message");
}

#[test]
fn a_response_repeats_the_fields_of_the_request() {
    let server = Server::start(&[]);
    let asked = json!({
        "instructions": "Be kind.", "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.75, "parallel_tool_calls": false,
        "metadata": {"a": "b"}, "store": false, "truncation": "auto", "reasoning": {"effort": "low"}, "user": "me",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none", "prompt_cache_key": "k",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}],
    });
    let mut body = asked.clone();
    body["input"] = json!("Tell me of a dog.");
    let whole = server.post("/v1/responses", &body).json();
    body["stream"] = json!(true);
    let events = server.post("/v1/responses", &body).events();
    let responses: Vec<_> = events.iter().filter_map(|event| event.get("response").cloned()).collect();
    assert_eq!(responses.len(), 3);
    for response in responses.iter().chain([&whole]) {
        for (field, value) in asked.as_object().expect("an object") {
            assert_eq!(&response[field], value, "{field}");
        }
    }
    assert_eq!(
        (&whole["status"], &whole["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    assert_eq!(responses[2]["output"][0]["status"], "incomplete");
    let plain = server.post("/v1/responses", &json!({"input": "Q", "max_output_tokens": 1})).json();
    for (field, value) in [
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("instructions", Value::Null),
        ("truncation", json!("disabled")),
    ] {
        assert_eq!(plain[field], value, "{field}");
    }
}

#[test]
fn bodies_of_careless_clients_are_read_and_compressed_ones_refused() {
    let server = Server::start(&["--chat-template", PLAIN]);
    let post = |body: &str, headers: &str| server.ask("POST", "/apply-template", (body, headers));
    let body = r#"{"messages":[{"role":"user","content":"a\ud800b"}]}"#;
    for body in [body.to_owned(), format!("\u{feff}{body}")] {
        assert_eq!(
            post(&body, "Content-Encoding: identity\r\n").json()["prompt"],
            "[user]a\u{fffd}b[assistant]"
        );
    }
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let reply = server.ask("POST", path, (body, "Content-Encoding: gzip\r\n"));
        assert_eq!(reply.status, 415, "{reply:?}");
        mentions(reply.json()["error"]["message"].as_str().unwrap_or(""), &["\"gzip\""]);
    }
}
