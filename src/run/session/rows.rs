//! The rows of a sequence: eviction, rewinding, moving to another device, recomputing after a device is lost, saving
//! and restoring.

use super::event::{EvictionReason, EvictionResult, SessionEvent};
use super::evictor::{AppendKind, Evictor, ObservedTokens};
use super::{PastEviction, Sequence, Session, Switch};
use crate::dims::{
    FIRST_SHARING_LAYER, HEAD_DIM, KV_HEADS, LAYER_KINDS, STATE, attention_layers, full_attention_layers,
    is_sliding,
};
use crate::model::device::{KvRows, Logits, RowsInFile, lock_device};
use crate::run::placement::{Checkpoint, RowState, TokenKind};
use files::config::LayerKind;
use files::{Error, Result};
use std::time::Instant;

impl Session {
    /// Makes room for at least one of `wanted` tokens, evicting if necessary, and returns for how many there is room.
    /// Evictions come after the same tokens whatever the size of chunks.
    pub(super) fn make_room(&mut self, wanted: usize, input: AppendKind) -> Result<usize> {
        self.rebuild_state()?;
        self.with_fallback(|session| session.make_room_here(wanted, input))
    }

    /// Computes the recurrent state of the sequence again from its last checkpoint, if a failed pass or a discarded
    /// draft has left another one.
    pub(super) fn rebuild_state(&mut self) -> Result<()> {
        if self.device_cache.has_state_of(self.tokens.len()) {
            return Ok(());
        }
        self.recompute_from_checkpoint(self.tokens.len())
    }

    /// Keeps the first `len` tokens, and recomputes those after the last place from which the sequence can continue.
    fn recompute_from_checkpoint(&mut self, len: usize) -> Result<()> {
        let kept = self.reusable_prefix(len);
        // Tokens before an eviction were computed with the slots that it removed.
        let evicts = self.evictions.iter().any(|cut| (kept + 1..=len).contains(&cut.tokens));
        if kept == 0 || evicts || !self.keeps_evictions(kept) {
            return self.recompute(len);
        }
        let rest = self.tokens[kept..len].to_vec();
        self.truncate_to(kept);
        self.append_all(&rest)
    }

    /// Evicts the slots that a prompt has filled beyond the window.
    pub(super) fn evict_after_prompt(&mut self) -> Result<()> {
        let len = self.device_cache.filled_slots();
        if self.evictor.as_ref().is_some_and(|e| len > e.eviction_limit()) {
            self.with_fallback(|session| session.evict_slots(EvictionReason::Window))?;
        }
        Ok(())
    }

    /// Allocates what evictions need in the cache, if there are any.
    pub(super) fn prepare_eviction(&mut self) -> Result<()> {
        if self.evictor.is_some() {
            self.device_cache.reserve_window_rows()?;
        }
        if self.observes_attention() { self.device_cache.allocate_mass() } else { Ok(()) }
    }

    fn make_room_here(&mut self, wanted: usize, input: AppendKind) -> Result<usize> {
        let most = wanted.min(self.device_cache.max_tokens());
        let Some(evictor) = &mut self.evictor else { return Ok(most.min(self.device_cache.free_slots())) };
        let len = self.device_cache.filled_slots();
        evictor.watch_memory(len, most);
        if let Some(why) = evictor.eviction_reason(len, input) {
            self.evict_slots(why)?;
        }
        let Some(evictor) = &self.evictor else { return Ok(most) };
        let ahead = evictor.tokens_until_eviction(self.device_cache.filled_slots(), input);
        let most = most.min(ahead);
        self.observe_next(most, ahead)?;
        Ok(most)
    }

    /// True if the eviction policy looks at attention.
    pub(super) fn observes_attention(&self) -> bool {
        self.evictor.as_ref().is_some_and(Evictor::observes_attention)
    }

    /// Sets which of the next `now` tokens are observed, with the next eviction `ahead` tokens away.
    pub(super) fn observe_next(&mut self, now: usize, ahead: usize) -> Result<()> {
        let at = self.tokens.len();
        match self.evictor.as_mut().map(|e| e.plan_observation(at, now, ahead)) {
            None => {}
            Some(ObservedTokens::Last(tokens)) => self.device_cache.set_observed(tokens),
            Some(ObservedTokens::Afresh(tokens)) => {
                self.device_cache.zero_mass()?;
                self.device_cache.set_observed(tokens);
            }
        }
        Ok(())
    }

