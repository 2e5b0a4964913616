//! Drafts by a Gemma 4 assistant: see [`Assistant`]. It goes on from the model's final state of the last computed token,
//! and reads the rows in the CPU's cache.

use super::in_process::{FinalStates, InProcessDrafter};
use crate::dims::DIM;
use crate::model::cpu::AssistantDevice;
use crate::model::device::KvCache;
use crate::model::weights::{Assistant, Weights};
use crate::run::options::EngineOptions;
use files::Result;
use numeric::simd::Isa;
use std::sync::Arc;

/// The assistant, which the sequences of an engine share.
pub type AssistantDrafter = InProcessDrafter<AssistantDevice>;

/// A sequence's states, from which drafts by the assistant begin.
pub struct AssistantSequence {
    drafter: AssistantDrafter,
    last_pass: FinalStates,
    /// State that the next prediction begins from: `[DIM]`
    state: Vec<f32>,
}

impl AssistantDrafter {
    /// A drafter for the model with these weights.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new(weights: &Arc<Weights>, assistant: Assistant, isa: Isa, o: &EngineOptions) -> Result<Self> {
        Ok(Self::with_device(AssistantDevice::new(weights, assistant, isa, o.threads)?, o.draft_when))
    }

    /// An empty sequence with drafts of at most `most` tokens.
    pub fn new_sequence(&self, most: usize) -> AssistantSequence {
        let last_pass = FinalStates::with_room(most + 1);
        AssistantSequence { drafter: self.clone(), last_pass, state: vec![0.0; DIM] }
    }
}

impl AssistantSequence {
    /// Begins a pass of the model over `staged` tokens behind `before` others, in a text known up to length `known`.
    /// Returns the destination of the final states of its last tokens: of a prompt's last one, and of all that follow.
    pub fn begin_pass(&mut self, before: usize, staged: usize, known: usize) -> &mut [f32] {
        let end = before + staged;
        self.last_pass.begin_pass(end, (end + 1).saturating_sub(known).min(staged))
    }

    /// Ends a pass that has not failed.
    pub fn end_pass(&mut self) {
        self.last_pass.end_pass();
    }

    /// Appends the most likely tokens after `next`, which is at position `pos`, to `draft`, at most `length`. Returns
    /// false if the state before `next` is not known.
    pub fn draft_tokens(
        &mut self,
        cache: &mut dyn KvCache,
        (mut next, pos): (u32, usize),
        length: usize,
        draft: &mut Vec<u32>,
    ) -> bool {
        let Some(state) = pos.checked_sub(1).and_then(|before| self.last_pass.at_position(before)) else {
            return false;
        };
        self.state.copy_from_slice(state);
        let mut device = self.drafter.lock();
        for _ in 0..length {
            // Errs only on another device's cache.
            let Ok(token) = device.predict_token(cache, (next, pos), &mut self.state) else { return false };
            draft.push(token);
            next = token;
        }
        true
    }
}
