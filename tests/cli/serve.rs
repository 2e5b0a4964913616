//! `serve`: the server as clients see it.

mod access;
mod agents;
mod calls;
mod client;
mod hostile;
mod identity;
mod limits;
mod llama_cpp;
mod messages;
mod params;
mod refused;
mod rerank;
mod shapes;
mod silence;
mod slow;

use crate::support::command::*;
use client::{Reply, Server, Wait, endless, short, with};
use serde_json::{Value, json};

/// The events of a stream, without what is new in each answer.
fn events(reply: &Reply) -> Vec<Value> {
    let plain = |mut event: Value| {
        let object = event.as_object_mut().expect("an object");
        for (field, value) in [("id", ""), ("created", "1"), ("system_fingerprint", "fp_")] {
            let found = object.remove(field).expect("every part has it").to_string();
            assert!(found.contains(value), "{field}: {found}");
        }
        assert_eq!(object.remove("model"), Some(json!("story")));
        event
    };
    assert!(reply.body.ends_with("\n\ndata: [DONE]\n\n"), "{reply:?}");
    let parts = reply.body.trim_end().split("\n\n");
    assert!(parts.clone().all(|part| part.starts_with("data: ") && !part.contains('\n')), "{reply:?}");
    reply.events().into_iter().map(plain).collect()
}

