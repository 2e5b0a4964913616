//! Placement of a sequence on two devices: decides which one computes next, copies rows there, takes over a device when
//! its kernels are compiled, and falls back to the CPU when a device is lost. A session has one device; only this
//! module copies rows between two.

mod background_compile;
mod device_cache;
mod factory;
mod schedule;
mod speeds;

pub(super) use background_compile::KernelCompiler;
pub use device_cache::{DeviceCache, RunPosition};
pub(super) use factory::{DeviceFactory, chunk, chunk_in, shared, was_made};
pub use schedule::{MeasuredSchedule, SHORT_PROMPT, Schedule, Speed};
pub(super) use speeds::{
    SLOTS, beside, is_known_to_be_the_cpu, key, known, measured_options, of_both, say_choice,
};

use crate::model::device::{SharedDevice, locked};
use crate::run::options::{Notice, Side};
use files::{Error, Result};
use schedule::Move;
use std::time::{Duration, Instant};

/// The devices that compute the sequences of an engine.
#[derive(Clone)]
pub enum Devices {
    /// The CPU alone.
    Cpu,
    /// The OpenCL device alone.
    Gpu,
    /// Both in turn.
    Both(Schedule),
}

/// Function that makes an empty cache on the CPU for a sequence whose device is lost.
pub type CpuFactory = Box<dyn FnOnce() -> Result<DeviceCache> + Send>;

/// Function that returns a device once its kernels are compiled, with the devices that compute from then on; `None`
/// before.
pub type PendingDevice = Box<dyn FnMut() -> Option<Result<(SharedDevice, Devices)>> + Send>;

/// The device that a sequence can move to.
enum Second {
    /// A device with its own cache.
    Apart(DeviceCache),
    /// A device that computes in the sequence's cache, so that a switch copies nothing.
    Shared(SharedDevice),
}

/// Kind of tokens for which a device is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A prompt with this number of tokens.
    Prompt(usize),
    /// A part of a prompt.
    PromptPart,
    /// The next token.
    Token,
}

/// State of a sequence's rows after a device was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// All rows are there: the other device was lost.
    Kept,
    /// The cache was replaced by one with the first rows or none.
    Lost,
}

/// One switch to another device.
#[derive(Debug, Clone, PartialEq)]
pub struct Switch {
    /// Position of the next token.
    pub position: usize,
    /// The device left.
    pub from: String,
    /// The device that continues.
    pub to: String,
    /// Slots copied, which the new device lacked; 0 if both share memory.
    pub slots: usize,
    /// Bytes of their rows.
    pub bytes: u64,
    /// Duration of the switch.
    pub took: Duration,
    /// Reason.
    pub why: String,
}

/// The devices of a sequence besides the one that computes it.
pub struct Placement {
    /// The device that computes now.
    side: Side,
    second: Option<(Second, Schedule)>,
    pending: Option<PendingDevice>,
    cpu: Option<CpuFactory>,
    /// Receives a line when a device is lost.
    notice: Notice,
}

impl Placement {
    /// A placement without other devices. `notice` gets a line when a device is lost.
    pub fn new(notice: Notice) -> Self {
        Self { side: Side::Cpu, second: None, pending: None, cpu: None, notice }
    }

    /// Falls back to the CPU when the device is lost.
    pub fn with_cpu(self, cpu: CpuFactory) -> Self {
        Self { cpu: Some(cpu), ..self }
    }

    /// Makes it hybrid: the sequence begins on the CPU, and `second` is the other device's cache, of the same element
    /// types.
    pub fn with_second(self, second: DeviceCache, schedule: Schedule) -> Self {
        Self { second: Some((Second::Apart(second), schedule)), ..self }
    }

    /// Makes it hybrid with a device that computes in the sequence's cache.
    pub fn with_shared_second(self, device: SharedDevice, schedule: Schedule) -> Self {
        Self { second: Some((Second::Shared(device), schedule)), ..self }
    }

    /// Uses a pending device, alone or with the CPU, once it is ready.
    pub fn with_pending(self, pending: PendingDevice) -> Self {
        Self { pending: Some(pending), ..self }
    }

