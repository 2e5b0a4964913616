//! Calibration of keys and queries, and the sinks of heads, in device memory.

use crate::dims::*;
use crate::model::weights::{Calibration, HeadCalibration, Weights};
use numeric::kv::KvTypes;
use opencl_runtime::arena::Arena;
use opencl_runtime::buffer::{Access, Buffer, Place, bytes_of};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Bytes of [`calibration`] for these types, without the sinks, which count as weights; 0 if there is none.
pub fn calibration_bytes(types: KvTypes) -> usize {
    match (types.k.is_rotated(), ATTENTION_SINKS) {
        (_, true) => Calibration::BYTES + 4 * LAYERS * KV_DIM,
        (true, false) => Calibration::BYTES,
        (false, false) => 0,
    }
}

/// Calibration of each layer: `[KV_HEADS][mean | scale | inverse][HEAD_DIM]`. If heads have sinks, these follow:
/// `[HEADS]`, and then the mean keys as they are stored: `[KV_HEADS][HEAD_DIM]`.
pub fn calibration(device: &Device, weights: &Weights, place: Place) -> Result<Vec<Buffer>> {
    let of_layer = |layer: usize| {
        let calibration = weights.layer_calibration(layer);
        let mut all = calibration.to_vec();
        if ATTENTION_SINKS {
            all.extend(weights.layers[layer].sink_logits());
            let means = |head| HeadCalibration::of_head(calibration, head).stored_mean();
            all.extend((0..KV_HEADS).flat_map(means));
        }
        all
    };
    let all: Vec<_> = (0..LAYERS).map(of_layer).collect();
    let sizes: Vec<_> = all.iter().map(|floats| 4 * floats.len()).collect();
    let mut arena = Arena::new(device, &sizes, Access::ReadOnly, place);
    all.iter().map(|floats| arena.buffer_of(bytes_of(floats))).collect()
}
