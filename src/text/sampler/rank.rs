//! The most probable tokens in order, without sorting the whole vocabulary.

/// A token and its probability, or another measure.
pub(super) type Ranked = (u32, f32);

/// More probable first, then lower ids first.
fn by_rank(a: &Ranked, b: &Ranked) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// How many candidates to collect when looking for `count` of `vocab` tokens.
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
    /// Room for the first `count` of `vocab` tokens.
    pub fn new(count: usize, vocab: usize) -> Self {
        Self { best: Vec::with_capacity(room(count, vocab)) }
    }

    /// Ranks the `count` largest of `values` in one pass: candidates above a rising threshold go into a buffer, which is
    /// thinned out whenever it is full. NaN and negative infinity never qualify.
    pub fn select(&mut self, values: &[f32], count: usize) {
        let room = room(count, values.len());
        let best = &mut self.best;
        best.clear();
        // A later token has a higher id, so with equal probability it ranks behind.
        let mut threshold = f32::NEG_INFINITY;
        for (id, &p) in values.iter().enumerate() {
            if p > threshold {
                if best.len() == room && count < room {
                    best.select_nth_unstable_by(count - 1, by_rank);
                    best.truncate(count);
                    threshold = best[count - 1].1;
                    if p <= threshold {
                        continue;
                    }
                }
                best.push((id as u32, p));
            }
        }
        if best.len() > count {
            best.select_nth_unstable_by(count - 1, by_rank);
            best.truncate(count);
        }
        best.sort_unstable_by(by_rank);
    }
}
