//! What was found out about a program, kept with it: verdicts of self-tests, tuned numbers, crashes.

use super::Program;
use crate::device::Shared;
use crate::failure::{Failure, Kind, Result};
use crate::program_cache::{Entry, Key, Marker, Notes, Trial, Verdict};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the cache is told of a program.
pub(super) struct Kept {
    pub key: Key,
    pub risk: Risk,
    pub notes: Mutex<Notes>,
}

/// Whether a program may be what a driver crashes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Risk {
    Baseline,
    Variant,
}

impl Program {
    fn kept(&self) -> &Kept {
        self.kept.as_ref().expect("set by `build_with`")
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.kept().notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts binary and notes to the cache.
    pub(super) fn save(&self) {
        let notes = self.notes().clone();
        self.shared.cache.save(&self.kept().key, &Entry { binary: self.binary(), notes });
    }

    /// Whether `kernel` has computed what it should; `None` where nobody has tried.
    pub fn verdict(&self, kernel: &str) -> Option<Verdict> {
        self.notes().verdicts.get(kernel).copied()
    }

    /// Notes verdicts for good.
    pub fn set_verdicts<'a>(&self, verdicts: impl IntoIterator<Item = (&'a str, Verdict)>) {
        self.notes().verdicts.extend(verdicts.into_iter().map(|(kernel, verdict)| (kernel.into(), verdict)));
        self.save();
    }

    /// The verdict on `kernel`: what is noted, else what `test` finds, which is then noted. A driver that
    /// crashes in the test of a variant does so only once: see [`Program::build_variant`].
    ///
    /// # Errors
    /// Those of `test`, which are no verdict.
    pub fn judge(&self, kernel: &str, test: impl FnOnce() -> Result<Verdict>) -> Result<Verdict> {
        if let Some(verdict) = self.verdict(kernel) {
            return Ok(verdict);
        }
        let kept = self.kept();
        let _marker = match kept.risk {
            Risk::Baseline => None,
            Risk::Variant => marker(&self.shared, &kept.key, &self.name)?,
        };
        let verdict = test()?;
        self.set_verdicts([(kernel, verdict)]);
        Ok(verdict)
    }

    /// A number that was found out for this program, e.g. the best work-group size of a kernel.
    pub fn tuned(&self, name: &str) -> Option<i64> {
        self.notes().tuned.get(name).copied()
    }

    /// Notes numbers for good.
    pub fn set_tuned<'a>(&self, numbers: impl IntoIterator<Item = (&'a str, i64)>) {
        self.notes().tuned.extend(numbers.into_iter().map(|(name, number)| (name.into(), number)));
        self.save();
    }
}

/// Marks the trial of a variant, unless an earlier one ended in a crash.
pub(super) fn marker(shared: &Shared, key: &Key, name: &str) -> Result<Option<Marker>> {
    match shared.cache.try_out(key) {
        Trial::Marked(marker) => Ok(Some(marker)),
        Trial::Unmarked => Ok(None),
        Trial::Crashed(path) => {
            let path = path.display();
            let message = format!("{name} is left out: the driver crashed on it; remove {path} to try again");
            Err(Failure::new(Kind::Build, message))
        }
    }
}
