//! Memory handed out in parts: parts of one buffer if a kernel must reach all of it, otherwise separate buffers.

use super::buffer::{Access, Buffer, Place};
use super::device::Device;
use super::failure::Result;

/// Minimum alignment of parts: a page.
const ALIGN: usize = 4096;

/// Allocates parts of device memory, in one buffer if possible.
pub struct Arena<'a> {
    device: &'a Device,
    access: Access,
    place: Place,
    /// The shared buffer, and the bytes handed out.
    one: Option<(Buffer, usize)>,
}

impl<'a> Arena<'a> {
    /// Reserves room for parts of these sizes: in one buffer for [`Place::SharedBuffer`], if it fits.
    pub fn new(device: &'a Device, parts: &[usize], access: Access, place: Place) -> Self {
        let step = step(device);
        let all = parts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n.checked_next_multiple_of(step)?));
        let facts = device.info();
        let one = all.filter(|&n| place == Place::SharedBuffer && n as u64 <= facts.max_alloc);
        // If one large buffer does not fit, separate smaller ones may.
        let one = one
            .and_then(|n| device.allocate_buffer(n, access, place).ok())
            .filter(|b| b.sub_buffer(0..1).is_ok());
        Self { device, access, place, one: one.map(|b| (b, 0)) }
    }

    /// Next part.
    pub fn buffer(&mut self, len: usize) -> Result<Buffer> {
        match &mut self.one {
            Some((one, used)) => {
                let start = *used;
                *used += len.next_multiple_of(step(self.device));
                one.sub_buffer(start..start + len)
            }
            None => self.device.allocate_buffer(len, self.access, self.place),
        }
    }

    /// Takes the next part and fills it with `bytes`.
    pub fn buffer_of(&mut self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.buffer(bytes.len())?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }
}

fn step(device: &Device) -> usize {
    ALIGN.max(device.info().base_align)
}
