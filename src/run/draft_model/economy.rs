//! When a draft model pays, and for how many tokens: from how often its tokens were chosen, and from the times of passes
//! with and without them.

/// What a time or a share was before counts so much beside what it is now.
const MEMORY: f64 = 0.9;
/// Passes without a draft that are measured first.
const PLAIN: usize = 2;
/// After so many passes with drafts, one without tells how long that takes by now.
const AGAIN: usize = 64;
/// Passes with drafts after which it is decided whether they pay.
const TRIAL: usize = 8;
/// The first and the longest pause of a draft that does not pay, in tokens.
const PAUSE: (usize, usize) = (32, 4096);

/// Whether and how much a draft model drafts.
#[derive(Debug)]
pub struct Economy {
    /// Drafted tokens that were chosen, and all on which that depended.
    chosen: [f64; 2],
    /// Seconds of a pass without a draft.
    plain: Option<f64>,
    plain_passes: usize,
    /// Seconds and tokens of passes for which the model was asked.
    with: [f64; 2],
    /// Seconds that each drafted token adds, drafting included.
    each: Option<f64>,
    /// Passes for which it was asked since the last pause, and since the last plain pass.
    trial: usize,
    since: usize,
    pause: usize,
    /// What is left of the pause.
    left: usize,
}

impl Economy {
    pub fn new() -> Self {
        Self {
            // As if it had been seen to be right now and then.
            chosen: [3.0, 4.0],
            plain: None,
            plain_passes: 0,
            with: [0.0; 2],
            each: None,
            trial: 0,
            since: 0,
            pause: PAUSE.0,
            left: 0,
        }
    }

    /// Most tokens of the next draft, up to `most`; 0 does not ask for one.
    pub fn length(&mut self, most: usize) -> usize {
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        if self.plain_passes < PLAIN || self.since >= AGAIN {
            self.since = 0;
            return 0;
        }
        if self.trial >= TRIAL && self.gain() < 1.0 {
            self.left = self.pause;
            self.pause = (2 * self.pause).min(PAUSE.1);
            (self.trial, self.with) = (0, [0.0; 2]);
            return 0;
        }
        if self.trial >= AGAIN {
            self.pause = PAUSE.0;
        }
        self.best(most)
    }

    /// How many times as many tokens a second there are with the model.
    fn gain(&self) -> f64 {
        self.plain.map_or(1.0, |plain| plain * self.with[1] / self.with[0].max(1e-12))
    }

    /// The length, from one, that should give the most tokens a second.
    fn best(&self, most: usize) -> usize {
        let right = self.chosen[0] / self.chosen[1];
        let cost = match (self.plain, self.each) {
            (Some(plain), Some(each)) if plain > 0.0 => (each / plain).max(0.0),
            _ => 0.1,
        };
        let (mut best, mut tokens, mut next) = ((1, 0.0), 1.0, 1.0);
        for n in 1..=most {
            // The n-th is chosen if all before it were.
            next *= right;
            tokens += next;
            let gain = tokens / (1.0 + n as f64 * cost);
            if gain > best.1 {
                best = (n, gain);
            }
        }
        best.0
    }

    /// A pass for which nobody was asked took so many seconds.
    pub fn plain(&mut self, seconds: f64) {
        self.plain = Some(learnt(self.plain, seconds));
        self.plain_passes += 1;
    }

    /// The model was asked for a pass and gave so many tokens, of which so many were chosen; it took so many seconds in
    /// all, where that is known.
    pub fn drafted(&mut self, accepted: usize, drafted: usize, seconds: Option<f64>) {
        let looked_at = (accepted + 1).min(drafted);
        let kept = MEMORY.powf(looked_at as f64 / 4.0);
        self.chosen = [self.chosen[0] * kept + accepted as f64, self.chosen[1] * kept + looked_at as f64];
        if let (Some(seconds), Some(plain)) = (seconds, self.plain) {
            let [time, tokens] = self.with;
            self.with = [MEMORY * time + seconds, MEMORY * tokens + 1.0 + accepted as f64];
            self.trial += 1;
            self.since += 1;
            if drafted > 0 {
                self.each = Some(learnt(self.each, (seconds - plain) / drafted as f64));
            }
        }
    }
}

/// A mean in which what is older counts less.
fn learnt(old: Option<f64>, new: f64) -> f64 {
    old.map_or(new, |old| MEMORY * old + (1.0 - MEMORY) * new)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `passes`, where each drafted token costs `each` of a pass and one in `wrong` is wrong: the lengths.
    fn lengths(economy: &mut Economy, passes: usize, each: f64, wrong: usize) -> Vec<usize> {
        let mut count = 0;
        let pass = |_| {
            let n = economy.length(8);
            if n == 0 {
                economy.plain(1.0);
            } else {
                let accepted = (0..n).take_while(|_| {
                    count += 1;
                    count % wrong != 0
                });
                let accepted = accepted.count();
                economy.drafted(accepted, n, Some(1.0 + each * n as f64));
            }
            n
        };
        (0..passes).map(pass).collect()
    }

    #[test]
    fn a_good_cheap_draft_is_long_and_a_dear_one_short() {
        let mut economy = Economy::new();
        let cheap = lengths(&mut economy, 200, 0.05, 12);
        assert_eq!(cheap[..2], [0, 0]);
        assert!(cheap[20..].iter().filter(|&&n| n >= 6).count() > 170, "{cheap:?}");
        // Now and then without, to see how long that takes.
        assert!((1..6).contains(&cheap[20..].iter().filter(|&&n| n == 0).count()), "{cheap:?}");
        let dear = lengths(&mut Economy::new(), 200, 0.5, 4);
        assert!(dear[20..].iter().all(|&n| n <= 2), "{dear:?}");
    }

    #[test]
    fn a_draft_that_does_not_pay_is_left_out_and_tried_again_rarely() {
        let mut economy = Economy::new();
        let lengths_ = lengths(&mut economy, 10_000, 1.1, 3);
        let drafted = lengths_.iter().filter(|&&n| n > 0).count();
        assert!((9..120).contains(&drafted), "{drafted}");
        assert!(lengths_[9_000..].iter().filter(|&&n| n > 0).count() <= 2 * TRIAL);
        // Once it pays, it is used again.
        let better = lengths(&mut economy, 9000, 0.05, 20);
        assert!(better[8_000..].iter().filter(|&&n| n > 0).count() > 900);
    }
}
