//! The OpenCL backend: the whole forward pass, the same steps in the same order as the CPU's.
//!
//! A launch costs the host several microseconds, so for one token five launches cover a layer's nine steps: what is
//! cheap enough is computed again by every work-group instead of being a step of its own (`kernels/gemv.cl`). Nothing
//! waits for the device inside a token: the embedding row and the angles go in, the logits come out.
//!
//! OpenCL is opened at run time: nothing of it is needed to build or to start this program. [`load`] finds a library
//! and a platform, [`device`] chooses a device and holds its queue, [`buffer`] is memory there, [`program`] what runs
//! there, [`cache`] what is kept of it on disk. [`ffi`] is the ABI and [`failure`] what can go wrong.

mod defines;
#[allow(unsafe_code)]
mod floats;
mod form;
pub mod kernels;
mod mass;
mod model;
mod pass;
mod rows;
mod scratch;
pub mod selftest;
mod steps;
mod weights;
mod whole;

pub use opencl_runtime::*;

use crate::dims::*;
use crate::model::backend::{Attention, Backend, CancelToken, KvRows, Lent, Logits};
use crate::model::trace::{Recorder, Steps};
use buffer::Landing;
pub use defines::QKV;
use files::{Error, Result};
use kernels::Kernels;
pub use kernels::Variants;
use mass::Mass;
pub use model::{Matrices, Model};
use numeric::kv::{KvTypes, check_capacity};
use pass::Pass;
use rows::Rows;
pub use rows::parts_bytes;
use scratch::Scratch;
pub use scratch::{bytes as scratch_bytes, logits_bytes};
use std::ops::Range;
use std::sync::Arc;
use steps::{AttendOn, Launches};
use whole::Whole;

/// Set to a number, the device is lost in that forward pass, counted from 1; for tests.
pub const LOSE_VARIABLE: &str = "ANTIGRAVITY_OPENCL_LOSE";

/// How an [`OpenClBackend`] is set up.
pub struct OpenClOptions {
    /// Element types of the cache.
    pub kv_types: KvTypes,
    /// Slots of the cache.
    pub capacity: usize,
    /// Most tokens of one forward pass; fewer where the device's buffers are too small.
    pub max_tokens: usize,
    /// Computes attention on the host, over mapped rows; without it the device does.
    pub attention: Option<Attention>,
    /// Where the cache lies: host-visible to lend it to the CPU, which takes unified memory; else the device's, but
    /// host-visible all the same with attention on the host.
    pub rows: Place,
    /// Which kernels.
    pub variants: Variants,
}

/// Attention on the host, and what it reads and writes.
struct HostAttention {
    attend: Attention,
    /// `[token][QKV]`
    qkv: Vec<f32>,
    /// `[token][Q_DIM]`
    att: Vec<f32>,
}

fn attend_on(host: &Option<HostAttention>) -> AttendOn {
    if host.is_some() { AttendOn::Host } else { AttendOn::Device }
}

/// A model on an OpenCL device.
pub struct OpenClBackend {
    model: Arc<Model>,
    kernels: Kernels,
    rows: Rows,
    scratch: Scratch,
    launches: Launches,
    /// One token in one launch, where the device has it.
    whole: Option<Whole>,
    /// Logits on their way from a device of its own memory.
    landing: Option<Landing>,
    host: Option<HostAttention>,
    /// From the first time on that anybody observes attention.
    mass: Option<Mass>,
    /// Whether the rows may be lent.
    lends: bool,
    /// Radians per position of each rotated pair.
    frequencies: [f64; HEAD_DIM / 2],
    recorder: Option<Recorder>,
    /// What ends passes early.
    cancel: Option<CancelToken>,
    /// Forward passes so far, and the one in which the device is lost.
    passes: (u64, Option<u64>),
}

