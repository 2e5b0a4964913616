//! Contains the `tokenizers` library, which panics on some files: a panic inside becomes exit code 3
//! and one line that names the file, whether panics unwind or abort; a hang becomes an error.

use crate::{Error, Result};
use std::cell::RefCell;
use std::panic::{self, PanicHookInfo};
use std::path::{Path, PathBuf};
use std::sync::{Once, mpsc};
use std::time::Duration;

/// Real files load in about a second, on a phone in a few.
const TIME_LIMIT: Duration = Duration::from_secs(20);
/// Address space only; the library recurses into nested parts of the file.
const STACK: usize = 64 << 20;

const REMEDY: &str = "use the tokenizer.json published with the model";

thread_local! {
    /// The file that the library is working on in this thread.
    static FILE: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// Runs a call into the library on behalf of `file`; a panic inside is an error about that file.
pub(super) fn guarded<T>(file: &Path, call: impl FnOnce() -> T) -> Result<T> {
    install_hook();
    let outer = FILE.replace(Some(file.into()));
    // The library's state after a panic: its caches are locked per call and hold whole entries only.
    let result = panic::catch_unwind(panic::AssertUnwindSafe(call));
    FILE.set(outer);
    result.map_err(|payload| failed(file, &*payload))
}

/// [`guarded`], on a thread of its own with a large stack, given up after a time limit.
pub(super) fn guarded_with_limit<T, F>(file: &Path, call: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    within(TIME_LIMIT, file, call)
}

fn within<T, F>(limit: Duration, file: &Path, call: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let owned = file.to_path_buf();
    let thread = move || {
        // A receiver that has given up no longer wants it.
        let _ = sender.send(guarded(&owned, call));
    };
    std::thread::Builder::new()
        .name("tokenizer".into())
        .stack_size(STACK)
        .spawn(thread)
        .map_err(|e| Error::Other(format!("cannot start a thread to load {}: {e}", file.display())))?;
    match receiver.recv_timeout(limit) {
        Ok(result) => result?,
        Err(_) => {
            Err(Error::model(file, format!("not loaded after {} seconds; {REMEDY}", limit.as_secs_f32())))
        }
    }
}

/// Once a process: panics inside [`guarded`] go to [`contain`], all others where they went before.
fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let file = FILE.try_with(|f| f.try_borrow().ok().and_then(|f| f.clone())).ok().flatten();
            match file {
                Some(file) => contain(&file, info),
                None => previous(info),
            }
        }));
    });
}

/// The unwinding build stays quiet: [`guarded`] catches the panic and reports it.
#[cfg(panic = "unwind")]
fn contain(_file: &Path, _info: &PanicHookInfo<'_>) {}

/// The aborting build reports here, before the abort, and leaves.
#[cfg(not(panic = "unwind"))]
fn contain(file: &Path, info: &PanicHookInfo<'_>) {
    let error = failed(file, info.payload());
    eprintln!("error: {error}");
    std::process::exit(error.exit_code())
}

fn failed(file: &Path, payload: &(dyn std::any::Any + Send)) -> Error {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given");
    let line: String = text.lines().next().unwrap_or_default().chars().take(160).collect();
    Error::model(file, format!("the tokenizer library failed on this file: {line}; {REMEDY}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_inside_is_a_model_error() {
        let file = Path::new("dir/tokenizer.json");
        let Err(Error::Model(message)) = guarded(file, || panic!("bad {}\nmore", "merge")) else {
            panic!("not contained")
        };
        assert_eq!(
            message,
            "dir/tokenizer.json: the tokenizer library failed on this file: bad merge; \
             use the tokenizer.json published with the model"
        );
        assert_eq!(guarded(file, || 7), Ok(7));
    }

    #[test]
    fn a_hang_is_a_model_error() {
        let file = Path::new("tokenizer.json");
        let slow = || {
            std::thread::sleep(Duration::from_secs(2));
            Ok(())
        };
        let Err(Error::Model(message)) = within(Duration::from_millis(20), file, slow) else {
            panic!("not contained")
        };
        assert!(message.contains("not loaded after 0.02 seconds"), "{message}");
        let e = within(TIME_LIMIT, file, || -> Result<()> { panic!("inside") });
        assert!(matches!(e, Err(Error::Model(m)) if m.contains("inside")));
    }
}
