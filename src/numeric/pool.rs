//! A fixed team of threads that runs short parallel steps.
//!
//! A step is a number of tasks. Each thread claims the tasks of its own share one by one, in order, so that it reads
//! weights in long runs that can be prefetched. Then it helps with the shares of others, so a slow core does fewer
//! tasks. Which thread ran a task never changes a result: tasks write to disjoint places.
//!
//! Between steps the workers spin briefly, then sleep. The caller works too, and never waits for a worker that has not
//! begun. A worker that lost its core in the middle of a task stands aside for a while. So a core that another process
//! takes costs that core's share and little more.

use super::topology;
use crate::cancel::CancelToken;
use files::{Error, Result};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the next step before it sleeps. The steps of a token follow each other within
/// microseconds. Tokens too follow within this time, unless the caller does something else.
const SPIN: Duration = Duration::from_micros(200);

/// Bits of [`Shared::state`]: the number of workers inside the step, whether it is open, and its number.
const ACTIVE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const STEP: u64 = 1 << 32;

/// Alone in its cache lines, which hardware likes to fetch in pairs.
#[repr(align(128))]
struct Next(AtomicUsize);

/// The caller calls other threads late when it has waited this much longer than its own part of the step took.
const PATIENCE: Duration = Duration::from_micros(300);
/// How long a late worker stands aside: several time slices of the scheduler, each of which could end in the middle of
/// a task again.
const ASIDE: Duration = Duration::from_millis(20);

/// Bytes of a thread's stack: address space, of which little is touched.
pub const STACK: usize = 4 << 20;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    state: AtomicU64,
    /// The first task of each thread's share that nobody has claimed.
    next: Vec<Next>,
    sleeping: AtomicUsize,
    stop: AtomicBool,
    /// Workers that are still inside the step have kept the caller waiting.
    late: AtomicBool,
    /// Written by the caller while the step is closed and no worker is inside.
    job: UnsafeCell<Option<(Job, usize)>>,
}

// SAFETY: `job` is only written while `state` has neither OPEN nor active workers, and only read by
// workers that counted themselves in while OPEN was set; the atomics order the two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only followed while `Pool::run`, which borrows the closure, waits.
unsafe impl Send for Shared {}

impl Shared {
    /// The first task of a thread's share. For the thread past the last, the number of tasks.
    fn share(&self, thread: usize, tasks: usize) -> usize {
        tasks * thread / self.next.len()
    }

    /// Runs tasks of `thread`'s share, then what is left of the others'.
    fn work(&self, thread: usize, job: &(dyn Fn(usize) + Sync), tasks: usize) {
        for owner in (thread..self.next.len()).chain(0..thread) {
            let (next, end) = (&self.next[owner].0, self.share(owner + 1, tasks));
            while next.load(Ordering::Relaxed) < end {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    job(task);
                }
            }
        }
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
}

