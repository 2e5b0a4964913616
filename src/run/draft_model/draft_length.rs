//! Policy for the length of a model's drafts, learnt from the acceptance rate and the times of passes with and
//! without drafts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Weight of earlier measurements in a moving average.
const MEMORY: f64 = 0.9;
/// Number of passes without a draft that are measured first.
const PLAIN: usize = 2;
/// Number of passes with drafts after which one without is measured again.
const AGAIN: usize = 64;
/// Number of passes with drafts after which they are judged.
const TRIAL: usize = 8;
/// Loss that ends a trial early, in passes without drafts.
const LOSS: f64 = 8.0;
/// First and longest pause after drafts that do not pay, in tokens.
const PAUSE: (usize, usize) = (32, 4096);

/// Measurements of passes without a draft.
#[derive(Debug, Clone, Copy, Default)]
struct UndraftedTime {
    /// Seconds of a pass per text.
    seconds: Option<f64>,
    passes: usize,
}

/// Condition for drafts by a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftWhen {
    /// Draft the number of tokens that is fastest by the measurements so far, or none while it is faster without.
    #[default]
    Pays,
    /// Always draft the maximum number of tokens.
    Always,
}

/// Time of a pass per text, and its number of texts.
#[derive(Debug, Clone, Copy)]
pub struct PassTime {
    pub each: Duration,
    pub texts: usize,
}

/// Policy for the length of drafts.
#[derive(Debug)]
pub struct DraftLengthPolicy {
    when: DraftWhen,
    /// Acceptance rate as a fraction: accepted tokens, and tokens judged.
    chosen: [f64; 2],
    /// Passes without a draft by number of texts: several together take less time per text.
    plain: Vec<UndraftedTime>,
    /// Number of texts of the last pass.
    texts: usize,
    /// Seconds of passes with drafts, and estimated seconds for the same tokens without.
    with: [f64; 2],
    /// Seconds that each drafted token adds, the request included.
    each: Option<f64>,
    /// Passes with drafts since the last pause, and since the last pass without.
    trial: usize,
    since: usize,
    pause: usize,
    /// Tokens left of the pause.
    left: usize,
}

/// The policy of a drafter, which the sequences of an engine share.
#[derive(Clone)]
pub struct SharedLengthPolicy(Arc<Mutex<DraftLengthPolicy>>);

impl SharedLengthPolicy {
    /// A policy that has measured nothing.
    pub fn new(when: DraftWhen) -> Self {
        Self(Arc::new(Mutex::new(DraftLengthPolicy::new(when))))
    }

    /// Locks it for a question or a record.
    pub fn lock(&self) -> MutexGuard<'_, DraftLengthPolicy> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DraftLengthPolicy {
    pub fn new(when: DraftWhen) -> Self {
        Self {
            when,
            // Assumes an acceptance rate of 3 in 4 at first.
            chosen: [3.0, 4.0],
            plain: Vec::new(),
            texts: 1,
            with: [0.0; 2],
            each: None,
            trial: 0,
            since: 0,
            pause: PAUSE.0,
            left: 0,
        }
    }

    /// Length of the next draft, at most `most`; 0 asks for none.
    pub fn next_length(&mut self, most: usize) -> usize {
        if self.when == DraftWhen::Always {
            return most;
        }
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        if self.current_undrafted().passes < PLAIN {
            return 0;
        }
        if self.since >= AGAIN {
            // Long enough that one pass has no draft for any of its texts.
            (self.since, self.left) = (0, 2 * self.texts.saturating_sub(1));
            return 0;
        }
        if self.trial >= TRIAL && self.speedup() < 1.0 || self.is_lost() {
            self.left = self.pause;
            self.pause = (2 * self.pause).min(PAUSE.1);
            (self.trial, self.with) = (0, [0.0; 2]);
            return 0;
        }
        if self.trial >= AGAIN {
            self.pause = PAUSE.0;
        }
        self.best_length(most)
    }

    /// Passes without a draft with the last pass's number of texts.
    fn current_undrafted(&self) -> UndraftedTime {
        self.plain.get(self.texts).copied().unwrap_or_default()
    }

    /// Speedup by drafts so far.
    fn speedup(&self) -> f64 {
        self.with[1] / self.with[0].max(1e-12)
    }

    /// True if a trial has already cost too much.
    fn is_lost(&self) -> bool {
        let [with, without] = self.with;
        self.trial > 0 && self.current_undrafted().seconds.is_some_and(|plain| with - without > LOSS * plain)
    }

