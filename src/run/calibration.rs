//! The calibration of a cache of q6, q5 or q4: mean keys, which are subtracted from stored keys, and scales of the
//! keys' channels. It is computed by one short pass over a text that is part of the program, and cached.
//!
//! It belongs to the weights: a packed file holds it. For other files it is computed once, on the CPU with an f32
//! cache, hence to the same bits on every machine, and cached in the user's state directory.
//!
//! A key is a common mean, rotated by RoPE to its position, plus its own part. So keys are rotated back to position 0
//! and averaged, and the mean is then rotated to the positions below [`REACH`] and averaged over them: pairs that
//! rotate fast average to nothing, slow ones hardly rotate. KL divergence from an f32 cache in nats, SmolLM2-135M, 3 x
//! 512 tokens: without means 0.0635; with means of 128 tokens not rotated 0.0495, rotated over 256 positions 0.0456,
//! over 512 0.0433. With nine fitted candidates of block scales: 128 tokens 0.0364, 190 0.0378, 512 of two texts
//! 0.0349; over 1,024 positions 0.0403.
//!
//! The error of a score is the error of the stored key times the query, and the rotation spreads a key's error evenly
//! over the channels. With keys times `s` and queries times `1 / s`, the sum of squared errors is the mean square of
//! scaled keys times that of scaled queries. It is smallest if `s * s` is the root mean square of a channel's queries
//! over that of its keys. Same measurement: 0.0278. With `s` rounded to powers of two 0.0304; one `s` for both elements
//! of a pair, which RoPE mixes, 0.0359; statistics rotated over the positions like the means 0.0278 as well.

use crate::dims::{
    HEAD_DIM, KV_DIM, KV_HEADS, LAYERS, LEARNED_POSITIONS, MAX_POSITION, ROPE_DIM, first_angle, has_cache,
    rope_dim,
};
use crate::model::cpu::{self, CpuDevice, CpuOptions};
use crate::model::device::{Device, KvRows, Logits, Run};
use crate::model::rope::Frequencies;
use crate::model::trace::fnv1a_digest;
use crate::model::weights::{Calibration, Weights};
use crate::run::options::EngineOptions;
use crate::run::state_file::StateFile;
use files::Result;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::sync::Arc;
use text::tokenizer::{AddSpecial, Tokenizer};

/// Text for the pass: a few sentences of several kinds; which ones hardly matters.
const TEXT: &str = include_str!("calibration/text.txt");
/// Maximum number of its tokens.
const TOKENS: usize = 128;
/// Maximum number of its tokens whose activations weigh the errors of quantised weights.
const WEIGHING_TOKENS: usize = 512;
/// Maximum number of tokens of a user's text.
const MAX_WEIGHING_TOKENS: usize = 4096;
/// Number of positions that the means are averaged over.
const REACH: usize = 512;

/// Encodes the text whose queries and keys are measured.
///
/// # Errors
///
/// `Model` for a tokenizer that cannot be used.
pub fn encode_text(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    encode_beginning(tokenizer, TEXT, TOKENS)
}

/// Encodes the text whose activations weigh the errors of quantised weights: the beginning of `text`, or of the
/// program's own.
///
/// # Errors
///
/// Errors of [`encode_text`].
pub fn encode_weighing_text(tokenizer: &Tokenizer, text: Option<&str>) -> Result<Vec<u32>> {
    match text {
        Some(text) => encode_beginning(tokenizer, text, MAX_WEIGHING_TOKENS),
        None => encode_beginning(tokenizer, TEXT, WEIGHING_TOKENS),
    }
}

fn encode_beginning(tokenizer: &Tokenizer, text: &str, most: usize) -> Result<Vec<u32>> {
    let mut tokens = tokenizer.encode(text, AddSpecial::Yes)?;
    tokens.truncate(if LEARNED_POSITIONS { most.min(MAX_POSITION) } else { most });
    Ok(tokens)
}

