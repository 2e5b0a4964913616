//! `eval`: perplexity, rows of settings, eviction during prediction, and recall of facts.

use crate::support::command::*;
use antigravity::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use numeric::kv::{KvType, KvTypes};
use serde_json::{Value, json};

/// The lines of JSON that `eval` prints.
#[track_caller]
fn eval(args: &[&str]) -> Vec<Value> {
    let said = antigravity(["eval", "-q", "--format", "jsonl"]).args(args).text();
    said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn golden(name: &str) -> Value {
    let text = std::fs::read_to_string(model().join("golden").join(name)).expect("the reference");
    serde_json::from_str(&text).expect("JSON")
}

/// A file with the first held-out tokens.
fn tokens(temp: &TestDir, count: usize) -> String {
    let golden = golden("eval_tokens.json");
    let ids = &golden["tokens"].as_array().expect("ids")[..count];
    temp.write("tokens.json", Value::from(ids).to_string())
}

/// A file with the first questions about facts so far back, and those questions.
fn questions(temp: &TestDir, distance: u64, count: usize) -> (String, Vec<Value>) {
    let golden = golden("recall.json");
    let items = golden["items"].as_array().expect("questions").iter();
    let items: Vec<Value> = items.filter(|i| i["distance"] == distance).take(count).cloned().collect();
    assert_eq!(items.len(), count);
    (temp.write("recall.json", json!({"items": items}).to_string()), items)
}

fn slot_bytes(k: KvType, v: KvType) -> u64 {
    KvTypes { k, v }.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as u64
}

#[test]
fn each_row_of_a_sweep_equals_its_own_run() {
    let temp = TestDir::new();
    let file = tokens(&temp, 300);
    let given = ["--tokens", &file, "--chunk", "150", "--against", "kv=f32"];
    let rows = ["--settings", "kv=q4", "--settings", "k=q8,v=q4", "--settings", "kv=f32"];
    let rows = eval(&[&given[..], &rows].concat());
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[0], eval(&given)[0], "the flags say q4 too");
    assert_eq!(rows[1], eval(&[&given[..], &["-ctk", "q8", "-ctv", "q4"]].concat())[0]);
    assert_eq!((&rows[1]["settings"], &rows[1]["slots"]), (&"kv q8/q4, weights q4_0".into(), &150.into()));
    assert_eq!(rows[1]["bytes"], 150 * slot_bytes(KvType::Q8, KvType::Q4));
    let same = &rows[2]["against"];
    assert_eq!((&same["kl_divergence"], &same["same_top"]), (&0.0.into(), &1.0.into()));
    assert_eq!(rows[2]["perplexity"], same["perplexity"]);
    let said = antigravity(["eval"]).args(given).args(["--settings", "kv=f16", "--settings", "kv=q8"]).run();
    assert_eq!((said.code, said.out.lines().count()), (Some(0), 4), "{}{}", said.out, said.err);
}

#[test]
fn recall_answers_are_those_of_the_reference() {
    let temp = TestDir::new();
    let (file, items) = questions(&temp, 300, 8);
    let found = eval(&["--recall", &file, "--weight-type", "f32", "--kv-type", "f32"]);
    let correct = items.iter().filter(|i| i["correct_f32"] == true).count();
    assert!((1..8).contains(&correct), "some of either kind");
    let found = &found[0];
    assert_eq!((&found["t"], &found["settings"]), (&"recall".into(), &"kv f32, weights f32".into()));
    for (field, count) in [("asked", 8), ("correct", correct), ("full", correct), ("kept", correct)] {
        assert_eq!(found[field], count, "{field}");
        let groups = found["groups"].as_array().expect("groups");
        let sum: u64 = groups.iter().filter_map(|g| g[field].as_u64()).sum();
        assert_eq!((groups.len(), sum), (2, count as u64), "plain and chat: {field}");
    }
    // Prompts are as long as those of the reference, and all of them stays.
    let slots: u64 = items.iter().filter_map(|i| i["prompt_tokens"].as_u64()).sum();
    assert_eq!((&found["slots"], &found["slots_of_prompt"]), (&(slots as f64 / 8.0).into(), &1.0.into()));
    let bytes = slots * slot_bytes(KvType::F32, KvType::F32);
    assert_eq!(found["bytes"], bytes as f64 / 8.0);
}

