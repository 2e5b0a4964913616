//! Files that are no session of this run, by accident or on purpose: one error each, no panic, an empty session.

use super::engine;
use crate::support::command::{TestDir, antigravity, greedy, mentions};
use crate::support::hostile;
use crate::support::paths;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::saved;
use antigravity::{Engine, EngineOptions, Error, GenerateOptions, dims};
use numeric::kv::{KvType, KvTypes};
use serde_json::{Value, json};
use std::path::Path;
use text::sampler::Rng;

/// Bytes before the header.
const PREFIX: usize = 16;

struct Bed {
    temp: TestDir,
    engine: Engine,
    /// A good file.
    good: Vec<u8>,
    /// Length of its header.
    header: usize,
}

/// The length of a file's header.
fn header(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[8..PREFIX].try_into().expect("eight bytes")) as usize
}

impl Bed {
    fn new() -> Self {
        let temp = TestDir::new();
        greedy().args(["--session", &temp.path("state")]).text();
        let good = std::fs::read(temp.path("state")).expect("the session");
        Self { temp, engine: engine(KvTypes::same(KvType::Q4), 64), header: header(&good), good }
    }

    fn load(&self, bytes: &[u8]) -> Result<(), Error> {
        let file = self.temp.write("state", bytes);
        let mut session = self.engine.session().expect("a session");
        let result = saved::load_session(Path::new(&file), &mut session, &self.engine);
        assert!(result.is_ok() || (session.tokens().is_empty() && session.extent().len == 0));
        result.map(|state| assert!(state.is_some()))
    }

    /// Checks that `bytes` are refused with the exit code `code`, and returns the error's one line.
    #[track_caller]
    fn refused(&self, bytes: &[u8], code: i32) -> String {
        let error = self.load(bytes).expect_err("refused");
        assert_eq!(error.exit_code(), code, "{error}");
        let line = error.to_string();
        assert!(line.contains("state") && line.lines().count() == 1, "{line}");
        line
    }

