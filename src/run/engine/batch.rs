//! Several prompts at once: their tokens are computed together, so that weights are read once a step.

use super::Engine;
use super::stream::{End, Writer};
use crate::run::eviction::Policy;
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::session::{Drafts, Session, Stage, StopReason, compute};
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
        Ok(Batch { engine: self, items, waiting, complete: VecDeque::new(), free, texts: Vec::new() })
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
    texts: Vec<Text<'a>>,
}

/// A text under way.
struct Text<'a> {
    session: Session,
    writer: Writer<'a>,
    /// Of the prompt, then those sampled. What of them is computed is the session's.
    tokens: Vec<u32>,
    prompt: usize,
    answer: BatchAnswer,
}

impl Text<'_> {
    /// Tokens that are computed.
    fn done(&self) -> usize {
        self.session.tokens().len()
    }

    fn is_prompt(&self) -> bool {
        self.done() < self.prompt
    }

    /// Stages the next tokens, at most `room` of a prompt, after those that a draft has computed already: how the text
    /// ends, if it does.
    fn stage(&mut self, room: usize) -> Result<Option<End>> {
        let (done, all) = (self.done(), self.tokens.len());
        if self.is_prompt() {
            self.writer.progress(done, self.prompt);
            let some = &self.tokens[done..all.min(done + room)];
            if !some.is_empty() {
                self.session.stage_prompt(some, all - done)?;
            }
            return Ok(None);
        }
        while let Some(&last) = self.tokens.last() {
            if self.session.stage(last)? == Stage::Staged {
                break;
            }
            if let Some(end) = self.advance()? {
                return Ok(Some(end));
            }
        }
        Ok(None)
    }

    /// Takes the logits of the last token, where they are there: how the text ends, if it does.
    fn advance(&mut self) -> Result<Option<End>> {
        let done = self.done();
        if done < self.tokens.len() {
            let cancelled = self.writer.cancel().is_cancelled();
            return Ok(cancelled.then_some(End::Flush(StopReason::Interrupt)));
        }
        if done == self.prompt {
            self.writer.progress(done, done);
            self.session.end_prompt()?;
        }
        self.session.check_logits()?;
        if self.writer.is_spent() {
            return Ok(Some(End::Flush(StopReason::Length)));
        }
        let token = self.writer.sample(self.session.logits(), &self.tokens)?;
        self.tokens.push(token);
        self.session.drawn_from(self.writer.sampler().rng());
        self.answer.tokens += 1;
        self.answer.logprobs.extend(self.writer.logprobs().cloned());
        let session = &self.session;
        let (text, end) = self.writer.push(token, || session.is_full());
        self.answer.text += &text;
        Ok(end)
    }

    /// The answer and the sequence that it no longer needs.
    fn end(mut self, end: End) -> (BatchAnswer, Session) {
        self.answer.stop = match end {
            End::Done(reason) => reason,
            End::Flush(reason) => {
                self.answer.text += &self.writer.finish();
                reason
            }
        };
        (self.answer, self.session)
    }
}

/// Whether an error is that of one prompt, not of the device.
fn is_own(e: &Error) -> bool {
    matches!(e, Error::Usage(_) | Error::Model(_) | Error::Other(_))
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
            if self.texts.is_empty() && self.complete.is_empty() {
                return Ok(None);
            }
            self.step()?;
        }
    }

    /// Begins the text of a prompt in a free sequence.
    fn begin(&mut self, mut session: Session, index: usize, tokens: Vec<u32>) -> Result<()> {
        session.clear();
        let begun = session.begin_prompt(&tokens);
        match begun.and_then(|()| Writer::new(self.engine, &self.items[index].options)) {
            Ok(writer) => {
                session.chosen_by(writer.sampler().options());
                let (prompt, answer) = (tokens.len(), BatchAnswer::new(index));
                self.texts.push(Text { session, writer, tokens, prompt, answer });
            }
            Err(e) if is_own(&e) => {
                self.complete.push_back(Err(named(index, e)));
                self.free.push(session);
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// One pass: a token of every text, and with the room that is left the next part of prompts. Answers that are
    /// complete go to [`Batch::complete`].
    fn step(&mut self) -> Result<()> {
        let decoding = self.texts.iter().filter(|text| !text.is_prompt()).count();
        let most = self.texts.first().map_or(0, |text| text.session.max_tokens());
        let mut room = most.saturating_sub(decoding).max(1);
        let mut i = 0;
        while i < self.texts.len() {
            // The next token of a text is counted already.
            let counted = usize::from(!self.texts[i].is_prompt());
            match self.texts[i].stage(room) {
                Ok(None) => {
                    room = room.saturating_sub(self.texts[i].session.staged().saturating_sub(counted));
                    i += 1;
                }
                Ok(Some(end)) => self.complete(i, end),
                Err(e) => self.fail(i, e)?,
            }
        }
        let cancel = self.texts.first().map(|text| text.writer.cancel().clone());
        let mut sessions: Vec<&mut Session> = self.texts.iter_mut().map(|text| &mut text.session).collect();
        match compute(&mut sessions, cancel.as_ref()) {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(e) => return Err(e),
        }
        let mut i = 0;
        while i < self.texts.len() {
            match self.texts[i].advance() {
                Ok(None) => i += 1,
                Ok(Some(end)) => self.complete(i, end),
                Err(e) => self.fail(i, e)?,
            }
        }
        Ok(())
    }

    /// A text has ended: its answer can be fetched, and its sequence is free.
    fn complete(&mut self, text: usize, end: End) {
        let (answer, mut session) = self.texts.remove(text).end(end);
        session.settle();
        self.complete.push_back(Ok(answer));
        self.free.push(session);
    }

    /// How drafts went so far, where there are any.
    pub fn drafts(&self) -> Option<Drafts> {
        let sessions = self.texts.iter().map(|text| &text.session).chain(&self.free);
        sessions.filter_map(Session::drafts).reduce(|a, b| a + b)
    }

    /// What goes wrong with one text comes in place of its answer; what goes wrong with the device ends all.
    fn fail(&mut self, text: usize, e: Error) -> Result<()> {
        if !is_own(&e) {
            return Err(e);
        }
        let text = self.texts.remove(text);
        self.complete.push_back(Err(named(text.answer.index, e)));
        self.free.push(text.session);
        Ok(())
    }
}

impl Iterator for Batch<'_> {
    type Item = Result<BatchAnswer>;

    fn next(&mut self) -> Option<Self::Item> {
        self.answer().unwrap_or_else(|e| {
            self.waiting.clear();
            self.texts.clear();
            Some(Err(e))
        })
    }
}
