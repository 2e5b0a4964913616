//! The common part of drafters in this program: the sequences of an engine share them, and they go on from the model's
//! final states.

use super::draft_length::{DraftLengthPolicy, DraftWhen, PassTime};
use crate::dims::DIM;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A drafter in this program.
pub struct InProcessDrafter<D>(Arc<Mutex<DrafterState<D>>>);

/// The drafter itself, and how much it drafts.
pub struct DrafterState<D> {
    /// Predicts tokens.
    pub device: D,
    length_policy: DraftLengthPolicy,
}

impl<D> Clone for InProcessDrafter<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D> InProcessDrafter<D> {
    /// A drafter that drafts on this condition.
    pub fn with_device(device: D, when: DraftWhen) -> Self {
        Self(Arc::new(Mutex::new(DrafterState { device, length_policy: DraftLengthPolicy::new(when) })))
    }

    /// Locks it for a draft.
    pub(super) fn lock(&self) -> MutexGuard<'_, DrafterState<D>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of tokens to draft now, at most `most`; 0 means none.
    pub fn draft_length(&self, most: usize) -> usize {
        self.lock().length_policy.next_length(most)
    }

    /// Records the time of a pass without drafts.
    pub fn record_undrafted(&self, time: PassTime) {
        self.lock().length_policy.record_undrafted(time);
    }

    /// Records how many drafted tokens were accepted, and the time of the pass including the draft, if known.
    pub fn record_drafted(&self, accepted: usize, drafted: usize, time: Option<PassTime>) {
        self.lock().length_policy.record_drafted(accepted, drafted, time);
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
