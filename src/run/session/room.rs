//! Room for tokens: when slots go, which ones, and whose attention is observed for that.

use super::event::{Event, EvictionResult, Why};
use super::evict::{Evictor, Input, Observe};
use super::{Cut, Session};
use crate::dims::{KV_HEADS, global_layers};
use files::{Error, Result};
use std::time::Instant;

impl Session {
    /// Makes room for at least one of `wanted` tokens, by eviction if need be, and returns for how many there is.
    /// So slots are chosen after the same tokens whatever the size of chunks.
    pub(super) fn make_room(&mut self, wanted: usize, input: Input) -> Result<usize> {
        self.anywhere(|session| session.make_room_here(wanted, input))
    }

    /// Evicts what a prompt has filled beyond the slots that are to stay.
    pub(super) fn cut_prompt(&mut self) -> Result<()> {
        let len = self.devices.len();
        match self.evictor.as_ref().is_some_and(|e| len > e.limit()) {
            true => self.anywhere(|session| session.evict(Why::Window)),
            false => Ok(()),
        }
    }

    /// Does something on the device, and if the device is lost, once more on another.
    fn anywhere<T>(&mut self, what: impl Fn(&mut Self) -> Result<T>) -> Result<T> {
        match what(self) {
            Err(e @ (Error::Device(_) | Error::Memory(_))) => {
                self.flee(e)?;
                what(self)
            }
            done => done,
        }
    }

    fn make_room_here(&mut self, wanted: usize, input: Input) -> Result<usize> {
        let most = wanted.min(self.devices.max_tokens());
        let Some(evictor) = &mut self.evictor else { return Ok(most.min(self.devices.room())) };
        let len = self.devices.len();
        evictor.watch_memory(len, most);
        if let Some(why) = evictor.why(len, input) {
            self.evict(why)?;
        }
        let Some(evictor) = &self.evictor else { return Ok(most) };
        let ahead = evictor.ahead(self.devices.len(), input);
        let most = most.min(ahead);
        self.observe(most, ahead)?;
        Ok(most)
    }

    /// Whether the policy looks at attention.
    pub(super) fn observes(&self) -> bool {
        self.evictor.as_ref().is_some_and(Evictor::observes)
    }

    /// Has the attention of the next `now` tokens observed as the policy wants it, `ahead` tokens before it chooses.
    pub(super) fn observe(&mut self, now: usize, ahead: usize) -> Result<()> {
        let at = self.tokens.len();
        match self.evictor.as_mut().map(|e| e.observe(at, now, ahead)) {
            None => {}
            Some(Observe::Last(tokens)) => self.devices.observe(tokens),
            Some(Observe::Afresh(tokens)) => {
                self.devices.zero_mass()?;
                self.devices.observe(tokens);
            }
        }
        Ok(())
    }

    /// Evicts slots and tells of it.
    fn evict(&mut self, why: Why) -> Result<()> {
        let began = Instant::now();
        let before = self.devices.len();
        let Some(keep) = self.evictor.as_ref().map(Evictor::target) else { return Ok(()) };
        self.cut(keep)?;
        let slots = self.devices.len();
        let (removed, position) = (before - slots, self.tokens.len());
        let result = EvictionResult { removed, slots, position, why, took: began.elapsed() };
        self.tell(&format!("evict {removed} slots: {}", why.name()), Event::Evicted(result));
        Ok(())
    }

    /// Keeps `keep` slots of every head, those that the policy chooses. Local layers go on as they are.
    pub(super) fn cut(&mut self, keep: usize) -> Result<()> {
        let Some(mut evictor) = self.evictor.take() else { return Ok(()) };
        let result = self.cut_by(&mut evictor, keep);
        self.evictor = Some(evictor);
        result
    }

    fn cut_by(&mut self, evictor: &mut Evictor, keep: usize) -> Result<()> {
        let len = self.devices.len();
        let keep = keep.min(len);
        let budget = evictor.budget(keep, self.tokens.len());
        let mut same = keep;
        for layer in global_layers() {
            self.devices.read_mass(layer, &mut evictor.mass)?;
            evictor.mass.resize(KV_HEADS * len, 0.0);
            for kv_head in 0..KV_HEADS {
                evictor.choose((layer, kv_head), self.tokens.len(), len, budget);
                let still = evictor.slots.iter().enumerate().take_while(|&(i, &s)| i == s as usize).count();
                same = same.min(still);
                self.devices.cache().keep(layer, kv_head, &evictor.slots)?;
            }
        }
        self.devices.compacted(keep, same);
        self.prefix = if self.cuts.is_empty() { budget.prefix } else { self.prefix.min(budget.prefix) };
        self.dense = self.dense.max(self.tokens.len() - budget.recent);
        self.cuts.push(Cut { tokens: self.tokens.len(), kept: keep });
        evictor.done();
        Ok(())
    }
}
