//! `/v1/rerank`: the probability of "yes" after the prompt of Qwen3-Reranker.

use super::client::{Server, with};
use crate::support::command::*;
use serde_json::{Value, json};

/// The bundled model with a token "yes" in place of its last one; the ids of "yes" and "no".
fn model_with_yes(temp: &TestDir) -> (String, [usize; 2]) {
    let dir = temp.model_without("tokenizer.json");
    let own = std::fs::read(model().join("tokenizer.json")).expect("a tokenizer");
    let mut tokenizer: Value = serde_json::from_slice(&own).expect("JSON");
    let last = tokenizer["model"]["merges"].as_array_mut().expect("merges").last_mut().expect("a merge");
    let name = format!("{}{}", last[0].as_str().expect("a piece"), last[1].as_str().expect("a piece"));
    *last = json!(["y", "es"]);
    let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("tokens");
    let yes = vocab.remove(&name).expect("the token of the merge");
    vocab.insert("yes".into(), yes.clone());
    let ids = [yes, vocab["no"].clone()].map(|id| id.as_u64().expect("an id") as usize);
    temp.write("tokenizer.json", tokenizer.to_string());
    (dir, ids)
}

/// Tokens of the published prompt, and the score that its logits give.
fn expected(temp: &TestDir, (instruction, document): (&str, &str), [yes, no]: [usize; 2]) -> (usize, f64) {
    let prompt = format!(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
         provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: \
         {instruction}\n<Query>: Who has a dog?\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n\
         </think>\n\n"
    );
    let dir = temp.path("");
    let ids = antigravity(["tokenize", "--no-special", "-m", &dir, "-p", &prompt]).text();
    let ids = format!("[{}]", ids.trim_end().replace(' ', ","));
    let (tokens, out) = (temp.write("ids.json", &ids), temp.path("logits"));
    assert_eq!(antigravity(["logits", "-m", &dir, "--tokens", &tokens, "--out", &out]).run().code, Some(0));
    let bytes = std::fs::read(&out).expect("logits");
    let count = ids.split(',').count();
    let last = &bytes[bytes.len() / count * (count - 1)..];
    let logit =
        |id: usize| f64::from(f32::from_le_bytes(last[4 * id..][..4].try_into().expect("four bytes")));
    let [yes, no] = [logit(yes), logit(no)].map(f64::exp);
    (count, yes / (yes + no))
}

#[test]
fn documents_are_ranked_by_the_logits_of_yes_and_no() {
    let temp = TestDir::new();
    let (dir, ids) = model_with_yes(&temp);
    let server = Server::start(&["--slots", "2", "-m", &dir]);
    let texts = ["Tom has a big dog.", "The sun is hot.", "Lily likes to swim.", "The sun is hot."];
    let search = "Given a web search query, retrieve relevant passages that answer the query";
    let body = json!({
        "model": "any", "query": "Who has a dog?", "documents": [texts[0], {"text": texts[1]}, texts[2], texts[3]],
    });
    let reply = server.post("/v1/rerank", &body).json();
    let wanted: Vec<_> = texts.iter().map(|text| expected(&temp, (search, text), ids)).collect();
    let results = reply["results"].as_array().expect("results");
    let places = results.iter().map(|result| result["index"].as_u64().expect("an index") as usize);
    let mut order = [0, 1, 2, 3];
    order.sort_by(|&a, &b| wanted[b].1.total_cmp(&wanted[a].1));
    assert_eq!(places.collect::<Vec<_>>(), order, "{reply}");
    for (result, place) in results.iter().zip(order) {
        let score = result["relevance_score"].as_f64().expect("a score");
        assert!((score - wanted[place].1).abs() < 1e-12, "{result}, {:?}", wanted[place]);
        assert_eq!(result["document"]["text"], texts[place]);
    }
    let tokens: usize = wanted.iter().map(|wanted| wanted.0).sum();
    assert_eq!(reply["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    // Cached rows give the same bits.
    let short = server.post("/rerank", &with(&body, &json!({"top_n": 2, "return_documents": false}))).json();
    let bare: Vec<_> = results[..2]
        .iter()
        .map(|r| json!({"index": r["index"], "relevance_score": r["relevance_score"]}))
        .collect();
    assert_eq!(short["results"], json!(bare));
    assert!(!server.get("/metrics").body.contains("vllm:prefix_cache_hits_total{model_name=\"story\"} 0\n"));
    let told = with(&body, &json!({"instruction": "Find animals.", "documents": [texts[0]]}));
    let score = server.post("/v1/rerank", &told).json()["results"][0]["relevance_score"].clone();
    let wanted = expected(&temp, ("Find animals.", texts[0]), ids).1;
    assert!((score.as_f64().expect("a score") - wanted).abs() < 1e-12, "{score}, {wanted}");
    // A control token in a document stays text.
    let tokens = |document: &str| {
        server.post("/v1/rerank", &with(&told, &json!({"documents": [document]}))).json()["usage"]
            ["total_tokens"]
            .as_u64()
    };
    assert!(tokens("<|im_end|>") > tokens("a").map(|n| n + 3));

    let many = json!(vec!["a"; 1025]);
    for (fields, param, words) in [
        (json!({"documents": null}), "documents", "is null; use an array"),
        (json!({"documents": []}), "documents", "has 0 texts; use 1 to 1024"),
        (json!({"documents": many}), "documents", "has 1025 texts"),
        (json!({"documents": "a"}), "documents", "use an array"),
        (json!({"documents": ["a", 3]}), "documents[1]", "use a string, or an object with `text`"),
        (json!({"documents": ["a", "a dog ".repeat(2000)]}), "documents[1]", "exceeds the available context"),
        (json!({"query": 3}), "query", "is 3; use a string"),
        (json!({"query": null}), "query", "is null; use a string"),
        (json!({"top_n": 0}), "top_n", "use an integer from 1"),
        (json!({"return_documents": "yes"}), "return_documents", "use true or false"),
    ] {
        let error = server.post("/v1/rerank", &with(&body, &fields)).error();
        assert_eq!(error["param"], param, "{error}");
        mentions(error["message"].as_str().expect("a message"), &[words]);
    }
    let refused = Server::start(&[]).post("/v1/rerank", &body);
    assert_eq!((refused.status, &refused.error()["type"]), (501, &json!("not_supported_error")));
    mentions(&refused.body, &["no token", "yes", "Qwen3-Reranker"]);
}
