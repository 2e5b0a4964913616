//! The common part of drafters in this program: the sequences of an engine share them, and they go on from the model's
//! final states.

use super::draft_length::{DraftWhen, SharedLengthPolicy};
use crate::dims::DIM;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A drafter in this program.
pub struct InProcessDrafter<D> {
    device: Arc<Mutex<D>>,
    /// Policy for the length of its drafts.
    pub length_policy: SharedLengthPolicy,
}

impl<D> Clone for InProcessDrafter<D> {
    fn clone(&self) -> Self {
        Self { device: Arc::clone(&self.device), length_policy: self.length_policy.clone() }
    }
}

impl<D> InProcessDrafter<D> {
    /// A drafter that drafts on this condition.
    pub fn with_device(device: D, when: DraftWhen) -> Self {
        Self { device: Arc::new(Mutex::new(device)), length_policy: SharedLengthPolicy::new(when) }
    }

    /// Locks it for a draft.
    pub(super) fn lock(&self) -> MutexGuard<'_, D> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The model's final states of a sequence's last pass.
pub(super) struct FinalStates {
    /// `[at most this many][DIM]`, `count` of them, from position `first` on.
    states: Vec<f32>,
    pub first: usize,
    pub count: usize,
    /// Position and number of those of the pass that has begun.
    staged: (usize, usize),
}

impl FinalStates {
    /// Room for `most` states.
    pub fn with_room(most: usize) -> Self {
        Self { states: vec![0.0; most * DIM], first: 0, count: 0, staged: (0, 0) }
    }

    /// Begins a pass whose tokens end before position `end`. Returns the destination of the final states of its last
    /// `count` tokens, or of as many as there is room for.
    pub fn begin_pass(&mut self, end: usize, count: usize) -> &mut [f32] {
        let count = count.min(self.states.len() / DIM);
        (self.count, self.staged) = (0, (end - count, count));
        &mut self.states[..count * DIM]
    }

    /// Ends a pass that has not failed.
    pub fn end_pass(&mut self) {
        (self.first, self.count) = std::mem::take(&mut self.staged);
    }

    /// The first `count` states.
    pub fn first_rows(&self, count: usize) -> &[f32] {
        &self.states[..count * DIM]
    }

    /// The state of the token at a position, if it is known.
    pub fn at_position(&self, pos: usize) -> Option<&[f32]> {
        let index = pos.checked_sub(self.first).filter(|&index| index < self.count)?;
        Some(&self.states[index * DIM..][..DIM])
    }
}
