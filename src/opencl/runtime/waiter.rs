//! Waiting for a device that may never answer.
//!
//! A thread of its own makes every call that returns only once the device has done what is queued. So whoever waits can
//! stop waiting: after a limit, when the device counts as lost, or when its user asks. The thread, and the memory that
//! the call was given, then stay for the life of the process.

use super::facts::{DeviceType, Facts};
use super::ffi::{self, Api, EventId, MemId, QueueId};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The shortest limit, in seconds, for devices that are slower than any known one; for tests. With `off` there is no
/// limit, and whoever waits makes the calls: oclgrind's search for uninitialised values knows one thread only.
pub const LIMIT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_LIMIT";
/// Without that.
const LEAST: Duration = Duration::from_secs(5);
/// What has never been measured may take so many times [`least`]: drivers compile and allocate at the first use.
const UNMEASURED: u32 = 6;
/// Whoever waits looks around this often.
const SLICE: Duration = Duration::from_millis(50);
/// A wait that is shorter is not cut short when the user asks to stop: what is under way is done soon.
const SHORT: Duration = Duration::from_secs(1);

/// How long two threads watch each other before they sleep. Waking takes some 50 microseconds, twice a wait: a tenth of a
/// token on a fast GPU (H200, 1B: 760 tokens/s instead of 860). A phone's passes are longer, and watching makes it warm.
pub(super) fn watching(facts: &Facts) -> Duration {
    match facts.device_type {
        // Its own threads need the cores.
        DeviceType::Cpu => Duration::ZERO,
        _ if facts.unified_memory => Duration::from_micros(100),
        _ => Duration::from_millis(2),
    }
}

/// The shortest limit of waiting.
pub fn least() -> Duration {
    let seconds = std::env::var(LIMIT_VARIABLE).ok().and_then(|v| v.parse().ok());
    seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).unwrap_or(LEAST)
}

/// The limit for what has never been measured.
pub fn unmeasured() -> Duration {
    least() * UNMEASURED
}

/// Start of bytes of which somebody says how long they stay.
#[derive(Clone, Copy)]
pub(super) struct Address(pub NonNull<u8>);

// SAFETY: an address is dereferenced only under the rules of the buffer it belongs to.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// A call that waits for what is queued. The memory that it names stays until it has returned, or for good.
#[derive(Clone, Copy)]
pub(super) enum Call {
    Finish,
    Event(EventId),
    Read {
        from: MemId,
        offset: usize,
        to: Address,
        len: usize,
    },
    Write {
        from: Address,
        len: usize,
        to: MemId,
        offset: usize,
    },
    Map {
        buffer: MemId,
        flags: u64,
        offset: usize,
        len: usize,
    },
    /// The same as reading and writing, of pieces.
    ReadPieces {
        from: MemId,
        pieces: Pieces,
        to: Address,
    },
    WritePieces {
        from: Address,
        to: MemId,
        pieces: Pieces,
    },
}

/// Pieces of a buffer, as long each and as far apart.
#[derive(Debug, Clone, Copy)]
pub struct Pieces {
    /// Where the first begins.
    pub start: usize,
    /// Bytes of each.
    pub len: usize,
    /// How many.
    pub count: usize,
    /// From one's begin to the next one's; at least `len`.
    pub pitch: usize,
}

impl Pieces {
    /// Bytes of all.
    pub fn bytes(self) -> usize {
        self.len * self.count
    }

    /// Origin in the buffer, and region, of a rectangle whose lines are the pieces.
    fn rectangle(self) -> [[usize; 3]; 2] {
        [[self.start % self.pitch, self.start / self.pitch, 0], [self.len, self.count, 1]]
    }

    /// # Safety
    ///
    /// They are within the buffer, and there is memory for all of them, which stays by the contract of [`Call`].
    unsafe fn read(self, api: &Api, queue: QueueId, (from, to): (MemId, Address)) -> i32 {
        let Some(read) = api.clEnqueueReadBufferRect else { return ffi::INVALID_OPERATION };
        let ([origin, region], here, Self { len, pitch, .. }) = (self.rectangle(), [0; 3], self);
        let to = to.0.as_ptr().cast();
        // SAFETY: by this function's contract; queue and buffer live as `Call::make` says.
        unsafe {
            let (none, event) = (null(), null_mut());
            read(queue, from, ffi::TRUE, &origin, &here, &region, pitch, 0, len, 0, to, 0, none, event)
        }
    }

    /// # Safety
    ///
    /// As above.
    unsafe fn write(self, api: &Api, queue: QueueId, (from, to): (Address, MemId)) -> i32 {
        let Some(write) = api.clEnqueueWriteBufferRect else { return ffi::INVALID_OPERATION };
        let ([origin, region], here, Self { len, pitch, .. }) = (self.rectangle(), [0; 3], self);
        let from = from.0.as_ptr().cast_const().cast();
        // SAFETY: as above.
        unsafe {
            let (none, event) = (null(), null_mut());
            write(queue, to, ffi::TRUE, &origin, &here, &region, pitch, 0, len, 0, from, 0, none, event)
        }
    }
}

