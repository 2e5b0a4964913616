//! Memory of a server besides its sequences: requests and answers in progress, connections, threads; and the rows that
//! sequences share.

use super::{Plan, add, mul};
use crate::dims::VOCAB;
use crate::run::session::PROMPT_LOGITS_ROWS;

/// Minimum and maximum bytes for requests and answers, which get 1 / [`MEMORY_SHARE`] of the memory.
#[cfg(feature = "serve")]
const REQUEST_BYTES: [u64; 2] = [16 << 20, 128 << 20];
#[cfg(feature = "serve")]
const MEMORY_SHARE: u64 = 8;
/// Maximum number of simultaneous connections.
pub const CONNECTIONS: usize = 1024;
/// Bytes buffered for reading from or writing to a connection.
pub const CONNECTION_BUFFER: usize = 16 << 10;
/// Maximum number of unread events of a stream, after which its request is cancelled.
pub const BACKLOG: usize = 2048;
/// Bytes of an unread event.
const EVENT_BYTES: u64 = 256;
/// Memory of encoding a text that cannot be split; one at a time.
const ENCODING: u64 = 36 << 20;
/// Memory of grammars. One with a megabyte of rules takes 214 MiB for a second before it is rejected.
const GRAMMARS: u64 = if cfg!(feature = "grammar") { 64 << 20 } else { 0 };
/// Stack size of a server thread.
pub(super) const STACK: u64 = 2 << 20;

/// Number of threads that prepare requests.
pub fn request_threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4)
}

impl Plan {
    /// Adds a server's requests and answers to the plan. Returns the bytes that these may take.
    #[cfg(feature = "serve")]
    pub fn add_requests(&mut self) -> u64 {
        let [least, most] = REQUEST_BYTES;
        self.requests =
            self.memory.usable_bytes().map_or(most, |bytes| (bytes / MEMORY_SHARE).clamp(least, most));
        self.requests
    }

    /// Bytes of the plan's line for requests: requests and answers, connection buffers, unread events, and encoding of
    /// a long text.
    pub(super) fn request_bytes(&self) -> u64 {
        let buffers = (CONNECTIONS * CONNECTION_BUFFER) as u64;
        let unread = mul(self.options.sequence_count() as u64, BACKLOG as u64 * EVENT_BYTES);
        // Logits of a prompt's tokens, which a request may ask for.
        let measured = (PROMPT_LOGITS_ROWS * VOCAB * size_of::<f32>()) as u64;
        if self.requests > 0 {
            [self.requests, buffers, unread, measured, ENCODING, GRAMMARS].into_iter().fold(0, add)
        } else {
            0
        }
    }

    /// Number of a server's threads: for connections and for preparing requests.
    pub(super) fn server_threads(&self) -> u64 {
        if self.requests > 0 { 1 + request_threads() as u64 } else { 0 }
    }

    /// If memory does not suffice for the rows of all sequences, lets them share what there is, at least one sequence's
    /// rows. Returns the shared bytes.
    #[cfg(feature = "serve")]
    pub fn share_rows(&mut self) -> Option<u64> {
        self.shared_rows = None;
        let (need, have) = (self.needed_bytes(), self.memory.usable_bytes()?);
        let rows = self.kv_row_bytes(self.options.max_seq_len).into_iter().fold(0, add);
        if need <= have || self.options.sequence_count() < 2 {
            return None;
        }
        let left = have.saturating_sub(need - rows);
        self.shared_rows = Some(left.max(rows / self.options.sequence_count() as u64));
        self.shared_rows
    }

    /// Bytes of rows that sequences share, after [`Plan::share_rows`].
    pub fn shared_rows(&self) -> Option<u64> {
        self.shared_rows
    }

    /// Bytes needed while the server is idle and no row is filled.
    #[cfg(feature = "serve")]
    pub fn idle_bytes(&self) -> u64 {
        let rows =
            self.kv_row_bytes(self.options.max_seq_len).into_iter().fold(self.options.prefix_cache, add);
        self.needed_bytes().saturating_sub(add(rows, self.request_bytes()))
    }
}
