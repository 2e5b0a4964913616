//! Threads of the host, for what takes one as long as a fast GPU takes for a pass.

use std::thread;

/// Runs both, `one` in a thread of its own if there is one to be had.
pub fn both(mut one: impl FnMut() + Send, other: impl FnOnce()) {
    let there = thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, &mut one);
        other();
        thread.is_ok()
    });
    if !there {
        one();
    }
}