    /// True if there are two devices.
    pub fn is_hybrid(&self) -> bool {
        self.second.is_some()
    }

    /// Switches to the device that should compute the next tokens, unless it is the current one.
    ///
    /// # Errors
    ///
    /// What copying returns; then the sequence is where it was.
    pub fn place(&mut self, here: &mut DeviceCache, work: Work, position: usize) -> Result<Option<Switch>> {
        if self.poll_pending(here.extent().slots) == Some(Side::Gpu) {
            let switch = self.switch(here, position, "its kernels are compiled".into());
            if switch.is_ok() {
                self.second = None;
            }
            return switch;
        }
        let Some((_, schedule)) = &mut self.second else { return Ok(None) };
        let to = match work {
            Work::Prompt(tokens) => schedule.for_prefill(self.side, tokens),
            Work::PromptPart => None,
            Work::Token => schedule.for_decode(self.side, position, here.filled()),
        };
        match to {
            Some(Move { to, why }) if to != self.side => self.switch(here, position, why),
            _ => Ok(None),
        }
    }

    /// Takes over the pending device, if it is ready. Returns the side that computes everything from now on, if it is
    /// one.
    fn poll_pending(&mut self, slots: usize) -> Option<Side> {
        let ready = self.pending.as_mut()?()?;
        self.pending = None;
        let mut take = |device: SharedDevice, schedule: Schedule| {
            self.second = Some((Second::Apart(DeviceCache::new(device, slots)?), schedule));
            Ok(())
        };
        let taken = ready.and_then(|(device, devices)| match devices {
            Devices::Cpu => Ok(None),
            Devices::Gpu => take(device, Schedule::gpu()).map(|()| Some(Side::Gpu)),
            Devices::Both(schedule) => take(device, schedule).map(|()| None),
        });
        taken.unwrap_or_else(|why| {
            self.say_lost(&why);
            None
        })
    }

    /// Switches a sequence of `position` tokens to the other device.
    ///
    /// # Errors
    ///
    /// What copying returns; then the sequence is where it was.
    pub fn switch(&mut self, here: &mut DeviceCache, position: usize, why: String) -> Result<Option<Switch>> {
        let Some((second, _)) = &mut self.second else { return Ok(None) };
        let (began, left) = (Instant::now(), here.device());
        let (slots, bytes) = match second {
            Second::Apart(there) => {
                let copied = there.catch_up(here, position)?;
                std::mem::swap(here, there);
                copied
            }
            Second::Shared(device) => {
                here.swap_device(device);
                (0, 0)
            }
        };
        let trace = locked(&left).set_trace(None);
        here.set_trace(trace);
        self.side = self.side.other();
        let (from, to) = (locked(&left).name(), here.name());
        Ok(Some(Switch { position, from, to, slots, bytes, took: began.elapsed(), why }))
    }

    /// Leaves a lost device for the CPU, which is then the only device, and reports it.
    ///
    /// # Errors
    ///
    /// `lost` if there is no fallback; errors of making the CPU's cache.
    pub fn fall_back(&mut self, here: &mut DeviceCache, lost: Error) -> Result<Rows> {
        let trace = here.set_trace(None);
        let rows = match (self.second.take(), self.side) {
            (Some((Second::Apart(_), _)), Side::Cpu) => Rows::Kept,
            (Some((Second::Apart(mut cpu), _)), Side::Gpu) => {
                cpu.keep_common(here)?;
                *here = cpu;
                Rows::Lost
            }
            _ => {
                let Some(cpu) = self.cpu.take() else { return Err(lost) };
                *here = cpu()?;
                Rows::Lost
            }
        };
        self.say_lost(&lost);
        self.side = Side::Cpu;
        here.set_trace(trace);
        Ok(rows)
    }

    fn say_lost(&self, why: &Error) {
        self.notice.say(&format!("{why}; continuing on the CPU"));
    }

    /// Records the time of a decoded token over `slots` filled slots.
    pub fn record_time(&mut self, slots: usize, time: Duration) {
        if let Some((_, schedule)) = &mut self.second {
            schedule.record_time(self.side, slots, time);
        }
    }
}
