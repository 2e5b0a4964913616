//! Continuous batching: a request joins the next pass when it arrives, gets the same bits as alone, and does not hold
//! the others up. One thread runs the sequences; any thread submits requests.

pub use super::prefix_cache::Realm;
pub use super::stats::{BOUNDS, GenerationStats, Histogram, SchedulerStats, SlotStats};

use super::batch::{Batch, BatchEvent, Generation, Piece, SessionRef, is_request_error};
use super::decoder::{DecoderParams, TokenDecoder};
use super::prefill_budget::PrefillBudget;
use super::prefix_cache::PrefixCache;
use crate::dims::{CACHE_LAYERS, HEAD_DIM, KV_HEADS};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::session::{CancelToken, DraftCounts, StopReason};
use files::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use text::sampler::TokenLogprobs;
use text::tokenizer::StopStrings;

/// Interval of checks for the end while nothing runs.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time that can be added to a clock safely.
const LONGEST: Duration = Duration::from_secs(1 << 30);
/// Maximum number of generations that begin between two passes: copying cached rows takes a while.
const MAX_STARTS_PER_PASS: usize = 8;
/// Smallest amount of an ended sequence's memory, in bytes, that is given back to the system.
const WORTH_RELEASING: u64 = 1 << 20;

/// Limits of a [`Scheduler`]. The number of sequences is [`EngineOptions::batch`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of waiting requests.
    pub queue: usize,
    /// Bytes for the rows of all sequences, if they cannot all be full at once: requests then wait, in order.
    pub rows: Option<u64>,
    /// Time that requests have to finish after a stop.
    pub drain: Duration,
}

/// Use of the prefix cache, for reading and for storing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reuse {
    /// Shared with texts of this realm.
    In(Realm),
    No,
}

/// One generation. Those of one request share prompt and options.
pub struct Job {
    /// Tokens of the prompt, already validated by [`Engine::check_job`].
    pub prompt: Arc<[u32]>,
    /// Options; cancelling their [`CancelToken`] frees the slot within a pass.
    pub options: Arc<GenerateOptions>,
    /// Seed that replaces the one in the options.
    pub seed: u64,
    /// The options' stop strings, ready for use.
    pub stops: StopStrings,
    pub reuse: Reuse,
    /// Called on the scheduler's thread for every event; must not block.
    pub on_event: Box<dyn FnMut(JobEvent) + Send>,
}

/// An event of a [`Job`].
#[derive(Debug, Clone, PartialEq)]
pub enum JobEvent {
    /// Progress of the prompt: tokens done, and all that must be computed.
    PromptProgress { done: usize, all: usize },
    /// Log-probabilities of the next tokens of the prompt; the first one has none.
    Prompt(Vec<TokenLogprobs>),
    /// A piece of the text.
    Piece(Piece),
    /// End of the generation; the last event.
    Ended(GenerationStats),
    /// An error; the last event.
    Failed(Error),
}

/// A change of the scheduler's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerEvent {
    /// Sequences are allocated, and requests are served.
    Ready,
    /// The scheduler is stopping.
    Draining,
}

/// Reason for rejecting a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubmitError {
    /// The queue is full.
    Full,
    /// The scheduler is stopping.
    Closed,
}

/// A waiting request and its time of arrival.
struct WaitingJob {
    job: Job,
    since: Instant,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<WaitingJob>,
    closed: bool,
}

/// Queue of requests, and the loop that runs them.
pub struct Scheduler {
    limits: Limits,
    queue: Mutex<Queue>,
    arrived: Condvar,
    stats: Mutex<SchedulerStats>,
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Checks a request before it is queued.
    ///
    /// # Errors
    ///
    /// `Usage` for a prompt that is empty or too long for the context, and for invalid options.
    pub fn check_job(&self, prompt: &[u32], options: &GenerateOptions) -> Result<()> {
        let (need, have) = (prompt.len(), self.options().max_seq_len);
        match need {
            0 => Err(Error::Usage("the prompt is empty, and this model adds no first token".into())),
            n if n > have && self.options().eviction.policy == Policy::None => Err(Error::Usage(format!(
                "the prompt has {n} tokens but the context has {have}; shorten it, or start the server with a larger \
                 `EngineOptions::max_seq_len`"
            ))),
            // The slow check comes last: it compiles a grammar.
            _ => TokenDecoder::check_options(self.tokenizer(), options),
        }
    }
}

