//! An answer equals the output of `generate`, whatever else the server computes.

use super::client::{Reply, Server};
use crate::support::command::*;
use crate::support::random::Random;
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

/// Number of requests to each server, unless `ANTIGRAVITY_REQUESTS` gives another.
const COUNT: usize = 64;
/// From so many on more servers are asked, PoCL's too: 2,000 are the whole run.
const WHOLE: usize = 1000;

/// Requests of many kinds, with prompts that begin alike, as lines of `generate --prompts`.
fn requests(count: usize) -> Vec<Value> {
    let mut random = Random(11);
    let mut one = |of: &[Value]| of[random.below(of.len())].clone();
    let numbers = |n: i32| (0..n).map(Value::from).collect::<Vec<_>>();
    let request = |i: usize| {
        // A few are longer than a pass of the smallest chunk, and than the first part of a prompt beside others.
        let most = if i.is_multiple_of(9) { 120 } else { 24 };
        let words: Vec<String> = (0..1 + one(&numbers(most)).as_u64().unwrap_or(0))
            .map(|_| one(&WORDS.map(Value::from)).as_str().unwrap_or_default().to_owned())
            .collect();
        let start =
            ["", "Once upon a time there was a little girl called Lily, who had a big red ball. "][i % 2];
        json!({
            "prompt": format!("{start}{}", words.join(" ")),
            "max_tokens": one(&numbers(24)), "seed": one(&numbers(1000)),
            "temperature": one(&[json!(0), json!(0.7), json!(1.3)]), "top_k": one(&[json!(0), json!(5), json!(40)]),
            "top_p": one(&[json!(0.9), json!(1)]), "min_p": one(&[json!(0), json!(0.05)]),
            "typical": one(&[json!(1), json!(1), json!(0.9)]),
            "presence_penalty": one(&[json!(0), json!(0.4)]), "frequency_penalty": one(&[json!(0), json!(0.2)]),
            "repetition_penalty": one(&[json!(1), json!(1.1), json!(1.3)]),
            "repetition_window": one(&[json!(64), json!(7)]), "ignore_eos": one(&[json!(false), json!(true)]),
            "stop": one(&[json!([".", "!"]), json!(["zzz", " and"])]), "logprobs": one(&numbers(3)),
        })
    };
    (0..count).map(request).collect()
}

/// Translates a line of `generate --prompts` into the server's field names.
fn body(line: &Value) -> Value {
    let mut body = line.clone();
    for (from, to) in [
        ("typical", "typical_p"),
        ("repetition_penalty", "repeat_penalty"),
        ("repetition_window", "repeat_last_n"),
    ] {
        body[to] = body[from].take();
    }
    body
}

/// Runs `generate` on the requests, and returns the texts and the exact log-probabilities.
fn expected(requests: &[Value]) -> Vec<(String, Vec<String>)> {
    let temp = TestDir::new();
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let file = temp.write("prompts.jsonl", &lines);
    let said = antigravity(["generate", "--prompts", &file, "--batch", "1", "-q"]).text();
    let of = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let logprobs = line["logprobs"].as_array().expect("logprobs").iter();
        let logprobs = logprobs.map(|token| token["chosen"]["logprob"].to_string()).collect();
        (line["text"].as_str().expect("a text").to_owned(), logprobs)
    };
    said.lines().map(of).collect()
}

/// Text and log-probabilities of an answer, whole or streamed.
fn answer(reply: &Reply) -> (String, Vec<String>) {
    let is_stream = reply.body.starts_with("data: ");
    let parts = if is_stream { reply.events() } else { vec![reply.json()] };
    let choices = parts.iter().map(|part| &part["choices"][0]);
    let text = choices.clone().map(|c| c["text"].as_str().expect("a text")).collect();
    let logprobs = choices.filter_map(|c| c["logprobs"]["token_logprobs"].as_array()).flatten();
    (text, logprobs.map(Value::to_string).collect())
}

/// Asks a server with these flags all of it, shuffled, ten at a time; some clients go away and ask again.
fn asks(args: &[&str], requests: &[Value], expected: &[(String, Vec<String>)]) {
    let server = Server::start(args);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    let mut random = Random(args.len() as u64);
    (1..order.len()).for_each(|n| order.swap(n, random.below(n + 1)));
    let order = Mutex::new(order);
    let work = || {
        while let Some(n) = { order.lock().expect("a list").pop() } {
            let mut body = body(&requests[n]);
            body["stream"] = n.is_multiple_of(3).into();
            let mut open = server.open("/v1/completions", &body);
            if n.is_multiple_of(7) {
                // A client that goes away before or while its text comes; then it asks again.
                open.read(n % 2);
                drop(open);
                open = server.open("/v1/completions", &body);
            }
            let reply = open.finish();
            assert_eq!(reply.status, 200, "{args:?}: {body}: {reply:?}");
            assert_eq!(answer(&reply), expected[n], "{args:?}: {body}");
        }
    };
    std::thread::scope(|scope| (0..10).for_each(|_| drop(scope.spawn(work))));
}

#[test]
fn answers_are_those_of_generate_whatever_runs_beside_them() {
    let count = std::env::var("ANTIGRAVITY_REQUESTS");
    let requests = requests(count.map_or(COUNT, |n| n.parse().expect("ANTIGRAVITY_REQUESTS is a number")));
    let expected = expected(&requests);
    for args in [
        &["--slots", "1", "--cache-mib", "0"][..],
        &["--slots", "1", "--draft", "3"],
        &["--slots", "3", "--prefill-chunk", "8"],
        &["--slots", "3", "--draft", "4", "--cache-mib", "0"],
        &["--slots", "8", "--cache-mib", "1"],
        &["--slots", "8", "--draft", "4"],
    ] {
        asks(args, &requests, &expected);
    }
    if requests.len() >= WHOLE {
        for args in [
            &["--slots", "8", "--cache-mib", "0"][..],
            &["--slots", "3", "--threads", "1", "--draft", "2"],
            &["--slots", "3", "-b", "opencl", "--cl-device", "0"],
            &[
                "--slots",
                "3",
                "-b",
                "opencl",
                "--cl-device",
                "0",
                "--gpu-attn",
                "--draft",
                "3",
                "--cache-mib",
                "0",
            ],
            &["--slots", "8", "-b", "hybrid", "--cl-device", "0", "--switch-threshold", "40"],
        ] {
            // PoCL takes a hundred times as long.
            let some = if args.contains(&"-b") { requests.len() / 10 } else { requests.len() };
            asks(args, &requests[..some], &expected[..some]);
        }
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
    let temp = TestDir::new();
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let file = temp.write("prompts.jsonl", &lines);
    for args in [
        &["-c", "96", "--eviction-policy", "h2o", "--eviction-window", "48"][..],
        &["-c", "96", "--eviction-policy", "sliding", "--eviction-window", "48", "--kv-type", "f16"],
        &["-c", "256", "--kv-type", "q8"],
    ] {
        let said = antigravity(["generate", "--prompts", &file, "--batch", "1", "-q"]).args(args).text();
        let server = Server::start(&[&["--slots", "5"], args].concat());
        let ask = |(request, line): (&Value, &str)| {
            let expected: Value = serde_json::from_str(line).expect("JSON");
            let reply = server.post("/v1/completions", &body(request));
            assert_eq!(answer(&reply).0, expected["text"].as_str().expect("a text"), "{args:?}: {request}");
        };
        std::thread::scope(|scope| {
            for pair in requests.iter().zip(said.lines()) {
                scope.spawn(move || ask(pair));
            }
        });
    }
}
