//! One sequence of tokens on one device: computes prompts and single tokens, verifies drafts, evicts from a full cache.

mod checks;
mod draft;
mod event;
mod evictor;
mod pass;
mod rows;
mod sequence;

pub use super::options::{FixedSchedule, Notice, Side};
pub use super::placement::Switch;
pub use draft::DraftCounts;
pub use event::{EvictionReason, EvictionResult, Observer, SessionEvent, StopReason};
pub(crate) use pass::SmallList;
pub use pass::{Stage, forward};
pub use sequence::{PastEviction, Sequence};

use crate::dims::{HAS_STATE, VOCAB};
use crate::model::device::{Extent, Logits, LogitsBuffer, Run, SharedDevice, lock_device};
use crate::model::trace::Trace;
use crate::run::eviction::{Eviction, Policy};
use crate::run::placement::{DeviceCache, Placement, RunPosition, TokenKind};
use draft::Drafter;
use evictor::{AppendKind, Evictor};
use files::{Error, Result};
pub use numeric::cancel::CancelToken;
use pass::{LogitsWanted, PendingPass};
use std::time::Instant;
use text::sampler::{Rng, SamplerOptions};

/// Rows of logits in memory at once when every token's are asked for; 64 rows of a 128k vocabulary are 32 MiB.
pub const LOGITS_ROWS: usize = 64;

/// Tokens of a prompt from which on its last one is worth a pass of its own: see [`Session::stage_prompt`].
const LAST_TOKEN_APART: usize = 64;

/// Prompt tokens whose logits a server computes at once.
pub(crate) const PROMPT_LOGITS_ROWS: usize = 16;

/// A sequence: its tokens, its KV cache on a device, and the logits of its last token.
///
/// ```
/// use antigravity::session::CancelToken;
/// use antigravity::{Engine, EngineOptions};
///
/// let engine = Engine::load(EngineOptions { max_seq_len: 64, ..EngineOptions::new(antigravity::dims::MODEL_DIR) })?;
/// let mut session = engine.session()?;
/// let prompt = engine.encode("Once upon a time")?;
/// session.prefill(&prompt, &CancelToken::default())?;
///
/// // Greedy decoding by hand: the caller chooses from the logits.
/// for _ in 0..4 {
///     let best = session.logits().iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
///     let token = best.map_or(0, |(id, _)| id as u32);
///     session.decode(token)?;
/// }
/// assert_eq!(session.position(), prompt.len() + 4);
///
/// session.rewind(prompt.len())?; // another answer to the same prompt
/// session.resize(128)?; // more slots; filled ones stay
/// assert_eq!((session.slots(), session.extent().slots), (prompt.len(), 128));
/// session.clear();
/// assert!(session.tokens().is_empty());
/// # Ok::<(), antigravity::Error>(())
/// ```
pub struct Session {
    /// The device that computes the sequence, with its KV cache.
    device_cache: DeviceCache,
    /// Other devices to switch to, or to fall back to when this one is lost.
    placement: Option<Box<Placement>>,
    /// All tokens, evicted ones included: their number is the next RoPE position.
    tokens: Vec<u32>,
    /// Logits of the last token that was computed with logits.
    logits: LogitsBuffer,
    /// Chooses slots to evict; without it, a full cache ends the generation.
    evictor: Option<Evictor>,
    /// Evictions so far.
    evictions: Vec<PastEviction>,
    /// After an eviction: number of leading tokens that are still in slots `0..prefix`.
    prefix: usize,
    /// First token from which on all are in the last slots, in order, in every head.
    dense: usize,
    /// Proposes likely next tokens, which are computed ahead.
    drafter: Option<Drafter>,
    /// Tokens of the next pass.
    pending: PendingPass,
    observer: Option<Observer>,
    /// Interrupts the current computation.
    cancel: Option<CancelToken>,
}