#[test]
fn a_policy_holds_its_window() {
    let temp = TestDir::new();
    let file = tokens(&temp, 256);
    let given = ["--tokens", &file, "--chunk", "128", "--against", "kv=q4"];
    let sliding = ["--settings", "policy=sliding,window=50%", "--settings", "policy=sliding,window=256"];
    let found = eval(&[&given[..], &sliding].concat());
    assert_eq!((&found[0]["slots"], &found[1]["slots"]), (&72.into(), &128.into()));
    assert!(found[0]["against"]["kl_divergence"].as_f64().expect("a number") > 0.0);
    // A window that is never reached changes nothing.
    assert_eq!(found[1]["against"]["kl_divergence"], 0.0);

    // Four first tokens stay where no number is given, and the table says so.
    let prefixes = ["", ",prefix=4", ",prefix=0"].map(|prefix| format!("policy=sliding,window=32{prefix}"));
    let prefixes: Vec<&str> = prefixes.iter().flat_map(|row| ["--settings", row]).collect();
    let found = eval(&[&["--tokens", &file, "--chunk", "128"][..], &prefixes].concat());
    assert_eq!(found[0], found[1]);
    assert_ne!(found[0]["perplexity"], found[2]["perplexity"]);
    mentions(found[0]["settings"].as_str().expect("a text"), &["policy sliding 32 prefix 4"]);

    let (file, items) = questions(&temp, 300, 4);
    let rows = ["sliding", "snapkv", "h2o"].map(|policy| format!("policy={policy},window=25%,prefix=2"));
    let rows: Vec<&str> = rows.iter().flat_map(|row| ["--settings", row]).collect();
    let found = eval(&[&["--recall", &file][..], &rows].concat());
    let windows: u64 = items.iter().filter_map(|i| i["prompt_tokens"].as_u64()).map(|p| p / 4).sum();
    for row in &found {
        assert_eq!(row["slots"], windows as f64 / 4.0, "{row}");
    }
    let [sliding, snapkv] = [&found[0], &found[1]].map(|row| row["correct"].as_u64());
    assert!(
        sliding < snapkv,
        "facts stand at the beginning, and the question looks at them: {sliding:?} {snapkv:?}"
    );
}

#[test]
fn recall_files_and_flags_that_do_not_fit_are_refused() {
    let temp = TestDir::new();
    let broken = [
        ("", "EOF"),
        ("{}", "missing field `items`"),
        ("{\"items\": []}", "`items` is empty"),
        ("{\"items\": [{\"form\": \"plain\", \"distance\": 3, \"prompt\": \"x\"}]}", "`answer_ids`"),
        (
            "{\"items\": [{\"form\":\"\",\"distance\":3,\"prompt\":\"x\",\"answer_ids\":[],\"correct_f32\":true}]}",
            "item 0: `answer_ids` is empty",
        ),
        (
            "{\"items\": [{\"form\":\"\",\"distance\":3,\"prompt\":\"x\",\"answer_ids\":[9999999],\"correct_f32\":true}]}",
            "item 0: `answer_ids` has 9999999, but the vocabulary ends at ",
        ),
    ];
    for (text, words) in broken {
        let file = temp.write("recall.json", text);
        antigravity(["eval", "--recall", &file]).fails_with(2, &["--recall ", "recall.json: ", words]);
    }
    antigravity(["eval", "--recall", "/no/such/file"]).fails_with(2, &["--recall /no/such/file"]);
    let (file, _) = questions(&temp, 300, 1);
    for settings in ["window=half", "policy=lru", "prefix=x", "backend=abacus", "kv"] {
        let line = antigravity(["eval", "--recall", &file, "--settings", settings]).fails(2);
        mentions(&line, &[&format!("--settings {settings}: ")]);
    }
    let narrow =
        antigravity(["eval", "--recall", &file, "--settings", "policy=h2o,window=1%,prefix=8"]).fails(2);
    mentions(&narrow, &["policy h2o 1% prefix 8", "use a number from 10"]);
}

#[test]
fn perplexity_does_not_depend_on_where_tokens_come_from() {
    let file = model().join("golden/eval_tokens.json");
    let temp = TestDir::new();
    let plain = tokens(&temp, 1024);
    let eval = |args: &[&str]| eval(args).pop().expect("a line");
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
fn eval_prints_the_perplexity_of_a_text() {
    let temp = TestDir::new();
    let file = temp.write("text.txt", "Once upon a time there was a cat. ".repeat(20));
    let said = antigravity(["eval", "-f", &file, "--chunk", "64"]).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    mentions(&said.out, &["perplexity", "nats/token", "kv q4, weights q4_0"]);
    assert_eq!(said.out.lines().count(), 2);
    mentions(&said.err, &["chunks of up to 64 tokens"]);
    let said = antigravity(["eval", "-f", &file, "--against", "kv=f16"]).run();
    mentions(&said.out, &["kv f16, weights q4_0", "KL divergence", "same top token"]);
}
