//! Attention on the host in a pass of the device.

use super::cache::OpenClCache;
use super::defines::QKV;
use super::run_span::RunSpan;
use super::scratch::Scratch;
use crate::dims::*;
use crate::model::device::{AttentionFn, AttentionJob};
use crate::model::weights::Weights;
use numeric::kv::KvTypes;
use opencl_runtime::buffer::{Buffer, ReadbackBuffer, bytes_of, bytes_of_mut};
use opencl_runtime::failure::Result;

/// Attention on the host, with its buffers.
pub struct HostAttention {
    /// Computes attention.
    compute: AttentionFn,
    /// `[token][QKV]`
    qkv: Vec<f32>,
    /// `[token][Q_DIM]`
    att: Vec<f32>,
    /// New rows of keys or of values: `[kv_head][token][row bytes]`
    rows: Vec<u8>,
}

impl HostAttention {
    /// Allocates buffers for passes of at most `tokens` tokens.
    pub fn new(compute: AttentionFn, types: KvTypes, tokens: usize) -> Self {
        let row = types.k.row_bytes(HEAD_DIM).max(types.v.row_bytes(HEAD_DIM));
        let (qkv, att) = (vec![0.0; tokens * QKV], vec![0.0; tokens * Q_DIM]);
        Self { compute, qkv, att, rows: vec![0; tokens * KV_HEADS * row] }
    }

    /// Copies the new rows of a run to the host's cache.
    pub fn read_rows(
        &mut self,
        (scratch, mut readback): (&Scratch, Option<&mut ReadbackBuffer>),
        (layer, span): (usize, RunSpan),
        cache: &mut OpenClCache,
    ) -> Result<()> {
        for (plane, from) in [&scratch.acts, &scratch.gate_up].into_iter().enumerate() {
            let rows = &mut self.rows[..KV_HEADS * span.tokens * cache.rows.plane_row_bytes(plane)];
            read_through(&mut readback, from, 0, rows)?;
            cache.rows.write_plane((layer, plane), span.before..span.filled_slots(), rows)?;
        }
        Ok(())
    }

    /// Computes the attention of a run.
    pub fn attend(
        &mut self,
        (scratch, mut readback): (&Scratch, Option<&mut ReadbackBuffer>),
        (weights, layer, span): (&Weights, usize, RunSpan),
        cache: &mut OpenClCache,
    ) -> Result<()> {
        let RunSpan { first, tokens, before, rows: capacity, observed, .. } = span;
        let (qkv, att) = (&mut self.qkv[..tokens * QKV], &mut self.att[..tokens * Q_DIM]);
        read_through(&mut readback, &scratch.qkv, 4 * first * QKV, bytes_of_mut(qkv))?;
        let types = cache.rows.types();
        let [k, v] =
            cache.rows.host_layer(kv_layer(layer)).expect("invariant: the host has what it attends to");
        (self.compute)(AttentionJob {
            tokens,
            before,
            window: attention_window(layer),
            queries: qkv,
            stride: QKV,
            k,
            v,
            capacity,
            types,
            sinks: [weights.layers[layer].sink_logits(), weights.layer_calibration(kv_layer(layer))],
            att,
            mass: cache.mass.as_mut().and_then(|m| m.for_host(layer, span.filled_slots(), observed)),
        });
        scratch.att.write(4 * first * Q_DIM, bytes_of(att))
    }
}

/// Waits for queued work and reads, through page-locked memory if there is any.
fn read_through(
    readback: &mut Option<&mut ReadbackBuffer>,
    from: &Buffer,
    offset: usize,
    bytes: &mut [u8],
) -> Result<()> {
    match readback {
        Some(readback) => readback.read(from, offset, bytes),
        None => from.read(offset, bytes),
    }
}
