//! Rows of one sequence: per layer one plane of keys and one of values, in the same order and bytes as on the CPU
//! (`[kv_head][slot][row bytes]`). They are device buffers, or host memory if the host computes attention.

use super::by_layer::ByLayer;
use crate::dims::*;
use crate::model::device::{KvRows, Ring, ring_spans};
use files::config::LayerKind;
use numeric::kv::KvTypes;
use opencl_runtime::arena::Arena;
use opencl_runtime::buffer::{Access, Buffer, MapFor, Mapped, Place, StridedPieces};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, FailureKind, Result};
use std::ops::Range;

/// Keys and values of one layer in device memory.
pub struct LayerRows {
    /// `[kv_head][slot][row bytes]`
    pub k: Buffer,
    /// `[kv_head][slot][row bytes]`
    pub v: Buffer,
}

impl LayerRows {
    fn plane(&self, plane: usize) -> &Buffer {
        [&self.k, &self.v][plane]
    }
}

/// Keys and values of one layer, mapped for the CPU.
pub type MappedLayer = (Mapped<'static>, Mapped<'static>);

/// Location of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvLocation {
    /// In device memory.
    Device(Place),
    /// In host memory, if the host computes attention: only new rows are copied there.
    Host,
}

/// Rows by layer.
enum Layers {
    Device(ByLayer<LayerRows>),
    /// `[keys, values]` of each layer.
    Host(ByLayer<[Vec<u8>; 2]>),
}

/// Rows of the layers that a device computes.
pub struct DeviceKv {
    types: KvTypes,
    slots: usize,
    ring: Ring,
    location: KvLocation,
    layers: Layers,
}

impl DeviceKv {
    /// Allocates uninitialised rows for `slots` slots. Rows of sliding-window layers are zeroed, because kernels read
    /// chunks that are only partly written.
    pub fn new(
        device: &Device,
        types: KvTypes,
        (slots, ring, layers): (usize, Ring, Range<usize>),
        home: KvLocation,
    ) -> Result<Self> {
        let layers = match home {
            KvLocation::Device(place) => {
                allocate_on_device(device, types, (slots, ring, layers), place).map(Layers::Device)
            }
            KvLocation::Host => allocate_on_host(types, (slots, ring, layers)).map(Layers::Host),
        };
        let layers = layers.map_err(|f: Failure| match f.kind {
            FailureKind::Memory => {
                let message = format!("KV cache for `EngineOptions::max_seq_len` {slots}: {}", f.message);
                Failure::new(FailureKind::Memory, message + "; use a smaller context or KV type")
            }
            _ => f,
        })?;
        Ok(Self { types, slots, ring, location: home, layers })
    }

