//! Command lines of users of llama.cpp, and typing mistakes.

use crate::support::command::*;
use crate::support::paths;
use crate::support::test_dir::TestDir;

#[allow(dead_code, reason = "main is what xtask runs")]
#[path = "../../xtask/completions.rs"]
mod completions;

const ONCE: [&str; 6] = ["-p", "Once upon a time", "-n", "12", "--temp", "0"];

#[test]
fn flags_without_a_command_mean_generate() {
    assert_eq!(antigravity(ONCE).run().text(), greedy().text());
    let talks = antigravity(["-cnv", "-st", "-p", "Who are you?", "-n", "9", "--temp", "0"]).run();
    assert_eq!(
        talks.out,
        antigravity(["chat", "-st", "-p", "Who are you?", "-n", "9", "--temp", "0"]).text()
    );
    assert_eq!(antigravity(["-sys", "Be brief.", "-st", "-p", "Hi", "-n", "2"]).run().code, Some(0));
    antigravity(["generate", "-cnv", "-p", "x"]).fails_with(2, &["-cnv", "antigravity chat"]);
    antigravity(["generate", "--system", "x"]).fails_with(2, &["--system", "antigravity chat"]);
    antigravity(["chat", "-no-cnv"]).fails_with(2, &["-no-cnv", "antigravity generate"]);
}

#[test]
fn flags_may_come_before_the_command() {
    let model = model().display().to_string();
    let words = ["-p", "Who are you?", "-n", "9", "--temp", "0"];
    let chat = antigravity(["chat", "-st"]).args(words).text();
    assert_eq!(antigravity(["-m", &model, "-st", "chat"]).args(words).text(), chat);
    assert_eq!(antigravity(words).args(["chat", "-st"]).text(), chat);
    assert_eq!(
        antigravity(["-m", &model, "tokenize", "Hello"]).text(),
        antigravity(["tokenize", "Hello"]).text()
    );
    // A value is no command.
    assert_eq!(antigravity(["-n", "2", "--temp", "0", "-p", "chat"]).run().code, Some(0));
    antigravity(["-n", "2", "dance"]).fails_with(2, &["dance"]);
}

#[test]
fn inspect_says_of_a_lone_config_whether_a_program_can_run_it() {
    let temp = TestDir::new();
    let write = |text: &str| temp.write("config.json", text);
    let models = paths::root().join("models/gemma4-e2b");
    for path in [models.clone(), models.join("config.json")] {
        let said = antigravity(["inspect", &path.to_string_lossy()]).text();
        assert_eq!(said, antigravity(["inspect", "-m", &path.to_string_lossy()]).text());
        assert!(said.contains("gemma4_text, 35 layers"), "{said}");
        assert!(said.contains("a program built for it can run it; this one cannot: model_type is"), "{said}");
    }
    for (text, field) in [("{\"model_type\": \"x\"}", "`model_type` is \"x\""), ("[]", "not a JSON object")] {
        let said = antigravity(["inspect", &write(text)]).text();
        assert!(said.contains("no program can run it") && said.contains(field), "{said}");
    }
}

#[test]
fn run_is_chat_as_in_ollama() {
    let few = ["-n", "9", "--temp", "0"];
    let chat = antigravity(["chat", "-st", "-p", "Who are you?"]).args(few).text();
    for words in
        [&["run", "Who are you?"][..], &["run", "story", "Who", "are", "you?"], &["chat", "Who are", "you?"]]
    {
        assert_eq!(antigravity(words).args(few).text(), chat, "{words:?}");
    }
    let talk = antigravity(["run", "story"]).args(few).stdin("Who are you?\nGo on.\n").run();
    assert_eq!((talk.code, talk.out.lines().count()), (Some(0), 2), "{}", talk.err);
    for name in ["llama3.2", "qwen3:0.6b", "Qwen/Qwen3-0.6B"] {
        antigravity(["run", name, "Hi"]).fails_with(2, &[name, "runs story", "cargo build --release"]);
    }
    antigravity(["run", "Hi", "-p", "Hi"]).fails(2);
}

