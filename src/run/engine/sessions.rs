//! Sessions on an engine's devices: one device or two, by choice or by measured speed.

use super::Engine;
use crate::model::device::{SharedDevice, lock_device};
use crate::model::weights::Weights;
use crate::opencl::{self, DeviceLayers, Matrices};
use crate::run::draft_model::mtp::MtpDrafter;
use crate::run::options::{BackendKind, EngineOptions, Side};
use crate::run::placement::{
    self, CpuFactory, DeviceCache, DeviceFactory, Devices, KernelCompiler, MeasuredSchedule, Placement,
    Schedule, StageModel, into_shared, max_pass_tokens,
};
use crate::run::session::Session;
use crate::run::split::{SplitStage, StageDevice};
use files::{Error, Result};
use std::sync::{Arc, OnceLock};

impl Engine {
    /// Chooses the devices, once the weights are uploaded.
    pub(super) fn choose_devices(&mut self) -> Result<()> {
        if matches!(self.get_devices()?, Devices::Cpu) {
            self.device = None;
        }
        Ok(())
    }

    /// Devices that compute; for `auto`, chosen by measuring both.
    fn get_devices(&self) -> Result<&Devices> {
        if let Some(devices) = self.devices.get() {
            return Ok(devices);
        }
        let devices = match (self.options.backend, &self.device) {
            // Its stages are one device.
            _ if !self.stages.is_empty() => Devices::Gpu,
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

    /// Makes an empty sequence. With [`EngineOptions::wait_for_gpu`] false, it may begin on the CPU and switch to the
    /// device when that is ready; dropping the engine and its last such session earlier waits for the program that is
    /// being compiled.
    pub fn session(&self) -> Result<Session> {
        match (&self.device, &self.compiler) {
            (Some(model), Some(compiler)) if self.begins_early() => self.early_session(model, compiler),
            _ => self.session_with(&self.options),
        }
    }

    /// True if a sequence would begin on the CPU.
    pub(super) fn begins_early(&self) -> bool {
        !self.options.wait_for_gpu && self.must_compile()
    }

    /// Makes a sequence that begins on the CPU while kernels are compiled.
    fn early_session(&self, model: &Arc<opencl::Model>, compiler: &Arc<KernelCompiler>) -> Result<Session> {
        let sessions = SessionFactory {
            engine: self,
            options: self.options_for_one(),
            device: DeviceSet::Cpu,
            cpu: Arc::default(),
        };
        let o = &sessions.options;
        let name = &model.device().info().name;
        o.notice.warn(&format!("OpenCL: compiling kernels for {name} (only once); the CPU starts meanwhile"));
        let Ok(mut compiled) = compiler.start_compiling(self.factory.clone(), Arc::clone(model), o.clone())
        else {
            return self.session_with(&self.options);
        };
        // The text is shown meanwhile.
        model.device().observe_builds(None);
        let (mut settled, factory) = (self.devices.get().cloned(), self.factory.clone());
        let (model, options) = (Arc::clone(model), self.options.clone());
        let pending = move || {
            let mut devices =
                || settled.take().map_or_else(|| choose_fastest(&factory, &model, &options), Ok);
            let device = compiled()?;
            Some(device.and_then(|device| Ok((device, devices()?))))
        };
        let placement = Placement::new(o.notice.clone()).with_cpu(sessions.cpu_factory());
        let session = Session::new(DeviceCache::new(sessions.cpu_device()?, o.max_seq_len)?)
            .with_placement(placement.with_pending(Box::new(pending)))
            .with_eviction(o.eviction)?;
        self.with_drafts(session, o, self.draft_length(o))
    }

    /// True if the device's kernels still have to be compiled (or timed, for `auto`) and the CPU can compute meanwhile.
    pub fn must_compile(&self) -> bool {
        let model = self.device.as_ref().filter(|_| self.compiler.is_some());
        model.is_some_and(|model| {
            !(placement::was_made_before(model, &self.options_for_one()) && self.knows_speeds(model))
        })
    }

    /// True if the devices can be chosen without timing them.
    fn knows_speeds(&self, model: &opencl::Model) -> bool {
        let (o, facts) = (&self.options, model.device().info());
        o.backend != BackendKind::Auto
            || placement::known_speeds(o, &self.factory.weights.fingerprint, self.factory.isa, facts)
                .is_some()
    }

    /// Options for one sequence.
    fn options_for_one(&self) -> EngineOptions {
        EngineOptions { batch: 1, ..self.with_attention(&self.options) }
    }

    /// Options with attention on the device for `auto`, which measures it there, and for two devices.
    fn with_attention(&self, o: &EngineOptions) -> EngineOptions {
        let two = matches!(self.devices.get(), Some(Devices::Both(_)));
        let always = self.options.backend == BackendKind::Auto || two;
        EngineOptions { gpu_attn: o.gpu_attn || always, ..o.clone() }
    }

    /// [`Engine::session`] with other options for cache, eviction, drafts, threads and attention.
    pub fn session_with(&self, o: &EngineOptions) -> Result<Session> {
        let o = EngineOptions { batch: 1, ..o.clone() };
        self.with_drafts(self.session_factory(&o)?.session()?, &o, self.draft_length(&o))
    }

    /// Makes empty sequences on the same devices, whose tokens can be computed together: see
    /// [`crate::session::forward`].
    ///
    /// # Errors
    ///
    /// `Memory`; errors of invalid options and of the device.
    pub fn sessions_with(&self, o: &EngineOptions, sequences: usize) -> Result<Vec<Session>> {
        let o = EngineOptions { batch: sequences, ..o.clone() };
        let (sessions, most) = (self.session_factory(&o)?, self.draft_length(&o));
        (0..sequences).map(|_| self.with_drafts(sessions.session()?, &o, most)).collect()
    }

    /// Maximum number of tokens of a draft with these options. Reports if drafting is impossible.
    fn draft_length(&self, o: &EngineOptions) -> usize {
        // The drafts of all sequences must fit into one pass.
        let room = max_pass_tokens(o) / o.sequence_count() - 1;
        let why = match (o.draft, o.eviction.policy) {
            (0, _) => return 0,
            (_, policy) if policy.observes_attention() => {
                "the eviction policy looks at attention, which drafts would distort"
            }
            _ if room == 0 => "a pass has room for only one token of each sequence",
            _ if self.assistant.is_some() && self.may_use_device() => {
                "an assistant reads the cache of the CPU, and an OpenCL device computes"
            }
            _ => return o.draft.min(room),
        };
        o.notice.warn(&format!("`EngineOptions::draft` {}: off, because {why}", o.draft));
        0
    }

    /// Adds drafting of at most `most` tokens to a session.
    fn with_drafts(&self, session: Session, o: &EngineOptions, most: usize) -> Result<Session> {
        if most == 0 {
            return Ok(session);
        }
        let session = session.with_drafts(most)?;
        if let Some(assistant) = &self.assistant {
            return Ok(session.with_assistant(assistant));
        }
        if o.draft_model.is_some() {
            return Ok(self.draft.iter().fold(session, Session::with_draft_model));
        }
        match self.mtp_drafter(o)? {
            Some(block) => session.with_mtp(block),
            None => Ok(session),
        }
    }

    /// True if an OpenCL device computes, or may later.
    fn may_use_device(&self) -> bool {
        self.device.is_some() && !matches!(self.devices.get(), Some(Devices::Cpu))
    }

    /// The model's own block that drafts, if its file has one.
    fn mtp_drafter(&self, o: &EngineOptions) -> Result<Option<&MtpDrafter>> {
        if let Some(made) = self.mtp.get() {
            return Ok(made.as_ref());
        }
        let made = MtpDrafter::new(&self.factory.weights, self.factory.isa, o.threads, o.draft_when)?;
        Ok(self.mtp.get_or_init(|| made).as_ref())
    }

    /// Makes the devices for sequences with these options; the CPU if no other can be used.
    fn session_factory(&self, o: &EngineOptions) -> Result<SessionFactory<'_>> {
        let options = self.with_attention(o);
        self.ensure_calibration(&options)?;
        let mut sessions =
            SessionFactory { engine: self, options, device: DeviceSet::Cpu, cpu: Arc::default() };
        let made = match (self.get_devices()?, &self.device) {
            (Devices::Gpu, _) if !self.stages.is_empty() => self
                .factory
                .split_device(&self.stages, &sessions.options)
                .map(|device| DeviceSet::Gpu(into_shared(device))),
            (Devices::Gpu, Some(model)) => self
                .factory
                .opencl_device(model, &sessions.options)
                .map(|device| DeviceSet::Gpu(into_shared(device))),
            (Devices::Both(schedule), Some(model)) => {
                self.factory.opencl_device(model, &sessions.options).map(|device| DeviceSet::Both {
                    one_cache: device.shares_rows(),
                    device: into_shared(device),
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

    /// An empty cache on the OpenCL device; `None` if there is no device.
    pub fn device_cache(&self, o: &EngineOptions) -> Result<Option<DeviceCache>> {
        let Some(model) = &self.device else { return Ok(None) };
        self.ensure_calibration(o)?;
        DeviceCache::new(into_shared(self.factory.opencl_device(model, o)?), o.max_seq_len).map(Some)
    }

    /// Times the kernel variants on the OpenCL device again and keeps the fastest; `None` if there is no device.
    pub fn tune_kernels(&self) -> Result<Option<opencl::tune::Tuning>> {
        let timed = |model: &Arc<opencl::Model>| {
            let say = |line: &str| self.options.notice.warn(line);
            let tuned = opencl::tune::time_variants(model, &opencl::Cache::for_user(), &say)?;
            model.set_variants(tuned.fastest);
            Ok(tuned)
        };
        self.device.as_ref().map(timed).transpose()
    }

    /// Compiles and tests the programs that `sequences` texts at once need on the OpenCL device, and returns their
    /// number.
    ///
    /// # Errors
    ///
    /// `Device` if there is none, or if it cannot run the model.
    pub fn compile_programs(&self, sequences: usize) -> Result<usize> {
        let Some(model) = &self.device else { return Err(Error::Device("OpenCL: no device".into())) };
        let o = EngineOptions { batch: sequences, ..self.with_attention(&self.options) };
        let compiler = KernelCompiler::new(model.device().clone());
        let mut compiled = compiler.start_compiling(self.factory.clone(), Arc::clone(model), o)?;
        loop {
            if let Some(made) = compiled() {
                let stats = model.device().build_stats();
                return made.map(|_| stats.needed.max(stats.count_built()));
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// The programs that are still being compiled, which are then left alone: for a process that is about to end and
    /// can let another one compile them.
    pub fn leave_unfinished(&self) -> Option<placement::UnfinishedPrograms> {
        self.compiler.as_ref()?.leave_unfinished()
    }
}

/// Chooses the devices for `auto` and reports why.
fn choose_fastest(
    factory: &DeviceFactory,
    model: &Arc<opencl::Model>,
    options: &EngineOptions,
) -> Result<Devices> {
    let o = placement::measured_options(&EngineOptions { gpu_attn: true, ..options.clone() });
    opencl::tune::select_variants(model, &opencl::Cache::for_user(), &|line| o.notice.warn(line))?;
    let on = (model.device().info(), model.kernel_variants()?);
    let speeds = placement::measure_both(
        &placement::speeds_key(options, &factory.weights.fingerprint, factory.isa, on),
        || DeviceCache::new(into_shared(factory.cpu_device(&o)?), placement::MEASURED_SLOTS),
        || DeviceCache::new(into_shared(factory.opencl_device(model, &o)?), placement::MEASURED_SLOTS),
    )?;
    let measured = MeasuredSchedule::new(speeds);
    let only = measured.single_best_device(options.max_seq_len);
    placement::report_choice(options, only, speeds);
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
    /// The CPU, made when a sequence first needs it.
    cpu: Arc<OnceLock<SharedDevice>>,
}

/// The devices of a [`SessionFactory`].
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

/// Makes the CPU device, unless it exists.
fn make_cpu_once(
    cpu: &OnceLock<SharedDevice>,
    factory: &DeviceFactory,
    options: &EngineOptions,
) -> Result<SharedDevice> {
    if let Some(cpu) = cpu.get() {
        return Ok(Arc::clone(cpu));
    }
    factory.whole_on_cpu.clone()?;
    // If two threads come here, the second uses the first one's.
    let made = into_shared(factory.cpu_device(options)?);
    Ok(Arc::clone(cpu.get_or_init(|| made)))
}

impl SessionFactory<'_> {
    /// The CPU device that all sequences share.
    fn cpu_device(&self) -> Result<SharedDevice> {
        make_cpu_once(&self.cpu, &self.engine.factory, &self.options)
    }

    /// A function that makes the CPU's cache for a sequence whose device is lost.
    fn cpu_factory(&self) -> CpuFactory {
        let (factory, options) = (self.engine.factory.clone(), self.options.clone());
        let (cpu, slots) = (Arc::clone(&self.cpu), options.max_seq_len);
        Box::new(move || DeviceCache::new(make_cpu_once(&cpu, &factory, &options)?, slots))
    }

    /// Makes an empty sequence; a hybrid one begins on the CPU.
    fn session(&self) -> Result<Session> {
        let o = &self.options;
        let made = match self.session_on_devices().and_then(|s| s.with_eviction(o.eviction)) {
            Err(e) if !matches!(self.device, DeviceSet::Cpu) => {
                use_cpu_instead(o, e)?;
                Session::new(DeviceCache::new(self.cpu_device()?, o.max_seq_len)?).with_eviction(o.eviction)
            }
            made => made,
        };
        Ok(made?.with_checkpoints(placement::max_checkpoints(o.sequence_count())))
    }

    fn session_on_devices(&self) -> Result<Session> {
        let slots = self.options.max_seq_len;
        let placement = || Placement::new(self.options.notice.clone()).with_cpu(self.cpu_factory());
        Ok(match &self.device {
            DeviceSet::Cpu => Session::new(DeviceCache::new(self.cpu_device()?, slots)?),
            DeviceSet::Gpu(device) => {
                Session::new(DeviceCache::new(Arc::clone(device), slots)?).with_placement(placement())
            }
            DeviceSet::Both { device, one_cache, schedule } => {
                let (device, schedule) = (Arc::clone(device), schedule.clone());
                let there = lock_device(&device).new_cache(slots)?;
                let cpu = self.cpu_device()?;
                let (here, placement) = if *one_cache {
                    let here = DeviceCache::from_parts(cpu, there);
                    (here, placement().with_shared_second(device, schedule))
                } else {
                    let second = DeviceCache::from_parts(device, there);
                    (DeviceCache::new(cpu, slots)?, placement().with_second(second, schedule))
                };
                Session::new(here).with_placement(placement)
            }
        })
    }
}

/// Reports that the CPU is used because a device failed; for `auto`, also because the device has too little memory.
pub(super) fn use_cpu_instead(o: &EngineOptions, failure: Error) -> Result<()> {
    match failure {
        Error::Device(_) => {}
        Error::Memory(_) if o.backend == BackendKind::Auto => {}
        other => return Err(other),
    }
    o.notice.warn(&format!("{failure}; using the CPU"));
    Ok(())
}

/// Opens the devices of a split, and uploads the weights of its layers to each.
pub(super) fn upload_stages(o: &EngineOptions, weights: &Arc<Weights>) -> Result<Vec<StageModel>> {
    let stage = |stage: &SplitStage| {
        let layers = stage.layers.clone();
        let StageDevice::OpenCl(select) = &stage.device else { return Ok((layers, None)) };
        let device = open_device(o, select.as_ref().or(o.cl_device.as_ref()))?;
        let place = opencl::preferred_place(&device);
        let part = DeviceLayers { layers: layers.clone(), leaves_experts: stage.experts_on_cpu };
        let matrices = Matrices::copy_layers(&device, weights, (&part, place))?;
        Ok((layers, Some(Arc::new(opencl::Model::new(device, Arc::clone(weights), matrices)))))
    };
    o.split_stages().iter().map(stage).collect()
}

/// Opens an OpenCL device.
fn open_device(options: &EngineOptions, select: Option<&String>) -> Result<opencl::Device> {
    let cache = opencl::Cache::for_user();
    let unusable = cache.unusable_reason();
    let device = opencl::open_device(select.map(String::as_str), cache)?;
    let progress = options.compile_progress.clone();
    device.observe_builds(Some(Box::new(move |done, all| progress.report(done, all))));
    // Only uploads so far, so the time-out can be short.
    device.set_timeout(2 * opencl::watchdog::minimum_timeout(), None);
    if let Some(why) = unusable {
        options.notice.warn(&format!("{why}; the device's kernels are compiled at each start"));
    }
    Ok(device)
}

/// Opens the OpenCL device and uploads the weights, if these options have one device compute all layers.
pub(super) fn upload_weights(
    options: &EngineOptions,
    weights: &mut Weights,
) -> Result<Option<(opencl::Device, Matrices)>> {
    if options.backend == BackendKind::Cpu || options.split.is_some() {
        return Ok(None);
    }
    match upload_all_layers(options, weights) {
        Err(e) if options.backend == BackendKind::Auto => use_cpu_instead(options, e).map(|()| None),
        uploaded => uploaded.map(Some),
    }
}

fn upload_all_layers(options: &EngineOptions, weights: &mut Weights) -> Result<(opencl::Device, Matrices)> {
    let device = open_device(options, options.cl_device.as_ref())?;
    let shared = options.zero_copy && device.info().unified_memory;
    if options.zero_copy && !shared {
        options
            .notice
            .warn("`EngineOptions::zero_copy`: this device has its own memory, so the weights are copied");
    }
    let matrices = if shared {
        Matrices::share(&device, weights)?
    } else {
        Matrices::copy(&device, weights, opencl::preferred_place(&device))?
    };
    Ok((device, matrices))
}
