//! Page-locked memory of the host that stays mapped for as long as somebody has it.

use super::{Access, Buffer, Place};
use crate::device::Device;
use crate::failure::Result;
use crate::ffi;
use crate::waiter::Address;
use std::sync::atomic::Ordering;

/// A buffer that is mapped for reading and writing until this goes.
pub(super) struct Held {
    pub buffer: Buffer,
    pub start: Address,
}

impl Held {
    /// `len` bytes at a place of the host's, in a state that says who may use the buffer.
    pub fn new(device: &Device, len: usize, (place, state): (Place, u8)) -> Result<Self> {
        let buffer = device.buffer(len, Access::ReadWrite, place)?;
        buffer.memory.state.store(state, Ordering::Relaxed);
        let start = buffer.memory.map(&(0..len), ffi::MAP_READ | ffi::MAP_WRITE)?;
        Ok(Self { buffer, start: Address(start) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.buffer.memory.shared.to_release().is_some() {
            // Nobody is left to be told.
            let _ = self.buffer.memory.unmap(self.start.0);
        }
    }
}
