//! Attention of a token each of several runs, in one launch a layer and one that merges: see `kernels/attend_one.cl`.

use super::kv::LayerRows;
use super::shapes::SEVERAL;
use super::step_launch::Launch;
use crate::dims::{HEADS, KV_HEADS};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Buffers before those of the runs' rows.
pub const BEFORE_ROWS: usize = 6;
/// Buffers of all runs' rows.
pub const ROWS: usize = 2 * SEVERAL;

/// `RunTable` of `kernels/common.cl`: of each run the integers of `Run`, then its first chunk, then the end of all.
pub struct RunTable {
    table: [i32; Self::INTS],
    /// How many there are.
    pub len: usize,
    /// Chunks of all of them.
    pub chunks: usize,
}

impl RunTable {
    /// Integers of the table.
    pub const INTS: usize = 4 * SEVERAL + SEVERAL + 4;

    /// None yet.
    pub fn new() -> Self {
        Self { table: [0; Self::INTS], len: 0, chunks: 0 }
    }

    /// Adds a run of one token that sees so many chunks.
    pub fn add(&mut self, run: [i32; 4], chunks: usize) {
        self.table[4 * self.len..4 * self.len + 4].copy_from_slice(&run);
        self.table[4 * SEVERAL + self.len] = self.chunks as i32;
        self.len += 1;
        self.chunks += chunks;
    }

    /// The table of those that were added.
    pub fn table(&mut self) -> &[i32; Self::INTS] {
        self.table[4 * SEVERAL + self.len..].fill(self.chunks as i32);
        &self.table
    }
}

/// The launches, and the runs that the next one is of.
pub struct BatchedAttention {
    attend: Vec<Launch>,
    merge: Launch,
    /// Stands for the rows of runs that there are not.
    none: Buffer,
    /// Most runs of a launch.
    most: usize,
    runs: RunTable,
}

impl BatchedAttention {
    /// With the kernels of all layers, bound to all but rows.
    pub fn new(attend: Vec<Launch>, merge: Launch, none: Buffer, most: usize) -> Self {
        Self { attend, merge, none, most, runs: RunTable::new() }
    }

    /// Adds a run of one token that sees so many chunks. Its buffers are kept until [`BatchedAttention::run`] has queued it.
    pub fn add(&mut self, layer: usize, run: [i32; 4], chunks: usize, rows: &LayerRows) -> Result<()> {
        let first = BEFORE_ROWS + 2 * self.runs.len;
        self.runs.add(run, chunks);
        self.attend[layer].again(first, &rows.k)?.again(first + 1, &rows.v)?;
        Ok(())
    }

    /// Whether no other fits into the launch.
    pub fn is_full(&self) -> bool {
        self.runs.len == self.most
    }

    /// Queues the attention of the runs that were added, if any were.
    pub fn run(&mut self, device: &Device, layer: usize) -> Result<()> {
        let mut runs = std::mem::replace(&mut self.runs, RunTable::new());
        if runs.len == 0 {
            return Ok(());
        }
        let (attend, rows) = (&mut self.attend[layer], BEFORE_ROWS..BEFORE_ROWS + ROWS);
        for argument in rows.clone().skip(2 * runs.len) {
            attend.again(argument, &self.none)?;
        }
        attend.with(runs.table())?.run(device, [runs.chunks * KV_HEADS, 1])?;
        // A cache goes when its sequence does.
        attend.let_go(rows);
        self.merge.with(runs.table())?.run(device, [HEADS, runs.len])
    }
}
