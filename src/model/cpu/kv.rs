//! The CPU's KV cache of one sequence, allocated once for the whole context, and the attention mass of its slots.

use super::acts::try_vec;
use crate::device::{Extent, HostLayer, HostRows, KvCache, KvRows, Ring, RowsInFile, ring_spans};
use crate::dims::{
    HEAD_DIM, KV_HEADS, LAYER_STATE, attention_layers, cache_layers, full_attention_layers, is_sliding,
    state_range,
};
use files::mapped::{AlignedBytes, page_size};
use files::{Error, Result};
use numeric::kv::{KvTypes, check_capacity, check_kept_slots};
use std::ops::Range;

const _: () = assert!(numeric::simd::attend::CHUNK == crate::device::ATTN_BLOCK);

/// Smallest amount of unused memory, in bytes, that is given back to the system.
const WORTH_RELEASING: usize = 1 << 20;

/// Keys and values of all layers of one sequence.
pub struct CpuCache {
    extent: Extent,
    ring: Ring,
    /// Number of slots written so far, whose pages take memory.
    touched: usize,
    rows: CachePlanes,
}

/// The memory of a [`CpuCache`].
struct CachePlanes {
    /// Keys: `[layer][kv_head][slot][row bytes]`.
    k: AlignedBytes,
    /// Values, likewise.
    v: AlignedBytes,
    /// Attention mass of full-attention layers: `[layer][kv_head][slot]`; empty until the first write.
    mass: Vec<f32>,
    /// Rows of a head: `[full-attention layers, sliding-window layers]`.
    rows: [usize; 2],
    /// The layers whose rows it holds.
    layers: Range<usize>,
    /// Bytes of a key row and of a value row.
    row_bytes: [usize; 2],
    /// States of recurrent layers, `[recurrent layer][LAYER_STATE]`: the current one, and that after the first token of
    /// the last run of several.
    states: [Vec<f32>; 2],
}

impl CachePlanes {
    /// First row of a layer in a plane, and rows of each head.
    fn layer_rows_at(&self, layer: usize) -> (usize, usize) {
        let ([globals, locals], [slots, ring]) = (cache_layers(&(self.layers.start..layer)), self.rows);
        (KV_HEADS * (globals * slots + locals * ring), self.rows[usize::from(is_sliding(layer))])
    }

    /// Byte range of one layer in a plane with rows of `row` bytes.
    fn layer_range(&self, layer: usize, row: usize) -> Range<usize> {
        let (first, rows) = self.layer_rows_at(layer);
        first * row..(first + KV_HEADS * rows) * row
    }
}

impl HostRows for CachePlanes {
    fn layer_rows(&self, layer: usize) -> (&[u8], &[u8]) {
        let [k, v] = self.row_bytes.map(|row| self.layer_range(layer, row));
        (&self.k.as_slice()[k], &self.v.as_slice()[v])
    }

    fn layer_rows_mut(&mut self, layer: usize) -> HostLayer<'_> {
        let [k, v] = self.row_bytes.map(|row| self.layer_range(layer, row));
        let each = KV_HEADS * self.rows[0];
        let massed = !self.mass.is_empty() && !is_sliding(layer);
        let mass =
            massed.then(|| &mut self.mass[cache_layers(&(self.layers.start..layer))[0] * each..][..each]);
        HostLayer { k: &mut self.k.as_mut_slice()[k], v: &mut self.v.as_mut_slice()[v], mass }
    }

    fn layer_states_mut(&mut self, layer: usize) -> [&mut [f32]; 2] {
        let first = state_range(&(self.layers.start..layer)).len();
        self.states.each_mut().map(|state| &mut state[first..first + LAYER_STATE])
    }
}

/// Rows of one KV head in one layer's rows.
pub fn head_rows(plane: &[u8], kv_head: usize) -> &[u8] {
    let each = plane.len() / KV_HEADS;
    &plane[each * kv_head..][..each]
}

