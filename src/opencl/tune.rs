//! Which way of computing products is fastest on a device: timed at the first use, then kept with the programs.
//!
//! The step with the largest matrices stands for all of a layer. Its forms are timed first, then what can be added to the
//! fastest, so that few programs are compiled. Each must give the bits of the plain kernel before it is timed. NVIDIA's
//! devices have kernels of their own, and nothing is timed there.

use super::defines::{Defines, FFN_PAD};
use super::kernels::{Kernels, SOURCES, Variants};
use super::launches::{AttendOn, Binder, Launch, Products};
use super::scratch::Scratch;
use super::storage::Step;
use super::ways::{Form, Tokens, Way, Ways};
use super::weights::Model;
use crate::dims::*;
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::buffer::bytes_of;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use opencl_runtime::program_cache::{Attempt, Cache};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Tokens of the products of many.
const MANY: usize = 64;
/// Layers whose matrices are read in turn, so that they do not stay in a cache.
const LAYERS_IN_TURN: usize = if LAYERS < 8 { LAYERS } else { 8 };
/// After that nothing more is compiled to be tried, for one token or for many.
const ENOUGH: Duration = Duration::from_secs(8);
/// How long one way is timed, if it takes less.
const EACH: Duration = Duration::from_millis(20);
/// The step that stands for all.
const STEP: Step = Step::GateUp;

/// What one way took.
pub struct Timed {
    /// Of one token or of many.
    pub tokens: Tokens,
    /// Which.
    pub way: Way,
    /// Of one product.
    pub took: Duration,
}

/// What was found out.
pub struct Tuned {
    /// The fastest.
    pub ways: Ways,
    /// All that computed what they should, in the order tried.
    pub table: Vec<Timed>,
}

/// Decides how a model's products are computed, unless that is decided: as was found out before, else by timing.
/// `say` is told what takes time, and what is left out and why.
///
/// # Errors
///
/// Where the device is lost.
pub fn decide(model: &Model, cache: &Cache, say: &dyn Fn(&str)) -> files::Result<()> {
    let facts = model.device.facts();
    if model.has_ways() || facts.compute_capability.is_some() || Ways::forced(facts)?.is_some() {
        return Ok(());
    }
    let ways = match cache.recall(&key(model)).and_then(|names| names.parse().ok()) {
        Some(ways) => ways,
        None => timed(model, cache, say)?.ways,
    };
    model.set_ways(ways);
    Ok(())
}

/// Times all, whatever was found out before, and keeps what is fastest.
///
/// # Errors
///
/// As [`decide`].
pub fn timed(model: &Model, cache: &Cache, say: &dyn Fn(&str)) -> files::Result<Tuned> {
    let key = key(model);
    say(&format!("OpenCL: timing kernels on {}, once", model.device.facts().name));
    let mut tuner = Tuner::new(model, cache, &key, say)?;
    for tokens in [Tokens::Many, Tokens::One] {
        tuner.choose(tokens)?;
    }
    let tuned = tuner.tuned;
    cache.remember(&key, &tuned.ways.to_string());
    Ok(tuned)
}

/// Names everything that speeds depend on.
fn key(model: &Model) -> String {
    let mut sources = DefaultHasher::new();
    SOURCES.hash(&mut sources);
    let of_layers = model.matrices.layers.iter().flat_map(|l| &l.steps).chain([&model.matrices.head]);
    let stored = of_layers.flat_map(|step| &step.chunks).map(|chunk| chunk.storage.number());
    stored.collect::<Vec<_>>().hash(&mut sources);
    let device = model.device.facts().identity();
    format!("ways {:016x} on {device:?} {}", sources.finish(), Defines::of_model().as_str())
}

struct Tuner<'a> {
    model: &'a Model,
    cache: &'a Cache,
    key: &'a str,
    say: &'a dyn Fn(&str),
    kernels: Kernels,
    scratch: Scratch,
    began: Instant,
    left_out: Vec<(Tokens, Way)>,
    tuned: Tuned,
}

/// One way, ready to run.
struct Trial {
    /// Of some layers.
    products: Vec<(Option<Launch>, Products)>,
}

