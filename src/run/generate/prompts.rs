//! Several prompts at once: their tokens are computed together, so that a step reads the weights once.

use super::batch::{Batch, BatchEvent, Generation, Piece, SessionRef, is_request_error};
use super::decoder::{DecoderParams, TokenDecoder};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::GenerateOptions;
use crate::run::session::{DraftCounts, StopReason};
use files::{Error, Result};
use std::collections::VecDeque;
use text::sampler::TokenLogprobs;

/// One prompt of a batch.
#[derive(Debug, Clone)]
pub struct BatchItem {
    /// The prompt.
    pub prompt: String,
    /// Options of its generation.
    pub options: GenerateOptions,
}

/// The result of one prompt.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BatchAnswer {
    /// Index of the prompt, from 0.
    pub index: usize,
    /// Generated text.
    pub text: String,
    /// Number of its tokens, a final end-of-sequence token included.
    pub tokens: usize,
    /// Log-probabilities of each token, if [`GenerateOptions::logprobs`] asks for them.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of the prompt's tokens from the second on, if [`GenerateOptions::prompt_logprobs`] asks for
    /// them.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Reason for its end.
    pub stop: StopReason,
}

impl BatchAnswer {
    fn push(&mut self, piece: Piece) {
        self.text += &piece.text;
        self.tokens += usize::from(piece.token.is_some());
        self.logprobs.extend(piece.logprobs);
    }
}

impl Engine {
    /// Completes all prompts, `EngineOptions::batch` of them at once; answers come in the order in which they
    /// complete. Each is bit for bit the answer to its prompt alone, on every device and with every eviction policy.
    /// When a text ends, the next prompt takes its place and is computed together with the others' tokens.
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
    /// `Usage`, with the prompt's index, for a prompt that is empty or too long or has invalid options, before anything
    /// is computed; `Memory`. A later error of one prompt takes the place of its answer, with its index, and the others
    /// continue. An error of the device ends all.
    pub fn generate_batch<'a>(&'a self, items: &'a [BatchItem]) -> Result<BatchAnswers<'a>> {
        let mut waiting = VecDeque::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            waiting.push_back((index, self.encode_prompt(item).map_err(|e| with_index(index, e))?));
        }
        let sequences = self.options().sequence_count().min(items.len());
        let free = match sequences {
            0 => Vec::new(),
            1 => vec![self.session()?],
            n => self.sessions_with(self.options(), n)?,
        };
        Ok(BatchAnswers {
            engine: self,
            items,
            waiting,
            complete: VecDeque::new(),
            free: free.into_iter().map(|session| SessionRef::Own(Box::new(session))).collect(),
            answers: (0..items.len()).map(|index| BatchAnswer { index, ..Default::default() }).collect(),
            batch: self.new_batch(),
        })
    }

    /// Encodes and checks a prompt.
    fn encode_prompt(&self, item: &BatchItem) -> Result<Vec<u32>> {
        // Errors in the options are reported now, not when the prompt's turn comes.
        TokenDecoder::check_options(self.tokenizer(), &item.options)?;
        let tokens = self.encode_cancellable(&item.prompt, item.options.specials, &item.options.cancel)?;
        let (need, have) = (tokens.len(), self.options().max_seq_len);
        match need {
            0 => Err(Error::Usage("is empty, and this model adds no first token".into())),
            n if n > have && self.options().eviction.policy == Policy::None => Err(Error::Usage(format!(
                "needs {need} tokens but the context has {have}; raise `EngineOptions::max_seq_len` or shorten it"
            ))),
            _ => Ok(tokens),
        }
    }
}

/// Adds the index of the prompt to an error.
fn with_index(index: usize, e: Error) -> Error {
    let named = |why| format!("prompt {index} (from 0): {why}");
    match e {
        Error::Usage(why) => Error::Usage(named(why)),
        Error::Model(why) => Error::Model(named(why)),
        Error::Other(why) => Error::Other(named(why)),
        e => e,
    }
}

/// Iterator over the answers to some prompts, in the order in which they complete.
pub struct BatchAnswers<'a> {
    engine: &'a Engine,
    items: &'a [BatchItem],
    /// Index and tokens of the prompts to come.
    waiting: VecDeque<(usize, Vec<u32>)>,
    /// Complete answers, or errors in their place, that were not fetched yet.
    complete: VecDeque<Result<BatchAnswer>>,
    /// Free sequences.
    free: Vec<SessionRef<'a>>,
    /// Answers so far, by index.
    answers: Vec<BatchAnswer>,
    /// Running generations; their ids are indices.
    batch: Batch<'a>,
}

impl BatchAnswers<'_> {
    /// The next answer or the error in its place; the outer error ends all.
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

    /// Begins the next prompt in a free sequence.
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

    /// Computes one pass and moves complete answers, or errors in their place, to `complete`.
    fn step(&mut self) -> Result<()> {
        let cancel = self.batch.generations().first().map(|g| g.decoder.cancel().clone());
        for (index, event) in self.batch.step(cancel.as_ref())? {
            let complete = match event {
                BatchEvent::Prompt(tokens) => {
                    self.answers[index].prompt_logprobs.extend(tokens);
                    continue;
                }
                BatchEvent::Piece(piece) => {
                    self.answers[index].push(piece);
                    continue;
                }
                BatchEvent::Ended(stop) => {
                    Ok(BatchAnswer { stop, ..std::mem::take(&mut self.answers[index]) })
                }
                BatchEvent::Failed(e) => Err(with_index(index, e)),
            };
            self.complete.push_back(complete);
            self.free.extend(self.batch.remove(index).map(|generation| generation.session));
        }
        Ok(())
    }

    /// Counts of drafted tokens so far, if drafting is on.
    pub fn drafts(&self) -> Option<DraftCounts> {
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
