//! The attention that slots received, kept from when somebody first observes it.

use crate::dims::{HEADS, KV_HEADS, LAYERS};
use files::{Error, Result};
use numeric::kv::check_kept;
use numeric::simd::attend::Softmax;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The mass of all slots.
pub struct SlotMass {
    capacity: usize,
    /// `[layer][kv_head][slot]`
    sums: Vec<f32>,
}

impl SlotMass {
    /// No attention yet.
    pub fn new(capacity: usize) -> Result<Self> {
        let mut sums = Vec::new();
        let len = LAYERS * KV_HEADS * capacity;
        sums.try_reserve_exact(len).map_err(|_| {
            let mib = (4 * len) >> 20;
            Error::Memory(format!(
                "cannot allocate {mib} MiB for attention mass; use a smaller --max-seq-len"
            ))
        })?;
        sums.resize(len, 0.0);
        Ok(Self { capacity, sums })
    }

    /// `[kv_head][slot]` of one layer.
    pub fn layer_mut(&mut self, layer: usize) -> &mut [f32] {
        let len = KV_HEADS * self.capacity;
        &mut self.sums[layer * len..][..len]
    }

    /// Forgets what slots received that are filled anew.
    pub fn clear(&mut self, slots: Range<usize>) {
        self.sums.chunks_exact_mut(self.capacity.max(1)).for_each(|head| head[slots.clone()].fill(0.0));
    }

    /// Moves the mass of `slots` (ascending, below `len`) to slots `0..`.
    pub fn keep(&mut self, (layer, kv_head): (usize, usize), slots: &[u32], len: usize) -> Result<()> {
        check_kept(slots, len)?;
        let from = kv_head * self.capacity;
        let head = &mut self.layer_mut(layer)[from..];
        slots.iter().enumerate().for_each(|(to, &from)| head[to] = head[from as usize]);
        Ok(())
    }

    /// The same with room for `capacity` slots, of which `len` are filled.
    pub fn resized(&self, capacity: usize, len: usize) -> Result<Self> {
        let mut resized = Self::new(capacity)?;
        let heads = resized.sums.chunks_exact_mut(capacity.max(1));
        for (to, from) in heads.zip(self.sums.chunks_exact(self.capacity.max(1))) {
            to[..len].copy_from_slice(&from[..len]);
        }
        Ok(resized)
    }

    /// Copies the mass of the first slots of one layer out: `[kv_head][slot]`.
    pub fn read(&self, layer: usize, mass: &mut [f32]) {
        let len = mass.len() / KV_HEADS;
        for (kv_head, mass) in mass.chunks_exact_mut(len.max(1)).enumerate() {
            mass.copy_from_slice(&self.sums[(layer * KV_HEADS + kv_head) * self.capacity..][..len]);
        }
    }

    /// Replaces it, likewise.
    pub fn write(&mut self, layer: usize, mass: &[f32]) {
        let (len, capacity) = (mass.len() / KV_HEADS, self.capacity);
        for (kv_head, mass) in mass.chunks_exact(len.max(1)).enumerate() {
            self.layer_mut(layer)[kv_head * capacity..][..len].copy_from_slice(mass);
        }
    }
}

/// The softmax of a query, which the task that computes it leaves to those of a later step.
#[derive(Default)]
pub struct Noted(AtomicU64);

impl Noted {
    /// Leaves it; the end of the step orders this before the next.
    pub fn set(&self, softmax: Softmax) {
        let bits = u64::from(softmax.m.to_bits()) << 32 | u64::from(softmax.l.to_bits());
        self.0.store(bits, Ordering::Relaxed);
    }

    /// What was left.
    pub fn get(&self) -> Softmax {
        let bits = self.0.load(Ordering::Relaxed);
        Softmax { m: f32::from_bits((bits >> 32) as u32), l: f32::from_bits(bits as u32) }
    }
}

/// Room for the softmax of each query of `tokens` tokens: `[token][HEADS]`.
pub fn notes(tokens: usize) -> Result<Vec<Noted>> {
    let mut notes = Vec::new();
    notes.try_reserve_exact(tokens * HEADS).map_err(|_| {
        Error::Memory("cannot allocate scratch to observe attention; use a smaller --prefill-chunk".into())
    })?;
    notes.resize_with(tokens * HEADS, Noted::default);
    Ok(notes)
}

/// Bytes that observing takes with a cache of `capacity` slots and passes of `max_tokens`.
pub const fn bytes(capacity: usize, max_tokens: usize) -> usize {
    4 * LAYERS * KV_HEADS * capacity + size_of::<Noted>() * HEADS * max_tokens
}
