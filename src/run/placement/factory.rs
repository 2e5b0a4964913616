//! Makes the devices that run a model: the CPU, and an OpenCL device, which is tested against the CPU before it is
//! used.

use crate::model::cpu::{self, CpuDevice, CpuOptions};
use crate::model::device::{Device, SharedDevice};
use crate::model::split::{SplitDevice, Stage};
use crate::model::weights::Weights;
use crate::opencl::{self, KernelSet, OpenClDevice, OpenClOptions, Place, Verdict, selftest};
use crate::run::eviction::Policy;
use crate::run::options::EngineOptions;
use files::{Error, Result};
use numeric::simd::Isa;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Layers of a stage, and the OpenCL device that has their weights; `None` for the CPU.
pub type StageModel = (Range<usize>, Option<Arc<opencl::Model>>);

/// Creates devices for some weights. If cache rows are stored rotated, the weights must have a calibration.
#[derive(Clone)]
pub struct DeviceFactory {
    pub weights: Arc<Weights>,
    pub isa: Isa,
    /// The error if the CPU has no room to take over all layers of a split.
    pub whole_on_cpu: Result<()>,
}

impl DeviceFactory {
    /// The CPU as a device.
    pub fn cpu_device(&self, o: &EngineOptions) -> Result<CpuDevice> {
        CpuDevice::new(Arc::clone(&self.weights), self.cpu_options(o))
    }

    /// Makes the devices of a split, one for each stage.
    pub fn split_device(&self, stages: &[StageModel], o: &EngineOptions) -> Result<SplitDevice> {
        let stage = |(layers, model): &StageModel| {
            let layers = layers.clone();
            let device: Box<dyn Device> = match model {
                Some(model) => Box::new(self.opencl_device(model, o)?),
                None => Box::new(self.cpu_device(o)?.with_layers(layers.clone())),
            };
            Ok(Stage::new(device, layers))
        };
        Ok(SplitDevice::new(stages.iter().map(stage).collect::<Result<_>>()?))
    }

    /// Makes the OpenCL device with the fastest kernels that match the CPU's results, tested at their first use.
    pub fn opencl_device(&self, model: &Arc<opencl::Model>, o: &EngineOptions) -> Result<OpenClDevice> {
        let device = self.select_opencl_device(model, o)?;
        if !was_made_before(model, o) {
            opencl::Cache::for_user().put_text(&made_key(model, o), "");
        }
        Ok(device)
    }

