//! Sessions on the devices of an engine: one device or two, by choice or by measurement.

use super::Engine;
use crate::model::device::{SharedDevice, locked};
use crate::model::weights::Weights;
use crate::opencl::{self, Matrices};
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions, Side};
use crate::run::placement::{
    self, CpuFactory, DeviceCache, DeviceFactory, Devices, KernelCompiler, MeasuredSchedule, Placement,
    Schedule, chunk, shared,
};
use crate::run::session::Session;
use files::{Error, Result};
use std::sync::{Arc, OnceLock};

impl Engine {
    /// Settles what runs, once the weights are where they belong.
    pub(super) fn decide(&mut self) -> Result<()> {
        if matches!(self.devices()?, Devices::Cpu) {
            self.device = None;
        }
        Ok(())
    }

    /// The devices that compute: for `auto` those found by measuring both.
    fn devices(&self) -> Result<&Devices> {
        if let Some(devices) = self.devices.get() {
            return Ok(devices);
        }
        let devices = match (self.options.backend, &self.device) {
            (BackendKind::Cpu, _) | (_, None) => Devices::Cpu,
            (BackendKind::OpenCl, _) => Devices::Gpu,
            (BackendKind::Hybrid, _) => Devices::Both(Schedule::Fixed(self.options.hybrid.clone())),
            (BackendKind::Auto, Some(model)) => match choose_fastest(&self.factory, model, &self.options) {
                Ok(devices) => devices,
                Err(e) => {
                    use_cpu_instead(&self.options, e)?;
                    Devices::Cpu
                }
            },
        };
        Ok(self.devices.get_or_init(|| devices))
    }

    /// An empty sequence with a cache and a device of its own. Where [`EngineOptions::wait_for_gpu`] is false it may begin
    /// on the CPU, and goes on on the device when that is ready. Whoever drops the engine and its last such session before
    /// waits for the program that is being compiled.
    pub fn session(&self) -> Result<Session> {
        match (&self.device, &self.compiler) {
            (Some(model), Some(compiler)) if self.begins_early() => self.early_session(model, compiler),
            _ => self.session_of(&self.options),
        }
    }

    /// True if a sequence would begin on the CPU.
    pub(super) fn begins_early(&self) -> bool {
        !self.options.wait_for_gpu && self.must_compile()
    }

    /// A sequence that begins on the CPU while kernels are compiled.
    fn early_session(&self, model: &Arc<opencl::Model>, compiler: &Arc<KernelCompiler>) -> Result<Session> {
        let sessions = SessionFactory {
            engine: self,
            options: self.options_for_one(),
            device: DeviceSet::Cpu,
            cpu: Arc::default(),
        };
        let o = &sessions.options;
        let name = &model.device().facts().name;
        o.notice.say(&format!("OpenCL: compiling kernels for {name}, once; the CPU begins meanwhile"));
        let Ok(mut compiled) = compiler.make(self.factory.clone(), Arc::clone(model), o.clone()) else {
            return self.session_of(&self.options);
        };
        let (mut settled, factory) = (self.devices.get().cloned(), self.factory.clone());
        let (model, options) = (Arc::clone(model), self.options.clone());
        let pending = move || {
            let mut devices =
                || settled.take().map_or_else(|| choose_fastest(&factory, &model, &options), Ok);
            let device = compiled()?;
            Some(device.and_then(|device| Ok((device, devices()?))))
        };
        let placement = Placement::new(o.notice.clone()).with_cpu(sessions.cpu_factory());
        let session = Session::new(DeviceCache::new(sessions.cpu()?, o.max_seq_len)?)
            .with_placement(placement.with_pending(Box::new(pending)))
            .with_eviction(o.eviction)?;
        self.with_drafts(session, o, self.draft_length(o))
    }

    /// True if the device's kernels are still to be compiled or, for `auto`, to be timed, and the CPU can compute
    /// meanwhile.
    pub fn must_compile(&self) -> bool {
        let model = self.device.as_ref().filter(|_| self.compiler.is_some());
        model.is_some_and(|model| {
            !(placement::was_made(model, &self.options_for_one()) && self.has_speeds(model))
        })
    }

    /// True if nothing is to be timed to settle what runs.
    fn has_speeds(&self, model: &opencl::Model) -> bool {
        let (o, facts) = (&self.options, model.device().facts());
        o.backend != BackendKind::Auto
            || placement::known(o, &self.factory.weights.fingerprint, self.factory.isa, facts).is_some()
    }

    /// The options for one sequence.
    fn options_for_one(&self) -> EngineOptions {
        EngineOptions { batch: 1, ..self.with_attention(&self.options) }
    }

    /// The options with attention where it is computed: on the device as `auto` measures it, and where there are two.
    fn with_attention(&self, o: &EngineOptions) -> EngineOptions {
        let two = matches!(self.devices.get(), Some(Devices::Both(_)));
        let always = self.options.backend == BackendKind::Auto || two;
        EngineOptions { gpu_attn: o.gpu_attn || always, ..o.clone() }
    }