/// The rows of each KV head in one layer's rows.
pub fn head_rows_mut(layer: HostLayer<'_>) -> [(&mut [u8], &mut [u8]); KV_HEADS] {
    let (k, v) = (layer.k.len() / KV_HEADS, layer.v.len() / KV_HEADS);
    let (mut ks, mut vs) = (layer.k.chunks_exact_mut(k), layer.v.chunks_exact_mut(v));
    std::array::from_fn(|_| ks.next().zip(vs.next()).expect("invariant: every layer has KV_HEADS heads"))
}

/// Zeroed rows of one plane.
fn alloc_plane(
    [slots, ring]: [usize; 2],
    [full, sliding]: [usize; 2],
    row_bytes: usize,
) -> Result<AlignedBytes> {
    let of = |layers: usize, rows: usize| rows.checked_mul(layers * KV_HEADS)?.checked_mul(row_bytes);
    let bytes = of(full, slots).and_then(|bytes| bytes.checked_add(of(sliding, ring)?)).ok_or_else(|| {
        Error::Usage(format!("`EngineOptions::max_seq_len` {slots}: too large; use a smaller context"))
    })?;
    AlignedBytes::zeroed(bytes).map_err(|e| {
        Error::Memory(format!(
            "KV cache for `EngineOptions::max_seq_len` {slots}: {e}; use a smaller context or KV type"
        ))
    })
}

/// Allocates zeroed mass for `slots` slots of `layers` layers.
fn alloc_mass(slots: usize, layers: usize) -> Result<Vec<f32>> {
    let mut mass = Vec::new();
    let len = layers * KV_HEADS * slots;
    mass.try_reserve_exact(len).map_err(|_| {
        let mib = (4 * len) >> 20;
        Error::Memory(format!(
            "cannot allocate {mib} MiB for attention mass; use a smaller `EngineOptions::max_seq_len`"
        ))
    })?;
    mass.resize(len, 0.0);
    Ok(mass)
}

/// Bytes of the mass of `slots` slots of a full-attention layer.
pub const fn mass_bytes(slots: usize) -> usize {
    4 * KV_HEADS * slots
}

impl CpuCache {
    /// An empty cache for some layers. The system provides its pages on the first write.
    pub fn new(types: KvTypes, (slots, ring): (usize, Ring), layers: Range<usize>) -> Result<Self> {
        let row_bytes = [types.k, types.v].map(|kind| kind.row_bytes(HEAD_DIM));
        let held = cache_layers(&layers);
        let ([k, v], rows) = (row_bytes, [slots, ring.rows_per_head(slots)]);
        let extent = Extent { types, slots, ring: rows[1], len: 0 };
        let state = state_range(&layers).len();
        let rows = CachePlanes {
            k: alloc_plane(rows, held, k)?,
            v: alloc_plane(rows, held, v)?,
            mass: Vec::new(),
            rows,
            layers,
            row_bytes,
            states: [try_vec(state, 0.0)?, try_vec(state, 0.0)?],
        };
        Ok(Self { extent, ring, touched: 0, rows })
    }

    /// Reallocates with another number of slots or other rings and copies the rows. A ring changes its size only before
    /// it wraps around.
    fn reallocate(&mut self, slots: usize, ring: Ring) -> Result<()> {
        let Extent { types, len, .. } = self.extent;
        let mut moved = CpuCache::new(types, (slots, ring), self.rows.layers.clone())?;
        if !self.rows.mass.is_empty() {
            moved.rows.mass = alloc_mass(slots, cache_layers(&self.rows.layers)[0])?;
        }
        moved.set_filled(len);
        let mut rows = KvRows::default();
        moved.rows.states.clone_from(&self.rows.states);
        let layers = self.rows.layers.clone();
        for layer in attention_layers().filter(|layer| layers.contains(layer)) {
            let all = if is_sliding(layer) { self.extent.ring.min(moved.extent.ring) } else { len };
            self.read_rows(layer, 0..all, &mut rows)?;
            moved.write_rows(layer, 0..all, &rows)?;
            let observed_heads = if self.rows.mass.is_empty() || is_sliding(layer) { 0 } else { KV_HEADS };
            for kv_head in 0..observed_heads {
                moved.head_mass(layer, kv_head)[..len]
                    .copy_from_slice(&self.head_mass(layer, kv_head)[..len]);
            }
        }
        *self = moved;
        Ok(())
    }

