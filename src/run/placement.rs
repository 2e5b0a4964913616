//! Placement of a sequence on two devices: decides which one computes next, copies rows there, takes over a device when
//! its kernels are compiled, and falls back to the CPU when a device is lost. A session has one device; only this
//! module copies rows between two.

mod background_compile;
mod device_cache;
mod factory;
mod schedule;
mod speeds;
mod state_history;

pub(super) use background_compile::KernelCompiler;
pub use background_compile::{CacheLock, UnfinishedPrograms};
pub use device_cache::{DeviceCache, RunPosition};
pub(super) use factory::{
    DeviceFactory, StageModel, into_shared, max_pass_tokens, max_pass_tokens_for, was_made_before,
};
pub use schedule::{MeasuredSchedule, SHORT_PROMPT, Schedule, Speed};
pub(super) use speeds::{
    MEASURED_SLOTS, is_known_to_be_the_cpu, known_speeds, measure_both, measured_options,
    options_with_measuring, report_choice, speeds_key,
};
pub use state_history::Checkpoint;
pub(super) use state_history::{checkpoint_bytes, max_checkpoints, state_bytes};

use crate::model::device::{SharedDevice, lock_device};
use crate::run::options::{Notice, Side};
use files::{Error, Result};
use schedule::PlannedSwitch;
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
enum SecondDevice {
    /// A device with its own cache.
    OwnCache(DeviceCache),
    /// A device that computes in the sequence's cache, so that a switch copies nothing.
    SharedCache(SharedDevice),
}

/// Kind of tokens for which a device is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A prompt with this number of tokens.
    Prompt(usize),
    /// A part of a prompt.
    PromptPart,
    /// The next token.
    Token,
}

/// State of a sequence's rows after a device was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowState {
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
    second: Option<(SecondDevice, Schedule)>,
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

    /// Makes the placement hybrid: the sequence begins on the CPU, and `second` is the other device's cache, of the same element
    /// types.
    pub fn with_second(self, second: DeviceCache, schedule: Schedule) -> Self {
        Self { second: Some((SecondDevice::OwnCache(second), schedule)), ..self }
    }

    /// Makes the placement hybrid, with a device that computes in the sequence's cache.
    pub fn with_shared_second(self, device: SharedDevice, schedule: Schedule) -> Self {
        Self { second: Some((SecondDevice::SharedCache(device), schedule)), ..self }
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
    pub fn place_tokens(
        &mut self,
        here: &mut DeviceCache,
        work: TokenKind,
        position: usize,
    ) -> Result<Option<Switch>> {
        if self.poll_pending(here.extent().slots) == Some(Side::Gpu) {
            let switch = self.switch_device(here, position, "its kernels are compiled".into());
            if switch.is_ok() {
                self.second = None;
            }
            return switch;
        }
        let Some((_, schedule)) = &mut self.second else { return Ok(None) };
        let to = match work {
            TokenKind::Prompt(tokens) => schedule.switch_before_prefill(self.side, tokens),
            TokenKind::PromptPart => None,
            TokenKind::Token => schedule.switch_before_decode(self.side, position, here.filled_slots()),
        };
        match to {
            Some(PlannedSwitch { to, why }) if to != self.side => self.switch_device(here, position, why),
            _ => Ok(None),
        }
    }

    /// Takes over the pending device, if it is ready. Returns the side that computes everything from now on, if it is
    /// one.
    fn poll_pending(&mut self, slots: usize) -> Option<Side> {
        let ready = self.pending.as_mut()?()?;
        self.pending = None;
        let mut take = |device: SharedDevice, schedule: Schedule| {
            self.second = Some((SecondDevice::OwnCache(DeviceCache::new(device, slots)?), schedule));
            Ok(())
        };
        let taken = ready.and_then(|(device, devices)| match devices {
            Devices::Cpu => Ok(None),
            Devices::Gpu => take(device, Schedule::gpu_only()).map(|()| Some(Side::Gpu)),
            Devices::Both(schedule) => take(device, schedule).map(|()| None),
        });
        taken.unwrap_or_else(|why| {
            self.report_lost_device(&why);
            None
        })
    }

    /// Switches a sequence of `position` tokens to the other device.
    ///
    /// # Errors
    ///
    /// What copying returns; then the sequence is where it was.
    pub fn switch_device(
        &mut self,
        here: &mut DeviceCache,
        position: usize,
        why: String,
    ) -> Result<Option<Switch>> {
        let Some((second, _)) = &mut self.second else { return Ok(None) };
        let (began, left) = (Instant::now(), here.device());
        let (slots, bytes) = match second {
            SecondDevice::OwnCache(there) => {
                let copied = there.copy_missing_rows(here, position)?;
                std::mem::swap(here, there);
                copied
            }
            SecondDevice::SharedCache(device) => {
                here.swap_device(device);
                (0, 0)
            }
        };
        let trace = lock_device(&left).set_trace(None);
        here.set_trace(trace);
        self.side = self.side.other_side();
        let (from, to) = (lock_device(&left).name(), here.name());
        Ok(Some(Switch { position, from, to, slots, bytes, took: began.elapsed(), why }))
    }

    /// Leaves a lost device for the CPU, which is then the only device, and reports it.
    ///
    /// # Errors
    ///
    /// `lost` if there is no fallback; `Device` if the CPU has no room; errors of making the CPU's cache.
    pub fn fall_back(&mut self, here: &mut DeviceCache, lost: Error) -> Result<RowState> {
        let trace = here.set_trace(None);
        let rows = match (self.second.take(), self.side) {
            (Some((SecondDevice::OwnCache(_), _)), Side::Cpu) => RowState::Kept,
            (Some((SecondDevice::OwnCache(mut cpu), _)), Side::Gpu) => {
                cpu.keep_common(here)?;
                *here = cpu;
                RowState::Lost
            }
            _ => {
                let Some(cpu) = self.cpu.take() else { return Err(lost) };
                *here = cpu().map_err(|e| match e {
                    Error::Memory(why) => Error::Device(format!("{lost}; the CPU cannot continue: {why}")),
                    e => e,
                })?;
                RowState::Lost
            }
        };
        self.report_lost_device(&lost);
        self.side = Side::Cpu;
        here.set_trace(trace);
        Ok(rows)
    }

    fn report_lost_device(&self, why: &Error) {
        self.notice.warn(&format!("{why}; continuing on the CPU"));
    }

    /// Records the time of a decoded token over `slots` filled slots.
    pub fn record_time(&mut self, slots: usize, time: Duration) {
        if let Some((_, schedule)) = &mut self.second {
            schedule.record_time(self.side, slots, time);
        }
    }
}
