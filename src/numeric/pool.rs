//! A fixed team of threads that runs short parallel steps.
//!
//! A step is a number of tasks. Each thread claims the tasks of its own share one by one, in order, so that it reads
//! weights in long runs that can be prefetched. Then it helps with the shares of others, so a slow core does fewer
//! tasks. Which thread ran a task never changes a result: tasks write to disjoint places.
//!
//! Between steps the workers spin briefly, then sleep. The caller works too, and never waits for a worker that has not
//! begun. A worker that lost its core in the middle of a task stands aside for a while. So a core that another process
//! takes costs that core's share and little more.

mod cores;
mod tile;

pub use cores::{keep_to, on_big_cores};
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

/// How long a worker spins for the next step before it sleeps. The steps of a token follow each other within
/// microseconds. Tokens too follow within this time, unless the caller does something else.
const SPIN: Duration = Duration::from_micros(200);

/// The caller calls other threads late when it has waited this much longer than its own part of the step took.
const PATIENCE: Duration = Duration::from_micros(300);
/// How long a late worker stands aside: several time slices of the scheduler, each of which could end in the middle of
/// a task again.
const ASIDE: Duration = Duration::from_millis(20);

/// Bytes of a thread's stack: address space, of which little is touched.
pub const STACK: usize = 4 << 20;

type Job = *const (dyn Fn(usize) + Sync);

/// The number of a step, and a number of its tasks. Steps count up and never begin again: a thread that was left behind
/// can claim nothing of a later one.
#[derive(Clone, Copy, PartialEq)]
struct Mark(u64);

impl Mark {
    const MOST_TASKS: usize = 0xffff;
    /// Years of the shortest steps. From then on the caller does everything.
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

/// Alone in its cache lines, which hardware likes to fetch in pairs. A line that another core wrote is up to a quarter
/// of a microsecond away, and small steps compute no longer than a microsecond. So each line has one writer, if nobody
/// has to be helped.
#[derive(Default)]
#[repr(align(128))]
struct Alone<T>(T);

/// Written by the caller.
#[derive(Default)]
struct Now {
    /// [`Mark`]: the step, and how many tasks it has.
    step: AtomicU64,
    /// Its job. Read only by those who have claimed a task, for which the caller waits.
    job: AtomicPtr<Job>,
}

/// One thread's part of the steps.
#[derive(Default)]
struct Part {
    /// [`Mark`]: a step, and the first task of this thread's share that nobody has claimed. Nothing is claimed of a later
    /// step.
    next: AtomicU64,
    /// [`Mark`]: a step, and how many tasks this thread has done of it.
    done: AtomicU64,
}

/// Seldom written.
#[derive(Default)]
struct Rest {
    sleeping: AtomicUsize,
    stop: AtomicBool,
    /// Workers that are still inside the step have kept the caller waiting.
    late: AtomicBool,
}

struct Shared {
    now: Alone<Now>,
    parts: Vec<Alone<Part>>,
    rest: Alone<Rest>,
}

impl Shared {
    /// The first task of a thread's share. For the thread past the last, the number of tasks.
    fn share(&self, thread: usize, tasks: usize) -> usize {
        tasks * thread / self.parts.len()
    }

    /// Claims tasks of `thread`'s share, then what is left of the others', and gives each to `task`. When it ends, none
    /// is left to claim, but for the first of the caller, which nobody takes from it.
    fn claim(&self, thread: usize, step: Mark, mut task: impl FnMut(usize)) {
        let tasks = step.tasks();
        for owner in (thread..self.parts.len()).chain(0..thread) {
            let (mut first, end) = (self.share(owner, tasks), self.share(owner + 1, tasks));
            if owner == 0 && thread != 0 && end == 1 {
                continue;
            }
            let next = &self.parts[owner].0.next;
            let mut seen = Mark(next.load(Ordering::Relaxed));
            loop {
                if seen.step() == step.step() {
                    first = seen.tasks();
                }
                if first >= end || seen.step() > step.step() {
                    break;
                }
                let claim = Mark::new(step.step(), first + 1);
                match next.compare_exchange_weak(seen.0, claim.0, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        task(first);
                        seen = claim;
                    }
                    Err(by_others) => seen = Mark(by_others),
                }
            }
        }
    }

    /// How many tasks of a step the workers have done.
    fn done(&self, step: Mark) -> usize {
        let of = |part: &Alone<Part>| {
            let done = Mark(part.0.done.load(Ordering::Acquire));
            if done.step() == step.step() { done.tasks() } else { 0 }
        };
        self.parts[1..].iter().map(of).sum()
    }
}

/// The team; the thread that calls [`Pool::run`] is one of its members.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Once this is cancelled, tasks are skipped.
    cancel: Option<CancelToken>,
    /// Whether any task was.
    left_out: AtomicBool,
    /// Only one thread at a time hands out steps, and none of their tasks does.
    one: PhantomData<Cell<()>>,
}

impl Pool {
    /// A team of `threads` (at least one), caller included; of fewer, where the system allows no more.
    pub fn new(threads: usize) -> Self {
        let parts = (0..threads.max(1)).map(|_| Alone::default()).collect();
        let shared = Arc::new(Shared { now: Alone::default(), parts, rest: Alone::default() });
        let (workers, left_out) = (Vec::new(), AtomicBool::new(false));
        let mut pool = Self { shared, workers, cancel: None, left_out, one: PhantomData };
        // A team of one has no worker to place; the caller's thread is the caller's to place.
        let cores = Arc::new((threads > 1).then(|| topology::placement(threads)).flatten());
        for i in 1..threads.max(1) {
            let (shared, cores) = (Arc::clone(&pool.shared), Arc::clone(&cores));
            let worker =
                std::thread::Builder::new().name(format!("worker-{i}")).stack_size(STACK).spawn(move || {
                    if let Some(cores) = &*cores {
                        // No result depends on where a thread is, so a refusal is ignored.
                        let _ = keep_to(cores);
                    }
                    worker(i, &shared);
                });
            // The others do the shares of those that are missing.
            let Ok(worker) = worker else { break };
            pool.workers.push(worker);
        }
        pool
    }

