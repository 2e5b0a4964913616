//! Malformed files: each is refused with a message in one line or works, and none panics, hangs or runs out of stack.
//! Most are the bundled model's file with one thing changed.

use super::tests::{Dir, story_dir};
use super::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The expected outcome of loading a file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Want {
    Refused,
    /// It loads; what it does is the file's business.
    Works,
}
use Want::{Refused, Works};

/// Changes to the bundled file that are refused: a place and the value to put there, `-` for none.
const REFUSED: &str = r#"
/model -
/model null
/model []
/model "BPE"
/model/type "Magic"
/model/type 3
/model {"type": "Unigram", "unk_id": 5, "vocab": []}
/model/type "WordPiece"
/version "2.0"
/version 1
/model/vocab -
/model/vocab {}
/model/vocab null
/model/vocab ["a", "b"]
/model/vocab {"a": 0}
/model/vocab/a -1
/model/vocab/a 1.5
/model/vocab/a "1"
/model/vocab/a null
/model/vocab/a 4294967295
/model/vocab/a 4294967296
/model/vocab/a 1.8446744073709552e19
/model/vocab/a 70
/model/vocab/newtoken 4096
/model/vocab/ 4095
/model/merges -
/model/merges null
/model/merges {"a": "b"}
/model/merges/0 ["a"]
/model/merges/0 ["a", "b", "c"]
/model/merges/0 [1, 2]
/model/merges/0 null
/model/merges/0 ""
/model/merges/0 "ab"
/model/merges/0 "a b c"
/model/merges/0 ["zzzqqq", "a"]
/model/merges/0 ["q", "Ġ"]
/model/dropout 0.1
/model/dropout "x"
/model/continuing_subword_prefix "@@@@@@@@@@@@@@@@"
/model/end_of_word_suffix "</w>"
/model/unk_token "<nowhere>"
/model/unk_token 0
/model/fuse_unk "no"
/added_tokens {}
/added_tokens/0 null
/added_tokens/0/content -
/added_tokens/0/content ""
/added_tokens/0/content "<|im_end|>"
/added_tokens/0/special null
/added_tokens/0/id -5
/added_tokens/0/id 4294967295
/added_tokens/1/id 0
/added_tokens/0/id 300
/added_tokens/0 {"id": 4999, "content": "<|new|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
/normalizer {"type": "Magic"}
/normalizer "NFC"
/normalizer {}
/normalizer {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
/normalizer {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
/normalizer {"type": "Replace", "pattern": {"Regex": "z*"}, "content": "yy"}
/normalizer {"type": "Sequence"}
/pre_tokenizer {"type": "Whitespace"}
/pre_tokenizer {"type": "FixedLength", "length": 0}
/pre_tokenizer {"type": "ByteLevel"}
/pre_tokenizer/pretokenizers/0/pattern -
/pre_tokenizer/pretokenizers/0/behavior "Nope"
/pre_tokenizer {"type": "Metaspace"}
/pre_tokenizer {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always"}
/pre_tokenizer/pretokenizers/0/pattern/Regex "("
/pre_tokenizer/pretokenizers/0/pattern/Regex "["
/pre_tokenizer/pretokenizers/0/pattern/Regex "(?<x"
/pre_tokenizer/pretokenizers/0/pattern/Regex "\\"
/pre_tokenizer/pretokenizers/0/pattern/Regex "\\p{Nonsense}"
/pre_tokenizer/pretokenizers/0/pattern/Regex "a{1000000000}"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(?:a{1000}){1000}"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(?:\\p{L}{1000}){1000}"
/decoder null
/decoder {"type": "CTC"}
/decoder {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 5}]}
/decoder {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 9223372036854775808, "stop": 0}]}
/decoder {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}, {"type": "Fuse"}]}
/post_processor {"type": "BertProcessing", "sep": ["a", 0]}
/post_processor/single []
/post_processor/single [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "A"}}]
/post_processor/single/1/Sequence/id "B"
/post_processor/single/0/SpecialToken/id "<x>"
/post_processor/special_tokens/<|begin_of_text|>/ids [99999]
/post_processor/special_tokens/<|begin_of_text|>/ids [-1]
"#;

