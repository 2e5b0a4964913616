//! One sequence of tokens on one backend: prefill, decode, rewind, and why a generation ended.

mod sequence;

pub use sequence::{Cut, Observed, Sequence};

use crate::backend::{Backend, Logits};
use crate::dims::VOCAB;
use crate::error::{Error, Result};
use crate::trace::Recorder;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks a running generation to end; may be shared between threads.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Forgets an earlier request.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// The flag itself, for a signal handler.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// Is told, in one line, what somebody should know.
pub type Notice = fn(&str);

/// Makes another backend for a sequence whose device is lost.
pub type Spare = Box<dyn FnOnce() -> Result<Box<dyn Backend>> + Send>;
/// Rows of logits held at a time where those of every token are asked for; 64 rows of a 128k vocabulary are 32 MiB.
pub const ROWS: usize = 64;

/// A sequence: its tokens, its cache on a backend, the logits of its last token.
pub struct Session {
    backend: Box<dyn Backend>,
    tokens: Vec<u32>,
    /// RoPE position of the next token; more than the slots in use once slots were evicted.
    pos: usize,
    /// `[VOCAB]`, of the last token computed with logits.
    logits: Vec<f32>,
    /// Where to go on when the device is lost, and who is told.
    spare: Option<(Spare, Notice)>,
}