    /// Evicts slots and reports it.
    fn evict_slots(&mut self, why: EvictionReason) -> Result<()> {
        let began = Instant::now();
        let before = self.device_cache.filled_slots();
        let Some(keep) = self.evictor.as_ref().map(Evictor::slots_to_keep) else { return Ok(()) };
        self.evict_to(keep)?;
        let slots = self.device_cache.filled_slots();
        let (removed, position) = (before - slots, self.tokens.len());
        let result = EvictionResult { removed, slots, position, why, took: began.elapsed() };
        self.report_event(&format!("evict {removed} slots: {}", why.name()), SessionEvent::Evicted(result));
        Ok(())
    }

    /// Keeps the `keep` slots of every head that the policy chooses. Sliding-window layers stay unchanged.
    pub(super) fn evict_to(&mut self, keep: usize) -> Result<()> {
        let Some(mut evictor) = self.evictor.take() else { return Ok(()) };
        let result = self.evict_with(&mut evictor, keep);
        self.evictor = Some(evictor);
        result
    }

    fn evict_with(&mut self, evictor: &mut Evictor, keep: usize) -> Result<()> {
        let len = self.device_cache.filled_slots();
        let keep = keep.min(len);
        let budget = evictor.budget(keep, self.tokens.len());
        let mut same = keep;
        for layer in full_attention_layers() {
            self.device_cache.read_mass(layer, &mut evictor.mass)?;
            evictor.mass.resize(KV_HEADS * len, 0.0);
            for kv_head in 0..KV_HEADS {
                evictor.choose_slots((layer, kv_head), self.tokens.len(), len, budget);
                let still = evictor.slots.iter().enumerate().take_while(|&(i, &s)| i == s as usize).count();
                same = same.min(still);
                self.device_cache.cache().retain_slots(layer, kv_head, &evictor.slots)?;
            }
        }
        self.device_cache.end_eviction(keep, same);
        self.prefix = if self.evictions.is_empty() { budget.prefix } else { self.prefix.min(budget.prefix) };
        self.dense = self.dense.max(self.tokens.len() - budget.recent);
        self.evictions.push(PastEviction { tokens: self.tokens.len(), kept: keep });
        evictor.end_eviction();
        Ok(())
    }

    /// Runs a task on the device, and if the device is lost, again on the CPU.
    pub(super) fn with_fallback<T>(&mut self, mut task: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        match task(self) {
            Err(e @ (Error::Device(_) | Error::Memory(_))) => {
                self.fall_back(e)?;
                task(self)
            }
            done => done,
        }
    }

    /// Moves to the device that should compute the next tokens.
    pub(super) fn place_tokens(&mut self, work: TokenKind) -> Result<()> {
        let Some(placement) = &mut self.placement else { return Ok(()) };
        let placed = placement.place_tokens(&mut self.device_cache, work, self.tokens.len());
        self.end_switch(placed)
    }

    /// Moves the sequence to the other device of a hybrid session.
    ///
    /// # Errors
    ///
    /// None from the devices: if the move fails, the sequence continues on the CPU.
    pub fn switch_device(&mut self, why: &str) -> Result<()> {
        self.discard_drafts();
        let Some(placement) = &mut self.placement else { return Ok(()) };
        let switched = placement.switch_device(&mut self.device_cache, self.tokens.len(), why.into());
        self.end_switch(switched)
    }

    fn end_switch(&mut self, switched: Result<Option<Switch>>) -> Result<()> {
        match switched {
            Ok(None) => Ok(()),
            Ok(Some(switch)) => {
                let row = lock_device(&self.device_cache.device()).logits_buffer(&self.logits);
                if let Some(mut row) = row {
                    row.copy_from_slice(&self.logits);
                    self.logits = row;
                }
                self.report_event(
                    &format!("switch to {}: {}", switch.to, switch.why),
                    SessionEvent::Switched(switch),
                );
                Ok(())
            }
            Err(e @ (Error::Device(_) | Error::Memory(_))) => self.fall_back(e),
            Err(e) => Err(e),
        }
    }

