//! Limits on compiling a grammar: its own thread, a time limit, and as much work, memory and depth as real grammars
//! need.

use crate::{Error, Result};
use files::catch_panic::{PanicContext, catch_panic_within};
use llguidance::api::ParserLimits;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Maximum bytes of a grammar.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Maximum bytes of a regular expression: memory grows with the square of its length, to 20 MB here.
pub(super) const MAX_PATTERN: usize = 16 << 10;
/// Maximum nesting of schemas or rules.
pub(super) const MAX_LEVELS: usize = 1024;

/// Time limit of a compilation. Real grammars take milliseconds, or a second with a large vocabulary on a phone.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of grammars compiled at once: one that timed out still runs until its fuel is used up.
const MAX_AT_ONCE: usize = 8;

/// A counting semaphore for grammars that are compiled at the same time.
pub(super) struct CompileSlots {
    free: Mutex<usize>,
    released: Condvar,
}

static SLOTS: CompileSlots = CompileSlots::new(MAX_AT_ONCE);

/// A taken slot, until it is dropped.
pub(super) struct CompileSlot(&'static CompileSlots);

impl CompileSlots {
    pub const fn new(free: usize) -> Self {
        Self { free: Mutex::new(free), released: Condvar::new() }
    }

    /// Waits for a slot, at most for `timeout`.
    pub fn acquire_slot(&'static self, timeout: Duration) -> Result<CompileSlot> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.released.wait_timeout_while(free, timeout, |free| *free == 0);
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *free = free
            .checked_sub(1)
            .ok_or_else(|| Error::Memory("too many grammars are being compiled; try again later".into()))?;
        Ok(CompileSlot(self))
    }
}

impl Drop for CompileSlot {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.released.notify_one();
    }
}

/// Limits of `llguidance`: fewer lexer states than by default (each takes up to 2 KB), less fuel (it bounds the memory
/// of compiling), and longer rows (an object of a thousand properties has 4,007 items).
pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_items_in_row: 8192,
        initial_lexer_fuel: 250_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Runs `compile` on its own thread; `place` names the grammar in messages.
///
/// # Errors
///
/// `Usage` if it fails or takes too long, `Memory` if too many grammars are being compiled.
pub(super) fn compile_contained<T: Send + 'static>(
    place: &str,
    compile: impl FnOnce() -> std::result::Result<T, String> + Send + 'static,
) -> Result<T> {
    let slot = SLOTS.acquire_slot(TIME_LIMIT)?;
    let subject = PanicContext {
        place: place.to_owned(),
        panic_message: "this grammar cannot be compiled",
        timeout_message: "the grammar is not compiled",
        remedy: "use a simpler one",
    };
    let compiled = catch_panic_within(TIME_LIMIT, &subject, move || {
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

/// Shortens a message of the compiler to its first line, and its last line if the first ends with a colon.
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
