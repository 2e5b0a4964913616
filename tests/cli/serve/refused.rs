//! Tests of requests that the server refuses, and of clients that may not ask.

use super::client::{Server, Wait, endless, short};
use crate::support::command::*;
use serde_json::{Value, json};

/// Fields of a request, with values that they may not have.
const WRONG: &[(&str, &str)] = &[
    ("temperature", "\"hot\" -1 [] 1e999"),
    ("top_p", "2 \"x\" {}"),
    ("top_k", "-2 1.5 \"x\""),
    ("min_p", "-0.1 7 true"),
    ("typical_p", "2 []"),
    ("presence_penalty", "\"x\" {}"),
    ("frequency_penalty", "\"x\" false"),
    ("repeat_penalty", "0 \"x\""),
    ("repeat_last_n", "-2 0.5"),
    ("seed", "1.5 \"x\" 1e30"),
    ("cache_salt", "\"\" 1 []"),
    ("return_progress", "1 \"yes\""),
    ("max_tokens", "-2 \"x\" 0.5 99999999999"),
    ("max_completion_tokens", "-2 []"),
    ("stop", "1 [1] {} true"),
    ("ignore_eos", "1 \"yes\""),
    ("cache_prompt", "1 \"yes\""),
    ("stream", "1 \"yes\""),
    ("stream_options", "1 [] {\"include_usage\":3}"),
    ("n", "0 1000 \"x\""),
    ("logit_bias", "1 \"x\" {\"x\":1} {\"1\":\"x\"} {\"99999999\":1} [[1]] [1]"),
    ("response_format", "1 \"json\" {} {\"type\":\"xml\"} {\"type\":\"json_schema\"}"),
    ("json_schema", "7 {\"$ref\":\"#\"} {\"type\":\"thing\"} \"{\""),
    ("grammar", "1 \"root::=[\""),
    ("guided_json", "7 {\"minLength\":-1}"),
    ("guided_regex", "1 \"(\""),
    ("guided_choice", "1 [] [1]"),
    ("guided_grammar", "{} \"root::=x\""),
    ("structured_outputs", "1 {\"json\":7} {\"structural_tag\":\"x\"} {\"choice\":[]}"),
    ("output_config", "{\"format\":{\"type\":\"xml\"}}"),
    ("min_tokens", "-1 \"x\" 0.5"),
    ("stop_token_ids", "1 [-1] [99999999] [\"x\"]"),
    ("bad_words", "1 [1] [\"\"]"),
    ("best_of", "0 3 \"x\""),
    ("parallel_tool_calls", "1 \"no\""),
    ("repetition_penalty", "\"x\" []"),
    // What would change a text and is not followed.
    ("suffix", "\"x\" 1"),
    ("use_beam_search", "true"),
    ("length_penalty", "0.5"),
    ("mirostat", "2"),
    ("dynatemp_range", "0.5"),
    ("samplers", "[\"temperature\",\"top_k\"] 1"),
    ("modalities", "[\"text\",\"audio\"]"),
    ("truncate_prompt_tokens", "5"),
    ("logits_processors", "[\"x\"]"),
];

/// Posts a body with a field more, and expects that it is refused by this name.
#[track_caller]
fn refused(server: &Server, path: &str, (body, field, value): (&Value, &str, &str)) {
    let text = format!("{},\"{field}\":{value}}}", body.to_string().trim_end_matches('}'));
    let reply = server.ask("POST", path, (&text, ""));
    assert_eq!(reply.status, 400, "{path} {field} {value}: {reply:?}");
    if value == "1e999" {
        return;
    }
    let error = reply.error();
    let param = error["param"].as_str().unwrap_or_default();
    assert!(param.starts_with(field), "{path} {field} {value}: {error}");
    assert!(error["message"].as_str().is_some_and(|text| !text.contains("::")), "{error}");
    assert_eq!(error["type"], "invalid_request_error");
}

