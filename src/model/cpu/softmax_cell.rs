//! The softmax state of a query, which attention stores for the step that observes attention.

use files::{Error, Result};
use numeric::simd::attend::SoftmaxState;
use std::sync::atomic::{AtomicU64, Ordering};

/// The softmax state of a query. One step writes it and a later step reads it, on any thread.
#[derive(Default)]
pub struct AtomicSoftmax(AtomicU64);

impl AtomicSoftmax {
    /// Stores the state. The barrier at the end of the step makes it visible to the next.
    pub fn store(&self, softmax: SoftmaxState) {
        let bits = u64::from(softmax.m.to_bits()) << 32 | u64::from(softmax.l.to_bits());
        self.0.store(bits, Ordering::Relaxed);
    }

    /// Loads the state.
    pub fn load(&self) -> SoftmaxState {
        let bits = self.0.load(Ordering::Relaxed);
        SoftmaxState { m: f32::from_bits((bits >> 32) as u32), l: f32::from_bits(bits as u32) }
    }

    /// Allocates `count` of them.
    pub fn allocate(count: usize) -> Result<Vec<Self>> {
        let mut notes = Vec::new();
        notes.try_reserve_exact(count).map_err(|_| {
            Error::Memory(
                "cannot allocate scratch to observe attention; use a smaller `EngineOptions::prefill_chunk`"
                    .into(),
            )
        })?;
        notes.resize_with(count, Self::default);
        Ok(notes)
    }
}
