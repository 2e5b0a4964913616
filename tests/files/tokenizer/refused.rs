//! Damaged and hostile vocabularies: exit code 3, one line that says which key.

use super::made::{BYTE, Made, TEXT, UNUSED};
use crate::support::gguf::writer::{ARRAY, F32, I32, STRING, U8, array, claiming};
use crate::support::random::Random;
use crate::support::test_dir::TestDir;

fn pieces() -> Made {
    Made::sentence_piece(&[("▁a".into(), -1.0), ("▁".into(), -2.0), ("a".into(), -3.0)])
}

/// Each with the words that its message must have.
fn cases() -> Vec<(Made, &'static [&'static str])> {
    let bpe = Made::byte_level;
    let types = |last: i32| {
        let mut types = vec![TEXT; 260];
        types[259] = last;
        types
    };
    vec![
        (bpe().without("model"), &["tokenizer.ggml.model\" is missing", "\"gpt2\", \"llama\""]),
        (bpe().text("model", "bert"), &["tokenizer.ggml.model\" is \"bert\"", "\"gpt2\", \"llama\""]),
        (bpe().text("model", &"x\n".repeat(9999)), &["tokenizer.ggml.model\" is "]),
        (bpe().number("model", 3), &["tokenizer.ggml.model\" is 3", "a string"]),
        (bpe().without("pre"), &["tokenizer.ggml.pre\" is missing", "\"llama-bpe\"", "\"qwen2\""]),
        (bpe().text("pre", "nope"), &["tokenizer.ggml.pre\" is \"nope\"", "\"llama-bpe\"", "\"qwen2\""]),
        (bpe().without("tokens"), &["tokenizer.ggml.tokens\" is missing"]),
        (bpe().strings("tokens", &[""; 0]), &["tokenizer.ggml.tokens\" is missing or empty"]),
        (
            bpe().integers("tokens", &[1, 2]),
            &["tokenizer.ggml.tokens\" is an array of 2", "array of strings"],
        ),
        (bpe().strings("tokens", &[b"a", b"\xff"]), &["tokenizer.ggml.tokens", "element 1: is not UTF-8"]),
        (bpe().strings("tokens", &["a"; 260]), &["elements 0 and 1 are both \"a\""]),
        (bpe().strings("tokens", &[""; 260]), &["no token in use"]),
        (bpe().integers("token_type", &[UNUSED; 260]), &["no token in use"]),
        (bpe().integers("token_type", &[TEXT; 259]), &["token_type\" is an array of 259", "260 integers"]),
        (bpe().integers("token_type", &types(7)), &["token_type\": element 259 is 7", "1 to 6"]),
        (bpe().integers("token_type", &types(-1)), &["token_type\": element 259 is -1"]),
        (bpe().floats("token_type", &[1.0; 260]), &["token_type\" is an array of 260", "Float32", "32 bits"]),
        (
            bpe().with("token_type", ARRAY, array(U8, 260, [1; 260])),
            &["token_type\" is an array of 260", "Uint8", "32 bits"],
        ),
        (bpe().integers("token_type", &types(BYTE)), &["element 259 is \"<|end|>\"", "(byte)"]),
        (bpe().number("token_type", 1), &["token_type\" is 1"]),
        (bpe().without("merges"), &["tokenizer.ggml.merges\" is missing"]),
        (bpe().strings("merges", &["h e", "he"]), &["merges\": element 1 is \"he\", not two tokens"]),
        (bpe().strings("merges", &["h e l"]), &["merges", "`e l` out of vocabulary"]),
        (bpe().strings("merges", &[" e"]), &["merges", "out of vocabulary"]),
        (bpe().strings("merges", &[""]), &["not two tokens"]),
        (bpe().strings("merges", &["h nope"]), &["merges", "`nope` out of vocabulary"]),
        (bpe().strings("merges", &["h h"]), &["merges", "`hh` out of vocabulary"]),
        (bpe().number("eos_token_id", 260), &["eos_token_id\" is 260", "260 tokens"]),
        (bpe().number("bos_token_id", u32::MAX - 1), &["bos_token_id\" is 4294967294"]),
        (bpe().with("eot_token_id", I32, (-1i32).to_le_bytes()), &["eot_token_id\" is -1"]),
        (bpe().text("eom_token_id", "x"), &["eom_token_id\" is \"x\""]),
        (bpe().integers("token_type", &types(UNUSED)), &["eos_token_id\" is 259", "unused"]),
        (bpe().truth("add_bos_token", 1), &["add_bos_token\" is true", "bos_token_id\" is missing"]),
        (bpe().with("add_bos_token", U8, [1]), &["add_bos_token\" is 1", "boolean"]),
        (bpe().without("eos_token_id").truth("add_eos_token", 1), &["add_eos_token\" is true"]),
        (pieces().without("scores"), &["tokenizer.ggml.scores\" is missing"]),
        (pieces().floats("scores", &[0.0; 261]), &["scores\" is an array of 261", "262 numbers"]),
        (pieces().floats("scores", &[f32::NAN; 262]), &["scores\": element 0 is NaN"]),
        (pieces().integers("scores", &[0; 262]), &["scores\": element 0 is 0", "Float32"]),
        (pieces().integers("token_type", &[TEXT; 262]), &["has neither an unknown token", "<0x00>"]),
        (pieces().truth("add_space_prefix", 1).number("add_space_prefix", 1), &["add_space_prefix\" is 1"]),
    ]
}

