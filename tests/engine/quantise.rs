//! Checkpoints that are quantised by a text: the same bytes with any number of threads, and smaller errors than Q4_0.

use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::dims::{DIM, FFN_DIM, MODEL, VOCAB};
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, Logits, Run};
use antigravity::model::trace::fnv1a_digest;
use antigravity::model::weights::{
    Checkpoint, Importance, LoadOptions, ModelPath, WeightType, Weights, load_config, pack,
};
use antigravity::run::calibration::encode_weighing_text;
use antigravity::{Engine, EngineOptions};
use files::blocks::BLOCK;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::sync::Arc;

/// A text that the model was not quantised by.
const TEXT: &str = "Once upon a time, a little girl named Lily found a map in her garden. She showed it to Tom. \"We must \
                    find the treasure,\" he said. They walked over the hill and into the woods.";

fn weighing_text(engine: &Engine) -> Vec<u32> {
    encode_weighing_text(engine.tokenizer(), None).unwrap()
}

fn logits(weight_type: WeightType, text: &[u32], tokens: &[u32]) -> Vec<f32> {
    let model = ModelPath::new(&paths::model()).unwrap().open(weight_type).unwrap();
    let load = LoadOptions { importance: Importance::Text(text), ..LoadOptions::new(weight_type, 2) };
    let weights = Arc::new(Weights::load(&model, &load).unwrap());
    let (isa, slots, kv_types) = (Isa::detect().unwrap(), tokens.len(), KvTypes::same(KvType::F32));
    let mut cpu =
        CpuDevice::new(weights, CpuOptions { threads: 2, isa, kv_types, slots, max_tokens: slots }).unwrap();
    let mut cache = cpu.new_cache(slots).unwrap();
    let mut logits = vec![0.0; tokens.len() * VOCAB];
    cpu.forward(&mut [Run::new(&mut *cache, tokens, 0, Logits::All(&mut logits))], None).unwrap();
    logits
}

/// On average over the tokens, how far the probabilities are from those of `exact`, in nats.
fn divergence(exact: &[f32], found: &[f32]) -> f64 {
    let logs = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().fold(f64::MIN, |most, x| most.max(f64::from(*x)));
        let sum: f64 = row.iter().map(|x| (f64::from(*x) - most).exp()).sum();
        row.iter().map(|x| f64::from(*x) - most - sum.ln()).collect()
    };
    let rows = exact.chunks(VOCAB).zip(found.chunks(VOCAB));
    let of_row = |(p, q): (&[f32], &[f32])| -> f64 {
        logs(p).iter().zip(logs(q)).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    rows.map(of_row).sum::<f64>() / (exact.len() / VOCAB) as f64
}

#[test]
fn errors_are_smaller_than_those_of_q4_0() {
    // The bounds are those of a trained model.
    if MODEL != "story" {
        return;
    }
    let engine = Engine::load(EngineOptions::new(paths::model())).unwrap();
    let held_out = std::fs::read_to_string(paths::model().join("golden/eval_tokens.json")).unwrap();
    let held_out: serde_json::Value = serde_json::from_str(&held_out).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(held_out["tokens"].clone()).unwrap();
    let (text, tokens) = (weighing_text(&engine), &tokens[..512]);
    let exact = logits(WeightType::F32, &[], tokens);
    let loss = |weight_type, text: &[u32]| divergence(&exact, &logits(weight_type, text, tokens));
    let plain = loss(WeightType::Q4_0, &[]);
    for (weight_type, share) in [(WeightType::Iq4Nl, 0.6), (WeightType::Q4, 0.3)] {
        for text in [&[][..], &text] {
            let found = loss(weight_type, text);
            assert!(found < share * plain, "q4_0 {plain}, {weight_type} by {} tokens {found}", text.len());
        }
    }
}

#[test]
fn a_packed_file_has_the_same_bytes_with_any_number_of_threads() {
    if [DIM, FFN_DIM].iter().any(|cols| !cols.is_multiple_of(BLOCK)) {
        return;
    }
    let engine = Engine::load(EngineOptions::new(paths::model())).unwrap();
    let (text, dir) = (weighing_text(&engine), TestDir::new());
    let source = Checkpoint::open(&paths::model()).unwrap();
    if source.gguf().is_some() || source.packed().is_some() {
        return;
    }
    let config = load_config(&paths::model(), &source).unwrap();
    let other = encode_weighing_text(engine.tokenizer(), Some(TEXT)).unwrap();
    let packed = [(1, &text), (3, &text), (3, &other)].map(|(threads, text)| {
        let out = dir.file("packed");
        let load =
            LoadOptions { importance: Importance::Text(text), ..LoadOptions::new(WeightType::Q4, threads) };
        pack::write_packed(&source, &config, &out, &load, None).unwrap();
        std::fs::read(out).unwrap()
    });
    assert!(packed[0] == packed[1], "by one thread and by three");
    assert!(packed[1] != packed[2], "by another text");
}

/// The digest was computed on x86-64; `cargo xtask test aarch64` runs this on 64-bit Arm.
#[test]
fn a_packed_file_has_the_same_bytes_on_every_machine() {
    if MODEL != "story" {
        return;
    }
    let (source, dir) = (Checkpoint::open(&paths::model()).unwrap(), TestDir::new());
    let config = load_config(&paths::model(), &source).unwrap();
    let text: Vec<u32> = (0..32).map(|i| i * 37 % VOCAB as u32).collect();
    let load = LoadOptions { importance: Importance::Text(&text), ..LoadOptions::new(WeightType::Q4, 2) };
    let out = dir.file("packed");
    pack::write_packed(&source, &config, &out, &load, None).unwrap();
    let bytes = std::fs::read(out).unwrap();
    let words: Vec<f32> =
        bytes.as_chunks().0.iter().map(|b| f32::from_bits(u32::from_le_bytes(*b))).collect();
    assert_eq!(fnv1a_digest(&words), 0xc6813f0f369aeb76);
}