#[test]
fn each_field_of_a_wrong_type_is_refused_by_its_name() {
    let server = Server::start(&[]);
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let completion = json!({"prompt": "Hi"});
    for (field, values) in WRONG {
        for value in values.split(' ') {
            // A longer one has a blank of its own in no place.
            refused(&server, "/v1/chat/completions", (&chat, field, value));
            refused(&server, "/v1/completions", (&completion, field, value));
        }
    }
    for (field, value) in [
        ("logprobs", "1"),
        ("echo", "true"),
        ("top_logprobs", "3"),
        ("top_logprobs", "-1"),
        ("tools", "1"),
        ("tools", "[1]"),
        ("tools", "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"),
        ("tool_choice", "\"required\""),
        ("tool_choice", "{\"type\":\"function\"}"),
        ("continue_final_message", "1"),
        ("continue_final_message", "true,\"add_generation_prompt\":true"),
        ("chat_template_kwargs", "1"),
        ("chat_template_kwargs", "{\"messages\":1}"),
    ] {
        refused(&server, "/v1/chat/completions", (&chat, field, value));
    }
    for messages in [
        "1",
        "[]",
        "[1]",
        "[{}]",
        "[{\"role\":1}]",
        "[{\"role\":\"king\",\"content\":\"x\"}]",
        "[{\"role\":\"user\"}]",
        "[{\"role\":\"user\",\"content\":1}]",
        "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]",
        "[{\"role\":\"user\",\"content\":[1]}]",
        "[{\"role\":\"assistant\",\"tool_calls\":[{}]}]",
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":1}}]}]",
    ] {
        refused(&server, "/v1/chat/completions", (&json!({"a": 1}), "messages", messages));
    }
    for prompt in ["1", "[]", "{}", "[1,\"a\"]", "[-1]", "[99999999]", "[[]]", "[[1],2]"] {
        refused(&server, "/v1/completions", (&json!({"a": 1}), "prompt", prompt));
    }
    // llama.cpp's own completion reads texts and ids in turn, and texts in biases.
    for (field, value) in [
        ("prompt", "{}"),
        ("prompt", "[1,\"a\",[2]]"),
        ("prompt", "[1,null]"),
        ("prompt", "{\"prompt_string\":1}"),
        ("prompt", "{\"prompt_string\":\"a\",\"multimodal_data\":[\"AA==\"]}"),
        ("n_predict", "-2"),
        ("n_predict", "\"x\""),
        ("n_probs", "-1"),
        ("n_cmpl", "0"),
        ("logit_bias", "[[[1],1]]"),
        ("logit_bias", "{\"\":1}"),
        ("return_tokens", "1"),
        ("response_fields", "1"),
        ("dry_multiplier", "-1"),
        ("dry_base", "0"),
        ("dry_sequence_breakers", "[\"\"]"),
        ("dry_allowed_length", "0"),
        ("xtc_probability", "2"),
        ("timings_per_token", "1"),
    ] {
        let body = if field == "prompt" { json!({"a": 1}) } else { json!({"prompt": "Hi"}) };
        refused(&server, "/completion", (&body, field, value));
    }
    assert_eq!(server.post("/v1/completions", &json!({})).json()["error"]["param"], "prompt");
    // What is not known is ignored, and null is nothing.
    let body = json!({
        "prompt": "Hi", "max_tokens": 1, "unheard": [1], "temperature": null, "model": "any", "user": "me", "best_of": 1,
        "suffix": "", "mirostat": 0, "samplers": ["top_k", "temperature"], "reasoning_effort": "low", "store": true,
    });
    assert_eq!(server.post("/v1/completions", &body).status, 200);
}

#[test]
fn a_format_is_followed_or_refused_by_a_program_without_grammars() {
    let server = Server::start(&["--slots", "2"]);
    let schema = json!({"type": "object", "properties": {"kind": {"enum": ["fox", "dog"]}}, "required": ["kind"], "additionalProperties": false});
    let formats = [
        json!({"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}),
        json!({"type": "json_object", "schema": schema}),
        json!({"type": "json_object"}),
    ];
    for (i, format) in formats.iter().enumerate() {
        let body = json!({
            "messages": [{"role": "user", "content": "Which animal?"}], "response_format": format, "max_tokens": 60, "seed": i,
        });
        let reply = server.post("/v1/chat/completions", &body);
        if cfg!(feature = "grammar") {
            let message = reply.json()["choices"][0]["message"]["content"].clone();
            let said = message.as_str().unwrap_or_else(|| panic!("{reply:?}"));
            match i {
                2 => assert!(said.starts_with('{'), "{said}"),
                _ => assert!(
                    ["fox", "dog"]
                        .map(|kind| json!({"kind": kind}))
                        .contains(&serde_json::from_str(said).expect(said))
                ),
            }
        } else {
            assert_eq!(reply.status, 400, "{reply:?}");
            mentions(reply.json()["error"]["message"].as_str().unwrap_or(""), &["no grammars"]);
        }
    }
}

#[test]
fn a_prompt_that_is_too_long_is_refused_with_both_numbers() {
    let server = Server::start(&["-c", "64"]);
    let long = "Once upon a time ".repeat(40);
    let error = server.post("/v1/completions", &json!({"prompt": long})).error();
    mentions(error["message"].as_str().unwrap(), &["201 ", "context size of 64 ", "shorten it"]);
    assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("prompt")));
    assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(201), &json!(64)));
    // Too long to become tokens at all.
    let far = "x ".repeat(100_000);
    let chat = json!({"messages": [{"role": "user", "content": far}]});
    for (path, body) in [("/v1/completions", json!({"prompt": far})), ("/v1/chat/completions", chat)] {
        let error = server.post(path, &body).error();
        mentions(error["message"].as_str().unwrap(), &["64"]);
        assert_eq!(
            (&error["code"], &error["n_ctx"]),
            (&json!("context_length_exceeded"), &json!(64)),
            "{path}"
        );
    }
    // What fits goes on to the end of the slot.
    let reply = server.post("/v1/completions", &endless(false)).json();
    assert_eq!(
        (&reply["choices"][0]["finish_reason"], &reply["usage"]["total_tokens"]),
        (&json!("length"), &json!(65))
    );
}

