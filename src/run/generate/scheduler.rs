//! Requests as they come: those that arrive join the next pass, each gets the bits that it would get alone, and none
//! holds the others up. One thread runs the sequences; any thread hands requests in.

pub use super::prefix_cache::Realm;
pub use super::stats::{BOUNDS, Ending, Histogram, SchedulerStats, SlotStats};

use super::batch::{Batch, BatchEvent, Generation, Piece, SessionRef, is_request_error};
use super::decoder::{DecoderParams, TokenDecoder};
use super::prefill_budget::PrefillBudget;
use super::prefix_cache::PrefixCache;
use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::session::{CancelToken, Drafts, StopReason};
use files::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use text::sampler::{Logprobs, TokenLogprobs};
use text::tokenizer::StopStrings;

/// Time between two looks, while nothing runs, at whether it is to end.
const LOOK: Duration = Duration::from_millis(100);
/// The longest time that a clock is sure to count.
const LONGEST: Duration = Duration::from_secs(1 << 30);
/// Texts that begin between two passes, at most: copying the rows of one takes a while.
const BEGUN_AT_ONCE: usize = 8;
/// Memory of a sequence that has ended goes back to the system from this many bytes on.
const WORTH_RELEASING: u64 = 1 << 20;

/// Limits of a [`Scheduler`]. The number of sequences is [`EngineOptions::batch`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests that wait, at most.
    pub queue: usize,
    /// Bytes for the rows of all sequences, where not all of them can be full: requests wait, in order.
    pub rows: Option<u64>,
    /// Time that requests have after the end was asked for.
    pub drain: Duration,
}

/// Copying of rows of earlier sequences, and keeping of this one's.
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
    /// Options of the text; their [`CancelToken`] frees the slot within a pass.
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

/// Something that came of a [`Job`].
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

/// A change in a scheduler's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerEvent {
    /// There are sequences: requests are heard.
    Ready,
    /// The end was asked for.
    Draining,
}

/// Why a request is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubmitError {
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
    stats: Mutex<SchedulerStats>,
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
        let (need, have) = (prompt.len(), self.options().max_seq_len);
        match need {
            0 => Err(Error::Usage("the prompt is empty, and this model adds no first token".into())),
            n if n > have && self.options().eviction.policy == Policy::None => Err(Error::Usage(format!(
                "the prompt has {n} tokens, and a slot has {have}; shorten it, or start the server with a larger \
                 `EngineOptions::max_seq_len`"
            ))),
            // What takes long comes last: a grammar is compiled.
            _ => TokenDecoder::check(self.tokenizer(), options),
        }
    }
}

impl Scheduler {
    /// Nothing waits yet.
    pub fn new(limits: Limits) -> Self {
        let (queue, stats) = (Mutex::default(), Mutex::default());
        Self { limits, queue, arrived: Condvar::new(), stats }
    }

