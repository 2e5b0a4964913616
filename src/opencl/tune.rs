//! Which way of computing products is fastest on a device: timed at the first use, then kept with the programs.
//!
//! All ways are timed with the step that has the largest matrices: the forms first, then what can be added to the
//! fastest, so that few programs are compiled. The best two are then timed with each other step, whose shape may want
//! another. Each must give the bits of the plain kernel before it is timed. Compilers may be slow: after some seconds
//! nothing more is compiled to be tried, but for one form each for one token and for many, and what was best so far is
//! taken for what is left. At last the launches of a token are timed as a recording. Where a self-test finds that the
//! chosen ways compute something else after all, [`recheck`] finds out what is wrong. NVIDIA's devices have kernels of
//! their own, and nothing is timed there.

mod recording;
mod trial;

use super::defines::Defines;
use super::kernels::{Kernels, SOURCES};
use super::scratch::Scratch;
use super::shapes::Variants;
use super::storage::{Step, Storage};
use super::ways::{Form, Tokens, Way, Ways};
use super::weights::Model;
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::device::Device;
use opencl_runtime::facts::Facts;
use opencl_runtime::failure::{Failure, Kind, Result};
use opencl_runtime::program_cache::{Attempt, Cache, Marker};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Tokens of the products of many.
const MANY: usize = 64;
/// After that nothing more is compiled to be tried: with the step that stands for all and with the others, for many
/// tokens and again for one. What is compiled for the chosen way would be compiled anyway.
const ENOUGH: [Duration; 2] = [Duration::from_millis(2500), Duration::from_millis(4000)];
/// The step that stands for all.
const STEP: Step = Step::GateUp;

/// What one way took.
pub struct Timed {
    /// Of one token or of many.
    pub tokens: Tokens,
    /// With which step.
    pub step: Step,
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
    /// What the launches of a token took, queued one by one and recorded; `None` where they cannot be recorded, or were
    /// wrong.
    pub recording: Option<[Duration; 2]>,
}

/// How products of the model with this fingerprint are computed on a device, if that is known without either at hand.
///
/// # Errors
///
/// Those of [`Ways::forced`].
pub fn known(facts: &Facts, fingerprint: &str, cache: &Cache) -> files::Result<Option<Ways>> {
    Ok(match Ways::forced(facts)? {
        None if facts.compute_capability.is_some() => Some(Ways::default()),
        None => cache.recall(&name_of(facts, fingerprint)).and_then(|names| names.parse().ok()),
        forced => forced,
    })
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
        Some(ways) => {
            if known(facts, &model.weights.fingerprint, cache)? != Some(ways) {
                keep(model, cache, ways);
            }
            ways
        }
        None => timed(model, cache, say)?.ways,
    };
    model.set_ways(ways);
    Ok(())
}

/// Remembers how products are computed, for all models of this shape, and for this one where it is not at hand.
fn keep(model: &Model, cache: &Cache, ways: Ways) {
    for name in [key(model), name_of(model.device.facts(), &model.weights.fingerprint)] {
        cache.remember(&name, &ways.to_string());
    }
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
    tuner.choose_recording()?;
    let tuned = tuner.tuned;
    keep(model, cache, tuned.ways);
    Ok(tuned)
}

/// Compares what the chosen ways compute with what the plain kernels do, and takes these instead where it is not the same.
/// Whether any was.
///
/// # Errors
///
/// Where the device is lost.
pub fn recheck(model: &Model, cache: &Cache, say: &dyn Fn(&str)) -> files::Result<bool> {
    let key = key(model);
    if !model.has_ways() || Ways::forced(model.device.facts())?.is_some() {
        return Ok(false);
    }
    let mut tuner = Tuner::new(model, cache, &key, say)?;
    tuner.tuned.ways = model.ways()?;
    for (tokens, step) in [Tokens::Many, Tokens::One].into_iter().flat_map(|t| Step::ALL.map(|s| (t, s))) {
        tuner.check(tokens, step)?;
    }
    let found = !tuner.left_out.is_empty() || tuner.without_recording();
    let ways = tuner.tuned.ways;
    model.set_ways(ways);
    keep(model, cache, ways);
    Ok(found)
}

/// Names everything that speeds depend on: device, kernels and model.
pub fn key(model: &Model) -> String {
    let mut sources = DefaultHasher::new();
    SOURCES.hash(&mut sources);
    let of_layers = model.matrices.layers.iter().flat_map(|l| &l.steps).chain([&model.matrices.head]);
    let stored = of_layers.flat_map(|step| &step.chunks).map(|chunk| chunk.storage.number());
    stored.collect::<Vec<_>>().hash(&mut sources);
    let device = model.device.facts().identity();
    format!("ways {:016x} on {device:?} {}", sources.finish(), Defines::of_model().as_str())
}

