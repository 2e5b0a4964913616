//! Host memory to which kernels of a discrete device write, lent to the reader of the results.

use super::held::Held;
use super::{Buffer, LENT, Memory, Place};
use crate::device::Device;
use crate::failure::Result;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

/// Floats in page-locked memory that stay mapped while kernels write to them. Whoever passes them to a kernel borrows
/// them until the device has finished.
pub struct Lent(Held);

impl Lent {
    fn len(&self) -> usize {
        self.0.buffer.len() / size_of::<f32>()
    }
}

impl Deref for Lent {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: so many floats, aligned like any mapping, are mapped and initialised while `self` exists; a kernel
        // writes to
        // them only while someone borrows them mutably.
        unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

/// Allocates lent memory and finds its buffers.
#[derive(Default)]
pub struct Lender {
    lent: Vec<(usize, Weak<Memory>)>,
}

impl Lender {
    /// Lends `len` floats, all 0, on a device that [writes to host memory](crate::Facts::writes_to_host).
    pub fn lend(&mut self, device: &Device, len: usize) -> Result<Lent> {
        let held = Held::new(device, 4 * len, (Place::OnHost, LENT))?;
        // SAFETY: the bytes are mapped for writing, and no kernel uses them yet.
        unsafe { held.start.0.as_ptr().write_bytes(0, 4 * len) };
        self.lent.retain(|(_, memory)| memory.strong_count() > 0);
        self.lent.push((held.start.0.as_ptr().addr(), Arc::downgrade(&held.buffer.memory)));
        Ok(Lent(held))
    }

    /// Buffer of a whole [`Lent`], for kernel arguments; `None` for other memory.
    pub fn buffer_of(&self, floats: &[f32]) -> Option<Buffer> {
        let found = self.lent.iter().filter(|(start, _)| *start == floats.as_ptr().addr());
        let mut memory = found.filter_map(|(_, memory)| memory.upgrade());
        memory.find(|memory| memory.len == size_of_val(floats)).map(|memory| Buffer { memory })
    }
}
