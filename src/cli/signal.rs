//! Signals: the first Ctrl-C stops the generation, the second ends the program. No signal leaves a marker or a changed
//! terminal behind.

use crate::run::session::CancelToken;
use crate::run::system::marker;
use files::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::sync::OnceLock;

/// What Ctrl-C stops, once something runs.
static RUNNING: OnceLock<CancelToken> = OnceLock::new();

/// Waits for signals on a thread of its own, which may do more than a signal handler may.
pub(super) fn watch() -> Result<()> {
    let failed = |e: std::io::Error| Error::Other(format!("cannot catch Ctrl-C: {e}"));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(failed)?;
    let thread = std::thread::Builder::new().name("signals".into()).stack_size(256 << 10);
    let wait = move || signals.forever().for_each(arrived);
    thread.spawn(wait).map(|_| ()).map_err(failed)
}

fn arrived(signal: i32) {
    match RUNNING.get() {
        Some(cancel) if signal == SIGINT && !cancel.is_cancelled() => return cancel.cancel(),
        _ => marker::remove(),
    }
    #[cfg(feature = "line-editor")]
    super::mode::restore();
    if signal != SIGINT {
        let _ = emulate_default_handler(signal);
    }
    crate::opencl::end(Error::Interrupted.exit_code())
}

/// Connects Ctrl-C to `cancel`. If it is already set, or nothing is connected, Ctrl-C ends the process with 130.
pub(super) fn connect(cancel: &CancelToken) {
    RUNNING.get_or_init(|| cancel.clone());
}
