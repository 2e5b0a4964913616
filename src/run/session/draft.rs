//! Drafts (speculative decoding): likely next tokens, computed in one pass with the token before them. A draft repeats
//! what followed the last few tokens at their latest earlier occurrence (prompt lookup decoding,
//! github.com/apoorvumang/prompt-lookup-decoding), or comes from a smaller model, if there is one (`draft_model.rs`).
//! Sampling is unaffected: every token is sampled from the same logits as without drafts, and while the sampled token
//! is the draft's next one, its logits are already computed.

use super::Session;
use crate::dims::VOCAB;
use crate::model::device::KvCache;
use crate::run::draft_model::assistant::{AssistantDrafter, AssistantSequence};
use crate::run::draft_model::mtp::{MtpDrafter, MtpSequence};
use crate::run::draft_model::{DraftModel, DraftQuery, PassTime, SharedLengthPolicy};
use files::{Error, Result};
use std::ops::{Add, RangeInclusive};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::sampler::{Rng, SamplerOptions};

/// Length of the n-gram that must occur earlier in the text to be drafted from; the longest is tried first.
const GRAM: RangeInclusive<usize> = 2..=3;
/// Length of the n-gram if a draft model can be asked, which predicts better than a short match.
const LONG_GRAM: RangeInclusive<usize> = 8..=8;

/// Counts of drafted and accepted tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Passes that verified a draft.
    pub passes: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafted tokens accepted.
    pub accepted: usize,
    /// Tokens drafted by a model.
    pub model_drafted: usize,
    /// Tokens drafted by a model and accepted.
    pub model_accepted: usize,
}

impl DraftCounts {
    /// Counts since `before`.
    pub fn since(self, before: Self) -> Self {
        self.combine(before, |now, before| now - before)
    }

    fn combine(self, other: Self, op: impl Fn(usize, usize) -> usize) -> Self {
        Self {
            passes: op(self.passes, other.passes),
            drafted: op(self.drafted, other.drafted),
            accepted: op(self.accepted, other.accepted),
            model_drafted: op(self.model_drafted, other.model_drafted),
            model_accepted: op(self.model_accepted, other.model_accepted),
        }
    }
}

impl Add for DraftCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.combine(other, |a, b| a + b)
    }
}

/// Proposes drafts and keeps their logits.
pub(super) struct Drafter {
    /// Maximum number of tokens of a draft.
    max_tokens: usize,
    pace: LookupLength,
    /// A smaller model that drafts.
    model: Option<SequenceDraft>,
    /// Tokens of the last pass with a draft: the sequence's token, then the draft.
    pass: Vec<u32>,
    /// Number of these that have become part of the sequence.
    accepted_tokens: usize,
    /// Source of the draft.
    source: Source,
    /// Duration of the pass, if it is a useful measurement.
    time: Option<PassTime>,
    /// Logits of each token of the pass: `[token][VOCAB]`.
    rows: Vec<f32>,
    pub counts: DraftCounts,
}

/// Outcome of a pass, with a draft or without.
pub(super) struct PassOutcome {
    source: Source,
    /// Number of drafted tokens that were accepted.
    accepted: usize,
    drafted: usize,
    /// Duration of the pass, if it is a useful measurement.
    time: Option<PassTime>,
}

/// Source of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Nobody,
    Text,
    Model,
}

/// One sequence's drafts by a model.
struct SequenceDraft {
    model: SequenceModel,
    length_policy: SharedLengthPolicy,
    /// Duration of the last draft.
    request_time: Duration,
}

/// The model that drafts for a sequence.
enum SequenceModel {
    /// Another program.
    Program {
        program: DraftModel,
        /// Id of this sequence.
        owner: u64,
        sampler: Arc<SamplerOptions>,
        random: Option<Rng>,
    },
    /// A block of the model itself.
    Mtp(MtpSequence),
    /// The model's assistant.
    Assistant(AssistantSequence),
}

