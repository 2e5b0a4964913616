//! Statistics of a scheduler.

use crate::run::session::{DraftCounts, StopReason};
use std::time::Duration;

/// Upper bounds of a histogram's buckets, in seconds.
pub const BOUNDS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Outcome of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GenerationStats {
    pub reason: StopReason,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Prompt tokens whose rows were copied from the prefix cache.
    pub cached: usize,
    /// Generated tokens, a final end-of-sequence token included.
    pub tokens: usize,
    /// Index of the stop string that ended it, if one did.
    pub stop_index: Option<usize>,
    /// Slot in which it ran.
    pub slot: usize,
    /// Time from its start, queueing not included, to the first token.
    pub time_to_first: Duration,
    /// Time from the first to the last token.
    pub decode_time: Duration,
    /// Counts of drafted tokens.
    pub drafts: DraftCounts,
}

/// Histogram of durations.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram {
    /// Count in each bucket of [`BOUNDS`], not cumulative.
    pub counts: [u64; BOUNDS.len()],
    /// Total count.
    pub count: u64,
    /// Total seconds.
    pub sum: f64,
}

impl Histogram {
    fn record_duration(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(i) = BOUNDS.iter().position(|&bound| seconds <= bound) {
            self.counts[i] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

/// State of a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Context length: rows of a head that there is room for.
    pub slots: usize,
    /// Filled rows of a head.
    pub filled: usize,
    /// Tokens of its prompt; 0 while the slot is free.
    pub prompt: usize,
    /// Tokens generated.
    pub generated: usize,
}

/// Counts since the start and the state of each slot.
#[derive(Debug, Clone, Default)]
pub struct SchedulerStats {
    pub slots: Vec<SlotStats>,
    /// Requests waiting for a slot.
    pub waiting: usize,
    /// Bytes of rows in the prefix cache.
    pub prefix_cache_bytes: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens whose rows were copied from the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Ended generations.
    pub ended: u64,
    /// Counts of tokens drafted for them.
    pub drafts: DraftCounts,
    /// Passes.
    pub passes: u64,
    /// Sum over all passes of the slots in use.
    pub slot_passes: u64,
    /// Tokens of the longest text, its prompt included.
    pub longest: usize,
    /// Time from arrival to the first token.
    pub time_to_first: Histogram,
    /// Time between two tokens of a text.
    pub time_between_tokens: Histogram,
    /// Time from arrival to the end.
    pub total_time: Histogram,
}

impl SchedulerStats {
    /// Number of running generations.
    pub fn count_running(&self) -> usize {
        self.slots.iter().filter(|slot| slot.prompt > 0).count()
    }

    /// Part of all rows that is filled, from 0 to 1.
    pub fn filled_fraction(&self) -> f64 {
        let all: usize = self.slots.iter().map(|slot| slot.slots).sum();
        self.slots.iter().map(|slot| slot.filled).sum::<usize>() as f64 / all.max(1) as f64
    }

    pub(super) fn record_begin(&mut self, ending: &GenerationStats, slot: usize) {
        self.prompt_tokens += ending.prompt as u64;
        self.cached_tokens += ending.cached as u64;
        (self.slots[slot].prompt, self.slots[slot].filled) = (ending.prompt, ending.cached);
    }

    /// Records a pass.
    pub(super) fn record_pass(&mut self) {
        self.passes += 1;
        self.slot_passes += self.count_running() as u64;
    }

    /// Records a token: `arrived` is the time since the request arrived, `before` since the previous token, if any.
    pub(super) fn record_token(&mut self, arrived: Duration, before: Option<Duration>) {
        self.generated_tokens += 1;
        match before {
            None => self.time_to_first.record_duration(arrived),
            Some(before) => self.time_between_tokens.record_duration(before),
        }
    }

    pub(super) fn record_end(&mut self, ending: &GenerationStats, took: Duration) {
        let slot = &mut self.slots[ending.slot];
        *slot = SlotStats { slots: slot.slots, ..SlotStats::default() };
        self.ended += 1;
        self.drafts = self.drafts + ending.drafts;
        self.longest = self.longest.max(ending.prompt + ending.tokens);
        self.total_time.record_duration(took);
    }
}