impl Session {
    /// An empty sequence on a device, with an empty cache there.
    pub fn new(here: DeviceCache) -> Self {
        // Room for all ids, so that no token reallocates the list.
        let tokens = Vec::with_capacity(here.extent().slots);
        let logits: LogitsBuffer = Box::new(vec![0.0; VOCAB]);
        let logits = lock_device(&here.device()).logits_buffer(&logits).unwrap_or(logits);
        Self {
            device_cache: here,
            placement: None,
            tokens,
            logits,
            evictor: None,
            evictions: Vec::new(),
            prefix: 0,
            dense: 0,
            drafter: None,
            pending: PendingPass::default(),
            observer: None,
            cancel: None,
        }
    }

    /// Limits the number of checkpoints of an empty sequence's recurrent state.
    pub fn with_checkpoints(mut self, most: usize) -> Self {
        self.device_cache.limit_checkpoints(most);
        self
    }

    /// Lets `placement` move the sequence between devices.
    pub fn with_placement(self, placement: Placement) -> Self {
        Self { placement: Some(Box::new(placement)), ..self }
    }

    /// Evicts slots by these settings instead of ending when the cache is full.
    ///
    /// # Errors
    ///
    /// `Usage` if the cache is too small for them, `Memory` if there is no memory for the attention mass.
    pub fn with_eviction(mut self, eviction: Eviction) -> Result<Self> {
        if eviction.policy != Policy::None {
            self.evictor = Some(Evictor::new(eviction, self.extent().slots)?);
            self.prepare_eviction()?;
        }
        Ok(self)
    }

    /// Protects the first `tokens` tokens, such as a system message, from eviction, up to half of the window. Ignored
    /// if [`Eviction::prefix`] is set.
    pub fn protect_prefix(&mut self, tokens: usize) {
        if let Some(evictor) = &mut self.evictor {
            evictor.protect_prefix(tokens);
        }
    }

    /// Drafts up to `most` tokens at a time. Tokens and logits stay the same on devices that compute the same bits for
    /// one token as for several, like the CPU.
    ///
    /// # Errors
    ///
    /// `Usage` if the eviction policy looks at attention, which drafted tokens would distort; `Memory`.
    pub fn with_drafts(mut self, most: usize) -> Result<Self> {
        if self.observes_attention() {
            return Err(Error::Usage(format!(
                "`EngineOptions::draft` {most}: not possible with an `Eviction::policy` that looks at attention; use sliding or none"
            )));
        }
        self.drafter = (most > 0).then(|| Drafter::new(most)).transpose()?;
        Ok(self)
    }

    /// Sets the sampler settings that a draft model uses too.
    pub(crate) fn set_sampler(&mut self, sampler: &SamplerOptions) {
        if let Some(drafter) = &mut self.drafter {
            drafter.set_sampler(sampler);
        }
    }

    /// Sets the random state that a draft model samples with too.
    pub(crate) fn set_rng(&mut self, random: &Rng) {
        if let Some(drafter) = &mut self.drafter {
            drafter.set_rng(random);
        }
    }