impl SequenceDraft {
    /// Asks the model, if that is worthwhile, and appends its draft of at most `room` tokens to `pass`.
    fn request_draft(
        &mut self,
        tokens: &[u32],
        room: usize,
        cache: Option<&mut dyn KvCache>,
        pass: &mut Vec<u32>,
    ) -> Source {
        let began = Instant::now();
        let length = match &self.model {
            SequenceModel::Program { program, .. } => program.draft_length(room),
            _ => self.length_policy.lock().next_length(room),
        };
        let (Some((&next, before)), 1..) = (tokens.split_last(), length) else { return Source::Nobody };
        match &mut self.model {
            SequenceModel::Program { program, owner, sampler, random } => {
                let (owner, random) = (*owner, random.as_ref());
                program.request_draft(&DraftQuery { owner, tokens, length, sampler, random }, pass);
            }
            SequenceModel::Mtp(sequence) => {
                if !sequence.draft_tokens(before, next, length, pass) {
                    return Source::Nobody;
                }
            }
            SequenceModel::Assistant(sequence) => {
                let drafts = |cache| sequence.draft_tokens(cache, (next, before.len()), length, pass);
                if !cache.is_some_and(drafts) {
                    return Source::Nobody;
                }
            }
        }
        self.request_time = began.elapsed();
        Source::Model
    }
}

impl Session {
    /// Lets a smaller model draft too. Call it after [`Session::with_drafts`].
    pub fn with_draft_model(mut self, model: &DraftModel) -> Self {
        if let Some(drafter) = &mut self.drafter {
            let greedy = SamplerOptions { temperature: 0.0, repetition_penalty: 1.0, ..Default::default() };
            let program = SequenceModel::Program {
                program: model.clone(),
                owner: model.new_sequence_id(),
                sampler: Arc::new(greedy),
                random: None,
            };
            drafter.set_model(program, model.length_policy());
        }
        self
    }

    /// Lets the model's own block draft too. Call it after [`Session::with_drafts`].
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn with_mtp(mut self, block: &MtpDrafter) -> Result<Self> {
        if let Some(drafter) = &mut self.drafter {
            drafter.set_model(SequenceModel::Mtp(block.new_sequence()?), block.length_policy.clone());
        }
        Ok(self)
    }

    /// Lets the model's assistant draft too, if the CPU computes the sequence. Call it after [`Session::with_drafts`].
    pub fn with_assistant(mut self, assistant: &AssistantDrafter) -> Self {
        if let Some(drafter) = &mut self.drafter {
            let sequence = assistant.new_sequence(drafter.max_tokens);
            drafter.set_model(SequenceModel::Assistant(sequence), assistant.length_policy.clone());
        }
        self
    }
}

impl Drafter {
    pub fn new(most: usize) -> Result<Self> {
        let mut rows = Vec::new();
        let len = (most + 1).saturating_mul(VOCAB);
        rows.try_reserve_exact(len).map_err(|_| {
            Error::Memory(format!(
                "cannot allocate logits for `EngineOptions::draft` {most}; use a smaller one"
            ))
        })?;
        rows.resize(len, 0.0);
        Ok(Self {
            max_tokens: most,
            pace: LookupLength::new(most),
            model: None,
            pass: Vec::with_capacity(most + 1),
            accepted_tokens: 0,
            source: Source::Nobody,
            time: None,
            rows,
            counts: DraftCounts::default(),
        })
    }

    /// Sets the model that drafts too.
    fn set_model(&mut self, model: SequenceModel, length_policy: SharedLengthPolicy) {
        self.model = Some(SequenceDraft { model, length_policy, request_time: Duration::ZERO });
    }

    /// Sets the sampler settings that the draft model uses.
    pub fn set_sampler(&mut self, settings: &SamplerOptions) {
        let Some(SequenceDraft { model: SequenceModel::Program { sampler, random, .. }, .. }) =
            &mut self.model
        else {
            return;
        };
        *random = None;
        if **sampler != *settings {
            *sampler = Arc::new(settings.clone());
        }
    }

