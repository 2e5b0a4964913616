//! Calibration: means and scales applied to keys and queries before rotation, for key types that are stored rotated.

use crate::dims::{HEAD_DIM, KV_DIM, KV_HEADS, LAYERS};
use crate::trace::fnv1a_digest;
use numeric::kv::hadamard_transform;

/// Mean keys, and scales of keys and queries: `[layer][kv_head][mean | scale | inverse][HEAD_DIM]`, all finite.
///
/// Subtracting one vector from every key of a head shifts all scores of a query equally, which softmax ignores (the
/// logit of a sink is shifted too). The
/// remaining values are smaller, so the sixteen steps of a block are finer. Multiplying a channel of the keys by a
/// scale and of the queries by its inverse changes no score, and the rotation spreads the rounding error evenly over
/// the channels of a stored key. So the scale is large where queries are large and small where keys are large: then the
/// error weighs least.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration(Vec<f32>);

/// Calibration of one layer and KV head: `[HEAD_DIM]` each.
#[derive(Debug, Clone, Copy)]
pub struct HeadCalibration<'a> {
    means: &'a [f32],
    scales: &'a [f32],
    inverses: &'a [f32],
}

impl Calibration {
    /// Version of the computation, named in files that hold a calibration. Version 1 was rotated mean keys alone, and
    /// version 2 had scales up to 16.
    pub const REVISION: u32 = 3;
    /// Bytes in a file: means and scales.
    pub const FILE_BYTES: usize = 8 * LAYERS * KV_DIM;
    /// Bytes in memory.
    pub const BYTES: usize = 12 * LAYERS * KV_DIM;
    /// The largest scale, and the inverse of the smallest. With a channel of the keys 128 times as large as the others,
    /// 16 is too small for the story model's perplexity: +7.5 % with q4, +0.03 % with this.
    pub const MAX_SCALE: f32 = 1024.0;
    const MIN_SCALE: f32 = 1.0 / Self::MAX_SCALE;
    /// Floats of one layer.
    const OF_LAYER: usize = 3 * KV_DIM;
    /// A layer's calibration that changes nothing.
    pub const NONE: [f32; Self::OF_LAYER] = {
        let mut none = [1.0; Self::OF_LAYER];
        let mut i = 0;
        while i < Self::OF_LAYER {
            if i % (3 * HEAD_DIM) < HEAD_DIM {
                none[i] = 0.0;
            }
            i += 1;
        }
        none
    };

    /// Name of its tensor in a packed file.
    pub fn tensor_name() -> String {
        format!("calibration.{}", Self::REVISION)
    }

    /// A calibration from means and scales, each `[layer][kv_head][HEAD_DIM]`. A mean that is not finite becomes 0, an
    /// invalid scale becomes 1.
    ///
    /// # Panics
    ///
    /// If their number does not fit the model.
    pub fn new(means: &[f32], scales: &[f32]) -> Self {
        assert!(means.len() == LAYERS * KV_DIM && scales.len() == means.len());
        let heads = means.chunks_exact(HEAD_DIM).zip(scales.chunks_exact(HEAD_DIM));
        let channels = heads.flat_map(|(means, scales)| {
            let means = means.iter().map(|m| if m.is_finite() { *m } else { 0.0 });
            let sound = |s: &f32| {
                if s.is_finite() && *s > 0.0 { s.clamp(Self::MIN_SCALE, Self::MAX_SCALE) } else { 1.0 }
            };
            let scales: Vec<f32> = scales.iter().map(sound).collect();
            let inverses: Vec<f32> = scales.iter().map(|s| 1.0 / s).collect();
            means.chain(scales).chain(inverses).collect::<Vec<f32>>()
        });
        Self(channels.collect())
    }

    /// A calibration that changes nothing.
    pub fn identity() -> Self {
        Self::new(&[0.0; LAYERS * KV_DIM], &[1.0; LAYERS * KV_DIM])
    }

