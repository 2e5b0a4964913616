//! The generation loop: one pass computes the next token of every generation together with parts of prompts; then the
//! next token of each is sampled. A stream is a batch of one.

use super::decoder::TokenDecoder;
use crate::model::device::lock_device;
use crate::run::session::{CancelToken, PROMPT_LOGITS_ROWS, Session, SmallList, Stage, StopReason, forward};
use files::{Error, Result};
use numeric::pool::Pool;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};
use text::sampler::{TokenLogprobs, all_finite};

/// The text of one token.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// The token; `None` for text that was held back until the end.
    pub token: Option<u32>,
    /// Displayable text: whole characters, perhaps none yet.
    pub text: String,
    /// Log-probabilities of the token, if [`GenerateOptions::logprobs`](crate::GenerateOptions::logprobs) asks for
    /// them.
    pub logprobs: Option<TokenLogprobs>,
}

/// An event of a generation in a step.
#[derive(Debug, Clone, PartialEq)]
pub enum BatchEvent {
    /// Log-probabilities of the next tokens of the prompt; the first one has none.
    Prompt(Vec<TokenLogprobs>),
    /// A piece of the text.
    Piece(Piece),
    /// End of the generation; the last event.
    Ended(StopReason),
    /// An error of this generation alone; the last event.
    Failed(Error),
}

/// A session that the generation owns or borrows.
pub enum SessionRef<'a> {
    Own(Box<Session>),
    Borrowed(&'a mut Session),
}

impl Deref for SessionRef<'_> {
    type Target = Session;

    fn deref(&self) -> &Session {
        match self {
            SessionRef::Own(session) => session,
            SessionRef::Borrowed(session) => session,
        }
    }
}

impl DerefMut for SessionRef<'_> {
    fn deref_mut(&mut self) -> &mut Session {
        match self {
            SessionRef::Own(session) => session,
            SessionRef::Borrowed(session) => session,
        }
    }
}

/// One running generation: a session, and the decoder that samples tokens and turns them into text.
pub struct Generation<'a> {
    /// The caller's id for it.
    pub id: usize,
    pub session: SessionRef<'a>,
    pub decoder: TokenDecoder<'a>,
    /// Tokens of the prompt, then the sampled ones. The session has computed the first of them.
    tokens: Vec<u32>,
    /// Number of leading tokens that are computed as a prompt.
    prompt: usize,
    /// True while a prompt is computed in parts.
    is_prompt_open: bool,
    /// Tokens of the prompt that progress reports do not count.
    uncounted: usize,
    /// The next token or its error, if it was sampled in parallel with other generations'.
    sampled: Option<Result<u32>>,
    stop_reason: Option<StopReason>,
}

