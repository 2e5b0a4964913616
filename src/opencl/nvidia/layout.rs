//! Offsets of weights and of cache rows for kernels that run all layers; each kind is in one buffer.

use super::super::defines::Defines;
use super::super::kv::DeviceKv;
use super::super::storage::Storage;
use super::super::weights::{Chunk, LayerWeights, Matrices, StepWeights};
use crate::dims::*;
use numeric::kv::KvTypes;
use numeric::quant::format::{Format, GROUP_ROWS};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::facts::Facts;

/// Offsets of the weights in their two buffers, and the buffer of the calibration of keys and queries.
pub struct WeightLayout {
    pub matrices: Buffer,
    pub floats: Buffer,
    /// `None` if the model needs none.
    pub calibration: Option<Buffer>,
    defines: Vec<(&'static str, usize)>,
}

impl WeightLayout {
    /// Finds the offsets; `None` if the weights are not parts of one buffer each, layer by layer.
    pub fn find(weights: &Matrices, calibration: &[Buffer]) -> Option<Self> {
        let first: Vec<usize> =
            weights.layers[0].steps.iter().map(matrix).collect::<Option<Vec<_>>>()?.concat();
        let head = matrix(&weights.head)?;
        let matrices = weights.head.chunks[0].quants.whole()?.0.clone();
        let bytes = match weights.layers.get(1) {
            Some(next) => matrix(&next.steps[0])?[0],
            None => head[0],
        };
        let names = [
            ["AT_QKV", "AT_QKV_SCALES"],
            ["AT_OUT", "AT_OUT_SCALES"],
            ["AT_GATE_UP", "AT_GATE_UP_SCALES"],
            ["AT_DOWN", "AT_DOWN_SCALES"],
        ];
        let mut defines: Vec<_> = names.into_iter().flatten().zip(first).collect();
        defines.extend(["AT_HEAD", "AT_HEAD_SCALES"].into_iter().zip(head));
        defines.push(("LAYER_BYTES", bytes));
        let steps = weights.layers.iter().flat_map(|l| &l.steps).chain([&weights.head]);
        let all_q4 = steps.flat_map(|s| &s.chunks).all(|c| c.storage == Storage::Blocks(Format::Q4_0));
        let (floats, at) = floats(&weights.layers[0])?;
        let next = weights.layers.get(1).map_or(&weights.norm, |l| &l.attn_norm);
        let stride = next.whole()?.1;
        defines.push(("LAYER_FLOATS", stride / 4));
        defines.extend(at);
        // The kernel expects equal layers one after the other, then the rest.
        let even = weights.layers.iter().enumerate().all(|(i, l)| {
            let begins = |b: &Buffer, at: usize| b.whole().is_some_and(|(_, start)| start == at);
            begins(&l.steps[0].chunks[0].quants, i * bytes) && begins(&l.attn_norm, i * stride)
        });
        let ends = weights.norm.whole()?.1 == LAYERS * stride;
        let wholes = calibration.iter().map(Buffer::whole).collect::<Option<Vec<_>>>()?;
        defines.push(("LAYER_CALIBRATION", wholes.get(1).map_or(0, |(_, at)| at / 4)));
        defines.push(("HEAD_ROWS", VOCAB.next_multiple_of(GROUP_ROWS)));
        let calibration = wholes.first().map(|(whole, _)| (*whole).clone());
        (all_q4 && even && ends).then_some(Self { matrices, floats, calibration, defines })
    }

    /// Options of a kernel that reads these weights, for caches of these types.
    pub fn defines(&self, facts: &Facts, types: KvTypes) -> Defines {
        let grid = facts.compute_units as usize;
        let defines = Defines::of_model().flag("DOT_PTX").with("GRID", grid).of_cache(types).of_device(facts);
        self.defines.iter().fold(defines, |d, (name, value)| d.with(name, *value))
    }
}

/// Offsets of quants and scales of an unsplit step.
fn matrix(step: &StepWeights) -> Option<[usize; 2]> {
    let [Chunk { quants, scales: Some(scales), .. }] = &step.chunks[..] else { return None };
    Some([quants.whole()?.1, scales.whole()?.1])
}

/// The buffer, and the offset of each vector in floats; 0 for vectors that the model lacks.
fn floats(l: &LayerWeights) -> Option<(Buffer, [(&'static str, usize); 5])> {
    let at = |b: &Buffer| b.whole().map(|(_, at)| at / 4);
    let or_0 = |b: &Option<Buffer>| b.as_ref().map_or(Some(0), at);
    let places = [
        ("F_ATTN_NORM", at(&l.attn_norm)?),
        ("F_FFN_NORM", at(&l.ffn_norm)?),
        ("F_QKV_BIAS", or_0(&l.qkv_bias)?),
        ("F_O_BIAS", or_0(&l.o_bias)?),
        ("F_QK_NORM", or_0(&l.qk_norm)?),
    ];
    Some((l.attn_norm.whole()?.0.clone(), places))
}

/// Keys, values, and the distances from one layer to the next, in units of 64 bytes.
pub fn find_cache(rows: &DeviceKv) -> Option<(Buffer, Buffer, [u32; 2])> {
    let (first, next) = (rows.layer(0)?, rows.layer(1.min(LAYERS - 1))?);
    let stride = |b: &Buffer| b.whole().and_then(|(_, at)| u32::try_from(at / 64).ok());
    let buffers = (first.k.whole()?.0.clone(), first.v.whole()?.0.clone());
    Some((buffers.0, buffers.1, [stride(&next.k)?, stride(&next.v)?]))
}