/// What they are remembered under for one model.
fn name_of(facts: &Facts, fingerprint: &str) -> String {
    format!("ways of {fingerprint} on {:?} {}", facts.identity(), env!("CARGO_PKG_VERSION"))
}

struct Tuner<'a> {
    model: &'a Model,
    cache: &'a Cache,
    key: &'a str,
    say: &'a dyn Fn(&str),
    kernels: Kernels,
    scratch: Scratch,
    /// Of the search for one token or for many.
    began: Instant,
    left_out: Vec<(Tokens, Step, Way)>,
    tuned: Tuned,
}

impl<'a> Tuner<'a> {
    fn new(model: &'a Model, cache: &'a Cache, key: &'a str, say: &'a dyn Fn(&str)) -> Result<Self> {
        let device = &model.device;
        let kernels = Kernels::new(device, KvTypes::both(KvType::F16), Variants::Fastest, Ways::default())?;
        let many = if kernels.shapes().batches() { MANY } else { 1 };
        let scratch = Scratch::new(device, many, (1, 1))?;
        let tuned = Tuned { ways: Ways::default(), table: Vec::new(), recording: None };
        let (began, left_out) = (Instant::now(), Vec::new());
        Ok(Self { model, cache, key, say, kernels, scratch, began, left_out, tuned })
    }