    /// Calls `observer` after every eviction and device switch.
    pub fn set_observer(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    fn report_event(&mut self, mark: &str, event: SessionEvent) {
        self.device_cache.mark_trace(mark);
        if let Some(observer) = &mut self.observer {
            observer(&event);
        }
    }

    /// Replaces the sequence by `prompt` and computes the logits of its last token. Reuses the longest common prefix
    /// (or the part of it that is not evicted) and computes the rest. Returns `Interrupted` soon after `cancel` is
    /// cancelled, also within a pass; tokens computed before stay.
    pub fn sync_prompt(&mut self, prompt: &[u32], cancel: &CancelToken) -> Result<()> {
        let held = self.reuse_prefix(prompt)?;
        self.prefill(&prompt[held..], cancel)
    }

    /// Appends tokens and computes the logits of the last. Can be cancelled like [`Session::sync_prompt`].
    pub fn prefill(&mut self, tokens: &[u32], cancel: &CancelToken) -> Result<()> {
        self.with_cancel(Some(cancel), |session| session.place_prompt(tokens))?;
        let mut left = tokens;
        while !left.is_empty() {
            if cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
            let n = self.stage_prompt(left, left.len())?;
            forward(&mut [self], Some(cancel))?;
            left = &left[n..];
        }
        self.end_prompt()
    }

    /// Begins a prompt that is computed in parts. Returns how many of its first tokens are reused, never the last.
    pub fn begin_prompt(&mut self, prompt: &[u32]) -> Result<usize> {
        let held = self.reuse_prefix(prompt)?;
        self.pending.known = prompt.len();
        self.place_prompt(&prompt[held..])?;
        Ok(held)
    }

    /// Checks the tokens of a prompt and moves the sequence to the device that computes them.
    fn place_prompt(&mut self, tokens: &[u32]) -> Result<()> {
        self.check_tokens(tokens)?;
        self.discard_drafts();
        self.place_tokens(TokenKind::Prompt(tokens.len()))
    }

    /// Stages as many of `tokens` as there is room for, and returns their number. They are the next of the prompt's
    /// remaining `left` tokens, of which only the last one's logits are computed.
    pub fn stage_prompt(&mut self, tokens: &[u32], left: usize) -> Result<usize> {
        self.place_tokens(TokenKind::PromptPart)?;
        let n = self.make_room(tokens.len(), AppendKind::Prompt(left))?;
        // The last token in a pass of its own, so that another answer to the prompt begins at a checkpoint before it.
        let apart = HAS_STATE && n == left && left > LAST_TOKEN_APART;
        let n = n - usize::from(apart);
        self.pending.saves_state = apart;
        self.pending.tokens.clear();
        self.pending.tokens.extend_from_slice(&tokens[..n]);
        self.pending.known = self.tokens.len() + left;
        self.pending.logits = if n == left { LogitsWanted::Last } else { LogitsWanted::Nothing };
        Ok(n)
    }

    /// Ends a prompt that is computed completely.
    pub fn end_prompt(&mut self) -> Result<()> {
        self.evict_after_prompt()?;
        let last = self.tokens.len().saturating_sub(1);
        if self.device_cache.known_states(last).next() != Some(last) {
            self.device_cache.save_checkpoint()?;
        }
        self.check_logits()
    }

    /// Appends one token and computes its logits, unless a draft already has: see [`Session::with_drafts`]. Returns
    /// `Interrupted` soon after `cancel` is cancelled; then the token is not appended.
    pub fn step(&mut self, token: u32, cancel: Option<&CancelToken>) -> Result<()> {
        if self.with_cancel(cancel, |session| session.stage_token(token))? == Stage::Staged {
            forward(&mut [self], cancel)?;
        }
        self.check_logits()
    }

    /// [`Session::step`] without a cancel token.
    pub fn decode(&mut self, token: u32) -> Result<()> {
        self.step(token, None)
    }

    /// Stages the next token, perhaps with a draft after it, unless an earlier draft has computed it already.
    pub fn stage_token(&mut self, token: u32) -> Result<Stage> {
        self.check_tokens(&[token])?;
        if self.accept_drafted(token)? {
            return Ok(Stage::Computed);
        }
        self.place_tokens(TokenKind::Token)?;
        self.make_room(1, AppendKind::Open)?;
        self.propose_draft(token);
        Ok(Stage::Staged)
    }

    /// Accepts `token` if it is the draft's next one; otherwise discards the draft.
    fn accept_drafted(&mut self, token: u32) -> Result<bool> {
        let (slots, Some(drafter)) = (self.slots(), &mut self.drafter) else { return Ok(false) };
        // If slots must be evicted first, the token is computed after that.
        let stays = |e: &mut Evictor| {
            e.watch_memory(slots, 1);
            e.eviction_reason(slots, AppendKind::Open).is_none()
        };
        if drafter.expects_token(token) && self.evictor.as_mut().is_none_or(stays) {
            self.logits.copy_from_slice(drafter.accept_token());
            self.tokens.push(token);
            return Ok(true);
        }
        let outcome = drafter.take_outcome();
        self.discard_drafts();
        let began = Instant::now();
        self.rebuild_state()?;
        if let Some(drafter) = &mut self.drafter {
            drafter.learn_from_pass(outcome, began.elapsed());
        }
        Ok(false)
    }

    /// Stages `token` and, if there is one, a draft after it.
    fn propose_draft(&mut self, token: u32) {
        // A draft must not cause an eviction.
        let room = match &self.evictor {
            Some(evictor) => {
                evictor.tokens_until_eviction(self.device_cache.filled_slots(), AppendKind::Open)
            }
            None => self.device_cache.free_slots(),
        };
        let room = room.min(self.device_cache.max_tokens()).saturating_sub(1);
        let pending = &mut self.pending;
        pending.tokens.clear();
        pending.tokens.push(token);
        self.tokens.push(token);
        let (tokens, cache) = (&self.tokens, self.device_cache.cache());
        let propose = |d: &mut Drafter| d.propose(tokens, room, Some(cache), &mut pending.tokens);
        let drafted = self.drafter.as_mut().is_some_and(propose);
        self.tokens.pop();
        pending.logits = if drafted { LogitsWanted::Draft } else { LogitsWanted::Next };
    }

    /// Number of tokens staged for the next pass.
    pub fn staged_tokens(&self) -> usize {
        self.pending.tokens.len()
    }

    /// True if any tokens are staged.
    pub fn is_staged(&self) -> bool {
        self.staged_tokens() > 0
    }

    /// The staged tokens as a run of a pass.
    fn run(&mut self) -> Run<'_> {
        let PendingPass { tokens, known, logits, .. } = &self.pending;
        let (rows, hidden) = match &mut self.drafter {
            Some(drafter) => drafter.begin_pass(&self.tokens, tokens, *known),
            None => (&mut [][..], &mut [][..]),
        };
        let logits = match logits {
            LogitsWanted::Last | LogitsWanted::Next => Logits::Last(&mut self.logits),
            LogitsWanted::Draft => Logits::All(rows),
            LogitsWanted::Nothing => Logits::None,
        };
        let at = RunPosition { pos: self.tokens.len(), known: *known };
        Run { hidden, ..self.device_cache.run(tokens, at, logits) }
    }

