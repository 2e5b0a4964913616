//! The state of a device: its cores and their clocks, temperatures, throttling, memory, battery.
//!
//! Everything is read by scripts in the device's shell, without rights and without tools but the shell's own.
//! Any of it may be missing, locked or odd, and then is `None` or left out; that is never an error.

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
