//! One line on stderr, nothing on stdout, and the exit code of the class.

use crate::support::command::*;
use crate::support::hostile;

#[test]
fn unknown_flags_are_named() {
    antigravity(["generate", "--foo"]).fails_with(2, &["--foo"]);
    antigravity(["generate", "--temperatur", "1"]).fails_with(2, &["--temperatur"]);
    antigravity(["dance"]).fails_with(2, &["dance"]);
    antigravity([""; 0]).fails_with(2, &["command", "--help"]);
    antigravity(["logits"]).fails_with(2, &["--tokens", "--out"]);
    antigravity(["generate", "-n"]).fails_with(2, &["--num-tokens"]);
}

#[test]
#[cfg(not(feature = "grammar"))]
fn grammars_need_their_feature() {
    for flag in ["--grammar", "--json-schema"] {
        antigravity(["generate", "-p", "x", flag, "{}"]).fails_with(2, &[flag, "--features grammar"]);
    }
}

#[test]
fn numbers_out_of_range_are_named() {
    let bad: &[(&str, &[&str])] = &[
        ("--num-tokens", &["x", "-2", "nan", "1.5", "99999999999999999999"]),
        ("--temperature", &["x", "nan", "-1", "inf"]),
        ("--top-p", &["nan", "-0.1", "1.1", "x"]),
        ("--top-k", &["-2", "x", "nan"]),
        ("--min-p", &["nan", "-1", "2"]),
        ("--repetition-penalty", &["nan", "0", "-1", "inf"]),
        ("--repetition-window", &["-1", "x"]),
        ("--presence-penalty", &["nan", "inf", "x"]),
        ("--frequency-penalty", &["nan", "-inf", "x"]),
        ("--typical", &["0", "nan", "-1", "1.5", "x"]),
        ("--dry-multiplier", &["-1", "nan", "inf", "x"]),
        ("--dry-base", &["0.5", "nan", "inf"]),
        ("--dry-allowed-length", &["0", "-1", "x"]),
        ("--dry-penalty-last-n", &["-2", "x"]),
        ("--xtc-probability", &["-0.1", "1.1", "nan"]),
        ("--xtc-threshold", &["-0.1", "1.1", "nan"]),
        ("--logit-bias", &["5", "x+1", "-1+1", "5+", "5*2"]),
        ("--logprobs", &["-1", "x", "1001"]),
        ("--seed", &["-2", "x"]),
        ("--max-seq-len", &["0", "-1", "x", "99999999999"]),
        ("--prefill-chunk", &["0", "-1", "99999"]),
        ("--threads", &["0", "-1", "x", "99999"]),
        ("--eviction-window", &["-1", "x"]),
        ("--protected-prefix", &["-1", "x"]),
        ("--memory-threshold-mb", &["-1", "nan"]),
        ("--keep-experts", &["-1", "x"]),
        ("--switch-threshold", &["-1", "x"]),
        ("--switch-back", &["-1", "x"]),
        ("--kv-type", &["q3", ""]),
        ("--weight-type", &["q3"]),
        ("--backend", &["tpu"]),
        ("--format", &["xml"]),
    ];
    for (flag, values) in bad {
        for value in *values {
            let line = antigravity(["generate", "-p", "x", &format!("{flag}={value}")]).fails(2);
            assert!(line.to_lowercase().contains(value), "{flag} {value}: {line}");
        }
    }
    antigravity(["generate", "-p", "x", "--temperature", "-1"]).fails_with(2, &["--temperature -1"]);
    antigravity(["generate", "-p", "x", "--stop", ""]).fails_with(2, &["--stop"]);
    antigravity(["generate", "-p", "x", "--dry-sequence-breaker", ""])
        .fails_with(2, &["--dry-sequence-breaker"]);
    antigravity(["generate", "-p", "x", "--logit-bias", "5+inf"])
        .fails_with(2, &["--logit-bias", "5", "-inf"]);
    antigravity(["generate", "-p", "x", "--logit-bias", "5-nan"])
        .fails_with(2, &["--logit-bias", "5", "NaN"]);
    let last = (antigravity::dims::VOCAB - 1).to_string();
    antigravity(["generate", "-p", "x", "--logit-bias", "99999999+1"]).fails_with(2, &["99999999", &last]);
    antigravity(["generate", "-p", "x", "--logprobs", "3"])
        .fails_with(2, &["--logprobs 3", "--format jsonl"]);
    antigravity(["chat", "--logprobs", "3"]).fails_with(2, &["--logprobs 3", "--format jsonl"]);
    antigravity(["chat", "--num-tokens", "-2"]).fails_with(2, &["--num-tokens -2"]);
    antigravity(["chat", "--stop", ""]).fails_with(2, &["--stop"]);
}

