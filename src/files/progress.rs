//! The progress of long work: a line on stderr that appears after a second, on terminals only, and disappears before
//! any other text.

use crate::stderr;
use rustix::termios::tcgetwinsize;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Work that takes no longer shows nothing.
const DELAY: Duration = Duration::from_secs(1);
/// Columns of the bar behind the numbers. A shorter one than the minimum says nothing.
const MAX_BAR: usize = 30;
const MIN_BAR: usize = 8;
/// Columns of a terminal that does not tell its size.
const COLUMNS: usize = 80;
/// Bytes of stack of the thread that waits for the delay.
const STACK: usize = 64 << 10;

/// The latest work, and true while a thread waits to draw it: many short works need no more than one thread.
static LATEST: Mutex<(Weak<Mutex<Work>>, bool)> = Mutex::new((Weak::new(), false));

/// A line such as `packing: 3 of 12 tensors` with a bar. The default shows nothing.
#[derive(Default)]
pub struct ProgressLine(Option<Arc<Mutex<Work>>>);

struct Work {
    label: String,
    unit: &'static str,
    done: usize,
    all: usize,
    due: Instant,
    /// Number of texts on stderr when it began.
    texts: usize,
    drawn: String,
}

impl ProgressLine {
    /// Begins to count `unit`, which may be empty.
    pub fn new(label: impl Into<String>, unit: &'static str) -> Self {
        if stderr::is_dumb() || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let (due, drawn) = (Instant::now() + choose_delay(), String::new());
        let texts = stderr::count_texts();
        let work = Work { label: label.into(), unit, done: 0, all: 0, due, texts, drawn };
        let work = Arc::new(Mutex::new(work));
        let mut latest = lock(&LATEST);
        latest.0 = Arc::downgrade(&work);
        // Without a thread, the line appears with the first progress after the delay.
        if !std::mem::replace(&mut latest.1, true) {
            let _ = thread::Builder::new().name("progress".into()).stack_size(STACK).spawn(draw_latest);
        }
        drop(latest);
        Self(Some(work))
    }

    /// Shows that `done` of `all` are done; erases the line if all are.
    pub fn show_progress(&self, done: usize, all: usize) {
        if let Some(work) = &self.0 {
            let mut work = lock(work);
            (work.done, work.all) = (done, all);
            work.draw_line();
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.show_progress(0, 0);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Zero for tests, in which no work is long.
fn choose_delay() -> Duration {
    let at_once = cfg!(debug_assertions) && std::env::var_os("ANTIGRAVITY_PROGRESS_AT_ONCE").is_some();
    if at_once { Duration::ZERO } else { DELAY }
}

/// Draws the latest work once it is due, if it has not ended before.
fn draw_latest() {
    loop {
        let mut latest = lock(&LATEST);
        let Some(work) = latest.0.upgrade() else {
            latest.1 = false;
            return;
        };
        let wait = lock(&work).due.saturating_duration_since(Instant::now());
        latest.1 = !wait.is_zero();
        drop(latest);
        if wait.is_zero() {
            let mut work = lock(&work);
            // Other text may say that the work was interrupted.
            if stderr::count_texts() == work.texts {
                work.draw_line();
            }
            return;
        }
        drop(work);
        thread::sleep(wait);
    }
}

impl Work {
    fn draw_line(&mut self) {
        if self.done >= self.all {
            self.drawn.clear();
            return stderr::erase_line();
        }
        if Instant::now() < self.due {
            return;
        }
        let size = tcgetwinsize(std::io::stderr()).map_or(0, |size| size.ws_col.into());
        let line = self.format_line(if size == 0 { COLUMNS } else { size });
        if line != self.drawn {
            stderr::rewrite_line(&line);
            self.drawn = line;
        }
    }

    /// The line in fewer than `columns` columns: a full one would be continued in the next row.
    fn format_line(&self, columns: usize) -> String {
        let Self { label, unit, done, all, .. } = self;
        let width = all.to_string().len();
        let text = format!("{label}: {done:>width$} of {all} {unit}");
        let text: String = text.trim_end().chars().take(columns.saturating_sub(1)).collect();
        let room = columns.saturating_sub(text.chars().count() + 3).min(MAX_BAR);
        if room < MIN_BAR {
            return text;
        }
        let full = room * done / all;
        let [color, plain] = if stderr::has_color() { ["\x1b[36m", "\x1b[39m"] } else { [""; 2] };
        format!("{text}  {color}{}{plain}{}", "━".repeat(full), "─".repeat(room - full))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_into_its_terminal() {
        let (label, drawn) = ("packing".into(), String::new());
        let work = Work { label, unit: "tensors", done: 30, all: 120, due: Instant::now(), texts: 0, drawn };
        let plain = |columns| work.format_line(columns).replace("\x1b[36m", "").replace("\x1b[39m", "");
        let text = "packing:  30 of 120 tensors";
        assert_eq!(plain(100), format!("{text}  {}{}", "━".repeat(7), "─".repeat(23)));
        assert_eq!(plain(40), format!("{text}  {}{}", "━".repeat(2), "─".repeat(8)));
        assert_eq!((plain(35), plain(8), plain(0)), (text.into(), "packing".into(), String::new()));
        assert!((0..200).all(|columns| plain(columns).chars().count() < columns.max(1)));
    }
}
