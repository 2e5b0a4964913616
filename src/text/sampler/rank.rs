//! The most probable tokens in order, without sorting the whole vocabulary, and two ways to truncate them: locally
//! typical sampling and XTC.

use numeric::with_avx2;
use std::ops::Range;

/// A token id and the value it is ranked by: probability or logit.
pub(super) type TokenScore = (u32, f32);

/// Orders larger values first, then lower ids first.
fn by_rank(a: &TokenScore, b: &TokenScore) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Capacity of the candidate buffer when ranking `count` of `vocab` tokens.
fn buffer_capacity(count: usize, vocab: usize) -> usize {
    count.saturating_mul(2).max(1024).min(vocab)
}

/// The first tokens of a ranking. All memory is allocated at construction.
#[derive(Debug, Clone)]
pub(super) struct Ranking {
    /// Best first.
    pub best: Vec<TokenScore>,
}

impl Ranking {
    /// A ranking with capacity for `count` of `vocab` tokens.
    pub fn new(count: usize, vocab: usize) -> Self {
        Self { best: Vec::with_capacity(buffer_capacity(count, vocab)) }
    }

    /// Ranks the `count` largest of `values` in one pass: candidates above a rising threshold go into a buffer, which
    /// is cut back to `count` whenever it is full. NaN and negative infinity never qualify.
    pub fn select_top(&mut self, values: &[f32], count: usize) {
        /// Values compared at once: few runs have one above the threshold.
        const RUN: usize = 64;
        let room = buffer_capacity(count, values.len());
        let best = &mut self.best;
        best.clear();
        // A later token has a higher id, so with an equal value it ranks lower.
        let mut threshold = f32::NEG_INFINITY;
        for (run, values) in values.chunks(RUN).enumerate() {
            if !any_above(values, threshold) {
                continue;
            }
            for (i, &p) in values.iter().enumerate() {
                if p <= threshold || p.is_nan() {
                    continue;
                }
                if best.len() == room && count < room {
                    best.select_nth_unstable_by(count - 1, by_rank);
                    best.truncate(count);
                    threshold = best[count - 1].1;
                    if p <= threshold {
                        continue;
                    }
                }
                best.push(((run * RUN + i) as u32, p));
            }
        }
        if best.len() > count {
            best.select_nth_unstable_by(count - 1, by_rank);
            best.truncate(count);
        }
        best.sort_unstable_by(by_rank);
    }
}

/// True if any value is above the threshold; NaN never is.
fn any_above(values: &[f32], threshold: f32) -> bool {
    with_avx2(
        #[inline(always)]
        || values.iter().fold(false, |any, p| any | (*p > threshold)),
    )
}

/// `ln p`, bit-identical on every machine.
fn log_prob(p: f32) -> f64 {
    f64::from(libm::logf(p))
}

/// The entropy of a distribution in nats: the expected surprise, `-ln p`, of a token.
pub(super) fn compute_entropy(probs: &[f32]) -> f64 {
    -probs.iter().filter(|p| **p > 0.0).map(|&p| f64::from(p) * log_prob(p)).sum::<f64>()
}

/// The cut of locally typical sampling: tokens whose surprise is near the expected surprise (Meister, Pimentel, Wiher
/// and Cotterell, "Locally Typical Sampling", arXiv 2202.00666).
#[derive(Debug, Clone, Copy)]
pub(super) struct TypicalCut {
    /// Of the whole distribution.
    pub entropy: f64,
    /// The least sum of the probabilities kept.
    pub mass: f64,
}

impl TypicalCut {
    /// The shortest range of `best` (most probable first) that holds the tokens with the smallest
    /// `|-ln p - entropy|`, as many as it takes to reach the mass. Of equally typical tokens, the more probable go
    /// first, then those nearer in rank. `None` if it depends on the `behind` tokens that are not ranked yet.
    pub fn select_range(self, best: &[TokenScore], behind: usize) -> Option<Range<usize>> {
        // Deviations fall up to this index and rise after it.
        let middle = best.partition_point(|r| log_prob(r.1) > -self.entropy);
        let deviation = |r: &TokenScore| (self.entropy + log_prob(r.1)).abs();
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
pub(super) fn count_xtc_excluded(best: &[TokenScore], threshold: f32) -> usize {
    best.partition_point(|r| r.1 >= threshold && r.1 > 0.0).saturating_sub(1)
}
