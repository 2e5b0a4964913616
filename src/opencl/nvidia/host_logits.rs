//! Logits that kernels write to host memory.

use crate::dims::VOCAB;
use crate::model::device::{Logits, Row};
use opencl_runtime::buffer::{Buffer, Lender, Lent};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};

/// Host memory to which kernels of a discrete device write logits, while computing the last ones. Copying them
/// afterwards took more than half as long as the rest of a pass of sixteen sequences.
#[derive(Default)]
pub struct HostLogits {
    lender: Lender,
    /// Memory for callers that provide none of their own.
    spare: Vec<Lent>,
}

impl HostLogits {
    /// Memory for the logits of a token, unless `now` is such memory; see [`row`](crate::model::device::Device::row).
    pub fn lend(&mut self, device: &Device, now: &[f32]) -> Option<Row> {
        if self.lender.buffer_of(now).is_some() {
            return None;
        }
        Some(Box::new(self.lender.lend(device, VOCAB).ok()?))
    }

    /// Buffer for the logits of run `i`, which has one token.
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

    /// Copies logits to their destination, unless they are already there. The device must have finished.
    ///
    /// # Errors
    ///
    /// `Lost` if the logits report that a work-group waited in vain for another.
    pub fn bring(&self, i: usize, logits: &mut Logits<'_>) -> Result<()> {
        let (Logits::Last(logits) | Logits::All(logits)) = logits else { return Ok(()) };
        if self.lender.buffer_of(logits).is_none() {
            logits.copy_from_slice(&self.spare[i]);
        }
        if logits[0].is_nan() {
            return Err(Failure::new(
                Kind::Lost,
                "the work-groups of a kernel did not all run at the same time",
            ));
        }
        Ok(())
    }
}
