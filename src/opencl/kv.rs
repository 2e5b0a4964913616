//! Rows of one sequence: of each layer one plane of keys and one of values, in the order and bytes of the CPU's
//! (`[kv_head][slot][row bytes]`); buffers of the device, or memory of the host where that computes attention.

use crate::dims::*;
use crate::model::device::{KvRows, Ring, pieces};
use numeric::kv::KvTypes;
use opencl_runtime::arena::Arena;
use opencl_runtime::buffer::{Access, Buffer, MapFor, Mapped, Pieces, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use std::ops::Range;

/// Keys and values of one layer in the device's memory.
pub struct LayerRows {
    /// `[kv_head][slot][row bytes]`
    pub k: Buffer,
    /// The same.
    pub v: Buffer,
}

impl LayerRows {
    fn plane(&self, plane: usize) -> &Buffer {
        [&self.k, &self.v][plane]
    }
}

/// Keys and values of one layer in the CPU's hands.
pub type MappedLayer = (Mapped<'static>, Mapped<'static>);

/// Where rows lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvLocation {
    /// In the device's memory.
    Device(Place),
    /// In the host's, which computes attention: new rows come there, and nothing else moves.
    Host,
}

/// Rows by layer.
enum Layers {
    Device(Vec<LayerRows>),
    /// Keys and values.
    Host(Vec<[Vec<u8>; 2]>),
}

/// Rows of all layers.
pub struct DeviceKv {
    types: KvTypes,
    slots: usize,
    ring: Ring,
    home: KvLocation,
    layers: Layers,
}

