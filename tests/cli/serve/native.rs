//! `/completion`, in llama.cpp's own shape.

use super::client::Server;
use crate::support::command::*;
use serde_json::{Value, json};

/// The events of a stream.
fn events(stream: &str) -> Vec<Value> {
    let event = |data: &str| serde_json::from_str(data.strip_prefix("data: ").expect("an event"));
    stream.trim_end().split("\n\n").map(|e| event(e).expect("JSON")).collect()
}

#[test]
fn a_completion_in_llama_cpps_shape_is_the_same_text_whole_and_streamed() {
    let server = Server::start(&["--slots", "2", "-c", "128"]);
    let mut body = json!({
        "prompt": "Once upon a time", "n_predict": 9, "seed": 3, "return_tokens": true, "n_probs": 2,
        "logit_bias": [[" the", false]],
    });
    let whole = server.post("/completion", &body).json();
    let biased = || server.post("/tokenize", &json!({"content": " the"})).json()["tokens"][0].to_string();
    let bias = format!("{}-inf", biased());
    let args = ["generate", "-p", "Once upon a time", "-n", "9", "--seed", "3", "--logit-bias", &bias];
    assert_eq!(whole["content"], antigravity(&args).text());
    for (field, value) in [
        ("index", json!(0)),
        ("stop", json!(true)),
        ("stop_type", json!("limit")),
        ("stopping_word", json!("")),
        ("model", json!("story")),
        ("tokens_predicted", json!(9)),
        ("tokens_cached", json!(0)),
        ("truncated", json!(false)),
        ("prompt", json!("<|begin_of_text|>Once upon a time")),
    ] {
        assert_eq!(whole[field], value, "{field}");
    }
    let (settings, timings) = (&whole["generation_settings"], &whole["timings"]);
    assert_eq!((&settings["n_predict"], &settings["seed"]), (&json!(9), &json!(3)));
    assert_eq!(settings["logit_bias"], json!([{"token": biased().parse::<u32>().unwrap(), "bias": null}]));
    assert_eq!((&timings["predicted_n"], &timings["prompt_n"]), (&json!(9), &whole["tokens_evaluated"]));
    assert!(
        timings["prompt_ms"].as_f64() > Some(0.0) && timings["predicted_per_second"].as_f64() > Some(0.0)
    );
    let ids = json!({"tokens": whole["tokens"]});
    assert_eq!(server.post("/detokenize", &ids).json()["content"], whole["content"]);
    let probabilities = whole["completion_probabilities"].as_array().expect("a list");
    assert!(probabilities.len() == 9 && probabilities.iter().all(|p| p["top_logprobs"][1].is_object()));

    body["stream"] = true.into();
    let parts = events(&server.post("/completion", &body).body);
    let (last, parts) = parts.split_last().expect("events");
    let all = |field: &str| parts.iter().map(|part| part[field].clone()).collect::<Vec<_>>();
    let content: String = all("content").iter().filter_map(Value::as_str).collect();
    let tokens: Vec<Value> =
        all("tokens").iter().flat_map(|t| t.as_array().cloned().unwrap_or_default()).collect();
    assert_eq!((json!(content), json!(tokens)), (whole["content"].clone(), whole["tokens"].clone()));
    let streamed: Vec<_> = all("completion_probabilities").iter().map(|p| p[0].clone()).collect();
    assert_eq!(&streamed, probabilities);
    assert!(all("stop").iter().all(|stop| stop == false) && last["stop"] == true);
    assert_eq!((&last["content"], &last["tokens"]), (&json!(""), &json!([])));
    assert_eq!((&last["stop_type"], &last["prompt"]), (&whole["stop_type"], &whole["prompt"]));
}

