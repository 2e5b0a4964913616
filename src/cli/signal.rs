//! Ctrl-C: once asks the generation to stop, twice leaves at once.

use crate::error::{Error, Result};
use crate::session::CancelToken;
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// Connects Ctrl-C to `cancel`. While it is already set, another one ends the process with 130.
pub(super) fn connect(cancel: &CancelToken) -> Result<()> {
    flag::register_conditional_shutdown(SIGINT, Error::Interrupted.exit_code(), cancel.flag())
        .and_then(|_| flag::register(SIGINT, cancel.flag()))
        .map(|_| ())
        .map_err(|e| Error::Other(format!("cannot catch Ctrl-C: {e}")))
}