impl Scheduler {
    /// A scheduler with an empty queue.
    pub fn new(limits: Limits) -> Self {
        let (queue, stats) = (Mutex::default(), Mutex::default());
        Self { limits, queue, arrived: Condvar::new(), stats }
    }

    /// Queues all of these generations or none.
    ///
    /// # Errors
    ///
    /// The reason if they are rejected.
    pub fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), SubmitError> {
        let mut queue = lock_mutex(&self.queue);
        if queue.closed {
            return Err(SubmitError::Closed);
        }
        // A request for more generations than the queue holds is accepted if the queue is empty.
        if !queue.waiting.is_empty() && queue.waiting.len() + jobs.len() > self.limits.queue {
            return Err(SubmitError::Full);
        }
        let since = Instant::now();
        queue.waiting.extend(jobs.into_iter().map(|job| WaitingJob { job, since }));
        self.arrived.notify_one();
        Ok(())
    }

    /// Counts so far, and the state of each slot.
    pub fn stats(&self) -> SchedulerStats {
        let waiting = lock_mutex(&self.queue).waiting.len();
        SchedulerStats { waiting, ..lock_mutex(&self.stats).clone() }
    }

    /// Runs requests until `stop` is cancelled; then rejects new ones, and returns when all accepted ones have ended or
    /// after [`Limits::drain`].
    ///
    /// # Errors
    ///
    /// `Memory` for sequences that do not fit; errors of the device, which all requests have received.
    pub fn run(&self, engine: &Engine, stop: &CancelToken, on_event: &dyn Fn(SchedulerEvent)) -> Result<()> {
        let mut slots = Slots::new(self, engine)?;
        on_event(SchedulerEvent::Ready);
        let mut deadline = None;
        loop {
            if stop.is_cancelled() && deadline.is_none() {
                lock_mutex(&self.queue).closed = true;
                on_event(SchedulerEvent::Draining);
                deadline = Some(Instant::now() + self.limits.drain.min(LONGEST));
            }
            let late = deadline.is_some_and(|end| Instant::now() >= end);
            let passed = slots.admit_waiting().and_then(|()| if late { Ok(()) } else { slots.step() });
            let failed = passed.err();
            if late || failed.is_some() {
                let why = failed.clone().unwrap_or(Error::Interrupted);
                slots.give_up(&why);
                return failed.map_or(Ok(()), Err);
            }
            if slots.is_idle() && !self.wait_for_request(deadline.is_some()) {
                return Ok(());
            }
        }
    }

    /// Waits a while for a request, unless the queue is closed. Returns false if none can come.
    fn wait_for_request(&self, closed: bool) -> bool {
        let queue = lock_mutex(&self.queue);
        if queue.waiting.is_empty() && !closed {
            let _ = self.arrived.wait_timeout(queue, POLL_INTERVAL);
            return true;
        }
        !queue.waiting.is_empty()
    }
}

/// A request that runs in a slot.
struct RunningJob {
    arrived: Instant,
    /// Time when it left the queue.
    begun: Instant,
    tell: Box<dyn FnMut(JobEvent) + Send>,
    reuse: Reuse,
    /// Counts of the slot's drafted tokens before it.
    drafts: DraftCounts,
    /// Maximum bytes of rows that it can fill.
    rows: u64,
    ending: GenerationStats,
    /// Time of its last token.
    last_token: Option<Instant>,
}

/// The slots and the generations in them.
struct Slots<'a> {
    scheduler: &'a Scheduler,
    engine: &'a Engine,
    /// Index and sequence of each free slot.
    free: Vec<(usize, SessionRef<'a>)>,
    /// Running requests by slot.
    running: Vec<Option<RunningJob>>,
    /// Their generations; ids are slots.
    batch: Batch<'a>,
    prefix_cache: PrefixCache,
    prefill_budget: PrefillBudget,
}

