//! Memory budget shared by all requests and responses in progress.

use super::error::{ApiError, ApiResult};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use text::tokenizer::Tokenizer;

/// Maximum size in bytes of a request that may use the whole budget.
const SMALL_REQUEST: u64 = 1 << 20;

/// Maximum bytes of text without a place to split it; tokenizing takes 130 times as much memory.
const MAX_PART: usize = 256 << 10;

/// Budget in bytes.
pub struct MemoryBudget {
    total: u64,
    taken: AtomicU64,
}

/// Part of a [`MemoryBudget`], returned when dropped.
pub struct MemoryShare {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    pub fn new(total: u64) -> Arc<Self> {
        Arc::new(Self { total, taken: AtomicU64::new(0) })
    }

    /// Creates an empty share.
    pub fn new_share(self: &Arc<Self>) -> MemoryShare {
        MemoryShare { budget: Arc::clone(self), bytes: 0 }
    }
}

impl MemoryShare {
    /// Takes `more` bytes. Large shares leave a quarter of the budget to small ones, so that a few long requests do not
    /// block all others.
    pub fn grow(&mut self, more: u64) -> ApiResult<()> {
        let all = self.bytes.saturating_add(more);
        let total = self.budget.total;
        let max = if all <= SMALL_REQUEST { total } else { total / 4 * 3 };
        if all > max {
            let [all, max] = [all, max].map(|bytes| bytes.div_ceil(1 << 20));
            let why = format!(
                "request needs {all} MiB of memory, and the maximum is {max} MiB; send or ask for less"
            );
            return Err(ApiError::new(413, why));
        }
        let take = |taken: u64| taken.checked_add(more).filter(|&taken| taken <= max);
        match self.budget.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => {
                self.bytes = all;
                Ok(())
            }
            Err(_) => Err(ApiError::new(429, "other requests use all the memory; try again later")),
        }
    }

    /// Sets the size of the share.
    pub fn resize(&mut self, bytes: u64) -> ApiResult<()> {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.budget.taken.fetch_sub(less, Ordering::Relaxed);
            self.bytes = bytes;
            return Ok(());
        }
        self.grow(bytes - self.bytes)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.budget.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Refuses text with too long a part that must be tokenized at once.
pub fn check_longest_part(tokenizer: &Tokenizer, text: &str, field: &str) -> ApiResult<()> {
    match tokenizer.longest_chunk(text) {
        0..=MAX_PART => Ok(()),
        bytes => {
            let why = format!(
                "has {bytes} bytes without a space or line break to split at; use at most {MAX_PART}"
            );
            Err(ApiError::for_field(field, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_end_with_the_budget_and_small_ones_have_room_of_their_own() {
        const MIB: u64 = 1 << 20;
        let budget = MemoryBudget::new(16 * MIB);
        let status = |share: &mut MemoryShare, more: u64| share.grow(more).map_err(|e| e.status);
        let [mut large, mut other, mut small] = [budget.new_share(), budget.new_share(), budget.new_share()];
        assert_eq!(status(&mut large, 13 * MIB), Err(413));
        assert_eq!(status(&mut large, 8 * MIB), Ok(()));
        assert_eq!((status(&mut other, 5 * MIB), status(&mut other, 4 * MIB)), (Err(429), Ok(())));
        assert_eq!((status(&mut small, MIB), status(&mut small, MIB)), (Ok(()), Err(429)));
        assert_eq!(large.resize(2 * MIB), Ok(()));
        assert_eq!((large.bytes(), status(&mut small, MIB)), (2 * MIB, Ok(())));
        assert_eq!(status(&mut small, u64::MAX), Err(413));
        drop((large, other, small));
        assert_eq!(budget.taken.load(Ordering::Relaxed), 0);
    }
}