#[test]
fn prompts_of_llama_cpps_completion_are_texts_ids_both_or_several() {
    let server = Server::start(&["--slots", "2", "-c", "128"]);
    let ask = |prompt: Value, more: Value| {
        let mut body = json!({"prompt": prompt, "n_predict": 6, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/completion", &body).json()
    };
    let text = |answer: &Value| answer["content"].as_str().expect("a text").to_owned();
    let ids = server.post("/tokenize", &json!({"content": "Once upon", "add_special": true})).json();
    let ids = ids["tokens"].as_array().expect("ids").clone();
    let alone = text(&ask(json!("Once upon a time"), json!({})));
    let mixed = [ids.clone(), vec![json!(" a time")]].concat();
    let object = json!({"prompt_string": "Once upon a time", "multimodal_data": []});
    for prompt in [json!(mixed), object.clone(), json!([object])] {
        assert_eq!(text(&ask(prompt.clone(), json!({}))), alone, "{prompt}");
    }
    assert_eq!(ask(json!(["Once upon", " a time"]), json!({})).as_array().map(Vec::len), Some(2));
    let several =
        ask(json!(["Once upon a time", mixed, "Tom"]), json!({"n_cmpl": 2, "seed": 4, "temperature": 1}));
    let seeds: Vec<_> =
        several.as_array().unwrap().iter().map(|a| a["generation_settings"]["seed"].clone()).collect();
    assert_eq!(seeds, [4, 5, 4, 5, 4, 5]);
    assert_eq!(text(&several[0]), text(&several[2]));
    assert_ne!(several[1]["content"], several[0]["content"]);

    let fields = json!({"response_fields": ["content", "generation_settings/n_predict", "nothing"]});
    let some = ask(json!("Once upon a time"), fields);
    assert_eq!(some, json!({"content": alone, "generation_settings/n_predict": 6}));
    let word = alone.split_whitespace().nth(1).expect("a word");
    let stopped = ask(json!("Once upon a time"), json!({"stop": ["never", word]}));
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(word)));
    assert_eq!(stopped["content"], alone[..alone.find(word).expect("there")]);
    let cut = ask(json!("Tom"), json!({"n_predict": -1, "ignore_eos": true}));
    assert_eq!((&cut["stop_type"], &cut["truncated"]), (&json!("limit"), &json!(true)));
}

#[test]
fn times_are_told_where_they_are_asked_for_and_the_model_has_the_name_that_it_is_given() {
    let named = Server::start(&["--alias", "a \"b\" \\c"]);
    mentions(&named.get("/metrics").body, &[r#"{model_name="a \"b\" \\c"}"#]);
    drop(named);
    let server = Server::start(&["--alias", "small"]);
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    assert!(chat(json!({})).json()["timings"].is_null());
    let told = chat(json!({"timings_per_token": true})).json();
    assert_eq!((&told["timings"]["predicted_n"], &told["model"]), (&json!(4), &json!("small")));
    let streamed =
        chat(json!({"timings_per_token": true, "stream": true, "stream_options": {"include_usage": true}}));
    let last = events(streamed.body.trim_end().trim_end_matches("data: [DONE]")).pop().expect("events");
    assert_eq!((&last["choices"], &last["timings"]["predicted_n"]), (&json!([]), &json!(4)));
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "small");
    assert_eq!((server.get("/v1/models/small").status, server.get("/v1/models/story").status), (200, 404));
    let props = server.get("/props").json();
    assert_eq!(props["model_alias"], "small");
    assert!(props["model_path"].as_str().is_some_and(|path| path.ends_with("story")), "{props}");
    mentions(&server.get("/metrics").body, &["{model_name=\"small\"}", "llamacpp:n_decode_total "]);
}

#[test]
fn a_template_and_its_variables_are_those_that_the_server_was_started_with() {
    let template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ tone }}{% if add_generation_prompt %}>{% endif %}";
    let server = Server::start(&["--chat-template", template, "--template-arg", "tone=dry"]);
    let render = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/apply-template", &body).json()["prompt"].clone()
    };
    assert_eq!(render(json!({})), "Hi|dry>");
    assert_eq!(render(json!({"chat_template_kwargs": {"tone": "kind"}})), "Hi|kind>");
    assert_eq!(render(json!({"add_generation_prompt": false})), "Hi|dry");
    antigravity(["serve", "--template-arg", "tone"]).fails_with(2, &["--template-arg tone", "NAME=VALUE"]);
}

#[test]
fn a_template_gets_json_in_the_requests_order() {
    let template = "{{ tools|tojson }}|{% if own is defined %}{{ own|tojson }}{% endif %}|{% for m in messages %}{% for call in m.tool_calls %}\
                    {{ call.function.arguments|tojson }}{% endfor %}{% endfor %}";
    let server = Server::start(&["--chat-template", template]);
    // The keys are out of order, and Python writes the numbers otherwise.
    let (given, shown) = (
        r#"{"src": 1e-5, "dst": [1e16, {"b": 1, "a": 1.0}]}"#,
        r#"{"src": 1e-05, "dst": [1e+16, {"b": 1, "a": 1.0}]}"#,
    );
    let tools = |of: &str| {
        format!(
            r#"[{{"type": "function", "function": {{"name": "move", "description": "d", "parameters": {of}}}}}]"#
        )
    };
    let call =
        |arguments: &Value| json!({"type": "function", "function": {"name": "move", "arguments": arguments}});
    let parsed: Value = serde_json::from_str(given).expect("JSON");
    let body = json!({
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [call(&given.into()), call(&parsed)]},
        ],
        "tools": serde_json::from_str::<Value>(&tools(given)).expect("JSON"),
        "chat_template_kwargs": {"own": parsed},
    });
    let prompt = server.post("/apply-template", &body).json()["prompt"].clone();
    assert_eq!(prompt, format!("{}|{shown}|{shown}{shown}", tools(shown)));
}
