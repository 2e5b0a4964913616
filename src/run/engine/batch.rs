//! Several prompts at once: their tokens are computed together, so that weights are read once a step.

use super::Engine;
use super::texts::{Piece, Text, Texts, is_own};
use super::writer::{TextParams, Writer};
use crate::run::eviction::Policy;
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::session::{Drafts, Session, StopReason};
use files::{Error, Result};
use std::collections::VecDeque;
use text::sampler::TokenLogprobs;

/// One prompt of a batch.
#[derive(Debug, Clone)]
pub struct BatchItem {
    /// The prompt.
    pub prompt: String,
    /// What to generate.
    pub options: GenerateOptions,
}

/// The result of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchAnswer {
    /// Which one: its place among the items, from 0.
    pub index: usize,
    /// What was generated.
    pub text: String,
    /// Tokens of it, a final end-of-sequence token included.
    pub tokens: usize,
    /// The log-probability of each of them, where [`GenerateOptions::logprobs`] asks for it.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub stop: StopReason,
}

impl BatchAnswer {
    /// Nothing yet.
    fn new(index: usize) -> Self {
        Self { index, text: String::new(), tokens: 0, logprobs: Vec::new(), stop: StopReason::Length }
    }

    /// Adds what is new.
    fn take(&mut self, pieces: &mut Vec<Piece>) {
        for piece in pieces.drain(..) {
            self.text += &piece.text;
            self.tokens += usize::from(piece.token.is_some());
            self.logprobs.extend(piece.logprobs);
        }
    }
}

impl EngineOptions {
    /// How many sequences [`Engine::generate_batch`] computes together with these options.
    pub fn sequences(&self) -> usize {
        self.batch.max(1)
    }
}