impl<'a> Generation<'a> {
    /// A generation from a prompt, after [`Session::begin_prompt`]: the session holds the first tokens.
    pub fn new(
        id: usize,
        mut session: SessionRef<'a>,
        decoder: TokenDecoder<'a>,
        prompt: Vec<u32>,
    ) -> Generation<'a> {
        session.set_sampler(decoder.sampler().options());
        let held = session.tokens().len();
        // A single token is computed like a sampled one, so that an interrupted text continues as if it had not been.
        let computed_together = if held + 1 == prompt.len() { held } else { prompt.len() };
        Self {
            id,
            session,
            decoder,
            tokens: prompt,
            prompt: computed_together,
            is_prompt_open: false,
            uncounted: held,
            sampled: None,
            stop_reason: None,
        }
    }

    /// Counts progress from the first token on, those that the session holds too, and computes the last one as a prompt.
    #[cfg(feature = "serve")]
    pub fn with_whole_progress(self) -> Self {
        let prompt = self.tokens.len();
        Self { uncounted: 0, prompt, ..self }
    }

    /// Reason for its end, once it has ended.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Tokens that are not computed yet: the last sampled one, or the rest of a prompt.
    pub fn pending_tokens(&self) -> &[u32] {
        &self.tokens[self.count_computed()..]
    }

    /// Number of computed tokens.
    fn count_computed(&self) -> usize {
        self.session.tokens().len().min(self.tokens.len())
    }

    /// True if the next tokens are computed as a prompt: a part of the prompt, or tokens that a lost device had.
    fn is_prompt(&self) -> bool {
        self.count_computed() < self.prompt || self.pending_tokens().len() > 1
    }

    fn tell_progress(&self) {
        let count = |tokens: usize| tokens.saturating_sub(self.uncounted);
        self.decoder.progress.report(count(self.count_computed()), count(self.tokens.len()));
    }

    /// Computes log-probabilities of the prompt's next tokens, if wanted: at most `room`, but never the last. Returns
    /// their number.
    fn measure_prompt(&mut self, room: usize, events: &mut Events) -> Result<usize> {
        let Self { session, tokens, prompt, decoder, .. } = self;
        let Some(logprobs) = &mut decoder.prompt_logprobs else { return Ok(0) };
        let done = session.tokens().len();
        let end = prompt.saturating_sub(1).min(done + room.min(PROMPT_LOGITS_ROWS));
        if done >= end {
            return Ok(0);
        }
        let mut measured = Vec::with_capacity(end - done);
        session.logits_of_part(&tokens[done..end], *prompt - done, |i, row| {
            logprobs.compute_logprobs(row, tokens[done + i + 1]);
            measured.push(logprobs.last().clone());
        })?;
        events.push((self.id, BatchEvent::Prompt(measured)));
        Ok(end - done)
    }

    /// Stages at most `room` tokens of the prompt. Returns how many are added to the sequence.
    fn stage_prompt(&mut self, room: usize, events: &mut Events) -> Result<usize> {
        if self.decoder.cancel().is_cancelled() {
            return Ok(0);
        }
        self.tell_progress();
        let measured = self.measure_prompt(room, events)?;
        let Self { session, tokens, .. } = self;
        let left = &tokens[session.tokens().len()..];
        if measured > 0 || room == 0 {
            return Ok(measured);
        }
        self.is_prompt_open = true;
        session.stage_prompt(&left[..room.min(left.len())], left.len())
    }

    /// Ends a prompt that is computed completely.
    fn end_prompt(&mut self) -> Result<()> {
        if self.stop_reason.is_some() || !self.pending_tokens().is_empty() || !self.is_prompt_open {
            return Ok(());
        }
        self.is_prompt_open = false;
        self.tell_progress();
        self.session.end_prompt()
    }

    /// Stages the last sampled token, perhaps with a draft after it.
    fn stage_token(&mut self) -> Result<Stage> {
        match self.tokens[self.count_computed()..] {
            [token] => self.session.stage_token(token),
            _ => Ok(Stage::Computed),
        }
    }

    /// Stages the next token after accepting the tokens that a draft has already computed.
    fn stage_next_token(&mut self, accepting: DraftAcceptance, events: &mut Events) -> Result<()> {
        while self.stage_token()? == Stage::Computed && accepting == DraftAcceptance::AllAtOnce {
            self.add_next_token(events)?;
            if self.stop_reason.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// The task of sampling the next token, if its logits are there and it is wanted.
    fn sampling_task(&mut self) -> Option<SamplingTask<'_, 'a>> {
        let is_wanted = self.stop_reason.is_none() && self.pending_tokens().is_empty();
        let Self { session, decoder, tokens, sampled, .. } = self;
        (is_wanted && !decoder.reached_max_tokens()).then_some(SamplingTask {
            decoder,
            logits: session.logits(),
            history: tokens,
            sampled,
        })
    }

    /// Adds the next token to the text, if its logits are there.
    fn add_next_token(&mut self, events: &mut Events) -> Result<()> {
        if !self.pending_tokens().is_empty() {
            if self.decoder.cancel().is_cancelled() {
                self.end_with(StopReason::Interrupt, events);
            }
            return Ok(());
        }
        let token = match self.sampled.take() {
            Some(sampled) => sampled?,
            None => {
                self.session.check_logits()?;
                if self.decoder.reached_max_tokens() {
                    self.end_with(StopReason::Length, events);
                    return Ok(());
                }
                self.decoder.sample_token(self.session.logits(), &self.tokens)?
            }
        };
        self.tokens.push(token);
        self.session.set_rng(self.decoder.sampler().rng());
        let session = &self.session;
        let (text, reason) = self.decoder.push_token(token, || session.is_full());
        let logprobs = self.decoder.logprobs().cloned();
        events.push((self.id, BatchEvent::Piece(Piece { token: Some(token), text, logprobs })));
        if let Some(reason) = reason {
            self.end_with(reason, events);
        }
        Ok(())
    }

    /// Emits pending text and ends the generation.
    fn end_with(&mut self, reason: StopReason, events: &mut Events) {
        self.session.discard_drafts();
        self.stop_reason = Some(reason);
        let text = self.decoder.finish_text(reason);
        if !text.is_empty() {
            events.push((self.id, BatchEvent::Piece(Piece { token: None, text, logprobs: None })));
        }
        events.push((self.id, BatchEvent::Ended(reason)));
    }

    /// Marks the generation as ended after an error that ends the whole batch.
    pub fn give_up(&mut self) {
        self.stop_reason = Some(StopReason::Interrupt);
    }

    /// Ends this generation on its own error; returns errors of the device, which end the batch.
    fn fail_with(&mut self, e: Error, events: &mut Events) -> Result<()> {
        if !is_request_error(&e) {
            return Err(e);
        }
        self.give_up();
        events.push((self.id, BatchEvent::Failed(e)));
        Ok(())
    }
}

/// Events with the ids of their generations.
pub type Events = Vec<(usize, BatchEvent)>;

/// The task of sampling one token.
struct SamplingTask<'t, 'a> {
    decoder: &'t mut TokenDecoder<'a>,
    logits: &'t [f32],
    history: &'t [u32],
    sampled: &'t mut Option<Result<u32>>,
}

/// True for an error of one prompt, not of the device.
pub fn is_request_error(e: &Error) -> bool {
    matches!(e, Error::Usage(_) | Error::Model(_) | Error::Other(_))
}

/// Number of drafted tokens that a generation accepts in a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DraftAcceptance {
    /// One, so that the reader of the stream can intervene after each token.
    One,
    /// All, so that every generation takes part in every pass.
    AllAtOnce,
}

