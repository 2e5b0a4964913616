//! DRY, "don't repeat yourself": a penalty on the token that would extend a repetition of earlier text. It grows with
//! the length of the repetition (p-e-w, pull request 5677 of text-generation-webui).

use super::options::DryOptions;
use super::penalties::last;
use crate::tokenizer::Pieces;
use crate::tokenizer::automaton::{Automaton, MatchState};
use std::sync::Arc;

/// Tokens of a history that there is room for at once.
const ROOM: usize = 8192;

/// The penalty, ready for use.
#[derive(Debug, Clone)]
pub(super) struct Dry {
    options: DryOptions,
    /// Repetitions of this length or more all get the same penalty.
    longest: usize,
    breakers: Breakers,
    repeats: Repeats,
}

impl Dry {
    pub fn new(options: &DryOptions) -> Self {
        let breakers = Breakers::new(&options.breakers);
        // Room for a long history, so that a token allocates nothing.
        let lengths = Vec::with_capacity(options.window.map_or(ROOM, |window| window.min(ROOM)));
        Self { options: options.clone(), longest: longest(options), breakers, repeats: Repeats { lengths } }
    }

    /// Finds sequence breakers in the texts of tokens.
    pub fn set_pieces(&mut self, pieces: Arc<Pieces>) {
        self.breakers.pieces = Some(pieces);
    }

    /// Penalises repetitions: where the last `n` tokens of `recent` also occur earlier, `n` at least the allowed length, subtracts
    /// `multiplier * base^(n - allowed)` from the logit of the token that came next. If several `n` lead to one token,
    /// the largest counts. A repetition may overlap what it repeats. `lengths` is scratch, `[vocab]`, all zero before
    /// and after. Takes time in proportion to the history.
    pub fn penalise(&mut self, logits: &mut [f32], recent: &[u32], lengths: &mut [u32]) {
        let recent = last(recent, self.options.window.unwrap_or(usize::MAX));
        let found = self.repeats.measure(recent, self.longest);
        if found < self.options.allowed_length {
            return;
        }
        let most = self.breakers.unbroken(recent, found);
        if most < self.options.allowed_length {
            return;
        }
        for (back, &length) in self.repeats.lengths.iter().enumerate().skip(1) {
            let length = (length as usize).min(most);
            let next = recent[recent.len() - back];
            if length >= self.options.allowed_length
                && !self.breakers.are_in(next)
                && let Some(longest) = lengths.get_mut(next as usize)
            {
                *longest = (*longest).max(length as u32);
            }
        }
        for &next in &recent[1..] {
            let Some(length) = lengths.get_mut(next as usize).map(std::mem::take) else { continue };
            if length > 0 {
                logits[next as usize] -= self.penalty(length as usize);
            }
        }
    }

    /// The penalty on extending a repetition of this length.
    fn penalty(&self, length: usize) -> f32 {
        let growth = libm::pow(self.options.base.into(), (length - self.options.allowed_length) as f64);
        (f64::from(self.options.multiplier) * growth).min(f32::MAX.into()) as f32
    }
}

/// The length at which the penalty stops growing, or is already the largest number.
fn longest(o: &DryOptions) -> usize {
    let growth = libm::log(o.base.into());
    let doublings = libm::log(f64::from(f32::MAX) / f64::from(o.multiplier)) / growth;
    let steps = if growth > 0.0 { libm::ceil(doublings) } else { 0.0 };
    // A cast saturates.
    o.allowed_length.saturating_add(steps as usize)
}

/// The lengths of repetitions at the end of a history.
#[derive(Debug, Clone)]
struct Repeats {
    /// Scratch: how many of the last tokens also end so many tokens before the end, as far as was asked for.
    lengths: Vec<u32>,
}

impl Repeats {
    /// Measures all of them, up to `most` tokens; the longest. The lengths are those of the prefixes that a text repeats
    /// (the Z algorithm), of the history read backwards.
    fn measure(&mut self, recent: &[u32], most: usize) -> usize {
        let at = |i: usize| recent[recent.len() - 1 - i];
        self.lengths.clear();
        self.lengths.resize(recent.len(), 0);
        let (mut from, mut to, mut longest) = (0, 0, 0);
        for i in 1..recent.len() {
            let known = if i < to { (self.lengths[i - from] as usize).min(to - i) } else { 0 };
            let mut length = known;
            while length < most && i + length < recent.len() && at(length) == at(i + length) {
                length += 1;
            }
            if i + length > to {
                (from, to) = (i, i + length);
            }
            self.lengths[i] = length as u32;
            longest = longest.max(length);
        }
        longest
    }
}

/// Texts that a repetition never reaches across, wherever in the tokens they are. A token that contains a whole one is
/// never penalised. Control tokens are breakers too: a chat template repeats them, and an answer has to end.
#[derive(Debug, Clone)]
struct Breakers {
    automaton: Automaton,
    /// Number of bytes before a token that may belong to a breaker that ends in it.
    reach: usize,
    /// The texts of the tokens; without them there are no breakers.
    pieces: Option<Arc<Pieces>>,
}

impl Breakers {
    fn new(texts: &[String]) -> Self {
        let automaton = Automaton::new(texts.iter().map(|text| text.as_bytes()));
        let reach = texts.iter().map(|t| t.len().saturating_sub(1)).max().unwrap_or(0);
        Self { automaton, reach, pieces: None }
    }

    /// True if the token is a control token or its text contains a breaker.
    fn are_in(&self, id: u32) -> bool {
        let Some(pieces) = &self.pieces else { return false };
        pieces.is_special(id) || self.automaton.is_in(pieces.bytes(id))
    }

    /// Number of tokens after the last one that is a control token or in which a breaker ends, at most `most`.
    fn unbroken(&self, recent: &[u32], most: usize) -> usize {
        let Some(pieces) = &self.pieces else { return most.min(recent.len()) };
        let from = recent.len().saturating_sub(most);
        // A breaker may begin before.
        let (mut first, mut before) = (from, 0);
        while first > 0 && before < self.reach && !pieces.is_special(recent[first - 1]) {
            first -= 1;
            before += pieces.bytes(recent[first]).len();
        }
        let (mut state, mut whole) = (MatchState::default(), from);
        for (at, &id) in recent.iter().enumerate().skip(first) {
            let mut broken = pieces.is_special(id);
            if broken {
                state = MatchState::default();
            } else {
                for &byte in pieces.bytes(id) {
                    state = self.automaton.next(state, byte);
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
