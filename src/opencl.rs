//! OpenCL device: runs the same steps as the CPU in the same order.
//!
//! Each launch costs the host several microseconds. A pass of one token therefore uses five launches for the nine steps
//! of a layer: every work-group repeats the cheap steps instead of leaving them to a launch of their own
//! (`kernels/gemv.cl`). On NVIDIA GPUs one launch computes the whole token, or one token of each of several sequences
//! ([`nvidia`]), with the same bits. The host never waits within a token: it sends the embedding row and the RoPE
//! angles, and reads the logits.
//!
//! Start reading at [`pass`]. Its steps are launches from [`launches`]; [`kernels`] builds them from `kernels/*.cl`,
//! with sizes from [`shapes`] and implementations from [`variants`]. [`kv`] and [`cache`] hold the KV cache of a
//! sequence, [`weights`] the matrices, [`scratch`] the buffers of a pass.
//!
//! OpenCL is opened at run time and is not needed to build or start the program. [`load`] finds a library and a
//! platform, [`device`] selects a device and owns its queue, [`buffer`] is device memory, [`program`] compiles and
//! launches kernels, [`program_cache`] keeps compiled programs on disk. [`ffi`] is the ABI; [`failure`] lists the
//! possible errors.
//!
//! # Bit-exact results
//!
//! Kernels round as the CPU does and add in the same order, so the logits are bit-identical. This is tested on PoCL
//! (every test), on Intel's CPU runtime and Mesa's rusticl (some tests), and on an NVIDIA H200 (300 tokens with every
//! KV type). The first time that a driver compiles the kernels, [`selftest`] compares whole forward passes with the
//! CPU's. If they differ, the baseline kernels are used ([`KernelSet`]), and if those differ too, the CPU; either way
//! one line is printed. The verdict is stored with the programs in `~/.cache/antigravity/opencl`, or beside the program
//! on a phone. The single-launch kernel must match the CPU bit for bit, otherwise it is not used: speed is its only
//! purpose.
//!
//! Eight [`variants`] of kernels multiply with quantised matrices: with integer dot products, with integers held as
//! floats, with whole rows per work-item, through subgroups or images. All give the same bits, so [`tune`] times them
//! on first use, for one token and for many, and stores the fastest with the programs. A variant that gives other
//! results is left out.
//!
//! All of this takes seconds, once. If kernels must be compiled first, `generate` and `chat` start on the CPU, a thread
//! prepares the device, and the text continues there with the same bits (`EngineOptions::wait_for_gpu`). If the text
//! ends first, a process in the background compiles the rest (`src/cli/background_compile.rs`). With `auto` both are
//! timed first, and the text waits for that.
//!
//! Matrices in GGUF block formats are used as stored, in any mixture over the layers. A model runs on the CPU instead
//! if gate and up of a layer have different formats, or if only some of q, k and v are quantised. The single-launch
//! kernels, and prefill on NVIDIA's tensor cores, support Q4_0 only.
//!
//! # A device that fails or hangs
//!
//! After its first failure a device counts as lost: no further call is made, and nothing known to its driver is freed,
//! because queued work may still run ([`Device::is_lost`]). Calls that wait for the device are made on a separate
//! thread ([`watchdog`]). A pass that takes twenty times as long as the slowest similar pass so far, and at least five
//! seconds, also loses the device. The timeout is ten seconds while loading, and thirty seconds (more for large models)
//! before any such pass was measured. The text then continues on the CPU.
//!
//! # Measurements
//!
//! `xtask/MEASUREMENTS.md` has the results of an NVIDIA H200 with the shape of Llama-3.2-1B. Measured once:
//!
//! - Compiling takes 6.9 to 9.0 s the first time, and 0.02 s from the program cache. On PoCL with two cores of an EPYC:
//!   11 to 21 s, then 0.05 to 0.21 s, which is under 2 %.
//! - Moving 100 slots (3.3 MB) in a hybrid session with an f16 cache takes 6 to 8 ms. A text of 600 tokens matches the
//!   CPU's with three moves, with `opencl` alone, and with `sliding` and `h2o`. On PoCL with `--zero-copy`, where
//!   memory is shared, a move takes 0.1 to 1.7 ms. Peak memory is then 914 MiB, against 800 on the CPU alone: 5 % more,
//!   66 MiB of scratch and staging buffers, and 8 MiB of PoCL itself.
//! - Evicting 37 of 337 slots (f16 cache) takes 13 ms there, and 1.7 ms on the CPU. `h2o` makes decode over 600 slots 9
//!   % slower; the cost of `snapkv` was too small to measure.
//! - Variants on Intel's CPU runtime, two cores of an EPYC: prefill of the story model is 2.7 to 5.3 times as fast as
//!   with tiles, decode 3.0 to 5.0 times (f16 cache, both programs in turn). The matrices of one layer of the 1B shape
//!   alone gain 7.5 times (64 tokens) and 7.9 times (one token). `floats` was chosen for many tokens and `rows` for
//!   one; integer dot products are emulated there and 7 to 12 times slower than plain products. On PoCL `floats-four`
//!   is 6 to 18 times as fast as tiles with 16 tokens; one token gains nothing. The first run, with timing and all
//!   compilation, took 1.7 s on Intel's runtime.
//! - No phone GPU was measured.
//!
//! ```text
//! cargo xtask synth llama3.2-1b && export ANTIGRAVITY_MODEL=$PWD/target/synth/llama3.2-1b
//! cargo run --release -- bench -b opencl --gpu-attn -p 128,512 -n 128 -d 0,4096 --kv-type f16,q4
//! ```
//!
//! `bench` runs the self-test like every first use. It prints launches and host time per token, build times, and the
//! device's read bandwidth. To measure on another machine, copy `target/release/antigravity` and the packed model
//! there.
//!
//! # Environment variables
//!
//! | variable | |
//! |---|---|
//! | `ANTIGRAVITY_OPENCL_LIB` | the only library to try |
//! | `ANTIGRAVITY_OPENCL_CACHE` | directory for compiled programs, or `off` |
//! | `ANTIGRAVITY_OPENCL_CPU=1` | allows a CPU device to be selected without naming it |
//! | `ANTIGRAVITY_OPENCL_LIMIT` | minimum timeout of a driver call in seconds (default 5) |
//! | `ANTIGRAVITY_OPENCL_VARIANT` | kernel variant of all matrix products, without tuning: a name from
//! [`variants::VARIANTS`] |