impl<'a> Slots<'a> {
    fn new(scheduler: &'a Scheduler, engine: &'a Engine) -> Result<Self> {
        let o = engine.options();
        let slots = o.sequence_count();
        let sessions = engine.sessions_with(o, slots)?.into_iter().map(|s| SessionRef::Own(Box::new(s)));
        // Evictions depend on attention that was observed while rows were computed, which copied rows lack.
        let cached = if o.eviction.policy == Policy::None { o.prefix_cache } else { 0 };
        lock_mutex(&scheduler.stats).slots =
            vec![SlotStats { slots: o.max_seq_len, ..SlotStats::default() }; slots];
        Ok(Self {
            scheduler,
            engine,
            free: sessions.enumerate().collect::<Vec<_>>().into_iter().rev().collect(),
            running: (0..slots).map(|_| None).collect(),
            batch: engine.new_batch(),
            prefix_cache: PrefixCache::new(cached),
            prefill_budget: PrefillBudget::new(o.prefill_chunk),
        })
    }

    fn is_idle(&self) -> bool {
        self.batch.generations().is_empty()
    }

    /// Begins waiting requests, in order, as far as slots and memory allow; only a few at a time, because the running
    /// ones wait meanwhile.
    fn admit_waiting(&mut self) -> Result<()> {
        for _ in 0..MAX_STARTS_PER_PASS {
            let Some(waiting) = self.next_waiting() else { break };
            self.begin_request(waiting)?;
        }
        Ok(())
    }

    /// Begins a request in a free slot.
    fn begin_request(&mut self, WaitingJob { job, since }: WaitingJob) -> Result<()> {
        let (slot, mut session) = self.free.pop().expect("invariant: `next_waiting` found one");
        session.clear();
        let Job { prompt, options, seed, stops, reuse, on_event: mut tell } = job;
        let decoder =
            TokenDecoder::new(self.engine.tokenizer(), DecoderParams { options: &options, seed, stops });
        let cached = match &reuse {
            // Log-probabilities need the logits of the prompt's tokens.
            Reuse::In(realm) if options.prompt_logprobs.is_none() => {
                self.prefix_cache.restore(&mut session, &prompt, realm)
            }
            _ => Ok(0),
        };
        let begun = decoder.and_then(|decoder| {
            let cached = cached?;
            session.begin_prompt(&prompt).map(|_| (decoder, cached))
        });
        let (decoder, cached) = match begun {
            Ok(begun) => begun,
            Err(e) => {
                tell(JobEvent::Failed(e.clone()));
                self.free.push((slot, session));
                return if is_request_error(&e) { Ok(()) } else { Err(e) };
            }
        };
        let running = RunningJob {
            arrived: since,
            begun: Instant::now(),
            tell,
            reuse,
            drafts: session.drafts().unwrap_or_default(),
            rows: row_bytes(self.engine.options(), prompt.len(), options.max_tokens),
            ending: GenerationStats { cached, slot, prompt: prompt.len(), ..GenerationStats::default() },
            last_token: None,
        };
        lock_mutex(&self.scheduler.stats).record_begin(&running.ending, slot);
        let generation = Generation::new(slot, session, decoder, prompt.to_vec());
        self.batch.push(generation.with_whole_progress());
        self.running[slot] = Some(running);
        Ok(())
    }

    /// Takes the next request that is not cancelled from the queue, if there are a slot and memory for it.
    fn next_waiting(&self) -> Option<WaitingJob> {
        let mut queue = lock_mutex(&self.scheduler.queue);
        queue.waiting.retain(|w| !w.job.options.cancel.is_cancelled());
        if self.free.is_empty() {
            return None;
        }
        let first = queue.waiting.front()?;
        let need = row_bytes(self.engine.options(), first.job.prompt.len(), first.job.options.max_tokens);
        let taken: u64 = self.running.iter().flatten().map(|running| running.rows).sum();
        let fits = self.scheduler.limits.rows.is_none_or(|most| taken + need <= most);
        // A single request always fits: the plan was checked for that.
        if fits || self.is_idle() { queue.waiting.pop_front() } else { None }
    }

