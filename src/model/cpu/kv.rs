//! The CPU's key/value cache of one sequence, allocated once for the whole context, and the attention mass of its slots.

use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use crate::model::device::{Cache, Extent, HostLayer, HostRows, KvRows};
use files::mapped::AlignedBytes;
use files::{Error, Result};
use numeric::kv::{KvTypes, check_capacity, check_kept};
use std::ops::Range;

/// Unused memory is given back to the system from this many bytes on.
const WORTH_RELEASING: usize = 1 << 20;

/// Keys and values of all layers.
pub struct CpuCache {
    extent: Extent,
    /// Slots that have been written, so that their pages take memory.
    touched: usize,
    rows: Planes,
}

/// The memory of a [`CpuCache`].
struct Planes {
    /// Keys: `[layer][kv_head][slot][row bytes]`.
    k: AlignedBytes,
    /// Values, likewise.
    v: AlignedBytes,
    /// Attention mass: `[layer][kv_head][slot]`; empty until it is written for the first time.
    mass: Vec<f32>,
}

impl HostRows for Planes {
    fn layer(&self, layer: usize) -> (&[u8], &[u8]) {
        let (k, v) = (self.k.as_slice(), self.v.as_slice());
        (&k[part(k.len(), layer)], &v[part(v.len(), layer)])
    }

    fn layer_mut(&mut self, layer: usize) -> HostLayer<'_> {
        let (k, v, mass) = (self.k.as_mut_slice(), self.v.as_mut_slice(), &mut self.mass[..]);
        let (of_k, of_v, of_mass) = (part(k.len(), layer), part(v.len(), layer), part(mass.len(), layer));
        let mass = (!mass.is_empty()).then(|| &mut mass[of_mass]);
        HostLayer { k: &mut k[of_k], v: &mut v[of_v], mass }
    }
}

/// Where one layer of a plane of `len` elements lies.
fn part(len: usize, layer: usize) -> Range<usize> {
    let each = len / LAYERS;
    layer * each..(layer + 1) * each
}

/// Rows of one KV head in one layer's rows.
pub fn head(plane: &[u8], kv_head: usize) -> &[u8] {
    let each = plane.len() / KV_HEADS;
    &plane[each * kv_head..][..each]
}

/// The rows of each KV head in one layer's rows, `slots` slots each.
pub fn heads_mut<'a>(layer: HostLayer<'a>, extent: Extent) -> [(&'a mut [u8], &'a mut [u8]); KV_HEADS] {
    let (k, v) = row_bytes(extent.types);
    let mut ks = layer.k.chunks_exact_mut(extent.slots * k);
    let mut vs = layer.v.chunks_exact_mut(extent.slots * v);
    std::array::from_fn(|_| ks.next().zip(vs.next()).expect("invariant: every layer has KV_HEADS heads"))
}

fn row_bytes(types: KvTypes) -> (usize, usize) {
    (types.k.row_bytes(HEAD_DIM), types.v.row_bytes(HEAD_DIM))
}

/// Zeroed rows of one plane.
fn plane(slots: usize, row_bytes: usize) -> Result<AlignedBytes> {
    let bytes = slots
        .checked_mul(LAYERS * KV_HEADS)
        .and_then(|rows| rows.checked_mul(row_bytes))
        .ok_or_else(|| {
            Error::Usage(format!("`EngineOptions::max_seq_len` {slots}: too large; use a smaller context"))
        })?;
    AlignedBytes::zeroed(bytes).map_err(|e| {
        Error::Memory(format!(
            "KV cache for `EngineOptions::max_seq_len` {slots}: {e}; use a smaller context or KV type"
        ))
    })
}

/// Zeros for the mass of `slots` slots.
fn masses(slots: usize) -> Result<Vec<f32>> {
    let mut mass = Vec::new();
    let len = LAYERS * KV_HEADS * slots;
    mass.try_reserve_exact(len).map_err(|_| {
        let mib = (4 * len) >> 20;
        Error::Memory(format!(
            "cannot allocate {mib} MiB for attention mass; use a smaller `EngineOptions::max_seq_len`"
        ))
    })?;
    mass.resize(len, 0.0);
    Ok(mass)
}

/// Bytes that the mass of `slots` slots takes.
pub const fn mass_bytes(slots: usize) -> usize {
    4 * LAYERS * KV_HEADS * slots
}

impl CpuCache {
    /// An empty cache. The system provides its pages as they are first written.
    pub fn new(types: KvTypes, slots: usize) -> Result<Self> {
        let (k, v) = row_bytes(types);
        let rows = Planes { k: plane(slots, k)?, v: plane(slots, v)?, mass: Vec::new() };
        Ok(Self { extent: Extent { types, slots, len: 0 }, touched: 0, rows })
    }

