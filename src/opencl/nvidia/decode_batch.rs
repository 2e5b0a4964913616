//! A token of each of several sequences through the whole model in one launch: see `kernels/nvidia/decode_batch.cl`.

use super::super::batched_attention::{ROW_BUFFERS, RunTable};
use super::super::defines::{ATTN_BLOCK, LayerView};
use super::super::kernels::{ATTEND_ONE, COMMON, KV};
use super::super::kv::DeviceKv;
use super::super::scratch::Scratch;
use super::super::shapes::MAX_BATCH_RUNS;
use super::decode::{self, allocate_zeroed};
use super::layout::{WeightLayout, find_cache};
use super::{DECODE_BATCH, HEADER, SUBGROUP_BARRIER};
use crate::dims::*;
use numeric::kv::KvTypes;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::Result;
use opencl_runtime::program::{Kernel, Program, Source};

/// Work-items of a work-group, and of a team, which computes attention.
const ITEMS: usize = 512;
const TEAM: usize = 128;
/// Number of grid barriers per pass.
const BARRIERS: usize = 8 * LAYERS + 1;
/// Arguments for the chunks of attention, and for their largest scores and sums.
const PARTS: [usize; 2] = [5, 6];
/// Number of buffers before the rows of the sequences, and before their logits.
const BEFORE_ROWS: usize = 9;
const BEFORE_LOGITS: usize = BEFORE_ROWS + ROW_BUFFERS;
/// Index of the row strides of each sequence in `Batch`, after the runs; then the number of tokens and of barriers so
/// far.
const STRIDES: usize = RunTable::INTS;
const TOKENS: usize = STRIDES + 2 * MAX_BATCH_RUNS;

/// Bytes of local memory for incoming weights and activations.
const POOL: usize = 46_080;

/// True if the kernel supports this device and this model's shape.
pub fn supports_device(facts: &DeviceInfo) -> bool {
    let team = (GROUP + 2) * (HEAD_DIM + 16) + GROUP * ATTN_BLOCK + GROUP + 1 + 36 * HEAD_DIM / 32;
    let local = POOL.max(4 * (ITEMS / TEAM * team).max(DIM + 528));
    decode::supports_device(facts) && HEAD_DIM <= TEAM && local as u64 <= facts.local_memory
}

/// The kernel, and its own state.
pub struct DecodeBatch {
    program: Program,
    /// Bound to everything but the rows of caches and the logits.
    kernel: Kernel,
    /// Arrivals at grid barriers so far, modulo 2^32.
    arrivals: u32,
    groups: usize,
}

impl DecodeBatch {
    /// Builds the kernel, for a device that [`supports_device`].
    pub fn new(device: &Device, layout: &WeightLayout, types: KvTypes, scratch: &Scratch) -> Result<Self> {
        let facts = device.info();
        let groups = facts.compute_units as usize;
        let defines = layout.to_defines(facts, types).add_value("ITEMS", ITEMS).add_value("TEAM", TEAM);
        let defines =
            defines.add_value("POOL", POOL).add_value("SEVERAL", MAX_BATCH_RUNS).add_view(LayerView::of(0));
        let text =
            [SUBGROUP_BARRIER, COMMON, KV, ATTEND_ONE, SUBGROUP_BARRIER, HEADER, DECODE_BATCH].concat();
        let source = Source { name: "decode_batch", text: &text, options: defines.as_str() };
        let program = Program::build_variant(device, &source)?;
        // Activations of the widest step but `down`, then those of `down`: eight words and a scale per block.
        let acts = allocate_zeroed(device, (DIM.max(Q_DIM) + FFN_DIM) / 32 * MAX_BATCH_RUNS * 9)?;
        // Number of arrivals at barriers, and a flag for a work-group that never arrived.
        let sync = allocate_zeroed(device, 2)?;
        let mut kernel = program.create_kernel("decode_batch")?;
        let WeightLayout { matrices, floats, calibration, .. } = layout;
        let Scratch { state, qkv, partials, ml, none, .. } = scratch;
        let (calibration, state) = (calibration.as_ref().unwrap_or(none), state.buffer());
        let buffers = [matrices, floats, calibration, state, qkv, partials, ml, &acts, &sync];
        for (i, buffer) in buffers.into_iter().enumerate() {
            kernel.set_buffer(i, buffer)?;
        }
        Ok(Self { program, kernel, arrivals: 0, groups })
    }

    /// Program of the kernel.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Binds the buffers of attention again, after [`Scratch::reserve_slots`] has made room for longer caches.
    pub fn reserve(&mut self, scratch: &Scratch) -> Result<()> {
        let [partials, ml] = PARTS;
        self.kernel.rebind_buffer(partials, &scratch.partials)?.rebind_buffer(ml, &scratch.ml)?;
        Ok(())
    }

    /// Queues one token for each of at most [`MAX_BATCH_RUNS`] sequences, whose embeddings and angles were sent. Each
    /// comes with the rows of its cache, its filled slots and the buffer for its logits. `false` if rows are not parts
    /// of one buffer.
    pub fn run<'a>(
        &mut self,
        device: &Device,
        scratch: &Scratch,
        sequences: impl Iterator<Item = (&'a DeviceKv, usize, Result<Buffer>)>,
    ) -> Result<bool> {
        let (mut runs, mut table) = (RunTable::new(), [0; TOKENS + 4]);
        for (rows, filled, logits) in sequences {
            let Some((k, v, strides)) = find_cache(rows) else { return Ok(false) };
            let at = runs.len;
            runs.add([at as i32, 1, filled as i32, rows.slots() as i32], filled / ATTN_BLOCK + 1);
            table[STRIDES + 2 * at..][..2].copy_from_slice(&strides.map(|s| s as i32));
            self.kernel
                .rebind_buffer(BEFORE_ROWS + 2 * at, &k)?
                .rebind_buffer(BEFORE_ROWS + 2 * at + 1, &v)?;
            self.kernel.rebind_buffer(BEFORE_LOGITS + at, &logits?)?;
        }
        table[..STRIDES].copy_from_slice(runs.table());
        table[TOKENS..][..2].copy_from_slice(&[runs.len as i32, self.arrivals as i32]);
        let all = BEFORE_ROWS..BEFORE_LOGITS + MAX_BATCH_RUNS;
        for argument in (BEFORE_ROWS + 2 * runs.len..BEFORE_LOGITS).chain(BEFORE_LOGITS + runs.len..all.end) {
            self.kernel.rebind_buffer(argument, &scratch.none)?;
        }
        self.kernel.set_ints(all.end, &table)?;
        self.arrivals = self.arrivals.wrapping_add((BARRIERS * self.groups) as u32);
        device.launch(&self.kernel, &[self.groups * ITEMS], &[ITEMS])?;
        // Do not keep the buffers of a sequence alive after it has ended.
        self.kernel.release_buffers(all);
        Ok(true)
    }
}