impl<'a> Tuner<'a> {
    fn new(model: &'a Model, cache: &'a Cache, key: &'a str, say: &'a dyn Fn(&str)) -> Result<Self> {
        let device = &model.device;
        let kernels = Kernels::new(device, KvTypes::both(KvType::F16), Variants::Fastest, Ways::default())?;
        let many = if kernels.shapes().batches() { MANY } else { 1 };
        let scratch = Scratch::new(device, many, 1)?;
        let tuned = Tuned { ways: Ways::default(), table: Vec::new() };
        let (began, left_out) = (Instant::now(), Vec::new());
        Ok(Self { model, cache, key, say, kernels, scratch, began, left_out, tuned })
    }

    fn device(&self) -> &'a Device {
        &self.model.device
    }

    /// Finds the fastest way for all steps with so many tokens.
    fn choose(&mut self, tokens: Tokens) -> Result<()> {
        let quantised = self.model.matrices.layers[0].steps[STEP as usize].quantised();
        if !quantised || (tokens == Tokens::Many && self.scratch.max_tokens == 1) {
            return Ok(());
        }
        let (plain, expected) = self.plain(tokens)?;
        self.began = Instant::now();
        let mut best = (plain, Way::PLAIN);
        for form in [Form::Floats, Form::Rows, Form::Tile] {
            for dot in [false, true] {
                self.better(tokens, &mut best, Way { form, dot, ..Way::PLAIN }, &expected)?;
            }
        }
        let changes: [fn(Way) -> Way; 5] = [
            |way| Way { four: true, ..way },
            // What is slow with one row of an item may be fast with four.
            |way| Way { form: Form::Floats, dot: false, ..way },
            |way| Way { small: true, ..way },
            |way| Way { subgroups: true, ..way },
            |way| Way { image: true, ..way },
        ];
        for change in changes {
            let way = change(best.1);
            self.better(tokens, &mut best, way, &expected)?;
        }
        for step in Step::ALL {
            self.tuned.ways.set(tokens, step, best.1);
        }
        Ok(())
    }

    /// The plain kernel: what it takes, and its bits.
    fn plain(&mut self, tokens: Tokens) -> Result<(Duration, Vec<u8>)> {
        let mut trial = self.trial(tokens, Way::PLAIN)?;
        let (first, expected) = self.first(&mut trial, tokens)?;
        let took = self.time(&mut trial, first)?;
        self.tuned.table.push(Timed { tokens, way: Way::PLAIN, took });
        Ok((took, expected))
    }

    /// Takes `way` instead of the best so far where it is faster.
    fn better(
        &mut self,
        tokens: Tokens,
        best: &mut (Duration, Way),
        way: Way,
        expected: &[u8],
    ) -> Result<()> {
        let stored = self.model.matrices.layers[0].steps[STEP as usize].chunks[0].storage;
        self.kernels.set_way(tokens, STEP, way);
        let computed = self.kernels.way(tokens, STEP, stored);
        let mut tried =
            self.tuned.table.iter().map(|t| (t.tokens, t.way)).chain(self.left_out.iter().copied());
        let tried = tried.any(|t| t == (tokens, computed));
        let there = way.makes_sense() && way.missing(self.device().facts()).is_none();
        if tried || computed != way || !there || self.began.elapsed() > ENOUGH {
            return Ok(());
        }
        let name = match tokens {
            Tokens::One => format!("gemv:{way}"),
            Tokens::Many => format!("gemm:{way}"),
        };
        let marker = match self.cache.attempt(&format!("{name} {}", self.key)) {
            Attempt::Begun(marker) => marker,
            Attempt::Crashed(path) => {
                let why = format!("the driver crashed or hung on it; remove {} to try again", path.display());
                self.leave_out((tokens, way), &name, &why);
                return Ok(());
            }
        };
        match self.tried(tokens, way, expected, best.0) {
            Ok(Some(took)) => {
                self.tuned.table.push(Timed { tokens, way, took });
                if took < best.0 {
                    *best = (took, way);
                }
            }
            Ok(None) => self.leave_out((tokens, way), &name, "it computes wrong results"),
            Err(e) if self.device().is_lost() => {
                // For good: the marker stays.
                std::mem::forget(marker);
                return Err(e);
            }
            Err(e) => self.leave_out((tokens, way), &name, &e.message),
        }
        Ok(())
    }

    fn leave_out(&mut self, way: (Tokens, Way), name: &str, why: &str) {
        self.left_out.push(way);
        (self.say)(&format!("OpenCL: variant {name} is left out: {why}"));
    }

    /// What a way takes; `None` where it does not give the expected bits.
    fn tried(
        &mut self,
        tokens: Tokens,
        way: Way,
        expected: &[u8],
        best: Duration,
    ) -> Result<Option<Duration>> {
        let mut trial = self.trial(tokens, way)?;
        let (first, found) = self.first(&mut trial, tokens)?;
        if found != expected {
            return Ok(None);
        }
        // The first time may be slow, but not so much.
        if first > 10 * best { Ok(Some(first)) } else { self.time(&mut trial, first).map(Some) }
    }

    fn trial(&mut self, tokens: Tokens, way: Way) -> Result<Trial> {
        self.kernels.set_way(tokens, STEP, way);
        let matrices = &self.model.matrices;
        let (kernels, scratch) = (&mut self.kernels, &self.scratch);
        let mut binder = Binder { kernels, matrices, calibration: &[], scratch, attend: AttendOn::Device };
        let of_layer = |l| match tokens {
            Tokens::One => binder.one(STEP, l).map(|products| (None, products)),
            Tokens::Many => binder.many(STEP, l).map(|(input, products)| (Some(input), products)),
        };
        let products = matrices.layers[..LAYERS_IN_TURN].iter().map(of_layer).collect::<Result<_>>()?;
        Ok(Trial { products })
    }

    /// Runs a way once on what it is always tried on: what it took, and what it left.
    fn first(&mut self, trial: &mut Trial, tokens: Tokens) -> Result<(Duration, Vec<u8>)> {
        let s = &self.scratch;
        let n = if tokens == Tokens::One { 1 } else { s.max_tokens };
        let state: Vec<f32> =
            (0..s.state.buffer().len() as u32 / 4).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
        // Without a header, which no kernel of this step reads.
        s.state.buffer().write(64, &bytes_of(&state)[64..])?;
        let (acts, scales, gate_up) = (4 * FFN_DIM, FFN_DIM / 8, 4 * n * HALVES * FFN_PAD);
        s.acts.write(0, &vec![0; acts])?;
        s.act_scales.write(0, &vec![0; scales])?;
        s.gate_up.write(0, &vec![0; gate_up])?;
        let began = Instant::now();
        Self::run(&mut trial.products[0], self.model.device(), n)?;
        self.device().finish()?;
        let took = began.elapsed();
        let s = &self.scratch;
        let mut found = vec![0; if tokens == Tokens::One { acts + scales } else { gate_up }];
        match tokens {
            Tokens::One => {
                s.acts.read(0, &mut found[..acts])?;
                s.act_scales.read(0, &mut found[acts..])?;
            }
            Tokens::Many => s.gate_up.read(0, &mut found)?,
        }
        Ok((took, found))
    }

    fn run((input, products): &mut (Option<Launch>, Products), device: &Device, n: usize) -> Result<()> {
        match input {
            Some(input) => {
                input.run(device, [n, 1])?;
                products.many(device, n)
            }
            None => products.one(device),
        }
    }

    /// What a product takes, when `first` is what the first one took: the fastest of some rounds.
    fn time(&mut self, trial: &mut Trial, first: Duration) -> Result<Duration> {
        let n = if trial.products[0].0.is_some() { self.scratch.max_tokens } else { 1 };
        let times = (EACH.as_secs_f64() / 3.0 / first.as_secs_f64().max(1e-6)).clamp(1.0, 64.0) as usize;
        let mut best = first;
        let rounds = if first > EACH { 1 } else { 3 };
        for _ in 0..rounds {
            let began = Instant::now();
            for i in 0..times {
                let layers = trial.products.len();
                Self::run(&mut trial.products[i % layers], self.model.device(), n)?;
            }
            self.device().finish()?;
            best = best.min(began.elapsed() / times as u32);
        }
        Ok(best)
    }
}

/// Matrices side by side.
const HALVES: usize = STEP.halves();
