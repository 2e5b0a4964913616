//! Drafts: tokens that the text may go on with, computed in one pass with the token before them. A draft is what
//! followed the last few tokens where they stood before (prompt lookup decoding, github.com/apoorvumang/
//! prompt-lookup-decoding), else what a smaller model expects, where there is one (`draft_model.rs`). Whoever chooses tokens
//! sees nothing of it: each is chosen from the same logits as without, and as long as the draft has it, its logits are
//! there already.

mod pace;

use super::Session;
use super::evict::{Evictor, Input};
use crate::dims::VOCAB;
use crate::run::draft_model::{DraftModel, PassTime, Question};
use files::{Error, Result};
use pace::Pace;
use std::ops::{Add, RangeInclusive};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::sampler::{Rng, SamplerOptions};

/// Tokens that must have stood in the text before, in order, for what followed them to be drafted; more are better.
const GRAM: RangeInclusive<usize> = 2..=3;
/// The same where a model can be asked, which knows more than a few tokens do.
const LONG_GRAM: RangeInclusive<usize> = 8..=8;

/// How many drafted tokens were chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafts {
    /// Passes that computed a draft.
    pub passes: usize,
    /// Tokens that were drafted.
    pub drafted: usize,
    /// Those of them that were chosen.
    pub accepted: usize,
    /// Tokens that a model drafted, and
    pub model_drafted: usize,
    /// those of them that were chosen.
    pub model_accepted: usize,
}

impl Drafts {
    /// Those that came after `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            passes: self.passes - before.passes,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
            model_drafted: self.model_drafted - before.model_drafted,
            model_accepted: self.model_accepted - before.model_accepted,
        }
    }
}

impl Add for Drafts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passes: self.passes + other.passes,
            drafted: self.drafted + other.drafted,
            accepted: self.accepted + other.accepted,
            model_drafted: self.model_drafted + other.model_drafted,
            model_accepted: self.model_accepted + other.model_accepted,
        }
    }
}

/// Decides when to draft, and how much.
pub(super) struct Drafter {
    /// Most tokens of a draft.
    most: usize,
    pace: Pace,
    /// A smaller model that drafts.
    model: Option<Asker>,
    /// The tokens of the last pass that drafted: one of the sequence, then the draft.
    pass: Vec<u32>,
    /// How many of them are of the sequence.
    taken: usize,
    /// Who was asked for it.
    source: Source,
    /// How long it took, where that says anything.
    time: Option<PassTime>,
    /// Logits of each: `[token][VOCAB]`.
    rows: Vec<f32>,
    drafts: Drafts,
}

/// Who drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Nobody,
    Text,
    Model,
}

/// A sequence's part of a draft model.
struct Asker {
    model: DraftModel,
    /// The number of this sequence.
    owner: u64,
    sampler: Arc<SamplerOptions>,
    random: Option<Rng>,
    /// How long the last draft took.
    asked: Duration,
}

impl Asker {
    /// Appends to `pass` what the model drafts after `tokens`, at most `room` of them, if it is to be asked.
    fn ask(&mut self, tokens: &[u32], room: usize, pass: &mut Vec<u32>) -> Source {
        let began = Instant::now();
        let length = self.model.length(room);
        if length == 0 {
            return Source::Nobody;
        }
        let (sampler, random) = (&self.sampler, self.random.as_ref());
        self.model.ask(&Question { owner: self.owner, tokens, length, sampler, random }, pass);
        self.asked = began.elapsed();
        Source::Model
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
        let pass = Vec::with_capacity(most + 1);
        let (pace, drafts) = (Pace::new(most), Drafts::default());
        Ok(Self { most, pace, model: None, pass, taken: 0, source: Source::Nobody, time: None, rows, drafts })
    }

    /// Tokens that are computed and not of the sequence.
    pub fn ahead(&self) -> usize {
        self.pass.len() - self.taken
    }

    /// Forgets them, and returns how many there were.
    pub fn forget(&mut self) -> usize {
        let ahead = self.ahead();
        self.pass.clear();
        (self.taken, self.source, self.time) = (0, Source::Nobody, None);
        ahead
    }

    /// Where the logits of a pass of `tokens` go: `[token][VOCAB]`.
    pub fn rows(&mut self, tokens: usize) -> &mut [f32] {
        &mut self.rows[..tokens * VOCAB]
    }

