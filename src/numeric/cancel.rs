//! Cancellation, shared between threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A request to stop a running generation; clones share one flag.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Requests the stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears an earlier request.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// The underlying flag, for a signal handler.
    pub fn atomic_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}
