//! How much of a prompt is computed beside the tokens of others: so much that a pass takes less than twice as long as
//! one without. What a part of a prompt adds to a pass is measured, for parts of several sizes: the first tokens are
//! dearer than those after them, and all are dearer at the end of a long prompt than at its start.
//!
//! Tried before: one number, what a token adds on average. It never found out that larger parts are cheaper, a single
//! slow pass without prompts made the next part many times too large, and where even one token is too much, as late in
//! a long prompt of a small model, every pass took three to seven times as long. With the pass after a part as the quiet
//! one, which is up to two fifths longer, texts went at a third of their budget.

use std::time::Duration;

/// Sizes of parts whose times are told apart. Kernels take four tokens at a time.
const SIZES: [usize; 18] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096];
/// The size of the first part of all, of which nothing is known.
const FIRST: usize = 2;
/// A pass may take this much longer than a quiet one. Times vary, and twice is too much.
const MORE: f64 = 0.55;
/// One token may make it this much longer, as there is no smaller part, and a size that is tried for the first time.
const MOST: f64 = 0.9;
/// Weight of the latest time.
const WEIGHT: f64 = 0.25;
/// How much longer or shorter than before a time counts: somebody else had the machine.
const STRAY: f64 = 2.0;
/// One in so many passes tries a part that seems too large, if prompts have taken no more than they may.
const TRY: usize = 8;
/// Passes with prompts, after which one without shows what such a pass takes by now.
const FRESH: usize = 32;
/// Part of a quiet pass that prompts may have taken too much before a pass goes without them, or may save.
const CREDIT: f64 = 0.3;

/// Times of passes, in seconds.
#[derive(Debug)]
pub(super) struct PrefillBudget {
    /// Most tokens of prompts in a pass.
    chunk: usize,
    /// A pass of tokens alone, and how many these were.
    quiet: Option<(f64, usize)>,
    /// What a part of each size adds to it, where that was seen.
    adds: [Option<f64>; SIZES.len()],
    /// What prompts have taken of others' time, less what they may; below 0 where they took less.
    debt: f64,
    /// Passes since the last one without prompts.
    since: usize,
    /// Passes without prompts since the last one with some.
    rests: usize,
}

/// The time so far and the latest one.
fn mix(before: f64, now: f64) -> f64 {
    before + WEIGHT * (now.clamp(before / STRAY, before * STRAY) - before)
}

impl PrefillBudget {
    pub fn new(chunk: usize) -> Self {
        Self { chunk: chunk.max(1), quiet: None, adds: [None; SIZES.len()], debt: 0.0, since: 0, rests: 0 }
    }

    /// Most tokens of prompts beside so many others; 0 for a pass without.
    pub fn tokens_beside(&self, decoding: usize) -> usize {
        let (quiet, measured) = match self.quiet {
            _ if decoding == 0 => return self.chunk,
            None => return 0,
            Some(quiet) => quiet,
        };
        let stale = 4 * measured.abs_diff(decoding) > measured || self.since >= FRESH;
        if self.debt > CREDIT * quiet || stale {
            return 0;
        }
        let sizes = SIZES.iter().enumerate().take_while(|&(_, &n)| n <= self.chunk);
        // What was not seen is held to be dearer than it is.
        let may = |i: usize| match self.adds[i] {
            None => MOST * quiet,
            Some(_) => MORE * quiet + (-self.debt).max(0.0),
        };
        let fits = |&(i, _): &(usize, &usize)| self.adding(i).is_some_and(|adds| adds <= may(i));
        match sizes.filter(fits).map(|(i, _)| i).last() {
            Some(i) if self.since % TRY == TRY - 1 && self.debt <= 0.0 => self.larger(i),
            Some(i) => SIZES[i],
            None => self.least(),
        }
    }

    /// The size after one that fits, if it is dear only by what others took: its own time may show that it is not.
    fn larger(&self, size: usize) -> usize {
        let next = size + 1;
        let own = self.adds.get(next).copied().flatten();
        let known = own.is_some() && own == self.at_most(next);
        SIZES.get(next).filter(|&&n| n <= self.chunk && !known).copied().unwrap_or(SIZES[size])
    }

    /// Where nothing fits into a pass: the part that is paid off in the passes after it.
    fn least(&self) -> usize {
        let [one, .., four] = [0, 1, 2].map(|i| self.adding(i));
        match (one, four) {
            (None, _) => FIRST.min(self.chunk),
            (Some(one), Some(four)) if four < 2.0 * one => 4.min(self.chunk),
            _ => 1,
        }
    }

    /// What a part of a size adds, as far as that is known.
    fn adding(&self, size: usize) -> Option<f64> {
        let larger = || (size..SIZES.len()).find_map(|i| self.scaled(i, size));
        self.at_most(size).or_else(larger)
    }

    /// The least that it adds by what was seen of it and of smaller ones: tokens together are no dearer than in smaller
    /// parts.
    fn at_most(&self, size: usize) -> Option<f64> {
        (0..=size).filter_map(|i| self.scaled(i, size)).reduce(f64::min)
    }

    /// What a size adds if each token is as dear as in another that was seen.
    fn scaled(&self, seen: usize, size: usize) -> Option<f64> {
        self.adds[seen].map(|adds| adds * SIZES[size] as f64 / SIZES[seen] as f64)
    }

    /// A pass with so many tokens of texts and of prompts took so long.
    pub fn record_pass(&mut self, decoding: usize, prompts: usize, time: Duration) {
        let time = time.as_secs_f64();
        match (decoding, prompts, self.quiet) {
            (0, ..) => self.debt = 0.0,
            (n, 0, quiet) => {
                self.rests += 1;
                // One that follows a part of a prompt takes longer: that has filled the caches.
                if self.rests > 1 || quiet.is_none() {
                    self.since = 0;
                    self.quiet = Some((quiet.map_or(time, |(before, _)| mix(before, time)), n));
                }
                let quiet = self.quiet.map_or(time, |(quiet, _)| quiet);
                // Somebody else had the machine where it took much longer: that is no debt of prompts.
                self.add_debt((time - (1.0 + MORE) * quiet).min(quiet));
            }
            (_, n, Some((quiet, _))) => {
                (self.since, self.rests) = (self.since + 1, 0);
                let adds = self.record_part(n, (time - quiet).max(0.01 * quiet));
                let paid = if n == 1 { MOST } else { MORE };
                self.add_debt(adds - paid * quiet);
            }
            (_, _, None) => {}
        }
    }

    /// A pass took so much more than it may, or less: little of that is saved for later ones.
    fn add_debt(&mut self, more: f64) {
        let saved = CREDIT * self.quiet.map_or(0.0, |(quiet, _)| quiet);
        self.debt = (self.debt + more).max(-saved);
    }

    /// A part of so many tokens has added so much; what such a part is held to add from now on. What has become dearer
    /// for it has for others. A size that was never seen, or once when somebody else had the machine, begins anew.
    fn record_part(&mut self, prompts: usize, adds: f64) -> f64 {
        let i = SIZES.iter().rposition(|&n| n <= prompts).unwrap_or(0);
        let whole = prompts as f64 / SIZES[i] as f64;
        let latest = adds / whole;
        let now = match self.at_most(i) {
            Some(before) if self.adds[i] == Some(before) || latest > before => {
                let now = mix(before, latest);
                self.adds.iter_mut().flatten().for_each(|of| *of *= now / before);
                now
            }
            _ => latest,
        };
        self.adds[i] = Some(now);
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
    fn a_pass_after_a_part_is_no_quiet_one() {
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
