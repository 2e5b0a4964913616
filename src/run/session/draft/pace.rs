//! How often a text is drafted, and how far ahead.

/// After this many tokens, drafting is tried again on a text where drafts failed. A draft of one token costs a quarter of
/// a pass where arithmetic is slow, so one failed draft in this many tokens costs less than half a percent.
const LONGEST_PAUSE: usize = 63;

/// How long drafts are, and when there are none: twice as long after one that was chosen as a whole, as long as what was
/// chosen after others, and pauses of growing length while nothing is.
#[derive(Debug)]
pub(super) struct Pace {
    most: usize,
    pub(super) length: usize,
    /// The last pause.
    pause: usize,
    /// Tokens that are left of it.
    left: usize,
}

impl Pace {
    pub fn new(most: usize) -> Self {
        Self { most, length: most.min(2), pause: 0, left: 0 }
    }

    /// Tokens of the next draft.
    pub fn length(&mut self) -> usize {
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        self.length
    }

    /// So many tokens of a draft were chosen.
    pub fn drafted(&mut self, accepted: usize, drafted: usize) {
        match accepted {
            0 => {
                self.pause = (2 * self.pause + 1).min(LONGEST_PAUSE);
                self.left = self.pause;
                self.length = 1;
            }
            n => {
                // One token alone may have been luck.
                self.pause = if n > 1 { 0 } else { self.pause / 2 };
                self.length = if n == drafted { 2 * n } else { n }.min(self.most);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_grow_shrink_and_pause() {
        let mut pace = Pace::new(10);
        let lengths: Vec<usize> = (0..5)
            .map(|_| {
                let n = pace.length();
                pace.drafted(n, n);
                n
            })
            .collect();
        assert_eq!(lengths, [2, 4, 8, 10, 10]);
        pace.drafted(3, 10);
        assert_eq!(pace.length(), 3);
        // In vain from now on: one token, after pauses that double.
        let mut tries = vec![];
        for token in 0..400 {
            if let n @ 1.. = pace.length() {
                pace.drafted(0, n);
                tries.push((token, n));
            }
        }
        let at: Vec<usize> = tries.iter().map(|t| t.0).collect();
        assert_eq!(at[..7], [0, 2, 6, 14, 30, 62, 126]);
        assert!(at.windows(2).skip(6).all(|w| w[1] - w[0] == LONGEST_PAUSE + 1), "{at:?}");
        assert!(tries[1..].iter().all(|t| t.1 == 1));
    }
}
