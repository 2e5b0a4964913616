//! One token through the whole model in one launch: see `kernels/nvidia/decode.cl`.

use super::super::defines::{ATTN_BLOCK, KV_PAD, Q_PAD, QKV};
use super::super::kernels::{COMMON, KV};
use super::super::kv::DeviceKv;
use super::super::scratch::Scratch;
use super::layout::{WeightLayout, find_cache};
use super::{ATTEND, DECODE, HEADER};
use crate::dims::*;
use numeric::kv::KvTypes;
use numeric::quant::format::GROUP_ROWS;
use opencl_runtime::buffer::{Access, Buffer, Place};
use opencl_runtime::device::Device;
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::Result;
use opencl_runtime::program::{Kernel, Program, Source};

/// Work-items of a work-group.
const ITEMS: usize = 512;
/// Warps of a work-group.
const WARPS: usize = ITEMS / 32;
/// Rows of a unit, as grouped by the packed layout.
const UNIT: usize = GROUP_ROWS;
/// Slots through which work-groups exchange a unit's rows, and a block of activations; then 32-bit words per slot.
const SLOTS: [usize; 2] = [6, 3];
const SLOT: usize = 4;
/// Words of local memory for sums of blocks, or for rows of the cache.
const PARTS: usize = 8704;
/// Steps per layer whose results are exchanged.
const STEPS: usize = 5;
/// Index of the first of five header integers, as in `kernels/common.cl`: capacity, chunks, steps so far, strides of
/// keys and values.
const H_CAPACITY: usize = 2;
/// Argument with the address of the logits.
const LOGITS: usize = 8;

/// True if the kernel supports this device and this model's shape.
pub fn supports_device(facts: &DeviceInfo) -> bool {
    let widths = [DIM, Q_DIM, FFN_DIM];
    let widest = DIM.max(Q_DIM).max(FFN_DIM);
    let attention = (GROUP + 2) * HEAD_DIM + GROUP * ATTN_BLOCK;
    let local = PARTS + (widest / 4).max(attention) + widest / 32 + 1024;
    IS_PLAIN_LLAMA
        && facts.writes_to_host()
        && facts.compute_capability.is_some_and(|cc| cc >= (8, 0))
        && widths.iter().all(|w| w % 64 == 0 && units_that_fit(*w) > 0)
        && head_units().is_some()
        && units_that_fit(DIM) >= 4
        && DIM + 256 <= PARTS
        && HEAD_DIM.is_power_of_two()
        && (32..=256).contains(&HEAD_DIM)
        && (Q_PAD, KV_PAD) == (Q_DIM, KV_DIM)
        && facts.max_work_group >= ITEMS
        && 4 * local as u64 <= facts.local_memory
}

/// Units with `cols` columns whose sums fit in local memory, as 16-bit values.
fn units_that_fit(cols: usize) -> usize {
    PARTS / (UNIT * (cols / 32 + 2))
}

/// Units of the head per round, such that all warps have the same share.
fn head_units() -> Option<usize> {
    (1..=units_that_fit(DIM).min(ITEMS / UNIT)).rev().find(|n| (n * (DIM / 64)).is_multiple_of(WARPS))
}

/// The kernel, and its own buffers.
pub struct Decode {
    program: Program,
    layout: WeightLayout,
    work: Buffer,
    sync: Buffer,
    /// Number of chunks per head for which `work` has room.
    chunks: usize,
    groups: usize,
    /// Steps so far, modulo 2^32.
    steps: u32,
}

/// The kernel, bound to a cache and to everything but the logits.
pub struct BoundDecode {
    kernel: Kernel,
    /// Slots of the cache; then the distance from the keys (values) of one layer to the next, in units of 64 bytes.
    capacity: u32,
    strides: [u32; 2],
}

