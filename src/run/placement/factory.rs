//! Makes the devices that run a model: the CPU, and an OpenCL device, which is tested against the CPU before it is
//! used.

use crate::model::cpu::{self, CpuDevice, CpuOptions};
use crate::model::device::{Device, SharedDevice};
use crate::model::weights::Weights;
use crate::opencl::{self, KernelSet, OpenClDevice, OpenClOptions, Place, Verdict, selftest};
use crate::run::eviction::Policy;
use crate::run::options::EngineOptions;
use files::{Error, Result};
use numeric::simd::Isa;
use std::sync::{Arc, Mutex};

/// Maker of devices for some weights. If cache rows are stored rotated, the weights must have a calibration.
#[derive(Clone)]
pub struct DeviceFactory {
    pub weights: Arc<Weights>,
    pub isa: Isa,
}

impl DeviceFactory {
    /// The CPU as a device.
    pub fn cpu(&self, o: &EngineOptions) -> Result<CpuDevice> {
        CpuDevice::new(Arc::clone(&self.weights), self.cpu_options(o))
    }

    /// Makes the OpenCL device with the fastest kernels that match the CPU's results, tested at their first use.
    pub fn opencl(&self, model: &Arc<opencl::Model>, o: &EngineOptions) -> Result<OpenClDevice> {
        let device = self.select_opencl_device(model, o)?;
        if !was_made(model, o) {
            opencl::Cache::of_user().remember(&made(model, o), "");
        }
        Ok(device)
    }

    fn select_opencl_device(&self, model: &Arc<opencl::Model>, o: &EngineOptions) -> Result<OpenClDevice> {
        opencl::tune::decide(model, &opencl::Cache::of_user(), &|line| o.notice.say(line))?;
        let mut why = None;
        for kernels in KernelSet::ALL {
            why = Some(match self.try_kernels(model, o, kernels) {
                Ok(Some(device)) => {
                    if let Some(why) = why.filter(|_| model.is_news()) {
                        o.notice.say(&format!("{why}; using baseline kernels"));
                    }
                    return Ok(device);
                }
                Ok(None) => {
                    let name = &model.device().facts().name;
                    Error::Device(format!("OpenCL: {name} computes wrong results with these kernels"))
                }
                Err(e @ Error::Device(_)) if !model.device().is_lost() => e,
                Err(e) => return Err(e),
            });
        }
        Err(why.expect("invariant: there are baseline kernels to be tried"))
    }

    /// Makes the device with these kernels; `None` if their results differ from the CPU's.
    fn try_kernels(
        &self,
        model: &Arc<opencl::Model>,
        o: &EngineOptions,
        kernels: KernelSet,
    ) -> Result<Option<OpenClDevice>> {
        let on_cpu = || cpu::attention::for_others(o.threads, self.isa, o.max_seq_len);
        let attention = (!o.gpu_attn).then(on_cpu).transpose()?;
        let options = OpenClOptions {
            kv_types: o.kv_types,
            slots: o.max_seq_len,
            max_tokens: chunk(o),
            sequences: o.sequences(),
            drafted: 1 + o.draft,
            attention,
            rows: if o.zero_copy && model.device().facts().unified_memory {
                Place::HostVisible
            } else {
                opencl::own_place(model.device())
            },
            evicts: evicts(o),
            kernels,
        };
        let mut device = OpenClDevice::new(Arc::clone(model), options)?;
        let passed =
            self.verdict(&mut device, o)? == Verdict::Passed && self.observes_right(&mut device, o)?;
        Ok((passed && (!evicts(o) || selftest::compaction_matches(&mut device)?)).then_some(device))
    }

    /// Verdict on a device's kernels: remembered, or found by comparing their results with the CPU's.
    fn verdict(&self, device: &mut OpenClDevice, o: &EngineOptions) -> Result<Verdict> {
        if let Some(verdict) = device.verdict() {
            return Ok(verdict);
        }
        // Kernels that are only faster must have the same bits.
        let most = if device.must_be_exact() { 0.0 } else { selftest::TOLERANCE };
        let passed = selftest::distance(device, &mut self.reference(o)?)? <= most;
        let verdict = if passed { Verdict::Passed } else { Verdict::Failed };
        device.set_verdict(verdict);
        Ok(verdict)
    }

    /// Checks that a device measures the same attention mass as the CPU, if evictions depend on it.
    fn observes_right(&self, device: &mut OpenClDevice, o: &EngineOptions) -> Result<bool> {
        Ok(!o.eviction.policy.observes_attention()
            || selftest::mass_distance(device, &mut self.reference(o)?)? <= selftest::TOLERANCE)
    }

    /// Makes a CPU device to compare another device with.
    fn reference(&self, o: &EngineOptions) -> Result<CpuDevice> {
        let slots = o.max_seq_len.min(selftest::SLOTS);
        let options = CpuOptions { slots, max_tokens: slots, ..self.cpu_options(o) };
        CpuDevice::new(Arc::clone(&self.weights), options)
    }

    fn cpu_options(&self, o: &EngineOptions) -> CpuOptions {
        CpuOptions {
            threads: o.threads,
            isa: self.isa,
            kv_types: o.kv_types,
            slots: o.max_seq_len,
            max_tokens: chunk(o),
        }
    }
}

/// True if a device with the same options was made before, so that its programs are in the cache.
pub fn was_made(model: &opencl::Model, o: &EngineOptions) -> bool {
    opencl::Cache::of_user().recall(&made(model, o)).is_some()
}

/// Cache key of this: everything that programs depend on.
fn made(model: &opencl::Model, o: &EngineOptions) -> String {
    let (sequences, evicts) = (o.sequences(), evicts(o));
    let key = opencl::tune::key(model);
    format!(
        "made {key} kv {} on the device {} evicts {evicts} {sequences} x {}",
        o.kv_types,
        o.gpu_attn,
        1 + o.draft
    )
}

/// Maximum number of tokens of a pass: a chunk of a prompt, or a token of every sequence.
pub fn chunk(o: &EngineOptions) -> usize {
    chunk_in(o, o.max_seq_len)
}

/// [`chunk`] with caches of `slots` slots.
pub fn chunk_in(o: &EngineOptions, slots: usize) -> usize {
    o.prefill_chunk.clamp(1, slots.max(1)).max(o.sequences())
}

fn evicts(o: &EngineOptions) -> bool {
    o.eviction.policy != Policy::None
}

pub fn shared<D: Device + 'static>(device: D) -> SharedDevice {
    Arc::new(Mutex::new(device))
}