/// Source of a file in `kernels/`, with comments stripped by `build.rs`.
macro_rules! kernel_text {
    ($name:literal) => {
        include_str!(concat!(env!("OUT_DIR"), "/kernels/", $name, ".cl"))
    };
}

mod batched_attention;
mod by_layer;
mod cache;
mod compaction;
mod defines;
mod host_attention;
mod kernel_name;
mod kernels;
mod kv;
mod launches;
mod logits;
mod mass;
#[cfg(all(feature = "nvidia", target_os = "linux", target_arch = "x86_64"))]
mod nvidia;
#[cfg(not(all(feature = "nvidia", target_os = "linux", target_arch = "x86_64")))]
#[path = "opencl/nvidia/absent.rs"]
mod nvidia;
mod pass;
mod pass_timeout;
mod run_span;
mod scratch;
pub mod selftest;
mod shapes;
mod step_launch;
mod storage;
mod threads;
pub mod tune;
pub mod variants;
mod weights;

pub use opencl_runtime::*;

use crate::dims::{DIM, LAST_WRITING_LAYER, LAYERS, is_recurrent};
use crate::model::device as seam;
use crate::model::rope::Frequencies;
use crate::model::trace::{Steps, Trace};
use buffer::ReadbackBuffer;
use cache::OpenClCache;
use compaction::Compactor;
pub use compaction::slot_list_bytes;
pub use defines::QKV;
use files::Result;
use host_attention::HostAttention;
pub use kernels::KernelSet;
use kernels::Kernels;
use kv::{DeviceKv, KvLocation};
use launches::{AttendOn, Binder, Launches};
use logits::{output_rows, output_tokens};
use numeric::kv::KvTypes;
use nvidia::PersistentKernels;
use pass::Pass;
use pass_timeout::PassTimeout;
use scratch::Scratch;
pub use scratch::{bytes as scratch_bytes, logits_bytes, parts_bytes};
use seam::{AttentionFn, CancelToken, ExpertsFn, Logits, Run};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;
pub use storage::MatrixStorage;

pub use threads::{facts_of, open_device};
pub use weights::{DeviceLayers, Matrices, Model, calibration_bytes};

