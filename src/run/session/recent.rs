//! Which rows local layers have: those of the latest positions, as far back as their rings reach.

use crate::dims::{LOCAL_LAYERS, WINDOW};
use std::ops::Range;

/// The positions whose rows a cache has in its local layers: enough for the next token.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Recent {
    pub from: usize,
    pub end: usize,
}

impl Recent {
    /// The rows of these positions joined, in a ring of so many.
    pub fn join(&mut self, positions: Range<usize>, ring: usize) {
        self.from = self.from.max(positions.end.saturating_sub(ring));
        self.end = positions.end;
    }

    /// Whether a token at this position finds all rows that it sees.
    pub fn reaches(self, pos: usize) -> bool {
        LOCAL_LAYERS == 0 || pos <= self.end && (self.from == 0 || pos + 1 >= self.from + WINDOW)
    }

    /// Only the rows before this position are the sequence's; none, where they do not suffice.
    pub fn cut(&mut self, pos: usize) {
        let end = self.end.min(pos);
        *self = if end > 0 && self.reaches(end) { Self { end, ..*self } } else { Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_reach_back_as_far_as_the_ring_does() {
        let mut recent = Recent::default();
        recent.join(0..WINDOW + 90, WINDOW + 100);
        assert!((0..=WINDOW + 90).all(|pos| recent.reaches(pos)));
        recent.join(WINDOW + 90..WINDOW + 150, WINDOW + 100);
        if LOCAL_LAYERS != 0 {
            assert_eq!(recent.from, 50);
            assert!(
                !recent.reaches(WINDOW + 48) && recent.reaches(WINDOW + 49) && !recent.reaches(WINDOW + 151)
            );
            let mut cut = recent;
            cut.cut(WINDOW + 48);
            assert_eq!((cut.from, cut.end), (0, 0), "too few rows are none");
        }
        recent.cut(WINDOW + 60);
        assert!(recent.reaches(WINDOW + 60) && recent.end == WINDOW + 60);
        recent.cut(0);
        assert_eq!((recent.from, recent.end), (0, 0));
    }
}
