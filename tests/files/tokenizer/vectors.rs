//! llama.cpp's vocabularies of Llama 3 and Qwen2 with its test vectors, and the small models' files.
//!
//! The `tokenizer.json` of the two vocabularies are those published, with vocabulary, merges and added tokens taken
//! out: they are the GGUF files', token for token.

use super::made::{Made, USER};
use crate::support::paths;
use crate::support::random::Random;
use crate::support::test_dir::TestDir;
use files::source::gguf::Gguf;
use serde_json::{Map, Value, json};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use text::tokenizer::{AddSpecial, Tokenizer};

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn unpacked(file: &Path) -> Vec<u8> {
    let mut bytes = vec![];
    flate2::read::GzDecoder::new(fs::File::open(file).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

/// A family's vocabulary, unpacked, and its tokenizer.json beside it.
struct Family {
    temp: TestDir,
    cases: Value,
}

impl Family {
    fn unpack(name: &str) -> Self {
        let dir = paths::root().join("tests/fixtures/tokenizers").join(name);
        let bytes = unpacked(&dir.join("vocabulary.gguf.gz"));
        let temp = TestDir::new();
        let gguf = Gguf::open(temp.write("vocabulary.gguf", bytes).as_ref()).unwrap();
        let json = fill(read(&dir.join("tokenizer.json")), &gguf);
        temp.write("tokenizer.json", json.to_string());
        Self { temp, cases: read(&dir.join("cases.json")) }
    }

    fn file(&self) -> PathBuf {
        self.temp.file("vocabulary.gguf")
    }

    fn size(&self) -> usize {
        self.cases["vocab_size"].as_u64().unwrap() as usize
    }
}

/// Puts the tokens and merges of a GGUF file where they were.
fn fill(mut json: Value, gguf: &Gguf) -> Value {
    let strings = |key: &str| gguf.metadata().get_strings(key).unwrap().unwrap();
    let types = match gguf.metadata().get("tokenizer.ggml.token_type") {
        Some(files::source::gguf::value::Value::Array(types)) => types,
        other => panic!("{other:?}"),
    };
    let mut vocab = Map::new();
    let mut added = vec![];
    for ((id, token), kind) in strings("tokenizer.ggml.tokens").iter().enumerate().zip(types.iter()) {
        match kind.as_u64() {
            Some(1) => drop(vocab.insert(token.into(), id.into())),
            Some(3) => added.push(json!({"id": id, "content": token, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})),
            _ => {}
        }
    }
    json["model"]["vocab"] = vocab.into();
    json["model"]["merges"] = strings("tokenizer.ggml.merges").iter().collect::<Vec<_>>().into();
    json["added_tokens"] = added.into();
    json
}

#[test]
fn ids_are_those_of_the_test_vectors() {
    for name in ["llama3", "qwen2"] {
        let family = Family::unpack(name);
        let from_gguf = Tokenizer::open(&family.file(), family.size()).unwrap();
        let from_json = Tokenizer::open(&family.temp.0, family.size()).unwrap();
        let mut seen = 0;
        for tokenizer in [&from_gguf, &from_json] {
            for case in family.cases["cases"].as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let want = ids(&case["ids"]);
                assert_eq!(tokenizer.encode(text, AddSpecial::No).unwrap(), want, "{tokenizer:?} {text:?}");
                let with = ids(&case["ids_with_special"]);
                assert_eq!(tokenizer.encode(text, AddSpecial::Yes).unwrap(), with, "{tokenizer:?} {text:?}");
                let decoded = case.get("decoded").unwrap_or(&case["text"]).as_str().unwrap();
                assert_eq!(tokenizer.decode_with_special(&want), decoded, "{tokenizer:?}");
                seen += 1;
            }
            for (token, id) in family.cases["special_tokens"].as_object().unwrap() {
                assert_eq!(tokenizer.token_to_id(token).map(u64::from), id.as_u64(), "{tokenizer:?}");
                assert!(tokenizer.special_tokens().contains(token), "{tokenizer:?} {token}");
            }
        }
        assert_eq!(seen, 66);
        agree(&from_gguf, &from_json);
        if name == "llama3" {
            assert_eq!((from_gguf.bos_id(), from_gguf.eos_ids()), (Some(128_000), &[128_001, 128_009][..]));
        } else {
            assert_eq!(from_gguf.eos_ids(), [151_643, 151_645]);
        }
    }
}

/// Two tokenizers that are the same one.
fn agree(one: &Tokenizer, other: &Tokenizer) {
    assert_eq!(one.vocab_size(), other.vocab_size());
    assert_eq!(one.special_tokens(), other.special_tokens());
    let parts = [
        "hello",
        " World",
        "don't",
        "\n\n",
        "  ",
        "\t",
        "12345",
        "né",
        "ne\u{301}",
        "한국어",
        "\u{1f600}",
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
        "[PAD151700]",
        "ﬁ",
        "…",
        "==",
        "\r\n",
        "\u{3000}",
        "'S",
        "x_1",
        "Ġ",
        "\0",
    ];
    let mut random = Random(5);
    for round in 0..2000 {
        let mut text = String::new();
        for _ in 0..1 + round % 9 {
            text += parts[random.below(parts.len())];
        }
        let encoded = one.encode(&text, AddSpecial::Yes).unwrap();
        assert_eq!(encoded, other.encode(&text, AddSpecial::Yes).unwrap(), "{text:?}");
        assert_eq!(one.encode_plain(&text).unwrap(), other.encode_plain(&text).unwrap(), "{text:?}");
        assert_eq!(one.decode(&encoded), other.decode(&encoded), "{text:?}");
    }
}

#[test]
fn small_models_have_the_tokenizers_of_their_directories() {
    let fixtures = paths::root().join("tests/fixtures");
    for (file, model) in [
        ("m1-llama32-bf16.Q4_0", "m1-llama32-bf16"),
        ("m4-qwen2-bf16.Q8_0", "m4-qwen2-bf16"),
        ("m9-gemma3-270m-bf16.Q8_0", "m9-gemma3-270m-bf16"),
        ("m11-smollm3-bf16.Q8_0", "m11-smollm3-bf16"),
        ("m12-phi4mini-short-bf16.Q8_0", "m12-phi4mini-short-bf16"),
        ("m14-granite-bf16.Q8_0", "m14-granite-bf16"),
        ("m16-llama-linear-bf16.Q8_0", "m16-llama-linear-bf16"),
        ("m18-qwen3-yarn-bf16.Q8_0", "m18-qwen3-yarn-bf16"),
    ] {
        let dir = fixtures.join("models").join(model);
        let expected = read(&dir.join("expected.json"));
        let size = expected["vocab_size"].as_u64().unwrap() as usize;
        let one = Tokenizer::open(&fixtures.join(format!("gguf/{file}.gguf")), size).unwrap();
        let other = Tokenizer::open(&dir.join("config.json"), size).unwrap();
        agree(&one, &other);
        for prompt in expected["text_prompts"].as_array().unwrap() {
            let text = prompt["text"].as_str().unwrap();
            assert_eq!(one.encode(text, AddSpecial::Yes).unwrap(), ids(&prompt["ids"]), "{model} {text:?}");
            assert_eq!(one.decode(&ids(&prompt["greedy_ids"])), prompt["greedy_text"].as_str().unwrap());
        }
        let sorted = |ids: &[u32]| std::collections::BTreeSet::from_iter(ids.iter().copied());
        // The end of a document is one in a GGUF file whether or not the directory's files name it.
        let (ends, named) = (sorted(one.eos_ids()), sorted(other.eos_ids()));
        assert!(ends.is_superset(&named), "{model}");
    }
}

#[test]
fn padding_stands_for_itself_only_at_its_place() {
    let made = Made::byte_level();
    let tokens = |last: &[&str]| {
        let mut tokens: Vec<String> = (0..256).map(|b| format!("t{b}")).collect();
        tokens.extend(last.iter().map(|t| t.to_string()));
        tokens
    };
    let tokens = tokens(&["a", "<|end|>", "<tool>", "[PAD259]", "", "[PAD7]"]);
    let mut types = vec![1; 257];
    types.extend([3, USER, USER, 1, USER]);
    let made = made.strings("tokens", &tokens).integers("token_type", &types);
    let made = made.strings("merges", &[""; 0]).number("eos_token_id", 257);
    let tokenizer = made.open(262).unwrap();
    // Padding stands for itself only at its own place, and an empty token for nothing.
    assert_eq!(tokenizer.vocab_size(), 262);
    let encode = |text: &str| tokenizer.encode(text, AddSpecial::Yes).unwrap();
    assert_eq!(encode("a<tool>a<|end|>[PAD7]"), [256, 258, 256, 257, 261]);
    assert_eq!(encode("a[PAD259]"), [256]);
    assert_eq!(tokenizer.encode_plain("a<tool>a<|end|>").unwrap(), [256, 258, 256]);
    assert_eq!(tokenizer.decode(&[258, 257, 259, 260, 256]), "<tool>a");
    assert_eq!(tokenizer.decode_with_special(&[257, 259, 256]), "<|end|>a");
    assert!(tokenizer.is_special(257) && !tokenizer.is_special(258));
}

#[test]
fn words_are_cut_as_the_name_says() {
    let tokens = ["1", "2", "12", "<s>", "A", "b", "c", "d", "Ġ"];
    let made = Made::byte_level().strings("tokens", &tokens).strings("merges", &["1 2"]);
    let made = made.without("token_type").without("eos_token_id").number("bos_token_id", 3);
    let encode = |name: &str, text: &str| {
        made.clone().text("pre", name).open(9).unwrap().encode(text, AddSpecial::Yes).unwrap()
    };
    assert_eq!(encode("gpt-2", "12 12"), [2, 8, 2]);
    assert_eq!(encode("smollm", "12 12"), [0, 1, 8, 0, 1]);
    for name in ["qwen2", "deepseek-r1-qwen"] {
        assert_eq!(encode(name, "12A"), [0, 1, 4], "{name}");
    }
    // These begin a text with the begin-of-text token, unless the file says otherwise.
    for name in ["llama-bpe", "llama3", "llama-v3"] {
        assert_eq!(encode(name, "12"), [3, 2], "{name}");
    }
    let made = made.truth("add_bos_token", 0).text("pre", "llama-bpe").open(9).unwrap();
    assert_eq!(made.encode("12", AddSpecial::Yes).unwrap(), [2]);
}

/// Vocabularies under their families' names, and the published files, with the ids of Hugging Face's library.
#[test]
fn names_cut_words_as_the_published_files_do() {
    let tokenizers = paths::root().join("tests/fixtures/tokenizers");
    let splits = tokenizers.join("splits");
    for name in [
        "exaone4",
        "gemma4",
        "granite",
        "hunyuan-dense",
        "lfm2",
        "minicpm5",
        "qwen35",
        "qwen35-small",
        "tekken",
    ] {
        let family: Value =
            serde_json::from_slice(&unpacked(&splits.join(format!("{name}.json.gz")))).unwrap();
        let vocabulary = match name {
            "qwen35" => rename_pre(unpacked(&tokenizers.join("qwen2/vocabulary.gguf.gz")), "qwen2", name),
            _ => unpacked(&splits.join(format!("{name}.gguf.gz"))),
        };
        let temp = TestDir::new();
        let file = temp.write("vocabulary.gguf", vocabulary);
        let size = family["vocab_size"].as_u64().unwrap() as usize;
        let mut both = vec![Tokenizer::open(file.as_ref(), size).unwrap()];
        // Gemma's file is not there.
        if family["tokenizer"].is_object() {
            let json = fill(family["tokenizer"].clone(), &Gguf::open(file.as_ref()).unwrap());
            temp.write("tokenizer.json", json.to_string());
            both.push(Tokenizer::open(&temp.0, size).unwrap());
        }
        let cases = family["cases"].as_array().unwrap();
        assert!(cases.len() >= if name == "qwen35" { 94 } else { 69 }, "{name}");
        for (tokenizer, case) in
            both.iter().flat_map(|tokenizer| cases.iter().map(move |case| (tokenizer, case)))
        {
            let text = case["text"].as_str().unwrap();
            for (special, want) in [(AddSpecial::No, "ids"), (AddSpecial::Yes, "ids_with_special")] {
                let encoded = tokenizer.encode(text, special).unwrap();
                assert_eq!(encoded, ids(&case[want]), "{tokenizer:?} {name} {text:?}");
            }
            let decoded = case.get("decoded").unwrap_or(&case["text"]).as_str().unwrap();
            assert_eq!(tokenizer.decode_with_special(&ids(&case["ids"])), decoded, "{tokenizer:?} {name}");
        }
    }
}

/// Gives the vocabulary of a GGUF file without tensors another pre-tokenizer.
fn rename_pre(mut gguf: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    let place = [
        b"tokenizer.ggml.pre".as_slice(),
        &8u32.to_le_bytes(),
        &(from.len() as u64).to_le_bytes(),
        from.as_bytes(),
    ]
    .concat();
    let at = gguf.windows(place.len()).position(|bytes| bytes == place).unwrap() + place.len() - from.len();
    gguf.splice(at - 8..at + from.len(), [&(to.len() as u64).to_le_bytes(), to.as_bytes()].concat());
    gguf
}

/// All that llama.cpp knows.
const NAMES: &str = "a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r \
    dbrx deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon \
    falcon-h1 falcon3 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-97m grok-2 \
    hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano \
    joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 \
    midm-2.0 minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact \
    roberta-bpe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya \
    trillion ufakzeka viking youtu";

/// None loses a character, or takes long for many of one kind.
#[test]
fn every_name_that_llama_cpp_knows_is_known() {
    let kinds =
        ["1", "a", "A", " ", "\t", "\n", "!", "é", "한", "中", "\u{301}", "½", " a", "a1", "'s", "\r\n "];
    let texts: Vec<String> = kinds.map(|kind| kind.repeat(3000)).to_vec();
    for name in NAMES.split_whitespace() {
        let tokenizer = Made::byte_level().text("pre", name).open(260).unwrap();
        let begun = std::time::Instant::now();
        for text in texts.iter().map(String::as_str).chain(["Hello, it's ½ of 1234567 中文\n\n  x\u{301}"])
        {
            let ids = tokenizer.encode(text, AddSpecial::No).unwrap();
            assert_eq!(tokenizer.decode(&ids), text, "{name}");
        }
        assert!(begun.elapsed().as_secs() < 20, "{name}: {:?}", begun.elapsed());
    }
    // Digits by threes from the right, from the left, one by one.
    let tokens = ["1", "2", "12"];
    let made = Made::byte_level().strings("tokens", &tokens).strings("merges", &["1 2"]);
    let made = made.without("token_type").without("eos_token_id");
    for (name, want) in [
        ("afmoe", vec![0, 1, 2]),
        ("tiny_aya", vec![0, 1, 2]),
        ("superbpe", vec![0, 1, 2]),
        ("minicpm5", vec![2, 0, 1]),
        ("exaone", vec![0, 1, 0, 1]),
        ("exaone4", vec![2, 2]),
    ] {
        assert_eq!(
            made.clone().text("pre", name).open(3).unwrap().encode("1212", AddSpecial::No).unwrap(),
            want,
            "{name}"
        );
    }
}

/// Of Gemma 4: merges of text in which U+2581 is a blank, and bytes where there is no token.
#[test]
fn tokens_that_are_text_are_merged_as_text() {
    let mut tokens: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
    tokens.extend(["▁", "h", "i", "hi", "▁hi", "\n", "\n\n"].map(String::from));
    let mut types = vec![6; 256];
    types.resize(tokens.len(), 1);
    let made =
        Made::byte_level().without("eos_token_id").strings("tokens", &tokens).integers("token_type", &types);
    let made = made.strings("merges", &["h i", "▁ hi", "\n \n"]);
    for made in [made.clone().text("model", "gemma4").without("pre"), made.clone().text("pre", "sarvam-moe")]
    {
        let tokenizer = made.open(263).unwrap();
        let text = "hi hi\n\né";
        let ids = tokenizer.encode(text, AddSpecial::No).unwrap();
        assert_eq!(ids, [259, 260, 262, 0xc3, 0xa9]);
        assert_eq!(tokenizer.decode(&ids), text);
    }
    let whitespace = made.text("model", "whitespace").text("pre", "whitespace").open(263).unwrap();
    assert_eq!(whitespace.encode("hi hi", AddSpecial::No).unwrap(), [259, 0x20, 259]);
}

#[test]
fn control_tokens_of_a_wrong_type_are_control_tokens() {
    let tokens =
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<", "/s>", "</s>", "<|eot_id|>", "a"];
    let made = |types: &[i32], merges: &[&str]| {
        let made = Made::byte_level().strings("tokens", &tokens).integers("token_type", types);
        made.strings("merges", merges).number("eos_token_id", 0).open(9).unwrap()
    };
    let right = made(&[3, 3, 3, 1, 1, 1, 1, 3, 1], &["< /s>"]);
    let wrong = made(&[3, 1, 1, 1, 1, 1, 1, USER, 1], &["< /s>"]);
    for tokenizer in [&right, &wrong] {
        assert_eq!(tokenizer.eos_ids(), [0, 2, 7]);
        assert_eq!(tokenizer.special_tokens(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]);
        assert_eq!(tokenizer.encode("<|im_start|>a<|im_end|>", AddSpecial::No).unwrap(), [1, 8, 2]);
    }
    // No merge leads to it: no word of the vocabulary.
    assert_eq!(made(&[3, 3, 3, 1, 1, 1, 1, 3, 1], &[""; 0]).eos_ids(), [0, 2, 7, 6]);
    // Where others end a message, `<|end|>` ends only a part of it.
    let harmony = |last: &str| {
        let tokens = ["<|return|>", "<|end|>", last, "a"];
        let made = Made::byte_level().strings("tokens", &tokens).integers("token_type", &[3, 3, 3, 1]);
        made.strings("merges", &[""; 0]).number("eos_token_id", 0).open(4).unwrap().eos_ids().to_vec()
    };
    assert_eq!((harmony("<|call|>"), harmony("<|x|>")), (vec![0, 2], vec![0, 1]));
}

#[test]
fn ids_of_tokens_that_are_not_there_are_none() {
    for (key, n) in [
        ("padding_token_id", u32::MAX),
        ("padding_token_id", 260),
        ("bos_token_id", u32::MAX),
        ("eom_token_id", u32::MAX),
    ] {
        let tokenizer = Made::byte_level().number(key, n).open(260).unwrap();
        assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (None, &[259][..]), "{key}");
    }
    // Padding ends a text only where it is a control token.
    for (padding, ends) in [(258, vec![259]), (259, vec![259])] {
        let tokenizer = Made::byte_level().number("padding_token_id", padding).open(260).unwrap();
        assert_eq!(tokenizer.eos_ids(), ends);
    }
}

#[test]
fn blanks_after_control_tokens_of_phi3_are_left_out() {
    let dir = paths::root().join("tests/fixtures/tokenizers/phi3-rstrip");
    for file in ["tokenizer.json", "phi3-rstrip.gguf"] {
        let tokenizer = Tokenizer::open(&dir.join(file), 266).unwrap();
        let ids = tokenizer.encode("<|user|>\nHi<|end|>\n<|user|>", AddSpecial::No).unwrap();
        assert_eq!(ids, [264, 263, 265, 264], "{file}");
    }
}
