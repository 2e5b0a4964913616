//! Host threads: helpers for work that takes one thread as long as a pass takes a fast GPU, and the driver's own.

use crate::dims::*;
use numeric::pool::run_on_big_cores;
use opencl_runtime::device::{self, Device};
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::{Failure, FailureKind, Result};
use opencl_runtime::program_cache::Cache;
use std::sync::Once;
use std::thread;

/// [`device::select_info`], called on the performance cores. A driver starts threads when it is first used and when a
/// device is opened, and they inherit the CPU affinity: on a phone's efficiency cores every launch would take longer.
pub fn facts_of(select: Option<&str>) -> Option<&'static DeviceInfo> {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| drop(run_on_big_cores(device::list_devices)));
    device::select_info(select)
}

/// [`Device::open`], called on the performance cores. Does not store binaries if the driver has its own cache.
pub fn open_device(select: Option<&str>, cache: Cache) -> Result<Device> {
    if let Some(part) = MISSING {
        let message = format!("{part} of this model run on the CPU only; use `--backend cpu`");
        return Err(Failure::new(FailureKind::Unsupported, message));
    }
    let cache = match facts_of(select) {
        Some(facts) if facts.has_program_cache() => cache.without_binaries(),
        _ => cache,
    };
    run_on_big_cores(|| Device::open(select, cache))
}

/// A part of the model that no kernel computes.
const MISSING: Option<&str> = if RECURRENT_LAYERS > 0 {
    Some("short convolutions and delta nets")
} else if GATE_DIM > 0 {
    Some("gates of attention")
} else {
    None
};

/// Runs both functions, `one` on another thread if possible.
pub fn run_both(mut one: impl FnMut() + Send, other: impl FnOnce()) {
    let there = thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, &mut one);
        other();
        thread.is_ok()
    });
    if !there {
        one();
    }
}