/// Generations that are computed together.
pub struct Batch<'a> {
    generations: Vec<Generation<'a>>,
    /// Maximum number of prompt tokens in a pass with other generations' tokens.
    pub prompt_budget: usize,
    /// Number of prompt tokens in the last pass.
    prompt_tokens: usize,
    accepting: DraftAcceptance,
    /// Threads for sampling if the device has none.
    pool: Pool,
}

impl<'a> Batch<'a> {
    /// An empty batch that samples on `threads` threads if the device has none.
    pub fn new(threads: usize) -> Self {
        Self {
            generations: Vec::new(),
            prompt_budget: usize::MAX,
            prompt_tokens: 0,
            accepting: DraftAcceptance::AllAtOnce,
            pool: Pool::new(threads),
        }
    }

    /// A batch of one generation, with one token per step.
    pub fn single(generation: Generation<'a>) -> Self {
        Self { generations: vec![generation], accepting: DraftAcceptance::One, ..Self::new(1) }
    }

    /// Adds a generation, which joins the next pass.
    pub fn push(&mut self, generation: Generation<'a>) {
        self.generations.push(generation);
    }

    /// All generations, ended ones included.
    pub fn generations(&self) -> &[Generation<'a>] {
        &self.generations
    }

    /// All generations.
    pub fn generations_mut(&mut self) -> &mut [Generation<'a>] {
        &mut self.generations
    }

