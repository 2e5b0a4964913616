//! One generation as an iterator over its pieces of text, with timing. It runs as a batch of one.

use super::batch::{Batch, BatchEvent, Events, Generation, SessionRef};
use super::decoder::{PendingText, TokenDecoder};
use crate::run::session::StopReason;
use files::Result;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use text::sampler::{Sampler, TokenLogprobs};
use text::tokenizer::Tokenizer;

/// Times of a generation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// Number of prompt tokens that had to be computed.
    pub prompt_tokens: usize,
    /// Number of generated tokens, a final end-of-sequence token included.
    pub tokens: usize,
    /// Time to the first sampled token.
    pub ttft: Duration,
    /// Time from the first to the last sampled token.
    pub decoding: Duration,
}

impl Timing {
    /// Average time between tokens (TBT); `None` below two tokens.
    pub fn mean_token_time(&self) -> Option<Duration> {
        (self.tokens > 1).then(|| self.decoding / (self.tokens - 1) as u32)
    }
}

/// State from which an interrupted text can continue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResumePoint {
    /// Tokens of the sequence that are not computed: the last sampled one, or the rest of a prompt.
    pub tokens: Vec<u32>,
    /// Text not shown yet; `None` if the text has ended.
    pub unshown: Option<PendingText>,
}

/// Iterator over the text pieces of one generation. A piece is empty while a character or a stop string is incomplete.
pub struct TokenStream<'a> {
    batch: Batch<'a>,
    /// Events not delivered yet.
    events: std::vec::IntoIter<<Events as IntoIterator>::Item>,
    timing: Timing,
    start: Instant,
    first: Option<Instant>,
    last_token: Option<u32>,
    logprobs: Option<TokenLogprobs>,
}

impl<'a> TokenStream<'a> {
    /// Computes the prompt, unless it is cancelled.
    pub(super) fn begin(
        mut session: SessionRef<'a>,
        decoder: TokenDecoder<'a>,
        prompt: &[u32],
        start: Instant,
    ) -> Result<Self> {
        let held = session.begin_prompt(prompt)?;
        let timing = Timing { prompt_tokens: prompt.len() - held, ..Timing::default() };
        let cancel = decoder.cancel().clone();
        let mut batch = Batch::single(Generation::new(0, session, decoder, prompt.to_vec()));
        while !batch.generations()[0].pending_tokens().is_empty() && !cancel.is_cancelled() {
            for (_, event) in batch.compute_pass(Some(&cancel))? {
                if let BatchEvent::Failed(e) = event {
                    return Err(e);
                }
            }
        }
        Ok(Self {
            batch,
            events: Vec::new().into_iter(),
            timing,
            start,
            first: None,
            last_token: None,
            logprobs: None,
        })
    }

    fn generation(&self) -> &Generation<'a> {
        &self.batch.generations()[0]
    }

    fn decoder(&mut self) -> &mut TokenDecoder<'a> {
        &mut self.batch.generations_mut()[0].decoder
    }

    /// Continues an interrupted text. If it is interrupted again, held-back text stays in [`TokenStream::resume_point`]
    /// instead of being shown.
    pub fn resume_from(mut self, unshown: Option<&PendingText>) -> Self {
        self.decoder().resume_from(unshown);
        self
    }

    /// State to continue from, once there is a [`TokenStream::stop_reason`].
    pub fn resume_point(&self) -> ResumePoint {
        let generation = self.generation();
        match generation.stop_reason() {
            Some(StopReason::Eos | StopReason::Stop) => ResumePoint::default(),
            _ => ResumePoint {
                tokens: generation.pending_tokens().to_vec(),
                unshown: Some(generation.decoder.pending_text()),
            },
        }
    }

    /// Counts the time to the first token from `start`.
    pub fn timed_from(mut self, start: Instant) -> Self {
        self.start = start;
        self
    }

    /// Restores a saved random state.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        self.decoder().sampler_mut()
    }

    /// Cancels the generation, like its options' [`CancelToken`](crate::session::CancelToken).
    pub fn cancel(&self) {
        self.generation().decoder.cancel().cancel();
    }

    /// Continues with these tokens instead of sampled ones. They are part of the text like any other, use no random
    /// number and are not checked by a grammar.
    ///
    /// ```
    /// use antigravity::{Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let mut options = GenerateOptions { max_tokens: Some(12), ..Default::default() };
    /// options.sampler.temperature = 0.0;
    /// let mut stream = engine.generate_stream("Once upon a time", &options)?;
    /// let mut text = stream.next().expect("a token")?;
    /// stream.insert_tokens(&engine.tokenizer().encode_plain(" The end.")?);
    /// for piece in &mut stream {
    ///     text += &piece?;
    /// }
    /// assert!(text.contains(" The end."), "{text}");
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    pub fn insert_tokens(&mut self, tokens: &[u32]) {
        self.decoder().insert_tokens(tokens);
    }

    /// Reason for its end, once it has ended.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.generation().stop_reason().filter(|_| self.events.len() == 0)
    }

    /// Times so far.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Token of the last piece.
    pub fn last_token(&self) -> Option<u32> {
        self.last_token
    }

    /// Log-probabilities of the last piece's token and of the most probable ones, if
    /// [`GenerateOptions::logprobs`](crate::GenerateOptions::logprobs) asks for them.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.logprobs.as_ref()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.generation().decoder.tokenizer()
    }

    /// Computes and samples until there is an event. Returns `None` at the end.
    fn next_event(&mut self) -> Result<Option<BatchEvent>> {
        while self.events.len() == 0 {
            let generation = self.generation();
            if generation.stop_reason().is_some() {
                return Ok(None);
            }
            let cancel = generation.decoder.cancel().clone();
            self.events = self.batch.step(Some(&cancel))?.into_iter();
        }
        Ok(self.events.next().map(|(_, event)| event))
    }

    fn record_token_time(&mut self) {
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        if self.timing.tokens == 0 {
            self.timing.ttft = now - self.start;
        }
        self.timing.tokens += 1;
        self.timing.decoding = now - first;
    }
}

impl Iterator for TokenStream<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_event() {
                Ok(Some(BatchEvent::Piece(piece))) => {
                    if piece.token.is_some() {
                        self.record_token_time();
                    }
                    (self.last_token, self.logprobs) = (piece.token, piece.logprobs);
                    return Some(Ok(piece.text));
                }
                // A text without tokens still has one, empty piece.
                Ok(Some(BatchEvent::Ended(StopReason::Length))) if self.timing.tokens == 0 => {
                    return Some(Ok(String::new()));
                }
                Ok(Some(BatchEvent::Ended(_) | BatchEvent::Prompt(_))) => {}
                Ok(None) => return None,
                Ok(Some(BatchEvent::Failed(e))) => return Some(Err(e)),
                Err(e) => {
                    self.batch.generations_mut()[0].give_up();
                    return Some(Err(e));
                }
            }
        }
    }
}
