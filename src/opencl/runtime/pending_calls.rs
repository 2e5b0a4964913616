//! Tracks the OpenCL calls in progress.
//!
//! Calls that only queue or create something run on the calling thread: handing some hundred calls per token to another
//! thread would cost more than they take. They have no timeout, because drivers may compile for minutes when a kernel
//! is first queued. After a request to stop, this module tells whether such a call is stuck.

use super::ffi::Api;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Counters of one thread, written only by that thread.
#[derive(Default)]
struct CallCounters {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Counters of every thread that has made a call.
static ALL: Mutex<Vec<&'static CallCounters>> = Mutex::new(Vec::new());

thread_local! {
    static MINE: &'static CallCounters = {
        let mine: &'static CallCounters = Box::leak(Box::default());
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push(mine);
        mine
    };
}

/// Entry points, counted as a call in progress until dropped.
pub(super) struct ApiGuard(&'static Api);

/// A call in progress: the thread, and the number of the call on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingCall(usize, u64);

/// Calls in progress that do not wait for the device.
pub fn calls_in_progress() -> Vec<PendingCall> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let of = |(thread, calls): (usize, &&CallCounters)| {
        let begun = calls.begun.load(Ordering::Relaxed);
        (begun != calls.ended.load(Ordering::Relaxed)).then_some(PendingCall(thread, begun))
    };
    all.iter().enumerate().filter_map(of).collect()
}

fn increment_counter(of: fn(&CallCounters) -> &AtomicU64) {
    // A thread that ends may release objects after its thread-locals are gone.
    let _ = MINE.try_with(|mine| of(mine).store(of(mine).load(Ordering::Relaxed) + 1, Ordering::Relaxed));
}

impl ApiGuard {
    pub fn new(api: &'static Api) -> Self {
        increment_counter(|calls| &calls.begun);
        Self(api)
    }
}

impl Deref for ApiGuard {
    type Target = Api;

    fn deref(&self) -> &Api {
        self.0
    }
}

impl Drop for ApiGuard {
    fn drop(&mut self) {
        increment_counter(|calls| &calls.ended);
    }
}
