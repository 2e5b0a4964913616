//! Fields that must hold: each changes the text as it says.

use super::client::{Server, short, with};
use super::events;
use crate::support::command::antigravity;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

/// The first text of an answer, and how many tokens it took.
#[track_caller]
fn text(server: &Server, more: &Value) -> (String, u64) {
    let reply = server.post(PATH, &with(&short(), more)).json();
    let text = reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{more}: {reply}"));
    (text.to_owned(), reply["usage"]["completion_tokens"].as_u64().expect("a number"))
}

#[cfg(feature = "grammar")]
#[test]
fn every_way_to_say_what_a_text_must_be_like_is_followed() {
    let server = Server::start(&["--slots", "2"]);
    let schema = json!({"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema});
    let fits = |text: &str| ["{\"n\": 7}", "{\"n\": 8}"].contains(&text);
    let digits = |text: &str| text.len() == 3 && text.bytes().all(|b| b.is_ascii_digit());
    let animal = |text: &str| ["fox", "a \"dog\""].contains(&text);
    let choice = json!(["fox", "a \"dog\""]);
    let grammar = "root ::= d d d\nd ::= [0-9]";
    type Fits<'a> = &'a dyn Fn(&str) -> bool;
    let of_completions: [(Value, Fits); 11] = [
        (json!({"json_schema": schema}), &fits),
        (json!({"guided_json": schema}), &fits),
        (json!({"guided_json": schema.to_string()}), &fits),
        (json!({"structured_outputs": {"json": schema}}), &fits),
        (json!({"structured_outputs": {"choice": choice}}), &animal),
        (json!({"structured_outputs": {"regex": "^[0-9]{3}$"}}), &digits),
        (json!({"structured_outputs": {"grammar": grammar}}), &digits),
        (json!({"guided_choice": choice}), &animal),
        (json!({"guided_regex": "[0-9]{3}"}), &digits),
        (json!({"guided_grammar": grammar}), &digits),
        (json!({"grammar": grammar}), &digits),
    ];
    for (more, fits) in of_completions {
        let more = with(&more, &json!({"max_tokens": 40, "temperature": 1.5}));
        for path in [PATH, "/completion", "/v1/chat/completions"] {
            let mut body = with(&short(), &more);
            body["messages"] = json!([{"role": "user", "content": "Which?"}]);
            let reply = server.post(path, &body).json();
            let said =
                ["/choices/0/text", "/content", "/choices/0/message/content"].map(|at| reply.pointer(at));
            let said = said
                .into_iter()
                .flatten()
                .next()
                .and_then(Value::as_str)
                .unwrap_or_else(|| panic!("{path} {more}: {reply}"));
            assert!(fits(said), "{path} {more}: {said}");
        }
    }
    let messages = json!([{"role": "user", "content": "Which?"}]);
    let body = json!({"messages": messages, "max_tokens": 40, "output_config": {"format": format}});
    let reply = server.post("/v1/messages", &body).json();
    assert!(fits(reply["content"][0]["text"].as_str().unwrap_or_default()), "{reply}");
    let body = json!({"input": "Which?", "max_output_tokens": 40, "text": {"format": format}});
    let reply = server.post("/v1/responses", &body).json();
    assert!(fits(reply["output"][0]["content"][0]["text"].as_str().unwrap_or_default()), "{reply}");
    // One of two would be left out.
    let reply = server.post(PATH, &with(&short(), &json!({"json_schema": schema, "grammar": grammar})));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("grammar")));
    // A grammar that must end does so before the least number of tokens.
    assert_eq!(text(&server, &json!({"guided_regex": "[0-9]{3}", "min_tokens": 8})).0.len(), 3);
}

