//! Memory that all requests and answers under way may take together.

use super::error::{ApiError, ApiResult};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use text::tokenizer::Tokenizer;

/// Requests of so many bytes may take all that is left.
const SMALL: u64 = 1 << 20;

/// Bytes of a text that may be encoded at once, which takes 130 times as much.
const LONGEST_PART: usize = 256 << 10;

/// Bytes that are there, and those that are taken.
pub struct MemoryBudget {
    most: u64,
    taken: AtomicU64,
}

/// Part of a [`MemoryBudget`], given back when it is dropped.
pub struct MemoryShare {
    of: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    /// Of so many bytes.
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, taken: AtomicU64::new(0) })
    }

    /// A share without bytes yet.
    pub fn share(self: &Arc<Self>) -> MemoryShare {
        MemoryShare { of: Arc::clone(self), bytes: 0 }
    }
}

impl MemoryShare {
    /// Takes so many bytes more. Large shares leave a quarter of the budget to small ones, so that a few long requests do
    /// not keep out the usual ones.
    pub fn grow(&mut self, more: u64) -> ApiResult<()> {
        let all = self.bytes.saturating_add(more);
        let most = if all <= SMALL { self.of.most } else { self.of.most / 4 * 3 };
        if all > most {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let why = format!(
                "the request needs {} MiB of memory, and there are {} MiB for one; send or ask for less at a time",
                mib(all),
                mib(most)
            );
            return Err(ApiError::new(413, why));
        }
        let take = |taken: u64| taken.checked_add(more).filter(|&taken| taken <= most);
        match self.of.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => {
                self.bytes = all;
                Ok(())
            }
            Err(_) => {
                Err(ApiError::new(429, "other requests take all the memory that there is; try again later"))
            }
        }
    }

    /// Takes so many bytes in all.
    pub fn resize(&mut self, bytes: u64) -> ApiResult<()> {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.of.taken.fetch_sub(less, Ordering::Relaxed);
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
        self.of.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Refuses a text that cannot be encoded in parts and is too long to be encoded at once.
pub fn check_longest_part(tokenizer: &Tokenizer, text: &str, field: &str) -> ApiResult<()> {
    match tokenizer.longest_part(text) {
        0..=LONGEST_PART => Ok(()),
        bytes => {
            let why =
                format!("has {bytes} bytes without two words or lines; use at most {LONGEST_PART} at a time");
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
        let [mut large, mut other, mut small] = [budget.share(), budget.share(), budget.share()];
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