#[test]
fn wrong_tokenizers_are_named() {
    for (made, words) in cases() {
        let line = made.refused();
        words.iter().for_each(|word| assert!(line.contains(word), "no {word:?} in {line}"));
    }
}

#[test]
fn a_vocabulary_must_fit_the_model() {
    let made = Made::byte_level();
    assert!(made.open(260).is_ok() && made.open(9999).is_ok());
    let line = made.open(259).unwrap_err().to_string();
    for words in ["token \"<|end|>\" has id 259", "has 259 tokens (ids up to 258)", "cargo build --release"] {
        assert!(line.contains(words), "{line}");
    }
    // Places that are only filled up count as little as in a tokenizer.json.
    let mut tokens: Vec<String> = (0..260).map(|id| format!("t{id}")).collect();
    tokens.extend((260..300).map(|id| format!("[PAD{id}]")));
    let types: Vec<i32> = (0..300).map(|id| if id < 260 { TEXT } else { UNUSED }).collect();
    let made = made.strings("tokens", &tokens).integers("token_type", &types).strings("merges", &[""; 0]);
    assert!(made.open(260).is_ok());
}

#[test]
fn large_vocabularies_take_no_more_than_they_may() {
    let long = "a".repeat(300);
    let made = Made::sentence_piece(&[("▁".into(), 0.0), ("a".into(), 0.0), (long, 0.0)]);
    assert!(made.refused().contains("has 300 bytes; supported: up to 256"));
    // Words over two letters: nearly every cut of every word is a merge.
    let words = (1..17usize).flat_map(|n| (0..1usize << n).map(move |bits| (n, bits)));
    let word =
        |(n, bits): (usize, usize)| (0..n).map(|i| if bits >> i & 1 == 0 { 'a' } else { 'b' }).collect();
    let words: Vec<(String, f32)> = words.map(|w| (word(w), 0.0)).collect();
    let line = Made::sentence_piece(&words).refused();
    assert!(line.contains("more than 1048576 merges"), "{line}");
    let mut made = Made::byte_level();
    let tokens: Vec<String> =
        (0..20_000).map(|id| format!("<|a long control token, number {id}, of many|>")).collect();
    made = made.strings("tokens", &tokens).integers("token_type", &vec![3; tokens.len()]);
    made = made.strings("merges", &[""; 0]);
    assert!(made.clone().open(1 << 20).is_ok());
    let tokens: Vec<String> = tokens.iter().map(|t| t.repeat(2)).collect();
    assert!(made.strings("tokens", &tokens).refused().contains("bytes of control and user-defined tokens"));
    let huge = [claiming(17 << 20, vec![b'x'; 17 << 20]), claiming(1, "a")].concat();
    let made = Made::byte_level().with("tokens", ARRAY, array(STRING, 2, huge));
    assert!(made.refused().contains("tokens\" holds 17825793 bytes"));
}

/// Any byte of the file changed: no panic, whatever comes of it.
#[test]
fn flipped_bytes_cause_no_panic() {
    let temp = TestDir::new();
    let mut random = Random(1);
    for (made, part) in [(Made::byte_level(), 0), (pieces(), 1)] {
        let good = made.with("note", F32, 0f32.to_le_bytes()).bytes();
        for round in 0..300 {
            let mut bytes = good.clone();
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
            let path = temp.write(&format!("{part}-{round}.gguf"), bytes);
            match text::tokenizer::Tokenizer::open(path.as_ref(), 400) {
                Ok(tokenizer) => drop(tokenizer.encode_plain("hello a </s> 한")),
                Err(antigravity::Error::Model(line)) => {
                    assert!(!line.contains('\n'), "{line}");
                }
                Err(other) => panic!("byte {at}: {other:?}"),
            }
        }
    }
}
