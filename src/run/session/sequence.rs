//! Tokens and layout of a sequence, saved and restored with its rows.

use crate::dims::{FULL_ATTENTION_LAYERS, KV_HEADS, SLIDING_LAYERS, VOCAB, WINDOW, is_sliding};
use files::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// An eviction in the history of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastEviction {
    /// Length of the sequence at the eviction.
    pub tokens: usize,
    /// Number of slots that stayed.
    pub kept: usize,
}

/// Tokens and layout of a sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequence {
    /// Every token, evicted ones included; their number is the next RoPE position.
    pub tokens: Vec<u32>,
    /// Slots in use.
    pub slots: usize,
    /// Evictions, in order.
    pub cuts: Vec<PastEviction>,
    /// Number of leading tokens that are in the first slots; without evictions all are, whatever its value.
    pub prefix: usize,
    /// First token from which on all are in the last slots, in order, in every head.
    #[serde(rename = "dense")]
    pub dense_from: usize,
    /// First token whose attention the saved mass counts; `None` if there is no mass.
    #[serde(rename = "since")]
    pub observed_since: Option<usize>,
    /// If heads choose their own slots: positions of the slots that the last eviction left in full-attention layers,
    /// `[layer * KV_HEADS + kv_head][slot]`, ascending.
    #[serde(default)]
    pub positions: Vec<Vec<u32>>,
    /// First position whose rows sliding-window layers have; they have all that follow.
    #[serde(default)]
    pub oldest: usize,
}

impl Sequence {
    /// Slots (positions in a sliding-window layer) that a layer has rows of.
    pub fn row_range(&self, layer: usize) -> Range<usize> {
        if is_sliding(layer) { self.oldest..self.tokens.len() } else { 0..self.slots }
    }

    /// Checks that its parts agree with each other and with this binary's model.
    pub fn is_consistent(&self) -> bool {
        let tokens = self.tokens.len();
        let cuts = self.cuts.iter().all(|c| c.tokens <= tokens && (1..=c.tokens).contains(&c.kept));
        cuts && self.cuts.is_sorted_by_key(|c| c.tokens)
            && self.slots <= tokens
            && self.dense_from <= tokens
            && tokens - self.dense_from <= self.slots
            && if self.cuts.is_empty() {
                self.slots == tokens && self.dense_from == 0
            } else {
                self.prefix <= self.slots
            }
            && self.positions_are_sound()
            && (self.oldest == 0 || SLIDING_LAYERS != 0 && self.oldest.saturating_add(WINDOW) <= tokens + 1)
            && self.tokens.iter().all(|&t| (t as usize) < VOCAB)
    }

    /// Checks that all heads have the same number of positions, in ascending order.
    fn positions_are_sound(&self) -> bool {
        let (heads, slots) = (self.positions.len(), self.positions.first().map_or(0, Vec::len));
        let sound = |head: &Vec<u32>| {
            head.len() == slots
                && head.is_sorted_by(|a, b| a < b)
                && head.last().is_none_or(|&p| (p as usize) < self.tokens.len())
        };
        [0, FULL_ATTENTION_LAYERS * KV_HEADS].contains(&heads)
            && slots <= self.slots
            && self.positions.iter().all(sound)
    }

    /// Positions of all slots of full-attention layers: `[layer * KV_HEADS + kv_head][slot]`, ascending.
    pub(super) fn positions_of_slots(&self) -> Result<Vec<Vec<u32>>> {
        let (all, slots, heads) = (self.tokens.len(), self.slots, FULL_ATTENTION_LAYERS * KV_HEADS);
        let latest = |n: usize| (all - n) as u32..all as u32;
        if self.cuts.is_empty() {
            return Ok(vec![latest(slots).collect(); heads]);
        }
        if self.positions.len() == heads {
            let whole = |kept: &Vec<u32>| kept.iter().copied().chain(latest(slots - kept.len())).collect();
            return Ok(self.positions.iter().map(whole).collect());
        }
        if self.has_contiguous_positions() {
            return Ok(vec![(0..self.prefix as u32).chain(latest(slots - self.prefix)).collect(); heads]);
        }
        let why = "the positions of evicted slots are unknown: the number of protected tokens has grown; set it first";
        Err(Error::Usage(why.into()))
    }

    /// True if every head evicted exactly the tokens between the leading and the latest ones.
    pub fn has_contiguous_positions(&self) -> bool {
        self.slots == self.prefix + self.tokens.len() - self.dense_from
    }

    /// Checks that it can be a sequence of this binary's model with at most `capacity` slots.
    pub(super) fn validate(&self, capacity: usize) -> Result<()> {
        if !self.is_consistent() {
            return Err(Error::Model("the saved sequence is inconsistent".into()));
        }
        if self.slots > capacity {
            return Err(Error::Usage(format!(
                "the saved sequence has {} tokens but the context has {capacity}; raise `EngineOptions::max_seq_len`",
                self.slots
            )));
        }
        Ok(())
    }
}
