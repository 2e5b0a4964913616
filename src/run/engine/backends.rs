//! Which devices run the sequences of an engine: one, or two, by choice or by measurement.

use super::Engine;
use crate::model::cpu::{self, CpuDevice, CpuOptions};
use crate::model::device::{SharedDevice, locked};
use crate::model::weights::Weights;
use crate::opencl::{self, Matrices, OpenClDevice, OpenClOptions, Place, Variants, Verdict, selftest};
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::session::{Measured, Schedule, Seat, Session, Side, Spare, Standby};
use crate::run::speeds;
use files::{Error, Result};
use std::sync::{Arc, Mutex, OnceLock};

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
                Err(e) => {
                    instead_of(&self.options, e)?;
                    Runs::Cpu
                }
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
        opencl::tune::decide(model, &opencl::Cache::of_user(), &|line| o.notice.say(line))?;
        let on = (model.device().facts(), model.ways()?);
        let speeds = speeds::of_both(
            &speeds::key(&self.options, &self.weights.fingerprint, self.isa, on),
            || Seat::new(self.cpu(&speeds::options(&o))?, speeds::SLOTS),
            || Seat::new(shared(self.opencl(model, &speeds::options(&o))?), speeds::SLOTS),
        )?;
        let measured = Measured::new(speeds);
        let only = measured.only(self.options.max_seq_len);
        speeds::say_why(&self.options, only, speeds);
        Ok(match only {
            Some(Side::Cpu) => Runs::Cpu,
            Some(Side::Gpu) => Runs::Device,
            None => Runs::Both(Schedule::Measured(measured)),
        })
    }

    /// An empty sequence with a cache and a device of its own.
    pub fn session(&self) -> Result<Session> {
        self.session_of(&self.options)
    }

    /// The same with other options for cache, eviction, drafts, threads and attention.
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
        let why = match (o.draft, &self.runs, o.eviction.policy) {
            (0, ..) => return 0,
            (_, _, Policy::SnapKv | Policy::H2o) => {
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
        // As it was measured.
        let gpu_attn = o.gpu_attn || self.options.backend == BackendKind::Auto;
        let o = EngineOptions { gpu_attn, ..o.clone() };
        let mut crew = Crew { engine: self, options: o, device: Team::Cpu, cpu: Arc::default() };
        let made = match (&self.runs, &self.device) {
            (Runs::Device, Some(model)) => {
                self.opencl(model, &crew.options).map(|device| Team::Device(shared(device)))
            }
            (Runs::Both(schedule), Some(model)) => {
                crew.options.gpu_attn = true;
                self.opencl(model, &crew.options).map(|device| Team::Both {
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

    /// The CPU as a device.
    fn cpu(&self, o: &EngineOptions) -> Result<SharedDevice> {
        self.ready_keys(o)?;
        Ok(shared(CpuDevice::new(Arc::clone(&self.weights), self.cpu_options(o))?))
    }

    /// A place on the OpenCL device, with an empty cache; `None` where there is no device.
    pub fn device_seat(&self, o: &EngineOptions) -> Result<Option<Seat>> {
        let Some(model) = &self.device else { return Ok(None) };
        Seat::new(shared(self.opencl(model, o)?), o.max_seq_len).map(Some)
    }

    /// The OpenCL device with the fastest kernels that compute what the CPU does, tried at their first use.
    fn opencl(&self, model: &Arc<opencl::Model>, o: &EngineOptions) -> Result<OpenClDevice> {
        self.ready_keys(o)?;
        opencl::tune::decide(model, &opencl::Cache::of_user(), &|line| o.notice.say(line))?;
        let order = [Variants::OneLaunch, Variants::Fastest, Variants::Baseline];
        let in_one = o.gpu_attn && opencl::in_one_launch(model.device());
        // Kernels for few tokens at once are done without before all others are.
        let few = [Some((o.sequences(), 1 + o.draft)).filter(|&few| few != (1, 1)), Some((1, 1))];
        let order = order.into_iter().skip(usize::from(!in_one));
        let mut why = None;
        for (variants, few) in order.flat_map(|v| few.into_iter().flatten().map(move |few| (v, few))) {
            let mut tried = self.fitting(model, o, (variants, few));
            let say = |line: &str| o.notice.say(line);
            if matches!(tried, Ok(None)) && opencl::tune::recheck(model, &opencl::Cache::of_user(), &say)? {
                tried = self.fitting(model, o, (variants, few));
            }
            why = Some(match tried {
                Ok(Some(device)) => {
                    if let Some(why) = why.filter(|_| model.is_news()) {
                        o.notice.say(&format!("{why}; using plainer kernels"));
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

    /// The device with these kernels, for so many sequences that decode so many tokens each at once; `None` where they do
    /// not compute what the CPU does.
    fn fitting(
        &self,
        model: &Arc<opencl::Model>,
        o: &EngineOptions,
        (variants, (sequences, drafted)): (Variants, (usize, usize)),
    ) -> Result<Option<OpenClDevice>> {
        let attention = match o.gpu_attn {
            true => None,
            false => Some(cpu::attention::for_others(o.threads, self.isa, o.max_seq_len)?),
        };
        let options = OpenClOptions {
            kv_types: o.kv_types,
            slots: o.max_seq_len,
            max_tokens: chunk(o),
            sequences,
            drafted,
            attention,
            rows: match o.zero_copy && model.device().facts().unified_memory {
                true => Place::HostVisible,
                false => opencl::own_place(model.device()),
            },
            evicts: o.eviction.policy != Policy::None,
            variants,
        };
        let mut device = OpenClDevice::new(Arc::clone(model), options)?;
        let passed = self.verdict(&mut device, variants, o)? == Verdict::Passed;
        if !(passed && self.observes_right(&mut device, o)?) {
            return Ok(None);
        }
        if o.eviction.policy != Policy::None && !selftest::keeps_right(&mut device)? {
            device.evict_through_host();
            o.notice.say("OpenCL: kernel keep is left out: it computes wrong results");
        }
        Ok(Some(device))
    }

    /// Times the ways of computing products on the OpenCL device, whatever was found out before, and keeps the fastest;
    /// `None` where there is no device.
    pub fn tune(&self) -> Result<Option<opencl::tune::Tuned>> {
        let timed = |model: &Arc<opencl::Model>| {
            opencl::tune::timed(model, &opencl::Cache::of_user(), &|line| self.options.notice.say(line))
        };
        self.device.as_ref().map(timed).transpose()
    }

    /// Whether a device's kernels compute what the CPU's do: what is noted, else what a test finds.
    fn verdict(&self, device: &mut OpenClDevice, variants: Variants, o: &EngineOptions) -> Result<Verdict> {
        if let Some(verdict) = device.verdict() {
            return Ok(verdict);
        }
        // What only its speed speaks for has no other bits.
        let most = if variants == Variants::OneLaunch { 0.0 } else { selftest::TOLERANCE };
        let verdict = match selftest::distance(device, &mut self.reference(o)?)? {
            d if d <= most => Verdict::Passed,
            _ => Verdict::Failed,
        };
        device.set_verdict(verdict);
        Ok(verdict)
    }

    /// Whether a device measures the same attention mass as the CPU, where evictions depend on it.
    fn observes_right(&self, device: &mut OpenClDevice, o: &EngineOptions) -> Result<bool> {
        if !matches!(o.eviction.policy, Policy::SnapKv | Policy::H2o) {
            return Ok(true);
        }
        Ok(selftest::mass_distance(device, &mut self.reference(o)?)? <= selftest::TOLERANCE)
    }

    /// The CPU, to compare another device with.
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
        let cpu = self.engine.cpu(&self.options)?;
        Ok(Arc::clone(self.cpu.get_or_init(|| cpu)))
    }

    /// The place on the CPU for a sequence whose device is lost.
    fn spare(&self) -> Spare {
        let (weights, options) = (Arc::clone(&self.engine.weights), self.engine.cpu_options(&self.options));
        let (cpu, slots) = (Arc::clone(&self.cpu), self.options.max_seq_len);
        Box::new(move || {
            if cpu.get().is_none() {
                // If two threads come here, the second takes what the first made.
                let _ = cpu.set(shared(CpuDevice::new(weights, options)?));
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

/// Most tokens of a pass: a chunk of a prompt, or a token of every sequence.
fn chunk(o: &EngineOptions) -> usize {
    o.prefill_chunk.clamp(1, o.max_seq_len.max(1)).max(o.sequences())
}

fn shared<D: crate::model::device::Device + 'static>(device: D) -> SharedDevice {
    Arc::new(Mutex::new(device))
}

/// Opens the OpenCL device and brings the weights there.
pub(super) fn upload(options: &EngineOptions, weights: &mut Weights) -> Result<(opencl::Device, Matrices)> {
    let cache = opencl::Cache::of_user();
    let unusable = cache.unusable();
    let device = opencl::Device::open(options.cl_device.as_deref(), cache)?;
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
