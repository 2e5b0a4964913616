//! The OpenCL backend: the whole forward pass, the same steps in the same order as the CPU's.
//!
//! A launch costs the host several microseconds, so for one token five launches cover a layer's nine steps: what is
//! cheap enough is computed again by every work-group instead of being a step of its own (`kernels/gemv.cl`). Nothing
//! waits for the device inside a token: the embedding row and the angles go in, the logits come out.
//!
//! OpenCL is opened at run time: nothing of it is needed to build or to start this program. [`load`] finds a library
//! and a platform, [`device`] chooses a device and holds its queue, [`buffer`] is memory there, [`program`] what runs
//! there, [`cache`] what is kept of it on disk. [`ffi`] is the ABI and [`failure`] what can go wrong.

mod arena;
#[allow(unsafe_code)]
pub mod buffer;
pub mod cache;
mod defines;
#[allow(unsafe_code)]
pub mod device;
pub mod facts;
pub mod failure;
#[allow(unsafe_code)]
pub mod ffi;
#[allow(unsafe_code)]
mod floats;
pub mod kernels;
#[allow(unsafe_code)]
pub mod load;
mod mass;
mod model;
#[allow(unsafe_code)]
pub mod program;
mod rows;
mod scratch;
pub mod selftest;
mod steps;
pub mod stream;
mod weights;
mod whole;

pub use buffer::{Access, Buffer, Mapped, Place, SharedView, Staged};
pub use cache::{Cache, Verdict};
pub use device::{Builds, Device};
pub use facts::{DeviceType, Facts};
pub use failure::{Failure, Kind};
pub use program::{Kernel, Program, Source};

use crate::backend::{Attention, AttentionJob, Backend, KvRows, Lent, Logits};
use crate::dims::*;
use crate::error::Result;
use crate::kv::{KvTypes, check_capacity};
use crate::trace::{Recorder, Steps};
use buffer::{Landing, MapFor};
pub use defines::QKV;
pub use kernels::Variants;
use kernels::{CHUNK, FUSED_CHUNKS, Kernels, OBSERVE_ITEMS};
use mass::Mass;
pub use model::{Matrices, Model};
pub use rows::parts_bytes;
use rows::{LayerRows, Rows};
use scratch::Scratch;
pub use scratch::bytes as scratch_bytes;
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
            frequencies: crate::rope::frequencies(),
            recorder: None,
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

/// One forward pass under way.
struct Pass<'a> {
    device: &'a Device,
    launches: &'a mut Launches,
    rows: &'a mut Rows,
    scratch: &'a Scratch,
    landing: Option<&'a mut Landing>,
    host: Option<&'a mut HostAttention>,
    /// Of a pass that is observed.
    mass: Option<&'a mut Mass>,
    /// Tokens.
    n: usize,
    steps: Steps<'a>,
    /// Whether steps are timed, for which the host must wait for each.
    timed: bool,
}

