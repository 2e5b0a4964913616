//! Weights in memory that device and CPU share.

use super::upload::Upload;
use super::{
    Chunk, DeviceLayers, Matrices, StepWeights, Uploader, upload_floats, upload_layer, upload_per_layer,
    upload_step,
};
use crate::dims::*;
use crate::model::weights::{Attention, FeedForward, Ffn, Matrix, Mixer, Weights};
use crate::opencl::by_layer::ByLayer;
use crate::opencl::defines::{GATE_AT, SHARED_GATE_AT};
use crate::opencl::storage::Step;
use files::mapped::MappedSlice;
use numeric::quant::format::GROUP_ROWS;
use numeric::quant::matrix;
use opencl_runtime::buffer::{Buffer, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Result};
use std::ops::Range;

impl Matrices {
    /// Moves the weights to memory shared by device and CPU; `weights` then become views of it. A matrix that had to be
    /// split or widened stays in the CPU's memory as well.
    ///
    /// # Errors
    ///
    /// See [`Matrices::copy`].
    pub fn share(device: &Device, weights: &mut Weights) -> files::Result<Self> {
        let mut to = Uploader::new(device, weights, (&DeviceLayers::ALL, Place::HostVisible))?;
        let to = &mut to;
        let layers = ByLayer::try_new::<Failure>(0..LAYERS, |i| {
            let l = &mut weights.layers[i];
            let on_device = upload_layer(to, l, i)?;
            let of_steps = |[first, second]: [Step; 2]| [on_device.step(first), on_device.step(second)];
            let mixer = || of_steps(Step::of_mixers(i)[0]);
            match &mut l.mixer {
                Mixer::Attention(a) => adopt_attention(a, mixer())?,
                Mixer::LocalAttention(a) => adopt_attention(a, mixer())?,
                Mixer::ShortConv(w) => adopt_both((&mut w.w_in, &mut w.w_out), mixer())?,
                Mixer::DeltaNet(w) => {
                    let [inputs, out] = mixer();
                    adopt_rows(&mut w.z, inputs, MIX_GATE_AT / GROUP_ROWS)?;
                    adopt_rows(&mut w.b, inputs, MIX_BETA_AT / GROUP_ROWS)?;
                    adopt_rows(&mut w.a, inputs, MIX_DECAY_AT / GROUP_ROWS)?;
                    adopt_both((&mut w.qkv, &mut w.w_out), [inputs, out])?;
                }
                Mixer::None => {}
            }
            if let Some(w) = l.mamba.as_mut() {
                adopt_both((&mut w.w_in, &mut w.w_out), of_steps([Step::Mix, Step::MixOut]))?;
            }
            match &mut l.ffn {
                Ffn::Usual(w) => adopt_feed_forward(w, of_steps([Step::GateUp, Step::Down]))?,
                Ffn::Wide(w) => adopt_feed_forward(w, of_steps([Step::WideGateUp, Step::WideDown]))?,
                Ffn::Experts(w) => {
                    adopt_gate_up((Some(&mut w.gate), &mut w.up), on_device.step(Step::ExpertGateUp))?;
                    let [router, down] = of_steps([Step::Router, Step::ExpertDown]);
                    adopt_both((&mut w.router, &mut w.down), [router, down])?;
                    let mut beside = w.branches.as_mut().map(|branches| &mut branches.shared);
                    if let Some((shared, gate)) = &mut w.shared {
                        let at = SHARED_GATE_AT / GROUP_ROWS;
                        gate.as_mut().map_or(Ok(()), |gate| adopt_rows(gate, router, at))?;
                        beside = Some(shared);
                    }
                    if let Some(w) = beside.filter(|_| HAS_FFN_BESIDE) {
                        adopt_feed_forward(w, of_steps([Step::SharedGateUp, Step::SharedDown]))?;
                    }
                }
                Ffn::None => {}
            }
            if let Some(w) = l.per_layer.as_mut().filter(|_| HAS_PER_LAYER) {
                adopt_both((&mut w.gate, &mut w.out), of_steps([Step::PerLayerGate, Step::PerLayerOut]))?;
            }
            Ok(on_device)
        })?;
        let per_layer = upload_per_layer(to, weights.per_layer.as_ref())?;
        if let (Some(w), Some((projection, _))) = (&mut weights.per_layer, &per_layer) {
            adopt_rows(&mut w.projection, projection, 0)?;
        }
        let head = upload_step(to, Step::Head, &[Upload::of(&weights.head)])?;
        adopt_rows(&mut weights.head, &head, 0)?;
        Ok(Self { layers, per_layer, norm: upload_floats(to, &weights.norm)?, head })
    }
}

