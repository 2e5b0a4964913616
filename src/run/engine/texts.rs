//! Texts that are generated together: one pass computes a token of each, and parts of prompts.

use super::Engine;
use super::writer::{End, TextParams, Writer};
use crate::model::device::locked;
use crate::run::session::{CancelToken, Few, Session, Stage, StopReason, compute};
use files::{Error, Result};
use numeric::pool::Pool;
use std::sync::{Mutex, PoisonError};
use text::sampler::{TokenLogprobs, all_finite};

/// What a token adds to a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// The token; `None` for text that was held back until the end.
    pub token: Option<u32>,
    /// What may be shown: whole characters, perhaps none yet.
    pub text: String,
    /// Of the token, where [`GenerateOptions::logprobs`] asks for it.
    pub logprobs: Option<TokenLogprobs>,
}

/// A text under way, with what its owner keeps beside it.
pub(super) struct Text<'a, T> {
    pub session: Session,
    /// Pieces that nobody has taken yet.
    pub pieces: Vec<Piece>,
    pub owner: T,
    writer: Writer<'a>,
    /// Of the prompt, then those sampled. What of them is computed is the session's.
    tokens: Vec<u32>,
    prompt: usize,
    /// The next token, or why there is none, where it was drawn beside those of other texts.
    drawn: Option<Result<u32>>,
}

impl<'a, T> Text<'a, T> {
    /// The text of a prompt, of which the session holds the first tokens, but never the last.
    ///
    /// # Errors
    ///
    /// Those of [`Session::begin_prompt`], and `Usage` for options that cannot be followed; with what was given.
    pub fn begin(
        engine: &'a Engine,
        mut session: Session,
        tokens: Vec<u32>,
        params: TextParams<'_>,
        owner: T,
    ) -> std::result::Result<Self, Box<(Error, Session, T)>> {
        let rest = tokens.get(session.tokens().len()..).unwrap_or_default();
        match session.begin_prompt(rest).and_then(|()| Writer::with(engine, params)) {
            Ok(writer) => {
                session.chosen_by(writer.sampler().options());
                let (prompt, pieces) = (tokens.len(), Vec::new());
                Ok(Self { session, pieces, owner, writer, tokens, prompt, drawn: None })
            }
            Err(e) => Err(Box::new((e, session, owner))),
        }
    }

    /// Tokens that are computed.
    pub fn done(&self) -> usize {
        self.session.tokens().len()
    }

    /// Which of its stop strings has ended it.
    #[cfg(feature = "serve")]
    pub fn stopped_by(&self) -> Option<usize> {
        self.writer.stopped_by()
    }

    /// Whether some of the prompt is not computed yet.
    pub fn is_prompt(&self) -> bool {
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

    /// The next token, where its logits are there and it is wanted.
    fn draw(&mut self) -> Option<Draw<'_, 'a>> {
        let is_wanted = self.done() == self.tokens.len() && !self.writer.is_spent();
        let Self { session, writer, tokens, drawn, .. } = self;
        is_wanted.then_some(Draw { writer, logits: session.logits(), history: tokens, drawn })
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
        let token = match self.drawn.take() {
            Some(drawn) => drawn?,
            None => {
                self.session.check_logits()?;
                if self.writer.is_spent() {
                    return Ok(Some(End::Flush(StopReason::Length)));
                }
                self.writer.sample(self.session.logits(), &self.tokens)?
            }
        };
        self.tokens.push(token);
        self.session.drawn_from(self.writer.sampler().rng());
        let session = &self.session;
        let (text, end) = self.writer.push(token, || session.is_full());
        let logprobs = self.writer.logprobs().cloned();
        self.pieces.push(Piece { token: Some(token), text, logprobs });
        Ok(end)
    }

    /// Why it ended, once the text that was held back is handed out.
    fn end(&mut self, end: End) -> StopReason {
        self.session.settle();
        match end {
            End::Done(reason) => reason,
            End::Flush(reason) => {
                let text = self.writer.finish();
                if !text.is_empty() {
                    self.pieces.push(Piece { token: None, text, logprobs: None });
                }
                reason
            }
        }
    }
}

/// A token that is to be drawn.
struct Draw<'t, 'a> {
    writer: &'t mut Writer<'a>,
    logits: &'t [f32],
    history: &'t [u32],
    drawn: &'t mut Option<Result<u32>>,
}

/// Draws several tokens, but none from broken logits.
fn draw_all(draws: &[Mutex<Draw<'_, '_>>], pool: &Pool) {
    if draws.len() > 1 {
        pool.run(draws.len(), &|i| {
            let draw = &mut *draws[i].lock().unwrap_or_else(PoisonError::into_inner);
            if all_finite(draw.logits) {
                *draw.drawn = Some(draw.writer.sample(draw.logits, draw.history));
            }
        });
    }
}

/// Whether an error is that of one prompt, not of the device.
pub(super) fn is_own(e: &Error) -> bool {
    matches!(e, Error::Usage(_) | Error::Model(_) | Error::Other(_))
}

/// The texts under way.
pub(super) struct Texts<'a, T> {
    pub all: Vec<Text<'a, T>>,
    /// Those that have ended, and why, or what went wrong with them alone. Somebody takes them.
    pub ended: Vec<(Text<'a, T>, Result<StopReason>)>,
    /// Draws tokens beside a device that has no threads.
    pool: Pool,
}

impl<T> Texts<'_, T> {
    /// None yet.
    pub fn new(engine: &Engine) -> Self {
        let o = &engine.options;
        let threads = if engine.device.is_some() { o.threads.min(o.sequences()) } else { 1 };
        Self { all: Vec::new(), ended: Vec::new(), pool: Pool::new(threads) }
    }