#[test]
fn devices_and_evictions_that_cannot_be_had_are_refused() {
    fn generate<'a>(flags: &[&'a str]) -> Vec<&'a str> {
        [&["generate", "-p", "x"], flags].concat()
    }
    let without_opencl = |flags: &[&str]| {
        antigravity(generate(flags)).env("ANTIGRAVITY_OPENCL_LIB", "/no/such/library.so").run()
    };
    let refused = without_opencl(&["--backend", "hybrid"]);
    assert_eq!((refused.code, refused.out.as_str()), (Some(5), ""), "{}", refused.err);
    mentions(&refused.err, &["/no/such/library.so"]);
    let auto = without_opencl(&["--backend", "auto", "-n", "2"]);
    assert_eq!(auto.code, Some(0), "{}", auto.err);
    mentions(&auto.err, &["auto", "using the CPU"]);
    antigravity(generate(&["--switch-threshold", "soon"])).fails_with(2, &["--switch-threshold soon", "512"]);
    let by_itself = ["--switch-threshold", "auto", "--switch-back", "9"];
    antigravity(generate(&by_itself)).fails_with(2, &["--switch-threshold auto", "--switch-back"]);
    for command in [&["generate", "-p", "x"][..], &["chat"], &["bench"], &["plan"]] {
        if !antigravity::dims::HAS_EXPERTS {
            let args = [command, &["--keep-experts", "1"]].concat();
            antigravity(args).fails_with(2, &["--keep-experts", "no experts"]);
        }
    }
    antigravity(generate(&["--eviction-policy", "lru"])).fails_with(2, &["lru", "sliding"]);
    let small = ["--eviction-policy", "h2o", "--eviction-window", "5", "--protected-prefix", "4"];
    antigravity(generate(&small)).fails_with(2, &["--eviction-window 5", "6"]);
    let full = ["--eviction-policy", "sliding", "-c", "16", "--protected-prefix", "14"];
    antigravity(generate(&full)).fails_with(2, &["--max-seq-len 16", "--protected-prefix 14"]);
}

#[test]
fn prompts_that_cannot_be_used_are_refused() {
    let long = "once upon a time ".repeat(20);
    antigravity(["generate", "-c", "16", "-p", &long]).fails_with(2, &["16", "--max-seq-len"]);
    antigravity(["chat", "-st", "-c", "16", "-p", &long]).fails_with(2, &["16", "--max-seq-len"]);
    // The first token is a prompt.
    assert_eq!(antigravity(["generate", "-p", "", "-n", "2"]).run().code, Some(0));
    antigravity(["generate", "-f", "/no/such/file"]).fails_with(2, &["/no/such/file"]);
    antigravity(["generate", "-f", "/"]).fails_with(2, &["--prompt-file /", "directory"]);
    let temp = TestDir::new();
    let latin = temp.write("latin.txt", b"caf\xe9");
    antigravity(["generate", "-f", &latin]).fails_with(2, &["latin.txt", "byte 3", "UTF-8"]);
    antigravity(["generate", "-p", "a", "-f", &latin]).fails(2);
}

