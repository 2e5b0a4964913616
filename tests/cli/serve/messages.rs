//! The shapes of `/v1/messages` and `/v1/responses`.

use super::client::Server;
use crate::support::command::*;
use serde_json::{Value, json};

/// Names and data of the events of a stream.
fn events(stream: &str) -> Vec<(String, Value)> {
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        let name = name.strip_prefix("event: ").expect("a name").to_owned();
        assert_eq!(data["type"], *name);
        (name, data)
    };
    stream.trim_end().split("\n\n").map(event).collect()
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    names
}

/// What a chat says.
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
fn anthropics_messages_say_what_a_chat_says() {
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
    let found = events(&server.post("/v1/messages", &body(true)).body);
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names(&found), expected);
    let deltas = found.iter().filter_map(|(_, data)| data["delta"]["text"].as_str());
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
fn responses_say_what_a_chat_says() {
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
    let found = events(&server.post("/v1/responses", &body(true)).body);
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
    let numbers: Vec<_> = found.iter().map(|(_, data)| data["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..found.len() as u64).map(Some).collect::<Vec<_>>());
    let (_, last) = &found[found.len() - 1];
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