#[test]
fn list_shows_the_model_and_its_files() {
    let said = antigravity(["list"]).text();
    mentions(&said, &["story: llama, 6 layers", "model.safetensors", "  weights\n", "tokenizer.json"]);
    let json: serde_json::Value =
        serde_json::from_str(&antigravity(["list", "--format", "json"]).text()).expect("JSON");
    assert_eq!(
        (&json["model"], json["files"].as_array().map(Vec::len)),
        (&"story".into(), Some(5)),
        "{json}"
    );
    // The packed file is used in place of the other.
    let temp = TestDir::new();
    let dir = temp.model_without("");
    antigravity(["pack", "-q", "-m", &dir]).text();
    let packed = antigravity(["list", "-m", &dir]).text();
    mentions(&packed, &["model.safetensors  "]);
    let weights = |name: &str| packed.lines().find(|line| line.contains(name)).expect("a line").to_owned();
    assert!(weights(" model.safetensors").ends_with("weights, not used"), "{packed}");
    assert!(weights("packed.safetensors").ends_with("  weights"), "{packed}");
    antigravity(["list", "-m", "/no/such"]).fails_with(3, &["/no/such"]);
}

#[test]
fn a_model_that_the_program_is_not_built_for_is_told() {
    let named = |name: &str| antigravity(["tokenize", "Hi"]).env("ANTIGRAVITY_MODEL", name).run();
    for other in ["gpt2", "Qwen/Qwen3-0.6B", "models/none.gguf"] {
        let said = named(other);
        assert_eq!((said.code, said.err.lines().count()), (Some(0), 1), "{}", said.err);
        let build = format!("ANTIGRAVITY_MODEL={other} cargo build --release");
        mentions(&said.err, &["warning: ", "built for story", &build]);
    }
    for same in ["story", "models/story", ""] {
        assert_eq!(named(same).err, "", "{same}");
    }
}

#[test]
fn far_more_threads_than_cores_are_a_mistake() {
    let most = 4 * numeric::topology::allowed_cores().len();
    for command in ["generate", "bench"] {
        let words = [command, "-t", &(most + 1).to_string()];
        antigravity(words).fails_with(2, &[&format!("--threads {}: ", most + 1), &format!("1 to {most}")]);
    }
    assert_eq!(antigravity(ONCE).args(["-t", &most.to_string()]).run().text(), greedy().text());
}

#[test]
fn a_prompt_that_is_too_long_is_refused_before_the_weights_are_loaded() {
    // Their memory is checked just before.
    let run = |prompt: &str, more: &[&str]| {
        antigravity(["generate", "-p", prompt, "-c", "100"]).args(more).env("ANTIGRAVITY_MEMORY_MIB", "20")
    };
    run("Once", &[]).fails(4);
    run(&"cat dog ".repeat(60), &[]).fails_with(2, &["the prompt needs 1", "has 100", "--max-seq-len"]);
    run(&"cat dog ".repeat(9000), &[]).fails_with(2, &["the prompt needs at least", "--eviction-policy"]);
    run(&"cat dog ".repeat(60), &["--eviction-policy", "sliding", "--eviction-window", "50"]).fails(4);
}

#[test]
fn help_and_version_are_commands() {
    assert_eq!(antigravity(["help"]).text(), antigravity(["--help"]).text());
    assert_eq!(antigravity(["help", "plan"]).text(), antigravity(["plan", "--help"]).text());
    assert_eq!(antigravity(["version"]).text(), antigravity(["--version"]).text());
    antigravity(["help", "dance"]).fails_with(2, &["dance"]);
}

#[test]
fn what_is_mistyped_gets_the_likeliest_name_and_where_help_is() {
    for (args, words) in [
        (&["generat"][..], ["generat", "did you mean generate?", "antigravity --help"]),
        (
            &["generate", "--temperatur", "1"],
            ["--temperatur", "did you mean --temperature?", "generate --help"],
        ),
        (&["--promt", "x"], ["--promt", "did you mean --prompt?", "generate --help"]),
        (&["bench", "--n-promt", "1"], ["--n-promt", "did you mean --n-prompt?", "bench --help"]),
        (&["generate", "--backend", "openc"], ["openc", "did you mean opencl?", "hybrid"]),
        (&["dance"], ["unrecognized", "dance", "see antigravity --help"]),
    ] {
        antigravity(args).fails_with(2, &words);
    }
}

#[test]
fn negative_numbers_are_values() {
    let said = antigravity(["-p", "The cat", "-n", "4", "--seed", "-1", "--top-k", "-1"]).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    mentions(&said.err, &["seed: "]);
    let with = |k| {
        antigravity(["generate", "-p", "The cat", "-n", "24", "--seed", "7", "--temp", "1.2", "--top-k", k])
            .text()
    };
    assert_eq!(with("-1"), with("0"));
    antigravity(["-p", "x", "-n", "-5"]).fails_with(2, &["--num-tokens -5"]);
}

