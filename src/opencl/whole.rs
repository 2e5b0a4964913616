//! What computes whole passes, each in one launch, where the device has that.

use super::batch_launch::BatchLaunch;
use super::logits::Arriving;
use super::places::Places;
use super::scratch::Scratch;
use super::shapes::{ONE_BY_ONE, ONE_BY_ONE_OF_BATCH, Variants};
use super::single_launch::{self, SingleLaunch};
use super::weights::Model;
use numeric::kv::KvTypes;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Program;

/// The kernels of whole passes.
pub struct Whole {
    /// Of one token.
    pub single: SingleLaunch,
    /// Of a token of each of several sequences, where there are to be several.
    pub batch: Option<BatchLaunch>,
    /// Where their logits go.
    pub arriving: Arriving,
}

impl Whole {
    /// `None` where the variants, the device or the weights do not have them: those, and the calibrations of all layers,
    /// have to be parts of one buffer.
    pub fn new(
        model: &Model,
        calibration: &[Buffer],
        (types, slots): (KvTypes, usize),
        scratch: &Scratch,
        variants: Variants,
    ) -> Result<Option<Self>> {
        let device = &model.device;
        if !variants.one_launch() || !single_launch::fits(device.facts()) {
            return Ok(None);
        }
        let Some(places) = Places::find(&model.matrices, calibration) else { return Ok(None) };
        let batch = match variants {
            Variants::OneBatch => BatchLaunch::new(device, &places, types, scratch)?,
            _ => None,
        };
        let single = SingleLaunch::new(device, places, types, slots)?;
        Ok(Some(Self { single, batch, arriving: Arriving::default() }))
    }

    /// What the kernels are of.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        [self.single.program()].into_iter().chain(self.batch.as_ref().map(BatchLaunch::program))
    }

    /// Makes room for attention over as many slots as `scratch` has it for. What is bound for fewer is to be bound anew.
    pub fn reserve(&mut self, device: &Device, scratch: &Scratch) -> Result<()> {
        self.single.reserve(device, scratch.slots)?;
        self.batch.as_mut().map_or(Ok(()), |batch| batch.reserve(scratch))
    }

    /// How many of `runs` runs of one token are computed at once, of `most` at most: the launches of all steps take less
    /// time than a launch for each of many.
    pub fn at_once(&self, runs: usize, most: usize) -> usize {
        match &self.batch {
            Some(_) if runs > ONE_BY_ONE_OF_BATCH => most,
            None if runs > ONE_BY_ONE => runs,
            _ => 1,
        }
    }
}
