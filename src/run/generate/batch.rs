//! The generation loop: one pass computes the next tokens of all generations, and parts of prompts beside them; then the
//! next token of each is sampled. A stream is a batch of one.

use super::decoder::TokenDecoder;
use crate::model::device::locked;
use crate::run::session::{CancelToken, Few, MEASURED, Session, Stage, StopReason, forward};
use files::{Error, Result};
use numeric::pool::Pool;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};
use text::sampler::{Logprobs, TokenLogprobs, all_finite};

/// A token's part of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// The token; `None` for text that was held back until the end.
    pub token: Option<u32>,
    /// Text that may be shown: whole characters, perhaps none yet.
    pub text: String,
    /// Of the token, where [`GenerateOptions::logprobs`](crate::GenerateOptions::logprobs) asks for it.
    pub logprobs: Option<TokenLogprobs>,
}

/// Something that came of a generation in a step.
#[derive(Debug, Clone, PartialEq)]
pub enum BatchEvent {
    /// Log-probabilities of the next tokens of the prompt; the first one has none.
    Prompt(Vec<TokenLogprobs>),
    /// A token of the text.
    Piece(Piece),
    /// The last event.
    Ended(StopReason),
    /// The last event: what went wrong with this generation alone.
    Failed(Error),
}

/// A session of the generation's own, or a caller's.
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

/// One text under way: a session, and the decoder that makes text of its tokens.
pub struct Generation<'a> {
    /// Its number among the caller's.
    pub id: usize,
    pub session: SessionRef<'a>,
    pub decoder: TokenDecoder<'a>,
    /// Ids of the prompt, then those sampled. The session has computed the first ones.
    tokens: Vec<u32>,
    /// The first tokens, which are computed as a prompt.
    prompt: usize,
    /// True once a part of the prompt was computed since its last end.
    is_prompt_open: bool,
    /// Tokens of the prompt that progress does not count.
    uncounted: usize,
    /// The next token, or why there is none, where it was sampled beside those of other texts.
    sampled: Option<Result<u32>>,
    /// Measures the tokens of the prompt, where that is wanted.
    prompt_logprobs: Option<Logprobs>,
    stop_reason: Option<StopReason>,
}