#[test]
fn only_those_with_a_key_may_ask_but_anybody_may_look_after_it() {
    let temp = TestDir::new();
    let file = temp.write("keys", "\u{feff}first\n\n second \n");
    let server = Server::start(&["--api-key-file", &file, "--api-key", "third"]);
    for path in ["/v1/models", "/props", "/v1/models/story"] {
        let reply = server.get(path);
        assert_eq!(
            (reply.status, &reply.json()["error"]["code"]),
            (401, &json!("invalid_api_key")),
            "{path}"
        );
    }
    for (header, status) in [
        ("Authorization: Bearer first\r\n", 200),
        ("authorization: bearer second\r\n", 200),
        ("X-Api-Key: third\r\n", 200),
        ("Authorization: Bearer firs\r\n", 401),
        ("Authorization: Basic first\r\n", 401),
        ("Authorization: Bearer \r\n", 401),
        ("X-Api-Key: fourth\r\n", 401),
    ] {
        let reply = server.ask("POST", "/v1/completions", (&short().to_string(), header));
        assert_eq!(reply.status, status, "{header}");
    }
    assert_eq!((server.get("/health").status, server.get("/metrics").status), (200, 200));
    assert_eq!(server.post("/v1/messages", &json!({})).json()["error"]["type"], "authentication_error");
    let broken = temp.write("broken", "first\n\nsec\tond\n");
    for (args, words) in [
        (&["serve", "--api-key", ""][..], "--api-key"),
        (&["serve", "--api-key-file", "/dev/null"], "contains no key"),
        (&["serve", "--api-key", "a\nb"], "--api-key: contains a line break"),
        (&["serve", "--api-key", "k\u{e4}se"], "--api-key: contains a line break"),
        (&["serve", "--api-key-file", &broken], "line 3: contains a line break"),
        (&["serve", "--cors-origin", "page.example"], "--cors-origin \"page.example\""),
        (&["serve", "--allowed-host", "http://a"], "--allowed-host \"http://a\""),
        (&["serve", "--slots", "0"], "--slots 0"),
        (&["serve", "--queue", "0"], "--queue 0"),
        (&["serve", "--host", "256.1.1.1"], "--host 256.1.1.1"),
    ] {
        antigravity(args).fails_with(2, &[words]);
    }
}

#[test]
fn every_answer_has_a_name_and_says_which_method_a_path_takes() {
    let server = Server::start(&["--api-key", "k"]);
    let reply = server.ask("GET", "/health", ("", "X-Request-Id: mine\r\n"));
    assert_eq!((reply.header("x-request-id"), reply.header("access-control-allow-origin")), ("mine", "*"));
    let [one, other] = [server.get("/health"), server.get("/nothing")];
    assert_ne!(one.header("x-request-id"), other.header("x-request-id"));
    assert_eq!((other.status, &other.json()["error"]["type"]), (404, &json!("not_found_error")));
    for (method, path, takes) in
        [("GET", "/v1/completions", "POST"), ("DELETE", "/health", "GET"), ("POST", "/v1/models", "GET")]
    {
        let reply = server.ask(method, path, ("", "X-Api-Key: k\r\n"));
        assert_eq!((reply.status, reply.header("allow")), (405, takes));
        assert!(reply.json()["error"]["message"].is_string());
    }
    let reply = server.ask("HEAD", "/health", ("", ""));
    assert_eq!((reply.status, reply.body.as_str()), (200, ""));
}

#[test]
fn more_requests_than_may_wait_are_asked_to_come_again() {
    let server = Server::start(&["--slots", "1", "--queue", "1"]);
    let running = server.open("/v1/completions", &endless(true));
    server.wait_for(Wait::Running(1));
    let waiting = server.open("/v1/completions", &short());
    while !server.get("/metrics").body.contains("vllm:num_requests_waiting{model_name=\"story\"} 1\n") {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let reply = server.post("/v1/completions", &short());
    assert_eq!((reply.status, reply.header("retry-after")), (429, "1"));
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    drop(running);
    assert_eq!(waiting.finish().status, 200);
}
