//! Memory that is handed out in parts: of one buffer where a kernel may want to reach all of it, else a buffer for
//! each.

use super::buffer::{Access, Buffer, Place};
use super::device::Device;
use super::failure::Result;

/// Where parts begin, besides what the device asks for: a page.
const ALIGN: usize = 4096;

/// See the module.
pub struct Arena<'a> {
    device: &'a Device,
    access: Access,
    place: Place,
    /// The one buffer and the bytes handed out.
    one: Option<(Buffer, usize)>,
}

impl<'a> Arena<'a> {
    /// A buffer for each part.
    pub fn apart(device: &'a Device, access: Access, place: Place) -> Self {
        Self { device, access, place, one: None }
    }

    /// Room for parts of these sizes in one buffer, if `place` allows that and the device has room for it.
    pub fn in_one(device: &'a Device, parts: &[usize], access: Access, place: Place) -> Self {
        let step = step(device);
        let all = parts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n.checked_next_multiple_of(step)?));
        let facts = device.facts();
        let one = all.filter(|&n| place == Place::InOne && n as u64 <= facts.max_alloc);
        // Where there is no room for all at once there may be for one after the other.
        let one = one.and_then(|n| device.buffer(n, access, place).ok()).filter(|b| b.part(0..1).is_ok());
        Self { device, access, place, one: one.map(|b| (b, 0)) }
    }

    /// The next part.
    pub fn buffer(&mut self, len: usize) -> Result<Buffer> {
        match &mut self.one {
            Some((one, used)) => {
                let start = *used;
                *used += len.next_multiple_of(step(self.device));
                one.part(start..start + len)
            }
            None => self.device.buffer(len, self.access, self.place),
        }
    }

    /// The next part, with these bytes.
    pub fn buffer_of(&mut self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.buffer(bytes.len())?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }
}

fn step(device: &Device) -> usize {
    ALIGN.max(device.facts().base_align)
}
