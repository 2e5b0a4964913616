//! The OpenCL device: the whole forward pass, the same steps in the same order as the CPU's.
//!
//! A launch costs the host several microseconds, so for one token five launches cover a layer's nine steps: what is
//! cheap enough is computed again by every work-group instead of being a step of its own (`kernels/gemv.cl`). On NVIDIA
//! one launch covers the whole token, or one of each of several sequences ([`nvidia`]), with the same bits. Nothing waits
//! for the device inside a token: the embedding row and the angles go in, the logits come out.
//!
//! A pass is read from [`pass`] on: its steps are launches of [`launches`], whose kernels [`kernels`] builds out of
//! `kernels/*.cl`, as [`shapes`] and [`variants`] say. [`kv`] and [`cache`] are the rows of a sequence, [`weights`] the
//! model's matrices, [`scratch`] the buffers of a pass.
//!
//! OpenCL is opened at run time: nothing of it is needed to build or to start this program. [`load`] finds a library
//! and a platform, [`device`] chooses a device and holds its queue, [`buffer`] is memory there, [`program`] what runs
//! there, [`program_cache`] what is kept of it on disk. [`ffi`] is the ABI and [`failure`] what can go wrong.
//!
//! # The CPU's bits
//!
//! Kernels round as the CPU does and add in its order, so logits are the same bits: on PoCL in every test, on Intel's
//! runtime for CPUs and Mesa's rusticl in some, and on an NVIDIA H200 for 300 tokens with every type of cache. [`selftest`]
//! compares whole forward passes with the CPU's the first time a driver compiles the kernels. Where they differ, the
//! baseline's kernels take their place ([`KernelSet`]), and then the CPU, and one line says so. The verdict is kept with
//! the programs, in `~/.cache/antigravity/opencl`, or beside the program on a phone. A token in one launch has to be the
//! CPU's to the bit there, since nothing but its speed speaks for it.
//!
//! Products with quantised matrices are computed by one of eight [`variants`]: with integer dot products, with integers
//! held as floats, by whole rows, through subgroups or images. All have the same bits, so [`tune`] times them at the first
//! use, for one token and for many, and keeps the fastest with the programs. One that computes something else is left out.
//!
//! All that takes seconds, once. Where kernels are still to be compiled, `generate` and `chat` begin on the CPU, a thread
//! makes the device ready, and the text goes on there with the same bits (`EngineOptions::wait_for_gpu`); for `auto` both
//! are timed before, which the text waits for.
//!
//! Matrices in GGUF's block formats are multiplied with as they are stored, in any mixture over the layers. The CPU
//! takes a layer only where gate and up differ, or where some of q, k and v are quantised and others are not. The
//! tokens in one launch, and prefill on NVIDIA's tensor cores, are for Q4_0 alone.
//!
//! # A device that fails or hangs
//!
//! From its first failure on a device counts as lost: no call is made any more, and nothing that its driver knows of is
//! freed, since what was queued may still run ([`Device::is_lost`]). A call that waits for the device is made by a
//! thread of its own ([`waiter`]). If it takes twenty times as long as the slowest such pass before, and five seconds at
//! least, the device is lost too. While loading it has ten seconds, before any such pass thirty, and more for large
//! models. The text goes on on the CPU.
//!
//! # Measurements
//!
//! What an NVIDIA H200 does with the shape of Llama-3.2-1B is in `xtask/README.md`. Measured once:
//!
//! - Programs take 6.9 to 9.0 s to compile the first time and 0.02 s from the program cache. On PoCL with two cores of
//!   an EPYC they take 11 to 21 s, and 0.05 to 0.21 s afterwards, which is under 2 %.
//! - In a hybrid session with an f16 cache, moving 100 slots (3.3 MB) takes 6 to 8 ms. A text of 600 tokens is the
//!   CPU's with three moves, with `opencl` alone, and with `sliding` and `h2o`. On PoCL with `--zero-copy`, where
//!   memory is one, a move takes 0.1 to 1.7 ms. The peak is then 914 MiB where the CPU alone takes 800: 5 % more, 66
//!   MiB of scratch and staging, and 8 MiB of PoCL itself.
//! - An eviction of 37 of 337 slots (f16 cache) takes 13 ms there, and 1.7 ms on the CPU beside it. `h2o` makes decode
//!   over 600 slots 9 % slower; `snapkv` costs nothing that could be measured.
//! - Variants on Intel's runtime for CPUs, with two cores of an EPYC: the story model's prefill is 2.7 to 5.3
//!   times as fast as with tiles, its decode 3.0 to 5.0 times (f16 cache, the program before and this one in turn). Of the
//!   1B shape's matrices of a layer alone it is 7.5 times (64 tokens) and 7.9 times (one). Chosen were `floats` for
//!   many tokens and `rows` for one; integer dot products are emulated there, 7 to 12 times slower than plain products.
//!   On PoCL `floats-four` multiplies 6 to 18 times as fast as tiles with 16 tokens, and one token gains nothing. The first
//!   run, with timing and all programs compiled, took 1.7 s on Intel's runtime.
//! - No phone's GPU was measured.
//!
//! ```text
//! cargo xtask synth llama3.2-1b && export ANTIGRAVITY_MODEL=$PWD/target/synth/llama3.2-1b
//! cargo run --release -- bench -b opencl --gpu-attn -p 128,512 -n 128 -d 0,4096 --kv-type f16,q4
//! ```
//!
//! `bench` checks the kernels as every first use does. It prints launches and host time a token, build times, and the
//! bandwidth that the device reads with. To measure on another machine, copy `target/release/antigravity` and the
//! packed model there.
//!
//! # Environment variables
//!
//! | variable | |
//! |---|---|
//! | `ANTIGRAVITY_OPENCL_LIB` | the only library to try |
//! | `ANTIGRAVITY_OPENCL_CACHE` | another directory for compiled programs, or `off` |
//! | `ANTIGRAVITY_OPENCL_CPU=1` | a CPU may be taken without being named |
//! | `ANTIGRAVITY_OPENCL_LIMIT` | seconds that a call to the driver may take at least, 5 without it |
//! | `ANTIGRAVITY_OPENCL_VARIANT` | the variant of products, instead of the fastest: a name of [`variants::VARIANTS`] |

