//! Chooses the slots that stay at an eviction, as a pure function of attention mass.
//!
//! Slots move, keys keep the RoPE position they were stored with, and positions continue counting.

use files::{Error, Result};
use std::str::FromStr;

/// Policy that chooses the slots that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// No eviction: a full cache ends the generation.
    None,
    /// Keeps the protected prefix (attention sinks: Xiao et al., arXiv 2309.17453) and the latest slots.
    Sliding,
    /// Keeps the slots that the last queries attend to, pooled over neighbours, and the latest (Li et al., arXiv
    /// 2404.14469).
    SnapKv,
    /// Keeps the slots with most attention so far, heavy hitters, and the latest (Zhang et al., arXiv 2306.14048).
    H2o,
}

impl Policy {
    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::Sliding => "sliding",
            Policy::SnapKv => "snapkv",
            Policy::H2o => "h2o",
        }
    }

    /// True if it looks at attention.
    pub fn observes_attention(self) -> bool {
        matches!(self, Policy::SnapKv | Policy::H2o)
    }

    /// Default number of leading tokens that are never evicted. SmolLM2-135M's perplexity in windows of 256 is 38.6
    /// without any under sliding, and 22.4 with four (20.7 with the whole cache). H2O finds sinks by itself.
    pub fn default_prefix(self) -> usize {
        match self {
            Policy::Sliding | Policy::SnapKv => 4,
            Policy::None | Policy::H2o => 0,
        }
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o]
            .into_iter()
            .find(|p| p.name() == s)
            .ok_or_else(|| Error::Usage(format!("eviction policy {s}: use none, sliding, snapkv or h2o")))
    }
}

/// Settings of evictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Eviction {
    /// Policy that chooses slots.
    pub policy: Policy,
    /// Number of slots that an eviction keeps.
    pub window: usize,
    /// Number of leading tokens that are never evicted. `None`: [`Policy::default_prefix`], until the text outgrows the
    /// context that the model was trained for.
    pub prefix: Option<usize>,
    /// Available memory of the system, in bytes, below which slots are evicted.
    pub memory_threshold: u64,
}

/// Slots that an eviction down to `slots` frees: an eighth of them, so that not every token evicts.
pub fn slots_to_free(slots: usize) -> usize {
    (slots / 8).max(1)
}

impl Eviction {
    /// Settings that never evict.
    pub const NEVER: Self =
        Self { policy: Policy::None, window: 1024, prefix: None, memory_threshold: 256 << 20 };

    /// Number of filled slots at which slots are evicted, if the cache has more.
    pub fn eviction_limit(&self) -> usize {
        self.window + slots_to_free(self.window)
    }

    /// Number of leading tokens that stay when `keep` slots do. The default number takes at most half of the slots.
    pub fn prefix_len(&self, keep: usize) -> usize {
        self.prefix.unwrap_or(self.policy.default_prefix().min(keep / 2))
    }

    /// Checks that the window has room beyond the protected prefix.
    pub fn validate(&self) -> Result<()> {
        let least = self.prefix.unwrap_or(0).saturating_add(2);
        if (least..=1 << 24).contains(&self.window) {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "`Eviction::window` {}: use a number from {least} (two more than `Eviction::prefix`) to 16777216",
            self.window
        )))
    }
}

/// Numbers of slots that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Total number of slots that stay.
    pub keep: usize,
    /// Leading slots that stay.
    pub prefix: usize,
    /// Minimum number of latest slots that stay.
    pub recent: usize,
    /// Number of leading slots further back than the model was trained to look; they stay only if there are no others.
    pub stale: usize,
}

/// Number of queries at the end of a prompt that SnapKV scores slots with, whose slots it always keeps.
pub const SNAP_WINDOW: usize = 16;

/// Number of neighbouring slots, itself included, that SnapKV pools a score over: a slot that queries attend to is kept
/// with its neighbours.
///
/// The authors use 16 or 32 queries and the maximum of five or seven neighbours. A fact of the story model is about 13
/// tokens long. Of the full cache's 46 correct answers, a quarter of the slots (q4) keeps: with 32 queries and the
/// maximum of 1, 7, 13, 21: 13, 37, 43, 43; with 16 and 7, 13, 21, 31: 39, 45, 45, 44; with 24 and 13: 45; with 64 and
/// 7: 27; with the average of five and 32, 16 queries: 26, 35.
const SNAP_KERNEL: usize = 13;

/// Pools each score to the maximum of the `kernel` scores around it; there are fewer at the ends.
fn pool_max(scores: &[f32], kernel: usize, pooled: &mut Vec<f32>) {
    let reach = kernel / 2;
    pooled.clear();
    pooled.extend((0..scores.len()).map(|slot| {
        let near = &scores[slot.saturating_sub(reach)..scores.len().min(slot + reach + 1)];
        near.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }));
}

impl Budget {
    /// Budget of an eviction down to `keep` slots.
    pub fn for_eviction(eviction: &Eviction, keep: usize) -> Self {
        let prefix = eviction.prefix_len(keep).min(keep);
        let rest = keep - prefix;
        let recent = match eviction.policy {
            Policy::None | Policy::Sliding => rest,
            Policy::SnapKv => SNAP_WINDOW.min(rest / 2),
            Policy::H2o => rest / 2,
        };
        Self { keep, prefix, recent, stale: 0 }
    }
}

/// Selector of slots; allocates only when a sequence is longer than all before.
#[derive(Debug, Default)]
pub struct SlotSelector {
    /// Pooled scores of the slots before the recent ones.
    pooled: Vec<f32>,
}

impl SlotSelector {
    /// Chooses the `budget.keep` slots of one KV head that stay (all, if there are no more), ascending, into `slots`.
    /// `mass` is the attention mass of the filled slots; sliding uses only its length.
    pub fn choose_slots(&mut self, policy: Policy, mass: &[f32], budget: Budget, slots: &mut Vec<u32>) {
        let filled = mass.len();
        let prefix = budget.prefix.min(budget.keep);
        let recent = match policy {
            Policy::Sliding => budget.keep - prefix,
            _ => budget.recent.min(budget.keep - prefix),
        };
        slots.clear();
        if policy == Policy::None || filled <= budget.keep {
            slots.extend(0..filled as u32);
            return;
        }
        let (late, wanted) = (filled - recent, budget.keep - prefix - recent);
        slots.extend(0..prefix as u32);
        let first = prefix.max(budget.stale.min(late - wanted));
        match policy {
            Policy::SnapKv => {
                pool_max(&mass[..late], SNAP_KERNEL, &mut self.pooled);
                take_best(&self.pooled, first, wanted, slots);
            }
            _ => take_best(&mass[..late], first, wanted, slots),
        }
        slots.extend(late as u32..filled as u32);
    }
}

/// Appends the `wanted` slots from `first` on with the highest scores, in ascending order; ties go to the first.
fn take_best(scores: &[f32], first: usize, wanted: usize, slots: &mut Vec<u32>) {
    let before = slots.len();
    if wanted > 0 {
        slots.extend(first as u32..scores.len() as u32);
        let candidates = &mut slots[before..];
        if wanted < candidates.len() {
            // A total order, so that the result does not depend on the algorithm and NaN does no harm.
            candidates.select_nth_unstable_by(wanted - 1, |&a, &b| {
                scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b))
            });
        }
        slots.truncate(before + wanted);
        slots[before..].sort_unstable();
    }
}

#[cfg(test)]
mod tests;
