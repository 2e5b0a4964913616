//! Numbers of what a scheduler has done and does.

use crate::run::session::{Drafts, StopReason};
use std::time::Duration;

/// Upper ends of a histogram's buckets, in seconds.
pub const BOUNDS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// The end of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ending {
    pub reason: StopReason,
    /// Tokens of the prompt,
    pub prompt: usize,
    /// those of them whose rows were copied,
    pub cached: usize,
    /// and tokens that were generated, a final end-of-sequence token included.
    pub tokens: usize,
    /// The number of the stop string that has ended it, where one has.
    pub stop: Option<usize>,
    /// The slot that it ran in.
    pub slot: usize,
    /// From the beginning, waiting not included, to the first token,
    pub first: Duration,
    /// and from there to the last one.
    pub between: Duration,
    /// Drafts for it.
    pub drafts: Drafts,
}

impl Ending {
    /// The ending of a text that begins.
    pub(super) fn none_yet(prompt: usize, slot: usize) -> Self {
        Self {
            reason: StopReason::Length,
            prompt,
            cached: 0,
            tokens: 0,
            stop: None,
            slot,
            first: Duration::ZERO,
            between: Duration::ZERO,
            drafts: Drafts::default(),
        }
    }
}

/// How often something took how long.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram {
    /// In each bucket of [`BOUNDS`], not cumulative.
    pub counts: [u64; BOUNDS.len()],
    /// In all.
    pub count: u64,
    /// Seconds in all.
    pub sum: f64,
}

impl Histogram {
    fn add(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(i) = BOUNDS.iter().position(|&bound| seconds <= bound) {
            self.counts[i] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

/// The state of a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Rows of a head that there is room for,
    pub slots: usize,
    /// and those that are filled.
    pub filled: usize,
    /// Tokens of its prompt; 0 where nothing runs.
    pub prompt: usize,
    /// Tokens generated.
    pub generated: usize,
}

/// Counts since the start, and the state of each slot.
#[derive(Debug, Clone, Default)]
pub struct SchedulerStats {
    pub slots: Vec<SlotStats>,
    /// Requests that wait for a slot.
    pub waiting: usize,
    /// Bytes of rows that are kept of texts that have ended.
    pub kept: u64,
    /// Tokens of prompts,
    pub prompt_tokens: u64,
    /// those of them whose rows were copied,
    pub cached_tokens: u64,
    /// and tokens generated.
    pub generated_tokens: u64,
    /// Texts that have ended,
    pub ended: u64,
    /// and what was drafted for them.
    pub drafts: Drafts,
    /// Passes,
    pub passes: u64,
    /// and texts that each of them had, in all.
    pub busy: u64,
    /// Tokens of the longest text, its prompt included.
    pub longest: usize,
    /// From arrival to the first token,
    pub first: Histogram,
    /// between two tokens of a text,
    pub between: Histogram,
    /// and from arrival to the end.
    pub whole: Histogram,
}

impl SchedulerStats {
    /// Texts that run.
    pub fn running(&self) -> usize {
        self.slots.iter().filter(|slot| slot.prompt > 0).count()
    }

    /// The part of all rows that is filled.
    pub fn filled(&self) -> f64 {
        let all: usize = self.slots.iter().map(|slot| slot.slots).sum();
        self.slots.iter().map(|slot| slot.filled).sum::<usize>() as f64 / all.max(1) as f64
    }

    pub(super) fn record_begin(&mut self, ending: &Ending, slot: usize) {
        self.prompt_tokens += ending.prompt as u64;
        self.cached_tokens += ending.cached as u64;
        (self.slots[slot].prompt, self.slots[slot].filled) = (ending.prompt, ending.cached);
    }

    /// A pass was made.
    pub(super) fn record_pass(&mut self) {
        self.passes += 1;
        self.busy += self.running() as u64;
    }

    /// A token came so long after the arrival of its text, of which it is the first, or after the one before.
    pub(super) fn record_token(&mut self, arrived: Duration, before: Option<Duration>) {
        self.generated_tokens += 1;
        match before {
            None => self.first.add(arrived),
            Some(before) => self.between.add(before),
        }
    }

    pub(super) fn record_end(&mut self, ending: &Ending, took: Duration) {
        let slot = &mut self.slots[ending.slot];
        *slot = SlotStats { slots: slot.slots, ..SlotStats::default() };
        self.ended += 1;
        self.drafts = self.drafts + ending.drafts;
        self.longest = self.longest.max(ending.prompt + ending.tokens);
        self.whole.add(took);
    }
}
