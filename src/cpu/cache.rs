//! The CPU's key/value cache, allocated once for the whole context.

use crate::backend::KvRows;
use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use crate::error::{Error, Result};
use crate::kv::{KvTypes, check_capacity, check_kept};
use crate::weights::region::AlignedBytes;
use std::ops::Range;

/// Keys and values of all layers: `[layer][kv_head][slot][row bytes]` each.
pub struct Cache {
    types: KvTypes,
    capacity: usize,
    len: usize,
    /// Slots whose pages may take memory.
    touched: usize,
    k: AlignedBytes,
    v: AlignedBytes,
}

/// Unused bytes from which on they are given back.
const WORTH_RELEASING: usize = 1 << 20;

/// Bytes of the rows of one plane.
fn plane(capacity: usize, row_bytes: usize) -> Result<AlignedBytes> {
    let bytes = capacity
        .checked_mul(LAYERS * KV_HEADS)
        .and_then(|rows| rows.checked_mul(row_bytes))
        .ok_or_else(|| Error::Usage(format!("--max-seq-len {capacity}: too large; use a smaller context")))?;
    AlignedBytes::zeroed(bytes).map_err(|e| {
        Error::Memory(format!("KV cache for --max-seq-len {capacity}: {e}; use a smaller context or KV type"))
    })
}

impl Cache {
    /// An empty cache. The system provides its pages as they are first written.
    pub fn new(types: KvTypes, capacity: usize) -> Result<Self> {
        Ok(Self {
            types,
            capacity,
            len: 0,
            touched: 0,
            k: plane(capacity, types.k.row_bytes(HEAD_DIM))?,
            v: plane(capacity, types.v.row_bytes(HEAD_DIM))?,
        })
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

    /// Sets the number of filled slots. The memory of the others goes back to the system once it is worth a call for
    /// every head: rewinding by a few tokens costs nothing.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity);
        self.len = len;
        self.touched = self.touched.max(len);
        if (self.touched - len) * self.types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM) >= WORTH_RELEASING {
            let (k, v) = self.row_bytes();
            for head in 0..LAYERS * KV_HEADS {
                let slots = head * self.capacity + len..head * self.capacity + self.touched;
                self.k.discard(slots.start * k..slots.end * k);
                self.v.discard(slots.start * v..slots.end * v);
            }
            self.touched = len;
        }
    }

    fn row_bytes(&self) -> (usize, usize) {
        (self.types.k.row_bytes(HEAD_DIM), self.types.v.row_bytes(HEAD_DIM))
    }

    /// All rows of one layer and KV head: keys, values.
    pub fn head(&self, layer: usize, kv_head: usize) -> (&[u8], &[u8]) {
        let (k, v) = self.row_bytes();
        let index = (layer * KV_HEADS + kv_head) * self.capacity;
        (
            &self.k.as_slice()[index * k..][..self.capacity * k],
            &self.v.as_slice()[index * v..][..self.capacity * v],
        )
    }

    /// All rows of one layer, apart by KV head.
    pub fn heads_mut(&mut self, layer: usize) -> [(&mut [u8], &mut [u8]); KV_HEADS] {
        let (k, v) = self.row_bytes();
        let (k, v) = (self.capacity * k, self.capacity * v);
        let mut ks = self.k.as_mut_slice()[layer * KV_HEADS * k..].chunks_exact_mut(k);
        let mut vs = self.v.as_mut_slice()[layer * KV_HEADS * v..].chunks_exact_mut(v);
        std::array::from_fn(|_| {
            let pair = ks.next().zip(vs.next());
            pair.expect("invariant: every layer has KV_HEADS heads")
        })
    }

    /// Changes the capacity; filled rows stay. Fails without change when memory is short.
    pub fn resize(&mut self, capacity: usize) -> Result<()> {
        check_capacity(capacity, self.len)?;
        let mut grown = Cache::new(self.types, capacity)?;
        let (k, v) = self.row_bytes();
        for layer in 0..LAYERS {
            for (kv_head, (ks, vs)) in grown.heads_mut(layer).into_iter().enumerate() {
                let (old_k, old_v) = self.head(layer, kv_head);
                ks[..self.len * k].copy_from_slice(&old_k[..self.len * k]);
                vs[..self.len * v].copy_from_slice(&old_v[..self.len * v]);
            }
        }
        (grown.len, grown.touched) = (self.len, self.len);
        *self = grown;
        Ok(())
    }

    /// Moves the rows of `slots` (ascending, filled) to slots `0..`.
    pub fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        check_kept(slots, self.len)?;
        let (k, v) = self.row_bytes();
        let (ks, vs) = &mut self.heads_mut(layer)[kv_head];
        for (to, &from) in slots.iter().enumerate() {
            let from = from as usize;
            ks.copy_within(from * k..(from + 1) * k, to * k);
            vs.copy_within(from * v..(from + 1) * v, to * v);
        }
        Ok(())
    }

    /// Copies rows out: `[kv_head][slot][row bytes]`.
    pub fn read(&self, layer: usize, slots: Range<usize>, rows: &mut KvRows) {
        let (k, v) = self.row_bytes();
        rows.k.clear();
        rows.v.clear();
        for kv_head in 0..KV_HEADS {
            let (ks, vs) = self.head(layer, kv_head);
            rows.k.extend_from_slice(&ks[slots.start * k..slots.end * k]);
            rows.v.extend_from_slice(&vs[slots.start * v..slots.end * v]);
        }
    }

    /// Copies rows in.
    pub fn write(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) {
        let (k, v) = self.row_bytes();
        let n = slots.len();
        self.touched = self.touched.max(slots.end);
        assert!(rows.k.len() == KV_HEADS * n * k && rows.v.len() == KV_HEADS * n * v);
        for (kv_head, (ks, vs)) in self.heads_mut(layer).into_iter().enumerate() {
            ks[slots.start * k..slots.end * k].copy_from_slice(&rows.k[kv_head * n * k..][..n * k]);
            vs[slots.start * v..slots.end * v].copy_from_slice(&rows.v[kv_head * n * v..][..n * v]);
        }
    }
}
