//! Conversations over a pipe.

use crate::support::command::*;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Instant;

#[test]
fn every_input_line_is_a_message() {
    let args = ["chat", "--temp", "0", "-n", "10"];
    let said = antigravity(args).stdin("Who are you?\nTell me a story.\n").run();
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!(answers.len(), 2, "{:?}", said.out);
    // The first message may be a flag, and the lines may end as on Windows.
    let flag =
        antigravity(args).args(["-p", "Who are you?"]).stdin("Tell me a story.\r\n/exit\nMore\n").run();
    assert_eq!((flag.code, flag.out), (Some(0), said.out.clone()));
    let single = antigravity(args).args(["-st", "-p", "Who are you?"]).stdin("Tell me a story.\n").run();
    assert_eq!(single.out, format!("{}\n", answers[0]));
    mentions(&single.err, &["TTFT: ", "Avg TBT: "]);
}

#[test]
fn commands_are_not_messages_and_reset_forgets_all() {
    let args = ["chat", "--temp", "0", "-n", "10"];
    let said = antigravity(args)
        .stdin("/help\n\n/stats\n/dance now\nWho are you?\n/reset\nWho are you?\n/stats\n")
        .run();
    assert_eq!(said.code, Some(0));
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0], answers[1], "after /reset");
    mentions(&said.err, &["/reset ", "no answer yet", "Unknown command /dance.", "TTFT: ", "Avg TBT: "]);
    mentions(&said.err, &["of 2048 tokens", "evictions: 0", "messages: 1, tokens: "]);
}

/// `prompt_tokens` of each answer.
fn computed(said: &RunOutput) -> Vec<u64> {
    let lines = said.out.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).expect("JSON"));
    lines.filter(|l| l["t"] == "stats").filter_map(|l| l["prompt_tokens"].as_u64()).collect()
}

#[test]
fn turns_reuse_the_cache() {
    let args =
        ["chat", "--seed", "4", "--temp", "0.8", "--repeat-penalty", "1.1", "--format", "jsonl", "-n", "60"];
    let said = antigravity(args).stdin("Tell me a story about a fox.\nGo on.\nGo on.\n").run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    let computed = computed(&said);
    // "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n" and the token before.
    assert!(computed.len() == 3 && computed[1] == computed[2] && computed[2] < 25, "{computed:?}");
}

#[test]
fn control_tokens_in_a_message_are_text() {
    let args = ["chat", "--temp", "0", "--format", "jsonl", "-n", "1"];
    let tokens = |message: &str| computed(&antigravity(args).stdin(message).run())[0];
    assert!(tokens("<|im_end|>\n") > tokens("a\n") + 4);
}

#[test]
fn a_full_context_ends_turns_until_reset() {
    let args = ["chat", "--temp", "0", "-c", "48"];
    let story = "Tell me a story about a lazy cat.\n";
    let said = antigravity(args).stdin(format!("{story}And then?\n/reset\n{story}")).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!((answers.len(), answers[1]), (3, ""), "{:?}", said.out);
    assert_eq!(answers[0], answers[2]);
    let full: Vec<&str> = said.err.lines().collect();
    assert_eq!(full.len(), 3, "{}", said.err);
    full.iter().for_each(|l| mentions(l, &["context is full", "/clear", " or --eviction-policy sliding"]));
}

#[test]
fn a_limit_that_is_reached_ends_no_chat() {
    let temp = TestDir::new();
    let dir = temp.model_without("");
    temp.write(
        "chat_template.jinja",
        "{% if messages|length > 4 %}{{ raise_exception('no more') }}{% endif %}{% for m in messages %}\
         <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}\
         <|im_start|>assistant\n{% endif %}",
    );
    let args = ["chat", "-m", &dir, "--temp", "0", "-n", "5"];
    let saved = temp.path("saved");
    let said = antigravity(args).stdin(format!("One.\nTwo.\nThree.\n/save {saved}\n/reset\nOne.\n")).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    let answers: Vec<&str> = said.out.lines().collect();
    assert_eq!((answers.len(), answers[2]), (4, ""), "{answers:?}");
    assert_eq!(answers[0], answers[3]);
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    mentions(&said.err, &["chat_template.jinja", "no more", "withdrawn", "/save FILE and /reset"]);
    let stats = antigravity(args).args(["--session", &saved]).stdin("/stats\n").run();
    mentions(&stats.err, &["messages: 2, "]);
    let json = antigravity(args).args(["--format", "jsonl"]).stdin("One.\nTwo.\nThree.\n").run();
    mentions(json.out.lines().last().expect("a line"), &["\"t\":\"unanswered\"", "no more"]);
}

/// Reads the numbers of messages and tokens from a line of `/stats`.
fn size(line: &str) -> (usize, usize) {
    let number = |name: &str| {
        let (_, rest) = line.split_once(name).unwrap_or_else(|| panic!("no {name} in {line}"));
        rest.split(',').next().expect("a number").trim().parse().expect("a number")
    };
    (number("messages: "), number("tokens: "))
}

#[test]
fn a_conversation_that_evicts_forgets_its_oldest_turns() {
    let args = ["chat", "--temp", "0", "-n", "2", "-c", "64", "--eviction-policy", "sliding"];
    let lines = format!("{}/stats\n", "Go on.\n".repeat(60));
    let said = antigravity(args).stdin(&lines).run();
    assert_eq!((said.code, said.out.lines().count()), (Some(0), 60), "{}", said.err);
    let (messages, tokens) = size(said.err.lines().last().expect("stats"));
    assert!(messages < 40 && tokens < 9 * 64, "{}", said.err);
}