    /// Gives the memory of unfilled slots back to the system if it is large and a good part of the used memory. An
    /// ordinary eviction or a benchmark's rewind frees less, and fills it again at once.
    fn release_unused(&mut self) {
        let Extent { types, len, .. } = self.extent;
        let unused = self.touched - len;
        let bytes = unused * types.slot_bytes(cache_layers(&self.rows.layers)[0], KV_HEADS, HEAD_DIM);
        if len == 0 || unused < self.touched / 4 || bytes < WORTH_RELEASING {
            return;
        }
        let [k, v] = self.rows.row_bytes;
        for layer in full_attention_layers().filter(|layer| self.rows.layers.contains(layer)) {
            let (first, slots) = self.rows.layer_rows_at(layer);
            for start in (0..KV_HEADS).map(|head| first + head * slots) {
                self.rows.k.discard_pages((start + len) * k..(start + self.touched) * k);
                self.rows.v.discard_pages((start + len) * v..(start + self.touched) * v);
            }
        }
        self.touched = len;
    }

    /// Records that the first `len` slots are filled.
    fn set_filled(&mut self, len: usize) {
        self.extent.len = len;
        self.touched = self.touched.max(len);
    }

    /// Mass of one layer and KV head: `[slots]`.
    fn head_mass(&mut self, layer: usize, kv_head: usize) -> &mut [f32] {
        assert!(!is_sliding(layer), "sliding-window layers have no mass");
        let slots = self.extent.slots;
        let before = cache_layers(&(self.rows.layers.start..layer))[0];
        &mut self.rows.mass[(before * KV_HEADS + kv_head) * slots..][..slots]
    }
}

impl KvCache for CpuCache {
    fn extent(&self) -> Extent {
        self.extent
    }

    fn set_len(&mut self, len: usize) {
        let Extent { slots, len: before, .. } = self.extent;
        assert!(len <= slots);
        if len > before && !self.rows.mass.is_empty() {
            self.rows.mass.chunks_exact_mut(slots).for_each(|head| head[before..len].fill(0.0));
        }
        if len == 0 {
            self.rows.states[0].fill(0.0);
            self.rows.k.unmap_files();
            self.rows.v.unmap_files();
        }
        self.set_filled(len);
        self.release_unused();
    }

    fn read_state(&mut self, state: &mut [f32]) -> Result<()> {
        state[state_range(&self.rows.layers)].copy_from_slice(&self.rows.states[0]);
        Ok(())
    }

    fn write_state(&mut self, state: &[f32]) -> Result<()> {
        self.rows.states[0].copy_from_slice(&state[state_range(&self.rows.layers)]);
        Ok(())
    }

    fn restore_first_state(&mut self) -> Result<()> {
        let [current, first] = &mut self.rows.states;
        std::mem::swap(current, first);
        Ok(())
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        check_capacity(slots, self.extent.len)?;
        self.reallocate(slots, self.ring)
    }

    fn reserve_window_rows(&mut self) -> Result<()> {
        let ring = self.ring.with_whole_window();
        if ring.rows_per_head(self.extent.slots) != self.extent.ring {
            self.reallocate(self.extent.slots, ring)?;
        }
        self.ring = ring;
        Ok(())
    }

