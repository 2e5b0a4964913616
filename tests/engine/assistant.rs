//! A Gemma 4 assistant: its logits, that a session drafts what it predicts, and that texts stay the same. Says something
//! of the model that the small assistant in `tests/fixtures/assistant` was made for only: m22, for
//! `cargo xtask test sliding`.

use crate::support::paths;
use antigravity::dims::{ARCH, DIM};
use antigravity::model::cpu::{AssistantDevice, CpuDevice, CpuOptions};
use antigravity::model::device::{Device, KvCache, Logits, Run};
use antigravity::model::trace::fnv1a_digest;
use antigravity::model::weights::{Assistant, LoadOptions, ModelPath, WeightType, Weights};
use antigravity::run::draft_model::DraftWhen;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::session::{CancelToken, Session};
use antigravity::{Engine, EngineOptions, GenerateOptions};
use files::config::Arch;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use text::sampler::SamplerOptions;

/// A text of `tests/fixtures/assistant.py`, with what it expects of each of the tokens drafted after it.
#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    states: Vec<Vec<f32>>,
    logits: Vec<Vec<f32>>,
    all_logits: Vec<Vec<f32>>,
}

fn folder() -> PathBuf {
    paths::root().join("tests/fixtures/assistant")
}

/// True if the program is built for a model that the assistant fits.
fn fits() -> bool {
    ARCH == Arch::Gemma4 && Assistant::load(&folder()).is_ok()
}

/// A copy of the assistant with changed fields in its config.
struct Changed(PathBuf);

