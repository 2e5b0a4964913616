//! Calls that wait for a device, with a timeout.
//!
//! A separate thread makes every call that returns only when the device has done its queued work. The caller can
//! therefore stop waiting: after a timeout, which loses the device, or when the user asks to stop. The thread, and the
//! memory given to the call, then live as long as the process.

use super::device_info::{DeviceInfo, DeviceType};
use super::ffi::{self, Api, EventId, MemId, QueueId};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable with the minimum timeout in seconds, for devices slower than any known one, and for tests. With
/// `off` there is no timeout and no thread: oclgrind's search for uninitialised values supports only one thread.
pub const LIMIT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_LIMIT";
/// Default minimum timeout.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// Factor on [`minimum_timeout`] for operations that were never measured: drivers compile and allocate on first use.
const UNMEASURED_FACTOR: u32 = 6;
/// Polling interval while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Shorter waits ignore a request to stop, because the call will return soon.
const UNINTERRUPTIBLE: Duration = Duration::from_secs(1);

/// Time for which two threads spin before they sleep. Waking up takes some 50 microseconds, twice per wait: a tenth of
/// a token on a fast GPU (H200, 1B: 760 instead of 860 tokens/s). Passes on a phone are longer, and spinning heats it
/// up.
pub(super) fn spin_time(facts: &DeviceInfo) -> Duration {
    match facts.device_type {
        // Its own threads need the cores.
        DeviceType::Cpu => Duration::ZERO,
        _ if facts.unified_memory => Duration::from_micros(100),
        _ => Duration::from_millis(2),
    }
}

/// Minimum timeout.
pub fn minimum_timeout() -> Duration {
    let seconds = std::env::var(LIMIT_VARIABLE).ok().and_then(|v| v.parse().ok());
    seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).unwrap_or(DEFAULT_TIMEOUT)
}

/// Timeout of an operation that was never measured.
pub fn unmeasured_timeout() -> Duration {
    minimum_timeout() * UNMEASURED_FACTOR
}

/// Start of memory whose lifetime is documented by its user.
#[derive(Clone, Copy)]
pub(super) struct Address(pub NonNull<u8>);

// SAFETY: an address is dereferenced only under the rules of the buffer it belongs to.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// A call that waits for queued work. The memory it names must live until it has returned, or for ever.
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
    /// Reads strided pieces.
    ReadPieces {
        from: MemId,
        pieces: StridedPieces,
        to: Address,
    },
    WritePieces {
        from: Address,
        to: MemId,
        pieces: StridedPieces,
    },
}

/// Pieces of a buffer with equal length and distance.
#[derive(Debug, Clone, Copy)]
pub struct StridedPieces {
    /// Offset of the first piece.
    pub start: usize,
    /// Bytes of a piece.
    pub len: usize,
    /// Number of pieces.
    pub count: usize,
    /// Distance between the starts of neighbouring pieces; at least `len`.
    pub pitch: usize,
}

impl StridedPieces {
    /// True if each piece lies in a row of a rectangle as wide as the pitch, so that one call transfers all.
    pub fn are_in_rows(self) -> bool {
        self.start % self.pitch + self.len <= self.pitch
    }

    /// Total bytes of the pieces.
    pub fn bytes(self) -> usize {
        self.len * self.count
    }

    /// Origin and region of a rectangle whose lines are the pieces.
    fn to_rectangle(self) -> [[usize; 3]; 2] {
        [[self.start % self.pitch, self.start / self.pitch, 0], [self.len, self.count, 1]]
    }

    /// # Safety
    ///
    /// The pieces are within the buffer, and the memory holds all of them and lives as long as [`Call`] requires.
    unsafe fn read(self, api: &Api, queue: QueueId, (from, to): (MemId, Address)) -> i32 {
        let Some(read) = api.clEnqueueReadBufferRect else { return ffi::INVALID_OPERATION };
        let ([origin, region], here, Self { len, pitch, .. }) = (self.to_rectangle(), [0; 3], self);
        let to = to.0.as_ptr().cast();
        // SAFETY: by this function's contract; queue and buffer live as `Call::call_driver` says.
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
        let ([origin, region], here, Self { len, pitch, .. }) = (self.to_rectangle(), [0; 3], self);
        let from = from.0.as_ptr().cast_const().cast();
        // SAFETY: as above.
        unsafe {
            let (none, event) = (null(), null_mut());
            write(queue, to, ffi::TRUE, &origin, &here, &region, pitch, 0, len, 0, from, 0, none, event)
        }
    }
}

impl Call {
    /// Name of the OpenCL function.
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

