//! A q4 cache stores keys less the model's means and scaled, and loses less for it.

use crate::support::paths;
use antigravity::dims::{HEAD_DIM, KV_DIM, LAYERS};
use antigravity::model::weights::{Calibration, WeightType};
use antigravity::{Engine, EngineOptions};
use numeric::kv::{KvType, KvTypes};

const TEXT: &str = "Once upon a time there was a fox who lived under a hill. Every morning he went down to the river, and \
                    every evening he came back with a story. One day he met a girl who had lost her way in the rain.";

fn options(k: KvType) -> EngineOptions {
    EngineOptions {
        kv_types: KvTypes { k, v: KvType::F32 },
        // Without their activations' rounding, which a small difference may tip.
        weight_type: WeightType::F32,
        threads: 2,
        ..EngineOptions::new(paths::model())
    }
}

/// Logits of every token of the text.
fn logits(engine: &Engine, k: KvType) -> Vec<f32> {
    let mut session = engine.session_with(&options(k)).unwrap();
    let mut all = Vec::new();
    session.logits_of_all(&engine.encode(TEXT).unwrap(), |_, row| all.extend_from_slice(row)).unwrap();
    all
}

#[test]
fn a_calibration_brings_keys_of_four_bits_closer_to_whole_ones() {
    let with = Engine::load(options(KvType::Q4)).unwrap();
    let without = Engine::load(options(KvType::F32)).unwrap();
    assert!(with.weights().calibration().is_some() && without.weights().calibration().is_none());
    let exact = logits(&without, KvType::F32);
    let miss = |engine: &Engine| -> f64 {
        let found = logits(engine, KvType::Q4);
        found.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    };
    without.weights().set_calibration(Calibration::identity());
    let (with, without) = (miss(&with), miss(&without));
    assert!(with < 0.9 * without, "squared distance {with} with it, {without} without");
}

/// A session of another type than the engine's gets the same.
#[test]
fn a_session_of_any_engine_has_the_same_calibration() {
    let (own, other) =
        (Engine::load(options(KvType::Q4)).unwrap(), Engine::load(options(KvType::Q8)).unwrap());
    assert!(logits(&own, KvType::Q4) == logits(&other, KvType::Q4));
    assert_eq!(own.weights().calibration(), other.weights().calibration());
}

#[test]
fn channels_that_say_nothing_are_stored_as_they_are() {
    let n = LAYERS * KV_DIM;
    let [mut means, mut scales] = [vec![0.5; n], vec![2.0; n]];
    (means[0], means[1]) = (f32::NAN, f32::NEG_INFINITY);
    (scales[0], scales[1], scales[2], scales[3], scales[4]) = (0.0, f32::NAN, f32::INFINITY, -2.0, 1e9);
    let calibration = Calibration::new(&means, &scales);
    let layer = calibration.layer(0);
    assert_eq!(layer[..3], [0.0, 0.0, 0.5]);
    let most = Calibration::MAX_SCALE;
    assert_eq!(layer[HEAD_DIM..][..6], [1.0, 1.0, 1.0, 1.0, most, 2.0]);
    assert_eq!(layer[2 * HEAD_DIM..][..6], [1.0, 1.0, 1.0, 1.0, 1.0 / most, 0.5]);
    assert_eq!(Calibration::from_bytes(&calibration.to_bytes()).as_ref(), Some(&calibration));
    for wrong in [0.0, -1.0, f32::NAN, 2.0 * most] {
        let mut bytes = calibration.to_bytes();
        bytes[4 * HEAD_DIM..][..4].copy_from_slice(&wrong.to_le_bytes());
        assert_eq!(Calibration::from_bytes(&bytes), None, "a scale of {wrong}");
    }
}