    /// Takes a generation out.
    pub fn remove(&mut self, id: usize) -> Option<Generation<'a>> {
        let at = self.generations.iter().position(|g| g.id == id)?;
        Some(self.generations.remove(at))
    }

    /// Takes all generations out.
    pub fn clear(&mut self) {
        self.generations.clear();
    }

    /// Number of generations that are past their prompts.
    pub fn count_decoding(&self) -> usize {
        self.running().filter(|g| !g.is_prompt()).count()
    }

    /// Number of prompt tokens in the last pass.
    #[cfg(feature = "serve")]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn running(&self) -> impl Iterator<Item = &Generation<'a>> {
        self.generations.iter().filter(|g| g.stop_reason.is_none())
    }

    /// Computes one pass: a token of every generation and, in the remaining room, the next parts of prompts; then
    /// samples the next token of each. With a prompt budget of 0, some generation must be past its prompt.
    ///
    /// # Errors
    ///
    /// Errors of the device, which end the whole batch.
    pub fn step(&mut self, cancel: Option<&CancelToken>) -> Result<Events> {
        let mut events = self.compute_pass(cancel)?;
        self.sample_in_parallel();
        for generation in self.generations.iter_mut().filter(|g| g.stop_reason.is_none()) {
            generation.add_next_token(&mut events).or_else(|e| generation.fail_with(e, &mut events))?;
        }
        Ok(events)
    }

    /// Computes one pass without sampling: the first half of a step.
    ///
    /// # Errors
    ///
    /// Errors of [`Batch::step`].
    pub fn compute_pass(&mut self, cancel: Option<&CancelToken>) -> Result<Events> {
        let mut events = Events::new();
        self.stage_pass(&mut events)?;
        let running = self.generations.iter_mut().filter(|g| g.stop_reason.is_none());
        let mut sessions: SmallList<&mut Session> = running.map(|g| &mut *g.session).collect();
        match forward(&mut sessions, cancel) {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(e) => return Err(e),
        }
        drop(sessions);
        for generation in &mut self.generations {
            generation.end_prompt().or_else(|e| generation.fail_with(e, &mut events))?;
        }
        Ok(events)
    }

    /// Stages the tokens of the next pass.
    fn stage_pass(&mut self, events: &mut Events) -> Result<()> {
        let pass = self.running().next().map_or(0, |g| g.session.max_tokens());
        let mut room = pass.saturating_sub(self.count_decoding()).max(1).min(self.prompt_budget);
        self.prompt_tokens = 0;
        let Self { generations, prompt_tokens, accepting, .. } = self;
        for generation in generations.iter_mut().filter(|g| g.stop_reason.is_none()) {
            let staged = if generation.is_prompt() {
                generation.stage_prompt(room, events).inspect(|n| *prompt_tokens += n)
            } else {
                // The token itself is counted already.
                let staged = generation.stage_next_token(*accepting, events);
                staged.map(|()| generation.session.staged_tokens().saturating_sub(1))
            };
            match staged {
                Ok(staged) => room = room.saturating_sub(staged),
                Err(e) => generation.fail_with(e, events)?,
            }
        }
        Ok(())
    }

    /// Samples the next tokens of several generations in parallel: from a large vocabulary, sampling takes as long as a
    /// pass of a fast device. Tokens not sampled here, such as those with broken logits, are left to
    /// [`Generation::add_next_token`].
    fn sample_in_parallel(&mut self) {
        let Some(device) = self.running().next().map(|g| g.session.device()) else { return };
        let all = self.generations.iter_mut().filter_map(Generation::sampling_task);
        let all: SmallList<_> = all.map(Mutex::new).collect();
        if all.len() < 2 {
            return;
        }
        lock_device(&device).thread_pool().unwrap_or(&self.pool).run(all.len(), &|i| {
            let one = &mut *all[i].lock().unwrap_or_else(PoisonError::into_inner);
            if all_finite(one.logits) {
                *one.sampled = Some(one.decoder.sample_token(one.logits, one.history));
            }
        });
    }
}
