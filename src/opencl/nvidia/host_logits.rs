//! Logits that kernels write to the host's memory.

use crate::dims::VOCAB;
use crate::model::device::{Logits, Row};
use opencl_runtime::buffer::{Buffer, Lender, Lent};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};

/// Memory of the host that kernels of a device with memory of its own write logits to. They arrive while the last ones are
/// computed; to copy them after that took more than half as long as all else of a pass of sixteen sequences.
#[derive(Default)]
pub struct HostLogits {
    lender: Lender,
    /// For those that are wanted in other memory than this has lent.
    spare: Vec<Lent>,
}

impl HostLogits {
    /// Memory for the logits of a token, unless `now` is that; see [`row`](crate::model::device::Device::row).
    pub fn lend(&mut self, device: &Device, now: &[f32]) -> Option<Row> {
        if self.lender.buffer_of(now).is_some() {
            return None;
        }
        Some(Box::new(self.lender.lend(device, VOCAB).ok()?))
    }

    /// The buffer to which a kernel writes those of run `i`, of one token.
    pub fn buffer(&mut self, device: &Device, i: usize, logits: &Logits<'_>) -> Result<Buffer> {
        if let Logits::Last(logits) | Logits::All(logits) = logits
            && let Some(buffer) = self.lender.buffer_of(logits)
        {
            return Ok(buffer);
        }
        while self.spare.len() <= i {
            self.spare.push(self.lender.lend(device, VOCAB)?);
        }
        Ok(self.lender.buffer_of(&self.spare[i]).expect("invariant: just lent, or before"))
    }

    /// Brings them where they are wanted, unless they are there, after the device has finished.
    ///
    /// # Errors
    ///
    /// `Lost` where they say that a group of the kernel waited in vain for another.
    pub fn bring(&self, i: usize, logits: &mut Logits<'_>) -> Result<()> {
        let (Logits::Last(logits) | Logits::All(logits)) = logits else { return Ok(()) };
        if self.lender.buffer_of(logits).is_none() {
            logits.copy_from_slice(&self.spare[i]);
        }
        match logits[0].is_nan() {
            true => Err(Failure::new(Kind::Lost, "groups of a kernel were not all running at once")),
            false => Ok(()),
        }
    }
}
