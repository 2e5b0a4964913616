//! Sums of squares of queries, which a calibration is computed from.

use super::CpuDevice;
use super::steps::Scratch;
use crate::dims::*;
use crate::weights::Weights;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;

impl CpuDevice {
    /// From now on, sums up the squares of the queries of all tokens, before they are calibrated.
    pub fn sum_squares(&mut self) {
        self.squares = Some(vec![0.0; LAYERS * KV_DIM]);
    }

    /// The sums so far, `[layer][kv_head][HEAD_DIM]`: over all tokens and the query heads of each group.
    pub fn squares(&self) -> &[f64] {
        self.squares.as_deref().unwrap_or_default()
    }
}

impl Scratch {
    /// Adds those of `n` tokens of a layer to `sums`: `[kv_head][HEAD_DIM]`.
    pub(super) fn add_squares(&self, layer: (&Weights, usize), isa: Isa, n: usize, sums: &mut [f64]) {
        for (t, h) in (0..n).flat_map(|t| (0..HEADS).map(move |h| (t, h))) {
            let query = self.query(layer, KvTypes::both(KvType::F32), (t, h), isa);
            let sums = &mut sums[h / GROUP * HEAD_DIM..];
            sums.iter_mut().zip(query).for_each(|(sum, q)| *sum += f64::from(q) * f64::from(q));
        }
    }
}
