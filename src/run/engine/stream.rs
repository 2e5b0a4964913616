//! One generation: its pieces of text, and when each token came.

use super::writer::{End, Unshown, Writer};
use crate::run::session::{Session, StopReason};
use files::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use text::sampler::{Sampler, TokenLogprobs};
use text::tokenizer::Tokenizer;

/// A session of the stream's own, or a caller's.
pub(super) enum Held<'a> {
    Own(Box<Session>),
    Lent(&'a mut Session),
}

impl std::ops::Deref for Held<'_> {
    type Target = Session;

    fn deref(&self) -> &Session {
        match self {
            Held::Own(s) => s,
            Held::Lent(s) => s,
        }
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Session {
        match self {
            Held::Own(s) => s,
            Held::Lent(s) => s,
        }
    }
}

/// When tokens came.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// Tokens of the prompt that had to be computed.
    pub prompt_tokens: usize,
    /// Tokens generated, a final end-of-sequence token included.
    pub tokens: usize,
    /// Time to the first sampled token.
    pub ttft: Duration,
    /// Time from the first to the last sampled token.
    pub decoding: Duration,
}

impl Timing {
    /// Average time between tokens; `None` below two tokens.
    pub fn tbt(&self) -> Option<Duration> {
        (self.tokens > 1).then(|| self.decoding / (self.tokens - 1) as u32)
    }
}

/// Where a text was cut that may go on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pause {
    /// Ids of the sequence that are not computed: the last one sampled, or what is left of a prompt.
    pub tokens: Vec<u32>,
    /// What of its text is not shown; `None` where the text has ended.
    pub unshown: Option<Unshown>,
}

/// Text pieces of one generation. Pieces may be empty while a character or a stop
/// string is incomplete.
pub struct TokenStream<'a> {
    session: Held<'a>,
    writer: Writer<'a>,
    state: State,
    timing: Timing,
    start: Instant,
    first: Option<Instant>,
    last_token: Option<u32>,
    /// What [`Pause::tokens`] says.
    uncomputed: Vec<u32>,
    /// Tokens that come next, without being sampled.
    inserted: VecDeque<u32>,
}

enum State {
    /// Logits are there, the next token is to be sampled.
    Sample,
    /// The text has ended; held-back text is still to be handed out.
    Flush(StopReason),
    Done(StopReason),
}

impl<'a> TokenStream<'a> {
    pub(super) fn begin(
        mut session: Held<'a>,
        writer: Writer<'a>,
        prompt: &[u32],
        start: Instant,
    ) -> Result<Self> {
        session.chosen_by(writer.sampler().options());
        let rest = session.reuse(prompt)?;
        let timing = Timing { prompt_tokens: rest.len(), ..Timing::default() };
        let (mut state, mut uncomputed) = (State::Sample, Vec::new());
        let computed = match *rest {
            // The token is always computed by `decode`, so a text that was cut continues as if it had not been.
            [token] => session.decode_unless(token, Some(writer.cancel())),
            _ => session.prefill_with(rest, writer.cancel(), |done, all| writer.progress(done, all)),
        };
        match computed {
            Ok(()) => {}
            Err(Error::Interrupted) => {
                state = State::Flush(StopReason::Interrupt);
                uncomputed = prompt[session.tokens().len()..].to_vec();
            }
            Err(e) => return Err(e),
        }
        Ok(Self {
            session,
            writer,
            state,
            timing,
            start,
            first: None,
            last_token: None,
            uncomputed,
            inserted: VecDeque::new(),
        })
    }

    /// Goes on with a text that was cut. Where it is cut again, held-back text is kept for [`TokenStream::pause`]
    /// instead of being shown as it is.
    pub fn resume(mut self, unshown: Option<&Unshown>) -> Self {
        self.writer.resume(unshown);
        self
    }

