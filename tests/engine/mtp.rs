//! The block that predicts the token after the next one: its values, and that a session drafts what it predicts of the
//! whole text. Says something of models whose files have such a block only: m20n, for `cargo xtask test sliding`.

use crate::support::paths;
use antigravity::dims::{DIM, HAS_MTP};
use antigravity::model::cpu::{CpuDevice, CpuOptions, MTP_VOCAB, MtpDevice};
use antigravity::model::device::{Device, Logits, Run};
use antigravity::model::trace::fnv1a_digest;
use antigravity::model::weights::{LoadOptions, ModelPath, WeightType, Weights};
use antigravity::run::draft_model::DraftWhen;
use antigravity::run::options::BackendKind;
use antigravity::session::{CancelToken, Session};
use antigravity::{Engine, EngineOptions};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;

/// Values of `tests/fixtures/mtp.py`.
#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    given: Vec<Vec<f32>>,
    logits: Vec<Vec<f32>>,
    states: Vec<Vec<f32>>,
}

fn expected() -> Expected {
    let file = paths::root().join("tests/fixtures/mtp/m20n.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn weights(path: &Path, weight_type: WeightType) -> Arc<Weights> {
    let model = ModelPath::new(path).unwrap().open(weight_type).unwrap();
    let load = LoadOptions::new(weight_type, 2);
    Arc::new(Weights::load(&model, &load).unwrap())
}

fn block(weights: &Arc<Weights>) -> MtpDevice {
    MtpDevice::new(weights, Isa::detect().unwrap(), 2).unwrap().expect("the file has the block")
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn the_block_predicts_what_the_reference_does() {
    if !HAS_MTP {
        return;
    }
    let Expected { tokens, given, logits, states } = expected();
    let weights = weights(&paths::model(), WeightType::Native);
    let mut block = block(&weights);
    let given = given.concat();
    for first in [tokens.len(), 3, 1] {
        let mut cache = block.new_cache(KvTypes::same(KvType::F32)).unwrap();
        let mut hidden = vec![0.0; tokens.len() * DIM];
        let mut at = 0;
        for n in [first, tokens.len() - first].into_iter().filter(|n| *n > 0) {
            let run = Run::new(&mut *cache, &tokens[at..][..n], at, Logits::None);
            let run = Run { hidden: &mut hidden[at * DIM..][..n * DIM], ..run };
            block.append_pairs(run, &given[at * DIM..][..n * DIM]).unwrap();
            at += n;
        }
        let mut found = vec![0.0; tokens.len() * MTP_VOCAB];
        for (state, logits) in hidden.chunks(DIM).zip(found.chunks_mut(MTP_VOCAB)) {
            block.compute_logits(state, logits);
        }
        let far = (distance(&found, &logits.concat()), distance(&hidden, &states.concat()));
        assert!(far.0 < 1e-3 && far.1 < 1e-4, "{far:?} in parts of {first}");
    }
}

/// The most likely `length` tokens after `text`, by all pairs at once.
fn predict(weights: &Arc<Weights>, types: KvTypes, text: &[u32], length: usize) -> Vec<u32> {
    let (isa, slots) = (Isa::detect().unwrap(), 400);
    let options = CpuOptions { threads: 2, isa, kv_types: types, slots, max_tokens: slots };
    let mut model = CpuDevice::new(Arc::clone(weights), options).unwrap();
    let mut cache = model.new_cache(slots).unwrap();
    let known = &text[..text.len() - 1];
    let mut states = vec![0.0; known.len() * DIM];
    let run = Run { hidden: &mut states, ..Run::new(&mut *cache, known, 0, Logits::None) };
    model.forward(&mut [run], None).unwrap();
    let mut block = block(weights);
    let mut pairs = block.new_cache(KvTypes::same(KvType::F16)).unwrap();
    let (mut tokens, mut at, mut drafted) = (text[1..].to_vec(), 0, Vec::new());
    for _ in 0..length {
        let (mut logits, mut state) = (vec![0.0; MTP_VOCAB], vec![0.0; DIM]);
        let run = Run::new(&mut *pairs, &tokens, at, Logits::None);
        block.append_pairs(Run { hidden: &mut state, ..run }, &states).unwrap();
        block.compute_logits(&state, &mut logits);
        let best = (0..MTP_VOCAB).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32;
        drafted.push(best);
        (at, states, tokens) = (at + tokens.len(), state, vec![best]);
    }
    drafted
}

fn model_drafts(session: &Session) -> (usize, usize) {
    let counts = session.drafts().unwrap();
    (counts.model_drafted, counts.model_accepted)
}

#[test]
fn a_session_drafts_what_the_block_predicts_of_the_whole_text() {
    if !HAS_MTP {
        return;
    }
    let types = KvTypes::same(KvType::F16);
    let cpu = BackendKind::Cpu;
    let mut logits: Vec<Vec<u64>> = Vec::new();
    for (backend, device, chunk) in [(cpu, None, 256), (cpu, None, 16), (BackendKind::OpenCl, Some("0"), 64)]
    {
        let base = EngineOptions { threads: 2, max_seq_len: 400, ..EngineOptions::new(paths::model()) };
        let draft = 3;
        let options = EngineOptions {
            draft,
            draft_when: DraftWhen::Always,
            kv_types: types,
            prefill_chunk: chunk,
            backend,
            gpu_attn: true,
            cl_device: device.map(String::from),
            ..base
        };
        let engine = match Engine::load(options) {
            Err(e) if backend == BackendKind::OpenCl => {
                assert!(std::env::var("CI").as_deref() != Ok("true"), "cannot run: {e}");
                eprintln!("SKIPPED: {e}");
                continue;
            }
            engine => engine.unwrap(),
        };
        let mut session = engine.session().unwrap();
        let mut text: Vec<u32> = (0..150).map(|i| (i * 7919 % 290 + 1) as u32).collect();
        session.prefill(&text, &CancelToken::default()).unwrap();
        let (mut accepted, mut digests) = (0, Vec::new());
        for turn in 0..12 {
            text.push(turn * 23 % 290);
            session.decode(text[text.len() - 1]).unwrap();
            digests.push(fnv1a_digest(session.logits()));
            let drafted = predict(engine.weights(), types, &text, draft);
            assert_eq!(model_drafts(&session), (draft * (turn as usize + 1), accepted));
            // All of a draft, its first tokens, or none.
            for token in drafted.into_iter().take(turn as usize % (draft + 1)) {
                text.push(token);
                session.decode(token).unwrap();
                accepted += 1;
                digests.push(fnv1a_digest(session.logits()));
                assert_eq!(model_drafts(&session).1, accepted, "{backend:?}, chunks of {chunk}, turn {turn}");
            }
        }
        assert!(accepted > 10);
        logits.push(digests);
        assert_eq!(logits[0], logits[logits.len() - 1], "logits of {backend:?}, chunks of {chunk}");
    }
}
