//! Tokens of a run, in a pass and in one layer of their cache.

use super::cache::OpenClCache;
use super::defines::ATTN_BLOCK;
use crate::dims::{ATTENTION_SINKS, attention_window, has_mass, is_sliding, kv_layer};
use crate::model::device::Run;

/// Tokens of a run, in a pass and in one layer of their cache.
#[derive(Clone, Copy)]
pub struct RunSpan {
    /// Index of its first token in the pass.
    pub first: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Filled slots before them; in a sliding-window layer the position.
    pub before: usize,
    /// Rows per head.
    pub rows: usize,
    /// Number of tokens, the last ones, whose attention this layer observes.
    pub observed: usize,
    /// Number of leading chunks that the first token cannot see.
    pub skipped: usize,
    /// Number of tokens, the last ones, that attend.
    pub attending: usize,
    /// True for a single token that is not observed.
    pub is_plain_token: bool,
}

impl RunSpan {
    /// Span of a run whose first token has index `first` in the pass.
    pub fn of(run: &mut Run<'_>, first: usize, layer: usize) -> Self {
        let (tokens, pos, is_plain_token) =
            (run.tokens.len(), run.pos, run.tokens.len() == 1 && run.observed_tokens == 0);
        let cache = OpenClCache::downcast(run.cache);
        let before = if is_sliding(layer) { pos } else { cache.len() };
        let observed = if has_mass(layer) { run.observed_tokens.min(tokens) } else { 0 };
        let skipped = skipped_chunks(layer, before);
        let rows = cache.rows.rows_per_head(kv_layer(layer));
        Self { first, tokens, before, rows, observed, skipped, attending: tokens, is_plain_token }
    }

    /// The span of its last `tokens` tokens, which are the only ones of the run in the pass from layer `layer` on.
    pub fn last_tokens(self, layer: usize, tokens: usize) -> Self {
        let before = self.before + self.tokens - tokens;
        let skipped = skipped_chunks(layer, before);
        Self { tokens, before, skipped, attending: tokens, is_plain_token: false, ..self }
    }

    /// The part with the attending tokens only, after keys and values of all have joined the cache.
    pub fn attending_part(self) -> Self {
        let left = self.tokens - self.attending;
        Self { first: self.first + left, tokens: self.attending, before: self.before + left, ..self }
    }

    /// `Run` in `kernels/common.cl`.
    pub fn as_run(self) -> [i32; 4] {
        [self.first, self.tokens, self.before, self.rows].map(|n| n as i32)
    }

    /// Slots that are filled after the pass.
    pub fn filled_slots(self) -> usize {
        self.before + self.tokens
    }

    /// Number of chunks that its only token sees; if heads have sinks, these are one more.
    pub fn visible_chunks(self) -> usize {
        self.filled_slots().div_ceil(ATTN_BLOCK) - self.skipped + ATTENTION_SINKS as usize
    }
}

/// Number of leading chunks that a token with `before` slots before it cannot see.
fn skipped_chunks(layer: usize, before: usize) -> usize {
    attention_window(layer).map_or(0, |window| (before + 1).saturating_sub(window) / ATTN_BLOCK)
}
