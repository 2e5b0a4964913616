//! Several prompts at once: their tokens are computed together, so that weights are read once a step.

use super::batch::{Batch, BatchEvent, Generation, Piece, SessionRef, is_request_error};
use super::decoder::{DecoderParams, TokenDecoder};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::GenerateOptions;
use crate::run::session::{Drafts, StopReason};
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
    /// The answer to a prompt that begins.
    fn new(index: usize) -> Self {
        Self { index, text: String::new(), tokens: 0, logprobs: Vec::new(), stop: StopReason::Length }
    }

    fn push(&mut self, piece: Piece) {
        self.text += &piece.text;
        self.tokens += usize::from(piece.token.is_some());
        self.logprobs.extend(piece.logprobs);
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
    pub fn generate_batch<'a>(&'a self, items: &'a [BatchItem]) -> Result<BatchAnswers<'a>> {
        let mut waiting = VecDeque::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            waiting.push_back((index, self.prompt_of(item).map_err(|e| with_index(index, e))?));
        }
        let sequences = self.options().sequences().min(items.len());
        let free = match sequences {
            0 => Vec::new(),
            1 => vec![self.session()?],
            n => self.sessions_of(self.options(), n)?,
        };
        Ok(BatchAnswers {
            engine: self,
            items,
            waiting,
            complete: VecDeque::new(),
            free: free.into_iter().map(|session| SessionRef::Own(Box::new(session))).collect(),
            answers: (0..items.len()).map(BatchAnswer::new).collect(),
            batch: self.batch(),
        })
    }

    /// The ids of a prompt that can be completed.
    fn prompt_of(&self, item: &BatchItem) -> Result<Vec<u32>> {
        // Whatever is wrong with the options is said now, not when the turn comes.
        TokenDecoder::check(self.tokenizer(), &item.options)?;
        let tokens = self.encode_until(&item.prompt, item.options.specials, &item.options.cancel)?;
        let (need, have) = (tokens.len(), self.options().max_seq_len);
        match need {
            0 => Err(Error::Usage("is empty, and this model adds no first token".into())),
            n if n > have && self.options().eviction.policy == Policy::None => Err(Error::Usage(format!(
                "needs {need} positions but the context has {have}; raise `EngineOptions::max_seq_len` or shorten it"
            ))),
            _ => Ok(tokens),
        }
    }
}

/// The error with the index of its prompt.
fn with_index(index: usize, e: Error) -> Error {
    let named = |why| format!("prompt {index} (from 0): {why}");
    match e {
        Error::Usage(why) => Error::Usage(named(why)),
        Error::Model(why) => Error::Model(named(why)),
        Error::Other(why) => Error::Other(named(why)),
        e => e,
    }
}

/// The answers to some prompts, as they are complete.
pub struct BatchAnswers<'a> {
    engine: &'a Engine,
    items: &'a [BatchItem],
    /// Index and ids of the prompts to come.
    waiting: VecDeque<(usize, Vec<u32>)>,
    /// Answers, or errors in place of answers, that were not fetched yet.
    complete: VecDeque<Result<BatchAnswer>>,
    /// Sequences that are free.
    free: Vec<SessionRef<'a>>,
    /// The answers so far, by index.
    answers: Vec<BatchAnswer>,
    /// The texts under way, numbered by index.
    batch: Batch<'a>,
}

impl BatchAnswers<'_> {
    /// The next answer, or what came in its place; outside of it, what ends all.
    fn next_answer(&mut self) -> Result<Option<Result<BatchAnswer>>> {
        loop {
            if let Some(answer) = self.complete.pop_front() {
                return Ok(Some(answer));
            }
            while !self.free.is_empty() && !self.waiting.is_empty() {
                self.begin_next()?;
            }
            if self.batch.generations().is_empty() && self.complete.is_empty() {
                return Ok(None);
            }
            self.step()?;
        }
    }

    /// Begins the text of the next prompt in a free sequence.
    fn begin_next(&mut self) -> Result<()> {
        let (Some(mut session), Some((index, tokens))) = (self.free.pop(), self.waiting.pop_front()) else {
            return Ok(());
        };
        session.clear();
        let decoder =
            TokenDecoder::new(self.engine.tokenizer(), DecoderParams::new(&self.items[index].options)?);
        match decoder.and_then(|decoder| session.begin_prompt(&tokens).map(|_| decoder)) {
            Ok(decoder) => self.batch.push(Generation::new(index, session, decoder, tokens)),
            Err(e) if is_request_error(&e) => {
                self.complete.push_back(Err(with_index(index, e)));
                self.free.push(session);
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// One pass. Answers that are complete, or errors in place of them, go to [`BatchAnswers::complete`].
    fn step(&mut self) -> Result<()> {
        let cancel = self.batch.generations().first().map(|g| g.decoder.cancel().clone());
        for (index, event) in self.batch.step(cancel.as_ref())? {
            let complete = match event {
                BatchEvent::Prompt(_) => continue,
                BatchEvent::Piece(piece) => {
                    self.answers[index].push(piece);
                    continue;
                }
                BatchEvent::Ended(stop) => {
                    let answer = std::mem::replace(&mut self.answers[index], BatchAnswer::new(index));
                    Ok(BatchAnswer { stop, ..answer })
                }
                BatchEvent::Failed(e) => Err(with_index(index, e)),
            };
            self.complete.push_back(complete);
            self.free.extend(self.batch.remove(index).map(|generation| generation.session));
        }
        Ok(())
    }

    /// How drafts went so far, where there are any.
    pub fn drafts(&self) -> Option<Drafts> {
        let running = self.batch.generations().iter().map(|generation| &generation.session);
        running.chain(&self.free).filter_map(|session| session.drafts()).reduce(|a, b| a + b)
    }
}

impl Iterator for BatchAnswers<'_> {
    type Item = Result<BatchAnswer>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_answer().unwrap_or_else(|e| {
            self.waiting.clear();
            self.batch.clear();
            Some(Err(e))
        })
    }
}
