//! The engines and sessions that C code has handles of.

use files::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Distance of two handles, so that they look like addresses of pointers.
const STEP: usize = 16;

/// The last handle; no two tables give out the same one.
static LAST: AtomicUsize = AtomicUsize::new(0);

/// Values by their handles.
pub struct HandleTable<T> {
    /// The word for a value in messages.
    kind: &'static str,
    entries: Mutex<BTreeMap<usize, Arc<T>>>,
}

impl<T> HandleTable<T> {
    pub const fn new(kind: &'static str) -> Self {
        Self { kind, entries: Mutex::new(BTreeMap::new()) }
    }

    /// Adds a value and returns its handle.
    pub fn insert(&self, value: T) -> usize {
        let handle = LAST.fetch_add(STEP, Ordering::Relaxed) + STEP;
        self.lock().insert(handle, Arc::new(value));
        handle
    }

    /// Finds the value of a handle.
    ///
    /// # Errors
    ///
    /// `Usage`: it is null, freed or of another kind.
    pub fn find_entry(&self, handle: usize) -> Result<Arc<T>> {
        self.lock().get(&handle).map(Arc::clone).ok_or_else(|| self.unknown_handle(handle))
    }

    /// Removes a value, which lives until calls that use it return.
    ///
    /// # Errors
    ///
    /// Errors of [`HandleTable::find_entry`].
    pub fn remove(&self, handle: usize) -> Result<Arc<T>> {
        self.lock().remove(&handle).ok_or_else(|| self.unknown_handle(handle))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<T>>> {
        // An insertion or a removal is done or not.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unknown_handle(&self, handle: usize) -> Error {
        let kind = self.kind;
        Error::Usage(match handle {
            0 => format!("`{kind}` is NULL"),
            _ => format!("`{kind}` {handle:#x} is not an open {kind}; was it freed?"),
        })
    }
}
