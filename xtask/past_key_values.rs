//! Compares a model's KV cache with the `past_key_values` of transformers, which `tests/fixtures/past_key_values.py`
//! has written. `cargo xtask parity` runs it for models that have them. It is also an example of the loop: the last
//! token and the cache go in, logits and the longer cache come out.
//!
//!     ANTIGRAVITY_MODEL=tests/fixtures/models/m8-gpt2-bare-f32 cargo run --example past_key_values
#![allow(clippy::disallowed_macros, reason = "not the program that users run")]

use antigravity::dims::{HEAD_DIM, KV_HEADS, LAYERS, MODEL_DIR, VOCAB};
use antigravity::model::weights::WeightType;
use antigravity::session::CancelToken;
use antigravity::{Engine, EngineOptions, LayerKeyValues, PastKeyValues};
use numeric::kv::{KvType, KvTypes};
use serde::Deserialize;
use serde_json::Value;
use std::error::Error;
use std::path::Path;

/// The largest error, as for the logits in `cargo xtask parity`.
const TOLERANCE: f32 = 1e-4;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args().nth(1).unwrap_or(MODEL_DIR.into());
    let dir = Path::new(&dir);
    let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("past_key_values.json"))?)?;
    let ids = |name: &str| serde_json::from_value::<Vec<u32>>(expected[name].clone());
    let floats = |name: &str| {
        let bytes = std::fs::read(dir.join(expected[name]["file"].as_str().unwrap_or_default()))?;
        Ok::<Vec<f32>, std::io::Error>(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    };
    let (prompt, tokens, next) = (ids("prompt")?, ids("tokens")?, u32::deserialize(&expected["next"])?);
    let (numbers, logits) = (floats("past_key_values")?, floats("logits")?);
    let theirs = as_past([&prompt[..], &tokens].concat(), &numbers)?;

    let engine = Engine::load(EngineOptions {
        weight_type: WeightType::F32,
        kv_types: KvTypes::same(KvType::F32),
        max_seq_len: theirs.tokens.len() + 1,
        ..EngineOptions::new(dir)
    })?;
    let mut session = engine.session()?;
    session.prefill(&prompt, &CancelToken::default())?;
    let mut ours = session.past_key_values(&engine)?;
    for &token in &tokens {
        let mut session = engine.session()?.with_past(&ours, &engine)?;
        session.decode(token)?;
        ours = session.past_key_values(&engine)?;
    }
    if ours.tokens != theirs.tokens {
        return Err("the tokens differ".into());
    }
    for (i, (ours, theirs)) in ours.layers.iter().zip(&theirs.layers).enumerate() {
        check_close(&format!("keys of layer {i}"), &ours.keys, &theirs.keys)?;
        check_close(&format!("values of layer {i}"), &ours.values, &theirs.values)?;
        if ours.positions != theirs.positions {
            return Err(format!("the positions of layer {i} differ").into());
        }
    }
    for (what, past) in [("our", &ours), ("transformers'", &theirs)] {
        let mut session = engine.session()?.with_past(past, &engine)?;
        session.decode(next)?;
        check_close(&format!("logits after {what} past"), session.logits(), &logits[..VOCAB])?;
    }
    Ok(())
}

/// A cache from numbers in the order `[layer][K, V][head][position][head_dim]`.
fn as_past(tokens: Vec<u32>, numbers: &[f32]) -> Result<PastKeyValues, Box<dyn Error>> {
    let slots = tokens.len();
    if numbers.len() != LAYERS * 2 * KV_HEADS * slots * HEAD_DIM {
        return Err(format!("{} numbers of another model", numbers.len()).into());
    }
    let layers = numbers.chunks_exact(numbers.len() / LAYERS).map(|layer| {
        let (keys, values) = layer.split_at(layer.len() / 2);
        let positions = (0..slots as u32).collect::<Vec<_>>().repeat(KV_HEADS);
        LayerKeyValues { keys: keys.into(), values: values.into(), positions }
    });
    Ok(PastKeyValues { layers: layers.collect(), tokens })
}

/// Checks that numbers differ by no more than f32 rounding in another order.
fn check_close(what: &str, found: &[f32], expected: &[f32]) -> Result<(), Box<dyn Error>> {
    let largest = expected.iter().fold(1.0f32, |most, x| most.max(x.abs()));
    let far = found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("{what}: {:.1e} of the largest", far / largest);
    if found.len() == expected.len() && far <= TOLERANCE * largest {
        return Ok(());
    }
    Err(format!("{what}: off by {far} from transformers, whose largest is {largest}").into())
}
