//! The most probable tokens in order, without sorting the whole vocabulary.

use numeric::widely;

/// A token id and the value it is ranked by: probability or logit.
pub(super) type Ranked = (u32, f32);

/// Orders larger values first, then lower ids first.
fn by_rank(a: &Ranked, b: &Ranked) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Capacity of the candidate buffer when ranking `count` of `vocab` tokens.
fn room(count: usize, vocab: usize) -> usize {
    count.saturating_mul(2).max(1024).min(vocab)
}

/// The first tokens of a ranking. All memory is allocated at construction.
#[derive(Debug, Clone)]
pub(super) struct Ranking {
    /// Best first.
    pub best: Vec<Ranked>,
}

impl Ranking {
    /// A ranking with capacity for `count` of `vocab` tokens.
    pub fn new(count: usize, vocab: usize) -> Self {
        Self { best: Vec::with_capacity(room(count, vocab)) }
    }

    /// Ranks the `count` largest of `values` in one pass: candidates above a rising threshold go into a buffer, which
    /// is cut back to `count` whenever it is full. NaN and negative infinity never qualify.
    pub fn select(&mut self, values: &[f32], count: usize) {
        /// Values compared at once: few runs have one above the threshold.
        const RUN: usize = 64;
        let room = room(count, values.len());
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
    widely(
        #[inline(always)]
        || values.iter().fold(false, |any, p| any | (*p > threshold)),
    )
}
