//! A thread pool for short parallel steps.
//!
//! A step is a number of tasks. Each thread claims the tasks of its own share one by one, in order, so that it reads
//! weights in long runs that can be prefetched. Then it helps with the shares of others, so a slow core does fewer
//! tasks. Results do not depend on the thread that ran a task: tasks write to disjoint memory.
//!
//! Between steps the workers spin briefly, then sleep. The calling thread works too, and never waits for a worker that
//! has not begun. A worker that lost its core in the middle of a task pauses for a while. So a core that another
//! process takes costs that core's share and little more.

mod cores;
mod tile;

pub use cores::{pin_to_cores, run_on_big_cores};
pub use tile::{RowTable, Tile};

use super::topology;
use crate::cancel::CancelToken;
use files::{Error, Result};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time a worker spins for the next step before it sleeps. The steps of a token follow within microseconds, and the
/// next token within this time unless the caller does something else.
const SPIN: Duration = Duration::from_micros(200);

/// The caller marks the other threads as late when it has waited this much longer than its own part of the step took.
const PATIENCE: Duration = Duration::from_micros(300);
/// Time a late worker pauses: several time slices of the scheduler, each of which could end in the middle of a task
/// again.
const ASIDE: Duration = Duration::from_millis(20);

/// Bytes of a thread's stack; address space, of which little is used.
pub const STACK_BYTES: usize = 4 << 20;

type Job = *const (dyn Fn(usize) + Sync);

/// The number of a step and a number of its tasks, packed into 64 bits. Step numbers are never reused, so a thread that
/// lags behind cannot claim tasks of a later step.
#[derive(Clone, Copy, PartialEq)]
struct StepTask(u64);

impl StepTask {
    const MAX_TASKS: usize = 0xffff;
    /// Reached after years of the shortest steps. From then on the caller does everything.
    const LAST_STEP: u64 = u64::MAX >> 16;

    fn new(step: u64, tasks: usize) -> Self {
        Self(step << 16 | tasks as u64)
    }

    fn step(self) -> u64 {
        self.0 >> 16
    }

    fn tasks(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

/// A value padded to two cache lines: adjacent lines are prefetched in pairs. Reading a line that another core wrote
/// takes up to a quarter of a microsecond, and small steps compute for less than one, so each line has one writer
/// unless a thread needs help.
#[derive(Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// The current step, written by the caller.
#[derive(Default)]
struct CurrentStep {
    /// A [`StepTask`]: the step and its number of tasks.
    step: AtomicU64,
    /// The step's job. Read only by threads that have claimed a task, for which the caller waits.
    job: AtomicPtr<Job>,
}

/// One thread's share of the steps.
#[derive(Default)]
struct WorkerShare {
    /// A [`StepTask`]: a step and the first unclaimed task of this thread's share. No task of a later step is claimed.
    next: AtomicU64,
    /// A [`StepTask`]: a step and the number of its tasks that this thread has done.
    done: AtomicU64,
}

/// State that is seldom written.
#[derive(Default)]
struct SharedState {
    /// Number of sleeping workers.
    sleeping: AtomicUsize,
    stop: AtomicBool,
    /// Set if workers that are still inside the step have kept the caller waiting.
    late: AtomicBool,
}

struct Shared {
    now: CachePadded<CurrentStep>,
    parts: Vec<CachePadded<WorkerShare>>,
    rest: CachePadded<SharedState>,
}

impl Shared {
    /// First task of a thread's share; for the thread past the last, the number of tasks.
    fn share_start(&self, thread: usize, tasks: usize) -> usize {
        tasks * thread / self.parts.len()
    }

    /// Claims tasks of `thread`'s share, then those left in other shares, and passes each to `task`. Afterwards no task
    /// is left to claim, except the caller's only task, which no other thread takes.
    fn claim_tasks(&self, thread: usize, step: StepTask, mut task: impl FnMut(usize)) {
        let tasks = step.tasks();
        for owner in (thread..self.parts.len()).chain(0..thread) {
            let (mut first, end) = (self.share_start(owner, tasks), self.share_start(owner + 1, tasks));
            if owner == 0 && thread != 0 && end == 1 {
                continue;
            }
            let next = &self.parts[owner].0.next;
            let mut seen = StepTask(next.load(Ordering::Relaxed));
            loop {
                if seen.step() == step.step() {
                    first = seen.tasks();
                }
                if first >= end || seen.step() > step.step() {
                    break;
                }
                let claim = StepTask::new(step.step(), first + 1);
                match next.compare_exchange_weak(seen.0, claim.0, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        task(first);
                        seen = claim;
                    }
                    Err(other) => seen = StepTask(other),
                }
            }
        }
    }

    /// Number of tasks of a step that the workers have done.
    fn count_done(&self, step: StepTask) -> usize {
        let of = |part: &CachePadded<WorkerShare>| {
            let done = StepTask(part.0.done.load(Ordering::Acquire));
            if done.step() == step.step() { done.tasks() } else { 0 }
        };
        self.parts[1..].iter().map(of).sum()
    }
}

/// A thread pool; the thread that calls [`Pool::run`] is one of its threads.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Once this is cancelled, tasks are skipped.
    cancel: Option<CancelToken>,
    /// Set if any task was skipped.
    skipped: AtomicBool,
    /// Makes the pool not `Sync`: one thread at a time starts steps, and no task of a step does.
    one: PhantomData<Cell<()>>,
}