#[test]
fn spellings_of_llama_cpp_are_followed_or_named() {
    let reference = greedy().text();
    for same in [
        &["-ngl", "0"][..],
        &["-fa"],
        &["-fa", "on"],
        &["--n_predict", "12"],
        &["-no-cnv"],
        &["--jinja"],
        &["-ctk", "q4", "-ctv", "q4"],
        &["--repeat_penalty", "1.1"],
    ] {
        let n: &[&str] = if same[0] == "--n_predict" { &[] } else { &["-n", "12"] };
        let args = [&["-p", "Once upon a time", "--temp", "0"], n, same].concat();
        let said = antigravity(&args).run();
        assert_eq!((said.code, said.text()), (Some(0), reference.as_str()), "{args:?}: {}", said.err);
    }
    let lines = antigravity(ONCE).args(["--json"]).run().out;
    assert!(lines.lines().all(|line| line.starts_with('{')) && lines.lines().count() > 12, "{lines}");
    assert!(antigravity(["plan", "--json"]).text().starts_with('{'));
    let escaped = ["generate", "-n", "4", "--temp", "0", "-e", "-p", "a\\nb\\\\\\q"];
    assert_eq!(
        antigravity(escaped).text(),
        antigravity(["generate", "-n", "4", "--temp", "0", "-p", "a\nb\\\\q"]).text()
    );
    for (args, words) in [
        (&["-ngl", "x"][..], ["--gpu-layers x", "a number, all or auto"]),
        (&["-ngl", "2", "--backend", "hybrid"], ["--gpu-layers", "--backend hybrid"]),
        (&["--split", "cl:0=1"], ["--split", "layers"]),
        (&["-cmoe"], ["--cpu-moe", "no experts"]),
        (&["-ncmoe", "3"], ["-ncmoe", "--cpu-moe"]),
        (&["-ts", "3,1"], ["-ts", "--split"]),
        (&["-fa", "off"], ["-fa", "remove the flag"]),
        (&["-md", "small.gguf"], ["--draft-model small.gguf", "give another antigravity program"]),
        (&["--mlock"], ["--mlock", "antigravity pack"]),
        (&["-hf", "no-such/model"], ["no-such/model", "hf download no-such/model"]),
    ] {
        let code = if args[0] == "-hf" { 3 } else { 2 };
        antigravity(ONCE).args(args).fails_with(code, &words);
    }
}

#[test]
fn a_value_that_looks_like_a_flag_stays_a_value() {
    for value in ["-st", "-ngl", "--json", "-cnv", "--repeat_penalty"] {
        let said = antigravity(["-n", "3", "--temp", "0", "-p", value]).run();
        assert_eq!(said.code, Some(0), "{value}: {}", said.err);
        assert_eq!(said.out, antigravity(["-n", "3", "--temp", "0", "-f", "-"]).stdin(value).run().out);
    }
}

#[test]
fn a_flag_without_effect_gets_a_warning() {
    let many = (numeric::topology::allowed_cores().len() + 1).to_string();
    let named = format!("--threads {many}");
    for (flags, words) in [
        (&["--gpu-attn"][..], ["--gpu-attn", "--backend opencl"]),
        (&["--switch-threshold", "9"], ["--switch-threshold", "--backend hybrid"]),
        (&["--eviction-window", "9"], ["--eviction-window", "--eviction-policy"]),
        (&["--seed", "3"], ["--seed", "--temperature 0"]),
        (&["--batch", "3"], ["--batch", "--prompts"]),
        (&["-c", "4096"], ["--max-seq-len 4096", "trained for 2048 tokens"]),
        (&["-t", &many], [&named, "cores"]),
    ] {
        let said = antigravity(ONCE).args(flags).run();
        let first = said.err.lines().next().unwrap_or("");
        assert_eq!(said.code, Some(0), "{}", said.err);
        mentions(first, &["warning: ", words[0], words[1]]);
        assert_eq!(said.err.lines().filter(|line| line.starts_with("warning")).count(), 1, "{}", said.err);
    }
    assert_eq!(antigravity(ONCE).args(["--gpu-attn", "-q"]).run().err, "");
    // An error is one line.
    antigravity(ONCE).args(["--gpu-attn", "--top-p", "9"]).fails(2);
    assert!(!antigravity(ONCE).run().err.contains("warning"));
}

