//! A token of each of several sequences through the whole model in one launch, on NVIDIA: see `kernels/batch_nvidia.cl`.

use super::defines::{CHUNK, Sight};
use super::kernels::{ATTEND_ONE, BATCH_NVIDIA, COMMON, KV, NVIDIA, TEAMS};
use super::kv::Rows;
use super::places::{Places, cache};
use super::scratch::Scratch;
use super::shapes::SEVERAL;
use super::single_launch::{self, zeroed};
use super::weights::Matrices;
use crate::dims::*;
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::facts::Facts;
use opencl_runtime::failure::Result;
use opencl_runtime::program::{Kernel, Program, Source};

/// Items of a group, and of a team, which attends.
const ITEMS: usize = 512;
const TEAM: usize = 128;
/// How often groups meet.
const MEETINGS: usize = 8 * LAYERS + 1;
/// Buffers before those of the sequences' rows.
const BEFORE_ROWS: usize = 10;
/// Integers of `Batch`: of each sequence those of `Run`, its first chunk, the end of all, its strides, then tokens and
/// meetings so far.
const TABLE: usize = 7 * SEVERAL + 4 + 4;

/// Bytes of local memory in which weights and activations arrive.
const POOL: usize = 46_080;

/// Whether the kernel is for this device and such caches: those in f16, as it was run with no others.
pub fn fits(facts: &Facts, types: KvTypes) -> bool {
    let team = (GROUP + 2) * (HEAD_DIM + 16) + GROUP * CHUNK + GROUP + 1 + 36 * HEAD_DIM / 32;
    let local = POOL.max(4 * (ITEMS / TEAM * team).max(DIM + 528));
    single_launch::fits(facts)
        && types == KvTypes::both(KvType::F16)
        && HEAD_DIM <= TEAM
        && local as u64 <= facts.local_memory
}

/// The kernel and what only it needs.
pub struct BatchLaunch {
    program: Program,
    kernel: Kernel,
    places: Places,
    calibration: Buffer,
    /// Activations of the widest step but `down`, then those of `down`, each with scales.
    acts: Buffer,
    /// How often groups have met, and whether one was given up.
    sync: Buffer,
    met: u32,
    groups: usize,
}

impl BatchLaunch {
    /// `None` where the device does not have the kernel, or the weights are no parts of one buffer.
    pub fn new(
        device: &Device,
        matrices: &Matrices,
        calibration: &[Buffer],
        types: KvTypes,
        scratch: &Scratch,
    ) -> Result<Option<Self>> {
        let facts = device.facts();
        if !fits(facts, types) {
            return Ok(None);
        }
        let Some(places) = Places::find(matrices, calibration) else { return Ok(None) };
        let groups = facts.compute_units as usize;
        let defines = places.defines(facts, types).with("ITEMS", ITEMS).with("TEAM", TEAM);
        let defines = defines.with("POOL", POOL).with("SEVERAL", SEVERAL).of_sight(Sight::of(0));
        let text = [TEAMS, COMMON, KV, ATTEND_ONE, TEAMS, NVIDIA, BATCH_NVIDIA].concat();
        let source = Source { name: "decode_batch", text: &text, options: defines.as_str() };
        let program = Program::build_variant(device, &source)?;
        // Of a block eight words and a scale.
        let acts = zeroed(device, (DIM.max(Q_DIM) + FFN_DIM) / 32 * SEVERAL * 9)?;
        let sync = zeroed(device, 2)?;
        let kernel = program.kernel("decode_batch")?;
        let calibration = places.calibration.clone().unwrap_or(scratch.none.clone());
        let mut new = Self { program, kernel, places, calibration, acts, sync, met: 0, groups };
        new.bind(scratch)?;
        Ok(Some(new))
    }

    /// What the kernel is of.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Binds all but the rows of caches.
    pub fn bind(&mut self, scratch: &Scratch) -> Result<()> {
        let Places { matrices, floats, .. } = &self.places;
        let state = scratch.state.buffer();
        let Scratch { qkv, partials, ml, logits, .. } = scratch;
        let buffers =
            [matrices, floats, &self.calibration, state, qkv, partials, ml, &self.acts, &self.sync, logits];
        for (i, buffer) in buffers.into_iter().enumerate() {
            self.kernel.arg_buffer(i, buffer)?;
        }
        Ok(())
    }

    /// Queues a token of each of some sequences, at most [`SEVERAL`], whose embeddings and angles are there: with the rows
    /// of their caches and the filled slots of each. `false` where rows are no parts of one buffer.
    pub fn run<'a>(
        &mut self,
        device: &Device,
        scratch: &Scratch,
        caches: impl Iterator<Item = (&'a Rows, usize)>,
    ) -> Result<bool> {
        let mut table = [0; TABLE];
        let (mut tokens, mut chunks) = (0, 0);
        for (rows, filled) in caches {
            let Some((k, v, strides)) = cache(rows) else { return Ok(false) };
            let run = [tokens as i32, 1, filled as i32, rows.slots() as i32];
            table[4 * tokens..4 * tokens + 4].copy_from_slice(&run);
            table[4 * SEVERAL + tokens] = chunks;
            table[5 * SEVERAL + 4 + 2 * tokens..][..2].copy_from_slice(&strides.map(|s| s as i32));
            let first = BEFORE_ROWS + 2 * tokens;
            self.kernel.arg_again(first, &k)?.arg_again(first + 1, &v)?;
            tokens += 1;
            chunks += (filled / CHUNK + 1) as i32;
        }
        table[4 * SEVERAL + tokens..5 * SEVERAL + 4].fill(chunks);
        table[7 * SEVERAL + 4] = tokens as i32;
        table[7 * SEVERAL + 5] = self.met as i32;
        let rows = BEFORE_ROWS..BEFORE_ROWS + 2 * SEVERAL;
        for argument in rows.clone().skip(2 * tokens) {
            self.kernel.arg_again(argument, &scratch.none)?;
        }
        self.kernel.arg_ints(rows.end, &table)?;
        self.met = self.met.wrapping_add((MEETINGS * self.groups) as u32);
        device.launch(&self.kernel, &[self.groups * ITEMS], &[ITEMS])?;
        // A cache goes when its sequence does.
        self.kernel.let_go(rows);
        Ok(true)
    }
}
