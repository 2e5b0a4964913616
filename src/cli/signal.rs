//! Signals: the first Ctrl-C stops the generation, the second ends the program. SIGTERM and SIGHUP end it after the
//! session is saved. No signal leaves an unfinished file or a changed terminal behind.

use crate::run::session::CancelToken;
use files::{Error, Result, atomic_file, say};
use opencl_runtime::calling::under_way;
use opencl_runtime::program_cache::withdraw_trials;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// Cancels the generation that Ctrl-C stops.
static RUNNING: OnceLock<CancelToken> = OnceLock::new();

/// Work that must be done before the program ends.
static DUTY: Mutex<Duty> = Mutex::new(Duty::None);

/// Maximum wait for a session to be saved; a device may never answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum wait for one OpenCL call after Ctrl-C.
const STUCK: Duration = Duration::from_secs(5);

/// Stack size of threads that wait for signals, in bytes.
pub const STACK: usize = 256 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Duty {
    None,
    /// The running generation must be saved.
    Save,
    /// The generation is being saved; then this signal ends the program.
    SaveAndEnd(i32),
    /// The server finishes its requests and ends after the first signal of any kind; a second one ends it at once.
    #[cfg(feature = "serve")]
    Drain,
}

fn duty() -> MutexGuard<'static, Duty> {
    DUTY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ignores SIGXFSZ, so that a file beyond `ulimit -f` is an ordinary error.
pub fn outlive_file_limit() {
    // If this fails, the signal ends the program, as by default.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Waits for signals on a separate thread, which may do more than a signal handler. If the system allows no thread, a
/// signal ends the program at once.
pub fn watch() -> Result<()> {
    let (hand, handed) = mpsc::sync_channel::<Signals>(1);
    let wait = move || handed.into_iter().for_each(|mut signals| signals.forever().for_each(handle_signal));
    if thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(wait).is_ok() {
        // Only after the thread runs, because nobody else handles the signals that are caught from here on.
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]);
        let _ = hand.send(signals.map_err(|e| Error::Other(format!("cannot catch Ctrl-C: {e}")))?);
    }
    Ok(())
}

fn handle_signal(signal: i32) {
    if let Some(cancel) = RUNNING.get() {
        #[cfg(feature = "serve")]
        if *duty() == Duty::Drain {
            *duty() = Duty::None;
            return cancel.cancel();
        }
        if signal == SIGINT && !cancel.is_cancelled() {
            cancel.cancel();
            return end_if_stuck();
        }
        let mut duty = duty();
        if signal != SIGINT && *duty == Duty::Save {
            *duty = Duty::SaveAndEnd(signal);
            cancel.cancel();
            let late = move || {
                thread::sleep(PATIENCE);
                end_by_signal(signal);
            };
            let _ = thread::Builder::new().stack_size(STACK).spawn(late);
            return;
        }
        // When a window closes, both the system and its shell send SIGHUP.
        if signal == SIGHUP && matches!(*duty, Duty::SaveAndEnd(_)) {
            return;
        }
    }
    end_by_signal(signal);
}

/// Ends the program if an OpenCL driver does not return from a call: the calling thread cannot be stopped.
fn end_if_stuck() {
    let watch = || {
        thread::sleep(STUCK / 5);
        let mut before = under_way();
        while !before.is_empty() {
            thread::sleep(STUCK);
            let now = under_way();
            if now.iter().any(|call| before.contains(call)) {
                say!("the OpenCL driver is not responding; try --backend cpu");
                end_by_signal(SIGINT);
            }
            before = now;
        }
    };
    let _ = thread::Builder::new().stack_size(STACK).spawn(watch);
}

/// Ends the program as the signal does by default.
fn end_by_signal(signal: i32) -> ! {
    atomic_file::remove_unfinished();
    withdraw_trials();
    #[cfg(feature = "line-editor")]
    super::terminal_mode::restore();
    if signal != SIGINT {
        let _ = emulate_default_handler(signal);
    }
    crate::opencl::end(Error::Interrupted.exit_code())
}

/// Connects Ctrl-C to `cancel`. If it is already set, or nothing is connected, Ctrl-C ends the process with 130.
pub fn connect(cancel: &CancelToken) {
    RUNNING.get_or_init(|| cancel.clone());
}

/// From now on SIGTERM and SIGHUP stop the generation, as Ctrl-C does, and wait for [`saved`].
pub fn will_save() {
    *duty() = Duty::Save;
}

/// From now on the first signal of any kind cancels the server, which then ends by itself; the second ends the program.
#[cfg(feature = "serve")]
pub fn will_drain() {
    *duty() = Duty::Drain;
}

/// Marks the generation as saved, or as not to be saved.
///
/// # Errors
///
/// `Interrupted` if a signal waited for it: nothing new may begin.
pub fn saved() -> Result<()> {
    let mut duty = duty();
    match *duty {
        Duty::SaveAndEnd(_) => Err(Error::Interrupted),
        _ => {
            *duty = Duty::None;
            Ok(())
        }
    }
}

/// True if a signal waits for a save before it ends the program.
pub fn is_ending() -> bool {
    matches!(*duty(), Duty::SaveAndEnd(_))
}

/// Ends the program with the signal that waits for its end, else with this exit code.
pub fn leave(code: i32) -> ! {
    let duty = *duty();
    if let Duty::SaveAndEnd(signal) = duty {
        end_by_signal(signal);
    }
    crate::opencl::end(code)
}
