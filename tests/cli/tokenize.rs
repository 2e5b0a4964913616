//! `tokenize`: ids on stdout and text back again, for any model's vocabulary.

use crate::support::command::*;
use crate::support::gguf::writer;
use serde_json::{Value, json};

fn gguf(name: &str) -> String {
    let file = crate::support::paths::root().join("tests/fixtures/gguf").join(name);
    file.to_str().expect("UTF-8").to_string()
}

/// Ids in one line, as `--decode` takes them.
fn ids(line: &str) -> Vec<u32> {
    let line = line.strip_suffix('\n').expect("a whole line");
    assert!(!line.contains('\n'), "{line:?}");
    line.split(' ').filter(|word| !word.is_empty()).map(|id| id.parse().expect("an id")).collect()
}

#[test]
fn tokenize_encodes_text_and_decodes_ids() {
    let story = " Once upon\n\na time, né <|im_end|> 한국어\n";
    let said = antigravity(["tokenize", "-p", story]).run();
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let with = ids(&said.out);
    assert_eq!(with[0], 0, "the begin-of-text token");
    assert_eq!(antigravity(["tokenize", "--no-special", "-p", story]).text(), said.out.replacen("0 ", "", 1));
    assert!(with.contains(&3), "the end-of-turn token");
    let line = said.out.trim_end();
    assert_eq!(antigravity(["tokenize", "--decode", line]).text(), format!("<|begin_of_text|>{story}"));
    let shown =
        antigravity(["tokenize", "--no-special", "--decode", &format!("[{}]", line.replace(' ', ", "))])
            .text();
    assert_eq!(shown, story.replace("<|im_end|>", ""));

    // The text is taken exactly, wherever it comes from.
    let temp = TestDir::new();
    let file = temp.write("text", story);
    for args in [&["tokenize", "-f", &file][..], &["tokenize", "--prompt-file", &file]] {
        assert_eq!(antigravity(args).text(), said.out);
    }
    assert_eq!(antigravity(["tokenize"]).stdin(story).run().out, said.out);
    assert_eq!(antigravity(["tokenize", "--file", "-"]).stdin(story).run().out, said.out);
    assert_eq!(antigravity(["tokenize", "--no-special", "-p", ""]).text(), "\n");
    assert_eq!(antigravity(["tokenize", "--decode", ""]).text(), "");
}

#[test]
fn tokenize_json_has_the_text_of_each_token() {
    let line = antigravity(["tokenize", "-p", "the cat é", "--format", "json"]).text();
    assert_eq!(line.lines().count(), 1, "{line:?}");
    let found: Value = serde_json::from_str(&line).expect("JSON");
    let ids = found["ids"].as_array().expect("ids");
    let pieces: Vec<&str> =
        found["pieces"].as_array().expect("pieces").iter().map(|p| p.as_str().expect("a text")).collect();
    assert_eq!((ids.len(), pieces[0]), (pieces.len(), "<|begin_of_text|>"));
    assert!(pieces[1..].concat().starts_with("the cat"), "{pieces:?}");
    let line = antigravity(["tokenize", "--decode", "3,1", "--format", "json"]).text();
    let found: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(found["ids"], json!([3, 1]));
    assert_eq!(found["text"], json!("<|im_end|><|end_of_text|>"));
}

/// Checks that `tokenize` works with any model, also one that this program was not built for.
#[test]
fn tokenize_works_with_any_model() {
    let file = gguf("m1-llama32-bf16.Q4_0.gguf");
    let dir = crate::support::paths::root().join("tests/fixtures/models/m1-llama32-bf16");
    let dir = dir.to_str().expect("UTF-8");
    let ours = antigravity(["tokenize", "-p", "the  rain in Spain"]).text();
    let reference = antigravity(["tokenize", "-p", "the  rain in Spain", "-m", dir]).text();
    assert_ne!(ours, reference);
    for flag in ["--vocab", "--model-path", "--model", "-m"] {
        assert_eq!(
            antigravity(["tokenize", "-p", "the  rain in Spain", flag, &file]).text(),
            reference,
            "{flag}"
        );
    }
    let decoded =
        antigravity(["tokenize", "--vocab", &file, "--no-special", "--decode", reference.trim_end()]).text();
    assert_eq!(decoded, "the  rain in Spain");

    // A tokenizer.json is enough, and may be named itself.
    let temp = TestDir::new();
    let json = std::fs::read(format!("{dir}/tokenizer.json")).expect("a fixture");
    let json = temp.write("tokenizer.json", json);
    for path in [temp.0.to_str().expect("UTF-8"), &json] {
        assert_eq!(antigravity(["tokenize", "-p", "the  rain in Spain", "--vocab", path]).text(), reference);
    }
}