    /// Gives the memory of unfilled slots back to the system, but only where it is a lot and a good part of what was in
    /// use: what an ordinary eviction or a benchmark's rewind frees is filled again at once.
    fn release(&mut self) {
        let Extent { types, slots, len } = self.extent;
        let unused = self.touched - len;
        let bytes = unused * types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM);
        if len == 0 || unused < self.touched / 4 || bytes < WORTH_RELEASING {
            return;
        }
        let (k, v) = row_bytes(types);
        for head in 0..LAYERS * KV_HEADS {
            let unused = head * slots + len..head * slots + self.touched;
            self.rows.k.discard(unused.start * k..unused.end * k);
            self.rows.v.discard(unused.start * v..unused.end * v);
        }
        self.touched = len;
    }

    /// The mass of one layer and KV head, of all slots.
    fn mass_of(&mut self, layer: usize, kv_head: usize) -> &mut [f32] {
        let slots = self.extent.slots;
        &mut self.rows.mass[(layer * KV_HEADS + kv_head) * slots..][..slots]
    }
}

impl Cache for CpuCache {
    fn extent(&self) -> Extent {
        self.extent
    }

    fn set_len(&mut self, len: usize) {
        let Extent { slots, len: before, .. } = self.extent;
        assert!(len <= slots);
        if len > before && !self.rows.mass.is_empty() {
            self.rows.mass.chunks_exact_mut(slots).for_each(|head| head[before..len].fill(0.0));
        }
        self.filled(len);
        self.release();
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        let len = self.extent.len;
        check_capacity(slots, len)?;
        let mut grown = CpuCache::new(self.extent.types, slots)?;
        if !self.rows.mass.is_empty() {
            grown.rows.mass = masses(slots)?;
        }
        grown.filled(len);
        let mut rows = KvRows::default();
        let observed_heads = if self.rows.mass.is_empty() { 0 } else { KV_HEADS };
        for layer in 0..LAYERS {
            self.read(layer, 0..len, &mut rows)?;
            grown.write(layer, 0..len, &rows)?;
            for kv_head in 0..observed_heads {
                grown.mass_of(layer, kv_head)[..len].copy_from_slice(&self.mass_of(layer, kv_head)[..len]);
            }
        }
        *self = grown;
        Ok(())
    }

    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        check_kept(slots, self.extent.len)?;
        let (k, v) = row_bytes(self.extent.types);
        let (ks, vs) = &mut heads_mut(self.rows.layer_mut(layer), self.extent)[kv_head];
        for (to, &from) in slots.iter().enumerate() {
            let from = from as usize;
            ks.copy_within(from * k..(from + 1) * k, to * k);
            vs.copy_within(from * v..(from + 1) * v, to * v);
        }
        if !self.rows.mass.is_empty() {
            let mass = self.mass_of(layer, kv_head);
            slots.iter().enumerate().for_each(|(to, &from)| mass[to] = mass[from as usize]);
        }
        Ok(())
    }

    fn read(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        let (k, v) = row_bytes(self.extent.types);
        let (ks, vs) = self.rows.layer(layer);
        rows.k.clear();
        rows.v.clear();
        for kv_head in 0..KV_HEADS {
            rows.k.extend_from_slice(&head(ks, kv_head)[slots.start * k..slots.end * k]);
            rows.v.extend_from_slice(&head(vs, kv_head)[slots.start * v..slots.end * v]);
        }
        Ok(())
    }

    fn write(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        let (k, v) = row_bytes(self.extent.types);
        let n = slots.len();
        self.touched = self.touched.max(slots.end);
        assert!(rows.k.len() == KV_HEADS * n * k && rows.v.len() == KV_HEADS * n * v);
        let heads = heads_mut(self.rows.layer_mut(layer), self.extent);
        for (kv_head, (ks, vs)) in heads.into_iter().enumerate() {
            ks[slots.start * k..slots.end * k].copy_from_slice(&rows.k[kv_head * n * k..][..n * k]);
            vs[slots.start * v..slots.end * v].copy_from_slice(&rows.v[kv_head * n * v..][..n * v]);
        }
        Ok(())
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        let len = self.extent.len;
        assert_eq!(mass.len(), KV_HEADS * len);
        if self.rows.mass.is_empty() {
            mass.fill(0.0);
            return Ok(());
        }
        for (kv_head, mass) in mass.chunks_exact_mut(len.max(1)).enumerate() {
            mass.copy_from_slice(&self.mass_of(layer, kv_head)[..len]);
        }
        Ok(())
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        let len = self.extent.len;
        assert_eq!(mass.len(), KV_HEADS * len);
        if self.rows.mass.is_empty() {
            self.rows.mass = masses(self.extent.slots)?;
        }
        for (kv_head, mass) in mass.chunks_exact(len.max(1)).enumerate() {
            self.mass_of(layer, kv_head)[..len].copy_from_slice(mass);
        }
        Ok(())
    }

    fn host(&mut self) -> Result<&mut dyn HostRows> {
        Ok(&mut self.rows)
    }
}

impl CpuCache {
    /// Notes that the first `len` slots are filled.
    fn filled(&mut self, len: usize) {
        self.extent.len = len;
        self.touched = self.touched.max(len);
    }
}