/// The text of a file of `kernels/`, as `build.rs` leaves it.
macro_rules! kernel_text {
    ($name:literal) => {
        include_str!(concat!(env!("OUT_DIR"), "/kernels/", $name, ".cl"))
    };
}

mod batched_attention;
mod cache;
mod compaction;
mod defines;
mod host_attention;
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

use crate::model::device as seam;
use crate::model::rope::Frequencies;
use crate::model::trace::{Steps, Trace};
use buffer::Landing;
use cache::OpenClCache;
use compaction::Compactor;
pub use compaction::list_bytes;
pub use defines::QKV;
use files::Result;
use host_attention::HostAttention;
pub use kernels::KernelSet;
use kernels::Kernels;
use kv::{DeviceKv, KvLocation};
use launches::{AttendOn, Binder, Launches};
use logits::output_tokens;
use numeric::kv::KvTypes;
use nvidia::PersistentKernels;
use pass::Pass;
use pass_timeout::PassTimeout;
use scratch::Scratch;
pub use scratch::{bytes as scratch_bytes, logits_bytes, parts_bytes};
use seam::{Attention, CancelToken, Logits, Run};
use std::sync::{Arc, Mutex};
use std::time::Instant;
pub use threads::{facts_of, open};
pub use weights::{Matrices, Model};

/// Settings of an [`OpenClDevice`].
pub struct OpenClOptions {
    /// Element types of caches.
    pub kv_types: KvTypes,
    /// Slots of the longest cache; buffers grow for longer ones.
    pub slots: usize,
    /// Most tokens of one pass; fewer where the device's buffers are too small.
    pub max_tokens: usize,
    /// Sequences that decode together.
    pub sequences: usize,
    /// Tokens of each that a pass then computes: one and those of a draft.
    pub drafted: usize,
    /// Computes attention on the host, which then has the rows; without it the device does.
    pub attention: Option<Attention>,
    /// Place of caches: host-visible to share them with the CPU, which takes unified memory; else the device's. With
    /// attention on the host they are the host's alone.
    pub rows: Place,
    /// True where slots are to be evicted.
    pub evicts: bool,
    /// The kernels to use.
    pub kernels: KernelSet,
}

/// Place in its own memory where a device should have weights and caches.
pub fn own_place(device: &Device) -> Place {
    if nvidia::has_persistent_kernels(device.facts()) { Place::InOne } else { Place::Device }
}

