//! Attention on the host in a pass of the device.

use super::super::cache::OpenClCache;
use super::super::defines::QKV;
use super::{Pass, Place};
use crate::dims::*;
use crate::model::device::{Attention, AttentionJob};
use numeric::kv::KvTypes;
use opencl_runtime::buffer::{Buffer, Landing, bytes_of, bytes_of_mut};
use opencl_runtime::failure::Result;

/// Attention on the host, and what it reads and writes.
pub struct HostAttention {
    /// What computes it.
    pub attend: Attention,
    /// `[token][QKV]`
    pub qkv: Vec<f32>,
    /// `[token][Q_DIM]`
    pub att: Vec<f32>,
    /// New rows of keys or of values: `[kv_head][token][row bytes]`
    pub rows: Vec<u8>,
}

impl HostAttention {
    /// For passes of at most `tokens`.
    pub fn new(attend: Attention, types: KvTypes, tokens: usize) -> Self {
        let row = types.k.row_bytes(HEAD_DIM).max(types.v.row_bytes(HEAD_DIM));
        let (qkv, att) = (vec![0.0; tokens * QKV], vec![0.0; tokens * Q_DIM]);
        Self { attend, qkv, att, rows: vec![0; tokens * KV_HEADS * row] }
    }
}

/// Waits for what is queued and reads, through page-locked memory where the device has its own.
fn read(landing: &mut Option<&mut Landing>, from: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
    match landing {
        Some(landing) => landing.read(from, offset, bytes),
        None => from.read(offset, bytes),
    }
}

impl Pass<'_> {
    /// The new rows join those that the host has.
    pub(super) fn land(&mut self, layer: usize, place: Place, cache: &mut OpenClCache) -> Result<()> {
        let host = self.host.as_mut().expect("the caller has looked");
        for (plane, from) in [&self.scratch.acts, &self.scratch.gate_up].into_iter().enumerate() {
            let rows = &mut host.rows[..KV_HEADS * place.tokens * cache.rows.row(plane)];
            read(&mut self.landing, from, 0, rows)?;
            cache.rows.write_plane((layer, plane), place.before..place.filled(), rows)?;
        }
        Ok(())
    }

    /// The host's attention.
    pub(super) fn attend_on_host(
        &mut self,
        layer: usize,
        place: Place,
        cache: &mut OpenClCache,
    ) -> Result<()> {
        let Place { first, tokens, before, rows: capacity, observed, .. } = place;
        let host = self.host.as_mut().expect("the caller has looked");
        let (qkv, att) = (&mut host.qkv[..tokens * QKV], &mut host.att[..tokens * Q_DIM]);
        read(&mut self.landing, &self.scratch.qkv, 4 * first * QKV, bytes_of_mut(qkv))?;
        let types = cache.rows.types();
        let [k, v] = cache.rows.of_host(layer).expect("invariant: the host has what it attends to");
        (host.attend)(AttentionJob {
            tokens,
            before,
            window: window(layer),
            queries: qkv,
            stride: QKV,
            k,
            v,
            capacity,
            types,
            att,
            mass: cache.mass.as_mut().and_then(|m| m.for_host(layer, place.filled(), observed)),
        });
        self.scratch.att.write(4 * first * Q_DIM, bytes_of(att))
    }
}
