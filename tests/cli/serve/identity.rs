//! An answer is what `generate` gives, whatever runs beside it.

use super::client::Server;
use crate::bed::program::*;
use crate::bed::random::Random;
use serde_json::{Value, json};
use std::sync::Mutex;

const WORDS: [&str; 12] = [
    "Once",
    "upon a time",
    "Lily",
    "Tom",
    "the dog",
    "saw a",
    "red ball",
    "was",
    "happy.",
    "They",
    "and the",
    "went to",
];

/// Requests of many kinds, with prompts that begin alike.
fn requests(count: usize) -> Vec<Value> {
    let mut random = Random(11);
    let mut one = |of: &[Value]| of[random.below(of.len())].clone();
    let numbers = |n: i32| (0..n).map(Value::from).collect::<Vec<_>>();
    let request = |i: usize| {
        let words: Vec<String> = (0..1 + one(&numbers(24)).as_u64().unwrap_or(0))
            .map(|_| one(&WORDS.map(Value::from)).as_str().unwrap_or_default().to_owned())
            .collect();
        let start =
            ["", "Once upon a time there was a little girl called Lily, who had a big red ball. "][i % 2];
        json!({
            "prompt": format!("{start}{}", words.join(" ")),
            "max_tokens": one(&numbers(24)), "seed": one(&numbers(1000)),
            "temperature": one(&[json!(0), json!(0.7), json!(1.3)]), "top_k": one(&[json!(0), json!(5), json!(40)]),
            "top_p": one(&[json!(0.9), json!(1)]), "min_p": one(&[json!(0), json!(0.05)]),
            "presence_penalty": one(&[json!(0), json!(0.4)]),
            "stop": one(&[json!([".", "!"]), json!(["zzz", " and"])]), "logprobs": one(&numbers(3)),
        })
    };
    (0..count).map(request).collect()
}

/// What `generate` gives: texts, and log-probabilities in bits.
fn expected(requests: &[Value]) -> Vec<(String, Vec<String>)> {
    let temp = Temp::new();
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let file = temp.write("prompts.jsonl", &lines);
    let said = text(&["generate", "--prompts", &file, "--batch", "1", "-q"]);
    let of = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let logprobs = line["logprobs"].as_array().expect("logprobs").iter();
        let logprobs = logprobs.map(|token| token["chosen"]["logprob"].to_string()).collect();
        (line["text"].as_str().expect("a text").to_owned(), logprobs)
    };
    said.lines().map(of).collect()
}

/// Text and log-probabilities of an answer, whole or streamed.
fn answer(body: &str) -> (String, Vec<String>) {
    let parts: Vec<Value> = match body.strip_prefix("data: ") {
        None => vec![serde_json::from_str(body).expect("JSON")],
        Some(events) => {
            let events = events.trim_end().split("\n\ndata: ").filter(|event| *event != "[DONE]");
            events.map(|event| serde_json::from_str(event).expect("JSON")).collect()
        }
    };
    let choices = parts.iter().map(|part| &part["choices"][0]);
    let text = choices.clone().map(|c| c["text"].as_str().expect("a text")).collect();
    let logprobs = choices.filter_map(|c| c["logprobs"]["token_logprobs"].as_array()).flatten();
    (text, logprobs.map(Value::to_string).collect())
}

#[test]
fn answers_are_those_of_generate_whatever_runs_beside_them() {
    let requests = requests(48);
    let expected = expected(&requests);
    for (i, args) in [
        &["--slots", "1", "--cache-mib", "0"][..],
        &["--slots", "3", "--prefill-chunk", "8"],
        &["--slots", "8"],
        &["--slots", "8", "--draft", "4"],
    ]
    .into_iter()
    .enumerate()
    {
        let server = Server::start(args);
        let mut order: Vec<usize> = (0..requests.len()).collect();
        let mut random = Random(i as u64);
        (1..order.len()).for_each(|n| order.swap(n, random.below(n + 1)));
        let order = Mutex::new(order);
        let work = || {
            while let Some(n) = { order.lock().expect("a list").pop() } {
                let mut body = requests[n].clone();
                body["stream"] = (n % 3 == 0).into();
                let mut open = server.open("/v1/completions", &body);
                if n % 7 == 0 {
                    // A client that goes away before or while its text comes; then it asks again.
                    open.read(n % 2);
                    drop(open);
                    open = server.open("/v1/completions", &body);
                }
                let reply = open.finish();
                assert_eq!(reply.status, 200, "{body}: {reply:?}");
                assert_eq!(answer(&reply.body), expected[n], "{args:?}: {body}");
            }
        };
        std::thread::scope(|scope| (0..10).for_each(|_| drop(scope.spawn(work))));
    }
}

#[test]
fn evictions_and_other_caches_change_nothing_either() {
    let requests: Vec<Value> = requests(12)
        .into_iter()
        .map(|mut request| {
            request["max_tokens"] = 80.into();
            request["stop"] = json!([]);
            request
        })
        .collect();
    let temp = Temp::new();
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let file = temp.write("prompts.jsonl", &lines);
    for args in [
        &["-c", "96", "--eviction-policy", "h2o", "--eviction-window", "48"][..],
        &["-c", "96", "--eviction-policy", "sliding", "--eviction-window", "48", "--kv-type", "f16"],
        &["-c", "256", "--kv-type", "q8"],
    ] {
        let said = text(&[&["generate", "--prompts", &file, "--batch", "1", "-q"], args].concat());
        let server = Server::start(&[&["--slots", "5"], args].concat());
        let ask = |(request, line): (&Value, &str)| {
            let expected: Value = serde_json::from_str(line).expect("JSON");
            let reply = server.post("/v1/completions", request);
            assert_eq!(
                answer(&reply.body).0,
                expected["text"].as_str().expect("a text"),
                "{args:?}: {request}"
            );
        };
        std::thread::scope(|scope| {
            for pair in requests.iter().zip(said.lines()) {
                scope.spawn(move || ask(pair));
            }
        });
    }
}
