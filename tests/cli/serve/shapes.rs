//! Requests in the shapes that agents send: recorded, with texts and lists cut, or written from what their makers publish.

use super::client::{Server, request};
use crate::bed::program::*;
use serde_json::Value;

/// A template that takes what most published ones take: one system message, first, and turns of different roles.
const STRICT: &str = r#"{% for m in messages %}{% set before = messages[loop.index0 - 1].role %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if not loop.first and m.role == before and m.role != 'tool' %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{%- if m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>' }}{% else %}{{ m.role + ': ' }}{% if m.content %}{{ m.content }}{% endif %}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}assistant: "#;

fn answers(client: &str) {
    let temp = Temp::new();
    temp.write("strict.jinja", STRICT);
    let own = crate::bed::place::root().join("tests/fixtures/chat/qwen2.5-instruct.jinja");
    let file = crate::bed::place::root().join(format!("tests/fixtures/requests/{client}.json"));
    let cases: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(file).expect("a file")).expect("JSON");
    for template in [own.to_str().expect("a path"), &temp.path("strict.jinja")] {
        let server = Server::start(&["--chat-template", template, "--api-key", "secret"]);
        for (i, case) in cases.iter().enumerate() {
            let mut headers = "Authorization: Bearer secret\r\n".to_owned();
            for (name, value) in case["headers"].as_object().into_iter().flatten() {
                headers += &format!("{name}: {}\r\n", value.as_str().expect("a text"));
            }
            let path = case["path"].as_str().expect("a path");
            let start = std::time::Instant::now();
            let reply = server.send(&request("POST", path, (&case["body"].to_string(), &headers))).finish();
            eprintln!("{client} {i} {template}: {} {:?} {}", reply.status, start.elapsed(), reply.body);
        }
    }
}

#[test]
fn requests_of_codex_are_answered() {
    answers("codex");
}

#[test]
fn requests_of_claude_code_are_answered() {
    answers("claude-code");
}

#[test]
fn requests_of_qwen_code_and_opencode_are_answered() {
    answers("qwen-code");
    answers("opencode");
}
