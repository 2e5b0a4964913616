//! The state of a device: its cores and their clocks, temperatures, throttling, memory, battery.
//!
//! Scripts in the device's shell read everything, without special rights or tools. A value that is missing, locked or odd
//! is `None` or left out, never an error.

pub mod sampler;

mod dumpsys;
mod parse;
mod reading;

use crate::device::{Device, shell};
use crate::error::Result;

#[cfg(test)]
pub use reading::{Core, Temperature};
pub use reading::{Reading, layout, ranges};

/// Reads everything once.
pub fn read(device: &dyn Device) -> Result<Reading> {
    Ok(parse::parse_reading(&shell::capture(device, include_str!("sensors/read.sh"))?.stdout))
}
