//! What attention notes about a query, for the step that observes attention.

use files::{Error, Result};
use numeric::simd::attend::Softmax;
use std::sync::atomic::{AtomicU64, Ordering};

/// The softmax of a query. One step writes it and a later step reads it, on any thread.
#[derive(Default)]
pub struct Noted(AtomicU64);

impl Noted {
    /// Writes it. The end of the step makes sure that the next step sees it.
    pub fn set(&self, softmax: Softmax) {
        let bits = u64::from(softmax.m.to_bits()) << 32 | u64::from(softmax.l.to_bits());
        self.0.store(bits, Ordering::Relaxed);
    }

    /// Reads what was written.
    pub fn get(&self) -> Softmax {
        let bits = self.0.load(Ordering::Relaxed);
        Softmax { m: f32::from_bits((bits >> 32) as u32), l: f32::from_bits(bits as u32) }
    }

    /// Room for so many.
    pub fn room(count: usize) -> Result<Vec<Self>> {
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