    /// Learns from the last pass.
    fn learn(&mut self) {
        let (accepted, drafted) = (self.taken.saturating_sub(1), self.pass.len().saturating_sub(1));
        match (std::mem::replace(&mut self.source, Source::Nobody), self.time.take(), &self.model) {
            (Source::Text, ..) => self.pace.drafted(accepted, drafted),
            (Source::Model, time, Some(asker)) => asker.model.drafted(accepted, drafted, time),
            (Source::Nobody, Some(time), Some(asker)) => asker.model.plain(time),
            _ => {}
        }
    }

    /// Begins a pass of the last token of `tokens` and at most `room` drafted ones; whether there are any.
    fn begin(&mut self, tokens: &[u32], room: usize) -> bool {
        self.pass.clear();
        self.taken = 0;
        let room = room.min(self.most);
        let length = self.pace.length().min(room);
        self.pass.extend(tokens.last());
        let repeats = |grams: RangeInclusive<usize>, pass: &mut Vec<u32>| {
            length > 0 && grams.rev().any(|n| look_up(tokens, n, length, pass))
        };
        self.source = match &mut self.model {
            Some(_) if repeats(LONG_GRAM, &mut self.pass) => Source::Text,
            Some(asker) if room > 0 => asker.ask(tokens, room, &mut self.pass),
            _ => Source::Nobody,
        };
        if self.source == Source::Nobody && repeats(GRAM, &mut self.pass) {
            self.source = Source::Text;
        }
        let found = self.pass.len() > 1;
        if !found {
            self.pass.clear();
        }
        found
    }

    /// Whether a model drafts.
    pub fn has_model(&self) -> bool {
        self.model.is_some()
    }

    /// The pass took so long, and asking for this text. Where `others` had drafted tokens, it says nothing of one without.
    pub fn took(&mut self, others: usize, time: PassTime) {
        self.time = (others == 0 || self.source == Source::Model).then_some(time);
    }

    /// How long the last draft took; then it counts no more.
    pub fn take_asked(&mut self) -> Duration {
        self.model.as_mut().map_or(Duration::ZERO, |asker| std::mem::take(&mut asker.asked))
    }
}

/// Appends to `draft` the `length` tokens that followed the last `n` of `tokens` where they stood last before: whether
/// they did. What goes beyond the end of the text goes on with the draft itself, which repeats.
fn look_up(tokens: &[u32], n: usize, length: usize, draft: &mut Vec<u32>) -> bool {
    let Some(end) = tokens.len().checked_sub(n) else { return false };
    let gram = &tokens[end..];
    let Some(at) = (0..end).rev().find(|&at| tokens[at..at + n] == *gram) else { return false };
    let period = end - at;
    let next = |i: usize| tokens[at + n + i % period];
    draft.extend((0..length).map(next));
    true
}

impl Session {
    /// Drafts up to `most` tokens at a time from now on, which changes no token and no logits on a backend that computes
    /// the same bits for one token and for several, as the CPU's does.
    ///
    /// # Errors
    ///
    /// `Usage` where the eviction policy looks at attention, which drafted tokens would give too; `Memory`.
    pub fn with_drafts(mut self, most: usize) -> Result<Self> {
        if self.observes() {
            return Err(Error::Usage(format!(
                "`EngineOptions::draft` {most}: not with an `Eviction::policy` that looks at attention; use sliding or none"
            )));
        }
        self.drafter = (most > 0).then(|| Drafter::new(most)).transpose()?;
        Ok(self)
    }

    /// Lets a smaller model draft too; comes after [`Session::with_drafts`].
    pub fn with_draft_model(mut self, model: &DraftModel) -> Self {
        if let Some(drafter) = &mut self.drafter {
            let greedy = SamplerOptions { temperature: 0.0, repetition_penalty: 1.0, ..Default::default() };
            drafter.model = Some(Asker {
                model: model.clone(),
                owner: model.owner(),
                sampler: Arc::new(greedy),
                random: None,
                asked: Duration::ZERO,
            });
        }
        self
    }