/// A model on an OpenCL device: everything a pass needs except the caches.
pub struct OpenClDevice {
    model: Arc<Model>,
    kernels: Kernels,
    kv_types: KvTypes,
    /// Rows that local layers of caches keep.
    ring: seam::Ring,
    /// The calibration of keys and queries, by layer; empty where there is none.
    calibration: Vec<buffer::Buffer>,
    scratch: Scratch,
    launches: Launches,
    /// Kernels of whole passes, where the device has them.
    persistent: Option<PersistentKernels>,
    /// Memory for logits on their way from a device of its own memory.
    readback: Option<Landing>,
    host: Option<HostAttention>,
    /// Place of caches.
    kv_location: KvLocation,
    /// Evicts slots there.
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
    /// `Memory` where there is no room for them, `Device` where the device cannot build them.
    pub fn new(model: Arc<Model>, options: OpenClOptions) -> Result<Self> {
        let OpenClOptions { kv_types, slots, max_tokens, sequences, drafted, attention, rows, .. } = options;
        let OpenClOptions { evicts, kernels: set, .. } = options;
        let (device, matrices) = (&model.device, &model.matrices);
        let unified = device.facts().unified_memory;
        let kernels = Kernels::new(device, kv_types, set, model.variants()?)?;
        let mut kernels = kernels.with_few(sequences.saturating_mul(drafted));
        // Another device may take longer passes with the same cache.
        let ring = seam::Ring::new(max_tokens.max(1));
        let max_tokens = if kernels.shapes().batches() { max_tokens } else { 1 };
        let at_once = if attention.is_some() || set == KernelSet::Baseline { 1 } else { sequences };
        let scratch = Scratch::new(device, max_tokens, (slots, at_once))?;
        let attend = if attention.is_some() { AttendOn::Host } else { AttendOn::Device };
        let host = attention.map(|compute| HostAttention::new(compute, kv_types, scratch.max_tokens));
        let calibration = if kv_types.k.rotated() {
            weights::calibration(device, &model.weights, own_place(device))?
        } else {
            Vec::new()
        };
        let persistent = match (attend, set) {
            (AttendOn::Device, KernelSet::Tuned) => {
                PersistentKernels::new(&model, &calibration, (kv_types, slots), &scratch)?
            }
            _ => None,
        };
        // Compiling takes seconds: what one launch makes needless is left out, but where single tokens are observed.
        let one = persistent.is_none() || evicts || scratch.max_tokens == 1;
        let mut binder = Binder {
            kernels: &mut kernels,
            matrices,
            calibration: &calibration,
            scratch: &scratch,
            attend,
            one,
        };
        let launches = binder.launches()?;
        let compactor = match attend {
            AttendOn::Device if evicts => Some(Compactor::new(device, binder.compaction()?)),
            _ => None,
        };
        let readback = (!unified).then(|| Landing::new(device, scratch.logits.len())).transpose()?;
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

    /// True where the CPU reaches the rows of caches, so that both can compute with one cache in turn.
    pub fn shares_rows(&self) -> bool {
        self.shares_rows
    }

    /// True where its logits must be the CPU's to the bit: nothing but their speed speaks for kernels of whole passes.
    pub fn must_be_exact(&self) -> bool {
        self.persistent.is_some()
    }

    /// The verdict of an earlier self-test on these kernels; `None` where there was none.
    pub fn verdict(&self) -> Option<Verdict> {
        self.kernels.verdict(self.persistent.iter().flat_map(PersistentKernels::programs))
    }

    /// Notes the verdict for good.
    pub fn set_verdict(&self, verdict: Verdict) {
        self.kernels.set_verdict(verdict, self.persistent.iter().flat_map(PersistentKernels::programs));
    }

    fn attend_on(&self) -> AttendOn {
        if self.host.is_some() { AttendOn::Host } else { AttendOn::Device }
    }

    /// Makes room for attention over `slots` slots.
    fn reserve(&mut self, slots: usize) -> Result<()> {
        let attend = self.attend_on();
        let Self { model, kernels, calibration, scratch, persistent, launches, .. } = self;
        scratch.reserve(&model.device, slots)?;
        if let Some(persistent) = persistent {
            persistent.reserve(&model.device, scratch)?;
        }
        if launches.slots != scratch.slots {
            let (matrices, one) = (&model.matrices, launches.has_one());
            *launches = Binder { kernels, matrices, calibration, scratch, attend, one }.launches()?;
        }
        Ok(())
    }

    /// Brings a run's cache to the device, and binds what touches it, if that is not done yet.
    fn bind(&mut self, run: &mut Run<'_>) -> Result<()> {
        let extent = run.cache.extent();
        assert!(!run.tokens.is_empty() && extent.has_room(run.pos, run.tokens.len()));
        self.reserve(extent.slots.max(extent.ring))?;
        let attend = self.attend_on();
        let Self { model, kernels, calibration, scratch, persistent, launches, .. } = self;
        let cache = OpenClCache::of(run.cache);
        cache.take_back()?;
        assert!(run.observe == 0 || cache.mass.is_some(), "a cache that is observed has mass");
        if cache.launches.as_ref().is_some_and(|bound| bound.slots == scratch.slots) {
            return Ok(());
        }
        let mass = cache.mass.as_ref().and_then(|mass| mass.on_device());
        if mass.is_some() {
            scratch.reserve_softmax(&model.device)?;
        }
        let (matrices, one) = (&model.matrices, launches.has_one());
        let mut binder = Binder { kernels, matrices, calibration, scratch, attend, one };
        let mut bound = binder.cache(&cache.rows, mass)?;
        if let Some(persistent) = persistent {
            bound.decode = persistent.bind(scratch, &cache.rows)?;
        }
        cache.launches = Some(bound);
        Ok(())
    }

    /// True for several runs, of a token each, of which nothing is traced or observed.
    fn decodes(&self, runs: &[Run<'_>]) -> bool {
        let single = |run: &Run<'_>| run.tokens.len() == 1 && run.observe == 0;
        runs.len() > 1 && self.trace.is_none() && runs.iter().all(single)
    }

    /// Number of the runs that are computed at once.
    fn runs_at_once(&self, runs: &[Run<'_>]) -> usize {
        match &self.persistent {
            Some(kernels) if self.decodes(runs) => kernels.runs_at_once(runs.len(), self.scratch.at_once),
            _ => runs.len(),
        }
    }

    /// The pass of some runs, of which the header of the state is set.
    fn pass<'a>(&'a mut self, runs: &mut [Run<'_>], cancel: Option<&'a CancelToken>) -> Pass<'a> {
        let n: usize = runs.iter().map(|run| run.tokens.len()).sum();
        let observed = runs.iter().any(|run| run.observe > 0);
        let (several, timed) = (runs.iter().any(|run| run.tokens.len() > 1), self.trace.is_some());
        let (read, decodes) = (output_tokens(runs).count(), self.decodes(runs));
        // Few are brought to the front; what is traced or observed is of all.
        let narrowed = Some(read)
            .filter(|_| read < n && n > 1 && read <= self.scratch.logit_rows && !timed && !observed);
        let row = if narrowed.is_some() { 0 } else { output_tokens(runs).next().unwrap_or(0) };
        let cache = OpenClCache::of(runs[0].cache);
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
            // Single tokens are done soon; what slots received of half a pass could not be taken back.
            cancel: cancel.filter(|_| several && !observed),
            frequencies: &self.frequencies,
            n,
            narrowed,
            steps: Steps::begin(self.trace.as_mut(), n),
        }
    }
}

impl seam::Device for OpenClDevice {
    fn name(&self) -> String {
        let attention = if self.host.is_some() { "CPU" } else { "GPU" };
        format!("opencl ({}, attention on the {attention})", self.model.device.facts().name)
    }

