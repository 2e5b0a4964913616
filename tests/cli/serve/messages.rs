//! The shapes of `/v1/messages` and `/v1/responses`.

use super::client::{Reply, Server};
use crate::support::command::*;
use serde_json::{Value, json};

/// The data of a stream's events, which have the names of their types.
fn events(reply: &Reply) -> Vec<Value> {
    let names: Vec<_> = reply.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let events = reply.events();
    assert!(events.iter().map(|event| &event["type"]).eq(names.iter()), "{reply:?}");
    events
}

fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<_> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    names.dedup();
    names
}

/// Runs a chat of one turn, and returns its answer.
fn said() -> String {
    let said = antigravity([
        "chat",
        "-st",
        "--system",
        "Be kind.",
        "-p",
        "Tell me of a dog.",
        "-n",
        "12",
        "--temp",
        "0",
        "--repeat-penalty",
        "1.1",
        "-q",
    ])
    .text();
    said.trim_end_matches('\n').to_owned()
}

#[test]
fn anthropic_messages_give_the_text_of_a_chat() {
    let server = Server::start(&[]);
    let body = |stream: bool| {
        json!({
            "model": "story", "max_tokens": 12, "temperature": 0, "system": [{"type": "text", "text": "Be kind."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me of a dog."}]}], "stream": stream,
        })
    };
    let whole = server.post("/v1/messages", &body(false)).json();
    assert_eq!(whole["content"], json!([{"type": "text", "text": said()}]));
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("max_tokens")));
    assert_eq!(whole["usage"]["output_tokens"], 12);
    let found = events(&server.post("/v1/messages", &body(true)));
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names(&found), expected);
    let deltas = found.iter().filter_map(|data| data["delta"]["text"].as_str());
    assert_eq!(deltas.collect::<String>(), said());
    let count = server.post("/v1/messages/count_tokens", &body(false)).json();
    let input = |field: &str| whole["usage"][field].as_u64().expect("a number");
    assert_eq!(count["input_tokens"], input("input_tokens") + input("cache_read_input_tokens"));
    for (field, value) in [
        ("messages", json!(1)),
        ("system", json!(3)),
        ("stop_sequences", json!(3)),
        ("max_tokens", json!("x")),
    ] {
        let mut wrong = body(false);
        wrong[field] = value;
        let reply = server.post("/v1/messages", &wrong);
        assert_eq!(
            (reply.status, &reply.json()["error"]["type"]),
            (400, &json!("invalid_request_error")),
            "{field}"
        );
    }
}

#[test]
fn responses_give_the_text_of_a_chat() {
    let server = Server::start(&[]);
    let body = |stream: bool| {
        json!({
            "instructions": "Be kind.", "input": "Tell me of a dog.", "max_output_tokens": 12, "temperature": 0,
            "stream": stream,
        })
    };
    let whole = server.post("/v1/responses", &body(false)).json();
    assert_eq!(whole["output"][0]["content"][0]["text"], said());
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let found = events(&server.post("/v1/responses", &body(true)));
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names(&found), expected);
    let numbers: Vec<_> = found.iter().map(|data| data["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..found.len() as u64).map(Some).collect::<Vec<_>>());
    let last = &found[found.len() - 1];
    assert_eq!(last["response"]["output"][0]["content"], whole["output"][0]["content"]);
    let parts = json!([
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me of a dog."}]},
    ]);
    let same =
        server.post("/v1/responses", &json!({"input": parts, "max_output_tokens": 12, "temperature": 0}));
    assert_eq!(same.json()["output"][0]["content"], whole["output"][0]["content"]);
    for (field, value) in [("input", json!(1)), ("previous_response_id", json!("resp_1")), ("text", json!(3))]
    {
        let mut wrong = body(false);
        wrong[field] = value;
        assert_eq!(server.post("/v1/responses", &wrong).json()["error"]["param"], field);
    }
}