impl Pass<'_> {
    fn done(&mut self, step: &'static str, layer: usize) -> failure::Result<()> {
        if self.timed {
            self.device.finish()?;
            self.steps.done(step, layer);
        }
        Ok(())
    }

    /// One token through one layer. A launch covers what its comment names.
    fn one_token(&mut self, layer: usize) -> failure::Result<()> {
        self.launches.one[layer].qkv.one(self.device)?; // norm, queries, keys and values
        self.done("qkv", layer)?;
        let chunks = (self.rows.len() + 1).div_ceil(CHUNK);
        match &self.launches.one[layer].attend {
            Some(attend) => {
                attend.run(self.device, [chunks * KV_HEADS, 1])?; // positions, the new row, attention in chunks
                self.observe(layer)?;
                self.done("attend", layer)?;
            }
            None => self.attend_on_host(layer)?,
        }
        let l = &self.launches.one[layer];
        match &self.launches.merge {
            Some(_) if chunks <= FUSED_CHUNKS => l.out.one(self.device)?, // attention whole, projection, onto the residual
            merge => {
                merge.iter().try_for_each(|m| m.run(self.device, [HEADS, 1]))?;
                l.out_merged.one(self.device)?; // attention's output joins the residual
            }
        }
        self.done("out", layer)?;
        self.launches.one[layer].gate_up.one(self.device)?; // norm, silu(gate) * up
        self.done("gate_up", layer)?;
        self.launches.one[layer].down.one(self.device)?; // back to the residual's width, and joins it
        self.done("down", layer)
    }

    /// Many tokens through one layer.
    fn many_tokens(&mut self, layer: usize) -> failure::Result<()> {
        let (device, n) = (self.device, self.n);
        self.launches.many[layer].norm.run(device, [n, 1])?; // RMS norm before attention
        self.done("norm", layer)?;
        self.launches.many[layer].qkv.many(device, n)?; // queries, keys and values
        self.done("qkv", layer)?;
        match &self.launches.many[layer].attend {
            Some(attend) => {
                self.launches.rope[layer].run(device, [HEADS + 2 * KV_HEADS, n])?; // positions, new rows
                let tiles = (n * GROUP).div_ceil(self.launches.queries);
                attend.run(device, [tiles, KV_HEADS])?; // each query over all slots up to its own
                self.observe(layer)?;
                self.done("attend", layer)?;
            }
            None => self.attend_on_host(layer)?,
        }
        let l = &mut self.launches.many[layer];
        l.att.run(device, [n, 1])?;
        l.out.many(device, n)?; // attention's output joins the residual
        self.done("out", layer)?;
        self.launches.many[layer].ffn_norm.run(device, [n, 1])?; // RMS norm before the feed-forward layer
        self.done("norm", layer)?;
        let l = &mut self.launches.many[layer];
        l.gate_up.many(device, n)?;
        l.silu.run(device, [n, 1])?; // silu(gate) * up
        self.done("gate_up", layer)?;
        self.launches.many[layer].down.many(device, n)?; // back to the residual's width, and joins it
        self.done("down", layer)
    }

    /// Adds the attention that was just computed on the device to the mass of the slots, if it is observed.
    fn observe(&self, layer: usize) -> failure::Result<()> {
        if self.mass.is_none() {
            return Ok(());
        }
        let observe = &self.launches.observe[layer];
        let launch = match &observe.many {
            Some(many) if self.n > 1 => many,
            _ => &observe.one,
        };
        launch.run(self.device, [(self.rows.len() + self.n).div_ceil(OBSERVE_ITEMS), KV_HEADS])
    }

    /// Positions and new rows on the device, then attention on the host over the mapped rows.
    fn attend_on_host(&mut self, layer: usize) -> failure::Result<()> {
        let (device, n) = (self.device, self.n);
        self.launches.rope[layer].run(device, [HEADS + 2 * KV_HEADS, n])?;
        self.done("rope", layer)?;
        let host = self.host.as_mut().expect("invariant: without attention there is a host's");
        let (qkv, att) = (&mut host.qkv[..n * QKV], &mut host.att[..n * Q_DIM]);
        self.scratch.qkv.read(0, floats::bytes_mut(qkv))?;
        let (types, capacity, before) = (self.rows.types(), self.rows.capacity(), self.rows.len());
        // Up to the last head's last slot.
        let used = (KV_HEADS - 1) * capacity + before + n;
        let LayerRows { k, v } = self.rows.layer_mut(layer);
        let k = k.map(0..used * types.k.row_bytes(HEAD_DIM), MapFor::Reading)?;
        let v = v.map(0..used * types.v.row_bytes(HEAD_DIM), MapFor::Reading)?;
        (host.attend)(AttentionJob {
            tokens: n,
            before,
            queries: qkv,
            stride: QKV,
            k: &k,
            v: &v,
            capacity,
            types,
            att,
            mass: self.mass.as_mut().and_then(|m| m.on_host(layer, before + n, n)),
        });
        k.unmap()?;
        v.unmap()?;
        self.scratch.att.write(0, floats::bytes(att))?;
        self.done("attend", layer)
    }

    /// Logits of the last token, or of all.
    fn head(&mut self, out: Logits<'_>) -> failure::Result<()> {
        let (device, n, s) = (self.device, self.n, self.scratch);
        match out {
            // Nobody waits, so the device has to be told to begin.
            Logits::None => return device.flush(),
            Logits::All(logits) if n > 1 => {
                let norm = self.launches.norm.as_mut().expect("invariant: there is a norm for many tokens");
                for (i, logits) in logits.chunks_mut(s.logit_rows * VOCAB).enumerate() {
                    let rows = logits.len() / VOCAB;
                    norm.start_at(i * s.logit_rows)?.run(device, [rows, 1])?; // final RMS norm
                    self.launches.heads.many(device, rows)?; // one logit per vocabulary entry
                    read_logits(s, &mut self.landing, logits)?;
                }
            }
            Logits::Last(logits) | Logits::All(logits) => {
                self.launches.head.one(device)?; // final RMS norm, one logit per vocabulary entry
                read_logits(s, &mut self.landing, logits)?;
            }
        }
        self.done("head", LAYERS)
    }

    /// The logits of a token that was one launch, if anybody wants them.
    fn logits(&mut self, out: Logits<'_>) -> failure::Result<()> {
        match out {
            Logits::None => self.device.flush(),
            Logits::Last(logits) | Logits::All(logits) => {
                read_logits(self.scratch, &mut self.landing, logits)?;
                // What the kernel says where not all of its groups came to its barrier.
                match logits[0].is_nan() {
                    true => {
                        Err(Failure::new(Kind::Lost, "groups of kernel decode were not all running at once"))
                    }
                    false => Ok(()),
                }
            }
        }
    }
}

/// Waits for the logits that the last launch computes.
fn read_logits(s: &Scratch, landing: &mut Option<&mut Landing>, logits: &mut [f32]) -> failure::Result<()> {
    let bytes = floats::bytes_mut(logits);
    match landing {
        Some(landing) => landing.read(&s.logits, bytes),
        None => s.logits.read(0, bytes),
    }
}

impl OpenClBackend {
    fn pass(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> failure::Result<()> {
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
            passes,
            ..
        } = self;
        passes.0 += 1;
        if passes.1 == Some(passes.0) {
            return Err(Failure::new(Kind::Lost, format!("lost on purpose ({LOSE_VARIABLE})")));
        }
        let n = tokens.len();
        let timed = recorder.is_some();
        let steps = Steps::begin(recorder.as_mut(), n);
        let mass = mass.as_mut().filter(|m| m.observed(n) > 0);
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
        Ok(self.pass(tokens, pos, out)?)
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