    /// The good file with another header, sums and all.
    fn forged(&self, edit: impl FnOnce(&mut Value)) -> Vec<u8> {
        let mut header: Value =
            serde_json::from_slice(&self.good[PREFIX..PREFIX + self.header]).expect("a header");
        edit(&mut header);
        let json = serde_json::to_vec(&header).expect("JSON");
        let mut bytes = self.good[..8].to_vec();
        bytes.extend((json.len() as u64).to_le_bytes());
        bytes.extend(&json);
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.extend(&self.good[PREFIX + self.header + 4..self.good.len() - 4]);
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bed = Bed::new();
    bed.load(&bed.good).expect("the good file");
    bed.load(&bed.forged(|_| {})).expect("the same file");
    let (header, rows) = (PREFIX + bed.header, PREFIX + bed.header + 4);
    let layer = (bed.good.len() - 4 - rows) / dims::LAYERS;
    let ends =
        [0, 1, 7, 8, 9, 15, 16, 17, header - 1, header, header + 1, rows, rows + 1, bed.good.len() - 1];
    let layers = (1..=dims::LAYERS).map(|l| rows + l * layer);
    let mut rng = Rng::new(1);
    let random = (0..50).map(|_| rng.next_u64() as usize % bed.good.len());
    for n in ends.into_iter().chain(layers).chain(random) {
        bed.refused(&bed.good[..n], 3);
    }
    bed.refused(&[&bed.good[..], &[0]].concat(), 3);
}

#[test]
fn no_text_of_a_session_gets_into_an_error_as_it_is() {
    let bed = Bed::new();
    let header = serde_json::from_slice(&bed.good[PREFIX..PREFIX + bed.header]).expect("a header");
    for (place, changed) in hostile::variants(&header, &hostile::text()) {
        if let Err(e) = bed.load(&bed.forged(|header| *header = changed)) {
            hostile::assert_line(&place, &e.to_string());
        }
    }
    let line = bed.refused(&bed.forged(|header| header["model"] = hostile::text().into()), 3);
    mentions(&line, &["another model", "\\u{1b}[2J", "…", "give `Session` another file"]);
}

#[test]
fn rows_that_are_no_numbers_are_named_and_weights_are_not_blamed() {
    let bed = Bed::new();
    // The scale of the first block of layer 2, whose row is NaN then.
    let rows = PREFIX + bed.header + 4;
    let layer = (bed.good.len() - 4 - rows) / dims::LAYERS;
    let mut bytes = bed.good[..bed.good.len() - 4].to_vec();
    bytes[rows + 2 * layer..][..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    let line = bed.refused(&bytes, 3);
    mentions(&line, &["layer 2 holds NaN or infinity", "delete it", "`Session`"]);
}

#[test]
fn flipped_bits_are_refused() {
    let bed = Bed::new();
    let mut rng = Rng::new(2);
    let anywhere = (0..50).map(|_| rng.next_u64() as usize % (bed.good.len() * 8)).collect::<Vec<_>>();
    for bit in anywhere.into_iter().chain(0..(PREFIX + 8) * 8) {
        let mut bytes = bed.good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        bed.refused(&bytes, 3);
    }
}

#[test]
fn lengths_beyond_all_memory_are_refused() {
    let bed = Bed::new();
    let all = bed.good.len() as u64;
    for length in
        [u64::MAX, u64::MAX - 15, u64::MAX - 19, 1 << 63, 1 << 40, 1 << 28, all, all - 16, all - 19, 0]
    {
        let mut bytes = bed.good.clone();
        bytes[8..PREFIX].copy_from_slice(&length.to_le_bytes());
        mentions(&bed.refused(&bytes, 3), &["damaged"]);
    }
    // A file that says it is huge, without the disk for it.
    let mut bytes = bed.good[..8].to_vec();
    bytes.extend((1u64 << 40).to_le_bytes());
    let file = bed.temp.write("sparse", &bytes);
    let sparse = std::fs::OpenOptions::new().write(true).open(&file).expect("the file");
    sparse.set_len(1 << 41).expect("a sparse file");
    let mut session = bed.engine.session().expect("a session");
    assert!(saved::load_session(Path::new(&file), &mut session, &bed.engine).is_err());
    let slots = |n: u64| bed.forged(|h| h["sequence"]["slots"] = json!(n));
    for n in [u64::MAX, 1 << 60, 65, 1] {
        mentions(&bed.refused(&slots(n), 3), &["damaged"]);
    }
    let tokens = |n: usize| {
        bed.forged(|h| {
            h["sequence"]["tokens"] = json!(vec![5; n]);
            h["sequence"]["slots"] = json!(n);
        })
    };
    mentions(&bed.refused(&tokens(63), 3), &["damaged"]);
    mentions(&bed.refused(&tokens(65), 2), &["65 tokens", "raise `EngineOptions::max_seq_len`"]);
}

#[test]
fn headers_that_do_not_fit_are_refused() {
    let bed = Bed::new();
    let refused = |code, edit: &dyn Fn(&mut Value)| bed.refused(&bed.forged(edit), code);
    mentions(
        &refused(3, &|h| h["model"] = json!("0123\n")),
        &["another model (0123\\n, this is", "delete it"],
    );
    mentions(&refused(2, &|h| h["weights"] = json!("f32")), &["`EngineOptions::weight_type` f32"]);
    mentions(&refused(2, &|h| h["kv"] = json!(["q8", "q8"])), &["`EngineOptions::kv_types` q8;"]);
    mentions(&refused(2, &|h| h["kv"] = json!(["q8", "q4"])), &["`KvTypes::k` q8 `KvTypes::v` q4;"]);
    let mut other = bed.good.clone();
    other[7] = b'1';
    mentions(&bed.refused(&other, 3), &["session format 1, but this program reads 8"]);
    mentions(&refused(3, &|h| h["calibration"] = json!("0123")), &["another calibration", "delete it"]);
    mentions(&refused(3, &|h| h["calibration"] = json!(null)), &["another calibration", "delete it"]);
    let wrong: [&dyn Fn(&mut Value); 15] = [
        &|h| h["kv"] = json!(["q3", "q4"]),
        &|h| h["kv"] = json!(["q4"]),
        &|h| h["sequence"]["tokens"][3] = json!(dims::VOCAB),
        &|h| h["sequence"]["tokens"][3] = json!(-1),
        &|h| h["sequence"]["cuts"] = json!([{"tokens": u64::MAX, "kept": 1}]),
        &|h| h["sequence"]["cuts"] = json!([{"tokens": 4, "kept": 5}]),
        &|h| h["sequence"]["dense"] = json!(u64::MAX),
        &|h| {
            h["sequence"]["cuts"] = json!([{"tokens": 4, "kept": 3}]);
            h["sequence"]["prefix"] = json!(u64::MAX);
        },
        &|h| h["sequence"]["since"] = json!(0),
        &|h| h["state"]["rng"] = json!([0, 0, 0, 0]),
        &|h| h["state"]["content"]["text"]["tokens"] = json!([dims::VOCAB]),
        &|h| h["state"]["content"] = json!({"text": {"tokens": []}, "chat": {}}),
        &|h| h["state"]["content"]["text"]["unshown"]["bytes"]["pending"] = json!([256]),
        &|h| h["more"] = json!(1),
        &|h| *h = json!([]),
    ];
    for (i, edit) in wrong.iter().enumerate() {
        let line = bed.refused(&bed.forged(edit), 3);
        assert!(line.contains("damaged"), "{i}: {line}");
    }
}

#[test]
fn a_refused_session_is_one_line_of_error() {
    let bed = Bed::new();
    let file = bed.temp.path("state");
    let refused = |bytes: &[u8], code, more: &[&str]| {
        bed.temp.write("state", bytes);
        antigravity(["generate", "-p", "x", "--session", &file]).args(more).fails(code)
    };
    mentions(&refused(&bed.good, 2, &["-ctv", "f16"]), &["--session", "--kv-type q4"]);
    mentions(&refused(&bed.good, 2, &["--weight-type", "f32"]), &["--session", "--weight-type q4_0"]);
    mentions(&refused(&bed.good[..bed.good.len() / 2], 3, &[]), &["state", "damaged", "delete it"]);
    mentions(&refused(&bed.forged(|h| h["model"] = json!("x")), 3, &[]), &["another model"]);
    mentions(&refused(&bed.good[..5], 3, &[]), &["not a saved session"]);
}

/// Checks that held-back text is handled like any other text, however long it is.
#[test]
fn saved_held_back_text_is_treated_as_any_text() {
    let bed = Bed::new();
    let unshown = json!({"bytes": {"pending": vec![255; 3000], "strip": u64::MAX}, "stop": "é".repeat(3000)});
    let bytes = bed.forged(|h| h["state"]["content"]["text"]["unshown"] = unshown);
    let file = bed.temp.write("state", bytes);
    let said = antigravity(["generate", "--temp", "0", "--session", &file, "-r", "éy"]).text();
    assert!(said.starts_with(&"é".repeat(2999)), "{said}");
}

/// Layouts that contradict nothing but that no eviction leaves: whatever comes of them, it is no panic.
#[test]
fn strange_layouts_go_on_or_fail() {
    let temp = TestDir::new();
    greedy().args(["--session", &temp.path("state"), "-c", "64"]).text();
    let good = std::fs::read(temp.path("state")).expect("the session");
    let mut rng = Rng::new(5);
    let mut pick = |n: usize| (rng.next_u64() % n as u64) as usize;
    let mut loaded = 0;
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let eviction = Eviction { policy, window: 20, prefix: Some(3), memory_threshold: 0 };
        let model =
            EngineOptions { max_seq_len: 24, threads: 1, eviction, ..EngineOptions::new(paths::model()) };
        let engine = Engine::load(model).expect("the bundled model");
        let bed = Bed { temp: TestDir::new(), engine, header: header(&good), good: good.clone() };
        for _ in 0..150 {
            let (tokens, slots) = (10 + pick(30), 1 + pick(24));
            let cuts: Vec<Value> =
                (0..1 + pick(2)).map(|_| json!({"tokens": pick(tokens) + 1, "kept": pick(8) + 1})).collect();
            let since = Some(pick(tokens + 9)).filter(|&s| s % 3 > 0);
            // Ascending, from anywhere.
            let (first, left) = (pick(tokens), pick(slots + 1));
            let head: Vec<usize> = (first..tokens).take(left).collect();
            let heads = if pick(2) == 0 { 0 } else { dims::LAYERS * dims::KV_HEADS };
            let mut bytes = bed.forged(|h| {
                h["sequence"] = json!({
                    "positions": vec![head; heads],
                    "tokens": vec![5; tokens], "slots": slots, "cuts": cuts, "prefix": pick(slots + 1),
                    "dense": tokens - pick(slots.min(tokens) + 1), "since": since,
                });
            });
            let row = KvTypes::same(KvType::Q4).slot_bytes(dims::LAYERS, dims::KV_HEADS, dims::HEAD_DIM);
            let mass = since.map_or(0, |_| dims::LAYERS * dims::KV_HEADS * 4);
            bytes.truncate(PREFIX + header(&bytes) + 4);
            bytes.resize(bytes.len() + slots * (row + mass), 0);
            bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
            let file = bed.temp.write("state", bytes);
            let mut session = bed.engine.session().expect("a session");
            if saved::load_session(Path::new(&file), &mut session, &bed.engine).is_err() {
                continue;
            }
            loaded += 1;
            let mut prompt = session.tokens().to_vec();
            prompt.truncate(pick(2 * tokens));
            prompt.push(7);
            let options = GenerateOptions { max_tokens: Some(3), ..GenerateOptions::default() };
            if let Ok(mut stream) = bed.engine.stream(&mut session, &prompt, &options) {
                let _ = stream.by_ref().collect::<Result<String, Error>>();
            }
            let _ = session.rewind(pick(session.position() + 1));
            let _ = session.decode(9);
        }
    }
    assert!(loaded > 200, "{loaded}");
}
