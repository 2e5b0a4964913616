//! Output: progress on a terminal, text on stdout, everything else on stderr.

use super::signal::is_ending;
use crate::run::options::PREFILL_CHUNK;
use files::{Error, Result, stderr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::borrow::Cow;
use std::io::{IsTerminal, stdout};
use std::sync::Mutex;
use std::time::Duration;

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
pub struct ProgressLine {
    label: &'static str,
    shown: bool,
}

impl ProgressLine {
    pub fn new(what: &'static str, verbosity: Verbosity) -> Self {
        let shown = verbosity != Verbosity::Quiet && !is_dumb() && std::io::stderr().is_terminal();
        Self { label: what, shown }
    }

    pub fn show_progress(&self, done: usize, all: usize) {
        if self.shown {
            let _held = PROGRESS.lock();
            let end = if done == all { "\r\x1b[K" } else { "" };
            stderr::write_stderr(format_args!("\r{} {done}/{all}{end}", self.label));
        }
    }
}

/// Held while a line of progress is written.
static PROGRESS: Mutex<()> = Mutex::new(());

/// Erases an unfinished line of progress and the `^C` after it, and lets no other follow; before the program ends.
pub fn erase_progress() {
    for _ in 0..20 {
        if let Ok(held) = PROGRESS.try_lock() {
            std::mem::forget(held);
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    write_last("\r\x1b[K");
}

/// Ends an unfinished line of text, before the program ends.
pub fn break_line() {
    write_last("\n");
}

/// Writes to stderr if it is a terminal that is not stopped: the end of the program never waits for it.
fn write_last(text: &str) {
    let ready = || poll(&mut [PollFd::new(&std::io::stderr(), PollFlags::OUT)], Some(&Timespec::default()));
    if !is_dumb() && std::io::stderr().is_terminal() && ready() == Ok(1) {
        stderr::write_stderr(format_args!("{text}"));
    }
}

/// The prompt as it is shown before the text, if both go to a terminal. Of a long prompt only the end is shown, on
/// separate lines because progress follows it.
pub fn shown_prompt(prompt: &str, verbosity: Verbosity) -> Option<String> {
    const MAX_CHARS: usize = 600;
    let terminals = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    if verbosity == Verbosity::Quiet || !terminals {
        return None;
    }
    let cut = prompt.char_indices().nth_back(MAX_CHARS - 1).map_or(0, |(at, _)| at);
    let mut text = String::from(if cut > 0 { "…" } else { "" });
    for c in prompt[cut..].chars() {
        if c.is_control() && c != '\n' && c != '\t' { text.extend(c.escape_debug()) } else { text.push(c) }
    }
    text += if cut > 0 { "\n" } else { "" };
    Some(text)
}

/// Style of text on a terminal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Bold,
    Dim,
}

/// The text in a style, if stderr is a terminal that has styles.
pub fn style_text(style: Style, text: &str) -> Cow<'_, str> {
    if text.is_empty() || !has_color() || !std::io::stderr().is_terminal() {
        return text.into();
    }
    let code = if style == Style::Bold { 1 } else { 2 };
    format!("\x1b[{code}m{text}\x1b[0m").into()
}

/// True if text on a terminal may have a style.
pub fn has_color() -> bool {
    !is_dumb() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
}

/// True if the terminal cannot move its cursor.
pub fn is_dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|t| t == "dumb")
}

/// A function that shows the progress of a long prompt, unless quiet.
pub fn prompt_progress(verbosity: Verbosity) -> fn(usize, usize) {
    match verbosity {
        Verbosity::Quiet => |_, _| {},
        _ => |done, all| {
            if all > PREFILL_CHUNK {
                ProgressLine::new("prompt token", Verbosity::Normal).show_progress(done, all);
            }
        },
    }
}

/// Bytes that a pipe with room accepts without blocking.
const WRITE_BYTES: usize = 4096;
/// Interval at which a waiting writer checks if the program must end.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes text to stdout immediately; waits for a slow reader.
///
/// # Errors
///
/// [`Error::ClosedPipe`] if the reader is gone, which ends the program quietly. [`Error::Interrupted`] if a signal ends
/// the program.
pub fn write_stdout(text: &str) -> Result<()> {
    let failed = |e: Errno| match e {
        Errno::PIPE => Error::ClosedPipe,
        e => Error::Other(format!("cannot write to stdout: {}", std::io::Error::from(e))),
    };
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        if is_ending() {
            return Err(Error::Interrupted);
        }
        match poll(&mut [PollFd::new(&stdout(), PollFlags::OUT)], Some(&POLL_INTERVAL)) {
            Ok(0) | Err(Errno::INTR) => continue,
            ready => ready.map_err(failed)?,
        };
        match rustix::io::write(stdout(), &rest[..rest.len().min(WRITE_BYTES)]) {
            Ok(n) => rest = &rest[n..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(())
}

/// Ends the line if stdout is a terminal; for output that may not end with a line break.
pub fn end_line() {
    if stdout().is_terminal() {
        let _ = write_stdout("\n");
    }
}
