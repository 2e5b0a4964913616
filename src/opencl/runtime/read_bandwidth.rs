//! Measures the speed at which a device reads its own memory.

use super::buffer::{Access, Place};
use super::device::Device;
use super::failure::Result;
use super::program::{Program, Source};
use std::time::Instant;

/// Bytes read at once: far more than any cache of a device.
const BYTES: usize = 1 << 30;
/// Passes; the median counts.
const PASSES: usize = 9;
/// Items of a group, and groups of a compute unit: enough loads under way to hide how long one takes.
const ITEMS: usize = 256;
const GROUPS: usize = 8;

/// Bytes per second.
pub fn measure_bandwidth(device: &Device) -> Result<f64> {
    let facts = device.info();
    let room = facts.max_alloc.min(facts.global_memory / 4);
    let bytes = usize::try_from(room).unwrap_or(BYTES).min(BYTES) / 4096 * 4096;
    let items = facts.compute_units.max(1) as usize * GROUPS * ITEMS.min(facts.max_work_group.max(1));
    let buffer = device.allocate_buffer(bytes, Access::ReadOnly, Place::Device)?;
    buffer.fill(0..bytes, 1)?;
    let sums = device.allocate_buffer(64, Access::ReadWrite, Place::Device)?;
    let text = include_str!("../../../kernels/read_bandwidth.cl");
    let program = Program::build(device, &Source { name: "read_bandwidth", text, options: "" })?;
    let mut kernel = program.create_kernel("read_bandwidth")?;
    kernel.set_buffer(0, &buffer)?.set_buffer(1, &sums)?.set_int(2, (bytes / 16) as i32)?;
    let local = ITEMS.min(kernel.max_work_group().max(1));
    let mut rates = Vec::with_capacity(PASSES);
    for pass in 0..=PASSES {
        device.finish()?;
        let start = Instant::now();
        device.launch(&kernel, &[items / local * local], &[local])?;
        device.finish()?;
        // The first one pages the buffer in.
        if pass > 0 {
            rates.push(bytes as f64 / start.elapsed().as_secs_f64().max(1e-9));
        }
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[PASSES / 2])
}
