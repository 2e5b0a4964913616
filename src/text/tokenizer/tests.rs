//! Encoding, decoding and streaming with the bundled model's tokenizer and with small ones of the
//! supported families.

use super::*;
use crate::sampler::Rng;
use serde_json::{Value, json};
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(super) fn story_dir() -> PathBuf {
    crate::project().join("models/story")
}

fn fixture(name: &str) -> PathBuf {
    crate::project().join("tests/fixtures/models").join(name)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("ids")
}

/// A directory with these files, gone with the value.
pub(super) struct Dir(pub PathBuf);

impl Dir {
    pub(super) fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let unique = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("antigravity-{name}-{}-{}", unique.0, unique.1));
        fs::create_dir_all(&dir).expect("a temporary directory");
        Self(dir)
    }

    pub(super) fn with(self, file: &str, content: impl AsRef<[u8]>) -> Self {
        fs::write(self.0.join(file), content).expect("writable");
        self
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Llama 2's form: words with a leading U+2581, bytes as fallback, no pre-tokenizer.
fn sentence_piece(name: &str) -> Dir {
    let mut vocab = serde_json::Map::new();
    let mut put = |token: &str| {
        let id = vocab.len();
        vocab.insert(token.into(), id.into());
    };
    ["<unk>", "<s>", "</s>"].iter().for_each(|t| put(t));
    (0..256).for_each(|b| put(&format!("<0x{b:02X}>")));
    "▁abcdefghijklmnopqrstuvwxyz.,".chars().for_each(|c| put(&c.to_string()));
    ["▁t", "he", "▁the", "▁▁"].iter().for_each(|t| put(t));
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": ["▁ t", "h e", "▁t he", "▁ ▁"]}
    });
    Dir::new(name).with("tokenizer.json", file.to_string()).with(
        "tokenizer_config.json",
        r#"{"add_bos_token": true, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#,
    )
}

#[test]
fn prompts_of_small_models_have_the_reference_ids() {
    for name in ["m1-llama32-bf16", "m4-qwen2-bf16"] {
        let expected = read(&fixture(name).join("expected.json"));
        let vocab = expected["vocab_size"].as_u64().expect("a size") as usize;
        let tokenizer = Tokenizer::open(&fixture(name), vocab).expect("loads");
        for prompt in expected["text_prompts"].as_array().expect("prompts") {
            let text = prompt["text"].as_str().expect("a text");
            assert_eq!(tokenizer.encode(text, AddSpecial::Yes), Ok(ids(&prompt["ids"])), "{name} {text:?}");
            let greedy = ids(&prompt["greedy_ids"]);
            assert_eq!(tokenizer.decode(&greedy), prompt["greedy_text"].as_str().expect("a text"), "{name}");
        }
        assert_eq!(tokenizer.eos_ids(), ids(&expected["eos_token_ids"]), "{name}");
        assert_eq!(tokenizer.bos_id().map(u64::from), expected["bos_token_id"].as_u64(), "{name}");
    }
}

#[test]
fn golden_prompts_of_the_bundled_model_have_the_reference_ids() {
    let tokenizer = Tokenizer::open(&story_dir(), 4096).expect("loads");
    for prompt in read(&story_dir().join("golden/prompts.json")).as_array().expect("prompts") {
        let (text, want) = (prompt["text"].as_str().expect("a text"), ids(&prompt["token_ids"]));
        let special = if text.starts_with("<|begin_of_text|>") { AddSpecial::No } else { AddSpecial::Yes };
        assert_eq!(tokenizer.encode(text, special), Ok(want), "{}", prompt["name"]);
        assert_eq!(
            tokenizer.decode_with_special(&ids(&prompt["greedy_ids"])),
            prompt["greedy_text"].as_str().expect("a text")
        );
    }
    assert_eq!((tokenizer.bos_id(), tokenizer.bos_token()), (Some(0), Some("<|begin_of_text|>")));
    assert_eq!(tokenizer.eos_ids(), [1, 3]);
    assert_eq!(tokenizer.vocab_size(), 4096);
    assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(3));
}

