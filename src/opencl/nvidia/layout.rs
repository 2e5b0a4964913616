//! Offsets of weights and of cache rows for kernels that run all layers; each kind is in one buffer.

use super::super::defines::Defines;
use super::super::kv::DeviceKv;
use super::super::storage::MatrixStorage;
use super::super::weights::{Chunk, LayerWeights, Matrices, StepWeights};
use crate::dims::*;
use numeric::kv::KvTypes;
use numeric::quant::format::{Format, GROUP_ROWS};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device_info::DeviceInfo;

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
    pub fn find_layout(weights: &Matrices, calibration: &[Buffer]) -> Option<Self> {
        let first: Vec<usize> = weights.layers[0]
            .steps
            .iter()
            .map(|(_, w)| matrix_offsets(w))
            .collect::<Option<Vec<_>>>()?
            .concat();
        let head = matrix_offsets(&weights.head)?;
        let matrices = weights.head.chunks[0].quants.parent_and_offset()?.0.clone();
        let bytes = match weights.layers.get(1) {
            Some(next) => matrix_offsets(&next.steps[0].1)?[0],
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
        let steps = weights.layers.values().flat_map(|l| &l.steps).map(|(_, w)| w).chain([&weights.head]);
        let all_q4 = steps.flat_map(|s| &s.chunks).all(|c| c.storage == MatrixStorage::Blocks(Format::Q4_0));
        let (floats, at) = float_offsets(&weights.layers[0])?;
        let next = weights.layers.get(1).and_then(|l| l.attn_norm.as_ref()).unwrap_or(&weights.norm);
        let stride = next.parent_and_offset()?.1;
        defines.push(("LAYER_FLOATS", stride / 4));
        defines.extend(at);
        // The kernel expects equal layers one after the other, then the rest.
        let even = weights.layers.values().enumerate().all(|(i, l)| {
            let begins = |b: &Buffer, at: usize| b.parent_and_offset().is_some_and(|(_, start)| start == at);
            begins(&l.steps[0].1.chunks[0].quants, i * bytes)
                && l.attn_norm.as_ref().is_some_and(|norm| begins(norm, i * stride))
        });
        let ends = weights.norm.parent_and_offset()?.1 == LAYERS * stride;
        let wholes = calibration.iter().map(Buffer::parent_and_offset).collect::<Option<Vec<_>>>()?;
        defines.push(("LAYER_CALIBRATION", wholes.get(1).map_or(0, |(_, at)| at / 4)));
        defines.push(("HEAD_ROWS", VOCAB.next_multiple_of(GROUP_ROWS)));
        let calibration = wholes.first().map(|(whole, _)| (*whole).clone());
        (all_q4 && even && ends).then_some(Self { matrices, floats, calibration, defines })
    }

    /// Options of a kernel that reads these weights, for caches of these types.
    pub fn to_defines(&self, facts: &DeviceInfo, types: KvTypes) -> Defines {
        let grid = facts.compute_units as usize;
        let defines = Defines::for_model()
            .add_flag("DOT_PTX")
            .add_value("GRID", grid)
            .add_cache(types)
            .add_device(facts);
        self.defines.iter().fold(defines, |d, (name, value)| d.add_value(name, *value))
    }
}

/// Offsets of quants and scales of an unsplit step.
fn matrix_offsets(step: &StepWeights) -> Option<[usize; 2]> {
    let [Chunk { quants, scales: Some(scales), .. }] = &step.chunks[..] else { return None };
    Some([quants.parent_and_offset()?.1, scales.parent_and_offset()?.1])
}

/// The buffer, and the offset of each vector in floats; 0 for vectors that the model lacks.
fn float_offsets(l: &LayerWeights) -> Option<(Buffer, [(&'static str, usize); 5])> {
    let at = |b: &Buffer| b.parent_and_offset().map(|(_, at)| at / 4);
    let or_0 = |b: &Option<Buffer>| b.as_ref().map_or(Some(0), at);
    let places = [
        ("F_ATTN_NORM", at(l.attn_norm.as_ref()?)?),
        ("F_FFN_NORM", at(l.ffn_norm.as_ref()?)?),
        ("F_QKV_BIAS", or_0(&l.qkv_bias)?),
        ("F_O_BIAS", or_0(&l.o_bias)?),
        ("F_QK_NORM", or_0(&l.qk_norm)?),
    ];
    Some((l.attn_norm.as_ref()?.parent_and_offset()?.0.clone(), places))
}

/// Keys, values, and the distances from one layer to the next, in units of 64 bytes.
pub fn find_cache(rows: &DeviceKv) -> Option<(Buffer, Buffer, [u32; 2])> {
    let (first, next) = (rows.layer(0)?, rows.layer(1.min(LAYERS - 1))?);
    let stride = |b: &Buffer| b.parent_and_offset().and_then(|(_, at)| u32::try_from(at / 64).ok());
    let buffers = (first.k.parent_and_offset()?.0.clone(), first.v.parent_and_offset()?.0.clone());
    Some((buffers.0, buffers.1, [stride(&next.k)?, stride(&next.v)?]))
}
