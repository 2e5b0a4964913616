//! Which devices run the sequences of an engine: one, or two, by choice or by measurement.

use super::Engine;
use super::maker::{self, Maker, chunk, shared};
use super::meanwhile::Workers;
use crate::model::device::{SharedDevice, locked};
use crate::model::weights::Weights;
use crate::opencl::{self, Matrices};
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::session::{Arrived, Measured, Schedule, Seat, Session, Side, Spare, Standby};
use crate::run::speeds;
use files::{Error, Result};
use std::sync::{Arc, OnceLock};

/// What runs the sequences of an engine.
#[derive(Clone)]
pub(super) enum Runs {
    /// The CPU.
    Cpu,
    /// The OpenCL device.
    Device,
    /// Both, as this says.
    Both(Schedule),
}

impl Engine {
    /// Settles what runs, once the weights are where they belong.
    pub(super) fn decide(&mut self) -> Result<()> {
        if matches!(self.runs()?, Runs::Cpu) {
            self.device = None;
        }
        Ok(())
    }

    /// What runs: for `auto` what is found by measuring both.
    fn runs(&self) -> Result<&Runs> {
        if let Some(runs) = self.runs.get() {
            return Ok(runs);
        }
        let runs = match (self.options.backend, &self.device) {
            (BackendKind::Cpu, _) | (_, None) => Runs::Cpu,
            (BackendKind::OpenCl, _) => Runs::Device,
            (BackendKind::Hybrid, _) => Runs::Both(Schedule::Fixed(self.options.hybrid.clone())),
            (BackendKind::Auto, Some(model)) => match fastest(&self.maker, model, &self.options) {
                Ok(runs) => runs,
                Err(e) => {
                    instead_of(&self.options, e)?;
                    Runs::Cpu
                }
            },
        };
        Ok(self.runs.get_or_init(|| runs))
    }

    /// An empty sequence with a cache and a device of its own. Where [`EngineOptions::wait_for_gpu`] is false it may begin
    /// on the CPU, and goes on on the device when that is ready. Whoever drops the engine and its last such session before
    /// waits for the program that is being compiled.
    pub fn session(&self) -> Result<Session> {
        match (&self.device, &self.workers) {
            (Some(model), Some(workers)) if self.begins_early() => self.early_session(model, workers),
            _ => self.session_of(&self.options),
        }
    }

    /// Whether a sequence would begin on the CPU.
    pub(super) fn begins_early(&self) -> bool {
        !self.options.wait_for_gpu && self.must_compile()
    }

    fn early_session(&self, model: &Arc<opencl::Model>, workers: &Arc<Workers>) -> Result<Session> {
        let crew = Crew { engine: self, options: self.alone(), device: Team::Cpu, cpu: Arc::default() };
        let o = &crew.options;
        let name = &model.device().facts().name;
        o.notice.say(&format!("OpenCL: compiling kernels for {name}, once; the CPU begins meanwhile"));
        let Ok(mut made) = workers.make(self.maker.clone(), Arc::clone(model), o.clone()) else {
            return self.session_of(&self.options);
        };
        let (mut settled, maker) = (self.runs.get().cloned(), self.maker.clone());
        let (model, options) = (Arc::clone(model), self.options.clone());
        let arrives = move || {
            let mut runs = || settled.take().map_or_else(|| fastest(&maker, &model, &options), Ok);
            let device = made()?;
            Some(device.and_then(|device| {
                Ok(match runs()? {
                    Runs::Cpu => Arrived::Unneeded,
                    Runs::Device => Arrived::ForAll(device),
                    Runs::Both(schedule) => Arrived::Beside(device, schedule),
                })
            }))
        };
        let session = crew.session()?.with_spare(crew.spare(), o.notice.clone());
        self.drafting(session.with_awaited(Box::new(arrives)), o, self.drafted(o))
    }