#[test]
fn special_text_in_plain_text_stays_text() {
    let tokenizer = Tokenizer::open(&story_dir(), 4096).expect("loads");
    let text = "say <|im_end|>\n<|im_start|>system<|begin_of_text|>";
    let with = tokenizer.encode(text, AddSpecial::No).expect("encodes");
    assert_eq!(with.iter().filter(|&&id| tokenizer.is_special(id)).count(), 3);
    let plain = tokenizer.encode_plain(text).expect("encodes");
    assert!(!plain.iter().any(|&id| tokenizer.is_special(id)));
    assert_eq!(tokenizer.decode(&plain), text);
    assert_eq!(tokenizer.decode_with_special(&with), text);
    assert_eq!(tokenizer.decode(&with), "say \nsystem");
    // Switching special tokens off does not last.
    assert_eq!(tokenizer.encode(text, AddSpecial::No), Ok(with));

    // Without a split rule a whole text can be a word of the vocabulary.
    let mut file = read(&story_dir().join("tokenizer.json"));
    file["pre_tokenizer"] =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    file["model"]["ignore_merges"] = json!(true);
    let dir = Dir::new("plain").with("tokenizer.json", file.to_string());
    let tokenizer = Tokenizer::open(&dir.0, 4096).expect("loads");
    let plain = tokenizer.encode_plain("<|im_end|>").expect("encodes");
    assert!(!plain.iter().any(|&id| tokenizer.is_special(id)));
    assert_eq!(tokenizer.decode(&plain), "<|im_end|>");
}

#[test]
fn begin_of_text_is_added_once() {
    let dir = sentence_piece("bos");
    let tokenizer = Tokenizer::open(&dir.0, 400).expect("loads");
    let plain = tokenizer.encode("the cat", AddSpecial::No).expect("encodes");
    let with = tokenizer.encode("the cat", AddSpecial::Yes).expect("encodes");
    assert_eq!(with, [&[1], plain.as_slice()].concat());
    assert_eq!(tokenizer.eos_ids(), [2]);
    assert_eq!(tokenizer.bos_token(), Some("<s>"));
    // Here the template adds it and tokenizer_config.json asks for it.
    let story = Tokenizer::open(&story_dir(), 4096).expect("loads");
    let ids = story.encode("the cat", AddSpecial::Yes).expect("encodes");
    assert_eq!(ids.iter().filter(|&&id| id == 0).count(), 1);
}

#[test]
fn padding_ends_a_text_only_where_it_is_a_control_token() {
    let file = fs::read(story_dir().join("tokenizer.json")).expect("bundled");
    for (pad, ends) in [("<|im_end|>", &[1, 3][..]), (" the", &[1]), ("the", &[1]), ("nowhere", &[1])] {
        let settings = json!({"eos_token": "<|end_of_text|>", "pad_token": pad}).to_string();
        let dir = Dir::new("pad").with("tokenizer.json", &file).with("tokenizer_config.json", &settings);
        // A byte order mark is no part of a file.
        let dir = dir.with("generation_config.json", "\u{feff}{}");
        assert_eq!(Tokenizer::open(&dir.0, 4096).expect("loads").eos_ids(), ends, "{pad}");
    }
}

/// The text that the library decodes: the reference for our decoders.
fn library_decode(dir: &Path, ids: &[u32]) -> String {
    let library = Library::from_file(dir.join("tokenizer.json")).expect("loads");
    library.decode(ids, true).expect("decodes")
}

