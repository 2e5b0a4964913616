//! Mean keys: what keys are stored less in a cache whose type is rotated.

use crate::dims::{KV_DIM, LAYERS};
use crate::model::trace::digest;

/// The mean key of each layer and KV head, rotated as stored keys are: `[layer][kv_head][HEAD_DIM]`, all finite.
///
/// The same vector taken from every key of a head changes all scores of a query alike, and softmax does not see it. What
/// is left is smaller, so a block's sixteen steps are finer.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyMeans(Vec<f32>);

impl KeyMeans {
    /// How they are computed. Files that keep them name it.
    pub const REVISION: u32 = 1;
    /// The name of the tensor that they are in a packed file.
    pub fn tensor() -> String {
        format!("key_means.{}", Self::REVISION)
    }

    /// Their bytes, as they are kept in files.
    pub const BYTES: usize = 4 * LAYERS * KV_DIM;

    /// These; zeros, which change nothing, where one of them is not finite.
    ///
    /// # Panics
    ///
    /// They are not as many as the model has.
    pub fn new(mut means: Vec<f32>) -> Self {
        assert_eq!(means.len(), LAYERS * KV_DIM);
        if means.iter().any(|x| !x.is_finite()) {
            means.fill(0.0);
        }
        Self(means)
    }

    /// Those of [`KeyMeans::to_bytes`]; `None` where there are too few or too many, or one is not finite.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let means: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (bytes.len() == Self::BYTES && means.iter().all(|x| x.is_finite())).then_some(Self(means))
    }

    /// Little endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    /// Those of one layer: `[kv_head][HEAD_DIM]`.
    pub fn of_layer(&self, layer: usize) -> &[f32] {
        &self.0[layer * KV_DIM..][..KV_DIM]
    }

    /// Tells them from others.
    pub fn checksum(&self) -> u64 {
        digest(&self.0)
    }
}