impl Pool {
    /// A team of `threads` (at least one), caller included; of fewer, where the system allows no more.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: (0..threads.max(1)).map(|_| Next(AtomicUsize::new(0))).collect(),
            sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            late: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        });
        let mut pool = Self { shared, workers: Vec::new(), cancel: None, left_out: AtomicBool::new(false) };
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
        let shared = &*self.shared;
        if self.workers.is_empty() || tasks < 2 {
            (0..tasks).for_each(job);
            return;
        }
        // SAFETY: only the lifetime is changed. No worker follows the pointer after this function
        // returns: below it closes the step and waits until none is inside.
        let job_ptr: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        // SAFETY: the last step was closed and left by all before its `run` returned, and `&mut` is not
        // needed because `run` is not re-entered: jobs do not hold the pool.
        unsafe { *shared.job.get() = Some((job_ptr, tasks)) };
        shared.late.store(false, Ordering::Relaxed);
        for (thread, next) in shared.next.iter().enumerate() {
            next.0.store(shared.share(thread, tasks), Ordering::Relaxed);
        }
        let step = (shared.state.load(Ordering::Relaxed) & !(STEP - 1)).wrapping_add(STEP);
        shared.state.store(step | OPEN, Ordering::Release);
        fence(Ordering::SeqCst);
        if shared.sleeping.load(Ordering::Relaxed) > 0 {
            self.workers.iter().for_each(|w| w.thread().unpark());
        }
        let _close = Close { shared, began: Instant::now() };
        shared.work(0, job, tasks);
    }

    /// Cuts `buf`, a matrix of rows `row_len` long, into column tiles `tile` wide and gives each to `job`.
    pub fn columns<T: Send>(
        &self,
        buf: &mut [T],
        row_len: usize,
        tile: usize,
        job: impl Fn(Tile<'_, T>) + Sync,
    ) {
        self.tiles(buf, row_len, (usize::MAX, tile), job);
    }

    /// Cuts `buf`, a matrix of rows `row_len` long, into tiles of `rows` x `cols` and gives each to `job`.
    pub fn tiles<T: Send>(
        &self,
        buf: &mut [T],
        row_len: usize,
        (rows, cols): (usize, usize),
        job: impl Fn(Tile<'_, T>) + Sync,
    ) {
        assert!(row_len > 0 && buf.len().is_multiple_of(row_len) && rows > 0 && cols > 0);
        let all_rows = buf.len() / row_len;
        let (down, across) = (all_rows.div_ceil(rows), row_len.div_ceil(cols));
        let base = SendPtr(buf.as_mut_ptr());
        self.run(down * across, &|task| {
            let base = &base;
            let (row, col) = (task / across * rows, task % across * cols);
            job(Tile {
                base: base.0,
                table: &[],
                row_len,
                row,
                rows: rows.min(all_rows - row),
                col,
                cols: cols.min(row_len - col),
                buf: PhantomData,
            });
        });
    }
}

/// Where the rows of a matrix lie that is not one buffer; kept by whoever uses it often, so that no step allocates.
#[derive(Default)]
pub struct RowTable<T>(Vec<SendPtr<T>>);

impl Pool {
    /// [`Pool::columns`] of a matrix whose `rows`, each `row_len` long, lie anywhere.
    ///
    /// # Panics
    ///
    /// A row of another length.
    pub fn scattered<'a, T: Send + 'a>(
        &self,
        table: &mut RowTable<T>,
        rows: impl Iterator<Item = &'a mut [T]>,
        (row_len, tile): (usize, usize),
        job: impl Fn(Tile<'_, T>) + Sync,
    ) {
        table.0.clear();
        table.0.extend(rows.map(|row| {
            assert_eq!(row.len(), row_len);
            SendPtr(row.as_mut_ptr())
        }));
        let table = &table.0[..];
        self.run(row_len.div_ceil(tile), &|task| {
            let col = task * tile;
            let (rows, cols) = (table.len(), tile.min(row_len - col));
            let base = std::ptr::null_mut();
            job(Tile { base, table, row_len, row: 0, rows, col, cols, buf: PhantomData });
        });
    }
}

/// Closes a step and waits for those inside, also when a job panics.
struct Close<'a> {
    shared: &'a Shared,
    began: Instant,
}

impl Drop for Close<'_> {
    fn drop(&mut self) {
        let shared = self.shared;
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let closed = Instant::now();
        let patience = closed - self.began + PATIENCE;
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & ACTIVE != 0 {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(256) && closed.elapsed() > patience {
                shared.late.store(true, Ordering::Relaxed);
                // A worker that lost its core may need ours.
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
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

/// Keeps the calling thread, and those that it starts from now on, on some of the cores that it may use.
///
/// # Errors
///
/// The system's: none of the cores is there, or it allows none of this.
pub fn keep_to(cores: &[usize]) -> std::io::Result<()> {
    // SAFETY: a `cpu_set_t` is a plain bit set, zeroed is empty; numbers past its end are left out; the call
    // reads the set and nothing else.
    let refused = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|&&core| core < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if refused == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn worker(thread: usize, shared: &Shared) {
    let mut seen = 0;
    let mut idle_since = Instant::now();
    let mut spins = 0u32;
    while !shared.stop.load(Ordering::Relaxed) {
        let state = shared.state.load(Ordering::Acquire);
        let step = state / STEP;
        if step == seen || state & OPEN == 0 {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(256) && idle_since.elapsed() > SPIN {
                shared.sleeping.fetch_add(1, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                let state = shared.state.load(Ordering::Relaxed);
                let nothing = state / STEP == seen || state & OPEN == 0;
                if nothing && !shared.stop.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                shared.sleeping.fetch_sub(1, Ordering::SeqCst);
                idle_since = Instant::now();
            }
            continue;
        }
        if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            continue;
        }
        seen = step;
        // A job that panics must not leave the others waiting, nor its result missing.
        struct Leave<'a>(&'a AtomicU64);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    std::process::abort();
                }
                self.0.fetch_sub(1, Ordering::Release);
            }
        }
        let leave = Leave(&shared.state);
        // SAFETY: counted in while the step was open, so `run` waits for us before `job` changes or the
        // closure it points to ends.
        if let Some((job, tasks)) = unsafe { *shared.job.get() } {
            // SAFETY: as above.
            shared.work(thread, unsafe { &*job }, tasks);
        }
        let late = shared.late.load(Ordering::Relaxed);
        drop(leave);
        if late {
            std::thread::sleep(ASIDE);
        }
        idle_since = Instant::now();
    }
}

/// Lets tasks share the base of a buffer that they write to in disjoint tiles.
struct SendPtr<T>(*mut T);
// SAFETY: each task touches its own tile only, and elements may be sent between threads (`T: Send`).
unsafe impl<T: Send> Sync for SendPtr<T> {}
// SAFETY: as above; a table is only followed while the rows it was made of are borrowed.
unsafe impl<T: Send> Send for SendPtr<T> {}

/// A rectangle of a row-major buffer that one task owns.
pub struct Tile<'a, T> {
    base: *mut T,
    /// Where each row begins; empty where they follow each other from `base` on.
    table: &'a [SendPtr<T>],
    row_len: usize,
    /// First row.
    pub row: usize,
    /// Rows.
    pub rows: usize,
    /// First column.
    pub col: usize,
    /// Columns.
    pub cols: usize,
    buf: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// The part of row `row + r` that lies in this tile.
    pub fn row_mut(&mut self, r: usize) -> &mut [T] {
        assert!(r < self.rows);
        let row = self.row + r;
        // SAFETY: rows and columns were cut inside the buffer (or the rows of the table), tiles do not overlap, and
        // `&mut self` keeps two rows of one tile from being lent at once.
        unsafe {
            let row = match self.table.get(row) {
                Some(row) => row.0,
                None => self.base.add(row * self.row_len),
            };
            std::slice::from_raw_parts_mut(row.add(self.col), self.cols)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_every_tile_is_disjoint() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for (rows, row_len, tile) in
                [(1, 1, (1, 1)), (5, 7, (2, 3)), (1, 1000, (1, 16)), (33, 64, (100, 32))]
            {
                for _ in 0..200 {
                    let mut buf = vec![0u32; rows * row_len];
                    pool.tiles(&mut buf, row_len, tile, |mut t| {
                        for r in 0..t.rows {
                            let row = t.row + r;
                            let col = t.col;
                            for (c, x) in t.row_mut(r).iter_mut().enumerate() {
                                *x += (row * row_len + col + c) as u32 + 1;
                            }
                        }
                    });
                    assert!(buf.iter().enumerate().all(|(i, &x)| x == i as u32 + 1));
                }
            }
        }
    }

    #[test]
    fn scattered_rows_are_each_written_once() {
        let pool = Pool::new(3);
        let mut table = RowTable::default();
        let (mut first, mut second, mut third) = ([0u32; 50], [0u32; 50], [0u32; 50]);
        let rows = [&mut third[..], &mut first, &mut second].into_iter();
        pool.scattered(&mut table, rows, (50, 16), |mut t| {
            for r in 0..t.rows {
                let col = t.col;
                t.row_mut(r).iter_mut().enumerate().for_each(|(c, x)| *x += (100 * r + col + c) as u32);
            }
        });
        let expected = |r: usize| std::array::from_fn(|c| (100 * r + c) as u32);
        assert_eq!([third, first, second], [expected(0), expected(1), expected(2)]);
    }

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
}