    /// Threads in the team.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// From now on, tasks are skipped once `cancel` is cancelled: a single step of a long prompt may take longer than a
    /// person waits. [`Pool::finished`] tells whether any was.
    pub fn heed(&mut self, cancel: Option<&CancelToken>) {
        self.cancel = cancel.cloned();
        *self.left_out.get_mut() = false;
    }

    /// `Interrupted` if a task was skipped since [`Pool::heed`]: buffers may then hold anything.
    pub fn finished(&self) -> Result<()> {
        if self.left_out.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Runs `job(0) … job(tasks - 1)`, each once, and returns when all are done.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        let Some(cancel) = &self.cancel else { return self.run_all(tasks, job) };
        let left_out = &self.left_out;
        self.run_all(tasks, &|task| match cancel.is_cancelled() {
            true => left_out.store(true, Ordering::Relaxed),
            false => job(task),
        });
    }

    fn run_all(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        if tasks > Mark::MOST_TASKS {
            for first in (0..tasks).step_by(Mark::MOST_TASKS) {
                self.run_all(Mark::MOST_TASKS.min(tasks - first), &|task| job(first + task));
            }
            return;
        }
        let Shared { now: Alone(now), rest: Alone(rest), .. } = &*self.shared;
        let last = Mark(now.step.load(Ordering::Relaxed)).step();
        if self.workers.is_empty() || tasks < 2 || last == Mark::LAST_STEP {
            (0..tasks).for_each(job);
            return;
        }
        // SAFETY: only the lifetime is changed. No worker follows the pointer after this function
        // returns: below it waits for all tasks, and whoever has claimed none does not read it. `run` is not
        // re-entered: a pool is not `Sync`, so no job holds one, and no other thread.
        let job_ptr: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        let step = Mark::new(last + 1, tasks);
        now.job.store((&raw const job_ptr).cast_mut(), Ordering::Relaxed);
        // Written only if it must be: a write takes the line from all others.
        if rest.late.load(Ordering::Relaxed) {
            rest.late.store(false, Ordering::Relaxed);
        }
        now.step.store(step.0, Ordering::Release);
        // One that falls asleep at this moment may be missed: it misses a step, and is woken for the next.
        if rest.sleeping.load(Ordering::Relaxed) > 0 {
            self.workers.iter().for_each(|w| w.thread().unpark());
        }
        let mut begun = Begun { shared: &self.shared, step, own: 0, at: Instant::now() };
        self.shared.claim(0, step, |task| {
            begun.own += 1;
            job(task);
        });
    }
}

/// A step of the caller's. At its end it waits for those who have claimed tasks, also when a job panics.
struct Begun<'a> {
    shared: &'a Shared,
    step: Mark,
    /// Tasks that the caller has claimed.
    own: usize,
    at: Instant,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        // Some are left where a job of the caller has panicked.
        self.shared.claim(0, self.step, |_| self.own += 1);
        let others = self.step.tasks() - self.own;
        // When the wait began to be long, and how long it may be.
        let mut patience = None;
        let mut spins = 0u32;
        while self.shared.done(self.step) < others {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(256) {
                let (since, most) =
                    *patience.get_or_insert_with(|| (Instant::now(), self.at.elapsed() + PATIENCE));
                if since.elapsed() > most {
                    self.shared.rest.0.late.store(true, Ordering::Relaxed);
                    // A worker that lost its core may need ours.
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
            // A worker that panicked has already said so.
            let _ = worker.join();
        }
    }
}

/// Runs `work` at the same time on `threads` threads, the caller's among them; on fewer, where the system allows no more.
/// So `work` claims what it does, and nobody waits for a thread that is missing.
pub fn at_once(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let thread = std::thread::Builder::new().stack_size(STACK);
            if thread.spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

fn worker(thread: usize, shared: &Shared) {
    let Shared { now: Alone(now), parts, rest: Alone(rest) } = shared;
    let mut last = Mark(0);
    // Noted once there has been nothing to do for some spins: the clock takes longer than a glance at the step.
    let mut idle_since = None;
    let mut spins = 0u32;
    while !rest.stop.load(Ordering::Relaxed) {
        let step = Mark(now.step.load(Ordering::Acquire));
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
        // A job that panics must not leave the others waiting, nor its result missing.
        struct Abort;
        impl Drop for Abort {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    std::process::abort();
                }
            }
        }
        let _abort = Abort;
        let mut done = 0;
        let mut job: Option<&(dyn Fn(usize) + Sync)> = None;
        shared.claim(thread, step, |task| {
            // SAFETY: this thread has claimed a task of `step`, so `run_all` is in that step and waits until the task is
            // counted in `done`. Until then both pointers are those of this step, and what they point to lives.
            job.get_or_insert_with(|| unsafe { &**now.job.load(Ordering::Relaxed) })(task);
            done += 1;
        });
        if done > 0 {
            let late = rest.late.load(Ordering::Relaxed);
            parts[thread].0.done.store(Mark::new(step.step(), done).0, Ordering::Release);
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
        let runs: Vec<AtomicUsize> = (0..Mark::MOST_TASKS + 100).map(|_| AtomicUsize::new(0)).collect();
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
                // A caller's only task is taken by nobody else.
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