    fn device(&self) -> &'a Device {
        &self.model.device
    }

    /// Finds the fastest way for each step with so many tokens.
    fn choose(&mut self, tokens: Tokens) -> Result<()> {
        if self.stored(STEP).is_none() || (tokens == Tokens::Many && self.scratch.max_tokens == 1) {
            return Ok(());
        }
        self.began = Instant::now();
        self.search(tokens)?;
        let mut found: Vec<_> =
            self.tuned.table.iter().filter(|t| t.tokens == tokens).map(|t| (t.took, t.way)).collect();
        found.sort_by_key(|(took, _)| *took);
        Step::ALL.into_iter().for_each(|step| self.tuned.ways.set(tokens, step, found[0].1));
        for step in [Step::Down, Step::Head, Step::Qkv, Step::Out] {
            if self.stored(step).is_none() || self.is_late(tokens, step) {
                continue;
            }
            let (plain, expected) = self.plain(tokens, step)?;
            let mut best = (plain, Way::PLAIN);
            for (_, way) in found.iter().take(2) {
                self.better((tokens, step), &mut best, *way, &expected)?;
            }
            // Where it became too late meanwhile, the plain kernel is the only one that was timed.
            if self.tried().any(|tried| tried == (tokens, step, found[0].1)) {
                self.tuned.ways.set(tokens, step, best.1);
            }
        }
        Ok(())
    }

    /// Tries ways with the step that stands for all.
    fn search(&mut self, tokens: Tokens) -> Result<()> {
        let (plain, expected) = self.plain(tokens, STEP)?;
        let mut best = (plain, Way::PLAIN);
        // The first is tried in any case: the one that was by far the fastest where this was measured. (Intel's runtime on
        // Zen 4: one token by rows in a sixth of the plain kernel's time, many as floats in a sixth too.)
        let forms = match tokens {
            Tokens::One => [Form::Rows, Form::Floats, Form::Tile],
            Tokens::Many => [Form::Floats, Form::Rows, Form::Tile],
        };
        for form in forms {
            for dot in [false, true] {
                self.better((tokens, STEP), &mut best, Way { form, dot, ..Way::PLAIN }, &expected)?;
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
            self.better((tokens, STEP), &mut best, way, &expected)?;
        }
        Ok(())
    }

    /// What was timed or left out.
    fn tried(&self) -> impl Iterator<Item = (Tokens, Step, Way)> {
        self.tuned.table.iter().map(|t| (t.tokens, t.step, t.way)).chain(self.left_out.iter().copied())
    }

    /// Whether nothing more is to be compiled for a step.
    fn is_late(&self, tokens: Tokens, step: Step) -> bool {
        let any = self.tried().any(|(of, _, way)| of == tokens && way != Way::PLAIN);
        any && self.began.elapsed() > ENOUGH[usize::from(step != STEP)]
    }

    /// How the matrices of a step are stored, where they are quantised.
    fn stored(&self, step: Step) -> Option<Storage> {
        let matrices = &self.model.matrices;
        let weights =
            if step == Step::Head { &matrices.head } else { &matrices.layers[0].steps[step as usize] };
        weights.quantised().then(|| weights.chunks[0].storage)
    }

    /// The plain kernel: what it takes, and its bits.
    fn plain(&mut self, tokens: Tokens, step: Step) -> Result<(Duration, Vec<u8>)> {
        let mut trial = self.trial(tokens, step, Way::PLAIN)?;
        let (first, expected) = self.first(|device| trial.run(0, device), (tokens, step))?;
        let took = self.time(&mut trial, first)?;
        self.tuned.table.push(Timed { tokens, step, way: Way::PLAIN, took });
        Ok((took, expected))
    }

    /// Takes the plain kernel for a step where the chosen one does not give its bits.
    fn check(&mut self, tokens: Tokens, step: Step) -> Result<()> {
        let way = self.tuned.ways.get(tokens, step);
        let absent = tokens == Tokens::Many && self.scratch.max_tokens == 1;
        if absent || way == Way::PLAIN || self.stored(step).is_none() {
            return Ok(());
        }
        let mut plain = self.trial(tokens, step, Way::PLAIN)?;
        let (took, expected) = self.first(|device| plain.run(0, device), (tokens, step))?;
        let found = self.try_out((tokens, step, way), &expected, took);
        if !matches!(found, Ok(Some(_))) {
            let why = found.err().map_or("it computes wrong results".into(), |e| e.message);
            self.leave_out((tokens, step, way), &why);
            self.tuned.ways.set(tokens, step, Way::PLAIN);
        }
        self.model.device.finish()
    }

    /// Takes `way` instead of the best so far where it is faster.
    fn better(
        &mut self,
        (tokens, step): (Tokens, Step),
        best: &mut (Duration, Way),
        way: Way,
        expected: &[u8],
    ) -> Result<()> {
        let Some(stored) = self.stored(step) else { return Ok(()) };
        self.kernels.set_way(tokens, step, way);
        let computed = self.kernels.way(tokens, step, stored);
        let tried = self.tried().any(|tried| tried == (tokens, step, computed));
        let there = way.makes_sense() && way.missing(self.device().facts()).is_none();
        if tried || computed != way || !there || self.is_late(tokens, step) {
            return Ok(());
        }
        let name = name(tokens, step, way);
        let Some(marker) = self.attempt(&name) else {
            self.left_out.push((tokens, step, way));
            return Ok(());
        };
        match self.try_out((tokens, step, way), expected, best.0) {
            Ok(Some(took)) => {
                self.tuned.table.push(Timed { tokens, step, way, took });
                if took < best.0 {
                    *best = (took, way);
                }
            }
            Ok(None) => self.leave_out((tokens, step, way), "it computes wrong results"),
            Err(e) => {
                self.failed(e, marker).map(|why| self.leave_out((tokens, step, way), &why))?;
            }
        }
        Ok(())
    }

    /// Begins to try something, unless a driver crashed or hung on it, which is said.
    fn attempt(&self, name: &str) -> Option<Option<Marker>> {
        match self.cache.attempt(&format!("{name} {}", self.key)) {
            Attempt::Begun(marker) => Some(marker),
            Attempt::Crashed(path) => {
                let path = path.display();
                self.say_left_out(
                    name,
                    &format!("the driver crashed or hung on it; remove {path} to try again"),
                );
                None
            }
        }
    }

    /// Why what failed is left out; where the device is lost, that stays so for good.
    fn failed(&self, e: Failure, marker: Option<Marker>) -> Result<String> {
        if e.kind == Kind::Stopped {
            return Err(e);
        }
        if self.device().is_lost() {
            marker.into_iter().for_each(Marker::stay);
            return Err(e);
        }
        Ok(e.message)
    }

    fn leave_out(&mut self, (tokens, step, way): (Tokens, Step, Way), why: &str) {
        self.left_out.push((tokens, step, way));
        self.say_left_out(&name(tokens, step, way), why);
    }

    fn say_left_out(&self, name: &str, why: &str) {
        (self.say)(&format!("OpenCL: variant {name} is left out: {why}"));
    }

    /// What a way takes; `None` where it does not give the expected bits.
    fn try_out(
        &mut self,
        (tokens, step, way): (Tokens, Step, Way),
        expected: &[u8],
        best: Duration,
    ) -> Result<Option<Duration>> {
        let mut trial = self.trial(tokens, step, way)?;
        let (first, found) = self.first(|device| trial.run(0, device), (tokens, step))?;
        if found != expected {
            return Ok(None);
        }
        // The first time may be slow, but not so much.
        if first > 10 * best { Ok(Some(first)) } else { self.time(&mut trial, first).map(Some) }
    }
}

/// What a way is called where it is left out, and tried.
fn name(tokens: Tokens, step: Step, way: Way) -> String {
    let kernel = match tokens {
        Tokens::One => "gemv",
        Tokens::Many => "gemm",
    };
    match step {
        STEP => format!("{kernel}:{way}"),
        _ => format!("{kernel}:{way}:{}", step.names().0),
    }
}
