//! Requests as they come: those that arrive join the next pass, each gets the bits that it would get alone, and none
//! holds the others up. One thread runs the sequences; any thread hands requests in.

mod numbers;
mod pace;

pub use super::prefixes::Realm;
pub use numbers::{BOUNDS, Histogram, Numbers, SlotNumbers};

use super::prefixes::Prefixes;
use super::texts::{Piece, Text, Texts, is_own};
use super::writer::{TextParams, Writer};
use super::{Engine, EngineOptions};
use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use crate::run::eviction::Policy;
use crate::run::options::GenerateOptions;
use crate::run::session::{CancelToken, Drafts, Session, StopReason};
use files::{Error, Result};
use pace::Pace;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use text::sampler::{Logprobs, TokenLogprobs};
use text::tokenizer::StopStrings;

/// How often somebody who waits for requests looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);
/// The longest time that a clock is sure to count.
const LONGEST: Duration = Duration::from_secs(1 << 30);
/// Texts that begin between two passes, at most: copying the rows of one takes a while.
const BEGUN_AT_ONCE: usize = 8;
/// Memory of a sequence that has ended goes back to the system from this many bytes on.
const WORTH_RELEASING: u64 = 1 << 20;

/// What a [`Scheduler`] may take. How many sequences there are is [`EngineOptions::batch`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests that wait, at most.
    pub queue: usize,
    /// Bytes for the rows of all sequences, where not all of them can be full: requests wait, in order.
    pub rows: Option<u64>,
    /// How long requests may go on after the end was asked for.
    pub drain: Duration,
}

/// Whether rows of earlier sequences may be copied, and those of this one kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reuse {
    /// With texts of this realm.
    In(Realm),
    No,
}

/// One text to generate. Those of one request share their prompt and their options.
pub struct Job {
    /// Ids of the prompt, for which [`Engine::check_job`] has spoken.
    pub prompt: Arc<[u32]>,
    /// What to generate; its [`CancelToken`] frees the slot within a pass.
    pub options: Arc<GenerateOptions>,
    /// Takes the place of the seed in the options.
    pub seed: u64,
    /// The options' stop strings, ready for use.
    pub stops: StopStrings,
    pub reuse: Reuse,
    /// Measures the tokens of the prompt: see [`Event::Prompt`]. Then nothing is copied.
    pub measures: Option<Logprobs>,
    /// Hears what comes of it, on the thread of the passes: it must not wait.
    pub tell: Box<dyn FnMut(Event) + Send>,
}

/// What comes of a [`Job`].
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// So many tokens of the prompt are read, where somebody wants to know.
    Read { done: usize, all: usize },
    /// Log-probabilities of the next tokens of the prompt; the first one has none.
    Prompt(Vec<TokenLogprobs>),
    /// A token of the text.
    Piece(Piece),
    /// The last event.
    Ended(Ending),
    /// The last event: what went wrong.
    Failed(Error),
}

/// How a text has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ending {
    pub reason: StopReason,
    /// Tokens of the prompt,
    pub prompt: usize,
    /// those of them whose rows were copied,
    pub cached: usize,
    /// and tokens that were generated, a final end-of-sequence token included.
    pub tokens: usize,
    /// The number of the stop string that has ended it, where one has.
    pub stop: Option<usize>,
    /// The slot that it ran in.
    pub slot: usize,
    /// From the beginning, waiting not included, to the first token,
    pub first: Duration,
    /// and from there to the last one.
    pub between: Duration,
    /// What was drafted for it.
    pub drafts: Drafts,
}

impl Ending {
    /// Of a text that begins.
    fn none_yet(prompt: usize, slot: usize) -> Self {
        Self {
            reason: StopReason::Length,
            prompt,
            cached: 0,
            tokens: 0,
            stop: None,
            slot,
            first: Duration::ZERO,
            between: Duration::ZERO,
            drafts: Drafts::default(),
        }
    }
}