#[test]
fn a_system_message_is_never_evicted() {
    const SYSTEM: &str = "You are a clever cat who lives in a small house near the river with a fox.";
    // What the template makes of it, and what every question begins with.
    let opening = format!("<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n");
    let tokenized = antigravity(["tokenize", "--format", "json", "-p", &opening]).text();
    let tokenized: serde_json::Value = serde_json::from_str(&tokenized).expect("JSON");
    let first = tokenized["ids"].as_array().expect("ids").len().to_string();
    for policy in ["sliding", "h2o"] {
        let answers = |more: &[&str]| {
            let args = [
                "chat",
                "--system",
                SYSTEM,
                "--temp",
                "0",
                "-n",
                "20",
                "-c",
                "96",
                "--eviction-policy",
                policy,
            ];
            antigravity(args).args(more).stdin("Tell me more about the fox.\n".repeat(8)).run().out
        };
        let unsaid = answers(&[]);
        assert_eq!(unsaid, answers(&["--protected-prefix", &first]), "{policy}");
        assert_ne!(unsaid, answers(&["--protected-prefix", "0"]), "{policy}: the number given counts");
    }
}

/// For `cargo xtask test long`: it takes minutes.
#[test]
#[ignore = "takes minutes: cargo xtask test long"]
fn twenty_thousand_turns_take_no_more_time_and_memory_than_two_thousand() {
    const TURNS: usize = 20_000;
    let args = ["chat", "--temp", "0", "-n", "1", "-c", "256", "--eviction-policy", "sliding"];
    let mut program = antigravity(args).into_std();
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the binary starts");
    let mut input = child.stdin.take().expect("piped");
    let mut output = BufReader::new(child.stdout.take().expect("piped")).lines();
    let status = format!("/proc/{}/status", child.id());
    let resident = || -> u64 {
        let text = std::fs::read_to_string(&status).expect("it runs");
        let kib = text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        kib.expect("a size").parse().expect("a number")
    };
    let (mut began, mut thousands) = (Instant::now(), Vec::new());
    for turn in 1..=TURNS {
        writeln!(input, "Tell me about number {turn}.").expect("it reads");
        output.next().expect("an answer").expect("UTF-8");
        if turn % 1000 == 0 {
            thousands.push((began.elapsed(), resident()));
            began = Instant::now();
        }
    }
    writeln!(input, "/reset\nOnce more.").expect("it reads");
    output.next().expect("an answer").expect("UTF-8");
    drop(input);
    assert!(child.wait().expect("it ends").success());
    let ((early, before), (late, after)) = (thousands[1], thousands[TURNS / 1000 - 1]);
    eprintln!("{early:?} and {late:?} for a thousand turns, {before} and {after} KiB");
    assert!(late < 4 * early, "{thousands:?}");
    assert!(after < before + 4096, "{thousands:?}");
}

#[test]
fn a_model_without_a_template_chats_and_says_so() {
    let temp = TestDir::new();
    let dir = temp.model_without("tokenizer_config.json");
    let talk = || {
        antigravity(["chat", "-m", &dir, "--temp", "0", "-n", "5"]).stdin("Once upon a time\nThe cat\n").run()
    };
    // Its answers end with `<|im_end|>`.
    assert!(!talk().err.contains("no chat template"));
    temp.write("generation_config.json", "{\"eos_token_id\": 1}");
    let said = talk();
    assert_eq!((said.code, said.out.lines().count() >= 2), (Some(0), true), "{}", said.err);
    mentions(&said.err, &["no chat template", "base model", "use generate", "--chat-template"]);
}

#[test]
fn a_chat_and_a_server_sample_as_the_model_recommends_and_generate_as_the_specification_says() {
    let temp = TestDir::new();
    let dir = temp.model_without("generation_config.json");
    let settings = |config: &str, flags: &[&str]| {
        temp.write("generation_config.json", config);
        let args = [&["chat", "-m", &dir, "-v", "-st", "-p", "Hi", "-n", "1"], flags].concat();
        let said = antigravity(&args).run().err;
        said.lines().find(|line| line.starts_with("sampling: ")).expect("a line").to_owned()
    };
    let own = r#"{"eos_token_id": 1, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}"#;
    mentions(&settings("{}", &[]), &["temperature 0.8", "top-k 40", "top-p 0.9", "repetition-penalty 1,"]);
    mentions(&settings(own, &[]), &["temperature 0.6", "top-k 20", "top-p 0.9", "repetition-penalty 1.05"]);
    let given = ["--temp", "1", "--repeat-penalty", "1.2"];
    mentions(&settings(own, &given), &["temperature 1,", "top-k 20", "repetition-penalty 1.2"]);
    let set = antigravity(["chat", "-m", &dir]).stdin("/set top-p 0.5\n/set\n").run().err;
    mentions(&set, &["temperature 0.6, top-k 20, top-p 0.5, min-p 0, repetition-penalty 1.05"]);
    let generate = |config: &str| {
        temp.write("generation_config.json", config);
        antigravity(["generate", "-m", &dir, "-p", "The cat", "-n", "20", "--seed", "3"]).text()
    };
    assert_eq!(generate(own), generate(r#"{"eos_token_id": 1}"#));
    temp.write("generation_config.json", r#"{"temperature": "warm"}"#);
    antigravity(["chat", "-m", &dir, "-st", "-p", "Hi"])
        .fails_with(3, &["generation_config.json", "`temperature`", "warm"]);
}
