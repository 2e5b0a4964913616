//! One sequence of tokens: prefill, decode, rewind, eviction, moves from device to device, and why a generation ended.

mod devices;
mod draft;
mod event;
mod evict;
mod history;
mod moves;
mod pass;
mod recent;
mod room;
mod schedule;
mod sequence;

pub use devices::{Seat, Standby};
pub use draft::Drafts;
pub use event::{Event, EvictionResult, Observer, StopReason, Switch, Why};
pub use evict::MemoryProbe;
pub(crate) use pass::Few;
pub use pass::{Stage, forward};
pub use schedule::{Fixed, Measured, SHORT_PROMPT, Schedule, Side, Speed};
pub use sequence::{Cut, Sequence};

use crate::dims::{LAYERS, VOCAB};
use crate::model::device::{Extent, KvRows, Logits, Row, SharedDevice, locked};
use crate::model::trace::Trace;
use crate::run::eviction::{Eviction, Policy};
use devices::{At, Devices};
use draft::Drafter;
use evict::{Evictor, Input};
use files::{Error, Result};
pub use numeric::cancel::CancelToken;
use numeric::kv::{KvType, KvTypes};
use pass::Staged;
use std::sync::Arc;
use text::sampler::all_finite;

/// A function that is called with one line that the user should see. By default the line is lost.
#[derive(Clone)]
pub struct Notice(Arc<dyn Fn(&str) + Send + Sync>);

impl Notice {
    /// Calls `function`, from any thread.
    pub fn new(function: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    /// Says a line.
    pub fn say(&self, line: &str) {
        (self.0)(line)
    }
}

impl Default for Notice {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl std::fmt::Debug for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notice(a function)")
    }
}

/// Makes another device and cache for a sequence whose device is lost.
pub type Spare = Box<dyn FnOnce() -> Result<Seat> + Send>;

/// Gives a device that is getting ready once it is, or says why it never will be; `None` until then.
pub type Awaited = Box<dyn FnMut() -> Option<Result<Arrived>> + Send>;

/// What a device that was awaited is for.
pub enum Arrived {
    /// Nothing: the CPU goes on.
    Unneeded,
    /// All from now on.
    ForAll(SharedDevice),
    /// What this says.
    Beside(SharedDevice, Schedule),
}

/// Rows of logits held at a time where those of every token are asked for; 64 rows of a 128k vocabulary are 32 MiB.
pub const ROWS: usize = 64;

/// Tokens of a prompt whose logits a server computes at a time.
pub(crate) const MEASURED: usize = 16;

/// A sequence: its tokens, its cache on a device or two, the logits of its last token.
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
/// // Greedy by hand: whoever calls chooses from the logits.
/// for _ in 0..4 {
///     let best = session.logits().iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
///     let token = best.map_or(0, |(id, _)| id as u32);
///     session.decode(token)?;
/// }
/// assert_eq!(session.position(), prompt.len() + 4);
///
/// session.rewind(prompt.len())?; // another answer to the same prompt
/// session.resize(128)?; // more slots; those filled stay
/// assert_eq!((session.slots(), session.extent().slots), (prompt.len(), 128));
/// session.clear();
/// assert!(session.tokens().is_empty());
/// # Ok::<(), antigravity::Error>(())
/// ```
pub struct Session {
    devices: Devices,
    /// All of them, evicted ones included: their number is the RoPE position of the next one.
    tokens: Vec<u32>,
    /// Of the last token computed with logits.
    logits: Row,
    /// Chooses slots to evict when they run out; without it a full cache ends the text.
    evictor: Option<Evictor>,
    /// Evictions so far.
    cuts: Vec<Cut>,
    /// Leading tokens that still occupy slots `0..prefix`, once slots were evicted.
    prefix: usize,
    /// From this token on, all lie in the last slots, in order, in every head.
    dense: usize,
    /// Computes tokens ahead that are likely to be chosen.
    drafter: Option<Drafter>,
    /// What the next pass computes.
    staged: Staged,
    observer: Option<Observer>,
    /// Ends what is being computed.
    cancel: Option<CancelToken>,
}

impl Session {
    /// An empty sequence on a device, with an empty cache there.
    pub fn new(seat: Seat) -> Self {
        // Room for all ids at once, so that no token grows the list.
        let tokens = Vec::with_capacity(seat.cache.extent().slots);
        let logits: Row = Box::new(vec![0.0; VOCAB]);
        let logits = locked(&seat.device).row(&logits).unwrap_or(logits);
        Self {
            devices: Devices::new(seat),
            tokens,
            logits,
            evictor: None,
            cuts: Vec::new(),
            prefix: 0,
            dense: 0,
            drafter: None,
            staged: Staged::default(),
            observer: None,
            cancel: None,
        }
    }