impl<'a> Generation<'a> {
    /// The text of a prompt of which the session holds the first tokens, after [`Session::begin_prompt`].
    pub fn new(
        id: usize,
        mut session: SessionRef<'a>,
        decoder: TokenDecoder<'a>,
        prompt: Vec<u32>,
    ) -> Generation<'a> {
        session.set_sampler(decoder.sampler().options());
        let held = session.tokens().len();
        // One token is computed as a sampled one is, so that a text that was cut continues as if it had not been.
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
            prompt_logprobs: None,
            stop_reason: None,
        }
    }

    /// Measures the tokens of its prompt, where that is wanted, and tells of progress from the first one on, also where one
    /// token is left.
    #[cfg(feature = "serve")]
    pub fn with_prompt_logprobs(self, logprobs: Option<Logprobs>) -> Self {
        let prompt = self.tokens.len();
        Self { prompt_logprobs: logprobs, uncounted: 0, prompt, ..self }
    }

    /// Why it ended, once it has.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Tokens of the text that are not computed: the last one sampled, or what is left of a prompt.
    pub fn uncomputed(&self) -> &[u32] {
        &self.tokens[self.computed()..]
    }

    /// Tokens that are computed.
    fn computed(&self) -> usize {
        self.session.tokens().len().min(self.tokens.len())
    }

    /// True if tokens are computed as a prompt next: a part of the prompt, or what a lost device had.
    fn is_prompt(&self) -> bool {
        self.computed() < self.prompt || self.uncomputed().len() > 1
    }

    fn tell_progress(&self) {
        let count = |tokens: usize| tokens.saturating_sub(self.uncounted);
        self.decoder.tell_progress(count(self.computed()), count(self.tokens.len()));
    }

    /// Computes the next tokens of a prompt that is to be measured, at most `room`, but never its last: how many.
    fn measure_prompt(&mut self, room: usize, events: &mut Events) -> Result<usize> {
        let Self { session, tokens, prompt, prompt_logprobs: Some(logprobs), .. } = self else {
            return Ok(0);
        };
        let done = session.tokens().len();
        let end = prompt.saturating_sub(1).min(done + room.min(MEASURED));
        if done >= end {
            return Ok(0);
        }
        let mut measured = Vec::with_capacity(end - done);
        session.logits_of_part(&tokens[done..end], *prompt - done, |i, row| {
            logprobs.take(row, tokens[done + i + 1]);
            measured.push(logprobs.last().clone());
        })?;
        events.push((self.id, BatchEvent::Prompt(measured)));
        Ok(end - done)
    }

    /// Stages the next tokens of the prompt, at most `room`: how many join the sequence.
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

    /// Ends a prompt, once all of it is computed.
    fn end_prompt(&mut self) -> Result<()> {
        if self.stop_reason.is_some() || !self.uncomputed().is_empty() || !self.is_prompt_open {
            return Ok(());
        }
        self.is_prompt_open = false;
        self.tell_progress();
        self.session.end_prompt()
    }

    /// Stages the token that was sampled last, and perhaps a draft after it.
    fn stage_token(&mut self) -> Result<Stage> {
        match self.tokens[self.computed()..] {
            [token] => self.session.stage_token(token),
            _ => Ok(Stage::Computed),
        }
    }

    /// Stages the next token, after those that a draft has computed already.
    fn stage_next_token(&mut self, accepting: Accepting, events: &mut Events) -> Result<()> {
        while self.stage_token()? == Stage::Computed && accepting == Accepting::AllAtOnce {
            self.advance(events)?;
            if self.stop_reason.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// The next token, where its logits are there and it is wanted.
    fn sampling(&mut self) -> Option<Sampling<'_, 'a>> {
        let is_wanted = self.stop_reason.is_none() && self.uncomputed().is_empty();
        let Self { session, decoder, tokens, sampled, .. } = self;
        (is_wanted && !decoder.reached_max_tokens()).then_some(Sampling {
            decoder,
            logits: session.logits(),
            history: tokens,
            sampled,
        })
    }

    /// Adds the next token to the text, where its logits are there.
    fn advance(&mut self, events: &mut Events) -> Result<()> {
        if !self.uncomputed().is_empty() {
            if self.decoder.cancel().is_cancelled() {
                self.end(StopReason::Interrupt, events);
            }
            return Ok(());
        }
        let token = match self.sampled.take() {
            Some(sampled) => sampled?,
            None => {
                self.session.check_logits()?;
                if self.decoder.reached_max_tokens() {
                    self.end(StopReason::Length, events);
                    return Ok(());
                }
                self.decoder.sample(self.session.logits(), &self.tokens)?
            }
        };
        self.tokens.push(token);
        self.session.set_rng(self.decoder.sampler().rng());
        let session = &self.session;
        let (text, reason) = self.decoder.push(token, || session.is_full());
        let logprobs = self.decoder.logprobs().cloned();
        events.push((self.id, BatchEvent::Piece(Piece { token: Some(token), text, logprobs })));
        if let Some(reason) = reason {
            self.end(reason, events);
        }
        Ok(())
    }

    /// Ends the text, once what was held back is handed out.
    fn end(&mut self, reason: StopReason, events: &mut Events) {
        self.session.discard_drafts();
        self.stop_reason = Some(reason);
        let text = self.decoder.finish(reason);
        if !text.is_empty() {
            events.push((self.id, BatchEvent::Piece(Piece { token: None, text, logprobs: None })));
        }
        events.push((self.id, BatchEvent::Ended(reason)));
    }

    /// Ends it at an error that ends all.
    pub fn give_up(&mut self) {
        self.stop_reason = Some(StopReason::Interrupt);
    }

    /// Ends with what went wrong with this text alone; what goes wrong with the device ends all.
    fn fail(&mut self, e: Error, events: &mut Events) -> Result<()> {
        if !is_request_error(&e) {
            return Err(e);
        }
        self.give_up();
        events.push((self.id, BatchEvent::Failed(e)));
        Ok(())
    }
}

/// Events, each with the number of its generation.
pub type Events = Vec<(usize, BatchEvent)>;

/// A token that is to be sampled.
struct Sampling<'t, 'a> {
    decoder: &'t mut TokenDecoder<'a>,
    logits: &'t [f32],
    history: &'t [u32],
    sampled: &'t mut Option<Result<u32>>,
}

/// True for an error of one prompt, not of the device.
pub fn is_request_error(e: &Error) -> bool {
    matches!(e, Error::Usage(_) | Error::Model(_) | Error::Other(_))
}

/// Drafted tokens that a text accepts in a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Accepting {
    /// One, so that whoever reads the text can go on otherwise after each token.
    One,
    /// All, so that the text is in every pass.
    AllAtOnce,
}

