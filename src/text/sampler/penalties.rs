//! Changes to the logits of single tokens: bias, and penalties on recent tokens and on repetitions (DRY).

use super::options::DryOptions;
use crate::tokenizer::TokenBytes;
use crate::tokenizer::automaton::{Automaton, MatchState};
use std::sync::Arc;

/// Adds each bias to the logit of its token. Ids beyond the vocabulary are ignored.
pub(super) fn add_bias(logits: &mut [f32], bias: &[(u32, f32)]) {
    for &(id, more) in bias {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += more;
        }
    }
}

/// The last `window` entries of `recent`.
pub(super) fn last_tokens(recent: &[u32], window: usize) -> &[u32] {
    &recent[recent.len().saturating_sub(window)..]
}

/// The specification's repetition penalty on the last `window` entries of `recent`, once per occurrence. Ids beyond
/// the vocabulary are ignored.
pub fn apply_repetition_penalty(logits: &mut [f32], recent: &[u32], penalty: f32, window: usize) {
    for &id in last_tokens(recent, window) {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}

/// Subtracts `presence + occurrences * frequency` from the logit of every token in `recent`, as OpenAI's API does.
/// `counts` is scratch, `[vocab]`, all zero before and after.
pub(super) fn apply_occurrence_penalties(
    logits: &mut [f32],
    recent: &[u32],
    presence: f32,
    frequency: f32,
    counts: &mut [u32],
) {
    for &id in recent {
        if let Some(count) = counts.get_mut(id as usize) {
            *count += 1;
        }
    }
    for &id in recent {
        let Some(count) = counts.get_mut(id as usize).map(std::mem::take) else { continue };
        if count > 0 {
            logits[id as usize] -= presence + count as f32 * frequency;
        }
    }
}

/// Initial capacity for the history, in tokens.
const HISTORY_CAPACITY: usize = 8192;

/// DRY, "don't repeat yourself": a penalty on the token that would extend a repetition of earlier text. It grows with
/// the length of the repetition (p-e-w, pull request 5677 of text-generation-webui).
#[derive(Debug, Clone)]
pub(super) struct DryPenalty {
    options: DryOptions,
    /// Length from which on all repetitions get the same penalty.
    max_length: usize,
    breakers: Breakers,
    /// Scratch of [`measure_repeats`].
    repeats: Vec<u32>,
}

impl DryPenalty {
    pub fn new(options: &DryOptions) -> Self {
        let breakers = Breakers::new(&options.breakers);
        // Enough for a long history, so that sampling does not allocate.
        let repeats = Vec::with_capacity(options.window.unwrap_or(HISTORY_CAPACITY).min(HISTORY_CAPACITY));
        Self { options: options.clone(), max_length: max_length(options), breakers, repeats }
    }

    /// Sets the text of each token, in which sequence breakers are found.
    pub fn set_pieces(&mut self, pieces: Arc<TokenBytes>) {
        self.breakers.pieces = Some(pieces);
    }

    /// Penalises repetitions: if the last `n` tokens of `recent` also occur earlier and `n` is at least the allowed
    /// length, subtracts `multiplier * base^(n - allowed)` from the logit of the token that came next. If several `n`
    /// lead to one token, the largest counts. A repetition may overlap what it repeats. `lengths` is scratch,
    /// `[vocab]`, all zero before and after. The time is proportional to the length of the history.
    pub fn apply_penalty(&mut self, logits: &mut [f32], recent: &[u32], lengths: &mut [u32]) {
        let recent = last_tokens(recent, self.options.window.unwrap_or(usize::MAX));
        let found = measure_repeats(recent, self.max_length, &mut self.repeats);
        if found < self.options.allowed_length {
            return;
        }
        let most = self.breakers.count_unbroken(recent, found);
        if most < self.options.allowed_length {
            return;
        }
        for (back, &length) in self.repeats.iter().enumerate().skip(1) {
            let length = (length as usize).min(most);
            let next = recent[recent.len() - back];
            if length >= self.options.allowed_length
                && !self.breakers.is_breaker(next)
                && let Some(longest) = lengths.get_mut(next as usize)
            {
                *longest = (*longest).max(length as u32);
            }
        }
        for &next in &recent[1..] {
            let Some(length) = lengths.get_mut(next as usize).map(std::mem::take) else { continue };
            if length > 0 {
                logits[next as usize] -= self.penalty_for_length(length as usize);
            }
        }
    }

    /// The penalty on extending a repetition of this length.
    fn penalty_for_length(&self, length: usize) -> f32 {
        let growth = libm::pow(self.options.base.into(), (length - self.options.allowed_length) as f64);
        (f64::from(self.options.multiplier) * growth).min(f32::MAX.into()) as f32
    }
}

/// The length of repetition at which the penalty reaches the largest f32, or never grows.
fn max_length(o: &DryOptions) -> usize {
    let growth = libm::log(o.base.into());
    let doublings = libm::log(f64::from(f32::MAX) / f64::from(o.multiplier)) / growth;
    let steps = if growth > 0.0 { libm::ceil(doublings) } else { 0.0 };
    // A cast saturates.
    o.allowed_length.saturating_add(steps as usize)
}

/// Measures the repetitions of the end of a history, and returns the length of the longest, at most `most`.
/// `lengths[i]` becomes the number of last tokens that also stand `i` tokens before the end: the Z function of the
/// history read backwards.
fn measure_repeats(recent: &[u32], most: usize, lengths: &mut Vec<u32>) -> usize {
    let at = |i: usize| recent[recent.len() - 1 - i];
    lengths.clear();
    lengths.resize(recent.len(), 0);
    let (mut from, mut to, mut longest) = (0, 0, 0);
    for i in 1..recent.len() {
        let mut length = if i < to { (lengths[i - from] as usize).min(to - i) } else { 0 };
        while length < most && i + length < recent.len() && at(length) == at(i + length) {
            length += 1;
        }
        if i + length > to {
            (from, to) = (i, i + length);
        }
        lengths[i] = length as u32;
        longest = longest.max(length);
    }
    longest
}

/// Sequence breakers: texts that a repetition never reaches across, even where they begin or end within tokens. A token
/// that contains a whole breaker is never penalised. Control tokens are breakers too: a chat template repeats them, and
/// an answer has to end.
#[derive(Debug, Clone)]
struct Breakers {
    automaton: Automaton,
    /// Number of bytes before a token that may be part of a breaker that ends in the token.
    reach: usize,
    /// The text of each token; without them there are no breakers.
    pieces: Option<Arc<TokenBytes>>,
}

impl Breakers {
    fn new(texts: &[String]) -> Self {
        let automaton = Automaton::new(texts.iter().map(|text| text.as_bytes()));
        let reach = texts.iter().map(|t| t.len().saturating_sub(1)).max().unwrap_or(0);
        Self { automaton, reach, pieces: None }
    }

    /// True if the token is a control token or its text contains a breaker.
    fn is_breaker(&self, id: u32) -> bool {
        let Some(pieces) = &self.pieces else { return false };
        pieces.is_special(id) || self.automaton.has_match(pieces.token_bytes(id))
    }

    /// Number of tokens after the last one that is a control token or in which a breaker ends, at most `most`.
    fn count_unbroken(&self, recent: &[u32], most: usize) -> usize {
        let Some(pieces) = &self.pieces else { return most.min(recent.len()) };
        let from = recent.len().saturating_sub(most);
        // A breaker may begin before `from`.
        let (mut first, mut before) = (from, 0);
        while first > 0 && before < self.reach && !pieces.is_special(recent[first - 1]) {
            first -= 1;
            before += pieces.token_bytes(recent[first]).len();
        }
        let (mut state, mut whole) = (MatchState::default(), from);
        for (at, &id) in recent.iter().enumerate().skip(first) {
            let mut broken = pieces.is_special(id);
            if broken {
                state = MatchState::default();
            } else {
                for &byte in pieces.token_bytes(id) {
                    state = self.automaton.next_state(state, byte);
                    broken |= self.automaton.longest_match(state).is_some();
                }
            }
            if broken && at >= from {
                whole = at + 1;
            }
        }
        recent.len() - whole
    }
}
