//! Budget of prompt tokens in a pass with other generations' tokens, chosen so that the pass takes less than twice as
//! long as one without. The time that a part of a prompt adds is measured for parts of several sizes: the first tokens
//! cost more than the following ones, and all cost more at the end of a long prompt than at its start.
//!
//! Tried: a single number, the average cost of a token. It never learnt that larger parts are cheaper; one slow pass
//! without prompts made the next part many times too large; and where even one token is too much, as late in a long
//! prompt of a small model, every pass took three to seven times as long. Tried: counting the pass after a part, which
//! is up to 40 % slower, as a pass without prompts: generation ran at a third of its budget.

use std::time::Duration;

/// Sizes of parts that are measured separately. Kernels take four tokens at a time.
const SIZES: [usize; 18] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096];
/// Size of the very first part, before anything is measured.
const FIRST: usize = 2;
/// Part of a quiet pass (one without prompts) that prompts may add to a pass. Times vary, and 1.0 is too much.
const PREFILL_SHARE: f64 = 0.55;
/// Part of a quiet pass that a single token, or a size tried for the first time, may add.
const MAX_PREFILL_SHARE: f64 = 0.9;
/// Weight of the latest time.
const WEIGHT: f64 = 0.25;
/// Limit of the change of a time from one measurement to the next: outliers come from other processes.
const OUTLIER_FACTOR: f64 = 2.0;
/// Interval, in passes, of trying a part that seems too large, if prompts are within their budget.
const TRIAL_INTERVAL: usize = 8;
/// Passes with prompts after which a quiet pass is measured again.
const REMEASURE_INTERVAL: usize = 32;
/// Part of a quiet pass by which prompts may exceed their budget before a pass goes without them, or that they may save
/// up.
const DEBT_LIMIT: f64 = 0.3;

/// Times of passes, in seconds.
#[derive(Debug)]
pub(super) struct PrefillBudget {
    /// Maximum number of prompt tokens in a pass.
    chunk: usize,
    /// Time of a quiet pass and its number of tokens.
    quiet_pass: Option<(f64, usize)>,
    /// Time that a part of each size adds to it, if measured.
    added_times: [Option<f64>; SIZES.len()],
    /// Time that prompts took beyond their budget; negative if they took less.
    debt: f64,
    /// Passes since the last quiet one.
    since: usize,
    /// Quiet passes since the last one with prompts.
    quiet_passes: usize,
}

/// Moving average of a time.
fn moving_average(before: f64, now: f64) -> f64 {
    before + WEIGHT * (now.clamp(before / OUTLIER_FACTOR, before * OUTLIER_FACTOR) - before)
}

impl PrefillBudget {
    pub fn new(chunk: usize) -> Self {
        Self {
            chunk: chunk.max(1),
            quiet_pass: None,
            added_times: [None; SIZES.len()],
            debt: 0.0,
            since: 0,
            quiet_passes: 0,
        }
    }

    /// Maximum number of prompt tokens in a pass with `decoding` other tokens; 0 for a pass without prompts.
    pub fn tokens_beside(&self, decoding: usize) -> usize {
        let (quiet, measured) = match self.quiet_pass {
            _ if decoding == 0 => return self.chunk,
            None => return 0,
            Some(quiet) => quiet,
        };
        let stale = 4 * measured.abs_diff(decoding) > measured || self.since >= REMEASURE_INTERVAL;
        if self.debt > DEBT_LIMIT * quiet || stale {
            return 0;
        }
        let sizes = SIZES.iter().enumerate().take_while(|&(_, &n)| n <= self.chunk);
        // An unmeasured size is estimated too high, so it is allowed more.
        let may = |i: usize| match self.added_times[i] {
            None => MAX_PREFILL_SHARE * quiet,
            Some(_) => PREFILL_SHARE * quiet + (-self.debt).max(0.0),
        };
        let fits = |&(i, _): &(usize, &usize)| self.added_time(i).is_some_and(|adds| adds <= may(i));
        match sizes.filter(fits).map(|(i, _)| i).last() {
            Some(i) if self.since % TRIAL_INTERVAL == TRIAL_INTERVAL - 1 && self.debt <= 0.0 => {
                self.next_larger_size(i)
            }
            Some(i) => SIZES[i],
            None => self.smallest_part(),
        }
    }

    /// The size after one that fits, unless its own time is known to be too long: estimates from other sizes may be too
    /// high.
    fn next_larger_size(&self, size: usize) -> usize {
        let next = size + 1;
        let own = self.added_times.get(next).copied().flatten();
        let known = own.is_some() && own == self.lowest_estimate(next);
        SIZES.get(next).filter(|&&n| n <= self.chunk && !known).copied().unwrap_or(SIZES[size])
    }

