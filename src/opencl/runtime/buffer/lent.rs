//! Memory of the host to which kernels of a device with memory of its own write, lent to whoever reads what arrives there.

use super::held::Held;
use super::{Buffer, LENT, Memory, Place};
use crate::device::Device;
use crate::failure::Result;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

/// Floats in page-locked memory, which stay mapped while kernels write to them. Whoever hands them to a kernel borrows them
/// until the device has finished.
pub struct Lent(Held);

impl Lent {
    fn len(&self) -> usize {
        self.0.buffer.len() / size_of::<f32>()
    }
}

impl Deref for Lent {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: so many floats, aligned as all that a driver maps, are mapped and initialised for as long as `self`; a
        // kernel writes to them only while somebody borrows them mutably.
        unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr().cast(), self.len()) }
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
        let held = Held::new(device, 4 * len, (Place::OnHost, LENT))?;
        // SAFETY: so many bytes are mapped for writing, and no kernel has them yet.
        unsafe { held.start.0.as_ptr().write_bytes(0, 4 * len) };
        self.lent.retain(|(_, memory)| memory.strong_count() > 0);
        self.lent.push((held.start.0.as_ptr().addr(), Arc::downgrade(&held.buffer.memory)));
        Ok(Lent(held))
    }

    /// The buffer of all of a [`Lent`], for arguments of kernels; `None` for other memory.
    pub fn buffer_of(&self, floats: &[f32]) -> Option<Buffer> {
        let found = self.lent.iter().filter(|(start, _)| *start == floats.as_ptr().addr());
        let mut memory = found.filter_map(|(_, memory)| memory.upgrade());
        memory.find(|memory| memory.len == size_of_val(floats)).map(|memory| Buffer { memory })
    }
}