    /// Inverse of [`Calibration::to_bytes`]; `None` for a wrong number of bytes or an invalid value.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let floats: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let (means, scales): (Vec<_>, Vec<_>) =
            floats.chunks_exact(2 * HEAD_DIM).map(|head| head.split_at(HEAD_DIM)).unzip();
        let (means, scales) = (means.concat(), scales.concat());
        let sound = |s: &f32| (Self::MIN_SCALE..=Self::MAX_SCALE).contains(s);
        let sound = means.iter().all(|m| m.is_finite()) && scales.iter().all(sound);
        (bytes.len() == Self::FILE_BYTES && sound).then(|| Self::new(&means, &scales))
    }

    /// Means and scales as little-endian bytes: `[layer][kv_head][mean | scale][HEAD_DIM]`.
    pub fn to_bytes(&self) -> Vec<u8> {
        let kept = self.0.chunks_exact(3 * HEAD_DIM).flat_map(|head| &head[..2 * HEAD_DIM]);
        kept.flat_map(|x| x.to_le_bytes()).collect()
    }

    /// Calibration of one layer.
    pub fn layer(&self, layer: usize) -> &[f32] {
        &self.0[layer * Self::OF_LAYER..][..Self::OF_LAYER]
    }

    /// A checksum that identifies it.
    pub fn checksum(&self) -> u64 {
        fnv1a_digest(&self.0)
    }

    /// Checksum of the rotated means: identifies the calibration in saved sessions of revision 1, without scales.
    pub fn means_checksum(&self) -> u64 {
        let mut means: Vec<f32> =
            self.0.chunks_exact(3 * HEAD_DIM).flat_map(|head| &head[..HEAD_DIM]).copied().collect();
        means.chunks_exact_mut(HEAD_DIM).for_each(hadamard_transform);
        fnv1a_digest(&means)
    }
}

impl<'a> HeadCalibration<'a> {
    /// The calibration of one KV head out of a layer's.
    pub fn of_head(layer: &'a [f32], kv_head: usize) -> Self {
        debug_assert!(kv_head < KV_HEADS);
        let (means, rest) = layer[kv_head * 3 * HEAD_DIM..][..3 * HEAD_DIM].split_at(HEAD_DIM);
        let (scales, inverses) = rest.split_at(HEAD_DIM);
        Self { means, scales, inverses }
    }

    /// Turns a key into its stored form: mean subtracted, scaled, rotated.
    pub fn encode_key(self, k: &mut [f32; HEAD_DIM]) {
        let channels = self.means.iter().zip(self.scales);
        k.iter_mut().zip(channels).for_each(|(k, (mean, scale))| *k = (*k - mean) * scale);
        hadamard_transform(k);
    }

    /// Turns a stored key back into the key: the inverse of [`HeadCalibration::encode_key`].
    pub fn decode_key(self, k: &mut [f32; HEAD_DIM]) {
        hadamard_transform(k);
        let channels = self.means.iter().zip(self.inverses);
        k.iter_mut().zip(channels).for_each(|(k, (mean, inverse))| *k = *k * inverse + mean);
    }

    /// Turns a query into the form that matches stored keys: scaled, rotated.
    pub fn encode_query(self, q: &mut [f32; HEAD_DIM]) {
        q.iter_mut().zip(self.inverses).for_each(|(q, inverse)| *q *= inverse);
        hadamard_transform(q);
    }

    /// Product of a query in its stored form and the mean: the scores of stored keys lack it.
    pub fn score_mean(self, q: &[f32; HEAD_DIM]) -> f32 {
        self.stored_mean().iter().zip(q).map(|(mean, q)| mean * q).sum()
    }

    /// Mean in the form of stored keys.
    pub fn stored_mean(self) -> [f32; HEAD_DIM] {
        let mut mean: [f32; HEAD_DIM] = std::array::from_fn(|i| self.means[i] * self.scales[i]);
        hadamard_transform(&mut mean);
        mean
    }

    /// Converts a key stored by an older version (rotated, with or without the mean subtracted) to today's form.
    pub fn convert_old_key(self, k: &mut [f32; HEAD_DIM], less: SubtractedMean) {
        hadamard_transform(k);
        if less == SubtractedMean::Mean {
            k.iter_mut().zip(self.means).for_each(|(k, mean)| *k += mean);
        }
        self.encode_key(k);
    }
}

/// Vector that an older version subtracted from stored keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum SubtractedMean {
    Nothing,
    Mean,
}
