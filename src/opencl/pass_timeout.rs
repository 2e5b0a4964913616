//! Timeout of a pass, after which its device counts as lost.

use super::storage::Step;
use crate::dims::LAYERS;
use opencl_runtime::waiter::{least, unmeasured};
use std::time::Duration;

/// Factor on the time of the slowest similar pass so far.
const TIMES: f64 = 20.0;
/// Products per second of the slowest device worth waiting for.
const PRODUCTS: f64 = 1e9;

/// Times of passes so far: of one token, and of more.
#[derive(Default)]
pub struct PassTimeout([Option<Slowest>; 2]);

#[derive(Clone, Copy)]
struct Slowest {
    tokens: usize,
    took: Duration,
}

impl PassTimeout {
    /// Timeout for a pass of `tokens` tokens.
    pub fn limit(&self, tokens: usize) -> Duration {
        match self.0[usize::from(tokens > 1)] {
            Some(slowest) => {
                let larger = (tokens as f64 / slowest.tokens as f64).max(1.0);
                least().max(slowest.took.mul_f64(TIMES * larger))
            }
            None => unmeasured() + Duration::from_secs_f64(products(tokens) / PRODUCTS),
        }
    }

    /// Records the time of a pass that was waited for.
    pub fn record(&mut self, tokens: usize, took: Duration) {
        let slowest = &mut self.0[usize::from(tokens > 1)];
        let before = slowest.unwrap_or(Slowest { tokens, took });
        *slowest = Some(Slowest { tokens: tokens.max(before.tokens), took: took.max(before.took) });
    }
}

/// Number of products in a pass, without attention.
fn products(tokens: usize) -> f64 {
    let of = |step: Step| {
        let (rows, cols) = step.shape();
        let times = if step == Step::Head { 1 } else { LAYERS };
        (times * step.halves() * rows) as f64 * cols as f64
    };
    tokens as f64 * Step::ALL.into_iter().map(of).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_may_take_twenty_times_what_the_slowest_took_and_at_least_five_seconds() {
        let mut timeout = PassTimeout::default();
        assert!(timeout.limit(1) >= Duration::from_secs(30), "it may be compiled first");
        assert!(timeout.limit(64) > timeout.limit(2));
        let (fast, slow) = (Duration::from_millis(1), Duration::from_secs(1));
        timeout.record(1, fast);
        assert_eq!(timeout.limit(1), Duration::from_secs(5));
        timeout.record(64, slow);
        timeout.record(32, fast);
        for (tokens, seconds) in [(2, 20), (64, 20), (128, 40)] {
            assert_eq!(timeout.limit(tokens), Duration::from_secs(seconds), "{tokens} tokens");
        }
        assert_eq!(timeout.limit(1), Duration::from_secs(5));
    }
}