impl OpenClBackend {
    /// Builds the kernels and allocates cache and scratch.
    pub fn new(model: Arc<Model>, options: OpenClOptions) -> Result<Self> {
        let OpenClOptions { kv_types, capacity, max_tokens, attention, rows, variants } = options;
        let device = &model.device;
        let mut kernels = Kernels::new(device, kv_types, variants)?;
        let shapes = kernels.shapes();
        let max_tokens = if shapes.batches() { max_tokens.clamp(1, capacity.max(1)) } else { 1 };
        let lends = rows == Place::HostVisible && device.facts().unified_memory;
        let place = if attention.is_some() { Place::HostVisible } else { rows };
        let rows = Rows::new(device, kv_types, capacity, place)?;
        let mut scratch = Scratch::new(device, max_tokens)?;
        let host = attention.map(|attend| {
            let floats = |n: usize| vec![0.0; scratch.max_tokens * n];
            HostAttention { attend, qkv: floats(QKV), att: floats(Q_DIM) }
        });
        let on = attend_on(&host);
        let launches = Launches::new(&mut kernels, &model.matrices, &scratch, &rows, on)?;
        let whole = match (on, variants) {
            (AttendOn::Device, Variants::AnyOrder) => {
                Whole::new(device, &model.matrices, &mut scratch, &rows)?
            }
            _ => None,
        };
        let landing = (!device.facts().unified_memory)
            .then(|| Landing::new(device, scratch.logits.len()))
            .transpose()?;
        let lose = std::env::var(LOSE_VARIABLE).ok().and_then(|n| n.parse().ok());
        Ok(Self {
            kernels,
            rows,
            scratch,
            launches,
            whole,
            landing,
            host,
            mass: None,
            lends,
            frequencies: crate::model::rope::frequencies(),
            recorder: None,
            cancel: None,
            passes: (0, lose),
            model,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.model.device
    }

    /// Whether these kernels are known to compute what they should; `None` where nobody has tried.
    pub fn verdict(&self) -> Option<Verdict> {
        self.kernels.verdict()
    }

    /// Notes that, for good.
    pub fn set_verdict(&self, verdict: Verdict) {
        self.kernels.set_verdict(verdict);
    }
}

impl OpenClBackend {
    fn pass(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> Result<()> {
        let Self {
            model,
            rows,
            scratch,
            launches,
            whole,
            landing,
            host,
            mass,
            frequencies,
            recorder,
            cancel,
            passes,
            ..
        } = self;
        passes.0 += 1;
        if passes.1 == Some(passes.0) {
            return Err(Failure::new(Kind::Lost, format!("lost on purpose ({LOSE_VARIABLE})")).into());
        }
        let n = tokens.len();
        let timed = recorder.is_some();
        let steps = Steps::begin(recorder.as_mut(), n);
        let mass = mass.as_mut().filter(|m| m.observed(n) > 0);
        // What slots received of half a pass could not be taken back.
        let cancel = cancel.as_ref().filter(|_| n > 1 && mass.is_none());
        let mut whole = whole.as_mut().filter(|_| n == 1 && !timed && mass.is_none());
        let (observed, massed) = mass.as_ref().map_or((0, 0), |m| (m.observed(n), m.there()));
        scratch.observe(observed, massed);
        if let Some(whole) = &whole {
            whole.prepare(scratch);
        }
        scratch.embed(&model.weights, tokens, rows.len(), (pos, frequencies))?; // rows of the embedding, angles of RoPE
        let host = host.as_mut();
        let (device, landing) = (&model.device, landing.as_mut());
        let mut pass = Pass { device, launches, rows, scratch, landing, host, mass, n, steps, timed };
        pass.done("embed", 0)?;
        if let Some(whole) = &mut whole {
            whole.run(pass.device)?; // all steps of all layers
            pass.logits(out)?;
            self.rows.set_len(self.rows.len() + 1);
            return Ok(());
        }
        for layer in 0..LAYERS {
            if let Some(cancel) = cancel {
                // Launches are only queued: those of all layers would run whatever happens.
                pass.device.finish()?;
                if cancel.is_cancelled() {
                    return Err(Error::Interrupted);
                }
            }
            match n {
                1 => pass.one_token(layer)?,
                _ => pass.many_tokens(layer)?,
            }
            if timed {
                let mut x = [0.0; DIM];
                pass.scratch.residual(n - 1, &mut x)?;
                pass.steps.residual(pos + n - 1, layer, &x);
            }
        }
        pass.head(out)?;
        let len = pass.rows.len() + n;
        pass.rows.set_len(len);
        if let Some(mass) = pass.mass {
            mass.set_there(len);
        }
        Ok(())
    }

    /// Has attention observed into `mass`.
    fn set_mass(&mut self, mass: Mass) -> failure::Result<()> {
        mass.bind(&mut self.launches, &mut self.kernels, &self.model, (&self.scratch, &self.rows))?;
        self.mass = Some(mass);
        Ok(())
    }

    fn mass(&mut self) -> &mut Mass {
        self.mass.as_mut().expect("mass is asked for once it is observed")
    }
}

impl Backend for OpenClBackend {
    fn name(&self) -> String {
        let attention = if self.host.is_some() { "CPU" } else { "GPU" };
        format!("opencl ({}, attention on the {attention})", self.model.device.facts().name)
    }

    fn forward(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> Result<()> {
        let n = tokens.len();
        self.rows.assert_here();
        assert!(n > 0 && n <= self.scratch.max_tokens && self.rows.len() + n <= self.rows.capacity());
        self.pass(tokens, pos, out)
    }

    fn heed(&mut self, cancel: Option<&CancelToken>) {
        self.cancel = cancel.cloned();
    }

    fn max_tokens(&self) -> usize {
        self.scratch.max_tokens
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn capacity(&self) -> usize {
        self.rows.capacity()
    }

    fn kv_types(&self) -> KvTypes {
        self.rows.types()
    }

    fn set_len(&mut self, len: usize) {
        self.rows.set_len(len);
        if let Some(mass) = &mut self.mass {
            mass.set_there(mass.there().min(len));
        }
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        check_capacity(slots, self.rows.len())?;
        let (sizes, len) = ((slots, self.scratch.max_tokens), self.rows.len());
        let mass = self.mass.as_mut().map(|m| m.resized(&self.model.device, sizes, len)).transpose()?;
        self.rows.resize(&self.model.device, slots)?;
        let on = attend_on(&self.host);
        self.launches =
            Launches::new(&mut self.kernels, &self.model.matrices, &self.scratch, &self.rows, on)?;
        if self.whole.is_some() {
            self.whole = Whole::new(&self.model.device, &self.model.matrices, &mut self.scratch, &self.rows)?;
        }
        if let Some(mass) = mass {
            self.set_mass(mass)?;
        }
        Ok(())
    }

    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        self.rows.keep(layer, kv_head, slots)?;
        let len = self.rows.len();
        self.mass.iter_mut().try_for_each(|m| m.keep((layer, kv_head), slots, len))?;
        Ok(())
    }

    fn observe(&mut self, tokens: usize) -> Result<()> {
        if tokens > 0 && self.mass.is_none() {
            let sizes = (self.rows.capacity(), self.scratch.max_tokens);
            self.set_mass(Mass::new(&self.model.device, sizes, attend_on(&self.host))?)?;
        }
        if let Some(mass) = &mut self.mass {
            mass.set_tokens(tokens);
        }
        Ok(())
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        let len = self.rows.len();
        Ok(self.mass().read(layer, len, mass)?)
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        let len = self.rows.len();
        Ok(self.mass().write(layer, len, mass)?)
    }

    fn lend(&mut self) -> Result<Option<Lent>> {
        if !self.lends {
            return Ok(None);
        }
        let rows = self.rows.lend()?;
        if let Some(mass) = &mut self.mass {
            mass.set_there(0);
        }
        Ok(Some(rows))
    }

    fn adopt(&mut self, rows: Lent) -> Result<()> {
        self.rows.take_back(rows)
    }

    fn read_kv(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        Ok(self.rows.read(layer, slots, rows)?)
    }

    fn write_kv(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        Ok(self.rows.write(layer, slots, rows)?)
    }

    fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder> {
        std::mem::replace(&mut self.recorder, recorder)
    }
}
