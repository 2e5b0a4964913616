//! Attention of a token each of several runs, in one launch a layer and one that merges: see `kernels/attend_one.cl`.

use super::kv::LayerRows;
use super::products::Launch;
use super::shapes::SEVERAL;
use crate::dims::{HEADS, KV_HEADS};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Buffers before those of the runs' rows.
pub const BEFORE_ROWS: usize = 6;
/// Buffers of all runs' rows.
pub const ROWS: usize = 2 * SEVERAL;
/// Integers of `Runs` in `kernels/common.cl`: of each run those of `Run`, then its first chunk, then the end of all.
const TABLE: usize = 4 * SEVERAL + SEVERAL + 4;

/// The launches, and the runs that the next one is of.
pub struct Several {
    attend: Vec<Launch>,
    merge: Launch,
    /// Stands for the rows of runs that there are not.
    none: Buffer,
    /// Most runs of a launch.
    most: usize,
    table: [i32; TABLE],
    runs: usize,
    chunks: usize,
}

impl Several {
    /// With the kernels of all layers, bound to all but rows.
    pub fn new(attend: Vec<Launch>, merge: Launch, none: Buffer, most: usize) -> Self {
        Self { attend, merge, none, most, table: [0; TABLE], runs: 0, chunks: 0 }
    }

    /// Adds a run of one token that sees so many chunks. Its buffers are kept until [`Several::run`] has queued it.
    pub fn add(&mut self, layer: usize, run: [i32; 4], chunks: usize, rows: &LayerRows) -> Result<()> {
        let at = self.runs;
        self.table[4 * at..4 * at + 4].copy_from_slice(&run);
        self.table[4 * SEVERAL + at] = self.chunks as i32;
        let first = BEFORE_ROWS + 2 * at;
        self.attend[layer].again(first, &rows.k)?.again(first + 1, &rows.v)?;
        self.runs += 1;
        self.chunks += chunks;
        Ok(())
    }

    /// Whether no other fits into the launch.
    pub fn is_full(&self) -> bool {
        self.runs == self.most
    }

    /// Queues the attention of the runs that were added, if any were.
    pub fn run(&mut self, device: &Device, layer: usize) -> Result<()> {
        let (runs, chunks) = (std::mem::take(&mut self.runs), std::mem::take(&mut self.chunks));
        if runs == 0 {
            return Ok(());
        }
        self.table[4 * SEVERAL + runs..].fill(chunks as i32);
        let (attend, rows) = (&mut self.attend[layer], BEFORE_ROWS..BEFORE_ROWS + ROWS);
        for argument in rows.clone().skip(2 * runs) {
            attend.again(argument, &self.none)?;
        }
        attend.with(&self.table)?.run(device, [chunks * KV_HEADS, 1])?;
        // A cache goes when its sequence does.
        attend.let_go(rows);
        self.merge.with(&self.table)?.run(device, [HEADS, runs])
    }
}