    /// The part to compute if nothing fits into a pass; its debt is paid off in the following passes.
    fn smallest_part(&self) -> usize {
        let [one, .., four] = [0, 1, 2].map(|i| self.added_time(i));
        match (one, four) {
            (None, _) => FIRST.min(self.chunk),
            (Some(one), Some(four)) if four < 2.0 * one => 4.min(self.chunk),
            _ => 1,
        }
    }

    /// Time that a part of a size adds, as far as known.
    fn added_time(&self, size: usize) -> Option<f64> {
        let larger = || (size..SIZES.len()).find_map(|i| self.scaled_time(i, size));
        self.lowest_estimate(size).or_else(larger)
    }

    /// Lowest estimate of that time from its own size and smaller ones: tokens cost no more together than in smaller
    /// parts.
    fn lowest_estimate(&self, size: usize) -> Option<f64> {
        (0..=size).filter_map(|i| self.scaled_time(i, size)).reduce(f64::min)
    }

    /// Time that a size adds if each token costs as much as in the size `seen`.
    fn scaled_time(&self, seen: usize, size: usize) -> Option<f64> {
        self.added_times[seen].map(|adds| adds * SIZES[size] as f64 / SIZES[seen] as f64)
    }

    /// Records the time of a pass with `decoding` tokens of generations and `prompts` tokens of prompts.
    pub fn record_pass(&mut self, decoding: usize, prompts: usize, time: Duration) {
        let time = time.as_secs_f64();
        match (decoding, prompts, self.quiet_pass) {
            (0, ..) => self.debt = 0.0,
            (n, 0, quiet) => {
                self.quiet_passes += 1;
                // A pass right after a part of a prompt takes longer, because the part has filled the CPU's caches.
                if self.quiet_passes > 1 || quiet.is_none() {
                    self.since = 0;
                    self.quiet_pass =
                        Some((quiet.map_or(time, |(before, _)| moving_average(before, time)), n));
                }
                let quiet = self.quiet_pass.map_or(time, |(quiet, _)| quiet);
                // A much longer pass is due to other processes, not a debt of prompts.
                self.add_debt((time - (1.0 + PREFILL_SHARE) * quiet).min(quiet));
            }
            (_, n, Some((quiet, _))) => {
                (self.since, self.quiet_passes) = (self.since + 1, 0);
                let adds = self.record_part(n, (time - quiet).max(0.01 * quiet));
                let paid = if n == 1 { MAX_PREFILL_SHARE } else { PREFILL_SHARE };
                self.add_debt(adds - paid * quiet);
            }
            (_, _, None) => {}
        }
    }

    /// Adds to the debt; only little of a negative debt is saved for later passes.
    fn add_debt(&mut self, more: f64) {
        let saved = DEBT_LIMIT * self.quiet_pass.map_or(0.0, |(quiet, _)| quiet);
        self.debt = (self.debt + more).max(-saved);
    }