impl Decode {
    /// Builds the kernel for caches of these types and attention over `slots` slots.
    pub fn new(device: &Device, layout: WeightLayout, types: KvTypes, slots: usize) -> Result<Self> {
        let facts = device.info();
        let defines = layout.to_defines(facts, types).add_value("WG", ITEMS).add_value("PARTS", PARTS);
        let defines = defines.add_value("HEAD_UNITS_PER_ROUND", head_units().unwrap_or(1));
        let text = [COMMON, KV, HEADER, ATTEND, DECODE].concat();
        let source = Source { name: "decode", text: &text, options: defines.as_str() };
        let program = Program::build_variant(device, &source)?;
        let (chunks, sync) = (chunk_count(slots), allocate_zeroed(device, 1)?);
        let (work, groups) = (allocate_zeroed(device, work_words(chunks))?, facts.compute_units as usize);
        Ok(Self { program, layout, work, sync, chunks, groups, steps: 0 })
    }

    /// Program of the kernel.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Makes room for attention over `slots` slots. Kernels bound for fewer must be bound again.
    pub fn reserve(&mut self, device: &Device, slots: usize) -> Result<()> {
        let chunks = chunk_count(slots);
        if chunks > self.chunks {
            self.work = allocate_zeroed(device, work_words(chunks))?;
            self.chunks = chunks;
        }
        Ok(())
    }

    /// Binds the kernel to a cache; `None` if its rows are not parts of one buffer.
    pub fn bind(&self, scratch: &Scratch, rows: &DeviceKv) -> Result<Option<BoundDecode>> {
        let Some((k, v, strides)) = find_cache(rows) else { return Ok(None) };
        let mut kernel = self.program.create_kernel("decode")?;
        let WeightLayout { matrices, floats, calibration, .. } = &self.layout;
        let state = scratch.state.buffer();
        let calibration = calibration.as_ref().unwrap_or(&scratch.none);
        let buffers = [matrices, floats, calibration, &k, &v, state, &self.work, &self.sync];
        for (i, buffer) in buffers.into_iter().enumerate() {
            kernel.set_buffer(i, buffer)?;
        }
        Ok(Some(BoundDecode { kernel, capacity: rows.slots() as u32, strides }))
    }

    /// Sets the cache and the number of steps so far in the header.
    pub fn set_header(&self, scratch: &mut Scratch, bound: &BoundDecode) {
        let [k_stride, v_stride] = bound.strides;
        scratch.set_header(H_CAPACITY, [bound.capacity, self.chunks as u32, self.steps, k_stride, v_stride]);
    }

    /// Queues one token, which writes its logits to `logits`. [`Scratch::upload_tokens`] must have sent its
    /// embedding, angles and header after [`Decode::set_header`].
    pub fn run(&mut self, device: &Device, bound: &mut BoundDecode, logits: &Buffer) -> Result<()> {
        self.steps = self.steps.wrapping_add((LAYERS * STEPS) as u32);
        bound.kernel.rebind_buffer(LOGITS, logits)?;
        device.launch(&bound.kernel, &[self.groups * ITEMS], &[ITEMS])
    }
}

/// Chunks of attention over `slots` slots.
fn chunk_count(slots: usize) -> usize {
    slots.div_ceil(ATTN_BLOCK)
}

/// Allocates a buffer of zeros.
pub fn allocate_zeroed(device: &Device, floats: usize) -> Result<Buffer> {
    let buffer = device.allocate_buffer(4 * floats, Access::ReadWrite, Place::Device)?;
    buffer.fill(0..buffer.len(), 0)?;
    Ok(buffer)
}

/// Words of the kernel's `work` buffer, as laid out by its `W_` constants.
fn work_words(chunks: usize) -> usize {
    let [of_rows, of_block] = SLOTS;
    let rows = (QKV + 2 * DIM) / UNIT * of_rows;
    let blocks = (Q_DIM + FFN_DIM) / 32 * of_block;
    (rows + blocks + HEADS * chunks * (HEAD_DIM + 2).div_ceil(3)) * SLOT
}