#[test]
fn streams_add_up_to_the_whole_text() {
    let pieces = sentence_piece("stream");
    for (dir, limit) in [
        (story_dir(), 4096),
        (fixture("m1-llama32-bf16"), 352),
        (fixture("m4-qwen2-bf16"), 336),
        (pieces.0.clone(), 400),
    ] {
        let tokenizer = Tokenizer::open(&dir, limit).expect("loads");
        let mut rng = Rng::new(1);
        // Runs of single bytes make whole and broken characters.
        for round in 0..40u64 {
            let low = if round % 2 == 0 { 300 } else { limit as u64 };
            let ids: Vec<u32> = (0..400).map(|_| (rng.next_u64() % low) as u32).collect();
            let want = library_decode(&dir, &ids);
            assert_eq!(tokenizer.decode(&ids), want, "{dir:?} {round}");
            let mut stream = tokenizer.decode_stream();
            let mut text = String::new();
            for &id in &ids {
                text.push_str(&stream.push(id));
                assert!(want.starts_with(&text), "{dir:?} {round}: never taken back");
            }
            assert_eq!(text + &stream.finish(), want);
        }
        for text in
            ["  two spaces, né 한국어 \u{1f468}\u{200d}\u{1f4bb}\n\n", "", " ", "x", "\u{fffd}\0\u{7f}"]
        {
            let ids = tokenizer.encode(text, AddSpecial::Yes).expect("encodes");
            assert_eq!(tokenizer.decode(&ids), text, "{dir:?}");
            let mut stream = tokenizer.decode_stream();
            let streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
            assert_eq!(streamed + &stream.finish(), text, "{dir:?}");
        }
    }
}

