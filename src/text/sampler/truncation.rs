//! Two ways to truncate the ranked tokens: locally typical sampling and XTC.

use super::rank::Ranked;
use std::ops::Range;

/// `ln p`, bit-identical on every machine.
fn log_prob(p: f32) -> f64 {
    f64::from(libm::logf(p))
}

/// The entropy of a distribution in nats: the expected surprise, `-ln p`, of a token.
pub(super) fn entropy(probs: &[f32]) -> f64 {
    -probs.iter().filter(|p| **p > 0.0).map(|&p| f64::from(p) * log_prob(p)).sum::<f64>()
}

/// The cut of locally typical sampling: tokens whose surprise is near the expected surprise (Meister, Pimentel, Wiher
/// and Cotterell, "Locally Typical Sampling", arXiv 2202.00666).
#[derive(Debug, Clone, Copy)]
pub(super) struct Typical {
    /// Of the whole distribution.
    pub entropy: f64,
    /// The least sum of the probabilities kept.
    pub mass: f64,
}

impl Typical {
    /// The shortest range of `best` (most probable first) that holds the tokens with the smallest
    /// `|-ln p - entropy|`, as many as it takes to reach the mass. Of equally typical tokens, the more probable go
    /// first, then those nearer in rank. `None` if it depends on the `behind` tokens that are not ranked yet.
    pub fn range(self, best: &[Ranked], behind: usize) -> Option<Range<usize>> {
        // Deviations fall up to this index and rise after it.
        let middle = best.partition_point(|r| log_prob(r.1) > -self.entropy);
        let deviation = |r: &Ranked| (self.entropy + log_prob(r.1)).abs();
        let (mut start, mut end) = (middle, middle);
        let mut sum = 0.0f64;
        while sum < self.mass {
            let up = start.checked_sub(1).map(|i| &best[i]);
            let upwards = match (up, best.get(end)) {
                (_, None) if behind > 0 => return None,
                (None, None) => break,
                (Some(up), Some(down)) => deviation(up) <= deviation(down),
                (up, _) => up.is_some(),
            };
            let taken = if upwards { start - 1 } else { end };
            (start, end) = (start.min(taken), end.max(taken + 1));
            sum += f64::from(best[taken].1);
        }
        Some(start..end)
    }
}

/// Number of tokens of `best` (most probable first) that XTC, "exclude top choices", excludes: of those at least as
/// probable as `threshold`, all but the last (p-e-w, pull request 6335 of text-generation-webui). Tokens with
/// probability 0 do not count.
pub(super) fn xtc_excluded(best: &[Ranked], threshold: f32) -> usize {
    best.partition_point(|r| r.1 >= threshold && r.1 > 0.0).saturating_sub(1)
}