/// What a scheduler has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// There are sequences: requests are heard.
    Ready,
    /// The end was asked for.
    Draining,
}

/// Why a request is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// As many wait as may.
    Full,
    /// The end was asked for.
    Closed,
}

/// A request and when it came.
struct Waiting {
    job: Job,
    since: Instant,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    closed: bool,
}

/// Takes requests, and runs them.
pub struct Scheduler {
    limits: Limits,
    queue: Mutex<Queue>,
    arrived: Condvar,
    numbers: Mutex<Numbers>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Refuses a text that cannot be generated, before it waits.
    ///
    /// # Errors
    ///
    /// `Usage` for a prompt that is empty or longer than a slot, and for options that cannot be followed.
    pub fn check_job(&self, prompt: &[u32], options: &GenerateOptions) -> Result<()> {
        let (need, have) = (prompt.len(), self.options.max_seq_len);
        match need {
            0 => Err(Error::Usage("the prompt is empty, and this model adds no first token".into())),
            n if n > have && self.options.eviction.policy == Policy::None => Err(Error::Usage(format!(
                "the prompt has {n} tokens, and a slot has {have}; shorten it, or start the server with a larger \
                 `EngineOptions::max_seq_len`"
            ))),
            // What takes long comes last: a grammar is compiled.
            _ => Writer::check(self, options),
        }
    }
}

impl Scheduler {
    /// Nothing waits yet.
    pub fn new(limits: Limits) -> Self {
        let (queue, numbers) = (Mutex::default(), Mutex::default());
        Self { limits, queue, arrived: Condvar::new(), numbers }
    }

    /// Takes all of these texts or none.
    ///
    /// # Errors
    ///
    /// Where they cannot wait.
    pub fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), Refused> {
        let mut queue = locked(&self.queue);
        if queue.closed {
            return Err(Refused::Closed);
        }
        // One request may ask for more texts than can wait, if nothing else does.
        if !queue.waiting.is_empty() && queue.waiting.len() + jobs.len() > self.limits.queue {
            return Err(Refused::Full);
        }
        let since = Instant::now();
        queue.waiting.extend(jobs.into_iter().map(|job| Waiting { job, since }));
        self.arrived.notify_one();
        Ok(())
    }

    /// What was done so far, and what is being done.
    pub fn numbers(&self) -> Numbers {
        let waiting = locked(&self.queue).waiting.len();
        Numbers { waiting, ..locked(&self.numbers).clone() }
    }

    /// Runs what arrives until `stop` is cancelled; then it refuses what is new, and ends when all that it had taken has
    /// ended, or after [`Limits::drain`].
    ///
    /// # Errors
    ///
    /// `Memory` for sequences that do not fit; what goes wrong with the device. All requests have heard of it.
    pub fn run(&self, engine: &Engine, stop: &CancelToken, heard: &dyn Fn(Moment)) -> Result<()> {
        let mut running = Running::new(self, engine)?;
        heard(Moment::Ready);
        let mut deadline = None;
        loop {
            if stop.is_cancelled() && deadline.is_none() {
                locked(&self.queue).closed = true;
                heard(Moment::Draining);
                deadline = Some(Instant::now() + self.limits.drain.min(LONGEST));
            }
            let late = deadline.is_some_and(|end| Instant::now() >= end);
            let passed = running.admit().and_then(|()| if late { Ok(()) } else { running.pass() });
            let failed = passed.err();
            if late || failed.is_some() {
                let why = failed.clone().unwrap_or(Error::Interrupted);
                running.give_up(&why);
                return failed.map_or(Ok(()), Err);
            }
            if running.texts.all.is_empty() && !self.wait(deadline.is_some()) {
                return Ok(());
            }
        }
    }

    /// Waits a while for a request, unless there will be none; whether there may be.
    fn wait(&self, closed: bool) -> bool {
        let queue = locked(&self.queue);
        if queue.waiting.is_empty() && !closed {
            let _ = self.arrived.wait_timeout(queue, LOOK);
            return true;
        }
        !queue.waiting.is_empty()
    }
}