/// Reads the cached calibration of these weights, or computes and caches it.
///
/// # Errors
///
/// Errors of [`encode_text`] and [`compute_calibration`].
pub fn load_or_compute(
    weights: &Arc<Weights>,
    tokenizer: &Tokenizer,
    options: &EngineOptions,
) -> Result<Calibration> {
    let tokens = encode_text(tokenizer)?;
    let ids: Vec<f32> = tokens.iter().map(|&id| f32::from_bits(id)).collect();
    let details = format!("{} {:016x}", Calibration::REVISION, fnv1a_digest(&ids));
    let file = StateFile::new("calibration", &weights.fingerprint, weights.weight_type, &details);
    let kept = file.as_ref().and_then(|file| file.read(Calibration::FILE_BYTES).ok());
    if let Some(calibration) = kept.and_then(|bytes| Calibration::from_bytes(&bytes)) {
        return Ok(calibration);
    }
    let calibration = compute_calibration(weights, &tokens, options.threads)?;
    if let Some(Err(e)) = file.map(|file| file.write(&calibration.to_bytes())) {
        options.notice.warn(&format!("{e}; the calibration of the q4 cache is computed at each start"));
    }
    Ok(calibration)
}

/// Bytes that [`compute_calibration`] needs besides the weights.
pub fn pass_bytes() -> u64 {
    let types = KvTypes::same(KvType::F32);
    let cache = TOKENS * types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM);
    (cache + cache.div_ceil(LAYERS) + cpu::scratch_bytes(TOKENS, TOKENS)) as u64
}

/// Computes the calibration with one pass over `tokens`.
///
/// # Errors
///
/// `Memory` if there is not enough for the pass.
pub fn compute_calibration(weights: &Arc<Weights>, tokens: &[u32], threads: usize) -> Result<Calibration> {
    if tokens.is_empty() {
        return Ok(Calibration::identity());
    }
    let (slots, types) = (tokens.len(), KvTypes::same(KvType::F32));
    let options = CpuOptions { threads, isa: Isa::detect()?, kv_types: types, slots, max_tokens: slots };
    let mut device = CpuDevice::new(Arc::clone(weights), options)?;
    let mut cache = device.new_cache(slots)?;
    device.record_query_squares();
    device.forward(&mut [Run::new(&mut *cache, tokens, 0, Logits::None)], None)?;
    cache.set_len(slots);
    let frequencies = Frequencies::new();
    // Means are averaged over short positions, whatever the length of a text.
    let frequencies = frequencies.for_position(0, 0);
    let mut rows = KvRows::zeroed(types, slots, HEAD_DIM);
    let (mut means, mut scales) = (Vec::with_capacity(LAYERS * KV_DIM), Vec::with_capacity(LAYERS * KV_DIM));
    let mut queries = device.query_squares().chunks_exact(HEAD_DIM);
    for layer in 0..LAYERS {
        if !has_cache(layer) {
            means.extend([0.0; KV_DIM]);
            scales.extend([1.0; KV_DIM]);
            queries.by_ref().take(KV_HEADS).for_each(drop);
            continue;
        }
        let from = if ROPE_DIM > 0 { first_angle(layer) } else { 0 };
        let turns = Rotations::new(&frequencies[from..][..rope_dim(layer) / 2]);
        cache.read_rows(layer, 0..slots, &mut rows)?;
        let heads = rows.k.chunks_exact(slots * types.k.row_bytes(HEAD_DIM));
        for (keys, queries) in heads.zip(&mut queries) {
            let keys: Vec<f32> = keys.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let mean = turns.mean_key(&keys);
            scales.extend(channel_scales(&keys, &mean, queries));
            means.extend(mean);
        }
    }
    Ok(Calibration::new(&means, &scales))
}

/// Scales of a head's channels: fourth root of the queries' sum of squares over that of the keys minus the mean,
/// normalised to a geometric mean of 1. 1 for channels without queries or keys.
fn channel_scales(keys: &[f32], mean: &[f32; HEAD_DIM], queries: &[f64]) -> [f32; HEAD_DIM] {
    let mut squares = [0.0; HEAD_DIM];
    for key in keys.chunks_exact(HEAD_DIM) {
        for (sum, (k, mean)) in squares.iter_mut().zip(key.iter().zip(mean)) {
            *sum += f64::from(k - mean) * f64::from(k - mean);
        }
    }
    let logs: [Option<f64>; HEAD_DIM] = std::array::from_fn(|i| {
        let log = libm::log2(queries[i] / squares[i]) / 4.0;
        log.is_finite().then_some(log)
    });
    let known = logs.iter().flatten().count().max(1) as f64;
    let middle = logs.iter().flatten().sum::<f64>() / known;
    logs.map(|log| log.map_or(1.0, |log| libm::exp2(log - middle) as f32))
}

/// Rotation of each pair of elements, `i` and `i +` the number of pairs, by RoPE, in f64 with the `libm` crate.
struct Rotations<'a> {
    /// Radians per position.
    frequencies: &'a [f64],
    /// Averages of cosine and sine over the positions below [`REACH`].
    average: Vec<(f64, f64)>,
}

