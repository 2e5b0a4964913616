//! Requests in the shapes that agents send: recorded, with texts and lists cut, or written from what their makers
//! publish.

use super::client::{Server, request};
use serde_json::Value;

/// A template that takes what most published ones take: one system message, first, and turns of different roles.
const STRICT: &str = r#"{% for m in messages %}{% set before = messages[loop.index0 - 1].role %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if not loop.first and m.role == before and m.role != 'tool' %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{%- if m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>' }}{% else %}{{ m.role + ': ' }}{% if m.content %}{{ m.content }}{% endif %}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}assistant: "#;

/// Sends an agent's requests as they are, to a template that takes what it sends and to one that refuses much.
fn answers(agent: &str) {
    let root = crate::support::paths::root();
    let file =
        std::fs::read_to_string(root.join(format!("tests/fixtures/requests/{agent}.json"))).expect("a file");
    let requests: Vec<Value> = serde_json::from_str(&file).expect("JSON");
    let qwen = root.join("tests/fixtures/chat/qwen2.5-instruct.jinja");
    for template in [qwen.to_str().expect("a path"), STRICT] {
        // Answers end at once: their token 1 is the end.
        let args = ["-c", "1024", "--seed", "7", "--logit-bias", "1+10000", "--chat-template", template];
        let server = Server::start(&args);
        for (i, asked) in requests.iter().enumerate() {
            let line =
                |(name, value): (&String, &Value)| format!("{name}: {}\r\n", value.as_str().expect("a text"));
            let headers: String = asked["headers"].as_object().into_iter().flatten().map(line).collect();
            let path = asked["path"].as_str().expect("a path");
            let reply = server.send(&request("POST", path, (&asked["body"].to_string(), &headers))).finish();
            let failed = ["event: error", "data: {\"error\"", "response.failed"]
                .iter()
                .any(|e| reply.body.contains(e));
            assert!(reply.status == 200 && !failed, "request {i} of {agent}, {template}: {reply:?}");
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