    /// Texts whose prompts are computed.
    pub fn decoding(&self) -> usize {
        self.all.iter().filter(|text| !text.is_prompt()).count()
    }

    /// One pass: a token of every text, and with the room that is left the next parts of prompts, at most `most` tokens
    /// of them; how many these were. With 0 some text must be no prompt.
    ///
    /// # Errors
    ///
    /// What goes wrong with the device, which ends all.
    pub fn step(&mut self, most: usize, cancel: Option<&CancelToken>) -> Result<usize> {
        let pass = self.all.first().map_or(0, |text| text.session.max_tokens());
        let mut room = pass.saturating_sub(self.decoding()).max(1).min(most);
        let mut prompts = 0;
        let mut i = 0;
        while i < self.all.len() {
            // The next token of a text is counted already.
            let is_prompt = self.all[i].is_prompt();
            match self.all[i].stage(room) {
                Ok(None) => {
                    let staged = self.all[i].session.staged();
                    room = room.saturating_sub(staged.saturating_sub(usize::from(!is_prompt)));
                    prompts += if is_prompt { staged } else { 0 };
                    i += 1;
                }
                Ok(Some(end)) => self.end(i, end),
                Err(e) => self.fail(i, e)?,
            }
        }
        let mut sessions: Few<&mut Session> = self.all.iter_mut().map(|text| &mut text.session).collect();
        let computed = compute(&mut sessions, cancel);
        drop(sessions);
        match computed {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(e) => return Err(e),
        }
        self.draw();
        let mut i = 0;
        while i < self.all.len() {
            match self.all[i].advance() {
                Ok(None) => i += 1,
                Ok(Some(end)) => self.end(i, end),
                Err(e) => self.fail(i, e)?,
            }
        }
        Ok(prompts)
    }

    /// Draws the next tokens of several texts at the same time: from a large vocabulary, that takes as long as a pass of a
    /// fast device. What is not drawn here, as after Ctrl-C, is drawn later.
    fn draw(&mut self) {
        let Some(device) = self.all.first().map(|text| text.session.device()) else { return };
        let draws: Few<_> = self.all.iter_mut().filter_map(Text::draw).map(Mutex::new).collect();
        draw_all(&draws, locked(&device).pool().unwrap_or(&self.pool));
    }

    /// A text has ended.
    fn end(&mut self, text: usize, end: End) {
        let mut text = self.all.remove(text);
        let reason = text.end(end);
        self.ended.push((text, Ok(reason)));
    }

    /// What goes wrong with one text ends that one; what goes wrong with the device ends all.
    fn fail(&mut self, text: usize, e: Error) -> Result<()> {
        if !is_own(&e) {
            return Err(e);
        }
        let text = self.all.remove(text);
        self.ended.push((text, Err(e)));
        Ok(())
    }

    /// What asks the first of them to stop.
    pub fn first_cancel(&self) -> Option<CancelToken> {
        self.all.first().map(|text| text.writer.cancel().clone())
    }
}
