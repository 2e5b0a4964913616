//! A mapped file that shrinks, or whose disk fails, raises SIGBUS when read: this says so in one line
//! and leaves with exit code 3, instead of dying without a word.
//!
//! The handler may run at any moment on any thread, so all it reads is a fixed table of atomics, and
//! all it calls is async-signal-safe.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

/// How many files can be mapped at a time.
pub const MAX_FILES: usize = 256;

/// Longer paths keep their end, which has the file's name.
const MAX_PATH: usize = 512;

/// The exit code of an unusable model file, as in [`crate::Error::exit_code`].
const EXIT_CODE: i32 = 3;

const MESSAGE: &[u8] =
    b": the file was truncated or its disk failed while in use; restore it and start again\n";

const FREE: usize = 0;
const CLAIMED: usize = 1;

/// One mapped range and the file behind it.
struct Slot {
    /// The first address, or FREE or CLAIMED (being filled), which no mapping starts at.
    /// Stored last and loaded first, with release and acquire: it publishes the other fields.
    start: AtomicUsize,
    end: AtomicUsize,
    path_len: AtomicUsize,
    path: [AtomicU8; MAX_PATH],
}

impl Slot {
    fn contains(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start > CLAIMED && (start..self.end.load(Ordering::Relaxed)).contains(&address)
    }
}

static TABLE: [Slot; MAX_FILES] = [const {
    Slot {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        path_len: AtomicUsize::new(0),
        path: [const { AtomicU8::new(0) }; MAX_PATH],
    }
}; MAX_FILES];

/// What SIGBUS did before; filled by the one thread that installs the handler.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Path of a file to remove on the way out; null, or a string that is never freed.
static REMOVED: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Names a file that goes if the process ends because a mapped one was lost. The last one named counts.
pub fn remove_if_lost(file: &Path) {
    if let Ok(file) = CString::new(file.as_os_str().as_bytes()) {
        REMOVED.store(file.into_raw(), Ordering::Release);
    }
}

/// Keeps one mapped file in the table for as long as it lives.
pub struct Watch(&'static Slot);

impl Watch {
    /// `None` if the table is full.
    pub fn start(path: &Path, bytes: &[u8]) -> Option<Watch> {
        PREVIOUS.get_or_init(install);
        let slot = TABLE.iter().find(|slot| {
            slot.start.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        let path = path.as_os_str().as_bytes();
        let path = &path[path.len().saturating_sub(MAX_PATH)..];
        for (to, &from) in slot.path.iter().zip(path) {
            to.store(from, Ordering::Relaxed);
        }
        slot.path_len.store(path.len(), Ordering::Relaxed);
        let start = bytes.as_ptr() as usize;
        slot.end.store(start + bytes.len(), Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Some(Watch(slot))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(FREE, Ordering::Release);
    }
}

/// Puts our handler in place and returns what was there.
fn install() -> libc::sigaction {
    // SAFETY: sigaction is plain data for which all zeros is valid (the default action, an empty
    // mask). Both pointers are to live locals, and `on_sigbus` has the signature that SA_SIGINFO asks
    // for and does only what a signal handler may. SA_ONSTACK: the fault may be on a full stack.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // It can only fail for a signal that cannot be caught, which SIGBUS is not.
        libc::sigaction(libc::SIGBUS, &action, &mut previous);
        previous
    }
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: SA_SIGINFO was set in `install`, so the kernel passes a valid siginfo_t; the address is
    // read as a number, never followed.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let fault = code > 0; // else another process sent the signal, and there is no address
    if fault && let Some(slot) = TABLE.iter().find(|slot| slot.contains(address)) {
        leave(slot);
    }
    // Not ours: with the former action back, the same instruction faults again when we return.
    // SAFETY: as in `install`; `PREVIOUS` is a load of an atomic and holds what the kernel gave us.
    // sigaction and raise are async-signal-safe.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, PREVIOUS.get().unwrap_or(&default), std::ptr::null_mut());
        if !fault {
            libc::raise(libc::SIGBUS); // held back until we return
        }
    }
}

/// Writes the line and ends the process, without allocating or locking.
fn leave(slot: &Slot) -> ! {
    let mut line = [0u8; MAX_PATH + 128];
    let path_len = slot.path_len.load(Ordering::Relaxed);
    let path = slot.path.iter().take(path_len).map(|byte| byte.load(Ordering::Relaxed));
    let text = b"error: ".iter().copied().chain(path).chain(MESSAGE.iter().copied());
    let mut len = 0;
    for (to, from) in line.iter_mut().zip(text) {
        *to = from;
        len += 1;
    }
    let removed = REMOVED.load(Ordering::Acquire);
    // SAFETY: `line` holds `len` bytes; `removed` ends in a zero and lives for ever unless it is null; write, unlink
    // and _exit are async-signal-safe. If stderr is gone, the exit code still tells.
    unsafe {
        if !removed.is_null() {
            libc::unlink(removed);
        }
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len);
        libc::_exit(EXIT_CODE)
    }
}
