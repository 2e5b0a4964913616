//! Which slots stay when some must go. Pure: attention mass in, slots out.
//!
//! Slots move, keys keep the RoPE position they were stored with, and positions go on counting.

use files::{Error, Result};
use std::str::FromStr;

/// How the slots that stay are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// None are evicted: a full cache ends the text.
    None,
    /// The protected prefix (attention sinks: Xiao et al., arXiv 2309.17453) and the latest.
    Sliding,
    /// The slots that the last queries look at, pooled over neighbours, and the latest (Li et al., arXiv 2404.14469).
    SnapKv,
    /// The slots that received most attention so far, heavy hitters, and the latest (Zhang et al., arXiv 2306.14048).
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

    /// First tokens that are never evicted unless another number is asked for. SmolLM2-135M's perplexity in windows of
    /// 256 is 38.6 without any under sliding, and 22.4 with four (20.7 with the whole cache). H2O finds them by itself.
    pub fn sinks(self) -> usize {
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

/// When to evict and what to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Eviction {
    /// How slots are chosen.
    pub policy: Policy,
    /// Slots kept by an eviction.
    pub window: usize,
    /// First tokens that are never evicted. `None`: as many as the policy needs, [`Policy::sinks`], until the text outgrows
    /// the context that the model was trained for.
    pub prefix: Option<usize>,
    /// Available memory of the system, in bytes, below which slots are evicted.
    pub memory_threshold: u64,
}

/// Slots that an eviction down to `slots` frees: an eighth of them, so that not every token evicts.
pub fn slack(slots: usize) -> usize {
    (slots / 8).max(1)
}

impl Eviction {
    /// Nothing is ever evicted.
    pub const NEVER: Self =
        Self { policy: Policy::None, window: 1024, prefix: None, memory_threshold: 256 << 20 };

    /// Number of filled slots at which an eviction comes, where the cache has more.
    pub fn limit(&self) -> usize {
        self.window + slack(self.window)
    }

    /// First tokens that stay when `keep` slots do. Those that nobody asked for take half of the slots at most.
    pub fn prefix_of(&self, keep: usize) -> usize {
        self.prefix.unwrap_or(self.policy.sinks().min(keep / 2))
    }

    /// Refuses a window with no room beyond the protected prefix.
    pub fn check(&self) -> Result<()> {
        let least = self.prefix.unwrap_or(0).saturating_add(2);
        match self.window >= least && self.window <= 1 << 24 {
            true => Ok(()),
            false => Err(Error::Usage(format!(
                "`Eviction::window` {}: use a number from {least} (two more than `Eviction::prefix`) to 16777216",
                self.window
            ))),
        }
    }
}

/// How many slots stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Slots that stay, in all.
    pub keep: usize,
    /// First slots that stay.
    pub prefix: usize,
    /// Last slots that stay, at least.
    pub recent: usize,
    /// This many first slots lie further back than the model was trained to look; they stay only if no others are left.
    pub stale: usize,
}

/// Queries at the end of a prompt that SnapKV looks from, which are also the slots it always keeps.
pub const SNAP_WINDOW: usize = 16;

/// How SnapKV's scores are pooled: what a query looks at is kept with its neighbours.
///
/// The authors look from 16 or 32 queries and pool the largest of five or seven. A fact of the story model is about
/// 13 tokens. Of the 46 answers of the full cache a quarter of the slots (q4) keeps, with 32 queries and the largest of
/// 1, 7, 13, 21: 13, 37, 43, 43; with 16 and 7, 13, 21, 31: 39, 45, 45, 44; with 24 and 13: 45; with 64 and 7: 27; with
/// the average of five and 32, 16 queries: 26, 35.
const SNAP_POOLING: Pooling = Pooling { kind: PoolingKind::Most, kernel: 13 };

/// How a score takes in those of its neighbours; none are beyond the ends.
#[derive(Debug, Clone, Copy)]
struct Pooling {
    kind: PoolingKind,
    /// Neighbours on both sides and the slot itself; odd.
    kernel: usize,
}

#[derive(Debug, Clone, Copy)]
enum PoolingKind {
    /// Their sum divided by `kernel`, also at the ends, where there are fewer.
    #[cfg_attr(not(test), expect(dead_code, reason = "measured against the other, see SNAP_POOLING"))]
    Average,
    /// The largest.
    Most,
}

impl Pooling {
    /// The pooled scores of all slots, into `pooled`.
    fn pool(self, scores: &[f32], pooled: &mut Vec<f32>) {
        let reach = self.kernel / 2;
        pooled.clear();
        pooled.extend((0..scores.len()).map(|slot| {
            let near = &scores[slot.saturating_sub(reach)..scores.len().min(slot + reach + 1)];
            match self.kind {
                PoolingKind::Average => near.iter().sum::<f32>() / self.kernel as f32,
                PoolingKind::Most => near.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            }
        }));
    }
}

impl Budget {
    /// How an eviction down to `keep` slots divides them.
    pub fn of(eviction: &Eviction, keep: usize) -> Self {
        let prefix = eviction.prefix_of(keep).min(keep);
        let rest = keep - prefix;
        let recent = match eviction.policy {
            Policy::None | Policy::Sliding => rest,
            Policy::SnapKv => SNAP_WINDOW.min(rest / 2),
            Policy::H2o => rest / 2,
        };
        Self { keep, prefix, recent, stale: 0 }
    }
}

/// Chooses slots; allocates only while sequences grow longer than any it has seen.
#[derive(Debug, Default)]
pub struct Chooser {
    /// Pooled scores of the slots before the recent ones.
    pooled: Vec<f32>,
}

impl Chooser {
    /// The slots of one KV head that stay, ascending, `budget.keep` of them (all, where there are no more). `mass` is
    /// the attention of the filled slots as the policy wants it observed; sliding looks at nothing but its length.
    pub fn choose(&mut self, policy: Policy, mass: &[f32], budget: Budget, slots: &mut Vec<u32>) {
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
                SNAP_POOLING.pool(&mass[..late], &mut self.pooled);
                take_best(&self.pooled, first, wanted, slots);
            }
            _ => take_best(&mass[..late], first, wanted, slots),
        }
        slots.extend(late as u32..filled as u32);
    }
}

/// Appends, in ascending order, the `wanted` slots from `first` on that score most; of equal ones the first.
fn take_best(scores: &[f32], first: usize, wanted: usize, slots: &mut Vec<u32>) {
    let before = slots.len();
    if wanted > 0 {
        slots.extend(first as u32..scores.len() as u32);
        let candidates = &mut slots[before..];
        if wanted < candidates.len() {
            // A total order, so that the outcome does not depend on the algorithm, nor breaks on a NaN.
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