#[test]
fn wrong_input_of_tokenize_is_named() {
    for decode in ["4096", "1 x", "-1", "1.5", "99999999999999999999"] {
        antigravity(["tokenize", "--decode", decode]).fails_with(2, &["--decode", "ids from 0 to 4095"]);
    }
    antigravity(["tokenize", "--decode", "1", "-p", "x"]).fails(2);
    antigravity(["tokenize", "-f", "x", "-p", "x"]).fails(2);
    antigravity(["tokenize", "-p", "x", "--format", "xml"]).fails(2);
    antigravity(["tokenize", "-f", "/nowhere"]).fails_with(2, &["--file /nowhere"]);
    let temp = TestDir::new();
    let broken = temp.write("latin1", b"ab\xe9");
    antigravity(["tokenize", "-f", &broken]).fails_with(2, &["latin1", "byte 2 is not UTF-8"]);

    antigravity(["tokenize", "-p", "x", "-m", "/nowhere"]).fails_with(3, &["/nowhere: No such file"]);
    antigravity(["tokenize", "-p", "x", "--vocab", "/nowhere.gguf"]).fails_with(3, &["/nowhere.gguf"]);
    let part = gguf("m4-qwen2-bf16.F16.part.gguf");
    antigravity(["tokenize", "-p", "x", "--vocab", &part])
        .fails_with(3, &["part.gguf", "tokenizer.ggml.model\" is missing"]);
    let whole = std::fs::read(gguf("m4-qwen2-bf16.Q8_0.gguf")).expect("a fixture");
    let cut = temp.write("cut.gguf", &whole[..3000]);
    antigravity(["tokenize", "-p", "x", "--vocab", &cut])
        .fails_with(3, &["cut.gguf", "past the end of the file"]);
    let pre = b"qwen2";
    let at =
        whole.windows(22).position(|w| w.starts_with(b"tokenizer.ggml.pre")).expect("the key") + 18 + 4 + 8;
    assert_eq!(&whole[at..at + 5], pre);
    let mut other = whole.clone();
    other[at..at + 5].copy_from_slice(b"qwen9");
    let other = temp.write("other.gguf", other);
    antigravity(["tokenize", "-p", "x", "--vocab", &other])
        .fails_with(3, &["other.gguf", "\"tokenizer.ggml.pre\" is \"qwen9\"", "\"qwen2\""]);
}

#[test]
fn a_wrong_type_of_a_control_token_is_said_in_one_line() {
    let tokens = ["<|endoftext|>", "<|im_end|>", "a"];
    let list: Vec<u8> = tokens.iter().flat_map(writer::text).collect();
    let types = [3i32, 1, 1].map(i32::to_le_bytes).concat();
    let mut parts = writer::Parts::default();
    for (key, kind, value) in [
        ("general.architecture", writer::STRING, writer::text("llama")),
        ("tokenizer.ggml.model", writer::STRING, writer::text("gpt2")),
        ("tokenizer.ggml.pre", writer::STRING, writer::text("smollm")),
        ("tokenizer.ggml.tokens", writer::ARRAY, writer::array(writer::STRING, 3, list)),
        ("tokenizer.ggml.token_type", writer::ARRAY, writer::array(writer::I32, 3, types)),
        ("tokenizer.ggml.merges", writer::ARRAY, writer::array(writer::STRING, 0, "")),
    ] {
        parts = parts.pair(writer::pair(key, kind, value));
    }
    let temp = TestDir::new();
    let said =
        antigravity(["tokenize", "-m", &temp.write("wrong.gguf", parts.bytes()), "-p", "a<|im_end|>a"]).run();
    assert_eq!((said.code, said.out.as_str()), (Some(0), "2 1 2\n"));
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    mentions(&said.err, &["warning:", "token_type", "<|im_end|>"]);
}