    /// Element types.
    pub fn types(&self) -> KvTypes {
        self.types
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Rows per head in a layer.
    pub fn rows_per_head(&self, layer: usize) -> usize {
        rows_per_head(layer, self.slots, self.ring)
    }

    /// Number of rows that sliding-window layers keep.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// The layers that the device computes.
    pub fn layer_range(&self) -> Range<usize> {
        match &self.layers {
            Layers::Device(layers) => layers.layer_range(),
            Layers::Host(layers) => layers.layer_range(),
        }
    }

    /// Bytes of a row of keys (0) or values (1).
    pub fn plane_row_bytes(&self, plane: usize) -> usize {
        row_bytes(self.types)[plane]
    }

    /// Buffers of one layer; `None` if the rows are in host memory.
    pub fn layer(&self, layer: usize) -> Option<&LayerRows> {
        match &self.layers {
            Layers::Device(layers) => Some(&layers[layer]),
            Layers::Host(_) => None,
        }
    }

    /// Keys and values of one layer, if they are in host memory.
    pub fn host_layer(&self, layer: usize) -> Option<&[Vec<u8>; 2]> {
        match &self.layers {
            Layers::Device(_) => None,
            Layers::Host(layers) => Some(&layers[layer]),
        }
    }

    /// Copies the rows of the first `len` slots to a new object with another number of slots, or other rings. A ring
    /// that changes its size must not have wrapped around yet.
    pub fn copy_resized(&self, device: &Device, (slots, ring): (usize, Ring), len: usize) -> Result<Self> {
        let mut grown = Self::new(device, self.types, (slots, ring, self.layer_range()), self.location)?;
        for layer in self.layer_range().filter(|&layer| has_cache(layer)) {
            let (here, there) = (self.rows_per_head(layer), grown.rows_per_head(layer));
            let len = if is_sliding(layer) { here.min(there) } else { len };
            for (plane, row) in row_bytes(self.types).into_iter().enumerate() {
                for head in 0..KV_HEADS {
                    let (from, to) = (head * here * row, head * there * row);
                    let range = from..from + len * row;
                    match (&self.layers, &mut grown.layers) {
                        (Layers::Device(old), Layers::Device(new)) => {
                            old[layer].plane(plane).copy_to(range, new[layer].plane(plane), to)?;
                        }
                        (Layers::Host(old), Layers::Host(new)) => {
                            new[layer][plane][to..to + len * row].copy_from_slice(&old[layer][plane][range]);
                        }
                        _ => unreachable!("invariant: both have one home"),
                    }
                }
            }
        }
        Ok(grown)
    }

    /// Compacts the rows of `slots`, which ascend, to slots `0..`, in host memory; otherwise returns false.
    pub fn compact_host_rows(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> bool {
        let (all, rows) = (self.slots, row_bytes(self.types));
        let Layers::Host(layers) = &mut self.layers else { return false };
        for (plane, row) in layers[layer].iter_mut().zip(rows) {
            compact_rows(&mut plane[kv_head * all * row..], slots, row);
        }
        true
    }

    /// Reads rows: `[kv_head][slot][row bytes]`.
    pub fn read(&self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        let (all, n) = (self.rows_per_head(layer), slots.len());
        for (plane, out) in [&mut rows.k, &mut rows.v].into_iter().enumerate() {
            let row = self.plane_row_bytes(plane);
            out.resize(KV_HEADS * n * row, 0);
            if let Layers::Device(layers) = &self.layers
                && let Some(pieces) = head_pieces(&slots, all, row)
            {
                layers[layer].plane(plane).read_pieces(pieces, out)?;
                continue;
            }
            for (head, mut out) in out.chunks_exact_mut((n * row).max(1)).enumerate() {
                for (at, n) in ring_spans(slots.clone(), all) {
                    let (piece, rest) = out.split_at_mut(n * row);
                    let from = (head * all + at) * row;
                    match &self.layers {
                        Layers::Device(layers) => layers[layer].plane(plane).read(from, piece)?,
                        Layers::Host(layers) => {
                            piece.copy_from_slice(&layers[layer][plane][from..from + n * row]);
                        }
                    }
                    out = rest;
                }
            }
        }
        Ok(())
    }

    /// Writes rows: `[kv_head][slot][row bytes]`.
    pub fn write(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        assert!(is_sliding(layer) || slots.end <= self.rows_per_head(layer));
        [&rows.k, &rows.v].into_iter().enumerate().try_for_each(|(plane, from)| {
            assert_eq!(from.len(), KV_HEADS * slots.len() * self.plane_row_bytes(plane));
            self.write_plane((layer, plane), slots.clone(), from)
        })
    }

    /// Writes rows of keys only, or of values.
    pub fn write_plane(
        &mut self,
        (layer, plane): (usize, usize),
        slots: Range<usize>,
        from: &[u8],
    ) -> Result<()> {
        let (all, row) = (self.rows_per_head(layer), self.plane_row_bytes(plane));
        if let Layers::Device(layers) = &self.layers
            && let Some(pieces) = head_pieces(&slots, all, row)
        {
            return layers[layer].plane(plane).write_pieces(pieces, from);
        }
        for (head, mut from) in from.chunks_exact((slots.len() * row).max(1)).enumerate() {
            for (at, n) in ring_spans(slots.clone(), all) {
                let (piece, rest) = from.split_at(n * row);
                let to = (head * all + at) * row;
                match &mut self.layers {
                    Layers::Device(layers) => layers[layer].plane(plane).write(to, piece)?,
                    Layers::Host(layers) => {
                        layers[layer][plane][to..to + n * row].copy_from_slice(piece);
                    }
                }
                from = rest;
            }
        }
        Ok(())
    }

    /// Maps all rows for the CPU, after queued work; unmapping the views returns them.
    ///
    /// # Panics
    ///
    /// If the rows are not in host-visible device memory.
    pub fn map_layers(&self) -> Result<ByLayer<MappedLayer>> {
        let map = |b: &Buffer| b.clone().into_map(0..b.len(), MapFor::ReadingAndWriting);
        let layer = |layer| {
            let rows = self.layer(layer).expect("the device has the rows that it shares");
            Ok((map(&rows.k)?, map(&rows.v)?))
        };
        ByLayer::try_new(self.layer_range(), layer)
    }
}

fn allocate_on_device(
    device: &Device,
    types: KvTypes,
    (slots, ring, layers): (usize, Ring, Range<usize>),
    place: Place,
) -> Result<ByLayer<LayerRows>> {
    let [k, v] = row_bytes(types);
    let plane = |layer: usize, row: usize| (KV_HEADS * row).saturating_mul(rows_per_head(layer, slots, ring));
    let arena = |row: usize| {
        let planes: Vec<usize> = layers.clone().map(|layer| plane(layer, row)).collect();
        Arena::new(device, &planes, Access::ReadWrite, place)
    };
    let (mut keys, mut values) = (arena(k), arena(v));
    let layer = |layer: usize| {
        let rows = LayerRows { k: keys.buffer(plane(layer, k))?, v: values.buffer(plane(layer, v))? };
        if is_sliding(layer) {
            rows.k.fill(0..rows.k.len(), 0)?;
            rows.v.fill(0..rows.v.len(), 0)?;
        }
        Ok(rows)
    };
    ByLayer::try_new(layers.clone(), layer)
}

fn allocate_on_host(
    types: KvTypes,
    (slots, ring, layers): (usize, Ring, Range<usize>),
) -> Result<ByLayer<[Vec<u8>; 2]>> {
    let plane = |layer: usize, row: usize| {
        let len = (KV_HEADS * row).saturating_mul(rows_per_head(layer, slots, ring));
        let room = Vec::<u8>::new().try_reserve_exact(len);
        room.map_err(|_| Failure::new(FailureKind::Memory, format!("cannot allocate {len} bytes")))?;
        // Pages are allocated when first written.
        Ok(vec![0; len])
    };
    let [k, v] = row_bytes(types);
    ByLayer::try_new(layers, |layer| Ok([plane(layer, k)?, plane(layer, v)?]))
}

/// The rows of `slots` of all heads, if they are one piece per head.
fn head_pieces(slots: &Range<usize>, rows: usize, row: usize) -> Option<StridedPieces> {
    let (at, n) = ring_spans(slots.clone(), rows).next()?;
    let pieces = StridedPieces { start: at * row, len: n * row, count: KV_HEADS, pitch: rows * row };
    (n == slots.len()).then_some(pieces)
}

/// Moves the rows of `slots`, which ascend, to the front.
pub fn compact_rows(rows: &mut [u8], slots: &[u32], row: usize) {
    for (to, &from) in slots.iter().enumerate() {
        let from = from as usize;
        rows.copy_within(from * row..(from + 1) * row, to * row);
    }
}

/// Rows per head in a layer.
fn rows_per_head(layer: usize, slots: usize, ring: Ring) -> usize {
    match LAYER_KINDS[layer] {
        // A placeholder: no buffer is empty.
        _ if !has_cache(layer) => 1,
        LayerKind::SlidingWindow => ring.rows_per_head(slots),
        _ => slots,
    }
}

/// Bytes of a row of keys, and of values.
fn row_bytes(types: KvTypes) -> [usize; 2] {
    [types.k.row_bytes(HEAD_DIM), types.v.row_bytes(HEAD_DIM)]
}