    /// Sets the random state that the draft model samples with.
    pub fn set_rng(&mut self, rng: &Rng) {
        if let Some(SequenceDraft { model: SequenceModel::Program { random, .. }, .. }) = &mut self.model {
            *random = Some(rng.clone());
        }
    }

    /// True if there is a draft model, or the model's own block drafts.
    pub fn has_model(&self) -> bool {
        self.model.is_some()
    }

    /// Number of drafted tokens that are computed but not part of the sequence yet.
    pub fn drafted_ahead(&self) -> usize {
        self.pass.len() - self.accepted_tokens
    }

    /// Discards these and returns their number.
    pub fn discard_draft(&mut self) -> usize {
        let ahead = self.drafted_ahead();
        self.pass.clear();
        (self.accepted_tokens, self.source, self.time) = (0, Source::Nobody, None);
        ahead
    }

    /// True if `token` is the draft's next one.
    pub fn expects_token(&self, token: u32) -> bool {
        self.pass.get(self.accepted_tokens) == Some(&token)
    }

    /// Accepts the next token of the draft and returns its logits.
    pub fn accept_token(&mut self) -> &[f32] {
        self.counts.accepted += 1;
        self.counts.model_accepted += usize::from(self.source == Source::Model);
        self.accepted_tokens += 1;
        &self.rows[(self.accepted_tokens - 1) * VOCAB..][..VOCAB]
    }

    /// Fills `pass` with the last of `tokens` and a draft of at most `room` tokens. An assistant reads the `cache` of the
    /// others. Returns true if there is a draft.
    pub fn propose(
        &mut self,
        tokens: &[u32],
        room: usize,
        cache: Option<&mut dyn KvCache>,
        pass: &mut Vec<u32>,
    ) -> bool {
        self.pass.clear();
        self.accepted_tokens = 0;
        let room = room.min(self.max_tokens);
        let length = self.pace.next_length().min(room);
        pass.clear();
        pass.extend(tokens.last());
        let repeats = |grams: RangeInclusive<usize>, pass: &mut Vec<u32>| {
            length > 0 && grams.rev().any(|n| ngram_lookup(tokens, n, length, pass))
        };
        self.source = match &mut self.model {
            Some(_) if repeats(LONG_GRAM, pass) => Source::Text,
            Some(client) if room > 0 => client.request_draft(tokens, room, cache, pass),
            _ => Source::Nobody,
        };
        if self.source == Source::Nobody && repeats(GRAM, pass) {
            self.source = Source::Text;
        }
        pass.len() > 1
    }

    /// Begins a pass over `staged`, which follow `tokens`, in a text known up to length `known`. Returns the
    /// destinations of their logits, `[token][VOCAB]`, and of the [final states](crate::model::device::Run::hidden)
    /// that drafts need.
    pub fn begin_pass(&mut self, tokens: &[u32], staged: &[u32], known: usize) -> (&mut [f32], &mut [f32]) {
        let states = match &mut self.model {
            Some(SequenceDraft { model: SequenceModel::Mtp(sequence), .. }) => {
                sequence.begin_pass(tokens, staged, known)
            }
            Some(SequenceDraft { model: SequenceModel::Assistant(sequence), .. }) => {
                sequence.begin_pass(tokens.len(), staged.len(), known)
            }
            _ => &mut [],
        };
        let rows = staged.len().saturating_mul(VOCAB).min(self.rows.len());
        (&mut self.rows[..rows], states)
    }

    /// Ends a pass that has not failed.
    pub fn end_pass(&mut self) {
        match self.model.as_mut().map(|client| &mut client.model) {
            Some(SequenceModel::Mtp(sequence)) => sequence.end_pass(),
            Some(SequenceModel::Assistant(sequence)) => sequence.end_pass(),
            Some(SequenceModel::Program { .. }) | None => {}
        }
    }

