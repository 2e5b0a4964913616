//! The generation loop and what steps it: streams, lists of prompts, a server's scheduler.

pub mod batch;
pub mod decoder;
#[cfg(feature = "serve")]
mod prefill_budget;
#[cfg(feature = "serve")]
mod prefix_cache;
pub mod prompts;
#[cfg(feature = "serve")]
pub mod scheduler;
#[cfg(feature = "serve")]
mod stats;
pub mod stream;