#[test]
fn a_text_has_the_ends_and_the_words_that_it_may_have() {
    let server = Server::start(&[]);
    let body = with(&short(), &json!({"n_predict": 8, "return_tokens": true}));
    let plain = server.post("/completion", &body).json();
    let ids: Vec<u64> = plain["tokens"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    let whole = plain["content"].as_str().expect("a text");
    let third = ids[2];
    let first = ids.iter().position(|&id| id == third).expect("it is there") as u64;
    let (cut, tokens) = text(&server, &json!({"stop_token_ids": [third]}));
    assert!(whole.starts_with(&cut) && tokens == first + 1, "{cut:?} of {whole:?}");
    // The end is as probable as can be.
    let ends = json!({"logit_bias": {"1": 10000}});
    assert_eq!(text(&server, &ends), (String::new(), 1));
    let (later, tokens) = text(&server, &with(&ends, &json!({"min_tokens": 5})));
    assert!(whole.starts_with(&later) && tokens == 6, "{later:?} of {whole:?}");
    // So is a stop string.
    let word = whole.split_whitespace().next().expect("a word");
    assert_eq!(text(&server, &json!({"stop": word})).0.trim(), "");
    let (later, _) = text(&server, &json!({"stop": word, "min_tokens": 6}));
    assert!(later.contains(word), "{later:?}");
    let (without, _) = text(&server, &json!({"bad_words": [word]}));
    assert!(!without.contains(word) && !without.is_empty(), "{word} in {without:?}");
    // Of several tokens, the last one is ruled out behind the others.
    let two = whole.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
    let (without, _) = text(&server, &json!({"bad_words": [two]}));
    assert!(!without.contains(&two) && without.trim_start().starts_with(word), "{two} in {without:?}");
    let penalised = text(&server, &json!({"repetition_penalty": 1.9, "max_tokens": 60}));
    assert_eq!(penalised, text(&server, &json!({"repeat_penalty": 1.9, "max_tokens": 60})));
}

#[test]
fn an_echo_says_how_probable_the_prompt_is() {
    let server = Server::start(&["--slots", "2"]);
    let body = with(&short(), &json!({"logprobs": 1, "n_predict": 8, "repeat_penalty": 1}));
    let ids = |of: &str| {
        server.post("/tokenize", &json!({"content": of, "add_special": true})).json()["tokens"].clone()
    };
    let prompt = ids("Once upon a time");
    let made = server.post(PATH, &body).json()["choices"][0].clone();
    let native = with(&body, &json!({"return_tokens": true}));
    let tokens = server.post("/completion", &native).json()["tokens"].clone();
    let both = [prompt.as_array().expect("ids").as_slice(), tokens.as_array().expect("ids")].concat();
    // As lm-eval asks: ids, one token more, greedy.
    let ask =
        json!({"prompt": both, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true, "seed": 1234});
    let neighbour = server.open(PATH, &with(&short(), &json!({"max_tokens": 100, "ignore_eos": true})));
    let choice = server.post(PATH, &ask).json()["choices"][0].clone();
    neighbour.finish();
    let list =
        |of: &Value, name: &str| of["logprobs"][name].as_array().unwrap_or_else(|| panic!("{of}")).clone();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(&choice, name).len(), both.len() + 1, "{name}");
    }
    assert!(list(&choice, "token_logprobs")[0].is_null() && list(&choice, "top_logprobs")[0].is_null());
    let end = both.len();
    let begin = end - 8;
    for name in ["tokens", "token_logprobs", "top_logprobs"] {
        assert_eq!(
            list(&choice, name)[begin..end],
            list(&made, name)[..],
            "{name}: the bits of a text that is made"
        );
    }
    assert!(choice["text"].as_str().is_some_and(|text| text.contains("Once upon a time")), "{choice}");
    // Nothing more, a prompt that is text, and one of a few tokens; in a stream the prompt comes first.
    let ask = json!({"prompt": ["Once upon a time", "Tom"], "max_tokens": 0, "logprobs": 2, "echo": true});
    let whole = server.post(PATH, &ask).json();
    let [first, second] = [0, 1].map(|i| whole["choices"][i].clone());
    assert_eq!((&first["text"], &second["text"]), (&json!("Once upon a time"), &json!("Tom")));
    assert_eq!(list(&first, "token_logprobs").len(), prompt.as_array().expect("ids").len());
    assert_eq!(
        (&first["finish_reason"], &whole["usage"]["completion_tokens"]),
        (&json!("length"), &json!(0))
    );
    // `score` computes the same.
    let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let bits = |of: &Value| {
        let tokens = of["logprobs"].as_array().expect("tokens").iter();
        tokens.map(|token| token["chosen"]["logprob"].clone()).collect::<Vec<_>>()
    };
    let told = list(&first, "token_logprobs");
    let scored = antigravity(["score", "-q", "--logprobs", "2", "Once upon a time", "Tom"]).text();
    let scored: Vec<Value> = scored.lines().map(line).collect();
    assert_eq!(
        [bits(&scored[0]), bits(&scored[1])],
        [&first, &second].map(|choice| list(choice, "token_logprobs")[1..].to_vec())
    );
    let sum: f64 = told[1..].iter().map(|x| x.as_f64().expect("a number")).sum();
    assert_eq!((&scored[0]["logprob"], &scored[0]["tokens"]), (&json!(sum), &json!(told.len() - 1)));
    assert_eq!(scored[1]["logprobs"][0]["top"].as_array().map(Vec::len), Some(2));
    let behind = antigravity(["score", "-q", "--prompt", "Once upon", "--logprobs", "0", " a time"]).text();
    assert_eq!(bits(&line(&behind)), told[told.len() - 2..]);
    assert_eq!(antigravity(["score", "-q", ""]).text(), "{\"index\":0,\"tokens\":0,\"logprob\":0.0}\n");
    antigravity(["score", "-q", "a", &"a dog ".repeat(2000)]).fails_with(2, &["prompt 1", "--max-seq-len"]);
    antigravity(["score", "-q", "a", "--eviction-policy", "sliding"]).fails_with(2, &["--eviction-policy"]);

    let streamed = with(&short(), &json!({"echo": true, "logprobs": 0, "stream": true}));
    let parts = events(&server.post(PATH, &streamed));
    assert_eq!(parts[0]["choices"][0]["text"], "Once upon a time", "{parts:?}");
    assert_eq!(list(&parts[0]["choices"][0], "tokens").len(), prompt.as_array().expect("ids").len());
    let plain = with(&short(), &json!({"echo": true}));
    let said = server.post(PATH, &plain).json()["choices"][0].clone();
    assert!(
        said["text"].as_str().is_some_and(|text| text.starts_with("Once upon a time"))
            && said["logprobs"].is_null()
    );
}
