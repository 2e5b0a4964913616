//! Logits that kernels write to host memory.

use crate::dims::VOCAB;
use crate::model::device::{Logits, LogitsBuffer};
use opencl_runtime::buffer::{Buffer, HostFloats, HostFloatsPool};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, FailureKind, Result};

/// Host memory to which kernels of a discrete device write logits, while computing the last ones. Copying them
/// afterwards took more than half as long as the rest of a pass of sixteen sequences.
#[derive(Default)]
pub struct HostLogits {
    lender: HostFloatsPool,
    /// Memory for callers that provide none of their own.
    spare: Vec<HostFloats>,
}

impl HostLogits {
    /// Memory for the logits of a token, unless `now` is such memory; see
    /// [`row`](crate::model::device::Device::logits_buffer).
    pub fn lend_row(&mut self, device: &Device, now: &[f32]) -> Option<LogitsBuffer> {
        if self.lender.find_buffer(now).is_some() {
            return None;
        }
        Some(Box::new(self.lender.allocate_floats(device, VOCAB).ok()?))
    }

    /// Buffer for the logits of run `i`, which has one token.
    pub fn output_buffer(&mut self, device: &Device, i: usize, logits: &Logits<'_>) -> Result<Buffer> {
        if let Logits::Last(logits) | Logits::All(logits) = logits
            && let Some(buffer) = self.lender.find_buffer(logits)
        {
            return Ok(buffer);
        }
        while self.spare.len() <= i {
            self.spare.push(self.lender.allocate_floats(device, VOCAB)?);
        }
        Ok(self.lender.find_buffer(&self.spare[i]).expect("invariant: just lent, or before"))
    }

    /// Copies logits to their destination, unless they are already there. The device must have finished.
    ///
    /// # Errors
    ///
    /// `Lost` if the logits report that a work-group waited in vain for another.
    pub fn copy_logits(&self, i: usize, logits: &mut Logits<'_>) -> Result<()> {
        let (Logits::Last(logits) | Logits::All(logits)) = logits else { return Ok(()) };
        if self.lender.find_buffer(logits).is_none() {
            logits.copy_from_slice(&self.spare[i]);
        }
        if logits[0].is_nan() {
            return Err(Failure::new(
                FailureKind::Lost,
                "the work-groups of a kernel did not all run at the same time",
            ));
        }
        Ok(())
    }
}
