//! Threads of the host: for what takes one as long as a fast GPU takes for a pass, and those of the driver.

use numeric::pool::on_big_cores;
use opencl_runtime::device::{self, Device};
use opencl_runtime::facts::Facts;
use opencl_runtime::failure::Result;
use opencl_runtime::program_cache::Cache;
use std::sync::Once;
use std::thread;

/// As [`device::facts_of`]. A driver starts threads when it is first asked and when a device is opened, and they inherit
/// cores: on a phone's little ones each launch would take longer.
pub fn facts_of(select: Option<&str>) -> Option<&'static Facts> {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| drop(on_big_cores(device::devices)));
    device::facts_of(select)
}

/// As [`Device::open`], for the same reason. Binaries are not kept where the driver keeps them.
pub fn open(select: Option<&str>, cache: Cache) -> Result<Device> {
    let cache = match facts_of(select) {
        Some(facts) if facts.keeps_programs() => cache.without_binaries(),
        _ => cache,
    };
    on_big_cores(|| Device::open(select, cache))
}

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