impl Call {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Call::Finish => "clFinish",
            Call::Event(_) => "clWaitForEvents",
            Call::Read { .. } => "clEnqueueReadBuffer",
            Call::Write { .. } => "clEnqueueWriteBuffer",
            Call::Map { .. } => "clEnqueueMapBuffer",
            Call::ReadPieces { .. } => "clEnqueueReadBufferRect",
            Call::WritePieces { .. } => "clEnqueueWriteBufferRect",
        }
    }

    /// Bytes that it brings from or to the device.
    pub fn bytes(self) -> usize {
        match self {
            Call::Finish | Call::Event(_) => 0,
            Call::Read { len, .. } | Call::Write { len, .. } | Call::Map { len, .. } => len,
            Call::ReadPieces { pieces, .. } | Call::WritePieces { pieces, .. } => pieces.bytes(),
        }
    }

    fn make(self, api: &Api, queue: QueueId) -> Answer {
        let (mut code, mut start) = (ffi::SUCCESS, null_mut());
        // SAFETY: queue, event and buffers live until the device is closed, which waits for no call to be under way;
        // ranges are within buffers and memory (the callers see to it), which stays by the contract of `Call`.
        unsafe {
            match self {
                Call::Finish => code = (api.clFinish)(queue),
                Call::Event(event) => code = (api.clWaitForEvents)(1, &event),
                Call::Read { from, offset, to, len } => {
                    let to = to.0.as_ptr().cast();
                    code = (api.clEnqueueReadBuffer)(
                        queue,
                        from,
                        ffi::TRUE,
                        offset,
                        len,
                        to,
                        0,
                        null(),
                        null_mut(),
                    );
                }
                Call::Write { from, len, to, offset } => {
                    let from = from.0.as_ptr().cast_const().cast();
                    code = (api.clEnqueueWriteBuffer)(
                        queue,
                        to,
                        ffi::TRUE,
                        offset,
                        len,
                        from,
                        0,
                        null(),
                        null_mut(),
                    );
                }
                Call::ReadPieces { from, pieces, to } => code = pieces.read(api, queue, (from, to)),
                Call::WritePieces { from, to, pieces } => code = pieces.write(api, queue, (from, to)),
                Call::Map { buffer, flags, offset, len } => {
                    let map = api.clEnqueueMapBuffer;
                    start =
                        map(queue, buffer, ffi::TRUE, flags, offset, len, 0, null(), null_mut(), &mut code);
                }
            }
        }
        Answer { code, start: NonNull::new(start.cast()).map(Address) }
    }
}

/// What a call returned.
#[derive(Clone, Copy)]
pub(super) struct Answer {
    pub code: i32,
    /// Of a mapped buffer.
    pub start: Option<Address>,
}

/// Why there is no answer.
pub(super) enum Unanswered {
    /// None came in this time.
    TooLong(Duration),
    /// The user asked to stop.
    Stopped,
}

/// How long to wait, and for whom to stop.
#[derive(Clone)]
struct Patience {
    limit: Duration,
    stop: Option<Arc<AtomicBool>>,
}

/// Where the thread stands.
enum Step {
    Idle,
    Asked(Call),
    Calling,
    Answered(Answer),
    /// There will be no call any more.
    Closed,
}

struct State {
    step: Step,
    /// Nobody waits for the call's answer any more.
    left: bool,
}

/// The thread that waits for one device, as others see it.
pub(super) struct Waiter {
    desk: Arc<Desk>,
    /// Whether there is no thread.
    alone: bool,
}

