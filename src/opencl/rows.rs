//! The key/value cache in the device's memory: one buffer of keys and one of values a layer, in the order and bytes of
//! the CPU's (`[kv_head][slot][row bytes]`). Where memory is unified the CPU may borrow all of them.

mod lent;

use super::kernels::CHUNK;
use super::whole::arena;
use crate::dims::*;
use crate::model::backend::KvRows;
use numeric::kv::{KvTypes, check_kept};
use opencl_runtime::buffer::{Access, Buffer, MapFor, Place};
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

/// Rows of all layers.
pub struct Rows {
    types: KvTypes,
    capacity: usize,
    len: usize,
    place: Place,
    layers: Vec<LayerRows>,
    /// Of rows that are lent.
    lent: Option<lent::Ticket>,
    /// Chunks of one token's attention: `[chunk][HEADS][HEAD_DIM]`
    pub partials: Buffer,
    /// Largest score and softmax sum of each: `[chunk][HEADS][2]`
    pub ml: Buffer,
}

impl Rows {
    /// An empty cache.
    pub fn new(device: &Device, types: KvTypes, capacity: usize, place: Place) -> Result<Self> {
        let (k, v) = row_bytes(types);
        let plane = |row: usize| (KV_HEADS * row).saturating_mul(capacity);
        let mut arenas = [k, v].map(|row| arena(device, &[plane(row); LAYERS], Access::ReadWrite, place));
        let mut rows = |at: usize, row: usize| {
            arenas[at].buffer(plane(row)).map_err(|f| match f.kind {
                Kind::Memory => {
                    let message = format!("KV cache for --max-seq-len {capacity}: {}", f.message);
                    Failure::new(Kind::Memory, message + "; use a smaller context or KV type")
                }
                _ => f,
            })
        };
        let parts = |n: usize| {
            let bytes = 4 * HEADS * n * capacity.div_ceil(CHUNK).max(1);
            device.buffer(bytes, Access::ReadWrite, Place::Device)
        };
        let layers =
            (0..LAYERS).map(|_| Ok(LayerRows { k: rows(0, k)?, v: rows(1, v)? })).collect::<Result<_>>()?;
        let (partials, ml) = (parts(HEAD_DIM)?, parts(2)?);
        Ok(Self { types, capacity, len: 0, place, layers, lent: None, partials, ml })
    }

    /// Element types.
    pub fn types(&self) -> KvTypes {
        self.types
    }

    /// Slots there are.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Filled slots.
    #[allow(clippy::len_without_is_empty, reason = "the backend has one")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Sets the number of filled slots.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity);
        if len > 0 {
            self.assert_here();
        }
        self.len = len;
    }

    /// Buffers of one layer.
    pub fn layer(&self, layer: usize) -> &LayerRows {
        &self.layers[layer]
    }

    /// The same, to map them.
    pub fn layer_mut(&mut self, layer: usize) -> &mut LayerRows {
        &mut self.layers[layer]
    }

    /// Changes the capacity, to no less than the filled rows, which stay. Fails without change when memory is short.
    pub fn resize(&mut self, device: &Device, capacity: usize) -> std::result::Result<(), crate::Error> {
        self.assert_here();
        let mut grown = Self::new(device, self.types, capacity, self.place)?;
        grown.len = self.len;
        for (old, new) in self.layers.iter().zip(&grown.layers) {
            for (old, new, row) in
                self.planes(old).into_iter().zip(grown.planes(new)).map(|(o, n)| (o.0, n.0, o.1))
            {
                for head in 0..KV_HEADS {
                    let from = head * self.capacity * row;
                    old.copy(from..from + self.len * row, new, head * capacity * row)?;
                }
            }
        }
        *self = grown;
        Ok(())
    }

    /// Keys and values with the bytes of their rows.
    fn planes<'a>(&self, layer: &'a LayerRows) -> [(&'a Buffer, usize); 2] {
        let (k, v) = row_bytes(self.types);
        [(&layer.k, k), (&layer.v, v)]
    }

    /// Moves the rows of `slots` (ascending, filled) to slots `0..`.
    pub fn keep(
        &mut self,
        layer: usize,
        kv_head: usize,
        slots: &[u32],
    ) -> std::result::Result<(), crate::Error> {
        self.assert_here();
        check_kept(slots, self.len)?;
        for (plane, row) in self.planes(&self.layers[layer]) {
            let start = kv_head * self.capacity * row;
            let filled = start..start + self.len * row;
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
        self.assert_here();
        let [(k, k_row), (v, v_row)] = self.planes(&self.layers[layer]);
        for (plane, row, out) in [(k, k_row, &mut rows.k), (v, v_row, &mut rows.v)] {
            let len = slots.len() * row;
            out.resize(KV_HEADS * len, 0);
            if len > 0 {
                for (head, out) in out.chunks_exact_mut(len).enumerate() {
                    plane.read((head * self.capacity + slots.start) * row, out)?;
                }
            }
        }
        Ok(())
    }

    /// Copies rows in.
    pub fn write(&self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        self.assert_here();
        let [(k, k_row), (v, v_row)] = self.planes(&self.layers[layer]);
        for (plane, row, from) in [(k, k_row, &rows.k), (v, v_row, &rows.v)] {
            let len = slots.len() * row;
            assert_eq!(from.len(), KV_HEADS * len);
            if len > 0 {
                for (head, from) in from.chunks_exact(len).enumerate() {
                    plane.write((head * self.capacity + slots.start) * row, from)?;
                }
            }
        }
        Ok(())
    }
}

/// Moves the rows of `slots`, which ascend, to the front.
fn gather(rows: &mut [u8], slots: &[u32], row: usize) {
    for (to, &from) in slots.iter().enumerate() {
        let from = from as usize;
        rows.copy_within(from * row..(from + 1) * row, to * row);
    }
}

/// Bytes of the parts of one token's attention over `capacity` slots.
pub fn parts_bytes(capacity: usize) -> usize {
    let chunks = capacity.div_ceil(CHUNK).max(1);
    4 * HEADS * chunks * (HEAD_DIM + 2)
}

/// Bytes of a key row and of a value row.
fn row_bytes(types: KvTypes) -> (usize, usize) {
    (types.k.row_bytes(HEAD_DIM), types.v.row_bytes(HEAD_DIM))
}