    /// Computes one pass, if anything runs, and delivers its events.
    fn step(&mut self) -> Result<()> {
        if self.is_idle() {
            return Ok(());
        }
        let decoding = self.batch.count_decoding();
        let began = Instant::now();
        self.batch.prompt_budget = self.prefill_budget.tokens_beside(decoding);
        let events = self.batch.step(None)?;
        self.prefill_budget.record_pass(decoding, self.batch.prompt_tokens(), began.elapsed());
        lock_mutex(&self.scheduler.stats).record_pass();
        let now = Instant::now();
        for (slot, event) in events {
            match event {
                BatchEvent::Prompt(tokens) => self.send_event(slot, JobEvent::Prompt(tokens)),
                BatchEvent::Piece(piece) => {
                    if piece.token.is_some() {
                        self.record_token(slot, now);
                    }
                    self.send_event(slot, JobEvent::Piece(piece));
                }
                BatchEvent::Ended(reason) => self.end_request(slot, Ok(reason))?,
                BatchEvent::Failed(e) => self.end_request(slot, Err(e))?,
            }
        }
        let mut stats = lock_mutex(&self.scheduler.stats);
        for generation in self.batch.generations() {
            stats.slots[generation.id].filled = generation.session.slots();
        }
        Ok(())
    }

    fn send_event(&mut self, slot: usize, event: JobEvent) {
        if let Some(running) = &mut self.running[slot] {
            (running.tell)(event);
        }
    }

    /// Records a token of the generation in a slot.
    fn record_token(&mut self, slot: usize, now: Instant) {
        let Some(running) = &mut self.running[slot] else { return };
        running.ending.tokens += 1;
        match running.last_token {
            None => running.ending.time_to_first = now - running.begun,
            Some(last) => running.ending.decode_time += now - last,
        }
        let mut stats = lock_mutex(&self.scheduler.stats);
        stats.record_token(now - running.arrived, running.last_token.map(|last| now - last));
        stats.slots[slot].generated = running.ending.tokens;
        running.last_token = Some(now);
    }

    /// Ends a generation: stores its rows, reports its end and frees its slot.
    fn end_request(&mut self, slot: usize, result: Result<StopReason>) -> Result<()> {
        let (Some(generation), Some(mut running)) = (self.batch.remove(slot), self.running[slot].take())
        else {
            return Ok(());
        };
        let Generation { mut session, decoder, .. } = generation;
        running.ending.stop_index = decoder.stop_string();
        running.ending.drafts = session.drafts().unwrap_or_default().since(running.drafts);
        let stored = match (&result, &running.reuse) {
            (Ok(_), Reuse::In(realm)) => self.prefix_cache.store(&mut session, running.ending.prompt, realm),
            _ => Ok(()),
        };
        let mut stats = lock_mutex(&self.scheduler.stats);
        stats.record_end(&running.ending, running.arrived.elapsed());
        stats.prefix_cache_bytes = self.prefix_cache.bytes();
        drop(stats);
        (running.tell)(match result {
            Ok(reason) => JobEvent::Ended(GenerationStats { reason, ..running.ending }),
            Err(e) => JobEvent::Failed(e),
        });
        let used = row_bytes(self.engine.options(), session.slots(), Some(0));
        session.clear();
        // The CPU's pages are allocated when rows are written, so they can be given back; a device keeps its memory.
        if self.engine.device().is_none() && used >= WORTH_RELEASING {
            // On failure nothing has changed, and the slot keeps its memory.
            let slots = session.extent().slots;
            let _ = session.resize(slots);
        }
        self.free.push((slot, session));
        stored
    }

    /// Reports an error to all running and waiting requests.
    fn give_up(&mut self, why: &Error) {
        let mut queue = lock_mutex(&self.scheduler.queue);
        queue.closed = true;
        queue.waiting.drain(..).for_each(|mut w| (w.job.on_event)(JobEvent::Failed(why.clone())));
        self.batch.clear();
        self.running
            .iter_mut()
            .filter_map(Option::take)
            .for_each(|mut r| (r.tell)(JobEvent::Failed(why.clone())));
    }
}

/// Maximum bytes of rows that a generation can fill.
fn row_bytes(o: &EngineOptions, prompt: usize, tokens: Option<usize>) -> u64 {
    let slots = tokens.map_or(o.max_seq_len, |n| prompt.saturating_add(n).min(o.max_seq_len));
    (o.kv_types.slot_bytes(CACHE_LAYERS, KV_HEADS, HEAD_DIM) as u64).saturating_mul(slots as u64)
}
