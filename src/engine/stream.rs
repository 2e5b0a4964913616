//! One generation: logits to tokens, tokens to text that may be shown, and when each came.

use super::{Engine, GenerateOptions};
use crate::dims::VOCAB;
use crate::error::{Error, Result};
use crate::sampler::Sampler;
use crate::session::{CancelToken, Session, StopReason};
use crate::tokenizer::{StopStrings, TextState, TextStream};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

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

/// Text that was held back at a cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unshown {
    /// Part of a character.
    bytes: TextState,
    /// What could become a stop string.
    stop: String,
}

/// What becomes of held-back text where a text is cut, not ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtCut {
    Show,
    Keep,
}

/// Turns logits into tokens and tokens into text that may be shown.
pub(super) struct Writer<'a> {
    sampler: Sampler,
    text: TextStream<'a>,
    stops: StopStrings,
    at_cut: AtCut,
    ends: Vec<u32>,
    left: Option<usize>,
    cancel: CancelToken,
    progress: fn(usize, usize),
    logits: Vec<f32>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(engine: &'a Engine, options: &GenerateOptions) -> Result<Self> {
        let mut ends = options.stop_tokens.clone();
        if !options.ignore_eos {
            ends.extend_from_slice(engine.tokenizer.eos_ids());
        }
        Ok(Self {
            sampler: Sampler::new(options.sampler.clone(), VOCAB)?,
            text: engine.tokenizer.stream(),
            stops: StopStrings::new(&options.stop)?,
            at_cut: AtCut::Show,
            ends,
            left: options.max_tokens,
            cancel: options.cancel.clone(),
            progress: options.progress,
            logits: vec![0.0; VOCAB],
        })
    }

    /// Samples from the session's logits.
    fn sample(&mut self, session: &Session) -> u32 {
        self.logits.copy_from_slice(session.logits());
        self.sampler.sample(&mut self.logits, session.tokens())
    }
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
        let rest = session.reuse(prompt)?;
        let timing = Timing { prompt_tokens: rest.len(), ..Timing::default() };
        let (mut state, mut uncomputed) = (State::Sample, Vec::new());
        let computed = match *rest {
            // Decoded, wherever it comes from: so a text that was cut goes on as if it had not been.
            [token] => session.decode(token),
            _ => session.prefill_with(rest, &writer.cancel, writer.progress),
        };
        match computed {
            Ok(()) => {}
            Err(Error::Interrupted) => {
                state = State::Flush(StopReason::Interrupt);
                uncomputed = prompt[session.tokens().len()..].to_vec();
            }
            Err(e) => return Err(e),
        }
        Ok(Self { session, writer, state, timing, start, first: None, last_token: None, uncomputed })
    }

    /// Goes on with a text that was cut. Where it is cut again, held-back text is kept for [`TokenStream::pause`]
    /// instead of being shown as it is.
    pub fn resume(mut self, unshown: Option<&Unshown>) -> Self {
        self.writer.at_cut = AtCut::Keep;
        if let Some(unshown) = unshown {
            self.writer.text.resume(&unshown.bytes);
            self.writer.stops.hold(&unshown.stop);
        }
        self
    }

    /// Where the text was cut, once [`TokenStream::stop_reason`] is there.
    pub fn pause(&self) -> Pause {
        match self.state {
            State::Done(StopReason::Eos | StopReason::Stop) => Pause::default(),
            _ => {
                let (bytes, stop) = (self.writer.text.state(), self.writer.stops.held().into());
                Pause { tokens: self.uncomputed.clone(), unshown: Some(Unshown { bytes, stop }) }
            }
        }
    }

    /// Counts the time to the first token from `start`.
    pub fn since(mut self, start: Instant) -> Self {
        self.start = start;
        self
    }

    /// Restores a saved random state.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        &mut self.writer.sampler
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

    fn step(&mut self) -> Result<Option<String>> {
        match self.state {
            State::Done(_) => Ok(None),
            State::Flush(reason) => {
                self.state = State::Done(reason);
                self.last_token = None;
                if self.writer.at_cut == AtCut::Keep && reason != StopReason::Eos {
                    return Ok(None);
                }
                let mut text = self.writer.text.finish();
                text = self.writer.stops.push(&text).text;
                text += &self.writer.stops.finish().text;
                Ok((!text.is_empty()).then_some(text))
            }
            State::Sample => self.sample().map(Some),
        }
    }

    fn sample(&mut self) -> Result<String> {
        if self.writer.left == Some(0) {
            self.state = State::Flush(StopReason::Length);
            return Ok(String::new());
        }
        let token = self.writer.sample(&self.session);
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        if self.timing.tokens == 0 {
            self.timing.ttft = now - self.start;
        }
        self.timing.tokens += 1;
        self.timing.decoding = now - first;
        self.last_token = Some(token);
        if self.writer.ends.contains(&token) {
            self.state = State::Flush(StopReason::Eos);
            return Ok(String::new());
        }
        let text = self.writer.text.push(token);
        let scan = self.writer.stops.push(&text);
        if let Some(left) = &mut self.writer.left {
            *left -= 1;
        }
        if scan.stopped {
            self.state = State::Done(StopReason::Stop);
        } else if self.writer.left == Some(0) {
            self.state = State::Flush(StopReason::Length);
        } else if self.writer.cancel.is_cancelled() {
            self.state = State::Flush(StopReason::Interrupt);
        } else if self.session.is_full() {
            self.state = State::Flush(StopReason::Context);
        } else {
            self.session.decode(token)?;
        }
        if matches!(self.state, State::Flush(_)) {
            self.uncomputed = vec![token];
        }
        Ok(scan.text)
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