impl Engine {
    /// Completes all prompts, [`EngineOptions::batch`] at once; the answers come in the order in which they are
    /// complete. Each is what its prompt alone gives, bit for bit, on every device and with every eviction policy. When a
    /// text ends, the next prompt takes its place, and is computed beside the tokens of the others.
    ///
    /// ```
    /// use antigravity::{BatchItem, Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions { batch: 2, ..EngineOptions::new(antigravity::dims::MODEL_DIR) })?;
    /// let options = |n| GenerateOptions { max_tokens: Some(n), ..Default::default() };
    /// let items = [
    ///     BatchItem { prompt: "Once upon a time".into(), options: options(9) },
    ///     BatchItem { prompt: "Lily".into(), options: options(3) },
    /// ];
    /// let answers = engine.generate_batch(&items)?.collect::<antigravity::Result<Vec<_>>>()?;
    /// // The shorter one is complete first.
    /// assert_eq!(answers.iter().map(|a| (a.index, a.tokens)).collect::<Vec<_>>(), [(1, 3), (0, 9)]);
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Usage` for a prompt that is empty or too long or whose options cannot be followed, with its index, before
    /// anything is computed; `Memory`. What goes wrong with one prompt later comes in place of its answer, with its
    /// index, and the others go on; what goes wrong with the device ends all.
    pub fn generate_batch<'a>(&'a self, items: &'a [BatchItem]) -> Result<Batch<'a>> {
        let mut waiting = VecDeque::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            waiting.push_back((index, self.prompt_of(item).map_err(|e| named(index, e))?));
        }
        let sequences = self.options.sequences().min(items.len());
        let free = match sequences {
            0 => Vec::new(),
            1 => vec![self.session()?],
            n => self.sessions_of(&self.options, n)?,
        };
        Ok(Batch { engine: self, items, waiting, complete: VecDeque::new(), free, texts: Texts::new(self) })
    }

    /// The ids of a prompt that can be completed.
    fn prompt_of(&self, item: &BatchItem) -> Result<Vec<u32>> {
        // Whatever is wrong with the options is said now, not when the turn comes.
        Writer::check(self, &item.options)?;
        let tokens = self.encode_until(&item.prompt, item.options.specials, &item.options.cancel)?;
        let (need, have) = (tokens.len(), self.options.max_seq_len);
        match need {
            0 => Err(Error::Usage("is empty, and this model adds no first token".into())),
            n if n > have && self.options.eviction.policy == Policy::None => Err(Error::Usage(format!(
                "needs {need} positions but the context has {have}; raise `EngineOptions::max_seq_len` or shorten it"
            ))),
            _ => Ok(tokens),
        }
    }
}

/// The error with the index of its prompt.
fn named(index: usize, e: Error) -> Error {
    let named = |why| format!("prompt {index} (from 0): {why}");
    match e {
        Error::Usage(why) => Error::Usage(named(why)),
        Error::Model(why) => Error::Model(named(why)),
        Error::Other(why) => Error::Other(named(why)),
        e => e,
    }
}

/// The answers to some prompts, as they are complete.
pub struct Batch<'a> {
    engine: &'a Engine,
    items: &'a [BatchItem],
    /// Index and ids of the prompts to come.
    waiting: VecDeque<(usize, Vec<u32>)>,
    /// Answers, or errors in place of answers, that were not fetched yet.
    complete: VecDeque<Result<BatchAnswer>>,
    /// Sequences that are free.
    free: Vec<Session>,
    /// The texts under way.
    texts: Texts<'a, BatchAnswer>,
}

impl<'a> Batch<'a> {
    /// The next answer, or what came in its place; outside of it, what ends all.
    fn answer(&mut self) -> Result<Option<Result<BatchAnswer>>> {
        loop {
            if let Some(answer) = self.complete.pop_front() {
                return Ok(Some(answer));
            }
            while let Some(session) = self.free.pop() {
                let Some((index, tokens)) = self.waiting.pop_front() else {
                    self.free.push(session);
                    break;
                };
                self.begin(session, index, tokens)?;
            }
            if self.texts.all.is_empty() && self.complete.is_empty() {
                return Ok(None);
            }
            self.step()?;
        }
    }

    /// Begins the text of a prompt in a free sequence.
    fn begin(&mut self, mut session: Session, index: usize, tokens: Vec<u32>) -> Result<()> {
        session.clear();
        let answer = BatchAnswer::new(index);
        let params = TextParams::new(&self.items[index].options)?;
        match Text::begin(self.engine, session, tokens, params, answer) {
            Ok(text) => self.texts.all.push(text),
            Err(failed) => {
                let (e, session, _) = *failed;
                if !is_own(&e) {
                    return Err(e);
                }
                self.complete.push_back(Err(named(index, e)));
                self.free.push(session);
            }
        }
        Ok(())
    }

    /// One pass. Answers that are complete, or errors in place of them, go to [`Batch::complete`].
    fn step(&mut self) -> Result<()> {
        let cancel = self.texts.first_cancel();
        self.texts.step(usize::MAX, cancel.as_ref())?;
        let ended = self.texts.ended.iter_mut().map(|(text, _)| text);
        self.texts.all.iter_mut().chain(ended).for_each(|text| text.owner.take(&mut text.pieces));
        for (text, how) in self.texts.ended.drain(..) {
            let index = text.owner.index;
            self.complete.push_back(match how {
                Ok(stop) => Ok(BatchAnswer { stop, ..text.owner }),
                Err(e) => Err(named(index, e)),
            });
            self.free.push(text.session);
        }
        Ok(())
    }

    /// How drafts went so far, where there are any.
    pub fn drafts(&self) -> Option<Drafts> {
        let sessions = self.texts.all.iter().map(|text| &text.session).chain(&self.free);
        sessions.filter_map(Session::drafts).reduce(|a, b| a + b)
    }
}

impl Iterator for Batch<'_> {
    type Item = Result<BatchAnswer>;

    fn next(&mut self) -> Option<Self::Item> {
        self.answer().unwrap_or_else(|e| {
            self.waiting.clear();
            self.texts.all.clear();
            Some(Err(e))
        })
    }
}