impl<'a> Rotations<'a> {
    fn new(frequencies: &'a [f64]) -> Self {
        let average = |frequency: &f64| {
            let turns = (0..REACH).map(|pos| libm::sincos(pos as f64 * frequency));
            let (s, c) = turns.fold((0.0, 0.0), |(s, c), (sin, cos)| (s + sin, c + cos));
            (c / REACH as f64, s / REACH as f64)
        };
        Self { frequencies, average: frequencies.iter().map(average).collect() }
    }

    /// Mean of the `[position][HEAD_DIM]` keys of one head.
    fn mean_key(&self, keys: &[f32]) -> [f32; HEAD_DIM] {
        let mut mean = [0.0; HEAD_DIM];
        let (n, half) = ((keys.len() / HEAD_DIM) as f64, self.frequencies.len());
        for (i, (frequency, (cos, sin))) in self.frequencies.iter().zip(&self.average).enumerate() {
            let (mut a, mut b) = (0.0, 0.0);
            for (pos, key) in keys.chunks_exact(HEAD_DIM).enumerate() {
                let (s, c) = libm::sincos(pos as f64 * frequency);
                let (x, y) = (f64::from(key[i]), f64::from(key[i + half]));
                (a, b) = (a + (x * c + y * s), b + (y * c - x * s));
            }
            mean[i] = ((a * cos - b * sin) / n) as f32;
            mean[i + half] = ((b * cos + a * sin) / n) as f32;
        }
        for (i, mean) in mean.iter_mut().enumerate().skip(2 * half) {
            *mean = (keys.chunks_exact(HEAD_DIM).map(|key| f64::from(key[i])).sum::<f64>() / n) as f32;
        }
        mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::HeadCalibration;
    use numeric::simd::kv_row;

    /// Rows of channels of different sizes; from -1 to 1 times the size.
    fn rows(seed: u32, size: impl Fn(usize) -> f32) -> Vec<f32> {
        let mut state = seed;
        let next = |i| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state as f32 / 2_147_483_648.0 - 1.0) * size(i % HEAD_DIM)
        };
        (0..50 * HEAD_DIM).map(next).collect()
    }

    #[test]
    fn scores_of_four_bit_keys_with_uneven_channels_come_closer() {
        let keys = rows(1, |i| [0.2, 1.0, 4.0][i % 3]);
        let queries = rows(2, |i| [3.0, 1.0, 0.3, 0.3][i % 4]);
        let squares: Vec<f64> = (0..HEAD_DIM)
            .map(|i| queries.iter().skip(i).step_by(HEAD_DIM).map(|q| f64::from(q * q)).sum())
            .collect();
        let scales = channel_scales(&keys, &[0.0; HEAD_DIM], &squares);
        let miss = |scales: &[f32; HEAD_DIM]| -> f64 {
            let calibration = Calibration::new(&[0.0; LAYERS * KV_DIM], &scales.repeat(LAYERS * KV_HEADS));
            let channels = HeadCalibration::of_head(calibration.layer(0), 0);
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let misses = keys.as_chunks().0.iter().flat_map(|key| {
                let (mut stored, mut row) = (*key, vec![0; KvType::Q4.row_bytes(HEAD_DIM)]);
                channels.encode_key(&mut stored);
                kv_row::encode_row(Isa::Scalar, KvType::Q4, &stored, &mut row);
                kv_row::update_row(Isa::Scalar, KvType::Q4, &mut row, |k| stored = *k);
                queries.as_chunks().0.iter().map(move |query| {
                    let mut ready = *query;
                    channels.encode_query(&mut ready);
                    (dot(query, key) - dot(&ready, &stored)).powi(2)
                })
            });
            misses.sum()
        };
        let (with, without) = (miss(&scales), miss(&[1.0; HEAD_DIM]));
        assert!(with < 0.7 * without, "squared distance {with} with scales, {without} without");
    }

    #[test]
    fn channels_without_keys_or_queries_are_not_scaled() {
        let keys = rows(1, |i| if i == 0 { 0.0 } else { 1.0 });
        let queries: [f64; HEAD_DIM] = std::array::from_fn(|i| [1.0, 0.0, f64::NAN, 3.0][i % 4]);
        let scales = channel_scales(&keys, &[0.0; HEAD_DIM], &queries);
        assert_eq!(scales[..3], [1.0; 3]);
        assert!(scales[3] > 1.0 && scales.iter().all(|s| s.is_finite() && *s > 0.0));
    }
}
