//! Flags that say what becomes of a full cache.

use crate::run::eviction::{Eviction, Policy};
use clap::Args;
use files::Result;

/// When and what to evict.
#[derive(Args, Clone)]
pub struct EvictionArgs {
    /// What to do when the cache is full: none ends the text, sliding keeps the latest tokens, snapkv and h2o keep the
    /// tokens that attention looks at
    #[arg(long, default_value = "none", value_name = "POLICY")]
    pub eviction_policy: Policy,
    /// Slots that an eviction keeps
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub eviction_window: usize,
    /// First tokens that are never evicted [default: 4 with sliding and snapkv, until the text outgrows the context that
    /// the model was trained for, else 0; in a chat at least the system message]
    #[arg(long, visible_alias = "keep", value_name = "N")]
    pub protected_prefix: Option<usize>,
    /// Also evict when less than this much of the system's memory is available
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    pub memory_threshold_mb: u64,
}

impl EvictionArgs {
    /// Checks the flags and resolves them.
    pub fn resolve(&self) -> Result<Eviction> {
        let eviction = Eviction {
            policy: self.eviction_policy,
            window: self.eviction_window,
            prefix: self.protected_prefix,
            memory_threshold: self.memory_threshold_mb.saturating_mul(1 << 20),
        };
        if eviction.policy != Policy::None {
            eviction.check()?;
        }
        Ok(eviction)
    }
}