    /// Takes over a computed pass, whose first token is the sequence's, and returns the logits of that token.
    pub fn commit_pass(&mut self, pass: &mut Vec<u32>) -> &[f32] {
        std::mem::swap(&mut self.pass, pass);
        let drafted = self.pass.len() - 1;
        self.accepted_tokens = 1;
        self.counts.passes += 1;
        self.counts.drafted += drafted;
        self.counts.model_drafted += if self.source == Source::Model { drafted } else { 0 };
        &self.rows[..VOCAB]
    }

    /// Takes the outcome of the last pass.
    pub fn take_outcome(&mut self) -> PassOutcome {
        PassOutcome {
            source: std::mem::replace(&mut self.source, Source::Nobody),
            accepted: self.accepted_tokens.saturating_sub(1),
            drafted: self.pass.len().saturating_sub(1),
            time: self.time.take(),
        }
    }

    /// Updates the draft lengths with the outcome of a pass. The recurrent state that its draft left was computed again
    /// in the time `rebuilt`.
    pub fn learn_from_pass(&mut self, outcome: PassOutcome, rebuilt: Duration) {
        let PassOutcome { source, accepted, drafted, time } = outcome;
        let time = time.map(|time| PassTime { each: time.each + rebuilt, ..time });
        match (source, time, &self.model) {
            (Source::Text, ..) => self.pace.record_drafted(accepted, drafted),
            (Source::Model, time, Some(client)) => {
                client.length_policy.lock().record_drafted(accepted, drafted, time)
            }
            (Source::Nobody, Some(time), Some(client)) => client.length_policy.lock().record_undrafted(time),
            _ => {}
        }
    }

    /// Records the time of the pass, including the request for this text's draft. A pass without a draft counts only if
    /// no other text had one (`others` is their number of drafted tokens).
    pub fn record_time(&mut self, others: usize, time: PassTime) {
        self.time = (others == 0 || self.source == Source::Model).then_some(time);
    }

    /// Takes the duration of the last request to the model, which is then zero.
    pub fn take_request_time(&mut self) -> Duration {
        self.model.as_mut().map_or(Duration::ZERO, |client| std::mem::take(&mut client.request_time))
    }
}

/// Maximum number of tokens without drafts after drafts have failed. A draft of one token costs a quarter of a pass
/// where arithmetic is slow, so one failed draft in this many tokens costs less than half a percent.
const LONGEST_PAUSE: usize = 63;

/// Policy for the length of lookup drafts: twice as long after a fully accepted one, as long as the accepted part after
/// others, and pauses of growing length while nothing is accepted.
#[derive(Debug)]
struct LookupLength {
    most: usize,
    length: usize,
    /// The last pause.
    pause: usize,
    /// Tokens left of the pause.
    left: usize,
}

impl LookupLength {
    fn new(most: usize) -> Self {
        Self { most, length: most.min(2), pause: 0, left: 0 }
    }

    /// Returns the length of the next draft; 0 during a pause.
    fn next_length(&mut self) -> usize {
        if self.left > 0 {
            self.left -= 1;
            return 0;
        }
        self.length
    }

    /// Records how many tokens of a draft were accepted.
    fn record_drafted(&mut self, accepted: usize, drafted: usize) {
        match accepted {
            0 => {
                self.pause = (2 * self.pause + 1).min(LONGEST_PAUSE);
                self.left = self.pause;
                self.length = 1;
            }
            n => {
                // A single token may have been luck.
                self.pause = if n > 1 { 0 } else { self.pause / 2 };
                self.length = if n == drafted { 2 * n } else { n }.min(self.most);
            }
        }
    }
}