    fn retain_slots(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        check_kept_slots(slots, self.extent.len)?;
        assert!(!is_sliding(layer), "nothing is evicted from sliding-window layers");
        let [k, v] = self.rows.row_bytes;
        let (ks, vs) = &mut head_rows_mut(self.rows.layer_rows_mut(layer))[kv_head];
        for (to, &from) in slots.iter().enumerate() {
            let from = from as usize;
            ks.copy_within(from * k..(from + 1) * k, to * k);
            vs.copy_within(from * v..(from + 1) * v, to * v);
        }
        if !self.rows.mass.is_empty() {
            let mass = self.head_mass(layer, kv_head);
            slots.iter().enumerate().for_each(|(to, &from)| mass[to] = mass[from as usize]);
        }
        Ok(())
    }

    fn read_rows(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        let ([k, v], all) = (self.rows.row_bytes, self.extent.rows_per_head(layer));
        let (ks, vs) = self.rows.layer_rows(layer);
        rows.k.clear();
        rows.v.clear();
        for kv_head in 0..KV_HEADS {
            for (at, n) in ring_spans(slots.clone(), all) {
                rows.k.extend_from_slice(&head_rows(ks, kv_head)[at * k..(at + n) * k]);
                rows.v.extend_from_slice(&head_rows(vs, kv_head)[at * v..(at + n) * v]);
            }
        }
        Ok(())
    }

    fn write_rows(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        let ([k, v], all) = (self.rows.row_bytes, self.extent.rows_per_head(layer));
        if !is_sliding(layer) {
            self.touched = self.touched.max(slots.end);
        }
        assert!(is_sliding(layer) || slots.end <= all);
        assert!(rows.k.len() == KV_HEADS * slots.len() * k && rows.v.len() == KV_HEADS * slots.len() * v);
        let (mut from_k, mut from_v) = (&rows.k[..], &rows.v[..]);
        for (ks, vs) in head_rows_mut(self.rows.layer_rows_mut(layer)) {
            for (at, n) in ring_spans(slots.clone(), all) {
                let (row_k, row_v);
                ((row_k, from_k), (row_v, from_v)) = (from_k.split_at(n * k), from_v.split_at(n * v));
                ks[at * k..(at + n) * k].copy_from_slice(row_k);
                vs[at * v..(at + n) * v].copy_from_slice(row_v);
            }
        }
        Ok(())
    }

    fn map_rows(&mut self, layer: usize, slots: usize, rows: &RowsInFile<'_>) -> bool {
        let (first, capacity) = self.rows.layer_rows_at(layer);
        assert!(!is_sliding(layer) && slots <= capacity);
        self.touched = self.touched.max(slots);
        let planes = [&mut self.rows.k, &mut self.rows.v].into_iter().zip(self.rows.row_bytes);
        planes.zip(rows.heads).all(|((plane, row), (offset, step))| {
            // The rest of a head's last page has the file's bytes, too.
            (capacity * row).is_multiple_of(page_size())
                && (0..KV_HEADS).all(|head| {
                    let start = (first + head * capacity) * row;
                    let place = (rows.path, rows.file, offset + head as u64 * step);
                    plane.map_file(start..start + slots * row, place)
                })
        })
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        let len = self.extent.len;
        assert_eq!(mass.len(), KV_HEADS * len);
        if self.rows.mass.is_empty() {
            mass.fill(0.0);
            return Ok(());
        }
        for (kv_head, mass) in mass.chunks_exact_mut(len.max(1)).enumerate() {
            mass.copy_from_slice(&self.head_mass(layer, kv_head)[..len]);
        }
        Ok(())
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        let len = self.extent.len;
        assert_eq!(mass.len(), KV_HEADS * len);
        if self.rows.mass.is_empty() {
            self.rows.mass = alloc_mass(self.extent.slots, cache_layers(&self.rows.layers)[0])?;
        }
        for (kv_head, mass) in mass.chunks_exact(len.max(1)).enumerate() {
            self.head_mass(layer, kv_head)[..len].copy_from_slice(mass);
        }
        Ok(())
    }

    fn host_rows(&mut self) -> Result<&mut dyn HostRows> {
        Ok(&mut self.rows)
    }
}
