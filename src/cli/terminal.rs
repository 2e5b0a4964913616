//! What may be shown where: progress on a terminal, text on stdout, everything else on stderr.

use crate::run::options::PREFILL_CHUNK;
use files::{Error, Result};
use std::io::{ErrorKind, IsTerminal, Write};

/// A line on stderr that is rewritten while long work goes on; silent unless stderr is a real terminal.
pub(super) struct Progress {
    what: &'static str,
    shown: bool,
}

impl Progress {
    pub fn new(what: &'static str, quiet: bool) -> Self {
        Self { what, shown: !quiet && !is_dumb() && std::io::stderr().is_terminal() }
    }

    pub fn show(&self, done: usize, all: usize) {
        if self.shown {
            let end = if done == all { "\r\x1b[K" } else { "" };
            eprint!("\r{} {done}/{all}{end}", self.what);
        }
    }
}

/// Whether the terminal cannot move its cursor.
pub(super) fn is_dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|t| t == "dumb")
}

/// Shows how much of a long prompt is computed.
pub(super) fn prompt_progress(done: usize, all: usize) {
    if all > PREFILL_CHUNK {
        Progress::new("prompt token", false).show(done, all);
    }
}

/// Writes generated text at once. A reader that has gone is not an error of ours.
pub(super) fn put(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Error::ClosedPipe,
        _ => Error::Other(format!("cannot write to stdout: {e}")),
    })
}

/// Ends a line of text that a person is looking at; piped text stays as generated.
pub(super) fn end_line() {
    if std::io::stdout().is_terminal() {
        let _ = put("\n");
    }
}
