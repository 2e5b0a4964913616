//! Drafts by the block of the model that predicts the token after the next one (multi-token prediction). The block
//! joins a token's embedding with the model's final state of the token before it, a *pair*, and its prediction with its
//! own state for the token after that. It runs on the CPU, wherever the model does.

use super::draft_length::DraftWhen;
use super::in_process::{FinalStates, InProcessDrafter};
use crate::dims::{DIM, HEAD_DIM, KV_HEADS, MTP_LAYER};
use crate::model::cpu::{MTP_SLOTS, MTP_VOCAB, MtpDevice};
use crate::model::device::{KvCache, Logits, Run};
use crate::model::weights::Weights;
use files::Result;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::sync::Arc;
use text::sampler::argmax;

/// Number of a prompt's last tokens that the block sees.
const CONTEXT: usize = 256;

/// Bytes of the pairs and states of a sequence.
pub fn sequence_bytes() -> u64 {
    let types = KvTypes::same(KvType::F16);
    (types.slot_bytes(1, KV_HEADS, HEAD_DIM) * MTP_SLOTS + 4 * DIM * CONTEXT) as u64
}

/// The block, which the sequences of an engine share.
pub type MtpDrafter = InProcessDrafter<MtpState>;

/// The block, and logits of its last prediction: `[MTP_VOCAB]`.
pub struct MtpState {
    block: MtpDevice,
    logits: Vec<f32>,
}

/// One sequence's pairs.
pub struct MtpSequence {
    drafter: MtpDrafter,
    cache: Box<dyn KvCache>,
    /// Position of the token that the next pair's state belongs to, if it follows those in the cache.
    next: usize,
    last_pass: FinalStates,
    /// State of the block's last prediction: `[DIM]`
    own_state: Vec<f32>,
}

impl MtpDrafter {
    /// A drafter for these weights; `None` if they have no such block.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new(weights: &Arc<Weights>, isa: Isa, threads: usize, when: DraftWhen) -> Result<Option<Self>> {
        let Some(block) = MtpDevice::new(weights, isa, threads)? else { return Ok(None) };
        Ok(Some(Self::with_device(MtpState { block, logits: vec![0.0; MTP_VOCAB] }, when)))
    }

    /// An empty sequence.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new_sequence(&self) -> Result<MtpSequence> {
        let cache = self.lock().block.new_cache(KvTypes::same(KvType::F16))?;
        let (last_pass, own_state) = (FinalStates::with_room(CONTEXT), vec![0.0; DIM]);
        Ok(MtpSequence { drafter: self.clone(), cache, next: 0, last_pass, own_state })
    }
}

impl MtpSequence {
    /// Begins a pass of the model over `staged`, which follow `tokens`, in a text known up to length `known`. Returns
    /// the destination of the final states of its last tokens.
    pub fn begin_pass(&mut self, tokens: &[u32], staged: &[u32], known: usize) -> &mut [f32] {
        if let Some(&next) = staged.first() {
            self.append_known_pairs(tokens, next, false);
        }
        let end = tokens.len() + staged.len();
        self.last_pass.begin_pass(end, (end + CONTEXT).saturating_sub(known).min(staged.len()))
    }

    /// Ends a pass that has not failed.
    pub fn end_pass(&mut self) {
        self.last_pass.end_pass();
    }

    /// Appends the most likely tokens after `tokens` and `next` to `draft`, at most `length`. Returns false if the state
    /// before `next` is not known.
    pub fn draft_tokens(&mut self, tokens: &[u32], next: u32, length: usize, draft: &mut Vec<u32>) -> bool {
        if !self.append_known_pairs(tokens, next, true) {
            return false;
        }
        let MtpState { block, logits } = &mut *self.drafter.lock();
        let known = self.cache.extent().len;
        for i in 0..length {
            block.compute_logits(&self.own_state, logits);
            let token = argmax(logits);
            draft.push(token);
            if i + 1 == length || self.cache.extent().len == MTP_SLOTS {
                break;
            }
            let pair = self.own_state.clone();
            let run = Run::new(&mut *self.cache, std::slice::from_ref(&token), self.next + i, Logits::None);
            if block.append_pairs(Run { hidden: &mut self.own_state, ..run }, &pair).is_err() {
                break;
            }
        }
        self.cache.set_len(known);
        true
    }

    /// Appends the pairs of the last pass whose token is known now: one of `tokens`, or `next`, which follows them. With
    /// `predicts`, computes the block's state of the last one, the pair of `next`; false if that one is not among them.
    fn append_known_pairs(&mut self, tokens: &[u32], next: u32, predicts: bool) -> bool {
        let FinalStates { first, count, .. } = self.last_pass;
        let end = (first + count).min(tokens.len());
        let predicts = predicts && end == tokens.len();
        if end <= first {
            return false;
        }
        if first != self.next {
            self.cache.set_len(0); // earlier pairs are not those before these
        }
        let pairs: Vec<u32> = (first + 1..=end).map(|p| tokens.get(p).copied().unwrap_or(next)).collect();
        if self.cache.extent().len + pairs.len() > MTP_SLOTS {
            self.drop_oldest_pairs();
        }
        let hidden = if predicts { &mut self.own_state[..] } else { &mut [] };
        let run = Run { hidden, ..Run::new(&mut *self.cache, &pairs, first, Logits::None) };
        let states = self.last_pass.first_rows(pairs.len());
        let appended = self.drafter.lock().block.append_pairs(run, states).is_ok();
        (self.next, self.last_pass.count) = (end, 0);
        appended && predicts
    }

    /// Makes room for as many pairs as a pass has.
    fn drop_oldest_pairs(&mut self) {
        let len = self.cache.extent().len;
        let kept: Vec<u32> = (len - len.min(MTP_SLOTS / 2)..len).map(|slot| slot as u32).collect();
        for kv_head in 0..KV_HEADS {
            let _ = self.cache.retain_slots(MTP_LAYER, kv_head, &kept); // errs only on another device's cache
        }
        self.cache.set_len(kept.len());
    }
}