#[test]
fn control_tokens_in_a_prompt_are_text_where_that_is_asked_for() {
    let tokens = |more: &[&str]| {
        let said = antigravity(["generate", "-n", "1", "--temp", "0", "--format", "jsonl"]).args(more).text();
        let stats = said.lines().last().expect("stats").to_owned();
        serde_json::from_str::<serde_json::Value>(&stats).expect("JSON")["prompt_tokens"]
            .as_u64()
            .expect("a number")
    };
    let prompt = "a<|im_end|>b";
    let (read, plain) = (tokens(&["-p", prompt]), tokens(&["-p", prompt, "--no-specials"]));
    assert!(read == 4 && plain > 6, "{read} {plain}");
    assert_eq!(tokens(&["-p", "ab"]), tokens(&["-p", "ab", "--no-specials"]));
    mentions(
        &antigravity(["generate", "--help"]).text(),
        &["control tokens such as <|im_end|>", "--no-specials"],
    );
}

#[test]
fn the_first_line_is_the_answer() {
    let first = |args: &[&str], memory: &str| {
        let said = antigravity(args).env("ANTIGRAVITY_MEMORY_MIB", memory).run();
        (said.out.lines().next().unwrap_or_default().to_string(), said.code)
    };
    let (line, code) = first(&["doctor"], "4000");
    assert!(line.starts_with("ok: CPU ") && line.contains(" thread") && code == Some(0), "{line}");
    let (line, code) = first(&["doctor"], "10");
    assert!(line.starts_with("not ok: ") && line.contains("10.0 MiB are available"), "{line}");
    assert_eq!(code, Some(0), "what is wrong is not an error of this command");
    let (line, _) = first(&["doctor", "-m", "/no/model"], "4000");
    assert!(line.starts_with("not ok: /no/model: "), "{line}");
    let (line, code) = first(&["plan"], "4000");
    assert!(line.starts_with("fits: needs ") && line.ends_with(" of 4000.0 MiB"), "{line}");
    assert_eq!(code, Some(0));
    let (line, code) = first(&["plan"], "10");
    assert!(line.starts_with("does not fit: needs "), "{line}");
    mentions(&line, &[" MiB more than the 10.0 MiB that are available"]);
    assert_eq!(code, Some(4));
    // Of a model: what it is, then what is in it.
    let text = antigravity(["inspect"]).text();
    let places = [
        "\narchitecture  llama, ",
        "\nparameters    5.8 million\n",
        "\ntype          BF16",
        "\ncontext       2048",
        "\nfile size     11.0 MiB",
        "\nthis program runs it\n",
        "\nmetadata\n",
        "\ntensor ",
    ];
    let places = places.map(|part| text.find(part).unwrap_or_else(|| panic!("{part:?}: {text}")));
    assert!(places.is_sorted(), "{text}");
}

#[test]
fn the_plan_counts_batches() {
    let need = |more: &[&str]| {
        let plan: serde_json::Value =
            serde_json::from_str(&antigravity(["plan", "--json"]).args(more).text()).expect("JSON");
        plan["need_bytes"].as_u64().expect("a number")
    };
    assert!(need(&["--batch", "4"]) > need(&["-p", "x", "-n", "9"]));
    let temp = TestDir::new();
    let file = temp.write("prompts.jsonl", "\"a\"\n\"b\"\n");
    assert_eq!(need(&["--prompts", &file]), need(&["--batch", "2"]));
}

#[test]
fn help_comes_in_groups_with_examples_first() {
    let top = antigravity(["--help"]).text();
    let commands = top.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    for command in commands.filter_map(|l| l.split_whitespace().next()) {
        let help = antigravity([command, "--help"]).text();
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{command}: {help}");
        if !["help", "version"].contains(&command) {
            let lines: Vec<&str> = help.lines().collect();
            assert_eq!(lines[0], "Examples:", "{command}");
            assert!(
                lines[1..3].iter().all(|l| l.starts_with("  antigravity ")) && lines[3].is_empty(),
                "{command}"
            );
        }
    }
    for command in ["generate", "chat"] {
        let help = antigravity([command, "--help"]).text();
        for group in ["Prompt", "Output", "Sampling", "Model", "Device", "Cache"] {
            assert_eq!(
                help.lines().filter(|l| *l == format!("{group}:")).count(),
                1,
                "{command} {group}: {help}"
            );
        }
        let loose = help.lines().skip_while(|l| *l != "Options:").skip(1).take_while(|l| !l.is_empty());
        assert_eq!(loose.count(), 1, "{help}");
    }
}

