//! Counts of the tokens that chose each expert, and the memory of each.

use super::{Ffn, MixtureOfExperts, Weights};
use crate::dims::{DIM, EXPERTS};
use files::mapped::MappedSlice;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of the tokens that chose each expert of a layer: `[EXPERTS.count]`
#[derive(Default)]
pub struct ExpertUses(Vec<AtomicU64>);

impl ExpertUses {
    pub(super) fn new() -> Self {
        Self((0..EXPERTS.count).map(|_| AtomicU64::new(0)).collect())
    }

    /// Counts tokens that chose an expert.
    pub fn count_tokens(&self, expert: usize, tokens: usize) {
        self.0[expert].fetch_add(tokens as u64, Ordering::Relaxed);
    }
}

impl Weights {
    /// The layers with experts.
    fn layers_with_experts(&self) -> impl Iterator<Item = (usize, &MixtureOfExperts)> {
        self.layers.iter().enumerate().filter_map(|(layer, weights)| match &weights.ffn {
            Ffn::Experts(w) => Some((layer, w)),
            _ => None,
        })
    }

    /// Takes the number of tokens that chose each expert since the last call, and starts again from zero:
    /// `[layer with experts][expert]`
    pub fn take_expert_uses(&self) -> Vec<u64> {
        self.layers_with_experts()
            .flat_map(|(_, w)| w.uses.0.iter().map(|uses| uses.swap(0, Ordering::Relaxed)))
            .collect()
    }

    /// The layer of each expert, and the memory of its matrices, in the order of [`Weights::take_expert_uses`].
    pub fn expert_planes(&self) -> impl Iterator<Item = (usize, Vec<MappedSlice>)> {
        self.layers_with_experts()
            .flat_map(|(layer, w)| (0..EXPERTS.count).map(move |expert| (layer, w.slice_expert(expert))))
    }
}

impl MixtureOfExperts {
    fn slice_expert(&self, expert: usize) -> Vec<MappedSlice> {
        let rows = |width: usize| expert * width..(expert + 1) * width;
        let [gate, up] = [&self.gate, &self.up].map(|w| w.slice_rows(rows(EXPERTS.dim)));
        [gate, up, self.down.slice_rows(rows(DIM))].concat()
    }
}
