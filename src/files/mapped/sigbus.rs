//! A SIGBUS handler for mapped files.
//!
//! Reading a mapped file that has shrunk, or whose disk fails, raises SIGBUS. The handler prints one line that names
//! the file and ends the process with exit code 3; without it the process would die silently.
//!
//! It may run at any moment on any thread, so it reads only a fixed table of atomics and calls only async-signal-safe
//! functions.

use crate::error::one_line;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// Maximum files that can be mapped at once.
pub const MAX_FILES: usize = 256;

/// Maximum bytes of a path in a message.
const MAX_PATH: usize = 300;

/// The exit code of an unusable model file, as in [`crate::Error::exit_code`].
const EXIT_CODE: i32 = 3;

const MESSAGE: &[u8] =
    b": the file was truncated or its disk failed while in use; restore it and start again\n";

const FREE: usize = 0;
const CLAIMED: usize = 1;

/// One mapped range and the file behind it.
struct MappedRange {
    /// The first address, or FREE, or CLAIMED (being filled); no mapping starts at these two. It publishes the other
    /// fields: it is stored last with release and loaded first with acquire.
    start: AtomicUsize,
    end: AtomicUsize,
    path_len: AtomicUsize,
    path: [AtomicU8; MAX_PATH],
}

impl MappedRange {
    fn contains(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start > CLAIMED && (start..self.end.load(Ordering::Relaxed)).contains(&address)
    }
}

static TABLE: [MappedRange; MAX_FILES] = [const {
    MappedRange {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        path_len: AtomicUsize::new(0),
        path: [const { AtomicU8::new(0) }; MAX_PATH],
    }
}; MAX_FILES];

/// The previous action of SIGBUS; set by the thread that installs the handler.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Keeps one mapped file in the table until dropped.
pub struct MappedFileGuard(&'static MappedRange);

impl MappedFileGuard {
    /// Registers a mapped file; `None` if the table is full.
    pub fn register(path: &Path, bytes: &[u8]) -> Option<MappedFileGuard> {
        PREVIOUS.get_or_init(install_handler);
        let range = TABLE.iter().find(|range| {
            range.start.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        let path = one_line(&path.to_string_lossy(), MAX_PATH);
        for (to, &from) in range.path.iter().zip(path.as_bytes()) {
            to.store(from, Ordering::Relaxed);
        }
        range.path_len.store(path.len(), Ordering::Relaxed);
        let start = bytes.as_ptr() as usize;
        range.end.store(start + bytes.len(), Ordering::Relaxed);
        range.start.store(start, Ordering::Release);
        Some(MappedFileGuard(range))
    }
}

impl Drop for MappedFileGuard {
    fn drop(&mut self) {
        self.0.start.store(FREE, Ordering::Release);
    }
}

/// Installs the handler and returns the previous action.
fn install_handler() -> libc::sigaction {
    // SAFETY: sigaction is plain data for which all zeros is valid (the default action, an empty mask). Both pointers
    // are to live locals. `on_sigbus` has the signature that SA_SIGINFO asks for and does only what a signal handler
    // may. SA_ONSTACK: the fault may be on a full stack.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // Fails only for signals that cannot be caught.
        libc::sigaction(libc::SIGBUS, &action, &mut previous);
        previous
    }
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: SA_SIGINFO was set in `install_handler`, so the kernel passes a valid siginfo_t. The address is read as a
    // number, never followed.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let fault = code > 0; // otherwise a process sent the signal, and there is no address
    if fault && let Some(range) = TABLE.iter().find(|range| range.contains(address)) {
        exit_with_message(range);
    }
    // Not one of our files: restore the previous action, and the same instruction faults again when we return.
    // SAFETY: as in `install_handler`; reading `PREVIOUS` is an atomic load, and it holds what the kernel returned.
    // sigaction and raise are async-signal-safe.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, PREVIOUS.get().unwrap_or(&default), std::ptr::null_mut());
        if !fault {
            libc::raise(libc::SIGBUS); // blocked until we return
        }
    }
}

/// Writes the message and ends the process, without allocating or locking.
fn exit_with_message(range: &MappedRange) -> ! {
    let mut line = [0u8; MAX_PATH + 128];
    let path_len = range.path_len.load(Ordering::Relaxed);
    let path = range.path.iter().take(path_len).map(|byte| byte.load(Ordering::Relaxed));
    let text = b"error: ".iter().copied().chain(path).chain(MESSAGE.iter().copied());
    let mut len = 0;
    for (to, from) in line.iter_mut().zip(text) {
        *to = from;
        len += 1;
    }
    // SAFETY: `line` holds `len` bytes; write and _exit are async-signal-safe. If stderr is closed, the exit code
    // remains.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len);
        libc::_exit(EXIT_CODE)
    }
}