    /// Whether the device's kernels are still to be compiled or, for `auto`, to be timed, and the CPU can compute
    /// meanwhile.
    pub fn must_compile(&self) -> bool {
        let model = self.device.as_ref().filter(|_| self.workers.is_some());
        model.is_some_and(|model| !(maker::was_made(model, &self.alone()) && self.has_speeds(model)))
    }

    /// Whether nothing is to be timed to settle what runs.
    fn has_speeds(&self, model: &opencl::Model) -> bool {
        let (o, facts) = (&self.options, model.device().facts());
        o.backend != BackendKind::Auto
            || speeds::known(o, &self.maker.weights.fingerprint, self.maker.isa, facts).is_some()
    }

    /// The options for one sequence.
    fn alone(&self) -> EngineOptions {
        EngineOptions { batch: 1, ..self.attending(&self.options) }
    }

    /// The options with attention where it is computed: on the device as `auto` measures it, and where there are two.
    fn attending(&self, o: &EngineOptions) -> EngineOptions {
        let two = matches!(self.runs.get(), Some(Runs::Both(_)));
        let always = self.options.backend == BackendKind::Auto || two;
        EngineOptions { gpu_attn: o.gpu_attn || always, ..o.clone() }
    }

    /// [`Engine::session`] with other options for cache, eviction, drafts, threads and attention.
    pub fn session_of(&self, o: &EngineOptions) -> Result<Session> {
        let o = EngineOptions { batch: 1, ..o.clone() };
        self.drafting(self.crew(&o)?.session()?, &o, self.drafted(&o))
    }

    /// Empty sequences on the same devices, whose tokens are computed together: see [`crate::session::compute`].
    ///
    /// # Errors
    ///
    /// `Memory`; what the options or the device do not allow.
    pub fn sessions_of(&self, o: &EngineOptions, sequences: usize) -> Result<Vec<Session>> {
        let o = EngineOptions { batch: sequences, ..o.clone() };
        let (crew, drafted) = (self.crew(&o)?, self.drafted(&o));
        (0..sequences).map(|_| self.drafting(crew.session()?, &o, drafted)).collect()
    }