/// Generations that are computed together.
pub struct Batch<'a> {
    generations: Vec<Generation<'a>>,
    /// Most tokens of prompts in a pass beside the tokens of others.
    pub prompt_budget: usize,
    /// Tokens of prompts in the last pass.
    prompt_tokens: usize,
    accepting: Accepting,
    /// Samples tokens beside a device that has no threads.
    pool: Pool,
}

impl<'a> Batch<'a> {
    /// An empty batch, which samples with so many threads beside a device that has none.
    pub fn new(threads: usize) -> Self {
        Self {
            generations: Vec::new(),
            prompt_budget: usize::MAX,
            prompt_tokens: 0,
            accepting: Accepting::AllAtOnce,
            pool: Pool::new(threads),
        }
    }

    /// A batch of one, which has one token in each step.
    pub fn of_one(generation: Generation<'a>) -> Self {
        Self { generations: vec![generation], accepting: Accepting::One, ..Self::new(1) }
    }

    /// Adds a generation, which joins the next pass.
    pub fn push(&mut self, generation: Generation<'a>) {
        self.generations.push(generation);
    }

    /// All generations, those that have ended included.
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

    /// Generations whose prompts are computed.
    pub fn decoding(&self) -> usize {
        self.running().filter(|g| !g.is_prompt()).count()
    }

    /// Tokens of prompts in the last pass.
    #[cfg(feature = "serve")]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn running(&self) -> impl Iterator<Item = &Generation<'a>> {
        self.generations.iter().filter(|g| g.stop_reason.is_none())
    }

    /// One pass: a token of every generation, and with the room that is left the next parts of prompts; then the next
    /// token of each. What came of it. With a prompt budget of 0 some generation must be no prompt.
    ///
    /// # Errors
    ///
    /// Errors of the device, which end all.
    pub fn step(&mut self, cancel: Option<&CancelToken>) -> Result<Events> {
        let mut events = self.compute(cancel)?;
        self.sample();
        for generation in self.generations.iter_mut().filter(|g| g.stop_reason.is_none()) {
            generation.advance(&mut events).or_else(|e| generation.fail(e, &mut events))?;
        }
        Ok(events)
    }

    /// The first half of a step: one pass, after which no token is sampled. What came of it.
    ///
    /// # Errors
    ///
    /// See [`Batch::step`].
    pub fn compute(&mut self, cancel: Option<&CancelToken>) -> Result<Events> {
        let mut events = Events::new();
        self.stage(&mut events)?;
        let running = self.generations.iter_mut().filter(|g| g.stop_reason.is_none());
        let mut sessions: Few<&mut Session> = running.map(|g| &mut *g.session).collect();
        match forward(&mut sessions, cancel) {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(e) => return Err(e),
        }
        drop(sessions);
        for generation in &mut self.generations {
            generation.end_prompt().or_else(|e| generation.fail(e, &mut events))?;
        }
        Ok(events)
    }

    /// Stages what the next pass computes.
    fn stage(&mut self, events: &mut Events) -> Result<()> {
        let pass = self.running().next().map_or(0, |g| g.session.max_tokens());
        let mut room = pass.saturating_sub(self.decoding()).max(1).min(self.prompt_budget);
        self.prompt_tokens = 0;
        let Self { generations, prompt_tokens, accepting, .. } = self;
        for generation in generations.iter_mut().filter(|g| g.stop_reason.is_none()) {
            let staged = if generation.is_prompt() {
                generation.stage_prompt(room, events).inspect(|n| *prompt_tokens += n)
            } else {
                // The token itself is counted already.
                let staged = generation.stage_next_token(*accepting, events);
                staged.map(|()| generation.session.staged().saturating_sub(1))
            };
            match staged {
                Ok(staged) => room = room.saturating_sub(staged),
                Err(e) => generation.fail(e, events)?,
            }
        }
        Ok(())
    }

    /// Samples the next tokens of several texts at the same time: from a large vocabulary, that takes as long as a pass of
    /// a fast device. None is sampled from broken logits. What is not sampled here, as after Ctrl-C, is sampled later.
    fn sample(&mut self) {
        let Some(device) = self.running().next().map(|g| g.session.device()) else { return };
        let all = self.generations.iter_mut().filter_map(Generation::sampling);
        let all: Few<_> = all.map(Mutex::new).collect();
        if all.len() < 2 {
            return;
        }
        locked(&device).pool().unwrap_or(&self.pool).run(all.len(), &|i| {
            let one = &mut *all[i].lock().unwrap_or_else(PoisonError::into_inner);
            if all_finite(one.logits) {
                *one.sampled = Some(one.decoder.sample(one.logits, one.history));
            }
        });
    }
}