impl Pool {
    /// Starts a pool of `threads` (at least one) threads, caller included; fewer if the system allows no more.
    pub fn new(threads: usize) -> Self {
        let parts = (0..threads.max(1)).map(|_| CachePadded::default()).collect();
        let shared = Arc::new(Shared { now: CachePadded::default(), parts, rest: CachePadded::default() });
        let (workers, skipped) = (Vec::new(), AtomicBool::new(false));
        let mut pool = Self { shared, workers, cancel: None, skipped, one: PhantomData };
        // Only workers are pinned; the calling thread is not.
        let cores = Arc::new((threads > 1).then(|| topology::choose_cores(threads)).flatten());
        for i in 1..threads.max(1) {
            let (shared, cores) = (Arc::clone(&pool.shared), Arc::clone(&cores));
            let worker = std::thread::Builder::new()
                .name(format!("worker-{i}"))
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    if let Some(cores) = &*cores {
                        // Results do not depend on a thread's core, so an error is ignored.
                        let _ = pin_to_cores(cores);
                    }
                    run_worker(i, &shared);
                });
            // The other threads do the shares of missing ones.
            let Ok(worker) = worker else { break };
            pool.workers.push(worker);
        }
        pool
    }

    /// Number of threads, caller included.
    pub fn thread_count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Sets the token whose cancellation skips all further tasks, since a single step of a long prompt may take longer
    /// than a user waits. See [`Pool::check_cancelled`].
    pub fn set_cancel(&mut self, cancel: Option<&CancelToken>) {
        self.cancel = cancel.cloned();
        *self.skipped.get_mut() = false;
    }

    /// Checks that no task was skipped since [`Pool::set_cancel`].
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`]: a task was skipped; the content of buffers is unspecified.
    pub fn check_cancelled(&self) -> Result<()> {
        if self.skipped.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Runs `job(0) … job(tasks - 1)`, each once, and returns when all are done.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        let Some(cancel) = &self.cancel else { return self.run_all(tasks, job) };
        let skipped = &self.skipped;
        self.run_all(tasks, &|task| {
            if cancel.is_cancelled() { skipped.store(true, Ordering::Relaxed) } else { job(task) }
        });
    }

    fn run_all(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        if tasks > StepTask::MAX_TASKS {
            for first in (0..tasks).step_by(StepTask::MAX_TASKS) {
                self.run_all(StepTask::MAX_TASKS.min(tasks - first), &|task| job(first + task));
            }
            return;
        }
        let Shared { now: CachePadded(now), rest: CachePadded(rest), .. } = &*self.shared;
        let last = StepTask(now.step.load(Ordering::Relaxed)).step();
        if self.workers.is_empty() || tasks < 2 || last == StepTask::LAST_STEP {
            (0..tasks).for_each(job);
            return;
        }
        // SAFETY: only the lifetime is changed. No worker follows the pointer after this function returns: it waits for
        // all tasks below, and a worker that has claimed none does not read it. `run` is not re-entered: a pool is not
        // `Sync`, so neither a job nor another thread can hold one.
        let job_ptr: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        let step = StepTask::new(last + 1, tasks);
        now.job.store((&raw const job_ptr).cast_mut(), Ordering::Relaxed);
        // Written only if needed: a write takes the cache line from all other cores.
        if rest.late.load(Ordering::Relaxed) {
            rest.late.store(false, Ordering::Relaxed);
        }
        now.step.store(step.0, Ordering::Release);
        // A worker that falls asleep at this moment may be missed; it is woken for the next step.
        if rest.sleeping.load(Ordering::Relaxed) > 0 {
            self.workers.iter().for_each(|w| w.thread().unpark());
        }
        let mut begun = RunningStep { shared: &self.shared, step, own: 0, at: Instant::now() };
        self.shared.claim_tasks(0, step, |task| {
            begun.own += 1;
            job(task);
        });
    }
}

/// A running step. Dropping it waits for the workers that have claimed tasks, also if a job panics.
struct RunningStep<'a> {
    shared: &'a Shared,
    step: StepTask,
    /// Tasks that the caller has claimed.
    own: usize,
    at: Instant,
}

impl Drop for RunningStep<'_> {
    fn drop(&mut self) {
        // Tasks are left only if a job on the caller's thread has panicked.
        self.shared.claim_tasks(0, self.step, |_| self.own += 1);
        let others = self.step.tasks() - self.own;
        // Start of the wait, and its maximum duration.
        let mut patience = None;
        let mut spins = 0u32;
        while self.shared.count_done(self.step) < others {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(256) {
                let (since, limit) =
                    *patience.get_or_insert_with(|| (Instant::now(), self.at.elapsed() + PATIENCE));
                if since.elapsed() > limit {
                    self.shared.rest.0.late.store(true, Ordering::Relaxed);
                    // A worker that lost its core may need this one.
                    std::thread::yield_now();
                }
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.rest.0.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker that panicked has already printed its message.
            let _ = worker.join();
        }
    }
}

/// Runs `work` concurrently on `threads` threads, including this one; on fewer if the system allows no more. So `work`
/// must claim its tasks itself, and must not rely on the number of threads.
pub fn run_on_threads(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            if thread.spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

/// Runs both functions, `one` on another thread if possible; otherwise after `other`.
pub fn run_both(mut one: impl FnMut() + Send, other: impl FnOnce()) {
    let there = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, &mut one);
        other();
        thread.is_ok()
    });
    if !there {
        one();
    }
}

/// The loop of a worker.
fn run_worker(thread: usize, shared: &Shared) {
    let Shared { now: CachePadded(now), parts, rest: CachePadded(rest) } = shared;
    let mut last = StepTask(0);
    // Set after some idle spins: reading the clock takes longer than reading the step.
    let mut idle_since = None;
    let mut spins = 0u32;
    while !rest.stop.load(Ordering::Relaxed) {
        let step = StepTask(now.step.load(Ordering::Acquire));
        if step == last {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(256) && idle_since.get_or_insert_with(Instant::now).elapsed() > SPIN {
                rest.sleeping.fetch_add(1, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                let nothing = now.step.load(Ordering::Relaxed) == last.0;
                if nothing && !rest.stop.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                rest.sleeping.fetch_sub(1, Ordering::SeqCst);
                idle_since = None;
            }
            continue;
        }
        last = step;
        idle_since = None;
        // After a panic the caller would wait for ever, and the task's result would be missing.
        struct AbortOnPanic;
        impl Drop for AbortOnPanic {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    std::process::abort();
                }
            }
        }
        let _abort = AbortOnPanic;
        let mut done = 0;
        let mut job: Option<&(dyn Fn(usize) + Sync)> = None;
        shared.claim_tasks(thread, step, |task| {
            // SAFETY: this thread has claimed a task of `step`, so `run_all` is in that step and waits until the task
            // is counted in `done`. Until then both pointers are those of this step, and what they point to lives.
            job.get_or_insert_with(|| unsafe { &**now.job.load(Ordering::Relaxed) })(task);
            done += 1;
        });
        if done > 0 {
            let late = rest.late.load(Ordering::Relaxed);
            parts[thread].0.done.store(StepTask::new(step.step(), done).0, Ordering::Release);
            if late {
                std::thread::sleep(ASIDE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = Pool::new(2);
        for _ in 0..5 {
            std::thread::sleep(SPIN * 10);
            let count = AtomicUsize::new(0);
            pool.run(100, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 100);
        }
    }

    #[test]
    fn more_tasks_than_a_step_counts_run_once_each() {
        let pool = Pool::new(2);
        let runs: Vec<AtomicUsize> = (0..StepTask::MAX_TASKS + 100).map(|_| AtomicUsize::new(0)).collect();
        pool.run(runs.len(), &|task| {
            runs[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(runs.into_iter().all(|runs| runs.into_inner() == 1));
    }

    #[test]
    fn a_panic_of_the_callers_leaves_the_pool_usable() {
        let pool = Pool::new(3);
        let caller = std::thread::current().id();
        for _ in 0..100 {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // No other thread takes the caller's only task.
                pool.run(3, &|_| assert!(std::thread::current().id() != caller, "the caller's"));
            }));
            assert!(panicked.is_err());
            let count = AtomicUsize::new(0);
            pool.run(50, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 50);
        }
    }
}