impl Changed {
    fn new(name: &str, change: impl Fn(&mut Value)) -> Self {
        let dir = std::env::temp_dir().join(format!("antigravity-assistant-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::copy(folder().join("model.safetensors"), dir.join("model.safetensors")).unwrap();
        let mut config =
            serde_json::from_slice(&std::fs::read(folder().join("config.json")).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Self(dir)
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn weights() -> Arc<Weights> {
    let model = ModelPath::new(&paths::model()).unwrap().open(WeightType::Native).unwrap();
    Arc::new(Weights::load(&model, &LoadOptions::new(WeightType::Native, 2)).unwrap())
}

fn device(weights: &Arc<Weights>, folder: &Path) -> AssistantDevice {
    AssistantDevice::new(weights, Assistant::load(folder).unwrap(), Isa::detect().unwrap(), 2).unwrap()
}

/// Computes `tokens`; returns the cache and the final state of the last.
fn compute(weights: &Arc<Weights>, types: KvTypes, tokens: &[u32]) -> (Box<dyn KvCache>, Vec<f32>) {
    let (isa, slots) = (Isa::detect().unwrap(), 400);
    let options = CpuOptions { threads: 2, isa, kv_types: types, slots, max_tokens: slots };
    let mut model = CpuDevice::new(Arc::clone(weights), options).unwrap();
    let (mut cache, mut state) = (model.new_cache(slots).unwrap(), vec![0.0; DIM]);
    let run = Run { hidden: &mut state, ..Run::new(&mut *cache, tokens, 0, Logits::None) };
    model.forward(&mut [run], None).unwrap();
    (cache, state)
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn logits_are_those_of_transformers() {
    if !fits() {
        return;
    }
    let file = folder().join("expected.json");
    let texts: Vec<Expected> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let (weights, whole) = (weights(), Changed::new("whole", |c| c["use_ordered_embeddings"] = false.into()));
    let mut clustered = device(&weights, &folder());
    let mut unclustered = device(&weights, &whole.0);
    for Expected { tokens, states, logits, all_logits } in texts {
        let (next, before) = tokens.split_last().unwrap();
        let (mut cache, mut state) = compute(&weights, KvTypes::same(KvType::F32), before);
        let mut token = (*next, before.len());
        for (i, given) in states.iter().enumerate() {
            // Over a long text, the model's own rows and states are a little off.
            let (near, state_near) = if before.len() < 100 { (1e-4, 1e-4) } else { (5e-4, 1e-3) };
            let far = distance(&state, given);
            assert!(far < state_near, "state {i} after {} tokens: {far}", before.len());
            state.copy_from_slice(given);
            let mut same = state.clone();
            unclustered.predict_token(&mut *cache, token, &mut same).unwrap();
            let all: Vec<f32> = unclustered.predicted_logits().map(|(_, logit)| logit).collect();
            token.0 = clustered.predict_token(&mut *cache, token, &mut state).unwrap();
            assert_eq!(state, same);
            let found: Vec<(u32, f32)> = clustered.predicted_logits().collect();
            let expected: Vec<f32> = found.iter().map(|(token, _)| logits[i][*token as usize]).collect();
            let found: Vec<f32> = found.into_iter().map(|(_, logit)| logit).collect();
            let far = (distance(&found, &expected), distance(&all, &all_logits[i]));
            assert!(far.0 < near && far.1 < near, "token {i} after {} tokens: {far:?}", before.len());
            // Transformers gives all other tokens one less than the least logit.
            let least = expected.iter().copied().fold(f32::INFINITY, f32::min);
            assert_eq!(logits[i].iter().filter(|logit| **logit >= least).count(), found.len());
            let best = (0..logits[i].len()).max_by(|&a, &b| logits[i][a].total_cmp(&logits[i][b])).unwrap();
            assert_eq!(token.0 as usize, best);
        }
    }
}

fn options(draft: usize) -> EngineOptions {
    let draft_model = (draft > 0).then(folder);
    let base = EngineOptions { threads: 2, max_seq_len: 400, ..EngineOptions::new(paths::model()) };
    EngineOptions {
        draft,
        draft_model,
        draft_when: DraftWhen::Always,
        weight_type: WeightType::Native,
        ..base
    }
}

fn model_drafts(session: &Session) -> (usize, usize) {
    let counts = session.drafts().unwrap();
    (counts.model_drafted, counts.model_accepted)
}

#[test]
fn a_session_drafts_what_the_assistant_predicts() {
    if !fits() {
        return;
    }
    for (kv, chunk) in [(KvType::F16, 256), (KvType::Q4, 16), (KvType::Q8, 256)] {
        let (draft, kv_types) = (3, KvTypes::same(kv));
        let engine =
            Engine::load(EngineOptions { kv_types, prefill_chunk: chunk, ..options(draft) }).unwrap();
        let plain = Engine::load(EngineOptions { kv_types, ..options(0) }).unwrap();
        let (mut session, mut undrafted) = (engine.session().unwrap(), plain.session().unwrap());
        let mut assistant = device(engine.weights(), &folder());
        let mut text: Vec<u32> = (0..150).map(|i| (i * 7919 % 290 + 1) as u32).collect();
        session.prefill(&text, &CancelToken::default()).unwrap();
        undrafted.prefill(&text, &CancelToken::default()).unwrap();
        let mut accepted = 0;
        let mut step = |token, session: &mut Session| {
            session.decode(token).unwrap();
            undrafted.decode(token).unwrap();
            assert_eq!(fnv1a_digest(session.logits()), fnv1a_digest(undrafted.logits()));
        };
        for turn in 0..12 {
            let (mut cache, mut state) = compute(engine.weights(), kv_types, &text);
            text.push(turn * 23 % 290);
            step(text[text.len() - 1], &mut session);
            let (mut drafted, mut next, pos) = (Vec::new(), text[text.len() - 1], text.len() - 1);
            for _ in 0..draft {
                next = assistant.predict_token(&mut *cache, (next, pos), &mut state).unwrap();
                drafted.push(next);
            }
            assert_eq!(model_drafts(&session), (draft * (turn as usize + 1), accepted));
            // All of a draft, its first tokens, or none.
            for token in drafted.into_iter().take(turn as usize % (draft + 1)) {
                text.push(token);
                step(token, &mut session);
                accepted += 1;
                assert_eq!(model_drafts(&session).1, accepted, "{kv:?}, turn {turn}");
            }
        }
        assert!(accepted > 10);
    }
}

#[test]
fn texts_are_the_same_with_and_without() {
    if !fits() {
        return;
    }
    let eviction = Eviction { policy: Policy::Sliding, window: 48, prefix: Some(4), memory_threshold: 0 };
    for (temperature, eviction) in [(0.0, Eviction::NEVER), (1.0, Eviction::NEVER), (1.0, eviction)] {
        let [plain, drafted] = [0, 4].map(|draft| {
            let max_seq_len = if eviction.policy == Policy::None { 400 } else { 64 };
            let engine = Engine::load(EngineOptions { eviction, max_seq_len, ..options(draft) }).unwrap();
            // Without the tokens that end a text.
            let logit_bias = (320..336).map(|token| (token, f32::NEG_INFINITY)).collect();
            let sampler = SamplerOptions { temperature, seed: 7, logit_bias, ..Default::default() };
            let options = GenerateOptions { max_tokens: Some(150), sampler, ..Default::default() };
            let mut session = engine.session().unwrap();
            let prompt: Vec<u32> = (0..20).map(|i| (i * 7919 % 290 + 1) as u32).collect();
            let pieces = engine.stream(&mut session, &prompt, &options).unwrap();
            let text: String = pieces.map(Result::unwrap).collect();
            if draft > 0 {
                assert!(model_drafts(&session).0 > 100, "{:?}", session.drafts());
            }
            (text, session.tokens().to_vec())
        });
        assert!(plain.1.len() > 100, "{plain:?}");
        assert_eq!(plain, drafted, "temperature {temperature}, {:?}", eviction.policy);
    }
}

#[test]
fn an_assistant_of_another_model_is_refused_in_one_line() {
    if ARCH != Arch::Gemma4 {
        // Whatever it was made for, it is none of this model.
        let options =
            EngineOptions { draft: 4, draft_model: Some(folder()), ..EngineOptions::new(paths::model()) };
        let line = Engine::load(options).err().expect("it is refused").to_string();
        assert!(line.contains("`model_type` is gemma4"), "{line}");
        return;
    }
    if !fits() {
        return;
    }
    type Change = fn(&mut Value);
    let wrong: [(&str, Change, &str); 9] = [
        (
            "width",
            |c| c["backbone_hidden_size"] = 128.into(),
            "field `backbone_hidden_size` is 128; supported: 64",
        ),
        ("heads", |c| c["text_config"]["num_key_value_heads"] = 2.into(), "field `num_key_value_heads` is 2"),
        (
            "vocab",
            |c| c["text_config"]["vocab_size"] = 315.into(),
            "field `vocab_size` is 315; supported: 336",
        ),
        ("window", |c| c["text_config"]["sliding_window"] = 25.into(), "field `sliding_window` is 25"),
        ("head-dim", |c| c["text_config"]["head_dim"] = 32.into(), "field `head_dim` is 32"),
        ("clusters", |c| c["num_centroids"] = 25.into(), "field `num_centroids` is 25; supported: a divisor"),
        ("type", |c| c["model_type"] = "llama".into(), "field `model_type` is \"llama\""),
        ("text", |c| c["text_config"] = 1.into(), "field `text_config` is 1"),
        (
            "ffn",
            |c| c["text_config"]["intermediate_size"] = 64.into(),
            "tensor model.layers.0.mlp.gate_proj.weight",
        ),
    ];
    for (name, change, expected) in wrong {
        let changed = Changed::new(name, change);
        let options = EngineOptions { draft_model: Some(changed.0.clone()), ..options(4) };
        let line = Engine::load(options).err().expect(name).to_string();
        assert!(line.contains(expected) && !line.contains('\n'), "{name}: {line}");
    }
}