    /// Goes on in another place when the device is lost, after one line to `notice`.
    pub fn with_spare(mut self, spare: Spare, notice: Notice) -> Self {
        self.devices.set_spare(spare, notice);
        self
    }

    /// Makes it a hybrid session. Its device so far must be the CPU; `standby` is the other one, whose cache has the same
    /// element types and number of slots.
    pub fn with_standby(mut self, standby: Standby) -> Self {
        self.devices.set_standby(standby);
        self
    }

    /// Begins on the device it has, and goes on on the awaited one, or on both, once that is ready.
    pub fn with_awaited(mut self, awaited: Awaited) -> Self {
        self.devices.set_awaited(awaited);
        self
    }

    /// Evicts slots as `eviction` says instead of ending when they run out; comes after [`Session::with_standby`].
    ///
    /// # Errors
    ///
    /// `Usage` where the cache is too small for it, `Memory` where there is no room for the attention mass.
    pub fn with_eviction(mut self, eviction: Eviction) -> Result<Self> {
        if eviction.policy != Policy::None {
            self.evictor = Some(Evictor::new(eviction, self.extent().slots)?);
            self.make_evictable()?;
        }
        Ok(self)
    }

    /// The first `tokens` tokens, such as a system message, are never evicted, unless [`Eviction::prefix`] says how many
    /// are; they take half of the window at most.
    pub fn protect(&mut self, tokens: usize) {
        if let Some(evictor) = &mut self.evictor {
            evictor.protect(tokens);
        }
    }

    /// Asks `probe` whether memory is low, instead of the system.
    pub fn with_memory_probe(mut self, probe: MemoryProbe) -> Self {
        self.evictor = self.evictor.map(|e| e.with_probe(probe));
        self
    }