#[test]
fn paths_without_a_model_are_named() {
    antigravity(["generate", "-p", "x", "-m", "/no/such/dir"]).fails_with(3, &["/no/such/dir"]);
    let temp = TestDir::new();
    antigravity(["generate", "-p", "x", "-m", &temp.path("")]).fails_with(3, &[&temp.path("")]);
    let garbage = temp.write("model.safetensors", [0xff; 100]);
    antigravity(["generate", "-p", "x", "-m", &garbage]).fails_with(3, &["model.safetensors"]);
    let short = temp.write("short.safetensors", "");
    antigravity(["generate", "-p", "x", "-m", &short]).fails_with(3, &["short.safetensors"]);
    antigravity(["pack", "-m", "/no/such/dir"]).fails_with(3, &["/no/such/dir"]);
}

#[test]
fn a_path_that_is_not_a_model_is_named() {
    let temp = TestDir::new();
    let dir = temp.model_without("");
    let refused = |path: &str| antigravity(["generate", "-p", "x", "-m", path]).fails(3);
    for name in ["config.json", "tokenizer.json"] {
        let line = refused(&format!("{dir}/{name}"));
        mentions(&line, &[name, "is not a weights file", "give the model's directory"]);
    }
    let text = temp.write("notes.txt", "some text that is longer than a header");
    mentions(&refused(&text), &["notes.txt", "is not a weights file"]);
    let unnamed = temp.write("model.bin", b"GGUF\x03\0\0\0 and so on and so on");
    mentions(&refused(&unnamed), &["model.bin", "is a GGUF file", "does not end in .gguf; rename it"]);
    let broken = temp.write("broken.safetensors", "some text that is longer than a header");
    mentions(&refused(&broken), &["broken.safetensors", "header length", "download it again"]);
}

#[test]
fn a_folder_that_cannot_be_searched_says_so() {
    let temp = TestDir::new();
    // The folder itself can be named, but what is in it has names that are too long.
    let mut long = temp.path("");
    while long.len() < 4085 {
        long.push_str("./");
    }
    for command in ["generate", "inspect"] {
        let line = antigravity([command, "-m", &long]).fails(3);
        mentions(&line, &["model.safetensors: cannot be read", "too long", "check the permissions"]);
        assert!(!line.contains("neither"), "{line}");
    }
}

#[test]
fn no_text_of_a_file_gets_onto_the_terminal_as_it_is() {
    let temp = TestDir::new();
    let hostile = hostile::short();
    // A path, an index, and the names and values of a file that is sound.
    let folder = temp.file(hostile);
    std::fs::create_dir(&folder).expect("a folder");
    let index = serde_json::json!({"weight_map": {hostile: hostile, "b": "../x", hostile::text(): "y"}});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("a file");
    let header = serde_json::json!({
        "__metadata__": {hostile: hostile::text(), hostile::text(): hostile, "antigravity.layout": hostile::text()},
        hostile: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        hostile::text(): {"dtype": "I64", "shape": [1], "data_offsets": [4, 12]},
    })
    .to_string();
    let file = folder.join("sound.safetensors");
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 12]].concat();
    std::fs::write(&file, bytes).expect("a file");
    let (folder, file) = (folder.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    for path in [folder, file] {
        for command in ["generate", "plan", "inspect", "tokenize", "pack", "doctor"] {
            let said = antigravity([command, "-m", path]).run();
            for line in said.err.lines().chain(said.out.lines()) {
                let place = format!("{command} {path:?}");
                assert!(
                    hostile::is_tame(line) && line.len() <= 400,
                    "{place}: {} bytes: {line:?}",
                    line.len()
                );
                assert!(!line.starts_with("error: forged"), "{place}: {line}");
            }
        }
    }
    let json = antigravity(["inspect", file, "--format", "json"]).text();
    assert!(json.lines().all(hostile::is_tame), "{json:?}");
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["metadata"][hostile], hostile::text());
    let prompts = temp.write("prompts", serde_json::json!({hostile::text(): hostile}).to_string());
    hostile::assert_line("a prompt", &antigravity(["generate", "--prompts", &prompts]).fails(2));
}

