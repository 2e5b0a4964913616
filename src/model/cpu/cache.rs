//! The CPU's key/value cache, allocated once for the whole context.

use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use crate::model::backend::{KvRows, Lent, RowMemory};
use files::mapped::AlignedBytes;
use files::{Error, Result};
use numeric::kv::{KvTypes, check_capacity, check_kept};
use std::ops::Range;

/// Keys and values of all layers.
pub struct Cache {
    types: KvTypes,
    capacity: usize,
    len: usize,
    /// Slots whose pages may take memory of our own.
    touched: usize,
    memory: Memory,
}

/// Whose memory the rows lie in.
enum Memory {
    /// The cache's own: keys and values, `[layer][kv_head][slot][row bytes]` each.
    Own(AlignedBytes, AlignedBytes),
    /// That of another backend.
    Lent(Box<dyn RowMemory>),
    /// Nobody's: rows have to be adopted first.
    Nobodys,
}

const NO_ROWS: &str = "a cache without rows is used before it adopts some";

impl Memory {
    fn own(types: KvTypes, capacity: usize) -> Result<Self> {
        let plane = |row| plane(capacity, row);
        Ok(Memory::Own(plane(types.k.row_bytes(HEAD_DIM))?, plane(types.v.row_bytes(HEAD_DIM))?))
    }

    /// Keys and values of one layer: `[kv_head][slot][row bytes]`.
    fn layer(&self, layer: usize) -> (&[u8], &[u8]) {
        let part = |plane: &AlignedBytes| plane_layer(plane.as_slice().len(), layer);
        match self {
            Memory::Own(k, v) => (&k.as_slice()[part(k)], &v.as_slice()[part(v)]),
            Memory::Lent(memory) => memory.layer(layer),
            Memory::Nobodys => panic!("{NO_ROWS}"),
        }
    }

    fn layer_mut(&mut self, layer: usize) -> (&mut [u8], &mut [u8]) {
        let part = |plane: &AlignedBytes| plane_layer(plane.as_slice().len(), layer);
        match self {
            Memory::Own(k, v) => {
                let (of_k, of_v) = (part(k), part(v));
                (&mut k.as_mut_slice()[of_k], &mut v.as_mut_slice()[of_v])
            }
            Memory::Lent(memory) => memory.layer_mut(layer),
            Memory::Nobodys => panic!("{NO_ROWS}"),
        }
    }
}

/// Where one layer of a plane of `bytes` lies.
fn plane_layer(bytes: usize, layer: usize) -> Range<usize> {
    let each = bytes / LAYERS;
    layer * each..(layer + 1) * each
}

/// All rows of one layer.
#[derive(Clone, Copy)]
pub struct LayerRows<'a> {
    k: &'a [u8],
    v: &'a [u8],
}

impl<'a> LayerRows<'a> {
    /// Keys and values of one KV head.
    pub fn head(self, kv_head: usize) -> (&'a [u8], &'a [u8]) {
        let of = |plane: &'a [u8]| &plane[plane.len() / KV_HEADS * kv_head..][..plane.len() / KV_HEADS];
        (of(self.k), of(self.v))
    }
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
        Ok(Self { memory: Memory::own(types, capacity)?, ..Self::without_memory(types, capacity) })
    }

    /// A cache for rows that another backend lends.
    pub fn without_memory(types: KvTypes, capacity: usize) -> Self {
        Self { types, capacity, len: 0, touched: 0, memory: Memory::Nobodys }
    }

    /// Takes another backend's rows.
    pub fn adopt(&mut self, rows: Lent) {
        assert!(matches!(self.memory, Memory::Nobodys), "a cache with rows of its own adopts others");
        let (k, v) = self.row_bytes();
        let (ks, vs) = rows.memory.layer(0);
        let slots = KV_HEADS * rows.capacity;
        assert!(ks.len() == slots * k && vs.len() == slots * v, "rows of other types or of another capacity");
        (self.capacity, self.memory) = (rows.capacity, Memory::Lent(rows.memory));
        self.set_len(rows.len);
    }

    /// Hands back the rows that are another backend's; `None` where there are none such.
    pub fn lend(&mut self) -> Option<Lent> {
        match std::mem::replace(&mut self.memory, Memory::Nobodys) {
            Memory::Lent(memory) => {
                self.touched = 0;
                Some(Lent { memory, capacity: self.capacity, len: std::mem::take(&mut self.len) })
            }
            own => {
                self.memory = own;
                None
            }
        }
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

    /// Sets the number of filled slots. The memory of the others goes back to the system where it is much, and a good
    /// part of what was in use: what an ordinary eviction frees, or a benchmark's rewind, is filled again at once.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity);
        self.len = len;
        self.touched = self.touched.max(len);
        let unused = self.touched - len;
        let bytes = unused * self.types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM);
        if len == 0 || unused < self.touched / 4 || bytes < WORTH_RELEASING {
            return;
        }
        let (k_row, v_row) = self.row_bytes();
        if let Memory::Own(k, v) = &mut self.memory {
            for head in 0..LAYERS * KV_HEADS {
                let slots = head * self.capacity + len..head * self.capacity + self.touched;
                k.discard(slots.start * k_row..slots.end * k_row);
                v.discard(slots.start * v_row..slots.end * v_row);
            }
        }
        self.touched = len;
    }

    fn row_bytes(&self) -> (usize, usize) {
        (self.types.k.row_bytes(HEAD_DIM), self.types.v.row_bytes(HEAD_DIM))
    }

    /// All rows of one layer.
    pub fn layer(&self, layer: usize) -> LayerRows<'_> {
        let (k, v) = self.memory.layer(layer);
        LayerRows { k, v }
    }

    /// All rows of one layer, apart by KV head.
    pub fn heads_mut(&mut self, layer: usize) -> [(&mut [u8], &mut [u8]); KV_HEADS] {
        let (k, v) = self.row_bytes();
        let (k, v) = (self.capacity * k, self.capacity * v);
        let (ks, vs) = self.memory.layer_mut(layer);
        let (mut ks, mut vs) = (ks.chunks_exact_mut(k), vs.chunks_exact_mut(v));
        std::array::from_fn(|_| {
            let pair = ks.next().zip(vs.next());
            pair.expect("invariant: every layer has KV_HEADS heads")
        })
    }

    /// Changes the capacity; filled rows stay. Fails without change when memory is short. Without memory the cache
    /// gets its own; lent memory is its lender's to resize.
    pub fn resize(&mut self, capacity: usize) -> Result<()> {
        assert!(!matches!(self.memory, Memory::Lent(_)), "lent rows are resized by their lender");
        check_capacity(capacity, self.len)?;
        let mut grown = Cache::new(self.types, capacity)?;
        let (k, v) = self.row_bytes();
        for layer in (0..LAYERS).filter(|_| self.len > 0) {
            for (kv_head, (ks, vs)) in grown.heads_mut(layer).into_iter().enumerate() {
                let (old_k, old_v) = self.layer(layer).head(kv_head);
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
            let (ks, vs) = self.layer(layer).head(kv_head);
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
