//! Persistent kernels for NVIDIA GPUs: a whole pass in one launch, for a token of one sequence ([`decode`]) or of each
//! of several ([`decode_batch`]), and products of many tokens on tensor cores ([`gemm`]).
//!
//! The rest of [`crate::opencl`] uses only this module. On other platforms than x86-64 Linux, `nvidia/absent.rs` takes
//! its place.

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
use crate::model::device::{Logits, LogitsBuffer, Run};
pub use decode::BoundDecode;
use decode::Decode;
use decode_batch::DecodeBatch;
pub use gemm::TensorCores;
use host_logits::HostLogits;
use layout::WeightLayout;
use numeric::kv::KvTypes;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Program;

/// Maximum runs of one token each that are computed one by one; for more, launches for all steps of all runs are
/// faster.
const MOST_ONE_BY_ONE: usize = 3;
const _: () = assert!(MOST_ONE_BY_ONE <= OTHERS, "the self-test would not test the batch");
/// Lower maximum if one launch can compute all runs.
const MOST_ONE_BY_ONE_OF_BATCH: usize = 2;

const HEADER: &str = kernel_text!("nvidia/header");
const ATTEND: &str = kernel_text!("nvidia/attend");
const DECODE: &str = kernel_text!("nvidia/decode");
const DECODE_BATCH: &str = kernel_text!("nvidia/decode_batch");
const GEMM: &str = kernel_text!("nvidia/gemm");
const SUBGROUP_BARRIER: &str = kernel_text!("nvidia/subgroup_barrier");

/// True if the device may compute a token in one launch. Its weights and caches should then each be in one buffer.
pub fn has_persistent_kernels(facts: &DeviceInfo) -> bool {
    decode::supports_device(facts)
}

/// Kernels that compute whole passes.
pub struct PersistentKernels {
    /// For a token of one sequence.
    decode: Decode,
    /// For a token of each of several sequences, if several are expected.
    batch: Option<DecodeBatch>,
    /// Memory for their logits.
    logits: HostLogits,
}

impl PersistentKernels {
    /// Creates the kernels; `None` if the device does not support them, for a cache of five or six bits, or if the
    /// weights, or the calibrations of all layers, are not parts of one buffer.
    pub fn new(
        model: &Model,
        calibration: &[Buffer],
        (types, slots): (KvTypes, usize),
        scratch: &Scratch,
    ) -> Result<Option<Self>> {
        let device = &model.device;
        let has_high_bits = types.k.high_bits() + types.v.high_bits() > 0;
        if has_high_bits || !decode::supports_device(device.info()) {
            return Ok(None);
        }
        let Some(layout) = WeightLayout::find_layout(&model.matrices, calibration) else { return Ok(None) };
        let batches = scratch.at_once > 1 && decode_batch::supports_device(device.info());
        let batch = batches.then(|| DecodeBatch::new(device, &layout, types, scratch)).transpose()?;
        let decode = Decode::new(device, layout, types, slots)?;
        Ok(Some(Self { decode, batch, logits: HostLogits::default() }))
    }

    /// Programs of the kernels.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        [self.decode.program()].into_iter().chain(self.batch.as_ref().map(DecodeBatch::program))
    }

    /// Makes room for attention over `scratch.slots` slots. Launches bound for fewer must be bound again.
    pub fn reserve(&mut self, device: &Device, scratch: &Scratch) -> Result<()> {
        self.decode.reserve(device, scratch.slots)?;
        self.batch.as_mut().map_or(Ok(()), |batch| batch.reserve(scratch))
    }

    /// Binds the single-token kernel to a cache; `None` if its rows are not parts of one buffer.
    pub fn bind(&self, scratch: &Scratch, rows: &DeviceKv) -> Result<Option<BoundDecode>> {
        self.decode.bind(scratch, rows)
    }

    /// Memory for the logits of a token, unless `now` is such memory; see
    /// [`row`](crate::model::device::Device::logits_buffer).
    pub fn lend_row(&mut self, device: &Device, now: &[f32]) -> Option<LogitsBuffer> {
        self.logits.lend_row(device, now)
    }

    /// Number of runs of one token each to compute at once, at most `most`, if there are `runs` of them.
    pub fn runs_at_once(&self, runs: usize, most: usize) -> usize {
        match &self.batch {
            Some(_) if runs > MOST_ONE_BY_ONE_OF_BATCH => most,
            None if runs > MOST_ONE_BY_ONE => runs,
            _ => 1,
        }
    }

    /// True if one launch can compute a pass of `tokens` runs with one token each.
    pub fn takes(&self, tokens: usize, first: &mut OpenClCache) -> bool {
        if tokens == 1 { first.bound_decode().is_some() } else { self.batch.is_some() }
    }

    /// Sets the header for the single-token kernel, before [`Scratch::upload_tokens`] sends it.
    pub fn set_header(&self, scratch: &mut Scratch, cache: &mut OpenClCache) {
        if let Some(bound) = cache.bound_decode() {
            self.decode.set_header(scratch, bound);
        }
    }

    /// Computes a pass that [`PersistentKernels::takes`], after its embeddings were sent, and copies its logits;
    /// `false` if the caches are unsuitable.
    pub fn run(&mut self, device: &Device, scratch: &Scratch, runs: &mut [Run<'_>]) -> Result<bool> {
        let Self { decode, batch, logits } = self;
        match batch.as_mut().filter(|_| runs.len() > 1) {
            None => {
                let to = logits.output_buffer(device, 0, &runs[0].logits)?;
                let bound = OpenClCache::downcast(runs[0].cache).bound_decode();
                decode.run(device, bound.expect("the caller has looked"), &to)?;
            }
            Some(batch) => {
                let sequences = runs.iter_mut().enumerate().map(|(i, run)| {
                    let to = logits.output_buffer(device, i, &run.logits);
                    let cache = OpenClCache::downcast(run.cache);
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
        runs.iter_mut().enumerate().try_for_each(|(i, run)| logits.copy_logits(i, &mut run.logits))?;
        Ok(true)
    }
}
