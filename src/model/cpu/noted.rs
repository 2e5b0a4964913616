//! What attention notes on a query for the step that observes it.

use files::{Error, Result};
use numeric::simd::attend::Softmax;
use std::sync::atomic::{AtomicU64, Ordering};

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

    /// Room for so many.
    pub fn room(count: usize) -> Result<Vec<Self>> {
        let mut notes = Vec::new();
        notes.try_reserve_exact(count).map_err(|_| {
            Error::Memory(
                "cannot allocate scratch to observe attention; use a smaller --prefill-chunk".into(),
            )
        })?;
        notes.resize_with(count, Self::default);
        Ok(notes)
    }
}
