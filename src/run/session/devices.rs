//! The devices of a sequence: the one that runs it, the one that stands by in a hybrid session, and the spare for when
//! a device is lost.
//!
//! Both caches agree on their common prefix: whoever shortens or compacts one does so here, for both.

use super::event::Switch;
use super::recent::Recent;
use super::schedule::{Fixed, Move, Schedule, Side};
use super::{Arrived, Awaited, Notice, Spare};
use crate::dims::{GLOBAL_LAYERS, HEAD_DIM, KV_HEADS, LAYERS, LOCAL_LAYERS, global_layers, is_local};
use crate::model::device::{Cache, Extent, KvRows, Logits, Run, SharedDevice, locked};
use crate::model::trace::Trace;
use files::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where the tokens of a run are in their sequence; see [`Run`].
#[derive(Clone, Copy)]
pub(super) struct At {
    pub pos: usize,
    pub known: usize,
}

/// Slots that are copied at a time: a few hundred KiB of rows.
const SLOTS: usize = 64;

/// A device, and a cache there.
pub struct Seat {
    /// The device.
    pub device: SharedDevice,
    /// The cache, empty at first.
    pub cache: Box<dyn Cache>,
}

impl Seat {
    /// A new cache of `slots` slots on a device.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new(device: SharedDevice, slots: usize) -> Result<Self> {
        let cache = locked(&device).new_cache(slots)?;
        Ok(Self { device, cache })
    }
}

/// The second device of a hybrid session.
pub struct Standby {
    /// The device; the first one is the CPU.
    pub device: SharedDevice,
    /// Its cache; `None` where both devices use the session's in turn, so that a move copies nothing.
    pub cache: Option<Box<dyn Cache>>,
    /// Which device runs what.
    pub schedule: Schedule,
}

/// The devices that run a sequence.
pub(super) struct Devices {
    device: SharedDevice,
    cache: Box<dyn Cache>,
    /// What local layers have there.
    recent: Recent,
    /// What they have in the cache of the device that stands by, where that is another.
    recent_there: Recent,
    /// Which device that is.
    side: Side,
    max_tokens: usize,
    standby: Option<Standby>,
    /// A device that is getting ready.
    awaited: Option<Awaited>,
    /// Where to go on when the device is lost.
    spare: Option<Spare>,
    /// Called with one line when it is lost.
    notice: Notice,
    /// Tokens of each pass that are observed.
    observed: usize,
    /// Whether the mass is that of this sequence.
    mass_is_valid: bool,
}

/// Where a sequence goes on after its device is lost.
pub(super) enum Refuge {
    /// Where it was: the device that stood by is lost.
    Here,
    /// On a device whose cache still has the first slots.
    Kept(usize),
    /// On one with an empty cache.
    Empty,
}

impl Devices {
    pub fn new(seat: Seat) -> Self {
        let Seat { device, cache } = seat;
        let max_tokens = locked(&device).max_tokens();
        Self {
            max_tokens,
            device,
            cache,
            recent: Recent::default(),
            recent_there: Recent::default(),
            side: Side::Cpu,
            standby: None,
            awaited: None,
            spare: None,
            notice: Notice::default(),
            observed: 0,
            mass_is_valid: false,
        }
    }

    pub fn set_spare(&mut self, spare: Spare, notice: Notice) {
        (self.spare, self.notice) = (Some(spare), notice);
    }

    pub fn set_standby(&mut self, standby: Standby) {
        self.standby = Some(standby);
    }

    pub fn set_awaited(&mut self, awaited: Awaited) {
        self.awaited = Some(awaited);
    }

    /// Lets the device that is awaited stand by, with a cache as large as this, and says whether it runs all from now on;
    /// `None` where it is not ready.
    pub fn arrived(&mut self) -> Option<Result<bool>> {
        let arrived = self.awaited.as_mut()?()?;
        self.awaited = None;
        let mut stand_by = |device: SharedDevice, schedule: Schedule| {
            let cache = locked(&device).new_cache(self.extent().slots)?;
            self.standby = Some(Standby { device, cache: Some(cache), schedule });
            Ok(())
        };
        Some(arrived.and_then(|arrived| match arrived {
            Arrived::Unneeded => Ok(false),
            Arrived::ForAll(device) => stand_by(device, Schedule::Fixed(Fixed::gpu())).map(|()| true),
            Arrived::Beside(device, schedule) => stand_by(device, schedule).map(|()| false),
        }))
    }

    /// From now on no other device stands by.
    pub fn stay(&mut self) {
        (self.standby, self.recent_there) = (None, Recent::default());
    }

    /// The same, as the one that was awaited cannot be used.
    pub fn do_without(&mut self, why: &Error) {
        self.stay();
        self.say_lost(why);
    }

    /// The device that runs now.
    pub fn device(&self) -> SharedDevice {
        Arc::clone(&self.device)
    }

