//! The driver's own threads.

use numeric::pool::run_on_big_cores;
use opencl_runtime::device::{self, Device};
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::Result;
use opencl_runtime::program_cache::Cache;
use std::sync::Once;

/// [`device::select_info`], called on the performance cores. A driver starts threads when it is first used and when a
/// device is opened, and they inherit the CPU affinity: on a phone's efficiency cores every launch would take longer.
pub fn facts_of(select: Option<&str>) -> Option<&'static DeviceInfo> {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| drop(run_on_big_cores(device::list_devices)));
    device::select_info(select)
}

/// [`Device::open`], called on the performance cores. Does not store binaries if the driver has its own cache.
pub fn open_device(select: Option<&str>, cache: Cache) -> Result<Device> {
    let cache = match facts_of(select) {
        Some(facts) if facts.has_program_cache() => cache.without_binaries(),
        _ => cache,
    };
    run_on_big_cores(|| Device::open(select, cache))
}