/// A text that runs.
struct Owner {
    slot: usize,
    since: Instant,
    /// When it left the queue.
    begun: Instant,
    tell: Box<dyn FnMut(Event) + Send>,
    reuse: Reuse,
    /// What was drafted in its slot before.
    drafts: Drafts,
    /// Bytes of rows that it may fill.
    rows: u64,
    ending: Ending,
    /// When its last token came.
    last: Option<Instant>,
}

/// The sequences.
struct Running<'a> {
    of: &'a Scheduler,
    engine: &'a Engine,
    /// Number and sequence of the slots that are free.
    free: Vec<(usize, Session)>,
    texts: Texts<'a, Owner>,
    prefixes: Prefixes,
    pace: Pace,
}

impl<'a> Running<'a> {
    fn new(of: &'a Scheduler, engine: &'a Engine) -> Result<Self> {
        let o = &engine.options;
        let slots = o.sequences();
        let mut free: Vec<_> = engine.sessions_of(o, slots)?.into_iter().enumerate().collect();
        free.reverse();
        // An eviction depends on what was observed while rows were computed.
        let kept = if o.eviction.policy == Policy::None { o.prefix_cache } else { 0 };
        locked(&of.numbers).slots =
            vec![SlotNumbers { slots: o.max_seq_len, ..SlotNumbers::default() }; slots];
        let (texts, prefixes, pace) = (Texts::new(engine), Prefixes::new(kept), Pace::new(o.prefill_chunk));
        Ok(Self { of, engine, free, texts, prefixes, pace })
    }

    /// Begins what waits, in order, as far as slots and memory allow; a few at a time, as texts that run wait meanwhile.
    fn admit(&mut self) -> Result<()> {
        for _ in 0..BEGUN_AT_ONCE {
            let Some(Waiting { job, since }) = self.next() else { break };
            let (slot, mut session) = self.free.pop().expect("invariant: `next` found one");
            session.clear();
            let Job { prompt, options, seed, stops, reuse, measures, tell } = job;
            let cached = match &reuse {
                Reuse::In(realm) if measures.is_none() => self.prefixes.begin(&mut session, &prompt, realm),
                _ => Ok(0),
            };
            let (ending, begun) = (Ending::none_yet(prompt.len(), slot), Instant::now());
            let rows = rows(&self.engine.options, prompt.len(), options.max_tokens);
            let drafts = session.drafts().unwrap_or_default();
            let mut owner = Owner { slot, since, begun, tell, reuse, drafts, rows, ending, last: None };
            let begun = match cached {
                Ok(n) => {
                    owner.ending.cached = n;
                    let params = TextParams { options: &options, seed, stops };
                    let begun = Text::begin(self.engine, session, prompt.to_vec(), params, owner);
                    begun.map(|text| text.measuring(measures))
                }
                Err(e) => Err(Box::new((e, session, owner))),
            };
            match begun {
                Ok(text) => {
                    locked(&self.of.numbers).begun(&text.owner.ending, text.owner.slot);
                    self.texts.all.push(text);
                }
                Err(failed) => {
                    let (e, session, mut owner) = *failed;
                    (owner.tell)(Event::Failed(e.clone()));
                    self.free.push((slot, session));
                    if !is_own(&e) {
                        return Err(e);
                    }
                }
            }
        }
        Ok(())
    }

    /// The next request whose client is still there, where there are a slot and memory for it.
    fn next(&self) -> Option<Waiting> {
        let mut queue = locked(&self.of.queue);
        queue.waiting.retain(|w| !w.job.options.cancel.is_cancelled());
        if self.free.is_empty() {
            return None;
        }
        let first = queue.waiting.front()?;
        let need = rows(&self.engine.options, first.job.prompt.len(), first.job.options.max_tokens);
        let taken: u64 = self.texts.all.iter().map(|text| text.owner.rows).sum();
        let fits = self.of.limits.rows.is_none_or(|most| taken + need <= most);
        // Alone, the longest one fits: the plan was checked for that.
        if fits || self.texts.all.is_empty() { queue.waiting.pop_front() } else { None }
    }