    /// Where the text was cut, once [`TokenStream::stop_reason`] is there.
    pub fn pause(&self) -> Pause {
        match self.state {
            State::Done(StopReason::Eos | StopReason::Stop) => Pause::default(),
            _ => Pause { tokens: self.uncomputed.clone(), unshown: Some(self.writer.unshown()) },
        }
    }

    /// Counts the time to the first token from `start`.
    pub fn since(mut self, start: Instant) -> Self {
        self.start = start;
        self
    }

    /// Restores a saved random state.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        self.writer.sampler_mut()
    }

    /// Asks it to end as soon as it can, as its options' [`CancelToken`] does.
    pub fn cancel(&self) {
        self.writer.cancel().cancel();
    }

    /// Goes on with these tokens, which are then not sampled but part of the text like any other. They cost no random
    /// number, and no grammar looks at them.
    ///
    /// ```
    /// use antigravity::{Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let mut options = GenerateOptions { max_tokens: Some(12), ..Default::default() };
    /// options.sampler.temperature = 0.0;
    /// let mut stream = engine.generate_stream("Once upon a time", &options)?;
    /// let mut text = stream.next().expect("a token")?;
    /// stream.insert(&engine.tokenizer().encode_plain(" The end.")?);
    /// for piece in &mut stream {
    ///     text += &piece?;
    /// }
    /// assert!(text.contains(" The end."), "{text}");
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    pub fn insert(&mut self, tokens: &[u32]) {
        self.inserted.extend(tokens);
    }

    /// Why it ended, once it has.
    pub fn stop_reason(&self) -> Option<StopReason> {
        match self.state {
            State::Done(reason) => Some(reason),
            _ => None,
        }
    }

    /// Times so far.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// The token that the last piece came from.
    pub fn last_token(&self) -> Option<u32> {
        self.last_token
    }

    /// The log-probability of the token that the last piece came from, and those of the most probable ones, where
    /// [`GenerateOptions::logprobs`] asks for them.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.last_token.and(self.writer.logprobs())
    }

    /// The tokenizer that makes the text.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.writer.tokenizer()
    }

    fn step(&mut self) -> Result<Option<String>> {
        match self.state {
            State::Done(_) => Ok(None),
            State::Flush(reason) => {
                self.state = State::Done(reason);
                self.last_token = None;
                if self.writer.keeps_at_cut() && reason != StopReason::Eos {
                    return Ok(None);
                }
                let text = self.writer.finish();
                Ok((!text.is_empty()).then_some(text))
            }
            State::Sample => self.sample().map(Some),
        }
    }

    fn sample(&mut self) -> Result<String> {
        if self.writer.is_spent() {
            self.state = State::Flush(StopReason::Length);
            return Ok(String::new());
        }
        let token = match self.inserted.pop_front() {
            Some(token) => {
                self.writer.take(self.session.logits(), token);
                token
            }
            None => self.writer.sample(self.session.logits(), self.session.tokens())?,
        };
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        if self.timing.tokens == 0 {
            self.timing.ttft = now - self.start;
        }
        self.timing.tokens += 1;
        self.timing.decoding = now - first;
        self.last_token = Some(token);
        let (text, end) = self.writer.push(token, || self.session.is_full());
        if end.is_some() {
            self.session.settle();
        }
        self.session.drawn_from(self.writer.sampler().rng());
        match end {
            None => match self.session.decode_unless(token, Some(self.writer.cancel())) {
                Err(Error::Interrupted) => {
                    self.state = State::Flush(StopReason::Interrupt);
                    self.uncomputed = [self.session.take_forgone(), vec![token]].concat();
                }
                decoded => decoded?,
            },
            Some(End::Done(reason)) => self.state = State::Done(reason),
            Some(End::Flush(reason)) => {
                self.state = State::Flush(reason);
                if reason != StopReason::Eos {
                    self.uncomputed = vec![token];
                }
            }
        }
        Ok(text)
    }
}

impl Iterator for TokenStream<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.step().transpose();
        if matches!(item, Some(Err(_))) {
            self.state = State::Done(StopReason::Interrupt);
        }
        item
    }
}
