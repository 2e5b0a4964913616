//! DRY, "don't repeat yourself": a penalty on the token that would extend a repetition of earlier text. It grows with
//! the length of the repetition (p-e-w, pull request 5677 of text-generation-webui).

use super::options::DryOptions;
use super::penalties::last;
use crate::tokenizer::Pieces;
use memchr::memmem::Finder;
use std::sync::Arc;

/// The penalty, ready for use.
#[derive(Debug, Clone)]
pub(super) struct Dry {
    options: DryOptions,
    /// Repetitions of this length or more all get the same penalty.
    longest: usize,
    breakers: Breakers,
}

impl Dry {
    pub fn new(options: &DryOptions) -> Self {
        let breakers = Breakers::new(&options.breakers);
        Self { options: options.clone(), longest: longest(options), breakers }
    }

    /// Finds sequence breakers in the texts of tokens.
    pub fn set_pieces(&mut self, pieces: Arc<Pieces>) {
        self.breakers.pieces = Some(pieces);
    }

    /// Where the last `n` tokens of `recent` also occur earlier, with `n` at least the allowed length, subtracts
    /// `multiplier * base^(n - allowed)` from the logit of the token that came next. If several `n` lead to one token,
    /// the largest counts. A repetition may overlap what it repeats. `lengths` is scratch, `[vocab]`, all zero before
    /// and after.
    pub fn penalise(&mut self, logits: &mut [f32], recent: &[u32], lengths: &mut [u32]) {
        let recent = last(recent, self.options.window.unwrap_or(usize::MAX));
        let Some((newest, before)) = recent.split_last() else { return };
        let most = self.breakers.unbroken(recent, self.longest);
        if most < self.options.allowed_length {
            return;
        }
        for (at, _) in before.iter().enumerate().filter(|(_, id)| *id == newest) {
            let pairs = before[..at].iter().rev().zip(before.iter().rev());
            let length = 1 + pairs.take(most - 1).take_while(|(then, now)| then == now).count();
            let next = recent[at + 1];
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
    let steps = match growth > 0.0 {
        true => libm::ceil(libm::log(f64::from(f32::MAX) / f64::from(o.multiplier)) / growth),
        false => 0.0,
    };
    // A cast saturates.
    o.allowed_length.saturating_add(steps as usize)
}

/// Texts that a repetition never reaches across, wherever in the tokens they are. A token that contains a whole one is
/// never penalised. Control tokens are breakers too: a chat template repeats them, and an answer has to end.
#[derive(Debug, Clone)]
struct Breakers {
    finders: Vec<Finder<'static>>,
    /// How many bytes before a token may belong to a breaker that ends in it.
    reach: usize,
    /// The texts of the tokens; without them there are no breakers.
    pieces: Option<Arc<Pieces>>,
    /// Scratch: the end of the text up to a token.
    text: Vec<u8>,
}

impl Breakers {
    fn new(texts: &[String]) -> Self {
        let finders = texts.iter().map(|t| Finder::new(t).into_owned()).collect();
        let reach = texts.iter().map(|t| t.len().saturating_sub(1)).max().unwrap_or(0);
        Self { finders, reach, pieces: None, text: Vec::with_capacity(1024 + reach) }
    }

    /// Whether the token is a control token or its text contains a breaker.
    fn are_in(&self, id: u32) -> bool {
        let Some(pieces) = &self.pieces else { return false };
        pieces.is_special(id) || self.finders.iter().any(|f| f.find(pieces.bytes(id)).is_some())
    }

    /// How many tokens follow the last one in which a breaker ends, at most `most`.
    fn unbroken(&mut self, recent: &[u32], most: usize) -> usize {
        let from = recent.len().saturating_sub(most);
        let broken = (from..recent.len()).rev().position(|at| self.end_in(recent, at));
        broken.unwrap_or(recent.len() - from)
    }

    /// Whether the token at `at` is a control token or a breaker ends in it.
    fn end_in(&mut self, recent: &[u32], at: usize) -> bool {
        let Some(pieces) = &self.pieces else { return false };
        if pieces.is_special(recent[at]) {
            return true;
        }
        let (mut first, mut before) = (at, 0);
        while first > 0 && before < self.reach && !pieces.is_special(recent[first - 1]) {
            first -= 1;
            before += pieces.bytes(recent[first]).len();
        }
        self.text.clear();
        for &id in &recent[first..=at] {
            self.text.extend_from_slice(pieces.bytes(id));
        }
        // Only breakers that end in the token count.
        let tail = |f: &Finder<'_>| before.saturating_sub(f.needle().len() - 1);
        self.finders.iter().any(|f| f.find(&self.text[tail(f)..]).is_some())
    }
}
