//! Which backends a session gets: one device, or two, by choice or by measurement.

use super::Engine;
use super::speeds;
use crate::model::backend::Backend;
use crate::model::cpu::{self, CpuBackend, CpuBatch, CpuOptions};
use crate::model::weights::Weights;
use crate::opencl::{self, Matrices, OpenClBackend, OpenClOptions, Place, Variants, Verdict, selftest};
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::session::{Measured, RowsAre, Schedule, Session, Side, Spare, Standby};
use files::{Error, Result};
use std::sync::Arc;

/// What runs the sequences of an engine.
pub(super) enum Runs {
    /// The CPU.
    Cpu,
    /// The OpenCL device.
    Device,
    /// Both, as this says.
    Both(Schedule),
}

impl Engine {
    /// Decides what runs, once the weights are where they belong: for `auto` by measuring both.
    pub(super) fn decide(&mut self) -> Result<()> {
        self.runs = match (self.options.backend, &self.device) {
            (BackendKind::Cpu, _) | (_, None) => Runs::Cpu,
            (BackendKind::OpenCl, _) => Runs::Device,
            (BackendKind::Hybrid, _) => Runs::Both(Schedule::Fixed(self.options.hybrid.clone())),
            (BackendKind::Auto, Some(model)) => match self.measured(model) {
                Ok(runs) => runs,
                Err(Error::Device(why)) => {
                    (self.options.notice)(&format!("{why}; using the CPU"));
                    Runs::Cpu
                }
                Err(e) => return Err(e),
            },
        };
        if matches!(self.runs, Runs::Cpu) {
            self.device = None;
        }
        Ok(())
    }

    /// What `auto` chooses, and says why.
    fn measured(&self, model: &Arc<opencl::Model>) -> Result<Runs> {
        let o = EngineOptions { gpu_attn: true, ..self.options.clone() };
        let [cpu, gpu] = speeds::of_both(
            &speeds::key(self, model),
            || self.cpu_backend(&speeds::options(&o))(),
            || self.opencl_backend(model, &speeds::options(&o)),
        )?;
        let measured = Measured::new([cpu, gpu]);
        let (runs, choice) = match measured.only(self.options.max_seq_len) {
            Some(Side::Cpu) => (Runs::Cpu, "the CPU for all"),
            Some(Side::Gpu) => (Runs::Device, "the GPU for all"),
            None => (Runs::Both(Schedule::Measured(measured)), "each for what it does faster"),
        };
        (self.options.notice)(&format!(
            "auto: {choice}: prompt {:.0} tokens/s on the CPU, {:.0} on the GPU; decode {:.1} and {:.1}, over {} slots \
             {:.1} and {:.1}",
            1.0 / cpu.prefill,
            1.0 / gpu.prefill,
            1.0 / cpu.token(0),
            1.0 / gpu.token(0),
            self.options.max_seq_len,
            1.0 / cpu.token(self.options.max_seq_len),
            1.0 / gpu.token(self.options.max_seq_len),
        ));
        Ok(runs)
    }

    /// An empty sequence with a cache of its own.
    pub fn session(&self) -> Result<Session> {
        self.session_of(&self.options)
    }

    /// The same with other options for cache, eviction, drafts, threads and attention.
    pub fn session_of(&self, o: &EngineOptions) -> Result<Session> {
        let session = self.undrafted(o)?;
        let why = match (o.draft, &self.runs, o.eviction.policy) {
            (0, ..) => return Ok(session),
            (_, Runs::Device | Runs::Both(_), _) => "only the CPU computes several tokens to the bits of one",
            (_, _, Policy::SnapKv | Policy::H2o) => {
                "the eviction policy looks at attention, which drafts would change"
            }
            _ => return session.with_drafts(o.draft),
        };
        (o.notice)(&format!("--draft {}: off, as {why}", o.draft));
        Ok(session)
    }

    fn undrafted(&self, o: &EngineOptions) -> Result<Session> {
        // As it was measured.
        let gpu_attn = o.gpu_attn || self.options.backend == BackendKind::Auto;
        let o = &EngineOptions { gpu_attn, ..o.clone() };
        let session = match (&self.runs, &self.device) {
            (Runs::Device, Some(model)) => {
                let session = self.opencl_backend(model, o).map(Session::new);
                session.map(|s| s.with_spare(self.cpu_backend(o), o.notice))
            }
            (Runs::Both(schedule), Some(model)) => self.hybrid(model, schedule, o),
            _ => return self.on_cpu(o),
        };
        match session.and_then(|s| s.with_eviction(o.eviction)) {
            Err(Error::Device(why)) => {
                (o.notice)(&format!("{why}; using the CPU"));
                self.on_cpu(o)
            }
            made => made,
        }
    }

    fn on_cpu(&self, o: &EngineOptions) -> Result<Session> {
        Session::new(self.cpu_backend(o)()?).with_eviction(o.eviction)
    }

    /// A sequence on both devices, which begins on the CPU.
    fn hybrid(&self, model: &Arc<opencl::Model>, schedule: &Schedule, o: &EngineOptions) -> Result<Session> {
        let o = EngineOptions { gpu_attn: true, ..o.clone() };
        let mut gpu = self.opencl_backend(model, &o)?;
        let (cpu, rows) = match gpu.lend()? {
            Some(lent) => {
                let mut cpu = CpuBackend::without_rows(Arc::clone(&self.weights), self.cpu_options(&o))?;
                cpu.adopt(lent)?;
                (Box::new(cpu) as Box<dyn Backend>, RowsAre::Shared)
            }
            None => (self.cpu_backend(&o)()?, RowsAre::Apart),
        };
        let standby = Standby { backend: gpu, schedule: schedule.clone(), rows };
        Ok(Session::new(cpu).with_spare(self.cpu_backend(&o), o.notice).with_standby(standby))
    }