    /// Leaves a lost device for the CPU. Rows missing in the CPU's cache are recomputed, to the same bits.
    ///
    /// # Errors
    ///
    /// `lost` if there is no fallback, `Device` if it has no room: then a lost device has left an empty sequence.
    /// `Interrupted`: tokens not yet recomputed are removed from the sequence.
    pub(super) fn fall_back(&mut self, lost: Error) -> Result<()> {
        let (slots, all, observed) =
            (self.device_cache.filled_slots(), self.tokens.len(), self.device_cache.observed_tokens());
        let since = self.observed_since();
        let Some(placement) = &mut self.placement else { return Err(lost) };
        let has_rows = matches!(lost, Error::Memory(_));
        match placement.fall_back(&mut self.device_cache, lost) {
            Ok(RowState::Kept) => return Ok(()),
            Ok(RowState::Lost) => {}
            Err(e) => {
                if !has_rows {
                    self.clear();
                }
                return Err(e);
            }
        }
        // The lost device may still write to the old buffer.
        self.logits = Box::new(self.logits.to_vec());
        self.prepare_eviction()?;
        let lacking = slots - self.device_cache.filled_slots();
        let kept = self.evictions.last().map_or(0, |cut| cut.kept);
        // If the missing rows are those of the last tokens, after the last eviction, only these are recomputed.
        if self.device_cache.filled_slots() >= kept
            && !self.observes_attention()
            && self.device_cache.can_continue_from(all - lacking)
        {
            let rest = self.tokens.split_off(all - lacking);
            // The recurrent state of the CPU may be that of a later place.
            self.device_cache.truncate(self.device_cache.filled_slots(), all - lacking);
            self.append_all(&rest)?;
        } else {
            self.recompute(all)?;
        }
        // The lost pass may have been the first that was observed.
        if let (Some(first), Some(evictor)) = (since.filter(|&s| s >= all), &mut self.evictor) {
            evictor.observe_since(first);
            self.device_cache.zero_mass()?;
        }
        self.device_cache.set_observed(observed);
        Ok(())
    }

    /// Computes and appends tokens, after checking for room: the cache may be smaller than before.
    fn append_all(&mut self, tokens: &[u32]) -> Result<()> {
        self.check_room(tokens.len())?;
        tokens
            .chunks(self.device_cache.max_tokens())
            .try_for_each(|chunk| self.append(chunk, self.pending.known, Logits::None))
    }

