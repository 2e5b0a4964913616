//! A model on a device: what all backends of one device share.

use super::weights::DeviceWeights;
use crate::model::weights::Weights;
use files::Result;
use opencl_runtime::buffer::Place;
use opencl_runtime::device::Device;
use std::sync::Arc;

/// A device with the model's weights in its memory; backends share it.
pub struct Model {
    pub(super) device: Device,
    pub(super) weights: Arc<Weights>,
    pub(super) matrices: DeviceWeights,
}

/// A model's weights on the device, before anything uses them.
pub struct Matrices(DeviceWeights);

impl Matrices {
    /// Copies the weights to the device.
    pub fn copy(device: &Device, weights: &Weights, place: Place) -> Result<Self> {
        let matrices = DeviceWeights::upload(device, weights, place)?;
        device.finish()?;
        Ok(Self(matrices))
    }

    /// Moves the weights to memory that the CPU sees too: `weights` become views on it.
    pub fn share(device: &Device, weights: &mut Weights) -> Result<Self> {
        Ok(Self(DeviceWeights::share(device, weights)?))
    }
}

impl Model {
    /// `matrices` are of `weights`, on `device`.
    pub fn new(device: Device, weights: Arc<Weights>, matrices: Matrices) -> Self {
        Self { device, weights, matrices: matrices.0 }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}