    /// Takes all of these texts or none.
    ///
    /// # Errors
    ///
    /// Where they cannot wait.
    pub fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), SubmitError> {
        let mut queue = locked(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        // One request may ask for more texts than can wait, if nothing else does.
        if !queue.waiting.is_empty() && queue.waiting.len() + jobs.len() > self.limits.queue {
            return Err(SubmitError::Full);
        }
        let since = Instant::now();
        queue.waiting.extend(jobs.into_iter().map(|job| Waiting { job, since }));
        self.arrived.notify_one();
        Ok(())
    }

    /// Counts so far, and the state of each slot.
    pub fn stats(&self) -> SchedulerStats {
        let waiting = locked(&self.queue).waiting.len();
        SchedulerStats { waiting, ..locked(&self.stats).clone() }
    }

    /// Runs what arrives until `stop` is cancelled; then it refuses what is new, and ends when all that it had taken has
    /// ended, or after [`Limits::drain`].
    ///
    /// # Errors
    ///
    /// `Memory` for sequences that do not fit; what goes wrong with the device. All requests have heard of it.
    pub fn run(&self, engine: &Engine, stop: &CancelToken, on_event: &dyn Fn(SchedulerEvent)) -> Result<()> {
        let mut slots = Slots::new(self, engine)?;
        on_event(SchedulerEvent::Ready);
        let mut deadline = None;
        loop {
            if stop.is_cancelled() && deadline.is_none() {
                locked(&self.queue).closed = true;
                on_event(SchedulerEvent::Draining);
                deadline = Some(Instant::now() + self.limits.drain.min(LONGEST));
            }
            let late = deadline.is_some_and(|end| Instant::now() >= end);
            let passed = slots.admit().and_then(|()| if late { Ok(()) } else { slots.step() });
            let failed = passed.err();
            if late || failed.is_some() {
                let why = failed.clone().unwrap_or(Error::Interrupted);
                slots.give_up(&why);
                return failed.map_or(Ok(()), Err);
            }
            if slots.is_idle() && !self.wait(deadline.is_some()) {
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

/// A request that runs in a slot.
struct Running {
    arrived: Instant,
    /// When it left the queue.
    begun: Instant,
    tell: Box<dyn FnMut(Event) + Send>,
    reuse: Reuse,
    /// Drafts in its slot before.
    drafts: Drafts,
    /// Bytes of rows that it may fill.
    rows: u64,
    ending: Ending,
    /// When its last token came.
    last_token: Option<Instant>,
}

/// The slots and the texts in them.
struct Slots<'a> {
    scheduler: &'a Scheduler,
    engine: &'a Engine,
    /// Number and sequence of the slots that are free.
    free: Vec<(usize, SessionRef<'a>)>,
    /// By slot.
    running: Vec<Option<Running>>,
    /// Their texts, numbered by slot.
    batch: Batch<'a>,
    prefix_cache: PrefixCache,
    prefill_budget: PrefillBudget,
}

impl<'a> Slots<'a> {
    fn new(scheduler: &'a Scheduler, engine: &'a Engine) -> Result<Self> {
        let o = engine.options();
        let slots = o.sequences();
        let sessions = engine.sessions_of(o, slots)?.into_iter().map(|s| SessionRef::Own(Box::new(s)));
        // An eviction depends on what was observed while rows were computed.
        let cached = if o.eviction.policy == Policy::None { o.prefix_cache } else { 0 };
        locked(&scheduler.stats).slots =
            vec![SlotStats { slots: o.max_seq_len, ..SlotStats::default() }; slots];
        Ok(Self {
            scheduler,
            engine,
            free: sessions.enumerate().collect::<Vec<_>>().into_iter().rev().collect(),
            running: (0..slots).map(|_| None).collect(),
            batch: engine.batch(),
            prefix_cache: PrefixCache::new(cached),
            prefill_budget: PrefillBudget::new(o.prefill_chunk),
        })
    }

    fn is_idle(&self) -> bool {
        self.batch.generations().is_empty()
    }

    /// Begins what waits, in order, as far as slots and memory allow; a few at a time, as texts that run wait meanwhile.
    fn admit(&mut self) -> Result<()> {
        for _ in 0..BEGUN_AT_ONCE {
            let Some(waiting) = self.next_waiting() else { break };
            self.begin(waiting)?;
        }
        Ok(())
    }

    /// Begins a text in a free slot.
    fn begin(&mut self, Waiting { job, since }: Waiting) -> Result<()> {
        let (slot, mut session) = self.free.pop().expect("invariant: `next_waiting` found one");
        session.clear();
        let Job { prompt, options, seed, stops, reuse, measures, mut tell } = job;
        let decoder =
            TokenDecoder::new(self.engine.tokenizer(), DecoderParams { options: &options, seed, stops });
        let cached = match &reuse {
            Reuse::In(realm) if measures.is_none() => self.prefix_cache.restore(&mut session, &prompt, realm),
            _ => Ok(0),
        };
        let begun = decoder.and_then(|decoder| {
            let cached = cached?;
            session.begin_prompt(&prompt).map(|_| (decoder, cached))
        });
        let (decoder, cached) = match begun {
            Ok(begun) => begun,
            Err(e) => {
                tell(Event::Failed(e.clone()));
                self.free.push((slot, session));
                return if is_request_error(&e) { Ok(()) } else { Err(e) };
            }
        };
        let running = Running {
            arrived: since,
            begun: Instant::now(),
            tell,
            reuse,
            drafts: session.drafts().unwrap_or_default(),
            rows: rows(self.engine.options(), prompt.len(), options.max_tokens),
            ending: Ending { cached, ..Ending::none_yet(prompt.len(), slot) },
            last_token: None,
        };
        locked(&self.scheduler.stats).record_begin(&running.ending, slot);
        let generation = Generation::new(slot, session, decoder, prompt.to_vec());
        self.batch.push(generation.with_prompt_logprobs(measures));
        self.running[slot] = Some(running);
        Ok(())
    }

    /// The next request whose client is still there, where there are a slot and memory for it.
    fn next_waiting(&self) -> Option<Waiting> {
        let mut queue = locked(&self.scheduler.queue);
        queue.waiting.retain(|w| !w.job.options.cancel.is_cancelled());
        if self.free.is_empty() {
            return None;
        }
        let first = queue.waiting.front()?;
        let need = rows(self.engine.options(), first.job.prompt.len(), first.job.options.max_tokens);
        let taken: u64 = self.running.iter().flatten().map(|running| running.rows).sum();
        let fits = self.scheduler.limits.rows.is_none_or(|most| taken + need <= most);
        // Alone, the longest one fits: the plan was checked for that.
        if fits || self.is_idle() { queue.waiting.pop_front() } else { None }
    }

    /// One pass, if anything runs, and what came of it.
    fn step(&mut self) -> Result<()> {
        if self.is_idle() {
            return Ok(());
        }
        let decoding = self.batch.decoding();
        let began = Instant::now();
        self.batch.prompt_budget = self.prefill_budget.tokens_beside(decoding);
        let events = self.batch.step(None)?;
        self.prefill_budget.record_pass(decoding, self.batch.prompt_tokens(), began.elapsed());
        locked(&self.scheduler.stats).record_pass();
        let now = Instant::now();
        for (slot, event) in events {
            match event {
                BatchEvent::Prompt(tokens) => self.tell(slot, Event::Prompt(tokens)),
                BatchEvent::Piece(piece) => {
                    if piece.token.is_some() {
                        self.record_token(slot, now);
                    }
                    self.tell(slot, Event::Piece(piece));
                }
                BatchEvent::Ended(reason) => self.end(slot, Ok(reason))?,
                BatchEvent::Failed(e) => self.end(slot, Err(e))?,
            }
        }
        let mut stats = locked(&self.scheduler.stats);
        for generation in self.batch.generations() {
            stats.slots[generation.id].filled = generation.session.slots();
        }
        Ok(())
    }

    fn tell(&mut self, slot: usize, event: Event) {
        if let Some(running) = &mut self.running[slot] {
            (running.tell)(event);
        }
    }

    /// Records that a token of the text in a slot came.
    fn record_token(&mut self, slot: usize, now: Instant) {
        let Some(running) = &mut self.running[slot] else { return };
        running.ending.tokens += 1;
        match running.last_token {
            None => running.ending.first = now - running.begun,
            Some(last) => running.ending.between += now - last,
        }
        let mut stats = locked(&self.scheduler.stats);
        stats.record_token(now - running.arrived, running.last_token.map(|last| now - last));
        stats.slots[slot].generated = running.ending.tokens;
        running.last_token = Some(now);
    }

    /// Ends a text: its client hears so, and its slot is free.
    fn end(&mut self, slot: usize, result: Result<StopReason>) -> Result<()> {
        let (Some(generation), Some(mut running)) = (self.batch.remove(slot), self.running[slot].take())
        else {
            return Ok(());
        };
        let Generation { mut session, decoder, .. } = generation;
        running.ending.stop = decoder.stop_string();
        running.ending.drafts = session.drafts().unwrap_or_default().since(running.drafts);
        let stored = match (&result, &running.reuse) {
            (Ok(_), Reuse::In(realm)) => self.prefix_cache.store(&mut session, running.ending.prompt, realm),
            _ => Ok(()),
        };
        let mut stats = locked(&self.scheduler.stats);
        stats.record_end(&running.ending, running.arrived.elapsed());
        stats.kept = self.prefix_cache.bytes();
        drop(stats);
        (running.tell)(match result {
            Ok(reason) => Event::Ended(Ending { reason, ..running.ending }),
            Err(e) => Event::Failed(e),
        });
        let used = rows(self.engine.options(), session.slots(), Some(0));
        session.clear();
        // The CPU's pages come as rows are written. What a device has, it keeps.
        if self.engine.device().is_none() && used >= WORTH_RELEASING {
            // Where that fails nothing has changed: the slot goes on with the memory that it has.
            let slots = session.extent().slots;
            let _ = session.resize(slots);
        }
        self.free.push((slot, session));
        stored
    }

    /// Tells all that run or wait why they will not end.
    fn give_up(&mut self, why: &Error) {
        let mut queue = locked(&self.scheduler.queue);
        queue.closed = true;
        queue.waiting.drain(..).for_each(|mut w| (w.job.tell)(Event::Failed(why.clone())));
        self.batch.clear();
        self.running
            .iter_mut()
            .filter_map(Option::take)
            .for_each(|mut r| (r.tell)(Event::Failed(why.clone())));
    }
}

/// Bytes of the rows that a text may fill.
fn rows(o: &EngineOptions, prompt: usize, tokens: Option<usize>) -> u64 {
    let slots = tokens.map_or(o.max_seq_len, |n| prompt.saturating_add(n).min(o.max_seq_len));
    (o.kv_types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) as u64).saturating_mul(slots as u64)
}