    /// One pass, if anything runs, and what came of it.
    fn pass(&mut self) -> Result<()> {
        if self.texts.all.is_empty() {
            return Ok(());
        }
        let decoding = self.texts.decoding();
        let began = Instant::now();
        let prompts = self.texts.step(self.pace.most(decoding), None)?;
        self.pace.took(decoding, prompts, began.elapsed());
        let now = Instant::now();
        let mut numbers = locked(&self.of.numbers);
        numbers.passed();
        for text in self.texts.all.iter_mut().chain(self.texts.ended.iter_mut().map(|(text, _)| text)) {
            let owner = &mut text.owner;
            if !text.measured.is_empty() {
                (owner.tell)(Event::Prompt(std::mem::take(&mut text.measured)));
            }
            for piece in text.pieces.drain(..) {
                if piece.token.is_some() {
                    owner.ending.tokens += 1;
                    match owner.last {
                        None => owner.ending.first = now - owner.begun,
                        Some(last) => owner.ending.between += now - last,
                    }
                    numbers.token(now - owner.since, owner.last.map(|last| now - last));
                    owner.last = Some(now);
                }
                (owner.tell)(Event::Piece(piece));
            }
            numbers.slots[owner.slot].filled = text.session.slots();
            numbers.slots[owner.slot].generated = owner.ending.tokens;
        }
        drop(numbers);
        while let Some((text, how)) = self.texts.ended.pop() {
            self.end(text, how)?;
        }
        Ok(())
    }

    /// A text has ended: its client hears so, and its slot is free.
    fn end(&mut self, text: Text<'_, Owner>, how: Result<StopReason>) -> Result<()> {
        let stop = text.stopped_by();
        let Text { mut session, mut owner, .. } = text;
        owner.ending.stop = stop;
        owner.ending.drafts = session.drafts().unwrap_or_default().since(owner.drafts);
        let kept = match (&how, &owner.reuse) {
            (Ok(_), Reuse::In(realm)) => self.prefixes.keep(&mut session, owner.ending.prompt, realm),
            _ => Ok(()),
        };
        let mut numbers = locked(&self.of.numbers);
        numbers.ended(&owner.ending, owner.since.elapsed());
        numbers.kept = self.prefixes.bytes();
        drop(numbers);
        (owner.tell)(match how {
            Ok(reason) => Event::Ended(Ending { reason, ..owner.ending }),
            Err(e) => Event::Failed(e),
        });
        let used = rows(&self.engine.options, session.slots(), Some(0));
        session.clear();
        // The CPU's pages come as rows are written. What a device has, it keeps.
        if self.engine.device.is_none() && used >= WORTH_RELEASING {
            // Where that fails nothing has changed: the slot goes on with the memory that it has.
            let _ = session.resize(session.extent().slots);
        }
        self.free.push((owner.slot, session));
        kept
    }

    /// Tells all that run or wait why they will not end.
    fn give_up(&mut self, why: &Error) {
        let mut queue = locked(&self.of.queue);
        queue.closed = true;
        queue.waiting.drain(..).for_each(|mut w| (w.job.tell)(Event::Failed(why.clone())));
        let ended = self.texts.ended.drain(..).map(|(text, _)| text);
        self.texts.all.drain(..).chain(ended).for_each(|mut t| (t.owner.tell)(Event::Failed(why.clone())));
    }
}

/// Bytes of the rows that a text may fill.
fn rows(o: &EngineOptions, prompt: usize, tokens: Option<usize>) -> u64 {
    let slots = tokens.map_or(o.max_seq_len, |n| prompt.saturating_add(n).min(o.max_seq_len));
    (o.kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as u64).saturating_mul(slots as u64)
}