#[test]
fn a_stream_has_these_events_and_no_others() {
    let server = Server::start(&[]);
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me of a dog."}], "max_tokens": 2, "temperature": 0,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(reply.header("content-type"), "text/event-stream; charset=utf-8");
    let part = |delta: Value, reason: Value| {
        let choice = json!({"delta": delta, "finish_reason": reason, "index": 0});
        json!({"choices": [choice], "object": "chat.completion.chunk", "usage": null})
    };
    let usage = json!({
        "completion_tokens": 2, "prompt_tokens": 18, "prompt_tokens_details": {"cached_tokens": 0}, "total_tokens": 20,
    });
    let said = antigravity([
        "chat",
        "-st",
        "-p",
        "Tell me of a dog.",
        "-n",
        "2",
        "--temp",
        "0",
        "--repeat-penalty",
        "1.1",
        "-q",
    ])
    .text();
    let found = events(&reply);
    let pieces: Vec<Value> = found[1..3].iter().map(|e| e["choices"][0]["delta"].clone()).collect();
    let whole: String = pieces.iter().map(|p| p["content"].as_str().expect("a text")).collect();
    assert_eq!(whole, said.trim_end_matches('\n'));
    let expected = [
        part(json!({"role": "assistant", "content": null}), Value::Null),
        part(pieces[0].clone(), Value::Null),
        part(pieces[1].clone(), Value::Null),
        part(json!({}), json!("length")),
        json!({"choices": [], "object": "chat.completion.chunk", "usage": usage}),
    ];
    assert_eq!(found, expected);

    // Usage is absent unless requested; the path works without `/v1`.
    let body = json!({"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "stream": true});
    let found = events(&server.post("/completions", &body));
    let part = |text: &str, reason: Value| {
        let choice = json!({"finish_reason": reason, "index": 0, "logprobs": null, "text": text});
        json!({"choices": [choice], "object": "text_completion"})
    };
    assert_eq!(found, [part(",", Value::Null), part("", json!("length"))]);
}

#[test]
fn several_texts_of_a_request_are_those_of_seeds_that_follow_each_other() {
    let server = Server::start(&["--slots", "3"]);
    let body = json!({"prompt": ["Tom", "Lily"], "n": 2, "seed": 5, "max_tokens": 9});
    let reply = server.post("/v1/completions", &body).json();
    let found: Vec<_> = reply["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
    let alone = |p, seed| json!(antigravity(["generate", "-p", p, "-n", "9", "--seed", seed]).text());
    assert_eq!(found, [alone("Tom", "5"), alone("Tom", "6"), alone("Lily", "5"), alone("Lily", "6")]);
    assert_eq!(reply["usage"]["completion_tokens"], 36);
    // Ids in place of a text.
    let ids =
        server.post("/tokenize", &json!({"content": "Tom", "add_special": true})).json()["tokens"].clone();
    let body = json!({"prompt": ids, "seed": 5, "max_tokens": 9});
    assert_eq!(server.post("/v1/completions", &body).json()["choices"][0]["text"], found[0]);
}

#[test]
fn texts_and_ids_go_there_and_back_as_in_llama_cpp() {
    let server = Server::start(&[]);
    let tell = |path: &str, body: Value| server.post(path, &body).json();
    let ids = tell("/tokenize", json!({"content": "Hello you"}))["tokens"].clone();
    assert_eq!(tell("/detokenize", json!({"tokens": ids})), json!({"content": "Hello you"}));
    let pieces = tell("/tokenize", json!({"content": "Hello you", "with_pieces": true}));
    assert_eq!(pieces["tokens"][1]["piece"], " you");
    let special = |parse: bool| tell("/tokenize", json!({"content": "<|im_end|>", "parse_special": parse}));
    assert_eq!(special(true)["tokens"].as_array().map(Vec::len), Some(1));
    assert_ne!(special(false), special(true));
    let messages = json!({"messages": [{"role": "developer", "content": [{"type": "text", "text": "Hi"}]}]});
    let prompt = tell("/apply-template", messages)["prompt"].clone();
    assert_eq!(prompt, "<|begin_of_text|><|im_start|>system\nHi<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn a_prompt_that_begins_like_another_is_not_computed_again_and_has_the_same_answer() {
    let server = Server::start(&["--slots", "1"]);
    let ask = |more: &str, cache: bool| {
        let prompt = format!("Once upon a time there was a little girl who had a small red ball.{more}");
        let body =
            json!({"prompt": prompt, "max_tokens": 12, "seed": 3, "logprobs": 2, "cache_prompt": cache});
        let reply = server.post("/v1/completions", &body).json();
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
        (cached, reply["choices"].clone())
    };
    let (cached, alone) = ask(" She", false);
    assert_eq!(cached, 0);
    assert_eq!(ask(" The dog", true).0, 0);
    let (cached, found) = ask(" She", true);
    assert!(cached >= 10, "{cached}");
    assert_eq!(found, alone);
    let metrics = server.get("/metrics").body;
    mentions(&metrics, &[&format!("vllm:gpu_prefix_cache_hits_total{{model_name=\"story\"}} {cached}\n")]);
}

#[test]
fn health_models_props_and_metrics_describe_the_server() {
    let server = Server::start(&["--slots", "2", "-c", "128"]);
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "story");
    assert_eq!(server.get("/v1/models/story").json()["meta"]["n_ctx"], 128);
    assert_eq!(server.get("/v1/models/other").status, 404);
    for path in ["//v1/models/", "/v1//models", "/models///", "//v1/models/story/"] {
        let found = server.get(path).json();
        let model = found["data"].get(0).unwrap_or(&found);
        assert_eq!((&model["max_model_len"], &model["context_length"]), (&json!(128), &json!(128)), "{path}");
    }
    let props = server.get("/props").json();
    assert_eq!(
        (&props["total_slots"], &props["default_generation_settings"]["n_ctx"]),
        (&json!(2), &json!(128))
    );
    let params = &props["default_generation_settings"]["params"];
    assert_eq!((&params["temperature"], &params["max_tokens"]), (&json!(0.8), &json!(-1)));
    let own = Server::begin("0", &[], || ()).get("/props").json();
    let own = &own["default_generation_settings"]["params"];
    assert_eq!((&own["temperature"], &own["repeat_penalty"]), (&json!(0.7), &json!(1.0)));
    assert!(
        props["model_path"].as_str().is_some_and(|name| !name.is_empty() && !name.contains('/')),
        "{props}"
    );
    assert!(!props.to_string().contains(&*model().to_string_lossy()), "{props}");
    assert_eq!(server.get("/slots").status, 501);
    assert_eq!(Server::start(&["--slots-endpoint"]).get("/slots").json()[3]["is_processing"], false);
    let page = server.get("/");
    assert!(page.header("content-security-policy").contains("default-src 'none'"), "{}", page.head);
    assert!(page.body.len() < 60_000 && page.body.contains("v1/chat/completions"));
    assert!(
        !page.body.contains("http://") && !page.body.contains("https://"),
        "it loads nothing from a network"
    );
    assert!(!page.body.contains("innerHTML"), "what a model writes is no HTML");
    server.post("/v1/completions", &short());
    let metrics = server.get("/metrics").body;
    let lines = [
        "vllm:num_requests_running{model_name=\"story\"} 0\n",
        "vllm:generation_tokens_total{model_name=\"story\"} 8\n",
        "vllm:time_to_first_token_seconds_count{model_name=\"story\"} 1\n",
        "vllm:cache_config_info{model_name=\"story\",",
        "llamacpp:tokens_predicted_total 8\n",
    ];
    mentions(&metrics, &lines);
}

#[test]
fn paths_with_more_slashes_any_seed_and_the_whole_context_as_a_window_are_taken() {
    let server = Server::start(&["-c", "128"]);
    let one = json!({"prompt": "Tom", "max_tokens": 1});
    assert_eq!(server.post("//v1/completions/", &one).json()["object"], "text_completion");
    assert_eq!(server.post("/completion/", &one).json()["stop"], true);
    let said = |more: Value| {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.5});
        server.post("/v1/completions", &with(&body, &more)).json()["choices"][0]["text"].clone()
    };
    let generated = antigravity([
        "generate",
        "-p",
        "Once upon a time",
        "-n",
        "24",
        "--temp",
        "1.5",
        "--seed",
        "18446744073709551614",
    ])
    .text();
    assert_eq!(said(json!({"seed": u64::MAX - 1})), generated.trim_end_matches('\n'));
    assert_eq!(said(json!({"seed": -2})), said(json!({"seed": u64::MAX - 1})));
    assert_ne!(said(json!({"seed": u64::MAX})), said(json!({"seed": i64::MAX})));
    let back = |n: i64| said(json!({"seed": 3, "repeat_last_n": n, "repeat_penalty": 1.5}));
    assert_eq!(back(-1), back(128));
    assert_ne!(back(-1), back(0));
}

#[test]
fn a_plan_says_what_a_server_takes_with_no_slot_filled_and_with_all() {
    let plan = |memory: &str, more: &[&str]| {
        let args = [&["plan", "--format", "json", "--cache-mib", "8"], more].concat();
        let said = antigravity(&args).env("ANTIGRAVITY_MEMORY_MIB", memory).run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        serde_json::from_str::<Value>(&said.out).expect("JSON")
    };
    let bytes = |plan: &Value, field: &str| plan[field].as_u64().unwrap_or_else(|| panic!("{field}: {plan}"));
    let whole = plan("4096", &["--slots", "3"]);
    assert_eq!((&whole["batch"], &whole["max_seq_len"]), (&json!(3), &json!(2048)));
    let items = whole["items"].as_array().expect("a list");
    let rows = items.iter().filter(|i| {
        let beside = ["KV cache", "prefix cache", "requests and answers"];
        i["what"].as_str().is_some_and(|what| beside.iter().any(|of| what.contains(of)))
    });
    let rows: u64 = rows.map(|i| bytes(i, "bytes")).sum();
    assert_eq!(bytes(&whole, "need_bytes") - bytes(&whole, "empty_bytes"), rows);
    assert!(rows > 8 << 20 && whole["shared_rows_bytes"].is_null(), "{whole}");
    // The server says the same two sums.
    let mut server = antigravity(["serve", "--port", "0", "--slots", "3", "--cache-mib", "8"]).into_std();
    let mut server = server.stderr(std::process::Stdio::piped()).spawn().expect("the binary starts");
    let mut line = String::new();
    let mut said = std::io::BufReader::new(server.stderr.take().expect("piped"));
    while !line.contains("http://") {
        line.clear();
        assert_ne!(
            std::io::BufRead::read_line(&mut said, &mut line).expect("text"),
            0,
            "it says where it is"
        );
    }
    server.kill().and_then(|()| server.wait()).expect("it ends");
    let mib = |field: &str| format!("{:.1} MiB", bytes(&whole, field) as f64 / (1 << 20) as f64);
    mentions(&line, &[&mib("empty_bytes"), &mib("need_bytes")]);
    // Where not all can be full they share what there is; one can always be.
    let tight = plan("300", &["--slots", "64", "-c", "8192"]);
    assert!(bytes(&tight, "shared_rows_bytes") > 0 && bytes(&tight, "need_bytes") <= 300 << 20, "{tight}");
    assert!(bytes(&tight, "empty_bytes") < 100 << 20, "{tight}");
    mentions(&antigravity(["plan", "--slots", "2"]).text(), &["need, no slot filled", "need, all filled"]);
    antigravity(["plan", "--slots", "0"]).fails_with(2, &["--slots 0"]);
}

#[test]
fn a_client_that_goes_away_frees_its_slot() {
    let server = Server::start(&["--slots", "1"]);
    for stream in [true, false] {
        let open = server.open("/v1/completions", &endless(stream));
        server.wait_for(Wait::Running(1));
        drop(open);
        server.wait_for(Wait::Running(0));
    }
}

#[test]
fn a_signal_ends_it_when_what_runs_has_ended_and_nothing_new_is_taken() {
    let mut server = Server::start(&["--slots", "1", "--drain", "18446744073709551615"]);
    let long = json!({"prompt": "Tom", "max_tokens": 400, "ignore_eos": true, "seed": 2});
    let running = server.open("/v1/completions", &long);
    let waiting = server.open("/v1/completions", &short());
    server.wait_for(Wait::Running(1));
    server.signal("TERM");
    server.wait_for(Wait::Draining);
    assert_eq!(server.post("/v1/completions", &short()).status, 503);
    let [running, waiting] = [running, waiting].map(|stream| stream.finish().json());
    assert_eq!(running["usage"]["completion_tokens"], 400);
    assert_eq!(
        waiting["choices"][0]["text"],
        antigravity(["generate", "-p", "Once upon a time", "-n", "8", "--temp", "0"]).text()
    );
    assert_eq!(server.end(), Some(0));
    // Who cannot wait asks twice.
    let mut server = Server::start(&["--slots", "1"]);
    let _stream = server.open("/v1/completions", &endless(true));
    server.wait_for(Wait::Running(1));
    server.signal("INT");
    server.wait_for(Wait::Draining);
    server.signal("INT");
    assert_eq!(server.end(), Some(130));
}