    /// Recomputes the first `len` tokens from the start, with the evictions among them.
    fn recompute(&mut self, len: usize) -> Result<()> {
        let (tokens, cuts) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.evictions));
        let since = self.observed_since();
        self.clear();
        for cut in cuts.iter().filter(|c| c.tokens <= len) {
            while self.tokens.len() < cut.tokens {
                let at = self.tokens.len();
                let n = self.device_cache.max_tokens().min(cut.tokens - at);
                self.check_room(n)?;
                self.observe_next(n, cut.tokens - at)?;
                self.append(&tokens[at..at + n], self.pending.known, Logits::None)?;
            }
            self.evict_to(cut.kept)?;
        }
        // After the last eviction, the tokens that were observed before are observed again.
        let since = since.filter(|&s| s < len).unwrap_or(len).max(self.tokens.len());
        self.device_cache.set_observed(0);
        self.append_all(&tokens[self.tokens.len()..since])?;
        if since < len {
            self.observe_next(len - since, len - since)?;
            self.device_cache.set_observed(usize::MAX);
            self.append_all(&tokens[since..len])?;
        }
        Ok(())
    }

    /// Keeps the first `len` tokens. They are recomputed if their slots were evicted, or if sliding-window layers have
    /// overwritten their rows.
    ///
    /// # Errors
    ///
    /// `Usage` if `len` is beyond the end; errors of recomputing.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        let all = self.tokens.len();
        if len > all {
            return Err(Error::Usage(format!("cannot rewind to token {len} of {all}")));
        }
        self.discard_drafts();
        if self.reusable_prefix(len) < len {
            return self.recompute_from_checkpoint(len);
        }
        self.truncate_to(len);
        Ok(())
    }

    /// True if the first `len` tokens are as the evictions left them: none is cut back.
    fn keeps_evictions(&self, len: usize) -> bool {
        len > self.dense || self.evictions.is_empty()
    }

    /// Largest number of leading tokens, at most `len`, that can be kept without recomputing any.
    pub(super) fn reusable_prefix(&self, len: usize) -> usize {
        let without_evicted = |len: usize| if self.keeps_evictions(len) { len } else { len.min(self.prefix) };
        let mut places = std::iter::once(len).chain(self.device_cache.known_states(len)).map(without_evicted);
        places.find(|&place| self.device_cache.can_continue_from(place)).unwrap_or(0)
    }

    /// The recurrent state at the end of the sequence: `[STATE]`; empty without tokens, and for models without.
    pub fn read_state(&mut self) -> Result<Vec<f32>> {
        self.discard_drafts();
        self.rebuild_state()?;
        let mut state = vec![0.0; if self.tokens.is_empty() { 0 } else { STATE }];
        if !state.is_empty() {
            self.device_cache.cache().read_state(&mut state)?;
        }
        Ok(state)
    }

    /// The recurrent state at the end of the sequence and at its checkpoints; nothing for models without.
    pub fn export_states(&mut self) -> Result<Vec<Checkpoint>> {
        self.discard_drafts();
        self.rebuild_state()?;
        self.device_cache.export_states()
    }

    /// Sets the recurrent state of the sequence, just restored, and its checkpoints.
    pub fn import_states(&mut self, states: &[Checkpoint]) {
        self.device_cache.import_states(states, self.tokens.len());
    }

    /// Keeps the first `len` tokens, a number that [`Session::reusable_prefix`] allows.
    fn truncate_to(&mut self, len: usize) {
        let slots = if self.keeps_evictions(len) {
            self.device_cache.filled_slots() - (self.tokens.len() - len)
        } else {
            self.evictions.clear();
            self.dense = 0;
            len
        };
        self.device_cache.truncate(slots, len);
        if let Some(evictor) = &mut self.evictor {
            evictor.truncate_positions(slots);
        }
        self.tokens.truncate(len);
        for cut in self.evictions.iter_mut().filter(|c| c.tokens > len) {
            *cut = PastEviction { tokens: len, kept: cut.kept.min(slots) };
        }
    }

    /// Keeps the longest common prefix with `prompt`, or the part of it that is not evicted, but never the prompt's
    /// last token, whose logits are wanted. Returns its length.
    pub fn reuse_prefix(&mut self, prompt: &[u32]) -> Result<usize> {
        self.discard_drafts();
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = self.reusable_prefix(common.min(prompt.len().saturating_sub(1)));
        self.truncate_to(kept);
        Ok(kept)
    }

    /// Tokens and layout; with the rows and the mass of all layers, they are the complete sequence.
    pub fn sequence(&self) -> Sequence {
        Sequence {
            tokens: self.tokens.clone(),
            slots: self.slots(),
            cuts: self.evictions.clone(),
            prefix: self.prefix,
            dense_from: self.dense,
            observed_since: self.observed_since(),
            positions: self.evictor.as_ref().map_or(Vec::new(), |e| e.positions().to_vec()),
            oldest: self.device_cache.oldest_position(),
        }
    }

    /// True if it tracks the positions of slots that each head chooses for itself.
    pub fn tracks_positions(&self) -> bool {
        self.observes_attention()
    }

    /// Positions of the rows of each layer that has some: `[kv_head][slot]`, ascending in a head.
    ///
    /// # Errors
    ///
    /// `Usage` if they are no longer known.
    pub fn positions(&self) -> Result<Vec<Vec<u32>>> {
        let sequence = self.sequence();
        let heads = sequence.positions_of_slots()?;
        let mut global = heads.chunks_exact(KV_HEADS).map(<[Vec<u32>]>::concat);
        let local: Vec<u32> = (sequence.oldest as u32..sequence.tokens.len() as u32).collect();
        let of = |layer| match LAYER_KINDS[layer] {
            LayerKind::SlidingWindow => Some(local.repeat(KV_HEADS)),
            kind if kind.is_attention() => global.next(),
            _ => Some(Vec::new()),
        };
        Ok((0..FIRST_SHARING_LAYER).map_while(of).collect())
    }

    /// Copies the filled rows of a layer out; see [`KvCache::read_rows`](crate::model::device::KvCache::read_rows).
    pub fn read_rows(&mut self, layer: usize, rows: &mut KvRows) -> Result<()> {
        let slots = if is_sliding(layer) {
            self.device_cache.oldest_position()..self.tokens.len()
        } else {
            0..self.slots()
        };
        self.device_cache.cache().read_rows(layer, slots, rows)
    }

    /// Copies the attention mass of a layer's filled slots out: `[kv_head][slot]`, empty if none was observed and for
    /// sliding-window layers.
    pub fn read_mass(&mut self, layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        if self.observed_since().is_some() && !is_sliding(layer) {
            self.device_cache.read_mass(layer, mass)
        } else {
            Ok(())
        }
    }

    fn observed_since(&self) -> Option<usize> {
        self.evictor.as_ref().and_then(Evictor::observed_since)
    }

    /// Restores a saved sequence. `each(layer, rows, mass)` fills the buffers of a layer, which have the right lengths.
    ///
    /// # Errors
    ///
    /// Errors of `each`, after which the session is empty; `Model` if the sequence is inconsistent, `Usage` if it is
    /// too long for this context.
    pub fn restore(
        &mut self,
        sequence: Sequence,
        mut each: impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        self.restore_mapped(sequence, |layer, rows, mass| each(layer, rows, mass).map(|()| None))
    }

    /// [`Session::restore`] where `each` also says where in a file a layer's rows can be mapped, if they can.
    pub(crate) fn restore_mapped<'a>(
        &mut self,
        sequence: Sequence,
        mut each: impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<Option<RowsInFile<'a>>>,
    ) -> Result<()> {
        sequence.validate(self.device_cache.extent().slots)?;
        self.clear();
        if !sequence.cuts.is_empty() {
            self.device_cache.reserve_window_rows()?;
        }
        self.device_cache.truncate(sequence.slots, 0);
        let filled = self.fill_rows(&sequence, &mut each);
        if filled.is_err() {
            self.clear();
        }
        filled?;
        self.device_cache.set_window(sequence.oldest..sequence.tokens.len());
        self.tokens.extend_from_slice(&sequence.tokens);
        self.device_cache.import_states(&[], 0);
        if let Some(evictor) = &mut self.evictor {
            evictor.reset(sequence.observed_since);
            let kept = sequence.cuts.last().map_or(0, |c| c.kept.min(sequence.slots));
            evictor.set_positions(sequence.positions, (kept, sequence.slots, sequence.tokens.len()));
        }
        (self.evictions, self.dense, self.prefix) = (sequence.cuts, sequence.dense_from, sequence.prefix);
        Ok(())
    }

    /// Fills all rows.
    fn fill_rows<'a>(
        &mut self,
        sequence: &Sequence,
        each: &mut impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<Option<RowsInFile<'a>>>,
    ) -> Result<()> {
        let types = self.device_cache.extent().types;
        let (mut rows, mut mass) = (KvRows::default(), Vec::new());
        for layer in attention_layers() {
            let all = sequence.row_range(layer);
            rows.resize(types, all.len(), HEAD_DIM);
            let massed = sequence.observed_since.is_some() && !is_sliding(layer);
            mass.resize(if massed { KV_HEADS * all.len() } else { 0 }, 0.0);
            let in_file = each(layer, &mut rows, &mut mass)?;
            let cache = self.device_cache.cache();
            if !in_file.is_some_and(|in_file| cache.map_rows(layer, all.len(), &in_file)) {
                cache.write_rows(layer, all, &rows)?;
            }
            // A policy that does not look at attention drops the mass.
            if !is_sliding(layer) && self.observes_attention() {
                self.device_cache.write_mass(layer, &mass)?;
            }
        }
        Ok(())
    }
}
