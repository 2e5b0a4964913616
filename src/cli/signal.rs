//! Signals: the first Ctrl-C stops the generation, the second ends the program. SIGTERM and SIGHUP end it after the
//! session is saved. No signal leaves an unfinished file or a changed terminal behind.

use super::terminal::{break_line, erase_line_at_end, erase_progress};
use crate::run::session::CancelToken;
use files::{Error, Result, atomic_file, print_stderr};
use opencl_runtime::pending_calls::calls_in_progress;
use opencl_runtime::program_cache::{LONG_TRIAL, remove_own_markers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// Cancels the generation that Ctrl-C stops.
static RUNNING_GENERATION: OnceLock<CancelToken> = OnceLock::new();

/// Work that must be done before the program ends.
static PENDING_WORK: Mutex<PendingWork> = Mutex::new(PendingWork::None);

/// Maximum wait for a session to be saved; a device may never answer.
const SAVE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum wait for one OpenCL call after Ctrl-C.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Stack size of threads that wait for signals, in bytes.
pub const SIGNAL_STACK: usize = 256 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum PendingWork {
    None,
    /// The running generation must be saved.
    Save,
    /// The generation is being saved; then this signal ends the program.
    SaveAndEnd(i32),
    /// The server finishes its requests and ends after the first signal of any kind; a second one ends it at once.
    #[cfg(feature = "serve")]
    Drain,
}

fn pending_work() -> MutexGuard<'static, PendingWork> {
    PENDING_WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ignores SIGXFSZ, so that a file beyond `ulimit -f` is an ordinary error.
pub fn ignore_file_size_signal() {
    // If this fails, the signal ends the program, as by default.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// True once a thread waits for signals.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Waits for signals on a separate thread, which may do more than a signal handler. If the system allows no thread, a
/// signal ends the program at once.
pub fn watch_signals() -> Result<()> {
    if WATCHED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let (hand, handed) = mpsc::sync_channel::<Signals>(1);
    let wait = move || handed.into_iter().for_each(|mut signals| signals.forever().for_each(handle_signal));
    if thread::Builder::new().name("signals".into()).stack_size(SIGNAL_STACK).spawn(wait).is_ok() {
        // Only after the thread runs, because nobody else handles the signals that are caught from here on.
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]);
        let _ = hand.send(signals.map_err(|e| Error::Other(format!("cannot catch Ctrl-C: {e}")))?);
    }
    Ok(())
}

fn handle_signal(signal: i32) {
    if let Some(cancel) = RUNNING_GENERATION.get() {
        #[cfg(feature = "serve")]
        if *pending_work() == PendingWork::Drain {
            *pending_work() = PendingWork::None;
            return cancel.cancel();
        }
        if signal == SIGINT && !cancel.is_cancelled() {
            cancel.cancel();
            return end_if_stuck();
        }
        let mut duty = pending_work();
        if signal != SIGINT && *duty == PendingWork::Save {
            *duty = PendingWork::SaveAndEnd(signal);
            cancel.cancel();
            let late = move || {
                thread::sleep(SAVE_TIMEOUT);
                end_by_signal(signal);
            };
            let _ = thread::Builder::new().stack_size(SIGNAL_STACK).spawn(late);
            return;
        }
        // When a window closes, both the system and its shell send SIGHUP.
        if signal == SIGHUP && matches!(*duty, PendingWork::SaveAndEnd(_)) {
            return;
        }
    }
    end_by_signal(signal);
}

/// Ends the program if an OpenCL driver does not return from a call: the calling thread cannot be stopped.
fn end_if_stuck() {
    let watch = || {
        thread::sleep(CALL_TIMEOUT / 5);
        let mut before = calls_in_progress();
        while !before.is_empty() {
            thread::sleep(CALL_TIMEOUT);
            let now = calls_in_progress();
            if now.iter().any(|call| before.contains(call)) {
                print_stderr!("the OpenCL driver is not responding; try --backend cpu");
                end_by_signal(SIGINT);
            }
            before = now;
        }
    };
    let _ = thread::Builder::new().stack_size(SIGNAL_STACK).spawn(watch);
}

/// Ends the program as the signal does by default.
fn end_by_signal(signal: i32) -> ! {
    atomic_file::remove_temporary_files();
    remove_own_markers(LONG_TRIAL);
    #[cfg(feature = "line-editor")]
    super::terminal_mode::restore_mode();
    if signal != SIGINT {
        erase_line_at_end();
        let _ = emulate_default_handler(signal);
    }
    match RUNNING_GENERATION.get() {
        None => erase_progress(),
        Some(_) => break_line(),
    }
    crate::opencl::exit_process(Error::Interrupted.exit_code())
}

/// Connects Ctrl-C to `cancel`. If it is already set, or nothing is connected, Ctrl-C ends the process with 130.
pub fn connect_cancel(cancel: &CancelToken) {
    RUNNING_GENERATION.get_or_init(|| cancel.clone());
}

/// From now on SIGTERM and SIGHUP stop the generation, as Ctrl-C does, and wait for [`mark_saved`].
pub fn expect_save() {
    *pending_work() = PendingWork::Save;
}

/// From now on the first signal of any kind cancels the server, which then ends by itself; the second ends the program.
#[cfg(feature = "serve")]
pub fn expect_drain() {
    *pending_work() = PendingWork::Drain;
}

/// Marks the generation as saved, or as not to be saved.
///
/// # Errors
///
/// `Interrupted` if a signal waited for it: nothing new may begin.
pub fn mark_saved() -> Result<()> {
    let mut duty = pending_work();
    match *duty {
        PendingWork::SaveAndEnd(_) => Err(Error::Interrupted),
        _ => {
            *duty = PendingWork::None;
            Ok(())
        }
    }
}

/// True if a signal waits for a save before it ends the program.
pub fn is_ending() -> bool {
    matches!(*pending_work(), PendingWork::SaveAndEnd(_))
}

/// Ends the program with the signal that waits for its end, else with this exit code.
pub fn exit_process(code: i32) -> ! {
    let duty = *pending_work();
    if let PendingWork::SaveAndEnd(signal) = duty {
        end_by_signal(signal);
    }
    // A thread may still be compiling, and another process goes on.
    atomic_file::remove_temporary_files();
    remove_own_markers(Duration::MAX);
    crate::opencl::exit_process(code)
}
