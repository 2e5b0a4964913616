//! A q4 cache stores keys less the model's means, and loses less for it.

use crate::bed::place;
use antigravity::dims::{KV_DIM, LAYERS};
use antigravity::model::weights::KeyMeans;
use antigravity::{Engine, EngineOptions};
use numeric::kv::{KvType, KvTypes};

const TEXT: &str = "Once upon a time there was a fox who lived under a hill. Every morning he went down to the river, and \
                    every evening he came back with a story. One day he met a girl who had lost her way in the rain.";

fn options(k: KvType) -> EngineOptions {
    EngineOptions {
        kv_types: KvTypes { k, v: KvType::F32 },
        threads: 2,
        ..EngineOptions::new(place::model())
    }
}

/// Logits of every token of the text.
fn logits(engine: &Engine, k: KvType) -> Vec<f32> {
    let mut session = engine.session_of(&options(k)).unwrap();
    let mut all = Vec::new();
    session.logits_of_all(&engine.encode(TEXT).unwrap(), |_, row| all.extend_from_slice(row)).unwrap();
    all
}

#[test]
fn means_bring_keys_of_four_bits_closer_to_whole_ones() {
    let with = Engine::load(options(KvType::Q4)).unwrap();
    let without = Engine::load(options(KvType::F32)).unwrap();
    assert!(with.weights().key_means().is_some() && without.weights().key_means().is_none());
    let exact = logits(&without, KvType::F32);
    without.weights().set_key_means(KeyMeans::new(vec![0.0; LAYERS * KV_DIM]));
    let miss = |engine| -> f64 {
        let found = logits(engine, KvType::Q4);
        found.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    };
    let (with, without) = (miss(&with), miss(&without));
    assert!(with < 0.9 * without, "squared distance {with} with means, {without} without");
}

/// A session of another type than the engine's gets the same means.
#[test]
fn a_session_of_any_engine_has_the_same_means() {
    let (own, other) =
        (Engine::load(options(KvType::Q4)).unwrap(), Engine::load(options(KvType::Q8)).unwrap());
    assert!(logits(&own, KvType::Q4) == logits(&other, KvType::Q4));
    assert_eq!(own.weights().key_means(), other.weights().key_means());
}