    /// Says how tokens are chosen from now on, so that a draft model can choose in the same way.
    pub(crate) fn set_sampler(&mut self, sampler: &SamplerOptions) {
        if let Some(asker) = self.drafter.as_mut().and_then(|d| d.model.as_mut()) {
            asker.random = None;
            if *asker.sampler != *sampler {
                asker.sampler = Arc::new(sampler.clone());
            }
        }
    }

    /// Says which random numbers come next.
    pub(crate) fn set_rng(&mut self, random: &Rng) {
        if let Some(asker) = self.drafter.as_mut().and_then(|d| d.model.as_mut()) {
            asker.random = Some(random.clone());
        }
    }

    /// How drafts went so far, where there are any.
    pub fn drafts(&self) -> Option<Drafts> {
        self.drafter.as_ref().map(|d| d.drafts)
    }

    /// Tokens that are computed and not of the sequence.
    pub(super) fn ahead(&self) -> usize {
        self.drafter.as_ref().map_or(0, Drafter::ahead)
    }

    /// Gives up what is computed ahead, so that the backend holds the sequence and nothing else.
    pub(crate) fn discard_drafts(&mut self) {
        let ahead = self.drafter.as_mut().map_or(0, Drafter::forget);
        if ahead > 0 {
            self.devices.set_len(self.devices.len() - ahead, self.tokens.len());
        }
    }

    /// Takes `token` from the draft, if it is the one that comes next there; else the draft is over.
    pub(super) fn take_drafted(&mut self, token: u32) -> bool {
        let (slots, Some(d)) = (self.slots(), &mut self.drafter) else { return false };
        // A token that slots are evicted for comes after that.
        let stays = |e: &mut Evictor| {
            e.watch_memory(slots, 1);
            e.why(slots, Input::Open).is_none()
        };
        if d.pass.get(d.taken) == Some(&token) && self.evictor.as_mut().is_none_or(stays) {
            self.logits.copy_from_slice(&d.rows[d.taken * VOCAB..][..VOCAB]);
            self.tokens.push(token);
            d.taken += 1;
            d.drafts.accepted += 1;
            d.drafts.model_accepted += usize::from(d.source == Source::Model);
            return true;
        }
        d.learn();
        self.discard_drafts();
        false
    }

    /// Stages `token` and a draft after it, if there is one: whether there is.
    pub(super) fn draft(&mut self, token: u32) -> bool {
        // No slot is to be evicted for the sake of a draft.
        let room = match &self.evictor {
            Some(evictor) => evictor.ahead(self.devices.len(), Input::Open),
            None => self.devices.room(),
        };
        let room = room.min(self.devices.max_tokens()).saturating_sub(1);
        let Some(d) = &mut self.drafter else { return false };
        self.tokens.push(token);
        let found = d.begin(&self.tokens, room);
        self.tokens.pop();
        // Until it is computed, nothing is ahead.
        std::mem::swap(&mut d.pass, &mut self.staged.tokens);
        d.pass.clear();
        found
    }

    /// The draft that was staged is computed: its first token joins the sequence, the others are ahead.
    pub(super) fn take_draft(&mut self) {
        let Some(d) = &mut self.drafter else { return };
        std::mem::swap(&mut d.pass, &mut self.staged.tokens);
        self.tokens.push(d.pass[0]);
        self.logits.copy_from_slice(&d.rows[..VOCAB]);
        d.taken = 1;
        d.drafts.passes += 1;
        d.drafts.drafted += d.pass.len() - 1;
        d.drafts.model_drafted += if d.source == Source::Model { d.pass.len() - 1 } else { 0 };
    }
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
                let there = look_up(&tokens, n, 9, &mut draft);
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
        d.pace.length = 4;
        // After 1 2 3 came 4, after 2 3 later 9.
        let tokens = [1, 2, 3, 4, 5, 8, 2, 3, 9, 1, 2, 3];
        assert!(d.begin(&tokens, 9));
        assert_eq!(d.pass, [3, 4, 5, 8, 2]);
        assert!(d.begin(&tokens, 1));
        assert_eq!(d.pass, [3, 4]);
        assert!(!d.begin(&tokens, 0) && d.pass.is_empty());
        assert!(!d.begin(&[1, 2, 3, 4], 9) && d.pass.is_empty());
        assert!(!d.begin(&[1], 9) && !d.begin(&[], 9));
    }
}
