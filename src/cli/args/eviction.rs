//! Flags that say what becomes of a cache that is full.

use crate::error::{Error, Result};
use clap::{Args, ValueEnum};

/// What happens to the KV cache when it is full.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum EvictionPolicy {
    None,
    Sliding,
    Snapkv,
    H2o,
}

/// When and what to evict.
#[derive(Args, Clone)]
pub(in crate::cli) struct EvictionArgs {
    /// What to do when the cache is full
    #[arg(long, value_enum, default_value = "none")]
    pub eviction_policy: EvictionPolicy,
    /// Slots kept by an eviction
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub eviction_window: usize,
    /// First tokens that are never evicted
    #[arg(long, visible_alias = "keep", default_value_t = 0, value_name = "N")]
    pub protected_prefix: usize,
    /// Evict when the system's available memory falls below this
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    pub memory_threshold_mb: usize,
}

impl EvictionArgs {
    /// Refuses what this build does not have.
    pub fn check(&self) -> Result<()> {
        match self.eviction_policy {
            EvictionPolicy::None => Ok(()),
            _ => Err(Error::Usage("--eviction-policy other than none is not in this build".into())),
        }
    }
}
