//! The devices of a sequence: the one that runs it, the one that stands by in a hybrid session, and the spare for when
//! a device is lost.
//!
//! Both caches agree on their common prefix: whoever shortens or compacts one does so here, for both.

use super::event::Switch;
use super::schedule::{Move, Schedule, Side};
use super::{Notice, Spare};
use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use crate::model::backend::{Backend, CancelToken, KvRows, Logits};
use crate::model::trace::Recorder;
use files::{Error, Result};
use std::time::{Duration, Instant};

/// Slots that are copied at a time: a few hundred KiB.
const RUN: usize = 64;

/// Whether two backends have one memory for their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowsAre {
    /// Each has its own: a move copies what the other lacks.
    Apart,
    /// One memory that they use in turn: a move copies nothing.
    Shared,
}

/// The second device of a hybrid session.
pub struct Standby {
    /// Its backend; the first one is the CPU's.
    pub backend: Box<dyn Backend>,
    /// Which runs what.
    pub schedule: Schedule,
    /// Where rows are.
    pub rows: RowsAre,
}

/// What runs a sequence.
pub(super) struct Devices {
    active: Box<dyn Backend>,
    /// Which one that is.
    side: Side,
    standby: Option<Standby>,
    /// Where to go on when the device is lost.
    spare: Option<Spare>,
    /// Who is told then.
    notice: Notice,
    /// Tokens of each pass whose attention is observed.
    observed: usize,
    /// Whether the mass means something now.
    massive: bool,
}

/// Where a sequence goes on after its device is lost.
pub(super) enum Refuge {
    /// Where it was: the device that stood by is lost.
    Here,
    /// On a backend that has the first slots still.
    Kept(usize),
    /// On an empty one.
    Empty,
}

impl Devices {
    pub fn new(active: Box<dyn Backend>) -> Self {
        Self {
            active,
            side: Side::Cpu,
            standby: None,
            spare: None,
            notice: |_| {},
            observed: 0,
            massive: false,
        }
    }

    pub fn set_spare(&mut self, spare: Spare, notice: Notice) {
        (self.spare, self.notice) = (Some(spare), notice);
    }

    pub fn set_standby(&mut self, standby: Standby) {
        self.standby = Some(standby);
    }

    pub fn active(&self) -> &dyn Backend {
        &*self.active
    }

    pub fn active_mut(&mut self) -> &mut dyn Backend {
        &mut *self.active
    }

    /// The device that runs now.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Whether there are two.
    pub fn are_two(&self) -> bool {
        self.standby.is_some()
    }

    /// Slots in use.
    pub fn len(&self) -> usize {
        self.active.len()
    }

    /// Free slots.
    pub fn room(&self) -> usize {
        self.active.capacity() - self.active.len()
    }

    /// Most tokens of a pass on the device that runs.
    pub fn max_tokens(&self) -> usize {
        self.active.max_tokens()
    }

