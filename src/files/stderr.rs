//! The only writer of stderr. Text that cannot be written is dropped: `eprintln!` would end the program if a disk is
//! full or a terminal has been closed.

use crate::error::{MAX_LINE_BYTES, one_line};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Arguments;
use std::io::stderr;
use std::panic::{self, PanicHookInfo};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// True while a terminal shows a line that goes before other text comes.
static HAS_LINE: AtomicBool = AtomicBool::new(false);
/// True once no such line may follow; held while one is written.
static HAS_ENDED: Mutex<bool> = Mutex::new(false);
/// Number of texts written, other than such lines.
static TEXTS: AtomicUsize = AtomicUsize::new(0);

/// Writes a line to stderr, formatted as by `format!`.
#[macro_export]
macro_rules! print_stderr {
    ($($text:tt)*) => {
        $crate::stderr::write_stderr(::core::format_args!("{}\n", ::core::format_args!($($text)*)))
    };
}

/// Writes text to stderr in one call, so that lines of several threads do not mix.
pub fn write_stderr(text: Arguments<'_>) {
    TEXTS.fetch_add(1, Ordering::Relaxed);
    let erase = if HAS_LINE.swap(false, Ordering::Relaxed) { "\r\x1b[K" } else { "" };
    write_bytes(format!("{erase}{text}").as_bytes());
}

/// Number of texts written so far.
pub fn count_texts() -> usize {
    TEXTS.load(Ordering::Relaxed)
}

/// Shows a line, in place of the one before, until other text comes.
pub fn rewrite_line(line: &str) {
    let has_ended = HAS_ENDED.lock().unwrap_or_else(PoisonError::into_inner);
    if *has_ended {
        return;
    }
    HAS_LINE.store(true, Ordering::Relaxed);
    write_bytes(format!("\r{line}\x1b[K").as_bytes());
}

/// Lets [`rewrite_line`] show no more lines, because the program ends. Does not wait for a terminal that is stopped.
pub fn stop_lines() {
    for _ in 0..20 {
        if let Ok(mut has_ended) = HAS_ENDED.try_lock() {
            *has_ended = true;
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Erases the line that [`rewrite_line`] shows, if there is one, because other text comes.
pub fn erase_line() {
    write_stderr(format_args!(""));
}

/// True if text on a terminal may be dimmed or coloured.
pub fn has_color() -> bool {
    !is_dumb() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
}

/// True if the terminal cannot move its cursor.
pub fn is_dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|t| t == "dumb")
}

fn write_bytes(mut rest: &[u8]) {
    while !rest.is_empty() {
        match rustix::io::write(stderr(), rest) {
            Ok(n) if n > 0 => rest = &rest[n..],
            Err(Errno::INTR) => {}
            // The pipe is full, and another process has made it non-blocking.
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(&stderr(), PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            },
            _ => return,
        }
    }
}

/// Sets a panic hook that prints panics through [`write_stderr`].
pub fn install_panic_hook() {
    panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        print_stderr!("error: {}", one_line(&info.to_string().replace('\n', " "), MAX_LINE_BYTES));
        // A release has no symbols, so a trace would name nothing.
        if cfg!(debug_assertions) && Backtrace::capture().status() == BacktraceStatus::Captured {
            print_stderr!("{}", Backtrace::capture());
        }
    }));
}