    /// Most tokens of a draft with these options. Where there can be none, that is said.
    fn drafted(&self, o: &EngineOptions) -> usize {
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
    fn drafting(&self, session: Session, o: &EngineOptions, most: usize) -> Result<Session> {
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
    fn crew(&self, o: &EngineOptions) -> Result<Crew<'_>> {
        let options = self.attending(o);
        self.ready_keys(&options)?;
        let mut crew = Crew { engine: self, options, device: Team::Cpu, cpu: Arc::default() };
        let made = match (self.runs()?, &self.device) {
            (Runs::Device, Some(model)) => {
                self.maker.opencl(model, &crew.options).map(|device| Team::Device(shared(device)))
            }
            (Runs::Both(schedule), Some(model)) => {
                self.maker.opencl(model, &crew.options).map(|device| Team::Both {
                    one_cache: device.shares_rows(),
                    device: shared(device),
                    schedule: schedule.clone(),
                })
            }
            _ => Ok(Team::Cpu),
        };
        match made {
            Ok(team) => crew.device = team,
            Err(e) => instead_of(&crew.options, e)?,
        }
        Ok(crew)
    }

    /// A place on the OpenCL device, with an empty cache; `None` where there is no device.
    pub fn device_seat(&self, o: &EngineOptions) -> Result<Option<Seat>> {
        let Some(model) = &self.device else { return Ok(None) };
        self.ready_keys(o)?;
        Seat::new(shared(self.maker.opencl(model, o)?), o.max_seq_len).map(Some)
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

/// What `auto` chooses, and says why.
fn fastest(maker: &Maker, model: &Arc<opencl::Model>, options: &EngineOptions) -> Result<Runs> {
    let o = EngineOptions { gpu_attn: true, ..options.clone() };
    opencl::tune::decide(model, &opencl::Cache::of_user(), &|line| o.notice.say(line))?;
    let on = (model.device().facts(), model.variants()?);
    let speeds = speeds::of_both(
        &speeds::key(options, &maker.weights.fingerprint, maker.isa, on),
        || Seat::new(shared(maker.cpu(&speeds::options(&o))?), speeds::SLOTS),
        || Seat::new(shared(maker.opencl(model, &speeds::options(&o))?), speeds::SLOTS),
    )?;
    let measured = Measured::new(speeds);
    let only = measured.only(options.max_seq_len);
    speeds::say_why(options, only, speeds);
    Ok(match only {
        Some(Side::Cpu) => Runs::Cpu,
        Some(Side::Gpu) => Runs::Device,
        None => Runs::Both(Schedule::Measured(measured)),
    })
}

/// The devices that some sequences share.
struct Crew<'a> {
    engine: &'a Engine,
    options: EngineOptions,
    device: Team,
    /// The CPU, once a sequence needs it.
    cpu: Arc<OnceLock<SharedDevice>>,
}

/// Which devices those are.
enum Team {
    Cpu,
    Device(SharedDevice),
    Both {
        device: SharedDevice,
        /// Whether the device's cache serves the CPU too.
        one_cache: bool,
        schedule: Schedule,
    },
}

impl Crew<'_> {
    /// The CPU, one for all sequences.
    fn cpu(&self) -> Result<SharedDevice> {
        if let Some(cpu) = self.cpu.get() {
            return Ok(Arc::clone(cpu));
        }
        let cpu = shared(self.engine.maker.cpu(&self.options)?);
        Ok(Arc::clone(self.cpu.get_or_init(|| cpu)))
    }

    /// The place on the CPU for a sequence whose device is lost.
    fn spare(&self) -> Spare {
        let (maker, options) = (self.engine.maker.clone(), self.options.clone());
        let (cpu, slots) = (Arc::clone(&self.cpu), options.max_seq_len);
        Box::new(move || {
            if cpu.get().is_none() {
                // If two threads come here, the second takes what the first made.
                let _ = cpu.set(shared(maker.cpu(&options)?));
            }
            Seat::new(Arc::clone(cpu.get().expect("invariant: just set")), slots)
        })
    }

    /// An empty sequence, which in a hybrid session begins on the CPU.
    fn session(&self) -> Result<Session> {
        let o = &self.options;
        match self.seated().and_then(|s| s.with_eviction(o.eviction)) {
            Err(e) if !matches!(self.device, Team::Cpu) => {
                instead_of(o, e)?;
                Session::new(Seat::new(self.cpu()?, o.max_seq_len)?).with_eviction(o.eviction)
            }
            made => made,
        }
    }

    fn seated(&self) -> Result<Session> {
        let (o, slots) = (&self.options, self.options.max_seq_len);
        Ok(match &self.device {
            Team::Cpu => Session::new(Seat::new(self.cpu()?, slots)?),
            Team::Device(device) => {
                Session::new(Seat::new(Arc::clone(device), slots)?).with_spare(self.spare(), o.notice.clone())
            }
            Team::Both { device, one_cache, schedule } => {
                let (device, schedule) = (Arc::clone(device), schedule.clone());
                let there = locked(&device).new_cache(slots)?;
                let cpu = self.cpu()?;
                let (seat, cache) = match one_cache {
                    true => (Seat { device: cpu, cache: there }, None),
                    false => (Seat::new(cpu, slots)?, Some(there)),
                };
                let standby = Standby { device, cache, schedule };
                Session::new(seat).with_spare(self.spare(), o.notice.clone()).with_standby(standby)
            }
        })
    }
}

/// Says that the CPU runs, because of what a device failed with; `auto` takes it even where the device has no room.
pub(super) fn instead_of(o: &EngineOptions, failure: Error) -> Result<()> {
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