/// Settings of an [`OpenClDevice`].
pub struct OpenClOptions {
    /// Element types of caches.
    pub kv_types: KvTypes,
    /// Slots of the longest cache; buffers grow for longer ones.
    pub slots: usize,
    /// Maximum tokens per pass; lowered if the device's buffers are too small.
    pub max_tokens: usize,
    /// Maximum number of sequences that decode together.
    pub sequences: usize,
    /// Tokens of each sequence in such a pass: one, plus those of a draft.
    pub tokens_per_sequence: usize,
    /// Attention on the host, which then holds the KV cache; `None` if the device computes it.
    pub attention: Option<AttentionFn>,
    /// Experts on the host, for a model that [leaves them](Model::leaves_experts) to it.
    pub experts: Option<ExpertsFn>,
    /// Memory of the caches: `HostVisible` to share them with the CPU (needs unified memory), otherwise the device's
    /// own. Ignored when attention is computed on the host.
    pub cache_place: Place,
    /// True if slots may be evicted.
    pub can_evict: bool,
    /// Kernels to use.
    pub kernels: KernelSet,
}

/// Kind of device memory in which weights and caches should be allocated.
pub fn preferred_place(device: &Device) -> Place {
    if nvidia::has_persistent_kernels(device.info()) { Place::SharedBuffer } else { Place::Device }
}

/// A model on an OpenCL device: everything a pass needs except the caches.
pub struct OpenClDevice {
    model: Arc<Model>,
    kernels: Kernels,
    kv_types: KvTypes,
    /// Number of rows that sliding-window layers keep.
    ring: seam::Ring,
    /// Calibration of keys and queries, and sinks, by layer; empty if the KV types need none and there are no sinks.
    calibration: Vec<buffer::Buffer>,
    scratch: Scratch,
    launches: Launches,
    /// Kernels of whole passes, if the device has them.
    persistent: Option<PersistentKernels>,
    /// Page-locked memory for reading logits; `None` if memory is unified.
    readback: Option<ReadbackBuffer>,
    host: Option<HostAttention>,
    experts: Option<ExpertsFn>,
    /// Location of the caches.
    kv_location: KvLocation,
    /// Evicts slots in device memory.
    compactor: Option<Arc<Mutex<Compactor>>>,
    shares_rows: bool,
    /// Radians per position of each rotated pair.
    frequencies: Frequencies,
    trace: Option<Trace>,
    timeout: PassTimeout,
}

