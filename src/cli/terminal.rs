//! Output: progress on a terminal, text on stdout, everything else on stderr.

use super::signal::is_ending;
use files::progress::ProgressLine;
pub use files::stderr::{has_color, is_dumb};
use files::{Error, Result, stderr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::borrow::Cow;
use std::io::{IsTerminal, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

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

/// A function that shows how much of long work is done, unless quiet. The same work may begin again.
pub fn track_progress(
    label: &'static str,
    unit: &'static str,
    verbosity: Verbosity,
) -> impl Fn(usize, usize) + Send + Sync + 'static {
    let line = Mutex::new(None::<ProgressLine>);
    move |done, all| {
        let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
        if done == 0 || done >= all {
            *line = None;
        }
        if done < all && verbosity != Verbosity::Quiet {
            line.get_or_insert_with(|| ProgressLine::new(label, unit)).show_progress(done, all);
        }
    }
}

/// True while the cursor is behind the prompt, where the text goes on: a progress line would erase it.
static IS_PROMPT_OPEN: AtomicBool = AtomicBool::new(false);

/// Erases a line of progress, before the program ends.
pub fn erase_line_at_end() {
    write_last("");
}

/// Erases a line of progress and the `^C` after it, before the program ends.
pub fn erase_progress() {
    write_last("\r\x1b[K");
}

/// Ends an unfinished line of text, before the program ends.
pub fn break_line() {
    write_last("\n");
}

/// Writes to stderr in place of a line of progress, and lets no other follow, if it is a terminal that is not stopped: the
/// end of the program never waits for it.
fn write_last(text: &str) {
    stderr::stop_lines();
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
    IS_PROMPT_OPEN.store(cut == 0, Ordering::Relaxed);
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

/// A function that shows the progress of a long prompt, unless quiet.
pub fn prompt_progress(verbosity: Verbosity) -> impl Fn(usize, usize) + Send + Sync + 'static {
    let show = track_progress("reading the prompt", "tokens", verbosity);
    move |done, all| {
        if !IS_PROMPT_OPEN.load(Ordering::Relaxed) {
            show(done, all);
        }
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
    stderr::erase_line();
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