    /// [`Engine::session`] with other options for cache, eviction, drafts, threads and attention.
    pub fn session_of(&self, o: &EngineOptions) -> Result<Session> {
        let o = EngineOptions { batch: 1, ..o.clone() };
        self.with_drafts(self.session_factory(&o)?.session()?, &o, self.draft_length(&o))
    }

    /// Empty sequences on the same devices, whose tokens are computed together: see [`crate::session::forward`].
    ///
    /// # Errors
    ///
    /// `Memory`; what the options or the device do not allow.
    pub fn sessions_of(&self, o: &EngineOptions, sequences: usize) -> Result<Vec<Session>> {
        let o = EngineOptions { batch: sequences, ..o.clone() };
        let (sessions, most) = (self.session_factory(&o)?, self.draft_length(&o));
        (0..sequences).map(|_| self.with_drafts(sessions.session()?, &o, most)).collect()
    }

    /// Most tokens of a draft with these options. Where there can be none, that is said.
    fn draft_length(&self, o: &EngineOptions) -> usize {
        // Drafts of all sequences fit into one pass.
        let room = chunk(o) / o.sequences() - 1;
        let why = match (o.draft, o.eviction.policy) {
            (0, _) => return 0,
            (_, Policy::SnapKv | Policy::H2o) => {
                "the eviction policy looks at attention, which drafts would change"
            }
            _ if room == 0 => "a pass has no room for more than a token of each text",
            _ => return o.draft.min(room),
        };
        o.notice.say(&format!("`EngineOptions::draft` {}: off, as {why}", o.draft));
        0
    }

    /// A session that drafts so many tokens.
    fn with_drafts(&self, session: Session, o: &EngineOptions, most: usize) -> Result<Session> {
        if most == 0 {
            return Ok(session);
        }
        let session = session.with_drafts(most)?;
        Ok(match self.draft.as_ref().filter(|_| o.draft_model.is_some()) {
            Some(model) => session.with_draft_model(model),
            None => session,
        })
    }

    /// The devices for sequences with these options: the CPU where no other can be used.
    fn session_factory(&self, o: &EngineOptions) -> Result<SessionFactory<'_>> {
        let options = self.with_attention(o);
        self.ready_keys(&options)?;
        let mut sessions =
            SessionFactory { engine: self, options, device: DeviceSet::Cpu, cpu: Arc::default() };
        let made = match (self.devices()?, &self.device) {
            (Devices::Gpu, Some(model)) => {
                self.factory.opencl(model, &sessions.options).map(|device| DeviceSet::Gpu(shared(device)))
            }
            (Devices::Both(schedule), Some(model)) => {
                self.factory.opencl(model, &sessions.options).map(|device| DeviceSet::Both {
                    one_cache: device.shares_rows(),
                    device: shared(device),
                    schedule: schedule.clone(),
                })
            }
            _ => Ok(DeviceSet::Cpu),
        };
        match made {
            Ok(devices) => sessions.device = devices,
            Err(e) => use_cpu_instead(&sessions.options, e)?,
        }
        Ok(sessions)
    }

    /// An empty cache on the OpenCL device; `None` where there is no device.
    pub fn device_cache(&self, o: &EngineOptions) -> Result<Option<DeviceCache>> {
        let Some(model) = &self.device else { return Ok(None) };
        self.ready_keys(o)?;
        DeviceCache::new(shared(self.factory.opencl(model, o)?), o.max_seq_len).map(Some)
    }

    /// Times the variants of kernels on the OpenCL device, whatever was found out before, and keeps the fastest;
    /// `None` where there is no device.
    pub fn tune(&self) -> Result<Option<opencl::tune::Tuning>> {
        let timed = |model: &Arc<opencl::Model>| {
            opencl::tune::time_variants(model, &opencl::Cache::of_user(), &|line| {
                self.options.notice.say(line)
            })
        };
        self.device.as_ref().map(timed).transpose()
    }
}

/// Chooses the device of `auto`, and says why.
fn choose_fastest(
    factory: &DeviceFactory,
    model: &Arc<opencl::Model>,
    options: &EngineOptions,
) -> Result<Devices> {
    let o = placement::measured_options(&EngineOptions { gpu_attn: true, ..options.clone() });
    opencl::tune::decide(model, &opencl::Cache::of_user(), &|line| o.notice.say(line))?;
    let on = (model.device().facts(), model.variants()?);
    let speeds = placement::of_both(
        &placement::key(options, &factory.weights.fingerprint, factory.isa, on),
        || DeviceCache::new(shared(factory.cpu(&o)?), placement::SLOTS),
        || DeviceCache::new(shared(factory.opencl(model, &o)?), placement::SLOTS),
    )?;
    let measured = MeasuredSchedule::new(speeds);
    let only = measured.only(options.max_seq_len);
    placement::say_choice(options, only, speeds);
    Ok(match only {
        Some(Side::Cpu) => Devices::Cpu,
        Some(Side::Gpu) => Devices::Gpu,
        None => Devices::Both(Schedule::Measured(measured)),
    })
}

