//! What a server takes beside its sequences: requests and answers under way, connections, threads; and how sequences share
//! what is left.

use super::{Plan, add, mul};
use crate::dims::VOCAB;
use crate::run::session::MEASURED;

/// Bytes that requests and answers may take: a part of the memory, within these bounds.
#[cfg(feature = "serve")]
const REQUESTS: [u64; 2] = [16 << 20, 128 << 20];
#[cfg(feature = "serve")]
const PART: u64 = 8;
/// Connections at once, at most.
pub const CONNECTIONS: usize = 1024;
/// Bytes that are read of one, or written to it, before they are taken.
pub const CONNECTION_BUFFER: usize = 16 << 10;
/// Events of a text that its client may leave unread in a stream, at most: then it is given up.
pub const BACKLOG: usize = 2048;
/// Memory of each.
const EVENT: u64 = 256;
/// Encoding a text that cannot be cut, one at a time.
const ENCODING: u64 = 36 << 20;
/// Grammars that are compiled or followed. One with a megabyte of rules takes 214 MiB for a second before it is refused.
const GRAMMARS: u64 = if cfg!(feature = "grammar") { 64 << 20 } else { 0 };
/// The stack of a thread of the server.
pub(super) const STACK: u64 = 2 << 20;

/// Threads that prepare requests.
pub fn request_threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4)
}

impl Plan {
    /// Adds what a server takes for requests and answers; how many bytes these may have.
    #[cfg(feature = "serve")]
    pub fn add_requests(&mut self) -> u64 {
        let [least, most] = REQUESTS;
        self.requests = self.memory.usable().map_or(most, |bytes| (bytes / PART).clamp(least, most));
        self.requests
    }

    /// The line of the plan: requests and answers, buffers of connections, what streams leave unread, and the encoding of a
    /// long text.
    pub(super) fn of_requests(&self) -> u64 {
        let buffers = (CONNECTIONS * CONNECTION_BUFFER) as u64;
        let unread = mul(self.options.sequences() as u64, BACKLOG as u64 * EVENT);
        // Logits of a prompt's tokens, which a request may ask for.
        let measured = (MEASURED * VOCAB * size_of::<f32>()) as u64;
        if self.requests > 0 {
            [self.requests, buffers, unread, measured, ENCODING, GRAMMARS].into_iter().fold(0, add)
        } else {
            0
        }
    }

    /// Threads of a server: of connections, and those that prepare requests.
    pub(super) fn server_threads(&self) -> u64 {
        if self.requests > 0 { 1 + request_threads() as u64 } else { 0 }
    }

    /// Where memory does not suffice for the rows of all sequences: lets them share what there is, at least as much as one
    /// needs, and returns how many bytes that is.
    #[cfg(feature = "serve")]
    pub fn share_rows(&mut self) -> Option<u64> {
        let (need, have) = (self.need(), self.memory.usable()?);
        let rows = self.rows(self.options.max_seq_len).into_iter().fold(0, add);
        if need <= have || self.options.sequences() < 2 {
            return None;
        }
        let left = have.saturating_sub(need - rows);
        self.shared_rows = Some(left.max(rows / self.options.sequences() as u64));
        self.shared_rows
    }

    /// What [`Plan::share_rows`] has come to.
    pub fn shared_rows(&self) -> Option<u64> {
        self.shared_rows
    }

    /// Bytes that are needed before any row is filled, while nobody asks.
    #[cfg(feature = "serve")]
    pub fn empty(&self) -> u64 {
        let rows = self.rows(self.options.max_seq_len).into_iter().fold(self.options.prefix_cache, add);
        self.need().saturating_sub(add(rows, self.of_requests()))
    }
}