    fn max_tokens(&self) -> usize {
        self.scratch.max_tokens
    }

    fn row(&mut self, now: &[f32]) -> Option<seam::Row> {
        self.persistent.as_mut()?.lend_row(&self.model.device, now)
    }

    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn seam::Cache>> {
        self.reserve(slots)?;
        let rows = DeviceKv::new(&self.model.device, self.kv_types, (slots, self.ring), self.kv_location)?;
        Ok(Box::new(OpenClCache::new(&self.model.device, rows, self.attend_on(), self.compactor.clone())))
    }

    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()> {
        let n: usize = runs.iter().map(|run| run.tokens.len()).sum();
        assert!(n > 0 && n <= self.scratch.max_tokens);
        let (began, limit) = (Instant::now(), self.timeout.limit(n));
        self.device().set_patience(limit, None);
        runs.iter_mut().try_for_each(|run| self.bind(run))?;
        // What slots received of half a pass could not be taken back, and one launch writes where its caller may look then.
        let one_launch = self.persistent.is_some() && runs.iter().all(|run| run.tokens.len() == 1);
        let stop = cancel.filter(|_| !one_launch && runs.iter().all(|run| run.observe == 0));
        self.device().set_patience(limit, stop.map(CancelToken::flag));
        let at_once = self.runs_at_once(runs);
        let computed = runs.chunks_mut(at_once).try_for_each(|runs| self.pass(runs, cancel).run(runs));
        self.device().set_patience(limit, None);
        computed?;
        if runs.iter().any(|run| !matches!(run.logits, Logits::None)) {
            self.timeout.record(n, began.elapsed());
        }
        for run in runs {
            OpenClCache::of(run.cache).advance(run.tokens.len(), run.observe > 0);
        }
        Ok(())
    }

    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        std::mem::replace(&mut self.trace, trace)
    }
}
