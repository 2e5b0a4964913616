//! What may be shown where: progress on a terminal, text on stdout, everything else on stderr.

use crate::run::options::PREFILL_CHUNK;
use files::{Error, Result};
use std::io::{ErrorKind, IsTerminal, Write};

/// How much is said on stderr.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verbosity {
    /// Errors only.
    Quiet,
    /// What a user should know.
    Normal,
    /// What a user may want to know.
    Verbose,
}

/// A line on stderr that is rewritten during long work; shown only on a terminal.
pub(super) struct Progress {
    what: &'static str,
    shown: bool,
}

impl Progress {
    pub fn new(what: &'static str, verbosity: Verbosity) -> Self {
        let shown = verbosity != Verbosity::Quiet && !is_dumb() && std::io::stderr().is_terminal();
        Self { what, shown }
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

/// Shows how much of a long prompt is done, unless nothing is to be said.
pub(super) fn prompt_progress(verbosity: Verbosity) -> fn(usize, usize) {
    match verbosity {
        Verbosity::Quiet => |_, _| {},
        _ => |done, all| {
            if all > PREFILL_CHUNK {
                Progress::new("prompt token", Verbosity::Normal).show(done, all);
            }
        },
    }
}

/// Writes text to stdout at once. A reader that has gone is [`Error::ClosedPipe`], which ends the program quietly.
pub(super) fn put(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Error::ClosedPipe,
        _ => Error::Other(format!("cannot write to stdout: {e}")),
    })
}

/// Ends the line on a terminal; piped text stays as generated.
pub(super) fn end_line() {
    if std::io::stdout().is_terminal() {
        let _ = put("\n");
    }
}