    /// Appends tokens, or ends with `Interrupted` soon after `cancel` is cancelled.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        pos: usize,
        out: Logits<'_>,
        cancel: Option<&CancelToken>,
    ) -> Result<()> {
        self.active.heed(cancel);
        let result = self.active.forward(tokens, pos, out);
        self.active.heed(None);
        result
    }

    /// Rewinds.
    pub fn set_len(&mut self, len: usize) {
        self.active.set_len(len);
        self.limit_standby(len);
    }

    /// The other cache agrees with this one on its first `len` slots at most.
    fn limit_standby(&mut self, len: usize) {
        if let Some(s) = self.standby.as_mut().filter(|s| s.rows == RowsAre::Apart) {
            let len = len.min(s.backend.len());
            s.backend.set_len(len);
        }
    }

    /// Ends an eviction: `kept` slots are in use, the first `same` of which are where they were.
    pub fn compacted(&mut self, kept: usize, same: usize) {
        self.active.set_len(kept);
        self.limit_standby(same);
    }

    /// Changes the number of slots of both caches.
    pub fn resize(&mut self, slots: usize) -> Result<()> {
        let Some(standby) = &mut self.standby else { return self.active.resize(slots) };
        let (active, other) = (&mut self.active, &mut standby.backend);
        if standby.rows == RowsAre::Apart {
            active.resize(slots)?;
            return other.resize(slots);
        }
        // The device resizes, while it has the rows.
        match self.side {
            Side::Gpu => active.resize(slots),
            Side::Cpu => {
                hand_over(active, other)?;
                let resized = other.resize(slots);
                hand_over(other, active)?;
                resized
            }
        }
    }

    /// Makes room for the mass on both devices, so that no pass has to.
    pub fn make_mass(&mut self) -> Result<()> {
        for backend in
            [Some(&mut self.active), self.standby.as_mut().map(|s| &mut s.backend)].into_iter().flatten()
        {
            backend.observe(1)?;
            backend.observe(0)?;
        }
        Ok(())
    }

    /// Observes the last `tokens` tokens of the passes to come. What was observed before counts on.
    pub fn observe(&mut self, tokens: usize) -> Result<()> {
        self.massive |= tokens > 0;
        match std::mem::replace(&mut self.observed, tokens) == tokens {
            true => Ok(()),
            false => self.active.observe(tokens),
        }
    }

    /// How many tokens of a pass are observed.
    pub fn observed(&self) -> usize {
        self.observed
    }

    /// Forgets what was observed.
    pub fn zero_mass(&mut self) -> Result<()> {
        self.massive = false;
        let zeros = vec![0.0; KV_HEADS * self.len()];
        (0..LAYERS).try_for_each(|layer| self.active.write_mass(layer, &zeros))
    }

    /// The mass of one layer, `[kv_head][slot]`; empty where nothing was observed.
    pub fn read_mass(&mut self, layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        if self.massive {
            mass.resize(KV_HEADS * self.len(), 0.0);
            self.active.read_mass(layer, mass)?;
        }
        Ok(())
    }

    /// Takes the mass of one layer in, if there is any.
    pub fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        if mass.is_empty() {
            return Ok(());
        }
        self.massive = true;
        self.active.write_mass(layer, mass)
    }

    /// Where a prompt should be computed, if not here.
    pub fn for_prefill(&mut self, tokens: usize) -> Option<Move> {
        let side = self.side;
        self.standby.as_mut()?.schedule.for_prefill(side, tokens)
    }

    /// Where the next token should be decoded, if not here.
    pub fn for_decode(&mut self, position: usize) -> Option<Move> {
        let (side, slots) = (self.side, self.len());
        self.standby.as_mut()?.schedule.for_decode(side, position, slots)
    }

    /// Takes note of what a decoded token took.
    pub fn took(&mut self, took: Duration) {
        let (side, slots) = (self.side, self.len());
        if let Some(s) = &mut self.standby {
            s.schedule.took(side, slots, took);
        }
    }

    /// Moves the sequence to the device that stands by. What fails leaves it where it was, if its rows still are.
    pub fn switch(&mut self, position: usize, why: String) -> Result<Option<Switch>> {
        let Some(standby) = &mut self.standby else { return Ok(None) };
        let began = Instant::now();
        let (from, to) = (&mut self.active, &mut standby.backend);
        let (mut slots, mut bytes) = (0, 0);
        // The mass counts filled slots, so it is read while they are here and written when they are there.
        let len = from.len();
        let mut masses = vec![0.0; if self.massive { LAYERS * KV_HEADS * len } else { 0 }];
        let mut each = masses.chunks_exact_mut((KV_HEADS * len).max(1)).enumerate();
        each.try_for_each(|(layer, mass)| from.read_mass(layer, mass))?;
        match from.lend()? {
            Some(lent) => to.adopt(lent)?,
            None => {
                slots = len - to.len();
                bytes = copy(&mut **from, &mut **to)?;
            }
        }
        let mut each = masses.chunks_exact((KV_HEADS * len).max(1)).enumerate();
        each.try_for_each(|(layer, mass)| to.write_mass(layer, mass))?;
        if self.observed > 0 {
            from.observe(0)?;
            to.observe(self.observed)?;
        }
        let recorder = from.record(None);
        to.record(recorder);
        std::mem::swap(from, to);
        self.side = self.side.other();
        let (to, from) = (self.active.name(), standby.backend.name());
        Ok(Some(Switch { position, from, to, slots, bytes, took: began.elapsed(), why }))
    }

    /// Leaves a lost device for a CPU backend, which then is the only one, and says so; `None` where there is none.
    pub fn flee(&mut self, why: &Error) -> Result<Option<Refuge>> {
        let recorder = self.active.record(None);
        let apart = self.standby.take().filter(|s| s.rows == RowsAre::Apart);
        let refuge = match (apart, self.side) {
            (Some(_), Side::Cpu) => Refuge::Here,
            (Some(standby), Side::Gpu) => {
                self.active = standby.backend;
                Refuge::Kept(self.len())
            }
            (None, _) => {
                let Some(spare) = self.spare.take() else { return Ok(None) };
                self.active = spare()?;
                Refuge::Empty
            }
        };
        (self.notice)(&format!("{why}; going on on the CPU"));
        self.massive &= matches!(refuge, Refuge::Here);
        (self.side, self.observed) = (Side::Cpu, 0);
        self.active.record(recorder);
        Ok(Some(refuge))
    }

    pub fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder> {
        self.active.record(recorder)
    }

    /// Puts a mark into what is being recorded.
    pub fn mark(&mut self, name: &str) {
        if let Some(mut recorder) = self.active.record(None) {
            recorder.mark(name);
            self.active.record(Some(recorder));
        }
    }
}

/// Hands shared rows over.
fn hand_over(from: &mut Box<dyn Backend>, to: &mut Box<dyn Backend>) -> Result<()> {
    from.lend()?.map_or(Ok(()), |lent| to.adopt(lent))
}

/// Copies the rows that `to` lacks and makes it as long as `from`; how many bytes.
fn copy(from: &mut dyn Backend, to: &mut dyn Backend) -> Result<u64> {
    let (first, len) = (to.len(), from.len());
    let mut rows = KvRows::zeroed(from.kv_types(), RUN, HEAD_DIM);
    let mut bytes = 0;
    for start in (first..len).step_by(RUN) {
        let run = start..len.min(start + RUN);
        for layer in 0..LAYERS {
            from.read_kv(layer, run.clone(), &mut rows)?;
            to.write_kv(layer, run.clone(), &rows)?;
            bytes += (rows.k.len() + rows.v.len()) as u64;
        }
    }
    to.set_len(len);
    Ok(bytes)
}