    /// Records that a part of `prompts` tokens added `adds` seconds, and returns the new estimate for it. A change
    /// applies to all sizes in proportion. A size without a plausible earlier measurement starts from this one.
    fn record_part(&mut self, prompts: usize, adds: f64) -> f64 {
        let i = SIZES.iter().rposition(|&n| n <= prompts).unwrap_or(0);
        let whole = prompts as f64 / SIZES[i] as f64;
        let latest = adds / whole;
        let now = match self.lowest_estimate(i) {
            Some(before) if self.added_times[i] == Some(before) || latest > before => {
                let now = moving_average(before, latest);
                self.added_times.iter_mut().flatten().for_each(|of| *of *= now / before);
                now
            }
            _ => latest,
        };
        self.added_times[i] = Some(now);
        now * whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes beside three texts, where parts of prompts add what `adds` says to a quiet one, for so many tokens of
    /// prompts: how long each took, and how many of them had a part.
    fn passes(
        budget: &mut PrefillBudget,
        mut tokens: usize,
        adds: impl Fn(usize) -> f64,
    ) -> (Vec<f64>, usize) {
        let (mut times, mut parts) = (Vec::new(), 0);
        while tokens > 0 {
            let n = budget.tokens_beside(3).min(tokens);
            let time = 10e-3 + if n > 0 { adds(n) } else { 0.0 };
            budget.record_pass(3, n, Duration::from_secs_f64(time));
            times.push(time);
            tokens -= n;
            parts += usize::from(n > 0);
            assert!(times.len() < 100_000, "it gets nowhere");
        }
        (times, parts)
    }

    fn mean(times: &[f64]) -> f64 {
        times.iter().sum::<f64>() / times.len() as f64
    }

    #[test]
    fn a_long_prompt_leaves_passes_below_twice_the_quiet_time() {
        let mut budget = PrefillBudget::new(256);
        assert_eq!(
            (budget.tokens_beside(0), budget.tokens_beside(1)),
            (256, 0),
            "nobody waits; nothing is known"
        );
        // The first token of a part adds 2 ms, each further one 0.4.
        let (times, parts) = passes(&mut budget, 4000, |n| 2e-3 + 0.4e-3 * (n - 1) as f64);
        assert!(times.iter().filter(|&&time| time > 20e-3).count() <= 1, "one try: {times:?}");
        assert!(4000 / parts >= 9, "{parts}");
        assert_eq!(budget.tokens_beside(0), 256);
    }

    #[test]
    fn tokens_that_become_dearer_come_in_smaller_parts_and_then_not_in_every_pass() {
        let mut budget = PrefillBudget::new(256);
        let cheap = passes(&mut budget, 2000, |n| 0.2e-3 * n as f64);
        let dear = passes(&mut budget, 500, |n| 3e-3 * n as f64);
        assert!(cheap.1 < 100, "{}", cheap.1);
        assert!(mean(&dear.0[20..]) < 20e-3 && dear.0[20..].iter().all(|&time| time < 30e-3), "{dear:?}");
        // Even one is too much: its time is paid off in passes without.
        let (times, _) = passes(&mut budget, 200, |n| 25e-3 * n as f64);
        assert!(mean(&times[20..]) < 20e-3, "{}", mean(&times[20..]));
        assert!(times.iter().filter(|&&time| time > 10e-3).count() * 2 < times.len());
        // And back.
        assert!(passes(&mut budget, 4000, |n| 0.2e-3 * n as f64).1 < 250);
    }

    /// With their whole time as a debt, prompts were never read on a machine that others use too.
    #[test]
    fn passes_that_others_hold_up_do_not_keep_prompts_out() {
        let (mut budget, mut tokens, mut passes) = (PrefillBudget::new(256), 0, 0);
        while tokens < 500 {
            let n = budget.tokens_beside(3);
            let others = if passes % 3 == 2 { 0.3 } else { 0.0 };
            budget.record_pass(3, n, Duration::from_secs_f64(4e-3 + 0.2e-3 * n as f64 + others));
            (tokens, passes) = (tokens + n, passes + 1);
            assert!(passes < 2000, "{tokens} tokens in {passes} passes");
        }
    }

    #[test]
    fn larger_parts_are_tried_where_most_of_the_time_is_that_of_the_first_token() {
        let (times, parts) =
            passes(&mut PrefillBudget::new(256), 2000, |n| 5.5e-3 + 0.01e-3 * (n - 1) as f64);
        assert!(parts < 150, "{parts}");
        assert!(mean(&times) < 17e-3, "{}", mean(&times));
    }

    #[test]
    fn the_pass_after_a_prefill_chunk_does_not_count_as_quiet() {
        let mut budget = PrefillBudget::new(256);
        let (mut all, mut count, mut tokens, mut after) = (0.0, 0, 0, false);
        while tokens < 500 {
            let n = budget.tokens_beside(3);
            let time = 10e-3 + if n > 0 { 25e-3 * n as f64 } else { f64::from(u8::from(after)) * 4e-3 };
            budget.record_pass(3, n, Duration::from_secs_f64(time));
            (all, count, tokens, after) = (all + time, count + 1, tokens + n, n > 0);
        }
        assert!(all / f64::from(count) < 19e-3, "{}", all / f64::from(count));
    }

    #[test]
    fn tokens_that_cost_nothing_fill_the_chunk_and_one_stray_time_changes_little() {
        let mut budget = PrefillBudget::new(64);
        passes(&mut budget, 2000, |_| 0.0);
        assert_eq!(budget.tokens_beside(3), 64);
        let mut budget = PrefillBudget::new(64);
        passes(&mut budget, 2000, |n| 1e-3 * n as f64);
        let before = budget.tokens_beside(3);
        budget.record_pass(3, 0, Duration::from_secs(1));
        assert!(budget.tokens_beside(3) <= 2 * before, "{before}");
        // Nor does a first part that took long, as the weights had to be read first.
        let mut budget = PrefillBudget::new(64);
        budget.record_pass(3, 0, Duration::from_millis(10));
        budget.record_pass(3, FIRST, Duration::from_secs(1));
        let (_, parts) = passes(&mut budget, 2000, |n| 0.5e-3 * n as f64);
        assert!(parts < 300, "{parts}");
    }
}
