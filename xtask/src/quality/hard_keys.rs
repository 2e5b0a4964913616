//! A model with hard keys: the story model whose keys have some channels 128 times as large as the rest. Qwen's keys are
//! of this kind, and a cache that gives all channels of a key the same steps loses the other ones.
//!
//! The two channels of a pair that RoPE mixes are multiplied by a power of two in the keys, and divided by it in the
//! queries. That changes no score, and no bit of what the model computes in single precision.

use super::{Row, result, run_eval};
use crate::changed_copy::{from_bf16, to_bf16, write_changed_copy};
use crate::error::{Error, Result};
use crate::{build, command, json};
use result::Measurement;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Pairs of channels and their factors; in each layer and head other pairs, this far from one of its own.
const FACTORS: [(usize, f32); 3] = [(3, 128.0), (8, 32.0), (12, 1.0 / 128.0)];
/// Chunks of the held-out text that are predicted.
const CHUNKS: &str = "4";
/// Maximum relative change of perplexity with a four-bit cache.
const MAX_Q4_CHANGE: f64 = 0.032;

/// Writes the model. Returns its directory.
fn write_model() -> Result<PathBuf> {
    let (story, dir) = (build::model_dir("story")?, command::root().join("target/hard-keys"));
    let config: Value = json::read(&story.join("config.json"))?;
    let number = |name: &str| {
        let found = config[name].as_u64().map(|n| n as usize);
        found.ok_or_else(|| Error::at(&story.join("config.json"), format!("has no {name}")))
    };
    let (width, heads) = (number("hidden_size")?, number("num_attention_heads")?);
    let (head_dim, group) = (width / heads, heads / number("num_key_value_heads")?);
    let changed = write_changed_copy(&story, &dir, |name, weights| {
        let layer = name.split('.').nth(2).and_then(|layer| layer.parse::<usize>().ok());
        let is_keys = name.ends_with("self_attn.k_proj.weight");
        let Some(layer) = layer.filter(|_| is_keys || name.ends_with("self_attn.q_proj.weight")) else {
            return false;
        };
        for (row, weights) in weights.chunks_exact_mut(width).enumerate() {
            let kv_head = row / head_dim / if is_keys { 1 } else { group };
            let pair = row % head_dim % (head_dim / 2);
            let is_scaled = |first: usize| (first + layer + 5 * kv_head) % (head_dim / 2) == pair;
            for (_, factor) in FACTORS.iter().filter(|(first, _)| is_scaled(*first)) {
                let factor = if is_keys { *factor } else { 1.0 / factor };
                weights.iter_mut().for_each(|w| *w = to_bf16(from_bf16(*w) * factor));
            }
        }
        true
    })?;
    if changed { Ok(dir) } else { Err(Error::at(&story, "has no keys in bf16")) }
}

/// Measures caches of these types, the first of them lossless, with f32 weights: on the story model, and on the one with
/// hard keys.
pub fn measure(program: &Path, types: &[&str]) -> Result<[Vec<Measurement>; 2]> {
    let story = build::model_dir("story")?;
    let tokens = story.join("golden/eval_tokens.json").display().to_string();
    let rows: Vec<Row> = types.iter().map(|kv| Row::new(&[kv], format!("weights=f32,{kv}"))).collect();
    let measure = |model: &Path| {
        let found = run_eval(program, model, &["--tokens", &tokens, "--limit", CHUNKS], &rows)?;
        result::parse_predictions(&found, rows.len())
    };
    Ok([measure(&story)?, measure(&write_model()?)?])
}

/// The promises for hard keys.
pub fn promises(program: &Path) -> Result<Vec<(String, bool)>> {
    let [story, hard] = measure(program, &["kv=f32", "kv=q4"])?;
    let change = (hard[1].perplexity / hard[0].perplexity - 1.0).abs();
    Ok(vec![
        (
            format!("hard keys change nothing with an f32 cache: perplexity {}", hard[0].perplexity),
            hard[0].perplexity == story[0].perplexity,
        ),
        (
            format!("perplexity of hard keys with q4 within 3.2 % of f32: {:.3} %", 100.0 * change),
            change <= MAX_Q4_CHANGE,
        ),
    ])
}
