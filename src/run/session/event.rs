//! Events of a sequence besides its tokens: evictions, moves from device to device, the end.

use crate::run::placement::Switch;
use std::time::Duration;

/// Something a user may want to know of, told when it has happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Slots were evicted.
    Evicted(EvictionResult),
    /// The sequence moved to another device.
    Switched(Switch),
}

/// Is told of events.
pub type Observer = Box<dyn FnMut(&Event) + Send>;

/// One eviction.
#[derive(Debug, Clone, PartialEq)]
pub struct EvictionResult {
    /// Slots that became free, of each head.
    pub removed: usize,
    /// Slots in use now.
    pub slots: usize,
    /// RoPE position of the next token, which evictions do not change.
    pub position: usize,
    /// Why now.
    pub why: Why,
    /// Duration of the move.
    pub took: Duration,
}

/// Why slots were evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// No slot was free.
    Full,
    /// As many slots were in use as the eviction window allows.
    Window,
    /// The system was short of memory.
    Memory,
}

impl Why {
    /// The word in messages and JSON lines.
    pub fn name(self) -> &'static str {
        match self {
            Why::Full => "cache full",
            Why::Window => "window reached",
            Why::Memory => "memory low",
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// An end-of-sequence token.
    Eos,
    /// A stop string.
    Stop,
    /// As many tokens as asked for.
    Length,
    /// No slot left.
    Context,
    /// Cancelled.
    Interrupt,
}

impl StopReason {
    /// The word printed after `stop:`.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::Eos => "eos",
            StopReason::Stop => "stop",
            StopReason::Length => "length",
            StopReason::Context => "context",
            StopReason::Interrupt => "interrupt",
        }
    }
}