    /// Bytes transferred.
    pub fn bytes(self) -> usize {
        match self {
            Call::Finish | Call::Event(_) => 0,
            Call::Read { len, .. } | Call::Write { len, .. } | Call::Map { len, .. } => len,
            Call::ReadPieces { pieces, .. } | Call::WritePieces { pieces, .. } => pieces.bytes(),
        }
    }

    fn call_driver(self, api: &Api, queue: QueueId) -> Answer {
        let (mut code, mut start) = (ffi::SUCCESS, null_mut());
        // SAFETY: queue, event and buffers live until the device is closed, which first waits for all calls. The
        // callers
        // ensure that ranges are within buffers and memory; the memory lives as long as `Call` requires.
        unsafe {
            match self {
                Call::Finish => code = (api.clFinish)(queue),
                Call::Event(event) => code = (api.clWaitForEvents)(1, &event),
                Call::Read { from, offset, to, len } => {
                    let to = to.0.as_ptr().cast();
                    let read = api.clEnqueueReadBuffer;
                    code = read(queue, from, ffi::TRUE, offset, len, to, 0, null(), null_mut());
                }
                Call::Write { from, len, to, offset } => {
                    let from = from.0.as_ptr().cast_const().cast();
                    let write = api.clEnqueueWriteBuffer;
                    code = write(queue, to, ffi::TRUE, offset, len, from, 0, null(), null_mut());
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

/// Result of a call.
#[derive(Clone, Copy)]
pub(super) struct Answer {
    pub code: i32,
    /// Address of a mapped buffer.
    pub start: Option<Address>,
}

/// Reason for a missing answer.
pub(super) enum CallError {
    /// The call did not return in this time.
    TimedOut(Duration),
    /// The user asked to stop.
    Stopped,
}

/// Timeout, and the flag that ends waiting.
#[derive(Clone)]
struct Timeout {
    limit: Duration,
    stop: Option<Arc<AtomicBool>>,
}

/// State of the thread.
enum Step {
    Idle,
    Requested(Call),
    Calling,
    Answered(Answer),
    /// No more calls follow.
    Closed,
}

struct State {
    step: Step,
    /// The call in progress was abandoned.
    abandoned: bool,
}

/// Handle of the thread that waits for one device.
pub(super) struct CallThread {
    mailbox: Arc<Mailbox>,
    /// True if there is no thread, and calls are made directly.
    inline: bool,
}

struct Mailbox {
    api: &'static Api,
    queue: QueueId,
    state: Mutex<State>,
    asked: Condvar,
    answered: Condvar,
    /// Number of calls requested or answered.
    changes: AtomicUsize,
    /// Time to spin before sleeping; see [`spin_time`].
    spin_time: Duration,
    /// True while an abandoned call is in progress.
    abandoned: AtomicBool,
    /// True after a kernel was queued for the first time.
    first_launch: AtomicBool,
    timeout: Mutex<Timeout>,
    /// Staging memory for transfers.
    bytes: Mutex<Vec<u8>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CallThread {
    /// Starts the thread.
    pub fn new(api: &'static Api, queue: QueueId, facts: &DeviceInfo) -> std::io::Result<Self> {
        let desk = Arc::new(Mailbox {
            api,
            queue,
            state: Mutex::new(State { step: Step::Idle, abandoned: false }),
            asked: Condvar::new(),
            answered: Condvar::new(),
            changes: AtomicUsize::new(0),
            spin_time: spin_time(facts),
            abandoned: AtomicBool::new(false),
            first_launch: AtomicBool::new(false),
            timeout: Mutex::new(Timeout { limit: unmeasured_timeout(), stop: None }),
            bytes: Mutex::new(Vec::new()),
        });
        let alone = std::env::var_os(LIMIT_VARIABLE).is_some_and(|v| v == "off");
        if alone {
            return Ok(Self { mailbox: desk, inline: alone });
        }
        let theirs = Arc::clone(&desk);
        // Same size as the main thread's stack, because some drivers compile in these calls.
        let thread = std::thread::Builder::new().name("opencl".into()).stack_size(8 << 20);
        thread.spawn(move || theirs.serve_calls())?;
        Ok(Self { mailbox: desk, inline: alone })
    }

    /// Sets the timeout of calls; `stop`, once set, ends waiting early.
    pub fn set_timeout(&self, limit: Duration, stop: Option<Arc<AtomicBool>>) {
        *locked(&self.mailbox.timeout) = Timeout { limit, stop };
    }

    /// Records that a kernel was queued for the first time: the driver may compile it during the next wait.
    pub fn note_first_launch(&self) {
        self.mailbox.first_launch.store(true, Ordering::Relaxed);
    }

    /// Makes a call and waits for its answer.
    pub fn make_call(&self, call: Call) -> Result<Answer, CallError> {
        let desk = &*self.mailbox;
        if self.inline {
            return Ok(call.call_driver(desk.api, desk.queue));
        }
        let mut state = desk.wait_until(|state| matches!(state.step, Step::Idle))?;
        state.step = Step::Requested(call);
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
                desk.first_launch.store(false, Ordering::Relaxed);
                // Another thread may be waiting for its turn.
                desk.answered.notify_all();
                Ok(answer)
            }
            Err(why) => {
                desk.abandon_call();
                Err(why)
            }
        }
    }

    /// Waits until no abandoned call is in progress.
    pub fn wait_for_abandoned(&self) -> Result<(), CallError> {
        if self.has_abandoned_call() {
            self.mailbox.wait_until(|state| !state.abandoned).map(drop)
        } else {
            Ok(())
        }
    }

    /// True while an abandoned call is in progress.
    pub fn has_abandoned_call(&self) -> bool {
        self.mailbox.abandoned.load(Ordering::Acquire)
    }

    /// Staging memory for calls; an abandoned call may still use it.
    pub fn lock_staging(&self) -> MutexGuard<'_, Vec<u8>> {
        locked(&self.mailbox.bytes)
    }

    /// Leaks the thread and its memory.
    pub fn leak_thread(&self) {
        std::mem::forget(Arc::clone(&self.mailbox));
    }
}

impl Drop for CallThread {
    fn drop(&mut self) {
        let mut state = locked(&self.mailbox.state);
        if matches!(state.step, Step::Idle) {
            state.step = Step::Closed;
            self.mailbox.changes.fetch_add(1, Ordering::Release);
            self.mailbox.asked.notify_one();
        }
    }
}

impl Mailbox {
    /// Main loop of the thread.
    fn serve_calls(&self) {
        let mut state = locked(&self.state);
        loop {
            match state.step {
                Step::Closed => return,
                Step::Requested(call) => {
                    state.step = Step::Calling;
                    drop(state);
                    let answer = call.call_driver(self.api, self.queue);
                    state = locked(&self.state);
                    let left = std::mem::take(&mut state.abandoned);
                    state.step = if left { Step::Idle } else { Step::Answered(answer) };
                    self.abandoned.store(false, Ordering::Release);
                    self.changes.fetch_add(1, Ordering::Release);
                    self.answered.notify_all();
                }
                _ => {
                    state = self.spin_for_change(state);
                    if !matches!(state.step, Step::Requested(_) | Step::Closed) {
                        state = self.asked.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            }
        }
    }

    /// Spins for a moment until something changes.
    fn spin_for_change<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let before = self.changes.load(Ordering::Acquire);
        drop(state);
        let began = Instant::now();
        while self.changes.load(Ordering::Acquire) == before && began.elapsed() < self.spin_time {
            std::hint::spin_loop();
        }
        locked(&self.state)
    }

    fn current_timeout(&self) -> Timeout {
        let Timeout { limit, stop } = locked(&self.timeout).clone();
        let least =
            if self.first_launch.load(Ordering::Relaxed) { unmeasured_timeout() } else { Duration::ZERO };
        Timeout { limit: limit.max(least), stop }
    }

    /// Waits for `done`, within the timeout.
    fn wait_until(&self, done: impl Fn(&State) -> bool) -> Result<MutexGuard<'_, State>, CallError> {
        let mut state = locked(&self.state);
        if !done(&state) {
            state = self.spin_for_change(state);
        }
        let mut patience: Option<Timeout> = None;
        let mut waited = Duration::ZERO;
        while !done(&state) {
            let began = Instant::now();
            (state, _) =
                self.answered.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
            if done(&state) {
                break;
            }
            // While the process was stopped (Ctrl-Z), so was the driver.
            waited += began.elapsed().min(2 * POLL_INTERVAL);
            let Timeout { limit, stop } = patience.get_or_insert_with(|| self.current_timeout());
            if waited >= *limit {
                return Err(CallError::TimedOut(waited));
            }
            if waited >= UNINTERRUPTIBLE && stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(CallError::Stopped);
            }
        }
        Ok(state)
    }

    /// Abandons the call in progress.
    fn abandon_call(&self) {
        let mut state = locked(&self.state);
        match state.step {
            // The answer came in the meantime.
            Step::Answered(_) => state.step = Step::Idle,
            _ => {
                state.abandoned = true;
                self.abandoned.store(true, Ordering::Release);
            }
        }
    }
}