    /// Appends the staged tokens after their pass; drafted ones stay ahead of the sequence.
    fn commit_staged(&mut self) {
        self.device_cache.end_run();
        self.drafter.iter_mut().for_each(Drafter::end_pass);
        let pending = &mut self.pending;
        match (pending.logits, &mut self.drafter) {
            (LogitsWanted::Draft, Some(drafter)) => {
                self.tokens.push(pending.tokens[0]);
                self.logits.copy_from_slice(drafter.commit_pass(&mut pending.tokens));
            }
            _ => self.tokens.extend_from_slice(&pending.tokens),
        }
        let is_prompt = matches!(pending.logits, LogitsWanted::Nothing);
        pending.tokens.clear();
        // A device that cannot read its state is lost, as the next pass finds out.
        let _ = match (is_prompt, std::mem::take(&mut pending.saves_state)) {
            (_, true) => self.device_cache.save_checkpoint(),
            (true, _) => self.device_cache.save_checkpoint_if_far(),
            _ => Ok(()),
        };
    }

    /// Computes the staged tokens, if there are any; on the CPU if the device is lost.
    fn forward_alone(&mut self, cancel: Option<&CancelToken>) -> Result<()> {
        if !self.is_staged() {
            return Ok(());
        }
        let computed = self.with_cancel(cancel, |session| {
            session.with_fallback(|session| {
                let device = session.device();
                let cancel = session.cancel.clone();
                lock_device(&device).forward(&mut [session.run()], cancel.as_ref())
            })
        });
        match computed {
            Ok(()) => self.commit_staged(),
            Err(_) => self.pending.tokens.clear(),
        }
        computed
    }

    /// Computes and appends `tokens`, at most one pass of them; on the CPU if the device is lost.
    fn append(&mut self, tokens: &[u32], known: usize, mut out: Logits<'_>) -> Result<()> {
        self.with_fallback(|session| {
            let device = session.device();
            let at = RunPosition { pos: session.tokens.len(), known };
            let run = session.device_cache.run(tokens, at, out.reborrow());
            lock_device(&device).forward(&mut [run], session.cancel.as_ref())
        })?;
        self.device_cache.end_run();
        self.tokens.extend_from_slice(tokens);
        let _ = self.device_cache.save_checkpoint_if_far();
        Ok(())
    }

