//! Events of a sequence besides its tokens: evictions, device switches, the end.

use crate::run::placement::Switch;
use std::time::Duration;

/// An event that users may want to know about, reported after it has happened.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionEvent {
    /// Slots were evicted.
    Evicted(EvictionResult),
    /// The sequence moved to another device.
    Switched(Switch),
}

/// Callback for events.
pub type Observer = Box<dyn FnMut(&SessionEvent) + Send>;

/// One eviction.
#[derive(Debug, Clone, PartialEq)]
pub struct EvictionResult {
    /// Slots freed in each head.
    pub removed: usize,
    /// Slots in use after it.
    pub slots: usize,
    /// RoPE position of the next token, which evictions do not change.
    pub position: usize,
    /// Reason.
    pub why: EvictionReason,
    /// Duration.
    pub took: Duration,
}

/// Reason for an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictionReason {
    /// No slot was free.
    Full,
    /// As many slots were in use as the eviction window allows.
    Window,
    /// The system was short of memory.
    Memory,
}

impl EvictionReason {
    /// Wording in messages and JSON lines.
    pub fn name(self) -> &'static str {
        match self {
            EvictionReason::Full => "cache full",
            EvictionReason::Window => "window reached",
            EvictionReason::Memory => "memory low",
        }
    }
}

/// Reason for the end of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StopReason {
    /// An end-of-sequence token.
    Eos,
    /// A stop string.
    Stop,
    /// The maximum number of tokens.
    #[default]
    Length,
    /// A full context.
    Context,
    /// Cancellation.
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
