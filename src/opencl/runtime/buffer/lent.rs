//! Memory of the host to which kernels of a device of its own write, lent to whoever reads what arrives there.

use super::{Access, Buffer, LENT, Memory, Place};
use crate::device::Device;
use crate::failure::Result;
use crate::ffi;
use crate::waiter::Address;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Floats in page-locked memory, which stay mapped while kernels write to them. Whoever hands them to a kernel borrows them
/// until the device has finished.
pub struct Lent {
    /// Alone in owning a mapping, but for arguments of kernels.
    buffer: Buffer,
    start: Address,
    len: usize,
}

impl Deref for Lent {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: so many floats, aligned as all that a driver maps, are mapped and initialised for as long as `self`; a
        // kernel writes to them only while somebody borrows them mutably.
        unsafe { std::slice::from_raw_parts(self.start.0.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.0.as_ptr().cast(), self.len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.buffer.memory.shared.to_release().is_some() {
            // Nobody is left to be told.
            let _ = self.buffer.memory.unmap(self.start.0);
        }
    }
}

/// Knows the memory that it has lent.
#[derive(Default)]
pub struct Lender {
    lent: Vec<(usize, Weak<Memory>)>,
}

impl Lender {
    /// Lends `len` floats, all 0; of a device that [writes to the host](crate::Facts::writes_to_host).
    pub fn lend(&mut self, device: &Device, len: usize) -> Result<Lent> {
        let buffer = device.buffer(4 * len, Access::ReadWrite, Place::OnHost)?;
        buffer.memory.state.store(LENT, Ordering::Relaxed);
        let start = buffer.memory.map(&(0..4 * len), ffi::MAP_READ | ffi::MAP_WRITE)?;
        // SAFETY: so many bytes are mapped for writing, and no kernel has them yet.
        unsafe { start.as_ptr().write_bytes(0, 4 * len) };
        self.lent.retain(|(_, memory)| memory.strong_count() > 0);
        self.lent.push((start.as_ptr().addr(), Arc::downgrade(&buffer.memory)));
        Ok(Lent { buffer, start: Address(start), len })
    }

    /// The buffer of all of a [`Lent`], for arguments of kernels; `None` for other memory.
    pub fn buffer_of(&self, floats: &[f32]) -> Option<Buffer> {
        let found = self.lent.iter().filter(|(start, _)| *start == floats.as_ptr().addr());
        let mut memory = found.filter_map(|(_, memory)| memory.upgrade());
        memory.find(|memory| memory.len == size_of_val(floats)).map(|memory| Buffer { memory })
    }
}
