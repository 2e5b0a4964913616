//! How much of a prompt is computed beside the tokens of others: so much that a pass takes less than twice as long as
//! one without.

use std::time::Duration;

/// Times of passes, in seconds.
#[derive(Debug)]
pub(super) struct Pace {
    /// Most tokens of prompts in a pass.
    chunk: usize,
    /// A pass of tokens alone.
    quiet: Option<f64>,
    /// What each token of a prompt adds to it.
    token: Option<f64>,
}

/// Tokens of a prompt while nothing is known.
const FIRST: usize = 16;
/// A pass may take this much longer than a quiet one. Times vary, and twice is too much.
const MORE: f64 = 0.7;
/// Weight of the latest time.
const WEIGHT: f64 = 0.25;

fn mix(before: Option<f64>, now: f64) -> Option<f64> {
    Some(before.map_or(now, |before| before + WEIGHT * (now - before)))
}

impl Pace {
    pub fn new(chunk: usize) -> Self {
        Self { chunk: chunk.max(1), quiet: None, token: None }
    }

    /// Most tokens of prompts beside so many others.
    pub fn most(&self, decoding: usize) -> usize {
        let most = match (decoding, self.quiet, self.token) {
            (0, ..) => self.chunk,
            (_, Some(quiet), Some(token)) if token > 0.0 => (MORE * quiet / token) as usize,
            (_, Some(_), Some(_)) => self.chunk,
            _ => FIRST,
        };
        // Kernels take four tokens at a time.
        let whole = if most > 4 { most / 4 * 4 } else { most };
        whole.clamp(1, self.chunk)
    }

    /// A pass with so many tokens of texts and of prompts took so long.
    pub fn took(&mut self, decoding: usize, prompts: usize, time: Duration) {
        let time = time.as_secs_f64();
        match (decoding, prompts, self.quiet) {
            (0, 0, _) => {}
            (_, 0, _) => self.quiet = mix(self.quiet, time),
            // Weights are read for these alone, so this is more than a token adds elsewhere.
            (0, n, _) => self.token = self.token.map_or(Some(time / n as f64), Some),
            (_, n, Some(quiet)) => self.token = mix(self.token, (time - quiet).max(0.0) / n as f64),
            (_, _, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_prompt_leaves_passes_below_twice_the_quiet_time() {
        let mut pace = Pace::new(256);
        assert_eq!((pace.most(0), pace.most(1)), (256, FIRST));
        // A quiet pass takes 10 ms, a token of a prompt adds 0.4.
        let time = |prompts: usize| Duration::from_secs_f64(10e-3 + 0.4e-3 * prompts as f64);
        for _ in 0..8 {
            pace.took(3, 0, time(0));
        }
        for _ in 0..40 {
            let n = pace.most(3);
            pace.took(3, n, time(n));
        }
        let n = pace.most(3);
        assert!((8..25).contains(&n) && time(n) < 2 * time(0), "{n}");
        assert_eq!(pace.most(0), 256, "nobody waits");
    }

    #[test]
    fn tokens_that_cost_nothing_fill_the_chunk_and_dear_ones_come_one_by_one() {
        let mut pace = Pace::new(64);
        pace.took(1, 0, Duration::from_millis(10));
        pace.took(1, 16, Duration::from_millis(9));
        assert_eq!(pace.most(1), 64);
        for _ in 0..40 {
            pace.took(1, 1, Duration::from_millis(90));
        }
        assert_eq!(pace.most(1), 1);
    }
}
