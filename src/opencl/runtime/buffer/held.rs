//! Page-locked host memory that stays mapped while it exists.

use super::{Access, Buffer, Place};
use crate::device::Device;
use crate::failure::Result;
use crate::ffi;
use crate::waiter::Address;
use std::sync::atomic::Ordering;

/// A buffer mapped for reading and writing until dropped.
pub(super) struct Held {
    pub buffer: Buffer,
    pub start: Address,
}

impl Held {
    /// Allocates `len` bytes of host memory; the state says who may use the buffer.
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
            // No one is left to report the error to.
            let _ = self.buffer.memory.unmap(self.start.0);
        }
    }
}
