//! The rows of a sequence: eviction, rewinding, moving to another device, recomputing after a device is lost, saving
//! and restoring.

use super::event::{Event, EvictionResult, Why};
use super::evictor::{Evictor, Input, Observe};
use super::{Cut, Sequence, Session, Switch};
use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS, global_layers, is_local};
use crate::model::device::{KvRows, Logits, locked};
use crate::run::placement::{Rows, Work};
use files::{Error, Result};
use std::time::Instant;

impl Session {
    /// Makes room for at least one of `wanted` tokens, evicting if necessary, and returns for how many there is room.
    /// Evictions come after the same tokens whatever the size of chunks.
    pub(super) fn make_room(&mut self, wanted: usize, input: Input) -> Result<usize> {
        self.with_fallback(|session| session.make_room_here(wanted, input))
    }

    /// Evicts the slots that a prompt has filled beyond the window.
    pub(super) fn evict_after_prompt(&mut self) -> Result<()> {
        let len = self.here.filled();
        if self.evictor.as_ref().is_some_and(|e| len > e.limit()) {
            self.with_fallback(|session| session.evict(Why::Window))?;
        }
        Ok(())
    }

    /// Allocates what evictions need in the cache, if there are any.
    pub(super) fn prepare_eviction(&mut self) -> Result<()> {
        if self.evictor.is_some() {
            self.here.outlast()?;
        }
        if self.observes() { self.here.make_mass() } else { Ok(()) }
    }

    fn make_room_here(&mut self, wanted: usize, input: Input) -> Result<usize> {
        let most = wanted.min(self.here.max_tokens());
        let Some(evictor) = &mut self.evictor else { return Ok(most.min(self.here.room())) };
        let len = self.here.filled();
        evictor.watch_memory(len, most);
        if let Some(why) = evictor.why(len, input) {
            self.evict(why)?;
        }
        let Some(evictor) = &self.evictor else { return Ok(most) };
        let ahead = evictor.ahead(self.here.filled(), input);
        let most = most.min(ahead);
        self.observe(most, ahead)?;
        Ok(most)
    }

    /// True if the eviction policy looks at attention.
    pub(super) fn observes(&self) -> bool {
        self.evictor.as_ref().is_some_and(Evictor::observes)
    }

    /// Sets which of the next `now` tokens are observed, with the next eviction `ahead` tokens away.
    pub(super) fn observe(&mut self, now: usize, ahead: usize) -> Result<()> {
        let at = self.tokens.len();
        match self.evictor.as_mut().map(|e| e.observe(at, now, ahead)) {
            None => {}
            Some(Observe::Last(tokens)) => self.here.observe(tokens),
            Some(Observe::Afresh(tokens)) => {
                self.here.zero_mass()?;
                self.here.observe(tokens);
            }
        }
        Ok(())
    }

    /// Evicts slots and reports it.
    fn evict(&mut self, why: Why) -> Result<()> {
        let began = Instant::now();
        let before = self.here.filled();
        let Some(keep) = self.evictor.as_ref().map(Evictor::target) else { return Ok(()) };
        self.cut(keep)?;
        let slots = self.here.filled();
        let (removed, position) = (before - slots, self.tokens.len());
        let result = EvictionResult { removed, slots, position, why, took: began.elapsed() };
        self.tell(&format!("evict {removed} slots: {}", why.name()), Event::Evicted(result));
        Ok(())
    }

    /// Keeps the `keep` slots of every head that the policy chooses. Sliding-window layers stay unchanged.
    pub(super) fn cut(&mut self, keep: usize) -> Result<()> {
        let Some(mut evictor) = self.evictor.take() else { return Ok(()) };
        let result = self.cut_by(&mut evictor, keep);
        self.evictor = Some(evictor);
        result
    }