#[test]
fn a_config_of_another_model_says_how_to_rebuild() {
    let temp = TestDir::new();
    let dir = temp.model_without("config.json");
    let config = std::fs::read_to_string(model().join("config.json")).expect("a config");
    let layers = format!("\"num_hidden_layers\": {}", antigravity::dims::LAYERS);
    assert!(config.contains(&layers));
    temp.write("config.json", config.replace(&layers, "\"num_hidden_layers\": 7"));
    let line = antigravity(["generate", "-p", "x", "-m", &dir]).fails(3);
    mentions(&line, &["config.json", "num_hidden_layers", "7", "6", "rebuild: ANTIGRAVITY_MODEL="]);
    for broken in ["", "{", "[]", "{\"model_type\": 3}"] {
        temp.write("config.json", broken);
        antigravity(["generate", "-p", "x", "-m", &dir]).fails_with(3, &["config.json"]);
    }
}

#[test]
fn a_broken_tokenizer_is_named() {
    let temp = TestDir::new();
    let dir = temp.model_without("tokenizer.json");
    antigravity(["generate", "-p", "x", "-m", &dir]).fails_with(3, &["tokenizer.json", "missing"]);
    for broken in ["", "{", "{\"model\": {\"type\": \"BPE\"}}"] {
        temp.write("tokenizer.json", broken);
        antigravity(["generate", "-p", "x", "-m", &dir]).fails_with(3, &["tokenizer.json"]);
    }
    std::fs::copy(model().join("tokenizer.json"), temp.0.join("tokenizer.json")).expect("a copy");
    temp.write("tokenizer_config.json", "{\"chat_template\": 3}");
    antigravity(["chat", "-p", "x", "-m", &dir]).fails_with(3, &["tokenizer_config.json", "chat_template"]);
}

#[test]
fn a_broken_chat_template_is_named_with_its_line() {
    let temp = TestDir::new();
    let dir = temp.model_without("");
    let forever =
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = b %}{% endfor %}{% endfor %}";
    let doubling =
        "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}";
    for (source, words) in [
        ("a\n{% if %}", ["chat_template.jinja, line 2", "syntax error"]),
        ("a\n{{ nothing() }}", ["chat_template.jinja, line 2", "nothing is unknown"]),
        (forever, ["chat_template.jinja", "takes too many steps"]),
        (doubling, ["chat_template.jinja, line 1", "takes too many steps or produces too much text"]),
        ("{{ '<|im_' ~ 'end|>' }}", ["chat_template.jinja", "control token <|im_end|> from parts"]),
    ] {
        temp.write("chat_template.jinja", source);
        antigravity(["chat", "-q", "-p", "x", "-m", &dir]).fails_with(3, &words);
    }
    temp.write("chat_template.jinja", "{{ raise_exception('never') }}");
    antigravity(["chat", "-q", "-p", "x", "-m", &dir])
        .fails_with(2, &["chat_template.jinja", "refuses", "never"]);
}

#[test]
fn broken_token_files_are_refused() {
    let temp = TestDir::new();
    let out = temp.path("logits");
    for broken in ["", "[]", "[-1]", "[1.5]", "[99999999]", "{}"] {
        let file = temp.write("tokens.json", broken);
        antigravity(["logits", "--tokens", &file, "--out", &out]).fails(2);
        antigravity(["eval", "--tokens", &file]).fails(2);
    }
    let file = temp.write("tokens.json", "[0,5,6]");
    antigravity(["logits", "--tokens", &file, "--out", "/no/such/out"]).fails_with(1, &["/no/such/out"]);
    antigravity(["eval"]).fails(2);
    antigravity(["eval", "--tokens", &file, "--chunk", "1"]).fails_with(2, &["--chunk 1"]);
    antigravity(["eval", "--tokens", &file, "--limit", "0"]).fails_with(2, &["--limit 0"]);
    for against in ["kv", "kv=q3", "speed=1", "weights=q8", ""] {
        antigravity(["eval", "--tokens", &file, "--against", against]).fails_with(2, &["--against"]);
    }
}