impl OpenClDevice {
    /// Builds the kernels and allocates the buffers of a pass.
    ///
    /// # Errors
    ///
    /// `Memory` if there is no room for them, `Device` if the device cannot build them.
    pub fn new(model: Arc<Model>, options: OpenClOptions) -> Result<Self> {
        let OpenClOptions { kv_types, slots, max_tokens, sequences, attention, experts, can_evict, .. } =
            options;
        let (set, rows) = (options.kernels, options.cache_place);
        let (device, matrices) = (&model.device, &model.matrices);
        let unified = device.info().unified_memory;
        let kernels = Kernels::new(device, kv_types, set, model.kernel_variants()?)?;
        let mut kernels = kernels.with_few(sequences.saturating_mul(options.tokens_per_sequence));
        // Another device may run longer passes on the same cache.
        let ring = seam::Ring::new(max_tokens.max(1));
        let max_tokens = if kernels.device_shapes().supports_batches() { max_tokens } else { 1 };
        let at_once = if attention.is_some() || set == KernelSet::Baseline { 1 } else { sequences };
        let scratch = Scratch::new(device, max_tokens, (slots, at_once))?;
        let attend = if attention.is_some() { AttendOn::Host } else { AttendOn::Device };
        let host = attention.map(|compute| HostAttention::new(compute, kv_types, scratch.max_tokens));
        let calibration = if calibration_bytes(kv_types) > 0 {
            weights::calibration(device, &model.weights, preferred_place(device))?
        } else {
            Vec::new()
        };
        let persistent = match (attend, set) {
            // They compute all layers in one launch.
            (AttendOn::Device, KernelSet::Tuned) if model.layer_range() == (0..LAYERS) => {
                PersistentKernels::new(&model, &calibration, (kv_types, slots), &scratch)?
            }
            _ => None,
        };
        // Compiling takes seconds: skip what the single launch replaces, unless single tokens are observed.
        let one = persistent.is_none() || can_evict || scratch.max_tokens == 1;
        let mut binder = Binder {
            kernels: &mut kernels,
            matrices,
            calibration: &calibration,
            scratch: &scratch,
            attend,
            needs_one: one,
        };
        let evicts = can_evict && attend == AttendOn::Device;
        let launches = binder.bind_launches(usize::from(evicts))?;
        let compaction = evicts.then(|| binder.bind_compaction()).transpose()?;
        let compactor = compaction.map(|launch| Compactor::new(device, launch));
        let readback = (!unified).then(|| ReadbackBuffer::new(device, scratch.logits.len())).transpose()?;
        Ok(Self {
            kernels,
            kv_types,
            ring,
            calibration,
            scratch,
            launches,
            persistent,
            readback,
            kv_location: if host.is_some() { KvLocation::Host } else { KvLocation::Device(rows) },
            compactor: compactor.map(|compactor| Arc::new(Mutex::new(compactor))),
            shares_rows: host.is_none() && rows == Place::HostVisible && unified,
            host,
            experts,
            frequencies: Frequencies::new(),
            trace: None,
            timeout: PassTimeout::default(),
            model,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.model.device
    }

    /// The layers that it computes.
    pub fn layer_range(&self) -> Range<usize> {
        self.model.layer_range()
    }

    /// True if the CPU can access the KV cache, so that both can compute on it in turn.
    pub fn shares_rows(&self) -> bool {
        self.shares_rows
    }

    /// True if the logits must match the CPU bit for bit: kernels of whole passes exist only for speed.
    pub fn must_be_exact(&self) -> bool {
        self.persistent.is_some()
    }

    /// Result of an earlier self-test of these kernels, if there was one.
    pub fn self_test_verdict(&self) -> Option<Verdict> {
        self.kernels.combined_verdict(self.persistent.iter().flat_map(PersistentKernels::programs))
    }

    /// Stores the result of the self-test permanently.
    pub fn set_verdict(&self, verdict: Verdict) {
        self.kernels.set_verdict(verdict, self.persistent.iter().flat_map(PersistentKernels::programs));
    }

    fn attend_on(&self) -> AttendOn {
        if self.host.is_some() { AttendOn::Host } else { AttendOn::Device }
    }

    /// Makes room for attention over `slots` slots, and rebinds the launches if buffers have moved.
    fn reserve_slots(&mut self, slots: usize) -> Result<()> {
        let attend = self.attend_on();
        let Self { model, kernels, calibration, scratch, persistent, launches, .. } = self;
        scratch.reserve_slots(&model.device, slots)?;
        if let Some(persistent) = persistent {
            persistent.reserve(&model.device, scratch)?;
        }
        if launches.slots != scratch.slots {
            let (matrices, one) = (&model.matrices, launches.has_one());
            *launches =
                Binder { kernels, matrices, calibration, scratch, attend, needs_one: one }.bind_uncached()?;
        }
        Ok(())
    }

    /// Moves a run's cache to the device and binds its launches, unless already done.
    fn bind_cache(&mut self, run: &mut Run<'_>) -> Result<()> {
        let extent = run.cache.extent();
        assert!(!run.tokens.is_empty() && extent.has_room(run.pos, run.tokens.len()));
        self.reserve_slots(extent.slots.max(extent.ring))?;
        let attend = self.attend_on();
        let Self { model, kernels, calibration, scratch, persistent, launches, .. } = self;
        let cache = OpenClCache::downcast(run.cache);
        cache.take_back()?;
        assert!(run.observed_tokens == 0 || cache.mass.is_some(), "a cache that is observed has mass");
        if cache.launches.as_ref().is_some_and(|bound| bound.slots == scratch.slots) {
            return Ok(());
        }
        let mass = cache.mass.as_ref();
        if mass.is_some() && attend == AttendOn::Device {
            scratch.reserve_softmax(&model.device)?;
        }
        let (matrices, one) = (&model.matrices, launches.has_one());
        let mut binder = Binder { kernels, matrices, calibration, scratch, attend, needs_one: one };
        let mut bound = binder.bind_cache(&cache.rows, mass, cache.state.as_ref())?;
        if let Some(persistent) = persistent {
            bound.decode = persistent.bind(scratch, &cache.rows)?;
        }
        cache.launches = Some(bound);
        Ok(())
    }

    /// True for several runs of one token each that are neither traced nor observed.
    fn is_batched_decode(&self, runs: &[Run<'_>]) -> bool {
        let single = |run: &Run<'_>| run.tokens.len() == 1 && run.observed_tokens == 0;
        runs.len() > 1 && self.trace.is_none() && runs.iter().all(single)
    }

    /// Number of runs computed together.
    fn runs_at_once(&self, runs: &[Run<'_>]) -> usize {
        match &self.persistent {
            Some(kernels) if self.is_batched_decode(runs) => {
                kernels.runs_at_once(runs.len(), self.scratch.at_once)
            }
            _ => runs.len(),
        }
    }

    /// Creates the pass of some runs and sets the state header for it.
    fn create_pass<'a>(&'a mut self, runs: &mut [Run<'_>], cancel: Option<&'a CancelToken>) -> Pass<'a> {
        let n: usize = runs.iter().map(|run| run.tokens.len()).sum();
        let observed = runs.iter().any(|run| run.observed_tokens > 0);
        let (several, timed) = (runs.iter().any(|run| run.tokens.len() > 1), self.trace.is_some());
        let (read, decodes) = (output_tokens(runs).count(), self.is_batched_decode(runs));
        // If only a few tokens need logits, they are moved to the front, before the last layer's attention. Traced or
        // observed passes need all tokens, and so do those whose final states are wanted of more.
        let states_fit = runs.iter().all(|run| run.hidden.len() <= DIM * output_rows(run));
        let narrowed = Some(read).filter(|_| {
            self.model.layer_range().end == LAYERS
                && self.model.layer_range().contains(&LAST_WRITING_LAYER)
                && !is_recurrent(LAST_WRITING_LAYER)
                && read < n
                && n > 1
                && read <= self.scratch.logit_rows
                && states_fit
                && !timed
                && !observed
        });
        let row = if narrowed.is_some() { 0 } else { output_tokens(runs).next().unwrap_or(0) };
        let cache = OpenClCache::downcast(runs[0].cache);
        self.scratch.set_token(cache.len(), row);
        let alone = n == 1 && !timed && !observed;
        let whole = alone || (decodes && read == n);
        let persistent = self.persistent.as_mut().filter(|kernels| whole && kernels.takes(n, cache));
        if let Some(kernels) = persistent.as_ref().filter(|_| n == 1) {
            kernels.set_header(&mut self.scratch, cache);
        }
        Pass {
            model: &self.model,
            launches: &mut self.launches,
            persistent,
            scratch: &mut self.scratch,
            readback: self.readback.as_mut(),
            host: self.host.as_mut(),
            experts: self.experts.as_mut(),
            // Single tokens finish soon; and the mass collected by half a pass could not be undone.
            cancel: cancel.filter(|_| several && !observed),
            frequencies: &self.frequencies,
            n,
            kept_tokens: narrowed,
            steps: Steps::start_pass(self.trace.as_mut(), n),
        }
    }
}

impl seam::Device for OpenClDevice {
    fn name(&self) -> String {
        let attention = if self.host.is_some() { "CPU" } else { "GPU" };
        let experts = if self.experts.is_some() { ", experts on the CPU" } else { "" };
        format!("opencl ({}, attention on the {attention}{experts})", self.model.device.info().name)
    }

    fn max_tokens(&self) -> usize {
        self.scratch.max_tokens
    }

    fn logits_buffer(&mut self, now: &[f32]) -> Option<seam::LogitsBuffer> {
        self.persistent.as_mut()?.lend_row(&self.model.device, now)
    }

    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn seam::KvCache>> {
        self.reserve_slots(slots)?;
        let rows = DeviceKv::new(
            &self.model.device,
            self.kv_types,
            (slots, self.ring, self.model.layer_range()),
            self.kv_location,
        )?;
        let (device, rows) = (&self.model.device, (rows, self.model.layer_range()));
        Ok(Box::new(OpenClCache::new(device, rows, self.attend_on(), self.compactor.clone())?))
    }

    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()> {
        let n: usize = runs.iter().map(|run| run.tokens.len()).sum();
        assert!(n > 0 && n <= self.scratch.max_tokens);
        let (began, limit) = (Instant::now(), self.timeout.limit_for(n));
        self.device().set_timeout(limit, None);
        runs.iter_mut().try_for_each(|run| self.bind_cache(run))?;
        // The mass collected by half a pass could not be undone, and a single launch writes to memory that the caller
        // may read.
        let one_launch = self.persistent.is_some() && runs.iter().all(|run| run.tokens.len() == 1);
        let stop = cancel.filter(|_| !one_launch && runs.iter().all(|run| run.observed_tokens == 0));
        self.device().set_timeout(limit, stop.map(CancelToken::atomic_flag));
        let at_once = self.runs_at_once(runs);
        let computed = runs.chunks_mut(at_once).try_for_each(|runs| self.create_pass(runs, cancel).run(runs));
        self.device().set_timeout(limit, None);
        computed?;
        // The host waited for its end.
        if runs.iter().any(|run| !matches!(run.logits, Logits::None)) || self.model.layer_range().end < LAYERS
        {
            self.timeout.record_time(n, began.elapsed());
        }
        for run in runs {
            OpenClCache::downcast(run.cache).advance_len(run.tokens.len(), run.observed_tokens > 0);
        }
        Ok(())
    }

    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        std::mem::replace(&mut self.trace, trace)
    }
}