    /// Tells `observer` of evictions and moves from now on.
    pub fn watch(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    fn tell(&mut self, mark: &str, event: Event) {
        self.devices.mark(mark);
        if let Some(observer) = &mut self.observer {
            observer(&event);
        }
    }

    /// Appends `tokens`, at most as many as a pass takes; on another device if this one is lost.
    fn append(&mut self, tokens: &[u32], known: usize, mut out: Logits<'_>) -> Result<()> {
        let again = match &mut out {
            Logits::None => Logits::None,
            Logits::Last(logits) => Logits::Last(logits),
            Logits::All(logits) => Logits::All(logits),
        };
        match self.forward(tokens, known, again) {
            Err(e @ (Error::Device(_) | Error::Memory(_))) => {
                self.flee(e)?;
                self.forward(tokens, known, out)?;
            }
            result => result?,
        }
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    fn forward(&mut self, tokens: &[u32], known: usize, out: Logits<'_>) -> Result<()> {
        let device = self.devices.device();
        let run = self.devices.run(tokens, At { pos: self.tokens.len(), known }, out);
        locked(&device).forward(&mut [run], self.cancel.as_ref())
    }

    /// Does something that ends with `Interrupted` soon after `cancel` is cancelled.
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

    /// Makes it the sequence of `prompt`, with the logits of its last token: keeps the longest common prefix (or what is
    /// left of it after evictions) and computes the rest. Ends with `Interrupted` soon after `cancel` is cancelled, also
    /// in the middle of a pass; what was computed before stays.
    pub fn sync(&mut self, prompt: &[u32], cancel: &CancelToken) -> Result<()> {
        let held = self.reuse(prompt)?;
        self.prefill(&prompt[held..], cancel)
    }

    /// Appends tokens and computes the logits of the last. Ends with `Interrupted` as [`Session::sync`] does.
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

    /// Appends one token and computes its logits, unless a draft has done so already: see [`Session::with_drafts`]. Ends
    /// with `Interrupted` soon after `cancel` is cancelled; then the token is not appended.
    pub fn step(&mut self, token: u32, cancel: Option<&CancelToken>) -> Result<()> {
        if self.with_cancel(cancel, |session| session.stage_token(token))? == Stage::Staged {
            forward(&mut [self], cancel)?;
        }
        self.check_logits()
    }

    /// [`Session::step`] that nobody cancels.
    pub fn decode(&mut self, token: u32) -> Result<()> {
        self.step(token, None)
    }

    /// Appends tokens and hands the logits of every one to `each(index, logits)`.
    pub fn logits_of_all(&mut self, tokens: &[u32], each: impl FnMut(usize, &[f32])) -> Result<()> {
        self.logits_of_part(tokens, tokens.len(), each)
    }

    /// [`Session::logits_of_all`] for the next tokens of a prompt of which `left` are left.
    pub(crate) fn logits_of_part(
        &mut self,
        tokens: &[u32],
        left: usize,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.check(tokens)?;
        self.discard_drafts();
        let mut rows = vec![0.0f32; self.devices.max_tokens().min(ROWS).min(tokens.len()) * VOCAB];
        let mut done = 0;
        while done < tokens.len() {
            let n = self.make_room((tokens.len() - done).min(ROWS), Input::Open)?;
            let rows = &mut rows[..n * VOCAB];
            let known = self.tokens.len() + left - done;
            self.append(&tokens[done..done + n], known, Logits::All(rows))?;
            rows.chunks_exact(VOCAB).enumerate().for_each(|(j, row)| each(done + j, row));
            done += n;
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
        if self.evictor.is_none() { self.check_room(tokens.len()) } else { Ok(()) }
    }

    /// Fails unless this many slots are free.
    fn check_room(&self, tokens: usize) -> Result<()> {
        let (need, have) = (self.slots() + tokens, self.extent().slots);
        match need > have {
            true => Err(Error::Usage(format!(
                "the prompt needs {need} positions but the context has {have}; raise `EngineOptions::max_seq_len`, shorten the prompt \
                 or give an `Eviction::policy`"
            ))),
            false => Ok(()),
        }
    }

    /// Refuses logits that are NaN or infinite, with `Model` and the cause: a key or value that is too large for the
    /// cache's type, or broken weights.
    pub(crate) fn check_logits(&mut self) -> Result<()> {
        if all_finite(&self.logits) {
            return Ok(());
        }
        match self.overflow()? {
            Some(layer) => Err(Error::Model(format!(
                "a key or value of layer {layer} is too large for a cache of type {}; use `EngineOptions::kv_types` f32",
                self.extent().types
            ))),
            None => Err(Error::Model("the model computes NaN or infinity; its weights are broken".into())),
        }
    }

    /// The layer whose keys or values overflowed in the cache: the first one whose rows are not finite holds infinities
    /// alone there, since it was computed from finite numbers.
    fn overflow(&mut self) -> Result<Option<usize>> {
        let types = self.extent().types;
        let mut rows = KvRows::default();
        for layer in (0..LAYERS).filter(|_| types != KvTypes::both(KvType::F32)) {
            self.read_rows(layer, &mut rows)?;
            if let Some(first) = rows.floats(types).find(|x| !x.is_finite()) {
                return Ok(first.is_infinite().then_some(layer));
            }
        }
        Ok(None)
    }

    /// Most tokens of a pass.
    pub fn max_tokens(&self) -> usize {
        self.devices.max_tokens()
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

    /// Whether slots were evicted.
    pub fn has_evicted(&self) -> bool {
        !self.cuts.is_empty()
    }

    /// Slots in use.
    pub fn slots(&self) -> usize {
        self.devices.len() - self.ahead()
    }

    /// Whether no token can be appended.
    pub fn is_full(&self) -> bool {
        self.evictor.is_none() && self.devices.room() + self.ahead() == 0
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.discard_drafts();
        self.devices.set_len(0, 0);
        self.tokens.clear();
        self.cuts.clear();
        (self.prefix, self.dense) = (0, 0);
        if let Some(evictor) = &mut self.evictor {
            evictor.reset(None);
        }
    }

    /// Changes the number of slots; filled ones stay.
    pub fn resize(&mut self, slots: usize) -> Result<()> {
        self.discard_drafts();
        if let Some(evictor) = &mut self.evictor {
            evictor.resize(slots)?;
        }
        self.devices.resize(slots)
    }

    /// The shape of the cache. Slots of drafted tokens count as filled.
    pub fn extent(&self) -> Extent {
        self.devices.extent()
    }

    /// The device that runs now, for reports.
    pub fn device_name(&self) -> String {
        locked(&self.devices.device()).name()
    }

    /// Whether there are two devices.
    pub fn is_hybrid(&self) -> bool {
        self.devices.are_two()
    }

    /// Starts or ends a trace; see [`crate::model::device::Device::set_trace`].
    pub fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        self.devices.set_trace(trace)
    }
}

#[cfg(test)]
mod tests;