    fn select_opencl_device(&self, model: &Arc<opencl::Model>, o: &EngineOptions) -> Result<OpenClDevice> {
        opencl::tune::select_variants(model, &opencl::Cache::for_user(), &|line| o.notice.warn(line))?;
        let mut why = None;
        for kernels in KernelSet::ALL {
            why = Some(match self.try_kernels(model, o, kernels) {
                Ok(Some(device)) => {
                    if let Some(why) = why.filter(|_| model.take_untold()) {
                        o.notice.warn(&format!("{why}; using baseline kernels"));
                    }
                    return Ok(device);
                }
                Ok(None) => {
                    let name = &model.device().info().name;
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
        let on_cpu = || cpu::attention::attention_for_device(o.threads, self.isa, o.max_seq_len);
        let attention = (!o.gpu_attn).then(on_cpu).transpose()?;
        let experts = || {
            let weights = Arc::clone(&self.weights);
            cpu::experts::experts_for_device(weights, o.threads, self.isa, max_pass_tokens(o))
        };
        let options = OpenClOptions {
            kv_types: o.kv_types,
            slots: o.max_seq_len,
            max_tokens: max_pass_tokens(o),
            sequences: o.sequence_count(),
            tokens_per_sequence: 1 + o.draft,
            attention,
            experts: model.leaves_experts().then(experts).transpose()?,
            cache_place: if o.zero_copy && model.device().info().unified_memory {
                Place::HostVisible
            } else {
                opencl::preferred_place(model.device())
            },
            can_evict: has_eviction(o),
            kernels,
        };
        let mut device = OpenClDevice::new(Arc::clone(model), options)?;
        let passed =
            self.test_kernels(&mut device, o)? == Verdict::Passed && self.mass_matches(&mut device, o)?;
        let layers = device.layer_range();
        let moves =
            |device| Ok::<_, Error>(!has_eviction(o) || selftest::compaction_matches(device, &layers)?);
        Ok((passed && moves(&mut device)?).then_some(device))
    }

    /// Verdict on a device's kernels: remembered, or found by comparing their results with the CPU's.
    fn test_kernels(&self, device: &mut OpenClDevice, o: &EngineOptions) -> Result<Verdict> {
        if let Some(verdict) = device.self_test_verdict() {
            return Ok(verdict);
        }
        // Kernels that are only faster must have the same bits.
        let most = if device.must_be_exact() { 0.0 } else { selftest::TOLERANCE };
        let (layers, mut cpu) = (device.layer_range(), self.reference_cpu(o, device)?);
        let passed = selftest::max_output_distance(device, &mut cpu, &layers)? <= most;
        let verdict = if passed { Verdict::Passed } else { Verdict::Failed };
        device.set_verdict(verdict);
        Ok(verdict)
    }

    /// Checks that a device measures the same attention mass as the CPU, if evictions depend on it.
    fn mass_matches(&self, device: &mut OpenClDevice, o: &EngineOptions) -> Result<bool> {
        if !o.eviction.policy.observes_attention() {
            return Ok(true);
        }
        let (layers, mut cpu) = (device.layer_range(), self.reference_cpu(o, device)?);
        Ok(selftest::max_mass_distance(device, &mut cpu, &layers)? <= selftest::TOLERANCE)
    }

    /// Makes a CPU device to compare another device with, which computes the same layers.
    fn reference_cpu(&self, o: &EngineOptions, device: &OpenClDevice) -> Result<CpuDevice> {
        let slots = o.max_seq_len.min(selftest::SLOTS);
        let options = CpuOptions { slots, max_tokens: slots, ..self.cpu_options(o) };
        Ok(CpuDevice::new(Arc::clone(&self.weights), options)?.with_layers(device.layer_range()))
    }

    fn cpu_options(&self, o: &EngineOptions) -> CpuOptions {
        CpuOptions {
            threads: o.threads,
            isa: self.isa,
            kv_types: o.kv_types,
            slots: o.max_seq_len,
            max_tokens: max_pass_tokens(o),
        }
    }
}

/// True if a device with the same options was made before, so that its programs are in the cache.
pub fn was_made_before(model: &opencl::Model, o: &EngineOptions) -> bool {
    opencl::Cache::for_user().get_text(&made_key(model, o)).is_some()
}

/// Cache key of this: everything that programs depend on.
fn made_key(model: &opencl::Model, o: &EngineOptions) -> String {
    let (sequences, evicts) = (o.sequence_count(), has_eviction(o));
    let key = opencl::tune::variants_key(model);
    format!(
        "made {key} kv {} on the device {} experts left {} evicts {evicts} {sequences} x {}",
        o.kv_types,
        o.gpu_attn,
        model.leaves_experts(),
        1 + o.draft
    )
}

/// Maximum number of tokens of a pass: a chunk of a prompt, or a token of every sequence.
pub fn max_pass_tokens(o: &EngineOptions) -> usize {
    max_pass_tokens_for(o, o.max_seq_len)
}

/// [`max_pass_tokens`] with caches of `slots` slots.
pub fn max_pass_tokens_for(o: &EngineOptions, slots: usize) -> usize {
    o.prefill_chunk.clamp(1, slots.max(1)).max(o.sequence_count())
}

fn has_eviction(o: &EngineOptions) -> bool {
    o.eviction.policy != Policy::None
}

pub fn into_shared<D: Device + 'static>(device: D) -> SharedDevice {
    Arc::new(Mutex::new(device))
}
