//! Output: progress on a terminal, text on stdout, everything else on stderr.

use super::signal::is_ending;
use crate::run::options::PREFILL_CHUNK;
use files::{Error, Result, stderr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{IsTerminal, stdout};

/// Amount of output on stderr.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Verbosity {
    /// Errors only.
    Quiet,
    /// Also warnings and results.
    Normal,
    /// Also settings and events.
    Verbose,
}

/// A line on stderr that is rewritten during long work; shown only on a terminal.
pub struct Progress {
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
            stderr::write(format_args!("\r{} {done}/{all}{end}", self.what));
        }
    }
}

/// Shows a prompt before its text, dimmed, where both come to a terminal. The end of a long one is enough, on lines of
/// its own, as progress is shown after it.
pub fn show_prompt(prompt: &str, verbosity: Verbosity) {
    const MAX_CHARS: usize = 600;
    let terminals = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    if verbosity == Verbosity::Quiet || !terminals {
        return;
    }
    let cut = prompt.char_indices().nth_back(MAX_CHARS - 1).map_or(0, |(at, _)| at);
    let mut text = String::from(if cut > 0 { "…" } else { "" });
    for c in prompt[cut..].chars() {
        if c.is_control() && c != '\n' && c != '\t' { text.extend(c.escape_debug()) } else { text.push(c) }
    }
    let end = if cut > 0 { "\n" } else { "" };
    if has_color() {
        stderr::write(format_args!("\x1b[2m{text}\x1b[0m{end}"));
    } else {
        stderr::write(format_args!("{text}{end}"));
    }
}

/// True if a terminal may show text in another brightness.
pub fn has_color() -> bool {
    !is_dumb() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
}

/// True if the terminal cannot move its cursor.
pub fn is_dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|t| t == "dumb")
}

/// Shows how much of a long prompt is done, unless nothing is to be said.
pub fn prompt_progress(verbosity: Verbosity) -> fn(usize, usize) {
    match verbosity {
        Verbosity::Quiet => |_, _| {},
        _ => |done, all| {
            if all > PREFILL_CHUNK {
                Progress::new("prompt token", Verbosity::Normal).show(done, all);
            }
        },
    }
}

/// Bytes that a pipe with room takes without waiting.
const AT_ONCE: usize = 4096;
/// Interval at which a writer that waits for room checks if the program is to end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes text to stdout at once, and waits for a reader that is slow.
///
/// # Errors
///
/// [`Error::ClosedPipe`], which ends the program quietly: the reader has gone. [`Error::Interrupted`]: a signal came
/// that ends the program.
pub fn put(text: &str) -> Result<()> {
    let failed = |e: Errno| match e {
        Errno::PIPE => Error::ClosedPipe,
        e => Error::Other(format!("cannot write to stdout: {}", std::io::Error::from(e))),
    };
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        if is_ending() {
            return Err(Error::Interrupted);
        }
        match poll(&mut [PollFd::new(&stdout(), PollFlags::OUT)], Some(&LOOK)) {
            Ok(0) | Err(Errno::INTR) => continue,
            ready => ready.map_err(failed)?,
        };
        match rustix::io::write(stdout(), &rest[..rest.len().min(AT_ONCE)]) {
            Ok(n) => rest = &rest[n..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(())
}

/// Ends the line on a terminal, where nothing or something without an end was written.
pub fn end_line() {
    if stdout().is_terminal() {
        let _ = put("\n");
    }
}