/// Calls [`adopt_rows`] for the matrices of attention.
fn adopt_attention<const Q: usize, const KV: usize>(
    a: &mut Attention<Q, KV>,
    [qkv, out]: [&StepWeights; 2],
) -> Result<()> {
    let k_at = Q.div_ceil(GROUP_ROWS);
    adopt_rows(&mut a.wq, qkv, 0)?;
    a.wk.as_mut().map_or(Ok(()), |wk| adopt_rows(wk, qkv, k_at))?;
    a.wv.as_mut().map_or(Ok(()), |wv| adopt_rows(wv, qkv, k_at + KV.div_ceil(GROUP_ROWS)))?;
    a.gate.as_mut().map_or(Ok(()), |gate| adopt_rows(gate, qkv, GATE_AT / GROUP_ROWS))?;
    adopt_rows(&mut a.wo, out, 0)
}

/// Calls [`adopt_rows`] for a matrix of each of two steps.
fn adopt_both<const R: usize, const C: usize, const OUT_R: usize, const OUT_C: usize>(
    (first, second): (&mut Matrix<R, C>, &mut Matrix<OUT_R, OUT_C>),
    [of_first, of_second]: [&StepWeights; 2],
) -> Result<()> {
    adopt_rows(first, of_first, 0)?;
    adopt_rows(second, of_second, 0)
}

/// Turns the matrices of a feed-forward into views of the device's copy, if one chunk has all of each.
fn adopt_feed_forward<const W: usize>(
    w: &mut FeedForward<W>,
    [gate_up, down]: [&StepWeights; 2],
) -> Result<()> {
    adopt_gate_up((w.gate.as_mut(), &mut w.up), gate_up)?;
    adopt_rows(&mut w.down, down, 0)
}

fn adopt_gate_up<const ROWS: usize>(
    (gate, up): (Option<&mut Matrix<ROWS, DIM>>, &mut Matrix<ROWS, DIM>),
    step: &StepWeights,
) -> Result<()> {
    let [both] = &step.chunks[..] else { return Ok(()) };
    let first = if gate.is_some() { ROWS.div_ceil(GROUP_ROWS) } else { 0 };
    gate.map_or(Ok(()), |gate| view_device_copy(gate, both, 0))?;
    view_device_copy(up, both, first)
}

/// Calls [`view_device_copy`] for a matrix whose rows start at group `first` of a step's result, if one chunk has all
/// of them.
fn adopt_rows<const ROWS: usize, const COLS: usize>(
    matrix: &mut Matrix<ROWS, COLS>,
    step: &StepWeights,
    first: usize,
) -> Result<()> {
    let end = first + ROWS.div_ceil(GROUP_ROWS);
    match step.chunks.iter().find(|c| c.first <= first && end <= c.first + c.groups) {
        Some(chunk) => view_device_copy(matrix, chunk, first - chunk.first),
        None => Ok(()),
    }
}

/// Turns a matrix into a view of the device's copy, starting at group `first` of a chunk, if both have the same
/// storage.
fn view_device_copy<const ROWS: usize, const COLS: usize>(
    matrix: &mut Matrix<ROWS, COLS>,
    chunk: &Chunk,
    first: usize,
) -> Result<()> {
    if Upload::of(matrix).storage != chunk.storage {
        return Ok(());
    }
    let (group, scale) = chunk.storage.group_bytes(COLS);
    let view = |buffer: &Buffer, range: Range<usize>| {
        let plane = MappedSlice::from_owner(buffer.clone().map_read_only()?);
        Ok(plane.slice(range).expect("invariant: the chunk holds all of the matrix"))
    };
    let end = first + ROWS.div_ceil(GROUP_ROWS);
    let quants = |len: usize| view(&chunk.quants, first * group..first * group + len);
    let scales = || {
        let scales = chunk.scales.as_ref().expect("invariant: quantised matrices have scales");
        view(scales, first * scale..end * scale)
    };
    let all = (end - first) * group;
    // Data mapped from a file is read from device memory from now on, and need not stay in memory.
    match matrix {
        Matrix::Dense { dtype, data } => {
            data.release_pages();
            *data = quants(ROWS * COLS * dtype.byte_size())?;
        }
        Matrix::Quantised(w) => {
            w.release_pages();
            *w = matrix::QuantMatrix::new(w.format(), quants(all)?, scales()?)
                .expect("invariant: lengths are those of the shape");
        }
    }
    Ok(())
}