    /// Runs a task that `cancel` can interrupt.
    fn with_cancel<T>(
        &mut self,
        cancel: Option<&CancelToken>,
        task: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let outer = std::mem::replace(&mut self.cancel, cancel.cloned());
        let done = task(self);
        self.cancel = outer;
        done
    }

    /// Appends tokens and calls `each(index, logits)` for every one.
    pub fn logits_of_all(&mut self, tokens: &[u32], each: impl FnMut(usize, &[f32])) -> Result<()> {
        self.logits_of_part(tokens, tokens.len(), each)
    }

    /// [`Session::logits_of_all`] for the next of a prompt's remaining `left` tokens.
    pub(crate) fn logits_of_part(
        &mut self,
        tokens: &[u32],
        left: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.check_tokens(tokens)?;
        self.discard_drafts();
        let mut rows =
            vec![0.0f32; self.device_cache.max_tokens().min(LOGITS_ROWS).min(tokens.len()) * VOCAB];
        let mut done = 0;
        while done < tokens.len() {
            let n = self.make_room((tokens.len() - done).min(LOGITS_ROWS), AppendKind::Open)?;
            let rows = &mut rows[..n * VOCAB];
            let known = self.tokens.len() + left - done;
            self.append(&tokens[done..done + n], known, Logits::All(rows))?;
            rows.chunks_exact(VOCAB).enumerate().for_each(|(j, row)| each(done + j, row));
            done += n;
        }
        Ok(())
    }

    /// Maximum number of tokens of a pass.
    pub fn max_tokens(&self) -> usize {
        self.device_cache.max_tokens()
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
        self.tokens.len()
    }

    /// True if slots were evicted.
    pub fn has_evicted(&self) -> bool {
        !self.evictions.is_empty()
    }

    /// Number of slots in use.
    pub fn slots(&self) -> usize {
        self.device_cache.filled_slots() - self.drafted_ahead()
    }

    /// True if no token can be appended.
    pub fn is_full(&self) -> bool {
        self.evictor.is_none() && self.device_cache.free_slots() + self.drafted_ahead() == 0
    }

    /// Counts of drafted tokens so far, if drafting is on.
    pub fn drafts(&self) -> Option<DraftCounts> {
        self.drafter.as_ref().map(|d| d.counts)
    }

    /// Number of drafted tokens that are computed but not part of the sequence yet.
    fn drafted_ahead(&self) -> usize {
        self.drafter.as_ref().map_or(0, Drafter::drafted_ahead)
    }

    /// Discards drafted tokens, so that the cache holds only the sequence.
    pub(crate) fn discard_drafts(&mut self) {
        let ahead = self.drafter.as_mut().map_or(0, Drafter::discard_draft);
        if ahead > 0 {
            self.device_cache.truncate(self.device_cache.filled_slots() - ahead, self.tokens.len());
        }
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.discard_drafts();
        self.device_cache.truncate(0, 0);
        self.tokens.clear();
        self.evictions.clear();
        (self.prefix, self.dense) = (0, 0);
        if let Some(evictor) = &mut self.evictor {
            evictor.reset(None);
        }
    }

    /// Changes the number of slots; filled slots stay.
    pub fn resize(&mut self, slots: usize) -> Result<()> {
        self.discard_drafts();
        if let Some(evictor) = &mut self.evictor {
            evictor.resize(slots)?;
        }
        self.device_cache.resize(slots)
    }

    /// Shape and fill level of the cache. Slots of drafted tokens count as filled.
    pub fn extent(&self) -> Extent {
        self.device_cache.extent()
    }

    /// The device that computes the next pass.
    pub fn device(&self) -> SharedDevice {
        self.device_cache.device()
    }

    /// Name of the current device, for reports.
    pub fn device_name(&self) -> String {
        self.device_cache.name()
    }

    /// True if there are two devices.
    pub fn is_hybrid(&self) -> bool {
        self.placement.as_ref().is_some_and(|placement| placement.is_hybrid())
    }

    /// Starts or ends a trace; see [`crate::model::device::Device::set_trace`].
    pub fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        self.device_cache.set_trace(trace)
    }
}

#[cfg(test)]
mod tests;