impl DeviceKv {
    /// Rows of `slots` slots, uninitialised; those of local layers are zeros, as chunks are read of which a part was
    /// never written.
    pub fn new(
        device: &Device,
        types: KvTypes,
        (slots, ring): (usize, Ring),
        home: KvLocation,
    ) -> Result<Self> {
        let layers = match home {
            KvLocation::Device(place) => on_device(device, types, (slots, ring), place).map(Layers::Device),
            KvLocation::Host => on_host(types, (slots, ring)).map(Layers::Host),
        };
        let layers = layers.map_err(|f: Failure| match f.kind {
            Kind::Memory => {
                let message = format!("KV cache for `EngineOptions::max_seq_len` {slots}: {}", f.message);
                Failure::new(Kind::Memory, message + "; use a smaller context or KV type")
            }
            _ => f,
        })?;
        Ok(Self { types, slots, ring, home, layers })
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

    /// Bytes of a row of keys (0) or of values (1).
    pub fn row(&self, plane: usize) -> usize {
        row_bytes(self.types)[plane]
    }

    /// Buffers of one layer; `None` where the host has the rows.
    pub fn layer(&self, layer: usize) -> Option<&LayerRows> {
        match &self.layers {
            Layers::Device(layers) => Some(&layers[layer]),
            Layers::Host(_) => None,
        }
    }

    /// Keys and values of one layer, where the host has them.
    pub fn of_host(&self, layer: usize) -> Option<&[Vec<u8>; 2]> {
        match &self.layers {
            Layers::Device(_) => None,
            Layers::Host(layers) => Some(&layers[layer]),
        }
    }

    /// A copy with another number of slots, or other rings, and the first `len` slots' rows. The rows of a ring of
    /// another size have not come round yet.
    pub fn resized(&self, device: &Device, (slots, ring): (usize, Ring), len: usize) -> Result<Self> {
        let mut grown = Self::new(device, self.types, (slots, ring), self.home)?;
        for layer in 0..LAYERS {
            let (here, there) = (self.rows(layer), grown.rows(layer));
            let len = if is_local(layer) { here.min(there) } else { len };
            for (plane, row) in row_bytes(self.types).into_iter().enumerate() {
                for head in 0..KV_HEADS {
                    let (from, to) = (head * here * row, head * there * row);
                    let range = from..from + len * row;
                    match (&self.layers, &mut grown.layers) {
                        (Layers::Device(old), Layers::Device(new)) => {
                            old[layer].plane(plane).copy(range, new[layer].plane(plane), to)?;
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

    /// Moves the rows of `slots`, which ascend, to slots `0..`, where the host has them; else false.
    pub fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> bool {
        let (all, rows) = (self.slots, row_bytes(self.types));
        let Layers::Host(layers) = &mut self.layers else { return false };
        for (plane, row) in layers[layer].iter_mut().zip(rows) {
            gather(&mut plane[kv_head * all * row..], slots, row);
        }
        true
    }

    /// Copies rows out: `[kv_head][slot][row bytes]`.
    pub fn read(&self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        let (all, n) = (self.rows(layer), slots.len());
        for (plane, out) in [&mut rows.k, &mut rows.v].into_iter().enumerate() {
            let row = self.row(plane);
            out.resize(KV_HEADS * n * row, 0);
            if let Layers::Device(layers) = &self.layers
                && let Some(pieces) = of_heads(&slots, all, row)
            {
                layers[layer].plane(plane).read_pieces(pieces, out)?;
                continue;
            }
            for (head, mut out) in out.chunks_exact_mut((n * row).max(1)).enumerate() {
                for (at, n) in pieces(slots.clone(), all) {
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

    /// Copies rows in.
    pub fn write(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        assert!(is_local(layer) || slots.end <= self.rows(layer));
        [&rows.k, &rows.v].into_iter().enumerate().try_for_each(|(plane, from)| {
            assert_eq!(from.len(), KV_HEADS * slots.len() * self.row(plane));
            self.write_plane((layer, plane), slots.clone(), from)
        })
    }

    /// The same of keys alone, or of values.
    pub fn write_plane(
        &mut self,
        (layer, plane): (usize, usize),
        slots: Range<usize>,
        from: &[u8],
    ) -> Result<()> {
        let (all, row) = (self.rows(layer), self.row(plane));
        if let Layers::Device(layers) = &self.layers
            && let Some(pieces) = of_heads(&slots, all, row)
        {
            return layers[layer].plane(plane).write_pieces(pieces, from);
        }
        for (head, mut from) in from.chunks_exact((slots.len() * row).max(1)).enumerate() {
            for (at, n) in pieces(slots.clone(), all) {
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

    /// Hands all rows to the CPU, with what is queued for them done; they come back as the views are unmapped.
    ///
    /// # Panics
    ///
    /// They are not in host-visible memory of the device.
    pub fn map(&self) -> Result<Vec<MappedLayer>> {
        let map = |b: &Buffer| b.clone().into_map(0..b.len(), MapFor::ReadingAndWriting);
        let layer = |layer| {
            let rows = self.layer(layer).expect("the device has the rows that it shares");
            Ok((map(&rows.k)?, map(&rows.v)?))
        };
        (0..LAYERS).map(layer).collect()
    }
}

fn on_device(
    device: &Device,
    types: KvTypes,
    (slots, ring): (usize, Ring),
    place: Place,
) -> Result<Vec<LayerRows>> {
    let [k, v] = row_bytes(types);
    let plane = |layer: usize, row: usize| (KV_HEADS * row).saturating_mul(rows_of(layer, slots, ring));
    let arena = |row: usize| {
        let planes: [usize; LAYERS] = std::array::from_fn(|layer| plane(layer, row));
        Arena::new(device, &planes, Access::ReadWrite, place)
    };
    let (mut keys, mut values) = (arena(k), arena(v));
    let layer = |layer: usize| {
        let rows = LayerRows { k: keys.buffer(plane(layer, k))?, v: values.buffer(plane(layer, v))? };
        if is_local(layer) {
            rows.k.fill(0..rows.k.len(), 0)?;
            rows.v.fill(0..rows.v.len(), 0)?;
        }
        Ok(rows)
    };
    (0..LAYERS).map(layer).collect()
}

fn on_host(types: KvTypes, (slots, ring): (usize, Ring)) -> Result<Vec<[Vec<u8>; 2]>> {
    let plane = |layer: usize, row: usize| {
        let len = (KV_HEADS * row).saturating_mul(rows_of(layer, slots, ring));
        let room = Vec::<u8>::new().try_reserve_exact(len);
        room.map_err(|_| Failure::new(Kind::Memory, format!("no room for {len} bytes")))?;
        // Pages come as they are written.
        Ok(vec![0; len])
    };
    let [k, v] = row_bytes(types);
    (0..LAYERS).map(|layer| Ok([plane(layer, k)?, plane(layer, v)?])).collect()
}

/// The rows of `slots` of all heads, where they are one piece of each.
fn of_heads(slots: &Range<usize>, rows: usize, row: usize) -> Option<Pieces> {
    let (at, n) = pieces(slots.clone(), rows).next()?;
    let pieces = Pieces { start: at * row, len: n * row, count: KV_HEADS, pitch: rows * row };
    (n == slots.len()).then_some(pieces)
}

/// Moves the rows of `slots`, which ascend, to the front.
pub fn gather(rows: &mut [u8], slots: &[u32], row: usize) {
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
fn row_bytes(types: KvTypes) -> [usize; 2] {
    [types.k.row_bytes(HEAD_DIM), types.v.row_bytes(HEAD_DIM)]
}
