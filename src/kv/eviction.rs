//! Which slots stay when some must go. Pure: attention mass in, slots out.
//!
//! Slots move, keys keep the RoPE position they were stored with, and positions go on counting.

use crate::error::{Error, Result};
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
    /// First tokens that are never evicted.
    pub prefix: usize,
    /// Available memory of the system, in bytes, below which slots are evicted.
    pub memory_threshold: u64,
}

impl Eviction {
    /// Nothing is ever evicted.
    pub const NEVER: Self =
        Self { policy: Policy::None, window: 1024, prefix: 0, memory_threshold: 256 << 20 };

    /// Refuses a window with no room beyond the protected prefix.
    pub fn check(&self) -> Result<()> {
        let least = self.prefix.saturating_add(2);
        match self.window >= least && self.window <= 1 << 24 {
            true => Ok(()),
            false => Err(Error::Usage(format!(
                "--eviction-window {}: use a number from {least} (two more than --protected-prefix) to 16777216",
                self.window
            ))),
        }
    }
}

/// How many slots stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// All that stay.
    pub keep: usize,
    /// Of these, the first slots.
    pub prefix: usize,
    /// And the last ones, at least.
    pub recent: usize,
}

impl Budget {
    /// What stays when `keep` slots do.
    pub fn of(eviction: &Eviction, keep: usize) -> Self {
        let prefix = eviction.prefix.min(keep);
        let rest = keep - prefix;
        let recent = match eviction.policy {
            Policy::None | Policy::Sliding => rest,
            Policy::SnapKv => SNAP_WINDOW.min(rest / 2),
            Policy::H2o => rest / 2,
        };
        Self { keep, prefix, recent }
    }
}

/// Queries at the end of a prompt that SnapKV looks from, which are also the slots it always keeps.
pub const SNAP_WINDOW: usize = 32;

/// The slots of one KV head that stay, ascending, `budget.keep` of them (all, where there are no more). `mass` is the
/// attention of the filled slots as the policy wants it observed; sliding does not look at it beyond its length.
pub fn choose(policy: Policy, mass: &[f32], budget: Budget, slots: &mut Vec<u32>) {
    let _ = (policy, mass, budget, slots);
    todo!("policies")
}
