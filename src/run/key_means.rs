//! The mean keys of a model, which keys of a q4 cache are stored less: computed by one short pass over a text that is
//! part of the program, and kept.
//!
//! They belong to the weights: a packed file holds them. For other files they are computed once, on the CPU with an f32
//! cache, hence to the same bits on every machine, and kept in the folder of the user's state.
//!
//! A key is a mean, turned by RoPE to its position, and what is its own. So the mean is taken of keys turned back to
//! position 0, and then turned to the positions below [`REACH`] and averaged over them: pairs that turn fast average to
//! nothing, slow ones hardly turn. KL divergence from an f32 cache in nats, SmolLM2-135M, 3 x 512 tokens: without means
//! 0.0635; those of 128 tokens as they are 0.0495, turned over 256 positions 0.0456, over 512 0.0433. With nine fitted
//! candidates of scales: 128 tokens 0.0364, 190 0.0378, 512 of two texts 0.0349; over 1,024 positions 0.0403.

mod kept;

use crate::dims::{HEAD_DIM, KV_DIM, KV_HEADS, LAYERS, LEARNED_POSITIONS, MAX_POSITION, ROPE_DIM, angles_of};
use crate::model::cpu::{self, CpuDevice, CpuOptions};
use crate::model::device::{Device, KvRows, Logits, Run};
use crate::model::rope::Frequencies;
use crate::model::weights::{KeyMeans, Weights};
use crate::run::options::EngineOptions;
use crate::run::system::marker;
use files::Result;
use kept::Kept;
use numeric::kv::{KvType, KvTypes, rotate};
use numeric::simd::Isa;
use std::sync::Arc;
use text::tokenizer::{AddSpecial, Tokenizer};

/// What the model reads. A few sentences of several kinds; which ones hardly matters.
const TEXT: &str = include_str!("key_means/text.txt");
/// Tokens of it, at most.
const TOKENS: usize = 128;
/// Positions that the means are for.
const REACH: usize = 512;
/// Pairs of elements that RoPE turns: `i` and `i + HALF`.
const HALF: usize = ROPE_DIM / 2;

/// The tokens whose keys the means are of.
///
/// # Errors
///
/// `Model` for a tokenizer that cannot be used.
pub fn tokens(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut tokens = tokenizer.encode(TEXT, AddSpecial::Yes)?;
    tokens.truncate(if LEARNED_POSITIONS { TOKENS.min(MAX_POSITION) } else { TOKENS });
    Ok(tokens)
}

/// The means of these weights: those that were kept, else they are computed and kept.
///
/// # Errors
///
/// As of [`tokens`] and [`compute`].
pub fn of(weights: &Arc<Weights>, tokenizer: &Tokenizer, options: &EngineOptions) -> Result<KeyMeans> {
    let tokens = tokens(tokenizer)?;
    let kept = marker::directory().map(|dir| Kept::new(&dir, weights, &tokens));
    if let Some(means) = kept.as_ref().and_then(Kept::read) {
        return Ok(means);
    }
    let means = compute(weights, &tokens, options.threads)?;
    if let Some(Err(e)) = kept.map(|kept| kept.write(&means)) {
        options.notice.say(&format!("{e}; the mean keys of the q4 cache are computed at each start"));
    }
    Ok(means)
}

/// Bytes that [`compute`] takes, besides the weights.
pub fn pass_bytes() -> u64 {
    let types = KvTypes::both(KvType::F32);
    let cache = TOKENS * types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM);
    (cache + cache.div_ceil(LAYERS) + cpu::scratch_bytes(TOKENS, TOKENS)) as u64
}

/// Computes the means with one pass over `tokens`.
///
/// # Errors
///
/// `Memory` where there is no room for the pass.
pub fn compute(weights: &Arc<Weights>, tokens: &[u32], threads: usize) -> Result<KeyMeans> {
    if tokens.is_empty() {
        return Ok(KeyMeans::new(vec![0.0; LAYERS * KV_DIM]));
    }
    let (slots, types) = (tokens.len(), KvTypes::both(KvType::F32));
    let options = CpuOptions { threads, isa: Isa::detect()?, kv_types: types, slots, max_tokens: slots };
    let mut device = CpuDevice::new(Arc::clone(weights), options)?;
    let mut cache = device.new_cache(slots)?;
    device.forward(&mut [Run::new(&mut *cache, tokens, 0, Logits::None)], None)?;
    cache.set_len(slots);
    let frequencies = Frequencies::new();
    // Means are for the positions that they are averaged over, however long the text.
    let frequencies = frequencies.at(0, 0);
    let mut rows = KvRows::zeroed(types, slots, HEAD_DIM);
    let mut means = Vec::with_capacity(LAYERS * KV_DIM);
    for layer in 0..LAYERS {
        let from = if ROPE_DIM > 0 { angles_of(layer) } else { 0 };
        let turns = Turns::new(&frequencies[from..][..HALF]);
        cache.read(layer, 0..slots, &mut rows)?;
        for keys in rows.k.chunks_exact(slots * types.k.row_bytes(HEAD_DIM)) {
            let keys: Vec<f32> = keys.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            means.extend(turns.mean(&keys));
        }
    }
    Ok(KeyMeans::new(means))
}

/// How RoPE turns each pair. All in f64 with the `libm` crate.
struct Turns {
    /// Radians per position.
    frequencies: [f64; HALF],
    /// Cosine and sine of the positions below [`REACH`], averaged.
    average: [(f64, f64); HALF],
}

impl Turns {
    fn new(frequencies: &[f64]) -> Self {
        let frequencies: [f64; HALF] = std::array::from_fn(|i| frequencies[i]);
        let average = frequencies.map(|frequency| {
            let turns = (0..REACH).map(|pos| libm::sincos(pos as f64 * frequency));
            let (s, c) = turns.fold((0.0, 0.0), |(s, c), (sin, cos)| (s + sin, c + cos));
            (c / REACH as f64, s / REACH as f64)
        });
        Self { frequencies, average }
    }

    /// The mean, as it is stored, of `[position][HEAD_DIM]` keys of one head.
    fn mean(&self, keys: &[f32]) -> [f32; HEAD_DIM] {
        let mut mean = [0.0; HEAD_DIM];
        let n = (keys.len() / HEAD_DIM) as f64;
        for (i, (frequency, (cos, sin))) in self.frequencies.iter().zip(self.average).enumerate() {
            let (mut a, mut b) = (0.0, 0.0);
            for (pos, key) in keys.chunks_exact(HEAD_DIM).enumerate() {
                let (s, c) = libm::sincos(pos as f64 * frequency);
                let (x, y) = (f64::from(key[i]), f64::from(key[i + HALF]));
                (a, b) = (a + (x * c + y * s), b + (y * c - x * s));
            }
            mean[i] = ((a * cos - b * sin) / n) as f32;
            mean[i + HALF] = ((b * cos + a * sin) / n) as f32;
        }
        for (i, mean) in mean.iter_mut().enumerate().skip(ROPE_DIM) {
            *mean = (keys.chunks_exact(HEAD_DIM).map(|key| f64::from(key[i])).sum::<f64>() / n) as f32;
        }
        rotate(&mut mean);
        mean
    }
}
