//! Timeout of a pass, after which its device counts as lost.

use super::storage::Step;
use crate::dims::LAYERS;
use opencl_runtime::watchdog::{minimum_timeout, unmeasured_timeout};
use std::time::Duration;

/// Factor on the time of the slowest similar pass so far.
const TIMEOUT_FACTOR: f64 = 20.0;
/// Products per second of the slowest device worth waiting for.
const PRODUCTS_PER_SECOND: f64 = 1e9;

/// Times of passes so far: of one token, and of more.
#[derive(Default)]
pub struct PassTimeout([Option<SlowestPass>; 2]);

#[derive(Clone, Copy)]
struct SlowestPass {
    tokens: usize,
    took: Duration,
}

impl PassTimeout {
    /// Timeout for a pass of `tokens` tokens.
    pub fn limit_for(&self, tokens: usize) -> Duration {
        match self.0[usize::from(tokens > 1)] {
            Some(slowest) => {
                let larger = (tokens as f64 / slowest.tokens as f64).max(1.0);
                minimum_timeout().max(slowest.took.mul_f64(TIMEOUT_FACTOR * larger))
            }
            None => {
                unmeasured_timeout() + Duration::from_secs_f64(count_products(tokens) / PRODUCTS_PER_SECOND)
            }
        }
    }

    /// Records the time of a pass that was waited for.
    pub fn record_time(&mut self, tokens: usize, took: Duration) {
        let slowest = &mut self.0[usize::from(tokens > 1)];
        let before = slowest.unwrap_or(SlowestPass { tokens, took });
        *slowest = Some(SlowestPass { tokens: tokens.max(before.tokens), took: took.max(before.took) });
    }
}

/// Number of products in a pass, without attention.
fn count_products(tokens: usize) -> f64 {
    let of = |step: Step| {
        let (rows, cols) = step.rows_and_cols();
        (step.matrix_count() * rows) as f64 * cols as f64
    };
    let steps = (0..LAYERS).flat_map(Step::of_layer).chain([Step::Head, Step::PerLayerInputs]);
    tokens as f64 * steps.map(of).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_may_take_twenty_times_what_the_slowest_took_and_at_least_five_seconds() {
        let mut timeout = PassTimeout::default();
        assert!(timeout.limit_for(1) >= Duration::from_secs(30), "it may be compiled first");
        assert!(timeout.limit_for(64) > timeout.limit_for(2));
        let (fast, slow) = (Duration::from_millis(1), Duration::from_secs(1));
        timeout.record_time(1, fast);
        assert_eq!(timeout.limit_for(1), Duration::from_secs(5));
        timeout.record_time(64, slow);
        timeout.record_time(32, fast);
        for (tokens, seconds) in [(2, 20), (64, 20), (128, 40)] {
            assert_eq!(timeout.limit_for(tokens), Duration::from_secs(seconds), "{tokens} tokens");
        }
        assert_eq!(timeout.limit_for(1), Duration::from_secs(5));
    }
}