    fn cut_by(&mut self, evictor: &mut Evictor, keep: usize) -> Result<()> {
        let len = self.here.filled();
        let keep = keep.min(len);
        let budget = evictor.budget(keep, self.tokens.len());
        let mut same = keep;
        for layer in global_layers() {
            self.here.read_mass(layer, &mut evictor.mass)?;
            evictor.mass.resize(KV_HEADS * len, 0.0);
            for kv_head in 0..KV_HEADS {
                evictor.choose((layer, kv_head), self.tokens.len(), len, budget);
                let still = evictor.slots.iter().enumerate().take_while(|&(i, &s)| i == s as usize).count();
                same = same.min(still);
                self.here.cache().keep(layer, kv_head, &evictor.slots)?;
            }
        }
        self.here.compact(keep, same);
        self.prefix = if self.cuts.is_empty() { budget.prefix } else { self.prefix.min(budget.prefix) };
        self.dense = self.dense.max(self.tokens.len() - budget.recent);
        self.cuts.push(Cut { tokens: self.tokens.len(), kept: keep });
        evictor.done();
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
    pub(super) fn place(&mut self, work: Work) -> Result<()> {
        let Some(placement) = &mut self.placement else { return Ok(()) };
        let placed = placement.place(&mut self.here, work, self.tokens.len());
        self.end_switch(placed)
    }

    /// Moves the sequence to the other device of a hybrid session.
    ///
    /// # Errors
    ///
    /// None from the devices: if the move fails, the sequence continues on the CPU.
    pub fn switch(&mut self, why: &str) -> Result<()> {
        self.discard_drafts();
        let Some(placement) = &mut self.placement else { return Ok(()) };
        let switched = placement.switch(&mut self.here, self.tokens.len(), why.into());
        self.end_switch(switched)
    }

    fn end_switch(&mut self, switched: Result<Option<Switch>>) -> Result<()> {
        match switched {
            Ok(None) => Ok(()),
            Ok(Some(switch)) => {
                let row = locked(&self.here.device()).row(&self.logits);
                if let Some(mut row) = row {
                    row.copy_from_slice(&self.logits);
                    self.logits = row;
                }
                self.tell(&format!("switch to {}: {}", switch.to, switch.why), Event::Switched(switch));
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
    /// `lost` if there is no fallback. `Interrupted`: tokens not yet recomputed are removed from the sequence.
    pub(super) fn fall_back(&mut self, lost: Error) -> Result<()> {
        let (slots, all, observed) = (self.here.filled(), self.tokens.len(), self.here.observed());
        let since = self.since();
        let Some(placement) = &mut self.placement else { return Err(lost) };
        if placement.fall_back(&mut self.here, lost)? == Rows::Kept {
            return Ok(());
        }
        // The lost device may still write to the old buffer.
        self.logits = Box::new(self.logits.to_vec());
        self.prepare_eviction()?;
        let lacking = slots - self.here.filled();
        let kept = self.cuts.last().map_or(0, |cut| cut.kept);
        // If the missing rows are those of the last tokens, after the last eviction, only these are recomputed.
        if self.here.filled() >= kept && !self.observes() && self.here.reaches(all - lacking) {
            let rest = self.tokens.split_off(all - lacking);
            self.append_all(&rest)?;
        } else {
            self.replay(all)?;
        }
        // The lost pass may have been the first that was observed.
        if let (Some(first), Some(evictor)) = (since.filter(|&s| s >= all), &mut self.evictor) {
            evictor.observe_since(first);
            self.here.zero_mass()?;
        }
        self.here.observe(observed);
        Ok(())
    }

    /// Computes and appends tokens, after checking for room: the cache may be smaller than before.
    fn append_all(&mut self, tokens: &[u32]) -> Result<()> {
        self.check_room(tokens.len())?;
        tokens
            .chunks(self.here.max_tokens())
            .try_for_each(|chunk| self.append(chunk, self.pending.known, Logits::None))
    }

    /// Recomputes the first `len` tokens from the start, with the evictions among them.
    fn replay(&mut self, len: usize) -> Result<()> {
        let (tokens, cuts) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.cuts));
        let since = self.since();
        self.clear();
        for cut in cuts.iter().filter(|c| c.tokens <= len) {
            while self.tokens.len() < cut.tokens {
                let at = self.tokens.len();
                let n = self.here.max_tokens().min(cut.tokens - at);
                self.check_room(n)?;
                self.observe(n, cut.tokens - at)?;
                self.append(&tokens[at..at + n], self.pending.known, Logits::None)?;
            }
            self.cut(cut.kept)?;
        }
        // After the last eviction, the tokens that were observed before are observed again.
        let since = since.filter(|&s| s < len).unwrap_or(len).max(self.tokens.len());
        self.here.observe(0);
        self.append_all(&tokens[self.tokens.len()..since])?;
        if since < len {
            self.observe(len - since, len - since)?;
            self.here.observe(usize::MAX);
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
        if self.cheap(len) < len {
            return self.replay(len);
        }
        self.drop_to(len);
        Ok(())
    }

    /// Largest number of leading tokens, at most `len`, that can be kept without recomputing any.
    pub(super) fn cheap(&self, len: usize) -> usize {
        let kept = if len > self.dense || self.cuts.is_empty() { len } else { len.min(self.prefix) };
        if self.here.reaches(kept) { kept } else { 0 }
    }

    /// Keeps the first `len` tokens, a number that [`Session::cheap`] allows.
    fn drop_to(&mut self, len: usize) {
        let slots = if len > self.dense || self.cuts.is_empty() {
            self.here.filled() - (self.tokens.len() - len)
        } else {
            self.cuts.clear();
            self.dense = 0;
            len
        };
        self.here.truncate(slots, len);
        if let Some(evictor) = &mut self.evictor {
            evictor.truncate(slots);
        }
        self.tokens.truncate(len);
        for cut in self.cuts.iter_mut().filter(|c| c.tokens > len) {
            *cut = Cut { tokens: len, kept: cut.kept.min(slots) };
        }
    }

    /// Keeps the longest common prefix with `prompt`, or the part of it that is not evicted, but never the prompt's
    /// last token, whose logits are wanted. Returns its length.
    pub fn reuse(&mut self, prompt: &[u32]) -> Result<usize> {
        self.discard_drafts();
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = self.cheap(common.min(prompt.len().saturating_sub(1)));
        self.drop_to(kept);
        Ok(kept)
    }

    /// Tokens and layout; with the rows and the mass of all layers, they are the complete sequence.
    pub fn sequence(&self) -> Sequence {
        Sequence {
            tokens: self.tokens.clone(),
            slots: self.slots(),
            cuts: self.cuts.clone(),
            prefix: self.prefix,
            dense: self.dense,
            since: self.since(),
            positions: self.evictor.as_ref().map_or(Vec::new(), |e| e.positions().to_vec()),
            oldest: self.here.oldest(),
        }
    }

    /// True if it tracks the positions of slots that each head chooses for itself.
    pub fn tracks_positions(&self) -> bool {
        self.observes()
    }

    /// Positions of each layer's rows: `[kv_head][slot]`, ascending in a head.
    ///
    /// # Errors
    ///
    /// `Usage` if they are no longer known.
    pub fn positions(&self) -> Result<Vec<Vec<u32>>> {
        let sequence = self.sequence();
        let heads = sequence.positions_of_slots()?;
        let mut global = heads.chunks_exact(KV_HEADS).map(<[Vec<u32>]>::concat);
        let local: Vec<u32> = (sequence.oldest as u32..sequence.tokens.len() as u32).collect();
        let of = |layer| if is_local(layer) { Some(local.repeat(KV_HEADS)) } else { global.next() };
        Ok((0..LAYERS).map_while(of).collect())
    }

    /// Copies the filled rows of a layer out: see [`Sequence::rows`].
    pub fn read_rows(&mut self, layer: usize, rows: &mut KvRows) -> Result<()> {
        let slots = if is_local(layer) { self.here.oldest()..self.tokens.len() } else { 0..self.slots() };
        self.here.cache().read(layer, slots, rows)
    }

    /// Copies the attention mass of a layer's filled slots out: `[kv_head][slot]`, empty if none was observed and for
    /// sliding-window layers.
    pub fn read_mass(&mut self, layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        if self.since().is_some() && !is_local(layer) { self.here.read_mass(layer, mass) } else { Ok(()) }
    }

    fn since(&self) -> Option<usize> {
        self.evictor.as_ref().and_then(Evictor::since)
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
        sequence.check(self.here.extent().slots)?;
        self.clear();
        if !sequence.cuts.is_empty() {
            self.here.outlast()?;
        }
        self.here.truncate(sequence.slots, 0);
        let filled = self.fill(&sequence, &mut each);
        if filled.is_err() {
            self.clear();
        }
        filled?;
        self.here.set_window(sequence.oldest..sequence.tokens.len());
        self.tokens.extend_from_slice(&sequence.tokens);
        if let Some(evictor) = &mut self.evictor {
            evictor.reset(sequence.since);
            let kept = sequence.cuts.last().map_or(0, |c| c.kept.min(sequence.slots));
            evictor.set_positions(sequence.positions, (kept, sequence.slots, sequence.tokens.len()));
        }
        (self.cuts, self.dense, self.prefix) = (sequence.cuts, sequence.dense, sequence.prefix);
        Ok(())
    }

    /// Fills all rows.
    fn fill(
        &mut self,
        sequence: &Sequence,
        each: &mut impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        let types = self.here.extent().types;
        let (mut rows, mut mass) = (KvRows::default(), Vec::new());
        for layer in 0..LAYERS {
            let all = sequence.rows(layer);
            rows.resize(types, all.len(), HEAD_DIM);
            let massed = sequence.since.is_some() && !is_local(layer);
            mass.resize(if massed { KV_HEADS * all.len() } else { 0 }, 0.0);
            each(layer, &mut rows, &mut mass)?;
            self.here.cache().write(layer, all, &rows)?;
            // A policy that does not look at attention drops the mass.
            if !is_local(layer) && self.observes() {
                self.here.write_mass(layer, &mass)?;
            }
        }
        Ok(())
    }
}