/// Changes that look odd or dangerous and do no harm.
const WORKS: &str = r#"
/version -
/model/merges []
/model/dropout 0.0
/model/byte_fallback true
/model/ignore_merges true
/added_tokens null
/added_tokens/0/lstrip true
/added_tokens/0/rstrip true
/added_tokens/0/single_word true
/added_tokens/0/normalized true
/truncation {"max_length": 0, "strategy": "LongestFirst", "stride": 9, "direction": "Right"}
/padding {"strategy": {"Fixed": 4611686018427387904}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
/normalizer {"type": "NFC"}
/normalizer {"type": "Sequence", "normalizers": []}
/pre_tokenizer null
/pre_tokenizer/pretokenizers/0/behavior "Removed"
/pre_tokenizer/pretokenizers/0/invert true
/pre_tokenizer/pretokenizers/0/pattern/Regex "(a|a)*(?!b)"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(a+)+$"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(?=(a+)+$)a"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(a*)*b(?=c)"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(.)\\1"
/pre_tokenizer/pretokenizers/0/pattern/Regex "(?:)"
/pre_tokenizer/pretokenizers/0/pattern/Regex ".*"
/pre_tokenizer/pretokenizers/0/pattern/Regex "a|"
/post_processor null
"#;

/// Changes that are too long to be written down.
fn large_changes() -> Vec<(&'static str, Want, Value)> {
    let nfc = json!({"type": "NFC"});
    let sequence = |inner: Vec<Value>| json!({"type": "Sequence", "normalizers": inner});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let bos = json!({"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}});
    let long = "x".repeat(1 << 20);
    let regex = "/pre_tokenizer/pretokenizers/0/pattern/Regex";
    let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": long});
    let byte_pairs: Vec<_> = (0..1000).map(|_| json!("a b")).collect();
    vec![
        ("/added_tokens/0/content", Refused, long.repeat(2).into()),
        ("/normalizer", Refused, replace),
        ("/normalizer", Refused, json!({"type": "Prepend", "prepend": long})),
        ("/normalizer", Works, (0..20).fold(nfc.clone(), |inner, _| sequence(vec![inner]))),
        ("/normalizer", Refused, sequence(vec![nfc; 10_000])),
        ("/model/merges", Works, byte_pairs.into()),
        ("/post_processor/single", Refused, vec![bos; 1_000_000].into()),
        ("/post_processor/single", Refused, vec![text; 100].into()),
        ("/post_processor/special_tokens/<|begin_of_text|>/ids", Refused, vec![0; 1_000_000].into()),
        ("/post_processor/special_tokens/<|begin_of_text|>/ids", Refused, vec![0; 1000].into()),
        (regex, Refused, "a".repeat(3000).into()),
        (regex, Refused, format!("{}a{}", "(".repeat(1000), ")".repeat(1000)).into()),
        (regex, Refused, "[".repeat(2000).into()),
    ]
}

/// `file` with a value at `place`.
fn change(file: &Value, place: &str, value: Option<Value>) -> Value {
    let mut file = file.clone();
    let (parent, name) = place.rsplit_once('/').expect("a place");
    match (file.pointer_mut(parent).expect(place), value) {
        (Value::Object(fields), Some(value)) => drop(fields.insert(name.into(), value)),
        (Value::Object(fields), None) => drop(fields.remove(name)),
        (parent, value) => parent[name.parse::<usize>().expect("a number")] = value.expect("a value"),
    }
    file
}

fn try_file(name: &str, want: Want, content: &[u8]) {
    let dir = Dir::new("hostile").with("tokenizer.json", content);
    let start = Instant::now();
    let result = Tokenizer::open(&dir.0, 4096);
    match (&result, want) {
        (Err(Error::Model(message)), Refused) => {
            assert!(message.contains("tokenizer.json: "), "{name}: {message}");
            assert!(message.len() < 700 && !message.contains('\n'), "{name}: {message}");
        }
        (Ok(tokenizer), Works) => {
            let ids =
                tokenizer.encode("Once upon a time, <|im_start|> aaa 123\n", AddSpecial::Yes).expect(name);
            let _ = (tokenizer.decode(&ids), tokenizer.decode_with_special(&ids));
            tokenizer.encode_plain(&"ab \n".repeat(1000)).expect(name);
            tokenizer.encode_plain(&"a".repeat(5000)).expect(name);
        }
        _ => panic!("{name:.200}: {want:?} was wanted, not {result:?}"),
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
    for (want, table) in [(Refused, REFUSED), (Works, WORKS)] {
        for line in table.lines().filter(|line| !line.is_empty()) {
            let (place, value) = line.split_once(' ').expect("a place and a value");
            let value = (value != "-").then(|| serde_json::from_str(value).expect(line));
            try_file(line, want, change(&good, place, value).to_string().as_bytes());
        }
    }
    for (place, want, value) in large_changes() {
        try_file(place, want, change(&good, place, Some(value)).to_string().as_bytes());
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
    for content in [
        "",
        " \n",
        "null",
        "1",
        "{}",
        "[]",
        "<html><body>404</body></html>",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        &deep("[", "]"),
        &deep("{\"a\":", "}"),
        &replaced("\"normalizer\": null", &format!("\"normalizer\": {}", deep("[", "]"))),
        &(text.clone() + "x"),
        &text.repeat(2),
        &replaced("\"normalizer\": null", "\"normalizer\": null, \"model\": {}"),
        &replaced("<|im_end|>", "\\ud800"),
        &replaced("<|im_end|>", "\\x41"),
        &replaced("<|im_end|>", "\u{1}"),
        &replaced("\"vocab\": {", "\"vocab\": {\"zz\": 1e999,"),
        &replaced("\"vocab\": {", &format!("\"vocab\": {{\"zz\": {},", "9".repeat(100_000))),
    ] {
        try_file(content, Refused, content.as_bytes());
    }
    for part in [1, 10, 500, 999] {
        try_file("cut short", Refused, &text.as_bytes()[..text.len() * part / 1000]);
    }
    try_file("UTF-16", Refused, &text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    try_file("not UTF-8", Refused, &[&b"{\"version\": \""[..], &[0xff, 0xfe], b"\"}"].concat());
    try_file("zeros", Refused, &[0; 100_000]);
    try_file("too large", Refused, &vec![b' '; (json::MAX_FILE + 1) as usize]);
    try_file("unchanged", Works, text.as_bytes());
}

#[test]
fn a_path_that_is_not_a_file_is_refused() {
    let dir = Dir::new("no-file");
    std::fs::create_dir_all(dir.0.join("tokenizer.json")).expect("a directory");
    let e = Tokenizer::open(&dir.0, 4096);
    assert!(matches!(e, Err(Error::Model(m)) if m.contains("is not a regular file")));
    let e = Tokenizer::open(Path::new("/nowhere"), 4096);
    assert!(matches!(e, Err(Error::Model(m)) if m.contains("is missing")));
}

/// One byte at a time, anywhere in the file: no panic, whatever comes of it.
#[test]
fn flipped_bytes_cause_no_panic() {
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