#[test]
fn a_character_comes_with_its_last_byte() {
    let tokenizer = Tokenizer::open(&story_dir(), 4096).expect("loads");
    let ids = tokenizer.encode("\u{1f600}!", AddSpecial::No).expect("encodes");
    let mut stream = tokenizer.decode_stream();
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    let (last, first) = pieces.split_last().expect("several tokens");
    assert_eq!(last, "!");
    assert_eq!(first.concat(), "\u{1f600}");
    assert!(first.iter().filter(|p| !p.is_empty()).count() == 1, "{pieces:?}");
    // Cut short, it becomes one replacement character, at the end only.
    let mut stream = tokenizer.decode_stream();
    assert_eq!(stream.push(ids[0]), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
}

/// CPU time of this thread: other programs on the machine do not count.
fn computed() -> Duration {
    let nanoseconds = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = nanoseconds.and_then(|text| text.split_whitespace().next()?.parse().ok());
    Duration::from_nanos(nanoseconds.expect("the kernel counts the time of threads"))
}

#[test]
fn the_time_of_a_megabyte_is_not_quadratic() {
    let pieces = sentence_piece("long");
    for (dir, limit) in [(story_dir(), 4096), (pieces.0.clone(), 400)] {
        let tokenizer = Tokenizer::open(&dir, limit).expect("loads");
        for unit in
            ["a", "the cat sat. ", "1", "!", "\n", " x", "한", "\u{301}", "<|im_end|>", "'s ", "a\u{a0}"]
        {
            let time = |bytes: usize| {
                let text = unit.repeat(bytes / unit.len());
                let start = computed();
                let ids = tokenizer.encode(&text, AddSpecial::No).expect("encodes");
                let decoded = tokenizer.decode_with_special(&ids);
                assert!(decoded == text, "{unit:?}");
                computed() - start
            };
            // Sixteen times the text: four times what that should cost, on machines of any speed.
            let (short, long) = (time(1 << 16), time(1 << 20));
            let limit = 64 * short + Duration::from_secs(5);
            assert!(long < limit, "{unit:?} took {short:?}, then {long:?}");
        }
        let blanks = " ".repeat(900_000) + "x";
        let ids = tokenizer.encode(&blanks, AddSpecial::No).expect("encodes");
        assert!(tokenizer.decode(&ids) == blanks);
        assert!(matches!(tokenizer.encode(&" ".repeat(900_001), AddSpecial::No), Err(Error::Usage(_))));
    }
}

#[test]
fn a_vocabulary_that_does_not_fit_is_refused() {
    let Err(Error::Model(message)) = Tokenizer::open(&story_dir(), 4095) else { panic!("was accepted") };
    assert!(
        message.contains("has id 4095, but the model this program was built for has 4095 tokens"),
        "{message}"
    );
    assert!(message.contains("cargo build --release"), "{message}");
}

#[test]
fn broken_settings_are_named() {
    let file = fs::read(story_dir().join("tokenizer.json")).expect("bundled");
    for (name, content, part) in [
        (
            "generation_config.json",
            r#"{"eos_token_id": "x"}"#,
            "field `eos_token_id` is \"x\"; supported: an id below",
        ),
        ("generation_config.json", r#"{"eos_token_id": [1, -2]}"#, "field `eos_token_id` is [1,-2]"),
        ("config.json", r#"{"eos_token_id": 5000}"#, "field `eos_token_id` is 5000"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{", "is not valid JSON"),
        ("config.json", "\u{0}", "is not valid JSON"),
        (
            "tokenizer_config.json",
            r#"{"eos_token": "<none>"}"#,
            "field `eos_token` is \"<none>\", not a token",
        ),
        ("tokenizer_config.json", r#"{"eos_token": 7}"#, "field `eos_token` is 7"),
        ("tokenizer_config.json", r#"{"bos_token": []}"#, "field `bos_token` is []"),
        ("tokenizer_config.json", r#"{"add_bos_token": 1}"#, "field `add_bos_token` is 1"),
        ("tokenizer_config.json", r#"{"add_bos_token": true}"#, "`bos_token` is missing"),
    ] {
        let dir = Dir::new("settings").with("tokenizer.json", &file).with(name, content);
        let Err(Error::Model(message)) = Tokenizer::open(&dir.0, 4096) else { panic!("{content} accepted") };
        assert!(message.contains(name) && message.contains(part), "{message}");
    }
    let dir = Dir::new("no-settings").with("tokenizer.json", &file);
    let tokenizer = Tokenizer::open(&dir.0, 4096).expect("settings are optional");
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (Some(0), &[][..]));
    let dir = Dir::new("missing").with("config.json", "{}");
    assert!(
        matches!(Tokenizer::open(&dir.0, 9), Err(Error::Model(m)) if m.contains("tokenizer.json: is missing"))
    );
}

/// Texts of words, lines, other scripts and control tokens, much longer than what is encoded at once.
fn long_texts() -> Vec<String> {
    let pieces = [
        "The dog",
        " ran",
        " to",
        " 12345",
        "\n",
        "\n\n",
        "  ",
        ".",
        " é",
        "한국",
        " <|im_start|>",
        "x",
        "</s>",
        " e\u{301}",
        "!?",
    ];
    let mut rng = Rng::new(11);
    let mixed = |_| (0..30_000).map(|_| pieces[(rng.next_f32() * pieces.len() as f32) as usize]).collect();
    let mut texts: Vec<String> = (0..2).map(mixed).collect();
    texts.push("word ".repeat(20_000));
    texts.push("unbroken".repeat(6_000));
    texts
}

#[test]
fn a_long_text_has_the_ids_that_it_has_at_once_and_at_least_as_many_as_is_said() {
    let pieces = sentence_piece("long");
    let mut dirs = vec![story_dir(), pieces.0.clone()];
    dirs.extend(["m1-llama32-bf16", "m4-qwen2-bf16"].map(fixture));
    for dir in dirs {
        let tokenizer = Tokenizer::open(&dir, 1 << 20).expect("a tokenizer");
        for text in long_texts() {
            let library = tokenizer.library.read().expect("not poisoned");
            let whole = tokenizer.encode_with(&library, &text).expect("encodes");
            drop(library);
            assert!(tokenizer.encode(&text, AddSpecial::No).expect("encodes") == whole, "{}", dir.display());
            assert!((1..=text.len()).contains(&tokenizer.longest_chunk(&text)), "{}", text.len());
            let least = tokenizer.min_tokens(&text);
            assert!(least <= whole.len(), "{least} of {}", whole.len());
        }
    }
    let story = Tokenizer::open(&story_dir(), 1 << 20).expect("a tokenizer");
    assert!(story.min_tokens(&"a".repeat(1 << 20)) > 10_000);
    let parts = ["word ".repeat(60_000), "a".repeat(60_000)].map(|text| story.longest_chunk(&text));
    assert_eq!((parts[0] <= 2 * split::CHUNK_BYTES, parts[1]), (true, 60_000));
    let stopped =
        story.encode_until(&"word ".repeat(20_000), SpecialText::AsTokens, AddSpecial::No, &|| true);
    assert_eq!(stopped, Err(Error::Interrupted));
}
