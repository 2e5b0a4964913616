//! Golden runs of the bundled model: prompt and settings in, token ids and a digest of the last logits out,
//! compared bit for bit over instruction sets, thread counts and prefill chunks.
//!
//! `cargo xtask golden --bless` rewrites the expectations from the scalar kernels.

use crate::support::paths;
use crate::support::random::Random;
use antigravity::model::trace::fnv1a_digest;
use antigravity::{Engine, EngineOptions, GenerateOptions, dims};
use numeric::kv::KvTypes;
use numeric::simd::Isa;
use serde_json::{Value, json};
use std::path::PathBuf;
use text::sampler::SamplerOptions;

pub struct Run {
    pub prompt: Vec<u32>,
    pub ids: Vec<u32>,
    pub text: String,
    pub digest: String,
}

fn field<'a>(case: &'a Value, name: &str) -> &'a str {
    case[name].as_str().unwrap_or_else(|| panic!("field {name} is not a string"))
}

fn number(case: &Value, name: &str, default: f64) -> f64 {
    case[name].as_f64().unwrap_or(default)
}

/// Settings for running a case: threads, chunk size and draft length.
#[derive(Clone, Copy)]
struct RunSettings {
    threads: usize,
    chunk: usize,
    draft: usize,
}

/// Reads a case's settings of the model and its cache.
pub fn options_of(case: &Value) -> EngineOptions {
    let kv = |name| field(case, name).parse().unwrap();
    EngineOptions {
        weight_type: field(case, "weights").parse().unwrap(),
        kv_types: KvTypes { k: kv("k"), v: kv("v") },
        ..EngineOptions::new(paths::model())
    }
}

fn engine(case: &Value, isa: Isa, settings: RunSettings) -> Engine {
    let options = EngineOptions {
        threads: settings.threads,
        prefill_chunk: settings.chunk,
        draft: settings.draft,
        isa: Some(isa),
        ..options_of(case)
    };
    Engine::load(options).unwrap()
}

fn run(case: &Value, isa: Isa, settings: RunSettings) -> Run {
    run_on(&engine(case, isa, settings), case)
}

/// Runs a case on an engine.
pub fn run_on(engine: &Engine, case: &Value) -> Run {
    let options = GenerateOptions {
        max_tokens: Some(number(case, "tokens", 32.0) as usize),
        sampler: SamplerOptions {
            temperature: number(case, "temperature", 0.0) as f32,
            repetition_penalty: number(case, "repetition_penalty", 1.0) as f32,
            seed: number(case, "seed", 0.0) as u64,
            ..SamplerOptions::default()
        },
        ..GenerateOptions::default()
    };
    let mut session = engine.session().unwrap();
    let prompt = engine.encode(field(case, "prompt")).unwrap();
    let mut stream = engine.stream(&mut session, &prompt, &options).unwrap();
    let (mut ids, mut text) = (Vec::new(), String::new());
    while let Some(piece) = stream.next() {
        text += &piece.unwrap();
        ids.extend(stream.last_token());
    }
    drop(stream);
    Run { prompt, ids, text, digest: format!("{:016x}", fnv1a_digest(session.logits())) }
}

pub fn cases() -> Vec<(PathBuf, Value)> {
    let dir = paths::root().join("tests/golden").join(dims::MODEL);
    let mut files: Vec<PathBuf> = match std::fs::read_dir(&dir) {
        Ok(entries) => entries.map(|e| e.unwrap().path()).collect(),
        Err(_) => {
            eprintln!("SKIPPED: no goldens for model {} in {}", dims::MODEL, dir.display());
            Vec::new()
        }
    };
    files.sort();
    let read = |f: PathBuf| {
        let case = serde_json::from_str(&std::fs::read_to_string(&f).unwrap()).unwrap();
        (f, case)
    };
    files.into_iter().map(read).collect()
}

#[test]
fn every_path_gives_the_golden_tokens_and_logits() {
    let bless = std::env::var_os("ANTIGRAVITY_BLESS").is_some();
    for (file, mut case) in cases() {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        if bless {
            let r = run(&case, Isa::Scalar, RunSettings { threads: 1, chunk: 512, draft: 0 });
            case["expected"] = json!({"prompt": r.prompt, "ids": r.ids, "text": r.text, "digest": r.digest});
            std::fs::write(&file, serde_json::to_string_pretty(&case).unwrap() + "\n").unwrap();
            continue;
        }
        let expected = &case["expected"];
        for isa in Isa::available() {
            // Scalar code is slow, more so where another architecture is emulated.
            let scalar = isa == Isa::Scalar;
            let emulated = cfg!(not(target_arch = "x86_64"));
            let ways: &[(usize, usize, usize)] = match field(&case, "prompt").len() {
                501.. if scalar && emulated => &[],
                501.. if scalar => &[(2, 7, 0), (1, 512, 8)],
                _ if emulated => &[(2, 7, 3)],
                _ => &[(2, 1, 0), (1, 7, 0), (3, 512, 0), (2, 64, 1), (1, 64, 12)],
            };
            for &(threads, chunk, draft) in ways {
                let r = run(&case, isa, RunSettings { threads, chunk, draft });
                let at = format!(
                    "{name}: {}, {threads} threads, chunks of {chunk}, drafts of {draft}",
                    isa.name()
                );
                assert_eq!(json!(r.prompt), expected["prompt"], "token ids of the prompt of {at}");
                assert_eq!(json!(r.ids), expected["ids"], "token ids of {at}");
                assert_eq!(json!(r.text), expected["text"], "text of {at}");
                assert_eq!(json!(r.digest), expected["digest"], "last logits of {at}");
            }
        }
    }
}

/// Threads and chunk sizes drawn at random must not show in the logits.
#[test]
fn random_interleavings_of_threads_and_chunks_agree() {
    let mut random = Random(7);
    let mut draw = |n| random.below(n);
    let isa = *Isa::available().last().unwrap();
    let case = json!({"weights": "q4_0", "k": "q8", "v": "q4"});
    let prompt: Vec<u32> = (0..300).map(|i| (i * 37 % 4000) as u32 % dims::VOCAB as u32).collect();
    let mut reference = None;
    for _ in 0..6 {
        let settings = RunSettings { threads: 1 + draw(4), chunk: 1 + draw(200), draft: 0 };
        let engine = engine(&case, isa, settings);
        let mut session = engine.session().unwrap();
        let mut rest = &prompt[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at((1 + draw(150)).min(rest.len()));
            session.prefill(now, &Default::default()).unwrap();
            rest = later;
        }
        let found = fnv1a_digest(session.logits());
        assert_eq!(*reference.get_or_insert(found), found);
    }
}
