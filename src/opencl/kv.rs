//! Rows of one sequence in the device's memory: one buffer of keys and one of values a layer, in the order and bytes of
//! the CPU's (`[kv_head][slot][row bytes]`).

use crate::dims::*;
use crate::model::device::{KvRows, Ring, pieces};
use numeric::kv::KvTypes;
use opencl_runtime::arena::Arena;
use opencl_runtime::buffer::{Access, Buffer, MapFor, Mapped, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use std::ops::Range;

/// Keys and values of one layer.
pub struct LayerRows {
    /// `[kv_head][slot][row bytes]`
    pub k: Buffer,
    /// The same.
    pub v: Buffer,
}

/// Keys and values of one layer in the CPU's hands.
pub type MappedLayer = (Mapped<'static>, Mapped<'static>);

/// Rows of all layers.
pub struct Rows {
    types: KvTypes,
    slots: usize,
    ring: Ring,
    place: Place,
    layers: Vec<LayerRows>,
}

impl Rows {
    /// Rows of `slots` slots, uninitialised; those of local layers are zeros, as chunks are read of which a part was
    /// never written.
    pub fn new(device: &Device, types: KvTypes, (slots, ring): (usize, Ring), place: Place) -> Result<Self> {
        let (k, v) = row_bytes(types);
        let plane = |layer: usize, row: usize| (KV_HEADS * row).saturating_mul(rows_of(layer, slots, ring));
        let arena = |row: usize| {
            let planes: [usize; LAYERS] = std::array::from_fn(|layer| plane(layer, row));
            Arena::new(device, &planes, Access::ReadWrite, place)
        };
        let (mut keys, mut values) = (arena(k), arena(v));
        let no_room = |f: Failure| match f.kind {
            Kind::Memory => {
                let message = format!("KV cache for `EngineOptions::max_seq_len` {slots}: {}", f.message);
                Failure::new(Kind::Memory, message + "; use a smaller context or KV type")
            }
            _ => f,
        };
        let mut layer = |layer: usize| {
            let rows = LayerRows { k: keys.buffer(plane(layer, k))?, v: values.buffer(plane(layer, v))? };
            if is_local(layer) {
                rows.k.fill(0..rows.k.len(), 0)?;
                rows.v.fill(0..rows.v.len(), 0)?;
            }
            Ok(rows)
        };
        let layers = (0..LAYERS).map(&mut layer).collect::<Result<_>>().map_err(no_room)?;
        Ok(Self { types, slots, ring, place, layers })
    }

    /// Element types.
    pub fn types(&self) -> KvTypes {
        self.types
    }

    /// Slots there are.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Rows of a head of a layer.
    pub fn rows(&self, layer: usize) -> usize {
        rows_of(layer, self.slots, self.ring)
    }

    /// How many rows local layers keep.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Buffers of one layer.
    pub fn layer(&self, layer: usize) -> &LayerRows {
        &self.layers[layer]
    }

    /// The same, to map them.
    pub fn layer_mut(&mut self, layer: usize) -> &mut LayerRows {
        &mut self.layers[layer]
    }

    /// A copy with another number of slots, or other rings, and the first `len` slots' rows. The rows of a ring of
    /// another size have not come round yet.
    pub fn resized(&self, device: &Device, (slots, ring): (usize, Ring), len: usize) -> Result<Self> {
        let grown = Self::new(device, self.types, (slots, ring), self.place)?;
        for (layer, to) in grown.layers.iter().enumerate() {
            let (here, there) = (self.rows(layer), grown.rows(layer));
            let len = if is_local(layer) { here.min(there) } else { len };
            for ((old, row), (new, _)) in self.planes(layer).into_iter().zip(planes(to, self.types)) {
                for head in 0..KV_HEADS {
                    let from = head * here * row;
                    old.copy(from..from + len * row, new, head * there * row)?;
                }
            }
        }
        Ok(grown)
    }

    /// Keys and values of a layer with the bytes of their rows.
    fn planes(&self, layer: usize) -> [(&Buffer, usize); 2] {
        planes(&self.layers[layer], self.types)
    }

    /// Moves the rows of `slots` (ascending, the last one before `len`) to slots `0..`.
    pub fn keep(&self, layer: usize, kv_head: usize, slots: &[u32], len: usize) -> Result<()> {
        for (plane, row) in self.planes(layer) {
            let start = kv_head * self.slots * row;
            let filled = start..start + len * row;
            if self.place == Place::HostVisible && !slots.is_empty() {
                let mut view = plane.clone().into_map(filled, MapFor::ReadingAndWriting)?;
                gather(view.bytes_mut(), slots, row);
                view.unmap()?;
            } else {
                let mut bytes = vec![0; filled.len()];
                plane.read(start, &mut bytes)?;
                gather(&mut bytes, slots, row);
                plane.write(start, &bytes[..slots.len() * row])?;
            }
        }
        Ok(())
    }

    /// Copies rows out: `[kv_head][slot][row bytes]`.
    pub fn read(&self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        let all = self.rows(layer);
        for ((plane, row), out) in self.planes(layer).into_iter().zip([&mut rows.k, &mut rows.v]) {
            let len = slots.len() * row;
            out.resize(KV_HEADS * len, 0);
            for (head, mut out) in out.chunks_exact_mut(len.max(1)).enumerate() {
                for (at, n) in pieces(slots.clone(), all) {
                    let (piece, rest) = out.split_at_mut(n * row);
                    plane.read((head * all + at) * row, piece)?;
                    out = rest;
                }
            }
        }
        Ok(())
    }

    /// Copies rows in.
    pub fn write(&self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        let all = self.rows(layer);
        assert!(is_local(layer) || slots.end <= all);
        for ((plane, row), from) in self.planes(layer).into_iter().zip([&rows.k, &rows.v]) {
            let len = slots.len() * row;
            assert_eq!(from.len(), KV_HEADS * len);
            for (head, mut from) in from.chunks_exact(len.max(1)).enumerate() {
                for (at, n) in pieces(slots.clone(), all) {
                    let (piece, rest) = from.split_at(n * row);
                    plane.write((head * all + at) * row, piece)?;
                    from = rest;
                }
            }
        }
        Ok(())
    }

    /// Hands all rows to the CPU, with what is queued for them done; they come back as the views are unmapped.
    ///
    /// # Panics
    ///
    /// They are not in host-visible memory.
    pub fn map(&self) -> Result<Vec<MappedLayer>> {
        let map = |b: &Buffer| b.clone().into_map(0..b.len(), MapFor::ReadingAndWriting);
        self.layers.iter().map(|l| Ok((map(&l.k)?, map(&l.v)?))).collect()
    }
}

fn planes(layer: &LayerRows, types: KvTypes) -> [(&Buffer, usize); 2] {
    let (k, v) = row_bytes(types);
    [(&layer.k, k), (&layer.v, v)]
}

/// Moves the rows of `slots`, which ascend, to the front.
fn gather(rows: &mut [u8], slots: &[u32], row: usize) {
    for (to, &from) in slots.iter().enumerate() {
        let from = from as usize;
        rows.copy_within(from * row..(from + 1) * row, to * row);
    }
}

/// Rows of a head of a layer.
fn rows_of(layer: usize, slots: usize, ring: Ring) -> usize {
    if is_local(layer) { ring.rows(slots) } else { slots }
}

/// Bytes of a key row and of a value row.
fn row_bytes(types: KvTypes) -> (usize, usize) {
    (types.k.row_bytes(HEAD_DIM), types.v.row_bytes(HEAD_DIM))
}
