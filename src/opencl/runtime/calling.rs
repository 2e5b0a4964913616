//! Which calls of OpenCL are under way.
//!
//! A call that only queues or makes something is made by whoever needs it: handing each of some hundred a token to
//! another thread would cost more than they take, and there is no limit for them, as drivers compile for minutes where a
//! kernel is queued for the first time. Whoever was asked to stop can see here that such a call does not return.

use super::ffi::Api;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls of one thread, which alone writes this.
#[derive(Default)]
struct Calls {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Those of every thread that has ever called.
static ALL: Mutex<Vec<&'static Calls>> = Mutex::new(Vec::new());

thread_local! {
    static MINE: &'static Calls = {
        let mine: &'static Calls = Box::leak(Box::default());
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push(mine);
        mine
    };
}

/// The entry points, for a call that is under way for as long as this is there.
pub(super) struct Calling(&'static Api);

/// A call under way: the thread, and the call's number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnderWay(usize, u64);

/// The calls under way that wait for nothing.
pub fn under_way() -> Vec<UnderWay> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let of = |(thread, calls): (usize, &&Calls)| {
        let begun = calls.begun.load(Ordering::Relaxed);
        (begun != calls.ended.load(Ordering::Relaxed)).then_some(UnderWay(thread, begun))
    };
    all.iter().enumerate().filter_map(of).collect()
}

fn count(of: fn(&Calls) -> &AtomicU64) {
    // A thread that ends may release something after its own data has gone.
    let _ = MINE.try_with(|mine| of(mine).store(of(mine).load(Ordering::Relaxed) + 1, Ordering::Relaxed));
}

impl Calling {
    pub fn new(api: &'static Api) -> Self {
        count(|calls| &calls.begun);
        Self(api)
    }
}

impl Deref for Calling {
    type Target = Api;

    fn deref(&self) -> &Api {
        self.0
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        count(|calls| &calls.ended);
    }
}
