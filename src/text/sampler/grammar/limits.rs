//! Compiling with bounds: on a thread of its own, within a time, and with as much work, memory and depth as real
//! grammars need.

use crate::{Error, Result};
use files::containment::{Subject, guarded_within};
use llguidance::api::ParserLimits;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Bytes of a grammar, at most.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Bytes of a regular expression: compiling one takes memory with the square of its length, 20 MB here.
pub(super) const MAX_PATTERN: usize = 16 << 10;
/// Schemas or rules in each other, at most.
pub(super) const MAX_LEVELS: usize = 1024;

/// Real grammars take milliseconds, with a large vocabulary a second on a phone.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Grammars that are compiled at the same time: one that is given up goes on until it has used up its fuel.
const MOST_AT_ONCE: usize = 8;

/// Slots for grammars that are compiled at the same time.
pub(super) struct CompileSlots {
    free: Mutex<usize>,
    left: Condvar,
}

static SLOTS: CompileSlots = CompileSlots::new(MOST_AT_ONCE);

/// A taken slot, until it is dropped.
pub(super) struct CompileSlot(&'static CompileSlots);

impl CompileSlots {
    pub const fn new(free: usize) -> Self {
        Self { free: Mutex::new(free), left: Condvar::new() }
    }

    /// Waits for a slot, at most for `patience`.
    pub fn take(&'static self, patience: Duration) -> Result<CompileSlot> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.left.wait_timeout_while(free, patience, |free| *free == 0);
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(1).ok_or_else(|| {
            Error::Memory("as many grammars are being compiled as may be; try again later".into())
        })?;
        Ok(CompileSlot(self))
    }
}

impl Drop for CompileSlot {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.left.notify_one();
    }
}

/// Limits of `llguidance`: fewer lexer states than by default, which take up to two kilobytes each, less fuel, which
/// bounds the memory of compiling, and longer rows, of
/// which an object of a thousand properties has 4,007 items.
pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_items_in_row: 8192,
        initial_lexer_fuel: 250_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiles on a thread of its own; `place` names the grammar in messages.
///
/// # Errors
///
/// `Usage` where that fails or takes too long, `Memory` where too many are compiled already.
pub(super) fn compile_contained<T: Send + 'static>(
    place: &str,
    compile: impl FnOnce() -> std::result::Result<T, String> + Send + 'static,
) -> Result<T> {
    let slot = SLOTS.take(TIME_LIMIT)?;
    let subject = Subject {
        place: place.to_owned(),
        panicked: "this grammar cannot be compiled",
        hung: "the grammar is not compiled",
        remedy: "use a simpler one",
    };
    let compiled = guarded_within(TIME_LIMIT, &subject, move || {
        let _slot = slot;
        Ok(compile())
    });
    match compiled {
        Ok(Ok(compiled)) => Ok(compiled),
        Ok(Err(why)) => Err(Error::Usage(format!("{place}: {}", one_line(&why)))),
        Err(Error::Model(why)) => Err(Error::Usage(why)),
        Err(other) => Err(other),
    }
}

/// Shortens a message of the compiler to one line: its first one, and where that only begins it, its last one.
pub(super) fn one_line(text: &str) -> String {
    const MOST: usize = 400;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or("no reason given");
    let last = lines.next_back().filter(|_| first.ends_with(':')).unwrap_or_default();
    let line = format!("{first} {last}").split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