/// The devices that some sequences share.
struct SessionFactory<'a> {
    engine: &'a Engine,
    options: EngineOptions,
    device: DeviceSet,
    /// The CPU, once a sequence needs it.
    cpu: Arc<OnceLock<SharedDevice>>,
}

/// Which devices those are.
enum DeviceSet {
    Cpu,
    Gpu(SharedDevice),
    Both {
        device: SharedDevice,
        /// True if the device's cache serves the CPU too.
        one_cache: bool,
        schedule: Schedule,
    },
}

/// Makes the CPU, unless it is there.
fn make_cpu_once(
    cpu: &OnceLock<SharedDevice>,
    factory: &DeviceFactory,
    options: &EngineOptions,
) -> Result<SharedDevice> {
    if let Some(cpu) = cpu.get() {
        return Ok(Arc::clone(cpu));
    }
    // If two threads come here, the second takes what the first made.
    let made = shared(factory.cpu(options)?);
    Ok(Arc::clone(cpu.get_or_init(|| made)))
}

impl SessionFactory<'_> {
    /// The CPU, one for all sequences.
    fn cpu(&self) -> Result<SharedDevice> {
        make_cpu_once(&self.cpu, &self.engine.factory, &self.options)
    }

    /// Makes the cache on the CPU for a sequence whose device is lost.
    fn cpu_factory(&self) -> CpuFactory {
        let (factory, options) = (self.engine.factory.clone(), self.options.clone());
        let (cpu, slots) = (Arc::clone(&self.cpu), options.max_seq_len);
        Box::new(move || DeviceCache::new(make_cpu_once(&cpu, &factory, &options)?, slots))
    }

    /// An empty sequence, which in a hybrid session begins on the CPU.
    fn session(&self) -> Result<Session> {
        let o = &self.options;
        match self.session_on_devices().and_then(|s| s.with_eviction(o.eviction)) {
            Err(e) if !matches!(self.device, DeviceSet::Cpu) => {
                use_cpu_instead(o, e)?;
                Session::new(DeviceCache::new(self.cpu()?, o.max_seq_len)?).with_eviction(o.eviction)
            }
            made => made,
        }
    }

    fn session_on_devices(&self) -> Result<Session> {
        let slots = self.options.max_seq_len;
        let placement = || Placement::new(self.options.notice.clone()).with_cpu(self.cpu_factory());
        Ok(match &self.device {
            DeviceSet::Cpu => Session::new(DeviceCache::new(self.cpu()?, slots)?),
            DeviceSet::Gpu(device) => {
                Session::new(DeviceCache::new(Arc::clone(device), slots)?).with_placement(placement())
            }
            DeviceSet::Both { device, one_cache, schedule } => {
                let (device, schedule) = (Arc::clone(device), schedule.clone());
                let there = locked(&device).new_cache(slots)?;
                let cpu = self.cpu()?;
                let (here, placement) = if *one_cache {
                    let here = DeviceCache::with_cache(cpu, there);
                    (here, placement().with_shared_second(device, schedule))
                } else {
                    let second = DeviceCache::with_cache(device, there);
                    (DeviceCache::new(cpu, slots)?, placement().with_second(second, schedule))
                };
                Session::new(here).with_placement(placement)
            }
        })
    }
}

/// Says that the CPU runs, because of what a device failed with; `auto` takes it even where the device has no room.
pub(super) fn use_cpu_instead(o: &EngineOptions, failure: Error) -> Result<()> {
    match failure {
        Error::Device(_) => {}
        Error::Memory(_) if o.backend == BackendKind::Auto => {}
        other => return Err(other),
    }
    o.notice.say(&format!("{failure}; using the CPU"));
    Ok(())
}

/// Opens the OpenCL device and brings the weights there.
pub(super) fn upload(options: &EngineOptions, weights: &mut Weights) -> Result<(opencl::Device, Matrices)> {
    let cache = opencl::Cache::of_user();
    let unusable = cache.unusable();
    let device = opencl::open(options.cl_device.as_deref(), cache)?;
    // Nothing is computed or compiled yet.
    device.set_patience(2 * opencl::waiter::least(), None);
    if let Some(why) = unusable {
        options.notice.say(&format!("{why}; the device's programs are compiled at each start"));
    }
    let shared = options.zero_copy && device.facts().unified_memory;
    if options.zero_copy && !shared {
        options
            .notice
            .say("`EngineOptions::zero_copy`: this device has memory of its own; weights are copied");
    }
    let matrices = match shared {
        true => Matrices::share(&device, weights)?,
        false => Matrices::copy(&device, weights, opencl::own_place(&device))?,
    };
    Ok((device, matrices))
}