    /// A backend on the device, with an empty cache; `None` where there is no device.
    pub fn device_backend(&self, o: &EngineOptions) -> Result<Option<Box<dyn Backend>>> {
        self.device.as_ref().map(|model| self.opencl_backend(model, o)).transpose()
    }

    /// The OpenCL backend with the fastest kernels that compute what the CPU's do, tried at their first use.
    fn opencl_backend(&self, model: &Arc<opencl::Model>, o: &EngineOptions) -> Result<Box<dyn Backend>> {
        let mut why = Error::Device("no kernels".into());
        let order = [Variants::AnyOrder, Variants::Fastest, Variants::Baseline];
        for variants in order.into_iter().skip(usize::from(!o.gpu_fast)) {
            let attention = match o.gpu_attn {
                true => None,
                false => Some(cpu::attention::for_others(o.threads, self.isa, o.max_seq_len)?),
            };
            let options = OpenClOptions {
                kv_types: o.kv_types,
                capacity: o.max_seq_len,
                max_tokens: o.prefill_chunk,
                attention,
                rows: match o.zero_copy && model.device().facts().unified_memory {
                    true => Place::HostVisible,
                    false => own_place(o),
                },
                variants,
            };
            let tried = OpenClBackend::new(Arc::clone(model), options).and_then(|mut backend| {
                let passed = self.verdict(&mut backend, o)? == Verdict::Passed;
                Ok((passed && self.observes_right(&mut backend, o)?).then_some(backend))
            });
            why = match tried {
                Ok(Some(backend)) => return Ok(Box::new(backend)),
                Ok(None) => {
                    let name = &model.device().facts().name;
                    Error::Device(format!("OpenCL: {name} computes wrong results with these kernels"))
                }
                Err(e @ Error::Device(_)) => e,
                Err(e) => return Err(e),
            };
        }
        Err(why)
    }

    /// Whether a backend's kernels compute what the CPU's do: what is noted, else what a test finds.
    fn verdict(&self, backend: &mut OpenClBackend, o: &EngineOptions) -> Result<Verdict> {
        if let Some(verdict) = backend.verdict() {
            return Ok(verdict);
        }
        let mut reference = CpuBackend::new(
            Arc::clone(&self.weights),
            CpuOptions { capacity: backend.capacity().min(selftest::SLOTS), ..self.cpu_options(o) },
        )?;
        let verdict = match selftest::distance(backend, &mut reference)? {
            d if d <= selftest::TOLERANCE => Verdict::Passed,
            _ => Verdict::Failed,
        };
        backend.set_verdict(verdict);
        Ok(verdict)
    }

    /// Whether a backend sees the attention that the CPU sees, where evictions depend on it.
    fn observes_right(&self, backend: &mut OpenClBackend, o: &EngineOptions) -> Result<bool> {
        if !matches!(o.eviction.policy, Policy::SnapKv | Policy::H2o) {
            return Ok(true);
        }
        let capacity = backend.capacity().min(selftest::SLOTS);
        let options = CpuOptions { capacity, max_tokens: capacity, ..self.cpu_options(o) };
        let mut reference = CpuBackend::new(Arc::clone(&self.weights), options)?;
        Ok(selftest::mass_distance(backend, &mut reference)? <= selftest::TOLERANCE)
    }

    /// Empty sequences on the CPU that decode together, with these options for cache and threads.
    pub fn batch_of(&self, o: &EngineOptions, sequences: usize) -> Result<CpuBatch> {
        CpuBatch::new(Arc::clone(&self.weights), self.cpu_options(o), sequences)
    }

    fn cpu_options(&self, o: &EngineOptions) -> CpuOptions {
        CpuOptions {
            threads: o.threads,
            isa: self.isa,
            kv_types: o.kv_types,
            capacity: o.max_seq_len,
            max_tokens: o.prefill_chunk,
        }
    }

    /// Makes a CPU backend with these options.
    fn cpu_backend(&self, o: &EngineOptions) -> Spare {
        let (options, weights) = (self.cpu_options(o), Arc::clone(&self.weights));
        Box::new(move || Ok(Box::new(CpuBackend::new(weights, options)?) as _))
    }
}

/// Where in its own memory a device has weights and cache.
fn own_place(options: &EngineOptions) -> Place {
    if options.gpu_fast { Place::InOne } else { Place::Device }
}

/// Opens the OpenCL device and brings the weights there.
pub(super) fn upload(options: &EngineOptions, weights: &mut Weights) -> Result<(opencl::Device, Matrices)> {
    let device = opencl::Device::open(options.cl_device.as_deref(), opencl::Cache::of_user())?;
    let shared = options.zero_copy && device.facts().unified_memory;
    if options.zero_copy && !shared {
        (options.notice)("--zero-copy: this device has memory of its own; weights are copied");
    }
    let matrices = match shared {
        true => Matrices::share(&device, weights)?,
        false => Matrices::copy(&device, weights, own_place(options))?,
    };
    Ok((device, matrices))
}
