//! Attention of several runs with one token each: one launch per layer, and one that merges; see
//! `kernels/attend_one.cl`.

use super::by_layer::ByLayer;
use super::kv::LayerRows;
use super::shapes::MAX_BATCH_RUNS;
use super::step_launch::Launch;
use crate::dims::{HEADS, KV_HEADS};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Number of buffers before the rows of the runs.
pub const FIRST_ROW_BUFFER: usize = 6;
/// Number of buffers for the rows of all runs.
pub const ROW_BUFFERS: usize = 2 * MAX_BATCH_RUNS;

/// `Runs` in `kernels/common.cl`: the integers of `Run` for each run, the first chunk of each, and the end of all
/// chunks.
pub struct RunTable {
    table: [i32; Self::INTS],
    /// Number of runs.
    pub len: usize,
    /// Total number of chunks.
    pub chunks: usize,
}

impl RunTable {
    /// Number of integers in the table.
    pub const INTS: usize = 4 * MAX_BATCH_RUNS + MAX_BATCH_RUNS + 4;

    /// Creates an empty table.
    pub fn new() -> Self {
        Self { table: [0; Self::INTS], len: 0, chunks: 0 }
    }

    /// Adds a run of one token that sees `chunks` chunks.
    pub fn add(&mut self, run: [i32; 4], chunks: usize) {
        self.table[4 * self.len..4 * self.len + 4].copy_from_slice(&run);
        self.table[4 * MAX_BATCH_RUNS + self.len] = self.chunks as i32;
        self.len += 1;
        self.chunks += chunks;
    }

    /// Table of the added runs.
    pub fn table(&mut self) -> &[i32; Self::INTS] {
        self.table[4 * MAX_BATCH_RUNS + self.len..].fill(self.chunks as i32);
        &self.table
    }
}

/// The launches, and the runs collected for the next one.
pub struct BatchedAttention {
    attend: ByLayer<Launch>,
    merge: Launch,
    /// Placeholder for the rows of missing runs.
    none: Buffer,
    /// Maximum runs of a launch.
    max_runs: usize,
    runs: RunTable,
}

impl BatchedAttention {
    /// Creates the launches of attention from the kernels of all layers, bound to everything but rows.
    pub fn new(attend: ByLayer<Launch>, merge: Launch, none: Buffer, most: usize) -> Self {
        Self { attend, merge, none, max_runs: most, runs: RunTable::new() }
    }

    /// Adds a run of one token that sees `chunks` chunks. Its buffers are kept alive until [`BatchedAttention::run`]
    /// has queued it.
    pub fn add(&mut self, layer: usize, run: [i32; 4], chunks: usize, rows: &LayerRows) -> Result<()> {
        let first = FIRST_ROW_BUFFER + 2 * self.runs.len;
        self.runs.add(run, chunks);
        self.attend[layer].rebind_buffer(first, &rows.k)?.rebind_buffer(first + 1, &rows.v)?;
        Ok(())
    }

    /// True if the launch has no room for another run.
    pub fn is_full(&self) -> bool {
        self.runs.len == self.max_runs
    }

    /// Queues the attention of the added runs, if any.
    pub fn run(&mut self, device: &Device, layer: usize) -> Result<()> {
        let mut runs = std::mem::replace(&mut self.runs, RunTable::new());
        if runs.len == 0 {
            return Ok(());
        }
        let (attend, rows) = (&mut self.attend[layer], FIRST_ROW_BUFFER..FIRST_ROW_BUFFER + ROW_BUFFERS);
        for argument in rows.clone().skip(2 * runs.len) {
            attend.rebind_buffer(argument, &self.none)?;
        }
        attend.set_ints(runs.table())?.run(device, [runs.chunks * KV_HEADS, 1])?;
        // Do not keep a cache alive after its sequence has ended.
        attend.release_buffers(rows);
        self.merge.set_ints(runs.table())?.run(device, [HEADS, runs.len])
    }
}