/// Finds the latest earlier occurrence of the last `n` of `tokens` and appends the `length` tokens that followed it to
/// `draft`; beyond the end of the text, the draft repeats itself. Returns true if there is such an occurrence.
fn ngram_lookup(tokens: &[u32], n: usize, length: usize, draft: &mut Vec<u32>) -> bool {
    let Some(end) = tokens.len().checked_sub(n) else { return false };
    let gram = &tokens[end..];
    let Some(at) = (0..end).rev().find(|&at| tokens[at..at + n] == *gram) else { return false };
    let period = end - at;
    let next = |i: usize| tokens[at + n + i % period];
    draft.extend((0..length).map(next));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that look random, below `most`.
    fn numbers(seed: u64, most: u64) -> impl FnMut() -> u32 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % most) as u32
        }
    }

    #[test]
    fn the_latest_place_is_found_as_a_plain_loop_finds_it() {
        let mut number = numbers(3, 3);
        let (mut found, mut missed) = (0, 0);
        for len in 0..200 {
            let tokens: Vec<u32> = (0..len).map(|_| number()).collect();
            for n in [2, 3, 7] {
                let mut expected = None;
                for at in 0..(len as usize).saturating_sub(n) {
                    if (0..n).all(|i| tokens[at + i] == tokens[len as usize - n + i]) {
                        // The text, going on with itself from there.
                        let mut text = tokens.clone();
                        (0..9).for_each(|i| text.push(text[at + n + i]));
                        expected = Some(text[len as usize..].to_vec());
                    }
                }
                let mut draft = vec![];
                let there = ngram_lookup(&tokens, n, 9, &mut draft);
                assert_eq!(
                    (there, draft),
                    (expected.is_some(), expected.unwrap_or_default()),
                    "{n}: {tokens:?}"
                );
                if there { found += 1 } else { missed += 1 }
            }
        }
        assert!(found > 200 && missed > 50, "{found} {missed}");
    }

    #[test]
    fn longer_matches_come_first_and_room_is_kept() {
        let mut d = Drafter::new(4).unwrap();
        let mut pass = Vec::new();
        d.pace.length = 4;
        // After 1 2 3 came 4, after 2 3 later 9.
        let tokens = [1, 2, 3, 4, 5, 8, 2, 3, 9, 1, 2, 3];
        assert!(d.propose(&tokens, 9, None, &mut pass));
        assert_eq!(pass, [3, 4, 5, 8, 2]);
        assert!(d.propose(&tokens, 1, None, &mut pass));
        assert_eq!(pass, [3, 4]);
        assert!(!d.propose(&tokens, 0, None, &mut pass) && d.drafted_ahead() == 0);
        assert!(!d.propose(&[1, 2, 3, 4], 9, None, &mut pass) && pass == [4]);
        assert!(!d.propose(&[1], 9, None, &mut pass) && !d.propose(&[], 9, None, &mut pass));
    }

    #[test]
    fn drafts_grow_shrink_and_pause() {
        let mut pace = LookupLength::new(10);
        let lengths: Vec<usize> = (0..5)
            .map(|_| {
                let n = pace.next_length();
                pace.record_drafted(n, n);
                n
            })
            .collect();
        assert_eq!(lengths, [2, 4, 8, 10, 10]);
        pace.record_drafted(3, 10);
        assert_eq!(pace.next_length(), 3);
        // In vain from now on: one token, after pauses that double.
        let mut tries = vec![];
        for token in 0..400 {
            if let n @ 1.. = pace.next_length() {
                pace.record_drafted(0, n);
                tries.push((token, n));
            }
        }
        let at: Vec<usize> = tries.iter().map(|t| t.0).collect();
        assert_eq!(at[..7], [0, 2, 6, 14, 30, 62, 126]);
        assert!(at.windows(2).skip(6).all(|w| w[1] - w[0] == LONGEST_PAUSE + 1), "{at:?}");
        assert!(tries[1..].iter().all(|t| t.1 == 1));
    }
}
