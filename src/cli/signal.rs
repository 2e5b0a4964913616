//! Signals: Ctrl-C once asks the generation to stop, twice leaves at once; what ends the program leaves nothing
//! behind.

use crate::run::session::CancelToken;
use crate::run::system::marker;
use files::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::sync::OnceLock;

/// What Ctrl-C asks to stop, once there is something.
static RUNNING: OnceLock<CancelToken> = OnceLock::new();

/// Waits for signals on a thread of its own, where more than flags can be set.
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
    std::process::exit(Error::Interrupted.exit_code())
}

/// Connects Ctrl-C to `cancel`. While it is already set, another one ends the process with 130; so does the first
/// where nothing is connected.
pub(super) fn connect(cancel: &CancelToken) {
    RUNNING.get_or_init(|| cancel.clone());
}
