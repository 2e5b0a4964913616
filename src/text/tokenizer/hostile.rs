//! Malformed files: each is refused with a message or works, and none panics, hangs or runs out of
//! stack. Most are the bundled model's file with one thing changed.

use super::tests::{Dir, story_dir};
use super::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What must come of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Want {
    Refused,
    /// It loads; what it does is the file's business.
    Works,
}
use Want::{Refused, Works};

type Change = fn(&mut Value);

/// Changes to the bundled file.
const CHANGES: &[(&str, Want, Change)] = &[
    ("no model", Refused, |f| drop(f.as_object_mut().map(|m| m.remove("model")))),
    ("model null", Refused, |f| f["model"] = json!(null)),
    ("model a list", Refused, |f| f["model"] = json!([])),
    ("model a text", Refused, |f| f["model"] = json!("BPE")),
    ("model type unknown", Refused, |f| f["model"]["type"] = json!("Magic")),
    ("model type a number", Refused, |f| f["model"]["type"] = json!(3)),
    ("model type null", Works, |f| f["model"]["type"] = json!(null)),
    ("model Unigram", Refused, |f| f["model"] = json!({"type": "Unigram", "unk_id": 5, "vocab": []})),
    ("model WordPiece", Refused, |f| f["model"]["type"] = json!("WordPiece")),
    ("model WordLevel", Refused, |f| f["model"]["type"] = json!("WordLevel")),
    ("version 2", Refused, |f| f["version"] = json!("2.0")),
    ("version a number", Refused, |f| f["version"] = json!(1)),
    ("no version", Works, |f| drop(f.as_object_mut().map(|m| m.remove("version")))),
    ("no vocab", Refused, |f| drop(f["model"].as_object_mut().map(|m| m.remove("vocab")))),
    ("vocab empty", Refused, |f| f["model"]["vocab"] = json!({})),
    ("vocab null", Refused, |f| f["model"]["vocab"] = json!(null)),
    ("vocab a list", Refused, |f| f["model"]["vocab"] = json!(["a", "b"])),
    ("vocab of one", Refused, |f| f["model"]["vocab"] = json!({"a": 0})),
    ("vocab of one, nothing else", Works, |f| {
        f["model"]["vocab"] = json!({"a": 0});
        f["model"]["merges"] = json!([]);
        f["added_tokens"] = json!([]);
        f["post_processor"] = json!(null);
    }),
    ("id negative", Refused, |f| f["model"]["vocab"]["a"] = json!(-1)),
    ("id a float", Refused, |f| f["model"]["vocab"]["a"] = json!(1.5)),
    ("id a text", Refused, |f| f["model"]["vocab"]["a"] = json!("1")),
    ("id null", Refused, |f| f["model"]["vocab"]["a"] = json!(null)),
    ("id 2^32 - 1", Refused, |f| f["model"]["vocab"]["a"] = json!(u32::MAX)),
    ("id 2^32", Refused, |f| f["model"]["vocab"]["a"] = json!(1u64 << 32)),
    ("id 2^64", Refused, |f| f["model"]["vocab"]["a"] = json!(1.8446744073709552e19)),
    ("id twice", Refused, |f| f["model"]["vocab"]["a"] = f["model"]["vocab"]["b"].clone()),
    ("id beyond the model", Refused, |f| f["model"]["vocab"]["newtoken"] = json!(4096)),
    ("empty token", Refused, |f| f["model"]["vocab"][""] = json!(4095)),
    ("no merges field", Refused, |f| drop(f["model"].as_object_mut().map(|m| m.remove("merges")))),
    ("no merges", Works, |f| f["model"]["merges"] = json!([])),
    ("merges null", Refused, |f| f["model"]["merges"] = json!(null)),
    ("merges a map", Refused, |f| f["model"]["merges"] = json!({"a": "b"})),
    ("merge of one", Refused, |f| f["model"]["merges"][0] = json!(["a"])),
    ("merge of three", Refused, |f| f["model"]["merges"][0] = json!(["a", "b", "c"])),
    ("merge of numbers", Refused, |f| f["model"]["merges"][0] = json!([1, 2])),
    ("merge null", Refused, |f| f["model"]["merges"][0] = json!(null)),
    ("merge empty", Refused, |f| f["model"]["merges"][0] = json!("")),
    ("merge without space", Refused, |f| f["model"]["merges"][0] = json!("ab")),
    ("merge with two spaces", Refused, |f| f["model"]["merges"][0] = json!("a b c")),
    ("merge part unknown", Refused, |f| f["model"]["merges"][0] = json!(["zzzqqq", "a"])),
    ("merge result unknown", Refused, |f| f["model"]["merges"][0] = json!(["q", "\u{120}"])),
    ("merges as texts", Works, |f| {
        let list = f["model"]["merges"].as_array_mut().expect("a list");
        list.iter_mut()
            .for_each(|m| *m = json!(format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap())));
    }),
    ("a merge a thousand times", Works, |f| {
        let merge = f["model"]["merges"][0].clone();
        f["model"]["merges"].as_array_mut().expect("a list").extend(vec![merge; 1000]);
    }),
    ("dropout", Refused, |f| f["model"]["dropout"] = json!(0.1)),
    ("dropout 0", Works, |f| f["model"]["dropout"] = json!(0.0)),
    ("dropout a text", Refused, |f| f["model"]["dropout"] = json!("x")),
    ("prefix", Refused, |f| f["model"]["continuing_subword_prefix"] = json!("##################")),
    ("suffix", Refused, |f| f["model"]["end_of_word_suffix"] = json!("</w>")),
    ("unk unknown", Refused, |f| f["model"]["unk_token"] = json!("<nowhere>")),
    ("unk a number", Refused, |f| f["model"]["unk_token"] = json!(0)),
    ("fuse_unk a text", Refused, |f| f["model"]["fuse_unk"] = json!("no")),
    ("byte_fallback", Works, |f| f["model"]["byte_fallback"] = json!(true)),
    ("ignore_merges", Works, |f| f["model"]["ignore_merges"] = json!(true)),
    ("added null", Works, |f| f["added_tokens"] = json!(null)),
    ("added a map", Refused, |f| f["added_tokens"] = json!({})),
    ("added with null", Refused, |f| f["added_tokens"][0] = json!(null)),
    ("added without content", Refused, |f| {
        drop(f["added_tokens"][0].as_object_mut().map(|m| m.remove("content")))
    }),
    ("added empty", Refused, |f| f["added_tokens"][0]["content"] = json!("")),
    ("added flag null", Refused, |f| f["added_tokens"][0]["special"] = json!(null)),
    ("added id negative", Refused, |f| f["added_tokens"][0]["id"] = json!(-5)),
    ("added id huge", Refused, |f| f["added_tokens"][0]["id"] = json!(u32::MAX)),
    ("added id twice", Refused, |f| f["added_tokens"][1]["id"] = json!(0)),
    ("added content twice", Refused, |f| {
        f["added_tokens"][1]["content"] = f["added_tokens"][0]["content"].clone()
    }),
    ("added id of a word", Refused, |f| f["added_tokens"][0]["id"] = json!(300)),
    ("added new with a gap", Refused, |f| {
        f["added_tokens"][0]["content"] = json!("<|new|>");
        f["added_tokens"][0]["id"] = json!(4999);
    }),
    ("added stripping both sides", Works, |f| {
        for flag in ["lstrip", "rstrip", "single_word", "normalized"] {
            f["added_tokens"][0][flag] = json!(true);
        }
    }),
    ("added of two megabytes", Refused, |f| f["added_tokens"][0]["content"] = json!("x".repeat(2 << 20))),
    ("truncation to nothing", Works, |f| {
        f["truncation"] =
            json!({"max_length": 0, "strategy": "LongestFirst", "stride": 9, "direction": "Right"});
    }),
    ("padding to 2^62", Works, |f| {
        f["padding"] = json!({"strategy": {"Fixed": 1u64 << 62}, "direction": "Left", "pad_to_multiple_of": 0,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    }),
    ("normalizer unknown", Refused, |f| f["normalizer"] = json!({"type": "Magic"})),
    ("normalizer a text", Refused, |f| f["normalizer"] = json!("NFC")),
    ("normalizer empty", Refused, |f| f["normalizer"] = json!({})),
    ("normalizer NFC", Works, |f| f["normalizer"] = json!({"type": "NFC"})),
    ("normalizer Precompiled", Refused, |f| {
        f["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    }),
    ("prepend nothing", Refused, |f| f["normalizer"] = json!({"type": "Prepend", "prepend": ""})),
    ("replace nothing", Refused, |f| {
        f["normalizer"] = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
    }),
    ("replace by a megabyte", Refused, |f| {
        f["normalizer"] =
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "x".repeat(1 << 20)});
    }),
    ("replace a pattern", Refused, |f| {
        f["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": "z*"}, "content": "yy"});
    }),
    ("sequences in sequences", Refused, |f| {
        (0..20).for_each(|_| f["normalizer"] = json!({"type": "Sequence", "normalizers": [f["normalizer"]]}));
    }),
    ("a sequence of 10,000", Refused, |f| {
        f["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 10_000]});
    }),
    ("a sequence of nothing", Works, |f| f["normalizer"] = json!({"type": "Sequence", "normalizers": []})),
    ("a sequence without list", Refused, |f| f["normalizer"] = json!({"type": "Sequence"})),
    ("pre_tokenizer null", Works, |f| f["pre_tokenizer"] = json!(null)),
    ("pre_tokenizer unknown", Refused, |f| f["pre_tokenizer"] = json!({"type": "Whitespace"})),
    ("FixedLength 0", Refused, |f| f["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0})),
    ("ByteLevel without flags", Refused, |f| f["pre_tokenizer"] = json!({"type": "ByteLevel"})),
    ("Split without pattern", Refused, |f| {
        drop(f["pre_tokenizer"]["pretokenizers"][0].as_object_mut().map(|m| m.remove("pattern")));
    }),
    ("Split behaviour unknown", Refused, |f| {
        f["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Nope")
    }),
    ("Split removing", Works, |f| f["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Removed")),
    ("Split inverted", Works, |f| f["pre_tokenizer"]["pretokenizers"][0]["invert"] = json!(true)),
    ("Metaspace without replacement", Refused, |f| f["pre_tokenizer"] = json!({"type": "Metaspace"})),
    ("Metaspace with a word", Refused, |f| {
        f["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always"});
    }),
    ("decoder null", Refused, |f| f["decoder"] = json!(null)),
    ("decoder unknown", Refused, |f| f["decoder"] = json!({"type": "CTC"})),
    ("decoder strips the end", Refused, |f| {
        f["decoder"] = json!({"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 0, "stop": 5}]});
    }),
    ("decoder strips 2^63", Refused, |f| {
        f["decoder"] = json!({"type": "Sequence", "decoders": [{"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1u64 << 63, "stop": 0}]});
    }),
    ("decoder replaces a pattern", Refused, |f| {
        f["decoder"] = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}, {"type": "Fuse"}]});
    }),
    ("post_processor null", Works, |f| f["post_processor"] = json!(null)),
    ("post_processor unknown", Refused, |f| {
        f["post_processor"] = json!({"type": "BertProcessing", "sep": ["a", 0]})
    }),
    ("template without text", Refused, |f| f["post_processor"]["single"] = json!([])),
    ("template with two texts", Refused, |f| {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        f["post_processor"]["single"] = json!([text, text]);
    }),
    ("template with text B", Refused, |f| f["post_processor"]["single"][1]["Sequence"]["id"] = json!("B")),
    ("template token unknown", Refused, |f| {
        f["post_processor"]["single"][0]["SpecialToken"]["id"] = json!("<x>")
    }),
    ("template id beyond", Refused, |f| {
        f["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = json!([99_999]);
    }),
    ("template id negative", Refused, |f| {
        f["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = json!([-1]);
    }),
    ("template of a million", Refused, |f| {
        let piece = f["post_processor"]["single"][0].clone();
        f["post_processor"]["single"] = json!(vec![piece; 1_000_000]);
    }),
    ("template adding a million", Refused, |f| {
        f["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = json!(vec![0; 1_000_000]);
    }),
];

/// Split patterns that make engines slow, deep or large.
const PATTERNS: &[(&str, Want)] = &[
    ("", Refused),
    ("(", Refused),
    ("[", Refused),
    ("a**", Refused),
    ("(?<x", Refused),
    ("\\", Refused),
    ("\\p{Nonsense}", Refused),
    ("(a+)+$", Refused),
    ("(?=(a+)+$)a", Refused),
    ("(a|a)*(?!b)", Works),
    ("(a*)*b(?=c)", Refused),
    ("(.)\\1", Refused),
    ("a{1000000000}", Refused),
    ("(?:a{1000}){1000}", Refused),
    (
        "\\p{L}{1000}\\p{L}{1000}\\p{L}{1000}\\p{L}{1000}\\p{L}{1000}\\p{L}{1000}\\p{L}{1000}\\p{L}{1000}",
        Refused,
    ),
    ("(?:)", Works),
    ("(?=a)", Works),
    (".*", Works),
    ("a|", Works),
];

fn try_file(name: &str, want: Want, content: &[u8]) {
    let dir = Dir::new("hostile").with("tokenizer.json", content);
    let start = Instant::now();
    let result = Tokenizer::open(&dir.0, 4096);
    match (&result, want) {
        (Err(Error::Model(message)), Refused) => {
            assert!(message.contains("tokenizer.json: "), "{name}: {message}");
            assert!(message.len() < 700 && !message.contains('\n'), "{name}: {message}");
            assert!(!message.contains("library failed"), "{name} got as far as the library: {message}");
        }
        (Ok(tokenizer), Works) => {
            let ids =
                tokenizer.encode("Once upon a time, <|im_start|> aaa 123\n", AddSpecial::Yes).expect(name);
            let _ = (tokenizer.decode(&ids), tokenizer.decode_with_special(&ids));
            tokenizer.encode_plain(&"ab \n".repeat(1000)).expect(name);
        }
        _ => panic!("{name}: {want:?} was wanted, not {result:?}"),
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{name} took {:?}", start.elapsed());
}

fn story() -> (String, Value) {
    let text = std::fs::read_to_string(story_dir().join("tokenizer.json")).expect("bundled");
    let value = serde_json::from_str(&text).expect("JSON");
    (text, value)
}

#[test]
fn changed_files_are_refused_or_work() {
    let (_, good) = story();
    for (name, want, change) in CHANGES {
        let mut file = good.clone();
        change(&mut file);
        try_file(name, *want, file.to_string().as_bytes());
    }
    for (pattern, want) in PATTERNS {
        let mut file = good.clone();
        file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(pattern);
        try_file(pattern, *want, file.to_string().as_bytes());
    }
}

#[test]
fn broken_texts_are_refused() {
    let (text, _) = story();
    let deep = |open: &str, close: &str| open.repeat(100_000) + &close.repeat(100_000);
    let replaced = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    };
    let cases: Vec<(&str, String)> = vec![
        ("empty", String::new()),
        ("blank", " \n".into()),
        ("null", "null".into()),
        ("a number", "1".into()),
        ("an empty object", "{}".into()),
        ("a list", "[]".into()),
        ("html", "<html><body>404</body></html>".into()),
        ("a pointer file", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n".into()),
        ("deep lists", deep("[", "]")),
        ("deep objects", deep("{\"a\":", "}")),
        ("deep normalizer", replaced("\"normalizer\": null", &format!("\"normalizer\": {}", deep("[", "]")))),
        ("something behind", text.clone() + "x"),
        ("twice", text.clone() + &text),
        ("two models", replaced("\"normalizer\": null", "\"normalizer\": null, \"model\": {}")),
        ("half a surrogate", replaced("<|im_end|>", "\\ud800")),
        ("a wrong escape", replaced("<|im_end|>", "\\x41")),
        ("a raw control character", replaced("<|im_end|>", "\u{1}")),
        ("a token twice", replaced("\"vocab\": {", "\"vocab\": {\"a\": 4095,")),
        ("a huge number", replaced("\"vocab\": {", "\"vocab\": {\"zz\": 1e999,")),
        (
            "a long number",
            replaced("\"vocab\": {", &format!("\"vocab\": {{\"zz\": {},", "9".repeat(100_000))),
        ),
    ];
    for (name, content) in &cases {
        try_file(name, Refused, content.as_bytes());
    }
    for part in [1, 2, 10, 100, 500, 900, 990, 999] {
        try_file("cut short", Refused, &text.as_bytes()[..text.len() * part / 1000]);
    }
    try_file("UTF-16", Refused, &text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    try_file("not UTF-8", Refused, &[&b"{\"version\": \""[..], &[0xff, 0xfe], b"\"}"].concat());
    try_file("zeros", Refused, &[0; 100_000]);
    try_file("too large", Refused, &vec![b' '; (check::MAX_FILE + 1) as usize]);
    try_file("unchanged", Works, text.as_bytes());
}

#[test]
fn what_is_no_file_is_refused() {
    let dir = Dir::new("no-file");
    std::fs::create_dir_all(dir.0.join("tokenizer.json")).expect("a directory");
    let e = Tokenizer::open(&dir.0, 4096);
    assert!(matches!(e, Err(Error::Model(m)) if m.contains("is not a regular file")));
    let e = Tokenizer::open(Path::new("/nowhere"), 4096);
    assert!(matches!(e, Err(Error::Model(m)) if m.contains("is missing")));
}

/// One byte at a time, anywhere in the file: no panic, whatever comes of it.
#[test]
fn flipped_bytes_are_survived() {
    let (text, _) = story();
    let mut rng = crate::sampler::Rng::new(17);
    for round in 0..60 {
        let mut bytes = text.clone().into_bytes();
        let at = (rng.next_u64() % if round % 2 == 0 { 2500 } else { bytes.len() as u64 }) as usize;
        bytes[at] = (rng.next_u64() >> 56) as u8;
        let dir = Dir::new("flipped").with("tokenizer.json", &bytes);
        match Tokenizer::open(&dir.0, 4096) {
            Ok(tokenizer) => drop(tokenizer.encode("Once upon a time", AddSpecial::Yes).expect("encodes")),
            Err(Error::Model(_)) => {}
            Err(other) => panic!("byte {at}: {other:?}"),
        }
    }
}