#[test]
fn a_model_in_the_cache_of_hugging_face_has_a_name() {
    let temp = TestDir::new();
    let folder = temp.0.join("hub/models--some--story");
    let snapshot = folder.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).expect("a folder");
    std::fs::create_dir_all(folder.join("snapshots/4567")).expect("an older one");
    std::fs::create_dir_all(folder.join("refs")).expect("a folder");
    std::fs::write(folder.join("refs/main"), "0123").expect("written");
    for entry in std::fs::read_dir(model()).expect("the model").flatten() {
        std::os::unix::fs::symlink(entry.path(), snapshot.join(entry.file_name())).expect("a link");
    }
    let reference = greedy().text();
    let from = |name: &str| antigravity(ONCE).args(["-hf", name]).env("HF_HOME", &temp.0).run();
    assert_eq!(from("some/story").text(), reference);
    assert_eq!(from(folder.to_str().expect("UTF-8")).text(), reference);
    let missing = from("some/poem");
    assert_eq!(missing.code, Some(3));
    mentions(&missing.err, &["some/poem", "models--some--poem", "hf download some/poem"]);
}

#[test]
fn completions_and_the_manual_know_every_command_and_flag() {
    let temp = TestDir::new();
    completions::write_completions(&temp.0).expect("written");
    let read = |name: &str| std::fs::read_to_string(temp.0.join(name)).expect(name);
    for name in ["antigravity.bash", "antigravity.fish", "_antigravity"] {
        mentions(&read(name), &["generate", "chat", "doctor", "kv-type", "eviction-policy"]);
    }
    mentions(&read("man1/antigravity.1"), &["antigravity\\-generate", "antigravity\\-chat"]);
    mentions(&read("man1/antigravity-generate.1"), &["\\-\\-temperature", "\\-\\-no\\-specials"]);
}

#[test]
fn a_small_stack_is_enough() {
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "ulimit -s 128; exec \"$@\"", "sh"]).arg(binary()).arg("generate").args(ONCE);
    assert_eq!(run_command(shell).text(), greedy().text());
}

/// Windows' editors begin a text file with a byte order mark.
#[test]
fn a_byte_order_mark_is_no_part_of_a_text() {
    const MARK: &str = "\u{feff}";
    let temp = TestDir::new();
    let template = temp.write(
        "plain.jinja",
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}",
    );
    let few = ["-n", "3", "--temp", "0"];
    let chat = ["chat", "--single-turn", "-p", "Once"];
    let mut cases: Vec<(&str, Vec<&str>)> = vec![
        ("the cat", vec!["tokenize", "-f"]),
        ("Once upon", [&["generate"][..], &few, &["--prompt-file"]].concat()),
        ("\"Once upon\"\n", [&["generate"][..], &few, &["--prompts"]].concat()),
        ("Hi {{ messages[0].content }}", [&chat[..], &few, &["--chat-template"]].concat()),
        (
            r#"[{"type": "function", "function": {"name": "f"}}]"#,
            [&chat[..], &few, &["--chat-template", &template, "--tools"]].concat(),
        ),
        ("[1, 2, 3, 4, 5, 6]", vec!["eval", "--format", "json", "--tokens"]),
    ];
    if cfg!(feature = "grammar") {
        cases.push((
            r#"{"enum": ["a", "b"]}"#,
            [&["generate", "-p", "x"][..], &few, &["--json-schema"]].concat(),
        ));
        cases.push((r#"root ::= "ab""#, [&["generate", "-p", "x"][..], &few, &["--grammar"]].concat()));
    }
    for (content, args) in cases {
        let [plain, marked] = ["", MARK].map(|mark| {
            let file = temp.write("text", format!("{mark}{content}"));
            let said = antigravity(&args).args([&file]).run();
            assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
            said.out
        });
        assert_eq!(plain, marked, "{args:?}");
    }
    let cat = antigravity(["tokenize", "-p", "the cat"]).text();
    assert_eq!(antigravity(["tokenize"]).stdin(format!("{MARK}the cat")).run().out, cat);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let content = std::fs::read_to_string(model().join(name)).expect("bundled");
        temp.write(name, format!("{MARK}{content}"));
    }
    assert_eq!(antigravity(["tokenize", "-m", &temp.0.display().to_string(), "-p", "the cat"]).text(), cat);
}