struct Desk {
    api: &'static Api,
    queue: QueueId,
    state: Mutex<State>,
    asked: Condvar,
    answered: Condvar,
    /// Counts the calls that were asked for or answered.
    changes: AtomicUsize,
    /// See [`watching`].
    watching: Duration,
    /// Whether a call is under way whose answer nobody waits for.
    left: AtomicBool,
    /// Whether a kernel is queued for the first time.
    first: AtomicBool,
    patience: Mutex<Patience>,
    /// Bytes on their way to or from the device.
    bytes: Mutex<Vec<u8>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waiter {
    /// Starts the thread.
    pub fn new(api: &'static Api, queue: QueueId, facts: &Facts) -> std::io::Result<Self> {
        let desk = Arc::new(Desk {
            api,
            queue,
            state: Mutex::new(State { step: Step::Idle, left: false }),
            asked: Condvar::new(),
            answered: Condvar::new(),
            changes: AtomicUsize::new(0),
            watching: watching(facts),
            left: AtomicBool::new(false),
            first: AtomicBool::new(false),
            patience: Mutex::new(Patience { limit: unmeasured(), stop: None }),
            bytes: Mutex::new(Vec::new()),
        });
        let alone = std::env::var_os(LIMIT_VARIABLE).is_some_and(|v| v == "off");
        if alone {
            return Ok(Self { desk, alone });
        }
        let theirs = Arc::clone(&desk);
        // As much as the main thread has, since some drivers compile in these calls.
        let thread = std::thread::Builder::new().name("opencl".into()).stack_size(8 << 20);
        thread.spawn(move || theirs.serve())?;
        Ok(Self { desk, alone })
    }

    /// From now on calls may take this long; a `stop` that is set ends the waiting before.
    pub fn set_patience(&self, limit: Duration, stop: Option<Arc<AtomicBool>>) {
        *locked(&self.desk.patience) = Patience { limit, stop };
    }

    /// A kernel was queued for the first time, and the driver may compile it now: whoever waits next waits for that too.
    pub fn first_launch(&self) {
        self.desk.first.store(true, Ordering::Relaxed);
    }

    /// Makes a call and waits for its answer.
    pub fn ask(&self, call: Call) -> Result<Answer, Unanswered> {
        let desk = &*self.desk;
        if self.alone {
            return Ok(call.make(desk.api, desk.queue));
        }
        let mut state = desk.wait_until(|state| matches!(state.step, Step::Idle))?;
        state.step = Step::Asked(call);
        desk.changes.fetch_add(1, Ordering::Release);
        drop(state);
        desk.asked.notify_one();
        let answered = desk.wait_until(|state| matches!(state.step, Step::Answered(_)));
        match answered {
            Ok(mut state) => {
                let Step::Answered(answer) = std::mem::replace(&mut state.step, Step::Idle) else {
                    unreachable!("invariant: just looked")
                };
                drop(state);
                desk.first.store(false, Ordering::Relaxed);
                // Another thread may be waiting for its turn.
                desk.answered.notify_all();
                Ok(answer)
            }
            Err(why) => {
                desk.leave();
                Err(why)
            }
        }
    }

    /// Waits until no call is under way whose answer nobody waits for.
    pub fn settle(&self) -> Result<(), Unanswered> {
        if self.is_left() { self.desk.wait_until(|state| !state.left).map(drop) } else { Ok(()) }
    }

    /// Whether there is such a call.
    pub fn is_left(&self) -> bool {
        self.desk.left.load(Ordering::Acquire)
    }

    /// Memory for calls. A call that is left may still use it.
    pub fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        locked(&self.desk.bytes)
    }

    /// Keeps thread and memory for the life of the process.
    pub fn leak(&self) {
        std::mem::forget(Arc::clone(&self.desk));
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut state = locked(&self.desk.state);
        if matches!(state.step, Step::Idle) {
            state.step = Step::Closed;
            self.desk.changes.fetch_add(1, Ordering::Release);
            self.desk.asked.notify_one();
        }
    }
}

impl Desk {
    /// The thread's life.
    fn serve(&self) {
        let mut state = locked(&self.state);
        loop {
            match state.step {
                Step::Closed => return,
                Step::Asked(call) => {
                    state.step = Step::Calling;
                    drop(state);
                    let answer = call.make(self.api, self.queue);
                    state = locked(&self.state);
                    let left = std::mem::take(&mut state.left);
                    state.step = if left { Step::Idle } else { Step::Answered(answer) };
                    self.left.store(false, Ordering::Release);
                    self.changes.fetch_add(1, Ordering::Release);
                    self.answered.notify_all();
                }
                _ => {
                    state = self.watch(state);
                    if !matches!(state.step, Step::Asked(_) | Step::Closed) {
                        state = self.asked.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            }
        }
    }

    /// Looks for a change without sleeping, for a moment.
    fn watch<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let before = self.changes.load(Ordering::Acquire);
        drop(state);
        let began = Instant::now();
        while self.changes.load(Ordering::Acquire) == before && began.elapsed() < self.watching {
            std::hint::spin_loop();
        }
        locked(&self.state)
    }

    fn patience(&self) -> Patience {
        let Patience { limit, stop } = locked(&self.patience).clone();
        let least = if self.first.load(Ordering::Relaxed) { unmeasured() } else { Duration::ZERO };
        Patience { limit: limit.max(least), stop }
    }

    /// Waits for the thread, within limits.
    fn wait_until(&self, done: impl Fn(&State) -> bool) -> Result<MutexGuard<'_, State>, Unanswered> {
        let mut state = locked(&self.state);
        if !done(&state) {
            state = self.watch(state);
        }
        let mut patience: Option<Patience> = None;
        let mut waited = Duration::ZERO;
        while !done(&state) {
            let began = Instant::now();
            (state, _) = self.answered.wait_timeout(state, SLICE).unwrap_or_else(PoisonError::into_inner);
            if done(&state) {
                break;
            }
            // While the process was stopped (Ctrl-Z), the device's driver was too.
            waited += began.elapsed().min(2 * SLICE);
            let Patience { limit, stop } = patience.get_or_insert_with(|| self.patience());
            if waited >= *limit {
                return Err(Unanswered::TooLong(waited));
            }
            if waited >= SHORT && stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(Unanswered::Stopped);
            }
        }
        Ok(state)
    }

    /// Nobody waits for the answer of the call under way any more.
    fn leave(&self) {
        let mut state = locked(&self.state);
        match state.step {
            // It came in the meantime.
            Step::Answered(_) => state.step = Step::Idle,
            _ => {
                state.left = true;
                self.left.store(true, Ordering::Release);
            }
        }
    }
}