    /// Whether it is this one.
    pub fn runs_on(&self, device: &SharedDevice) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// The cache there.
    pub fn cache(&mut self) -> &mut dyn Cache {
        &mut *self.cache
    }

    /// Its shape.
    pub fn extent(&self) -> Extent {
        self.cache.extent()
    }

    /// Which device runs now.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Whether there are two.
    pub fn are_two(&self) -> bool {
        self.standby.is_some()
    }

    /// Slots in use.
    pub fn len(&self) -> usize {
        self.extent().len
    }

    /// Free slots.
    pub fn room(&self) -> usize {
        let Extent { slots, len, .. } = self.extent();
        slots - len
    }

    /// Most tokens of a pass on the device that runs.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Tokens that join the sequence in the next pass.
    pub fn run<'a>(&'a mut self, tokens: &'a [u32], at: At, logits: Logits<'a>) -> Run<'a> {
        let At { pos, known } = at;
        let observe = if GLOBAL_LAYERS != 0 { self.observed.min(tokens.len()) } else { 0 };
        self.recent.join(pos..pos + tokens.len(), self.cache.extent().ring);
        Run { cache: &mut *self.cache, tokens, pos, known, logits, observe }
    }

    /// Rewinds to `len` slots and `tokens` tokens.
    pub fn set_len(&mut self, len: usize, tokens: usize) {
        self.cache.set_len(len);
        self.limit_standby(len);
        self.recent.cut(tokens);
        self.recent_there.cut(tokens);
    }

    /// Whether a sequence cut to `tokens` tokens can go on with the rows that local layers still have.
    pub fn reaches(&self, tokens: usize) -> bool {
        self.recent.reaches(tokens)
    }

    /// The first position whose rows local layers still have.
    pub fn oldest(&self) -> usize {
        if LOCAL_LAYERS != 0 { self.recent.from } else { 0 }
    }

    /// Local layers were given the rows of these positions, all that there are.
    pub fn restored(&mut self, positions: Range<usize>) {
        self.recent = Recent { from: positions.start, end: positions.end };
        self.recent.join(positions, self.extent().ring);
    }

    /// Makes room in both caches for more positions than there are slots.
    pub fn outlast(&mut self) -> Result<()> {
        self.caches().try_for_each(|cache| cache.outlast())
    }

    /// The other cache agrees with this one on its first `len` slots at most.
    fn limit_standby(&mut self, len: usize) {
        if let Some(cache) = self.standby.as_mut().and_then(|s| s.cache.as_mut()) {
            let len = len.min(cache.extent().len);
            cache.set_len(len);
        }
    }

    /// Ends an eviction: `kept` slots are in use, the first `same` of which are where they were.
    pub fn compacted(&mut self, kept: usize, same: usize) {
        self.cache.set_len(kept);
        self.limit_standby(same);
    }

    /// The caches, one or two.
    fn caches(&mut self) -> impl Iterator<Item = &mut Box<dyn Cache>> {
        let other = self.standby.as_mut().and_then(|s| s.cache.as_mut());
        [Some(&mut self.cache), other].into_iter().flatten()
    }

    /// Changes the number of slots of both caches.
    pub fn resize(&mut self, slots: usize) -> Result<()> {
        self.caches().try_for_each(|cache| cache.resize(slots))
    }

    /// Makes room for the mass in both caches, so that no pass has to.
    pub fn make_mass(&mut self) -> Result<()> {
        let Some(layer) = global_layers().next() else { return Ok(()) };
        self.caches().try_for_each(|cache| {
            let mut mass = vec![0.0; KV_HEADS * cache.extent().len];
            cache.read_mass(layer, &mut mass)?;
            cache.write_mass(layer, &mass)
        })
    }

    /// Observes the last `tokens` tokens of the passes to come. What was observed before counts on.
    pub fn observe(&mut self, tokens: usize) {
        self.mass_is_valid |= tokens > 0;
        self.observed = tokens;
    }

    /// How many tokens of a pass are observed.
    pub fn observed(&self) -> usize {
        self.observed
    }

    /// Forgets what was observed.
    pub fn zero_mass(&mut self) -> Result<()> {
        self.mass_is_valid = false;
        let zeros = vec![0.0; KV_HEADS * self.len()];
        global_layers().try_for_each(|layer| self.cache.write_mass(layer, &zeros))
    }

    /// The mass of one layer that sees all, `[kv_head][slot]`; empty where nothing was observed.
    pub fn read_mass(&mut self, layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        if self.mass_is_valid {
            mass.resize(KV_HEADS * self.len(), 0.0);
            self.cache.read_mass(layer, mass)?;
        }
        Ok(())
    }

    /// Takes the mass of one layer in, if there is any.
    pub fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        if mass.is_empty() {
            return Ok(());
        }
        self.mass_is_valid = true;
        self.cache.write_mass(layer, mass)
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

    /// Records how long a decoded token took.
    pub fn took(&mut self, took: Duration) {
        let (side, slots) = (self.side, self.len());
        if let Some(s) = &mut self.standby {
            s.schedule.took(side, slots, took);
        }
    }

    /// Moves the sequence to the device that stands by. If that fails, the sequence stays where it was, provided that its
    /// rows are still there.
    pub fn switch(&mut self, position: usize, why: String) -> Result<Option<Switch>> {
        let Some(standby) = &mut self.standby else { return Ok(None) };
        let began = Instant::now();
        let (mut slots, mut bytes) = (0, 0);
        if let Some(to) = &mut standby.cache {
            slots = self.cache.extent().len - to.extent().len;
            let (all, ring) = (self.cache.extent().len, to.extent().ring);
            let (here, there) = (self.recent, self.recent_there);
            let first = if there.end < here.from { here.from } else { there.end };
            let first = first.max(position.saturating_sub(ring));
            // Where this fails, the rows that it has written over are gone.
            self.recent_there.from = there.from.max(position.saturating_sub(ring));
            let lacking = [to.extent().len..all, first..position];
            bytes = copy(&mut *self.cache, &mut **to, lacking)?;
            let from = if first > there.end { first } else { there.from };
            (self.recent, self.recent_there) =
                (Recent { from, end: first }, Recent { end: position, ..here });
            self.recent.join(first..position, ring);
            if self.mass_is_valid {
                copy_mass(&mut *self.cache, &mut **to)?;
            }
            std::mem::swap(&mut self.cache, to);
        }
        let trace = locked(&self.device).set_trace(None);
        std::mem::swap(&mut self.device, &mut standby.device);
        let from = locked(&standby.device).name();
        let mut device = locked(&self.device);
        device.set_trace(trace);
        self.max_tokens = device.max_tokens();
        self.side = self.side.other();
        let to = device.name();
        Ok(Some(Switch { position, from, to, slots, bytes, took: began.elapsed(), why }))
    }

    /// Leaves a lost device for the CPU, which then is the only one, and says so; `None` where there is none.
    pub fn flee(&mut self, why: &Error) -> Result<Option<Refuge>> {
        let trace = locked(&self.device).set_trace(None);
        let standby = self.standby.take().and_then(|s| s.cache.map(|cache| Seat { device: s.device, cache }));
        let refuge = match (standby, self.side) {
            (Some(_), Side::Cpu) => Refuge::Here,
            (Some(seat), Side::Gpu) => {
                self.sit(seat);
                self.recent = self.recent_there;
                Refuge::Kept(self.len())
            }
            (None, _) => {
                let Some(spare) = self.spare.take() else { return Ok(None) };
                self.sit(spare()?);
                self.recent = Recent::default();
                Refuge::Empty
            }
        };
        self.say_lost(why);
        self.mass_is_valid &= matches!(refuge, Refuge::Here);
        (self.side, self.observed) = (Side::Cpu, 0);
        locked(&self.device).set_trace(trace);
        Ok(Some(refuge))
    }

    /// Says that the CPU goes on, and why.
    fn say_lost(&self, why: &Error) {
        self.notice.say(&format!("{why}; going on on the CPU"));
    }

    fn sit(&mut self, seat: Seat) {
        self.max_tokens = locked(&seat.device).max_tokens();
        (self.device, self.cache) = (seat.device, seat.cache);
    }

    pub fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        locked(&self.device).set_trace(trace)
    }

    /// Puts a mark into the trace, where there is one.
    pub fn mark(&mut self, name: &str) {
        let mut device = locked(&self.device);
        if let Some(mut trace) = device.set_trace(None) {
            trace.mark(name);
            device.set_trace(Some(trace));
        }
    }
}

/// Copies the rows that `to` lacks, these slots, and positions of local layers, and makes it as long as `from`; how many
/// bytes.
fn copy(from: &mut dyn Cache, to: &mut dyn Cache, lacking: [Range<usize>; 2]) -> Result<u64> {
    let Extent { types, len, .. } = from.extent();
    let mut rows = KvRows::zeroed(types, SLOTS, HEAD_DIM);
    let mut bytes = 0;
    for layer in 0..LAYERS {
        let Range { start, end } = lacking[usize::from(is_local(layer))];
        for start in (start..end).step_by(SLOTS) {
            let slots = start..end.min(start + SLOTS);
            from.read(layer, slots.clone(), &mut rows)?;
            to.write(layer, slots, &rows)?;
            bytes += (rows.k.len() + rows.v.len()) as u64;
        }
    }
    to.set_len(len);
    Ok(bytes)
}

/// Copies the mass of all filled slots, as many in both.
fn copy_mass(from: &mut dyn Cache, to: &mut dyn Cache) -> Result<()> {
    let mut mass = vec![0.0; KV_HEADS * from.extent().len];
    global_layers().try_for_each(|layer| {
        from.read_mass(layer, &mut mass)?;
        to.write_mass(layer, &mass)
    })
}
