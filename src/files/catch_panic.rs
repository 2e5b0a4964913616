//! Turns panics and hangs of libraries into errors.
//!
//! A panic becomes a one-line error that names the file, with exit code 3, whether panics unwind or abort. A hang
//! becomes an error after a time limit.

use crate::error::escape;
use crate::{Error, Result};
use std::cell::RefCell;
use std::panic::{self, PanicHookInfo};
use std::sync::{Once, mpsc};
use std::time::Duration;

/// Default time limit. Real files load in about a second, on a phone in a few seconds.
const TIME_LIMIT: Duration = Duration::from_secs(20);
/// Bytes of the stack of a guarded thread, for deeply nested input. Only address space until it is used.
pub const STACK_BYTES: usize = 64 << 20;

/// The input of a guarded call, and the texts that report its failures.
#[derive(Debug, Clone)]
pub struct PanicContext {
    /// The file, and the field in it.
    pub place: String,
    /// Text for a panic; the panic's message follows.
    pub panic_message: &'static str,
    /// Text for a timeout, e.g. "not loaded"; the time limit follows.
    pub timeout_message: &'static str,
    pub remedy: &'static str,
}

thread_local! {
    /// Input of the guarded call that runs on this thread.
    static SUBJECT: RefCell<Option<PanicContext>> = const { RefCell::new(None) };
}

/// Runs a call into a library; a panic becomes an error about `subject`. State that the call shares with other code
/// must stay consistent when it panics.
pub fn catch_panic<T>(subject: &PanicContext, call: impl FnOnce() -> T) -> Result<T> {
    install_hook();
    let outer = SUBJECT.replace(Some(subject.clone()));
    let result = panic::catch_unwind(panic::AssertUnwindSafe(call));
    SUBJECT.set(outer);
    result.map_err(|payload| panic_error(subject, &*payload))
}

/// Runs [`catch_panic`] on a new thread with a large stack and a time limit. If the system allows no thread, it runs on
/// this one without a limit.
pub fn catch_panic_with_timeout<T, F>(subject: &PanicContext, call: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    run_on_thread(TIME_LIMIT, subject, call).unwrap_or_else(|call| catch_panic(subject, call)?)
}

/// Runs [`catch_panic`] on a new thread with a large stack and the given time limit.
///
/// # Errors
///
/// [`Error::Memory`]: the system allows no thread. Otherwise as [`catch_panic`].
pub fn catch_panic_within<T, F>(limit: Duration, subject: &PanicContext, call: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let no_thread = |_| Err(Error::Memory(format!("{}: no memory for a thread; try again", subject.place)));
    run_on_thread(limit, subject, call).unwrap_or_else(no_thread)
}

/// Runs a call on a new thread; gives it back if the system allows no thread.
fn run_on_thread<T, F>(limit: Duration, subject: &PanicContext, call: F) -> std::result::Result<Result<T>, F>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let PanicContext { place, timeout_message: hung, remedy, .. } = subject;
    // The call is sent once the thread exists, so that it can be returned if there is none.
    let (call_sender, call_receiver) = mpsc::sync_channel(1);
    let (sender, receiver) = mpsc::sync_channel(1);
    let owned = subject.clone();
    let thread = move || {
        if let Ok(call) = call_receiver.recv() {
            // After the time limit the receiver is gone.
            let _ = sender.send(catch_panic(&owned, call));
        }
    };
    let Ok(thread) = std::thread::Builder::new().name("guarded".into()).stack_size(STACK_BYTES).spawn(thread)
    else {
        return Err(call);
    };
    let _ = call_sender.send(call);
    Ok(match receiver.recv_timeout(limit) {
        Ok(result) => {
            // The thread is about to end; joining it frees the library's thread-local data.
            let _ = thread.join();
            result.unwrap_or_else(Err)
        }
        Err(_) => {
            Err(Error::Model(format!("{place}: {hung} after {} seconds; {remedy}", limit.as_secs_f32())))
        }
    })
}

/// Sends panics inside [`catch_panic`] to [`report_panic`], and all others to the previous hook. Installed once.
fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let subject = SUBJECT.try_with(|s| s.try_borrow().ok().and_then(|s| s.clone())).ok().flatten();
            match subject {
                Some(subject) => report_panic(&subject, info),
                None => previous(info),
            }
        }));
    });
}

/// Does nothing if panics unwind: [`catch_panic`] catches the panic and reports it.
#[cfg(panic = "unwind")]
fn report_panic(_subject: &PanicContext, _info: &PanicHookInfo<'_>) {}

/// Prints the error and ends the process, before the panic aborts it.
#[cfg(not(panic = "unwind"))]
fn report_panic(subject: &PanicContext, info: &PanicHookInfo<'_>) {
    let error = panic_error(subject, info.payload());
    crate::print_stderr!("error: {error}");
    std::process::exit(error.exit_code())
}

fn panic_error(subject: &PanicContext, payload: &(dyn std::any::Any + Send)) -> Error {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given");
    let line = escape(text.lines().next().unwrap_or_default());
    let PanicContext { place, panic_message: panicked, remedy, .. } = subject;
    Error::Model(format!("{place}: {panicked}: {line}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject() -> PanicContext {
        PanicContext {
            place: "dir/file.json".into(),
            panic_message: "the library failed on this file",
            timeout_message: "not loaded",
            remedy: "use another",
        }
    }

    #[test]
    fn a_panic_inside_is_a_model_error() {
        let Err(Error::Model(message)) = catch_panic(&subject(), || panic!("bad {}\nmore", "merge")) else {
            panic!("not contained")
        };
        assert_eq!(message, "dir/file.json: the library failed on this file: bad merge; use another");
        assert_eq!(catch_panic(&subject(), || 7), Ok(7));
    }

    #[test]
    fn a_hang_is_a_model_error() {
        let slow = || {
            std::thread::sleep(Duration::from_secs(2));
            Ok(())
        };
        let Err(Error::Model(message)) = catch_panic_within(Duration::from_millis(20), &subject(), slow)
        else {
            panic!("not contained")
        };
        assert_eq!(message, "dir/file.json: not loaded after 0.02 seconds; use another");
        let e = catch_panic_with_timeout(&subject(), || -> Result<()> { panic!("inside") });
        assert!(matches!(e, Err(Error::Model(m)) if m.contains("inside")));
    }
}