impl Session {
    /// An empty sequence on a backend with an empty cache.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        // Room for all ids at once, so that no token grows the list.
        let tokens = Vec::with_capacity(backend.capacity());
        Self { backend, tokens, pos: 0, logits: vec![0.0; VOCAB], spare: None }
    }

    /// Goes on on another backend when this one's device is lost, after one line to `notice`.
    pub fn with_spare(mut self, spare: Spare, notice: Notice) -> Self {
        self.spare = Some((spare, notice));
        self
    }

    /// Appends `tokens`, at most as many as the backend takes at once; on the spare if the device is lost.
    fn append(&mut self, tokens: &[u32], mut out: Logits<'_>) -> Result<()> {
        let again = match &mut out {
            Logits::None => Logits::None,
            Logits::Last(logits) => Logits::Last(logits),
            Logits::All(logits) => Logits::All(logits),
        };
        match (self.backend.forward(tokens, self.pos, again), self.spare.take()) {
            (Err(Error::Device(why)), Some((spare, notice))) => {
                notice(&format!("{why}; going on on the CPU"));
                self.replace(spare()?)?;
                self.backend.forward(tokens, self.pos, out)?;
            }
            (result, spare) => {
                self.spare = spare;
                result?;
            }
        }
        self.pos += tokens.len();
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// [`Session::append`] with the logits of the last token.
    fn append_last(&mut self, tokens: &[u32]) -> Result<()> {
        let mut logits = std::mem::take(&mut self.logits);
        let result = self.append(tokens, Logits::Last(&mut logits));
        self.logits = logits;
        result
    }

    /// Moves the sequence to an empty backend: its tokens are computed again, which gives what that backend alone
    /// would have.
    fn replace(&mut self, backend: Box<dyn Backend>) -> Result<()> {
        if self.backend.len() != self.tokens.len() {
            return Err(Error::Device("a sequence with evicted slots cannot move to the CPU".into()));
        }
        self.backend = backend;
        let step = self.backend.max_tokens();
        let mut chunks = self.tokens.chunks(step).enumerate();
        chunks.try_for_each(|(i, chunk)| self.backend.forward(chunk, i * step, Logits::None))
    }

    /// Appends tokens and computes the logits of the last. Between chunks of the backend's size, looks at
    /// `cancel`; what was computed by then stays.
    pub fn prefill(&mut self, tokens: &[u32], cancel: &CancelToken) -> Result<()> {
        self.prefill_with(tokens, cancel, |_, _| {})
    }

    /// [`Session::prefill`] that tells `progress` before each chunk the tokens done and all tokens, and at the
    /// end that all are done.
    pub fn prefill_with(
        &mut self,
        tokens: &[u32],
        cancel: &CancelToken,
        progress: impl Fn(usize, usize),
    ) -> Result<()> {
        self.check(tokens)?;
        let step = self.backend.max_tokens();
        let last = tokens.len().div_ceil(step).saturating_sub(1);
        for (i, chunk) in tokens.chunks(step).enumerate() {
            progress(i * step, tokens.len());
            if cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
            if i == last {
                self.append_last(chunk)?;
            } else {
                self.append(chunk, Logits::None)?;
            }
        }
        progress(tokens.len(), tokens.len());
        self.check_logits()
    }

    /// Appends one token and computes its logits.
    pub fn decode(&mut self, token: u32) -> Result<()> {
        self.check(&[token])?;
        self.append_last(&[token])?;
        self.check_logits()
    }

    /// Appends tokens and hands the logits of every one to `each(index, logits)`.
    pub fn logits_of_all(&mut self, tokens: &[u32], mut each: impl FnMut(usize, &[f32])) -> Result<()> {
        self.check(tokens)?;
        let step = self.backend.max_tokens().min(ROWS);
        let mut rows = vec![0.0f32; step.min(tokens.len()) * VOCAB];
        for (i, chunk) in tokens.chunks(step).enumerate() {
            let rows = &mut rows[..chunk.len() * VOCAB];
            self.append(chunk, Logits::All(rows))?;
            rows.chunks_exact(VOCAB).enumerate().for_each(|(j, row)| each(i * step + j, row));
        }
        Ok(())
    }

    /// Tokens must be in the vocabulary and their slots free.
    fn check(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::Usage("the prompt is empty; give at least one token".into()));
        }
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= VOCAB) {
            return Err(Error::Usage(format!("token id {id}: the vocabulary ends at {}", VOCAB - 1)));
        }
        let (need, have) = (self.backend.len() + tokens.len(), self.backend.capacity());
        if need > have {
            return Err(Error::Usage(format!(
                "the prompt needs {need} positions but the context has {have}; raise --max-seq-len or shorten the prompt"
            )));
        }
        Ok(())
    }

    fn check_logits(&self) -> Result<()> {
        // Without an early exit, which would cost more than it saves: this way it vectorises.
        match self.logits.iter().fold(true, |finite, x| finite & x.is_finite()) {
            true => Ok(()),
            false => Err(Error::Model("the model computes NaN or infinity; its weights are broken".into())),
        }
    }

    /// Logits of the last token: `[VOCAB]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Every token of the sequence, evicted ones included.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// RoPE position of the next token.
    pub fn position(&self) -> usize {
        self.pos
    }

    /// Free slots.
    pub fn room(&self) -> usize {
        self.backend.capacity() - self.backend.len()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.backend.set_len(0);
        self.tokens.clear();
        self.pos = 0;
    }

    /// Keeps the first `len` tokens.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        if self.backend.len() != self.tokens.len() || len > self.tokens.len() {
            return Err(Error::Usage(format!("cannot rewind to token {len} of {}", self.tokens.len())));
        }
        self.backend.set_len(len);
        self.tokens.truncate(len);
        self.pos = len;
        Ok(())
    }

    /// Makes the sequence begin as `tokens` does: keeps the longest common prefix and returns what is
    /// left to prefill, at least the last token, so that its logits are there afterwards.
    pub fn reuse<'t>(&mut self, tokens: &'t [u32]) -> Result<&'t [u32]> {
        let common = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let common = common.min(tokens.len().saturating_sub(1));
        self.rewind(common)?;
        Ok(&tokens[common..])
    }

    /// Changes the number of slots; filled ones stay.
    pub fn resize(&mut self, slots: usize) -> Result<()> {
        self.backend.resize(slots)
    }

    /// The backend, for reports.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Starts or ends recording; see [`Backend::record`].
    pub fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder> {
        self.backend.record(recorder)
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// An end-of-sequence token.
    Eos,
    /// A stop string.
    Stop,
    /// As many tokens as asked for.
    Length,
    /// No slot left.
    Context,
    /// Cancelled.
    Interrupt,
}

impl StopReason {
    /// The word printed after `stop:`.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::Eos => "eos",
            StopReason::Stop => "stop",
            StopReason::Length => "length",
            StopReason::Context => "context",
            StopReason::Interrupt => "interrupt",
        }
    }
}
