//! Persistent kernels, which only NVIDIA's GPUs run: whole passes in one launch each, for a token of one sequence ([`decode`]) or of each of
//! several ([`decode_batch`]), and products of many tokens on tensor cores ([`gemm`]).
//!
//! This is the one door: the rest of [`crate::opencl`] names nothing below it. Builds for other platforms than x86-64 Linux
//! have `nvidia/absent.rs` in its place.

mod decode;
mod decode_batch;
mod gemm;
mod host_logits;
mod layout;

use super::cache::OpenClCache;
use super::kv::DeviceKv;
use super::scratch::Scratch;
use super::selftest::OTHERS;
use super::weights::Model;
use crate::model::device::{Logits, Row, Run};
pub use decode::BoundDecode;
use decode::Decode;
use decode_batch::DecodeBatch;
pub use gemm::TensorCores;
use host_logits::HostLogits;
use layout::WeightLayout;
use numeric::kv::KvTypes;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::facts::Facts;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Program;

/// Most runs of a token each that are computed one by one: as many launches take less time than those of all steps.
const MOST_ONE_BY_ONE: usize = 3;
const _: () = assert!(MOST_ONE_BY_ONE <= OTHERS, "the self-test would not test the batch");
/// The most of them where one launch can compute all.
const MOST_ONE_BY_ONE_OF_BATCH: usize = 2;

const HEADER: &str = kernel_text!("nvidia/header");
const ATTEND: &str = kernel_text!("nvidia/attend");
const DECODE: &str = kernel_text!("nvidia/decode");
const DECODE_BATCH: &str = kernel_text!("nvidia/decode_batch");
const GEMM: &str = kernel_text!("nvidia/gemm");
const SUBGROUP_BARRIER: &str = kernel_text!("nvidia/subgroup_barrier");

/// True for a device that may compute a token in one launch, for which it wants what is in its memory in one buffer.
pub fn has_persistent_kernels(facts: &Facts) -> bool {
    decode::fits(facts)
}

/// Kernels of whole passes.
pub struct PersistentKernels {
    /// A token of one sequence.
    decode: Decode,
    /// A token of each of several sequences, where there are to be several.
    batch: Option<DecodeBatch>,
    /// The memory that their logits are written to.
    logits: HostLogits,
}

impl PersistentKernels {
    /// `None` where the device or the weights do not have them: those, and the calibrations of all layers, have to be parts
    /// of one buffer.
    pub fn new(
        model: &Model,
        calibration: &[Buffer],
        (types, slots): (KvTypes, usize),
        scratch: &Scratch,
    ) -> Result<Option<Self>> {
        let device = &model.device;
        if !decode::fits(device.facts()) {
            return Ok(None);
        }
        let Some(layout) = WeightLayout::find(&model.matrices, calibration) else { return Ok(None) };
        let batches = scratch.at_once > 1 && decode_batch::fits(device.facts());
        let batch = batches.then(|| DecodeBatch::new(device, &layout, types, scratch)).transpose()?;
        let decode = Decode::new(device, layout, types, slots)?;
        Ok(Some(Self { decode, batch, logits: HostLogits::default() }))
    }

    /// The programs of the kernels.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        [self.decode.program()].into_iter().chain(self.batch.as_ref().map(DecodeBatch::program))
    }

    /// Makes room for attention over as many slots as `scratch` has it for. What is bound for fewer is to be bound anew.
    pub fn reserve(&mut self, device: &Device, scratch: &Scratch) -> Result<()> {
        self.decode.reserve(device, scratch.slots)?;
        self.batch.as_mut().map_or(Ok(()), |batch| batch.reserve(scratch))
    }

    /// Binds the kernel of one token to a cache; `None` where its rows are no parts of one buffer.
    pub fn bind(&self, scratch: &Scratch, rows: &DeviceKv) -> Result<Option<BoundDecode>> {
        self.decode.bind(scratch, rows)
    }

    /// Memory for the logits of a token, unless `now` is that; see [`row`](crate::model::device::Device::row).
    pub fn lend_row(&mut self, device: &Device, now: &[f32]) -> Option<Row> {
        self.logits.lend(device, now)
    }

    /// Number of `runs` runs of one token that are computed at once, of `most` at most.
    pub fn runs_at_once(&self, runs: usize, most: usize) -> usize {
        match &self.batch {
            Some(_) if runs > MOST_ONE_BY_ONE_OF_BATCH => most,
            None if runs > MOST_ONE_BY_ONE => runs,
            _ => 1,
        }
    }

    /// True where one launch computes a pass of `tokens` tokens, all of which are single ones of their runs.
    pub fn takes(&self, tokens: usize, first: &mut OpenClCache) -> bool {
        if tokens == 1 { first.bound_decode().is_some() } else { self.batch.is_some() }
    }

    /// Sets what the kernel of a single token finds in the header of the state, before [`Scratch::embed`] sends it.
    pub fn set_header(&self, scratch: &mut Scratch, cache: &mut OpenClCache) {
        if let Some(bound) = cache.bound_decode() {
            self.decode.set_header(scratch, bound);
        }
    }

    /// Computes a pass that [`PersistentKernels::takes`], whose embeddings are sent, and brings its logits; `false` where
    /// caches are not of that kind.
    pub fn run(&mut self, device: &Device, scratch: &Scratch, runs: &mut [Run<'_>]) -> Result<bool> {
        let Self { decode, batch, logits } = self;
        match batch.as_mut().filter(|_| runs.len() > 1) {
            None => {
                let to = logits.buffer(device, 0, &runs[0].logits)?;
                let bound = OpenClCache::of(runs[0].cache).bound_decode();
                decode.run(device, bound.expect("the caller has looked"), &to)?;
            }
            Some(batch) => {
                let sequences = runs.iter_mut().enumerate().map(|(i, run)| {
                    let to = logits.buffer(device, i, &run.logits);
                    let cache = OpenClCache::of(run.cache);
                    (&cache.rows, cache.len(), to)
                });
                if !batch.run(device, scratch, sequences)? {
                    return Ok(false);
                }
            }
        }
        match runs {
            [Run { logits: Logits::None, .. }] => device.flush()?,
            _ => device.finish()?,
        }
        runs.iter_mut().enumerate().try_for_each(|(i, run)| logits.bring(i, &mut run.logits))?;
        Ok(true)
    }
}