    /// Maximum time worth waiting for a draft of `length` tokens: the time that they take without.
    pub fn max_wait(&self, length: usize) -> Duration {
        if self.when == DraftWhen::Always {
            return Duration::MAX;
        }
        let seconds = self.current_undrafted().seconds.map(|plain| plain * length as f64);
        seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).unwrap_or(Duration::MAX)
    }

    /// Length from 1 to `most` that should give the most tokens per second.
    fn best_length(&self, most: usize) -> usize {
        let right = self.chosen[0] / self.chosen[1];
        let cost = match (self.current_undrafted().seconds, self.each) {
            (Some(plain), Some(each)) if plain > 0.0 => (each / plain).max(0.0),
            _ => 0.1,
        };
        let (mut best, mut tokens, mut next) = ((1, 0.0), 1.0, 1.0);
        for n in 1..=most {
            // The n-th token is accepted only if all before it are.
            next *= right;
            tokens += next;
            let gain = tokens / (1.0 + n as f64 * cost);
            if gain > best.1 {
                best = (n, gain);
            }
        }
        best.0
    }

    /// Records the time of a pass without drafts.
    pub fn record_undrafted(&mut self, time: PassTime) {
        self.texts = time.texts;
        if self.plain.len() <= time.texts {
            self.plain.resize(time.texts + 1, UndraftedTime::default());
        }
        let of = &mut self.plain[time.texts];
        of.seconds = Some(moving_average(of.seconds, time.each.as_secs_f64()));
        of.passes += 1;
    }

    /// Records a pass with a draft of `drafted` tokens, `accepted` of which were chosen, and its total time, if known.
    pub fn record_drafted(&mut self, accepted: usize, drafted: usize, time: Option<PassTime>) {
        let looked_at = (accepted + 1).min(drafted);
        let kept = MEMORY.powf(looked_at as f64 / 4.0);
        self.chosen = [self.chosen[0] * kept + accepted as f64, self.chosen[1] * kept + looked_at as f64];
        self.texts = time.map_or(self.texts, |time| time.texts);
        if let (Some(time), Some(plain)) = (time, self.current_undrafted().seconds) {
            let seconds = time.each.as_secs_f64();
            let [with, without] = self.with;
            self.with = [MEMORY * with + seconds, MEMORY * without + plain * (1.0 + accepted as f64)];
            self.trial += 1;
            self.since += 1;
            if drafted > 0 {
                self.each = Some(moving_average(self.each, (seconds - plain) / drafted as f64));
            }
        }
    }
}

/// Moving average, in which older values count less.
fn moving_average(old: Option<f64>, new: f64) -> f64 {
    old.map_or(new, |old| MEMORY * old + (1.0 - MEMORY) * new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64, texts: usize) -> PassTime {
        PassTime { each: Duration::from_secs_f64(seconds), texts }
    }

    /// Runs `passes`, where each drafted token costs `each` of a pass and one in `wrong` is wrong: the lengths.
    fn lengths(policy: &mut DraftLengthPolicy, passes: usize, each: f64, wrong: usize) -> Vec<usize> {
        let mut count = 0;
        let pass = |_| {
            let n = policy.next_length(8);
            if n == 0 {
                policy.record_undrafted(seconds(1.0, 1));
            } else {
                let accepted = (0..n).take_while(|_| {
                    count += 1;
                    count % wrong != 0
                });
                let accepted = accepted.count();
                policy.record_drafted(accepted, n, Some(seconds(1.0 + each * n as f64, 1)));
            }
            n
        };
        (0..passes).map(pass).collect()
    }

    #[test]
    fn a_good_cheap_draft_is_long_and_a_dear_one_short() {
        let mut policy = DraftLengthPolicy::new(DraftWhen::Pays);
        let cheap = lengths(&mut policy, 200, 0.05, 12);
        assert_eq!(cheap[..2], [0, 0]);
        assert!(cheap[20..].iter().filter(|&&n| n >= 6).count() > 170, "{cheap:?}");
        // Now and then without, to see how long that takes.
        assert!((1..6).contains(&cheap[20..].iter().filter(|&&n| n == 0).count()), "{cheap:?}");
        let dear = lengths(&mut DraftLengthPolicy::new(DraftWhen::Pays), 200, 0.5, 4);
        assert!(dear[20..].iter().all(|&n| n <= 2), "{dear:?}");
    }

    #[test]
    fn a_draft_that_does_not_pay_is_left_out_and_tried_again_rarely() {
        let mut policy = DraftLengthPolicy::new(DraftWhen::Pays);
        let lengths_ = lengths(&mut policy, 10_000, 1.1, 3);
        let drafted = lengths_.iter().filter(|&&n| n > 0).count();
        assert!((9..120).contains(&drafted), "{drafted}");
        assert!(lengths_[9_000..].iter().filter(|&&n| n > 0).count() <= 2 * TRIAL);
        // Once it pays, it is used again.
        let better = lengths(&mut policy, 9000, 0.05, 20);
        assert!(better[8_000..].iter().filter(|&&n| n > 0).count() > 900);
    }

    /// Texts that run together, beside a program that never answers in time: how many of their tokens' time is lost.
    #[test]
    fn a_program_that_is_too_slow_for_several_texts_is_hardly_waited_for() {
        const TEXTS: usize = 3;
        let (mut policy, mut lost, mut passes) = (DraftLengthPolicy::new(DraftWhen::Pays), 0.0, 0.0);
        for _ in 0..80 {
            let lengths: Vec<_> = (0..TEXTS).map(|_| policy.next_length(8)).collect();
            let waits: Vec<_> = lengths.iter().map(|&n| policy.max_wait(n).as_secs_f64().min(0.5)).collect();
            for (&n, wait) in lengths.iter().zip(waits) {
                if n > 0 {
                    policy.record_drafted(0, 0, Some(seconds(0.01 + wait, TEXTS)));
                    lost += wait;
                } else {
                    policy.record_undrafted(seconds(0.01, TEXTS));
                }
                passes += 0.01;
            }
        }
        assert!(lost > 0.0 && lost < 0.6 * passes, "{lost} of {passes}");
    }

    /// A draft that pays for one text may not pay for three, whose passes take less for each.
    #[test]
    fn each_number_of_texts_has_its_own_pass_to_compare_with() {
        let mut policy = DraftLengthPolicy::new(DraftWhen::Pays);
        lengths(&mut policy, 100, 0.5, 9);
        let mut drafted = 0;
        for _ in 0..400 {
            match policy.next_length(8) {
                0 => policy.record_undrafted(seconds(0.4, 3)),
                n => {
                    policy.record_drafted(0, n, Some(seconds(1.0, 3)));
                    drafted += 1;
                }
            }
        }
        assert!(drafted < 40, "{drafted}");
    }
}
