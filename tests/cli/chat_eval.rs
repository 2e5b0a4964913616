//! Conversations over a pipe, and perplexities.

use crate::bed::program::*;

#[test]
fn every_line_is_a_turn() {
    let args = ["chat", "--temp", "0", "-n", "10"];
    let said = run_with(&args, "Who are you?\nTell me a story.\n");
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!(answers.len(), 2, "{:?}", said.out);
    // The first message may be a flag, and the lines may end as on Windows.
    let flag = run_with(&[&args[..], &["-p", "Who are you?"]].concat(), "Tell me a story.\r\n/exit\nMore\n");
    assert_eq!((flag.code, flag.out), (Some(0), said.out.clone()));
    let single = run_with(&[&args[..], &["-st", "-p", "Who are you?"]].concat(), "Tell me a story.\n");
    assert_eq!(single.out, format!("{}\n", answers[0]));
    mentions(&single.err, &["TTFT: ", "Avg TBT: "]);
}

#[test]
fn commands() {
    let args = ["chat", "--temp", "0", "-n", "10"];
    let said = run_with(&args, "/help\n\n/stats\n/dance now\nWho are you?\n/reset\nWho are you?\n/stats\n");
    assert_eq!(said.code, Some(0));
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0], answers[1], "after /reset");
    mentions(&said.err, &["/reset ", "no answer yet", "/dance: no such command", "TTFT: ", "Avg TBT: "]);
    mentions(&said.err, &["of 2048 slots", "evictions: 0", "messages: 1, tokens: "]);
}

/// `prompt_tokens` of each answer.
fn computed(said: &Said) -> Vec<u64> {
    let lines = said.out.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).expect("JSON"));
    lines.filter(|l| l["t"] == "stats").filter_map(|l| l["prompt_tokens"].as_u64()).collect()
}

#[test]
fn turns_reuse_the_cache() {
    let args = ["chat", "--seed", "4", "--format", "jsonl", "-n", "60"];
    let said = run_with(&args, "Tell me a story about a fox.\nGo on.\nGo on.\n");
    assert_eq!(said.code, Some(0), "{}", said.err);
    let computed = computed(&said);
    // "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n" and the token before.
    assert!(computed.len() == 3 && computed[1] == computed[2] && computed[2] < 25, "{computed:?}");
}

#[test]
fn control_tokens_in_a_message_are_text() {
    let args = ["chat", "--temp", "0", "--format", "jsonl", "-n", "1"];
    let tokens = |message: &str| computed(&run_with(&args, message))[0];
    assert!(tokens("<|im_end|>\n") > tokens("a\n") + 4);
}

#[test]
fn full_context() {
    let args = ["chat", "--temp", "0", "-c", "48"];
    let story = "Tell me a story about a lazy cat.\n";
    let said = run_with(&args, &format!("{story}And then?\n/reset\n{story}"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!((answers.len(), answers[1]), (3, ""), "{:?}", said.out);
    assert_eq!(answers[0], answers[2]);
    let full: Vec<&str> = said.err.lines().collect();
    assert_eq!(full.len(), 3, "{}", said.err);
    full.iter().for_each(|l| mentions(l, &["stop: context", "/reset"]));
}

#[test]
fn models_without_a_template() {
    let temp = Temp::new();
    let dir = temp.model_without("tokenizer_config.json");
    let talk = || run_with(&["chat", "-m", &dir, "--temp", "0", "-n", "5"], "Once upon a time\nThe cat\n");
    // Its answers end with `<|im_end|>`.
    assert!(!talk().err.contains("no chat template"));
    temp.write("generation_config.json", "{\"eos_token_id\": 1}");
    let said = talk();
    assert_eq!((said.code, said.out.lines().count() >= 2), (Some(0), true), "{}", said.err);
    mentions(&said.err, &["no chat template"]);
}

#[test]
fn perplexity_of_the_reference_tokens() {
    let file = model().join("golden/eval_tokens.json");
    let golden = std::fs::read_to_string(&file).expect("the reference");
    let golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    let tokens: Vec<u64> =
        golden["tokens"].as_array().expect("ids").iter().filter_map(|t| t.as_u64()).collect();
    let temp = Temp::new();
    let plain = temp.write("tokens.json", format!("{:?}", &tokens[..1024]));
    let eval = |args: &[&str]| -> serde_json::Value {
        let said = text(&[&["eval", "-q", "--format", "jsonl"], args].concat());
        serde_json::from_str(&said).expect("JSON")
    };
    let path = file.to_str().expect("UTF-8");
    let chunked = eval(&["--tokens", path, "--limit", "2", "--kv-type", "f32"]);
    assert_eq!((&chunked["chunk"], &chunked["tokens"]), (&512.into(), &1022.into()));
    assert_eq!(chunked, eval(&["--tokens", &plain, "--kv-type", "f32"]));
    let ppl = chunked["perplexity"].as_f64().expect("a number");
    assert!((1.3..1.8).contains(&ppl), "{ppl}");
    // Against itself nothing differs.
    let short = ["--tokens", &plain, "--chunk", "96", "--limit", "1"];
    let same = eval(&[&short[..], &["--against", "kv=q4"]].concat());
    assert_eq!((&same["against"]["kl_divergence"], &same["against"]["same_top"]), (&0.0.into(), &1.0.into()));
    let other = eval(&[&short[..], &["--against", "kv=f32,weights=f32"]].concat());
    let kl = other["against"]["kl_divergence"].as_f64().expect("a number");
    assert!(kl > 0.0 && kl < 0.1, "{kl}");
    assert_ne!(other["perplexity"], other["against"]["perplexity"]);
}

#[test]
fn perplexity_of_a_text() {
    let temp = Temp::new();
    let file = temp.write("text.txt", "Once upon a time there was a cat. ".repeat(20));
    let said = run(&["eval", "-f", &file, "--chunk", "64"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    mentions(&said.out, &["perplexity", "nats/token", "kv q4, weights q4_0"]);
    assert_eq!(said.out.lines().count(), 2);
    mentions(&said.err, &["chunks of 64 tokens"]);
    let said = run(&["eval", "-f", &file, "--against", "kv=f16"]);
    mentions(&said.out, &["kv f16, weights q4_0", "KL divergence", "same top token"]);
}
