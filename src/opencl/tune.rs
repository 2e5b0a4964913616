//! Selection of the fastest variants for a device. On first use each variant is timed for one token and for many, with
//! the step that has the largest matrices, and the result is stored with the programs.
//!
//! A variant is timed only if it gives the baseline's bits. Compilers may be slow, so after some seconds nothing more
//! is compiled just for timing, except the first candidate for one token and the first for many. NVIDIA devices have
//! their own kernels and are not timed.

use super::defines::Defines;
use super::kernels::{KernelSet, Kernels, SOURCES};
use super::launches::{AttendOn, Binder};
use super::scratch::{HEADER, Scratch};
use super::step_launch::{Launch, MatmulLaunches};
use super::storage::Step;
use super::variants::{BASELINE, Tokens, VARIANTS, Variant, VariantPair};
use super::weights::{LayerWeights, Matrices, Model};
use crate::dims::{has_experts, has_ffn, has_local_heads, is_recurrent};
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::buffer::{Buffer, bytes_of};
use opencl_runtime::device::Device;
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::{FailureKind, Result};
use opencl_runtime::program_cache::{Cache, CompileAttempt, Marker};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Tokens in a product of many.
const MANY: usize = 64;
/// Time after which nothing more is compiled just for timing, counted for many tokens and again for one. The chosen
/// variant would have been compiled anyway.
const COMPILE_BUDGET: Duration = Duration::from_millis(2500);
/// Step used for timing: of a layer with experts the first one, because those have no variants for many tokens, and of
/// one without a feed-forward.
pub const STEP: Step = match (has_ffn(0) && !has_experts(0), is_recurrent(0), has_local_heads(0)) {
    (true, ..) => Step::GateUp,
    (_, true, _) => Step::Mix,
    (_, _, true) => Step::LocalQkv,
    _ => Step::Qkv,
};
/// Layers that have the step used for timing.
fn timed_layers(matrices: &Matrices) -> impl Iterator<Item = &LayerWeights> {
    let layers = matrices.layers.layer_range().zip(matrices.layers.values());
    layers.filter(|(i, _)| Step::of_layer(*i).contains(&STEP)).map(|(_, l)| l)
}

/// Number of layers whose matrices are read in turn, so that they do not stay in a cache.
const LAYERS_IN_TURN: usize = 8;
/// Time budget for timing one variant, unless one product takes longer.
const TIMED_FOR: Duration = Duration::from_millis(20);

/// Time of one variant.
pub struct VariantTiming {
    /// Number of tokens.
    pub tokens: Tokens,
    /// The variant.
    pub variant: &'static Variant,
    /// Time of one product.
    pub took: Duration,
}

/// Times of all variants, and the fastest ones.
pub struct Tuning {
    /// The fastest.
    pub fastest: VariantPair,
    /// All variants that gave the baseline's bits, in the order tried.
    pub timings: Vec<VariantTiming>,
}

/// Variants for the model with this fingerprint on a device, if known without loading the model or opening the device.
///
/// # Errors
///
/// See [`VariantPair::from_environment`].
pub fn known_variants(
    facts: &DeviceInfo,
    fingerprint: &str,
    cache: &Cache,
) -> files::Result<Option<VariantPair>> {
    Ok(match VariantPair::from_environment(facts)? {
        None if facts.compute_capability.is_some() => Some(VariantPair::BASELINE),
        None => cache.get_text(&fingerprint_key(facts, fingerprint)).and_then(|names| names.parse().ok()),
        forced => forced,
    })
}

/// Selects a model's variants, unless already done: stored ones, otherwise the fastest. `say` receives a line for
/// timing and for each variant left out.
///
/// # Errors
///
/// If the device is lost.
pub fn select_variants(model: &Model, cache: &Cache, say: &dyn Fn(&str)) -> files::Result<()> {
    let facts = model.device.info();
    if model.has_variants()
        || facts.compute_capability.is_some()
        || VariantPair::from_environment(facts)?.is_some()
    {
        return Ok(());
    }
    let variants = match cache.get_text(&variants_key(model)).and_then(|names| names.parse().ok()) {
        Some(variants) => {
            if known_variants(facts, &model.weights.fingerprint, cache)? != Some(variants) {
                store_variants(model, cache, variants);
            }
            variants
        }
        None => time_variants(model, cache, say)?.fastest,
    };
    model.set_variants(variants);
    Ok(())
}

/// Stores the variants for all models of this shape, and for this fingerprint.
fn store_variants(model: &Model, cache: &Cache, variants: VariantPair) {
    for name in [variants_key(model), fingerprint_key(model.device.info(), &model.weights.fingerprint)] {
        cache.put_text(&name, &variants.to_string());
    }
}

/// Times all variants, even if a result is stored, and stores the fastest.
///
/// # Errors
///
/// See [`select_variants`].
pub fn time_variants(model: &Model, cache: &Cache, say: &dyn Fn(&str)) -> files::Result<Tuning> {
    say(&format!("OpenCL: timing kernels on {}, once", model.device.info().name));
    let mut tuner = Tuner::new(model, cache, say)?;
    let mut fastest = VariantPair::BASELINE;
    for tokens in [Tokens::Many, Tokens::One] {
        fastest.set(tokens, tuner.find_fastest(tokens)?);
    }
    store_variants(model, cache, fastest);
    Ok(Tuning { fastest, timings: tuner.timings })
}

/// Key with everything that speed depends on: device, kernels and model.
pub fn variants_key(model: &Model) -> String {
    let mut sources = DefaultHasher::new();
    SOURCES.hash(&mut sources);
    // Stages of a split with other numbers of layers have the same variants.
    let of_layers = model.matrices.layers.values().flat_map(|l| &l.steps);
    let stored = of_layers.flat_map(|(_, w)| &w.chunks).map(|chunk| chunk.storage.to_string());
    stored.collect::<BTreeSet<_>>().hash(&mut sources);
    let device = model.device.info().cache_key_parts();
    format!("variants {:016x} on {device:?} {}", sources.finish(), Defines::for_model().as_str())
}

/// Key for one model, by fingerprint.
fn fingerprint_key(facts: &DeviceInfo, fingerprint: &str) -> String {
    format!("variants of {fingerprint} on {:?} {}", facts.cache_key_parts(), env!("CARGO_PKG_VERSION"))
}

struct Tuner<'a> {
    model: &'a Model,
    cache: &'a Cache,
    key: String,
    say: &'a dyn Fn(&str),
    kernels: Kernels,
    scratch: Scratch,
    timings: Vec<VariantTiming>,
}

impl<'a> Tuner<'a> {
    fn new(model: &'a Model, cache: &'a Cache, say: &'a dyn Fn(&str)) -> Result<Self> {
        let (device, types) = (&model.device, KvTypes::same(KvType::F16));
        let kernels = Kernels::new(device, types, KernelSet::Tuned, VariantPair::BASELINE)?;
        let many = if kernels.device_shapes().supports_batches() { MANY } else { 1 };
        let scratch = Scratch::new(device, many, (1, 1))?;
        let key = variants_key(model);
        let mut tuner = Self { model, cache, key, say, kernels, scratch, timings: Vec::new() };
        let trials = [Tokens::Many, Tokens::One].map(|tokens| tuner.list_candidates(tokens).len());
        tuner.create_binder().list_programs(trials.iter().sum())?;
        Ok(tuner)
    }

    /// Variants besides the baseline for a number of tokens.
    fn list_candidates(&self, tokens: Tokens) -> Vec<&'static Variant> {
        let mut layers = timed_layers(&self.model.matrices);
        let is_quantised = layers.next().is_some_and(|l| l.step(STEP).is_quantised());
        if !is_quantised || (tokens == Tokens::Many && self.scratch.max_tokens == 1) {
            return Vec::new();
        }
        let facts = self.model.device.info();
        let there = |v: &&Variant| v.for_tokens.contains(&tokens) && v.missing_feature(facts).is_none();
        VARIANTS[1..].iter().filter(there).collect()
    }

    fn create_binder(&mut self) -> Binder<'_> {
        Binder {
            kernels: &mut self.kernels,
            matrices: &self.model.matrices,
            calibration: &[],
            scratch: &self.scratch,
            attend: AttendOn::Device,
            needs_one: true,
        }
    }

    /// Times the variants for a number of tokens and returns the fastest.
    fn find_fastest(&mut self, tokens: Tokens) -> Result<&'static Variant> {
        let candidates = self.list_candidates(tokens);
        if candidates.is_empty() {
            return Ok(BASELINE);
        }
        let began = Instant::now();
        let mut baseline = self.bind_variant(tokens, BASELINE)?;
        let (first, expected) = self.run_once(&mut baseline)?;
        let mut best = (self.time_product(&mut baseline, first)?, BASELINE);
        self.timings.push(VariantTiming { tokens, variant: BASELINE, took: best.0 });
        for (i, variant) in candidates.into_iter().enumerate() {
            if i > 0 && began.elapsed() > COMPILE_BUDGET {
                break;
            }
            let Some(took) = self.try_variant(tokens, variant, &expected, best.0)? else { continue };
            self.timings.push(VariantTiming { tokens, variant, took });
            if took < best.0 {
                best = (took, variant);
            }
        }
        Ok(best.1)
    }

    /// Times a variant; `None` if it is left out, which prints a line.
    fn try_variant(
        &mut self,
        tokens: Tokens,
        variant: &'static Variant,
        expected: &[u8],
        best: Duration,
    ) -> Result<Option<Duration>> {
        let name = full_name(tokens, variant);
        let marker = match self.cache.start_trial(&format!("{name} {}", self.key)) {
            CompileAttempt::Started(marker) => marker,
            CompileAttempt::Crashed(path) => {
                let path = path.display();
                let why = format!("the driver crashed or hung on it; remove {path} to try again");
                self.leave_out(&name, &why);
                return Ok(None);
            }
        };
        match self.measure_variant(tokens, variant, expected, best) {
            Ok(Some(took)) => return Ok(Some(took)),
            Ok(None) => self.leave_out(&name, "it computes wrong results"),
            Err(e) if e.kind == FailureKind::Stopped => return Err(e),
            Err(e) if self.model.device.is_lost() => {
                // What lost the device is not tried again.
                marker.into_iter().for_each(Marker::leave_behind);
                return Err(e);
            }
            Err(e) => self.leave_out(&name, &e.message),
        }
        Ok(None)
    }

    fn leave_out(&self, name: &str, why: &str) {
        (self.say)(&format!("OpenCL: variant {name} is left out: {why}"));
    }

    /// Time of a product by a variant; `None` if its bits differ from the expected ones.
    fn measure_variant(
        &mut self,
        tokens: Tokens,
        variant: &'static Variant,
        expected: &[u8],
        best: Duration,
    ) -> Result<Option<Duration>> {
        let mut trial = self.bind_variant(tokens, variant)?;
        let (first, found) = self.run_once(&mut trial)?;
        if found != expected {
            return Ok(None);
        }
        // The first run may be slow, but not that slow.
        if first > 10 * best { Ok(Some(first)) } else { self.time_product(&mut trial, first).map(Some) }
    }

    /// Binds the products of some layers to a variant.
    fn bind_variant(&mut self, tokens: Tokens, variant: &'static Variant) -> Result<BoundVariant> {
        self.kernels.set_variant(tokens, variant);
        let matrices = &self.model.matrices;
        let mut binder = self.create_binder();
        let of_layer = |l| match tokens {
            Tokens::One => binder.bind_one(STEP, l).map(|products| (None, products)),
            Tokens::Many => binder.bind_many(STEP, l).map(|(input, products)| (Some(input), products)),
        };
        let layers = timed_layers(matrices).take(LAYERS_IN_TURN).map(of_layer).collect::<Result<_>>()?;
        let tokens = if tokens == Tokens::One { 1 } else { self.scratch.max_tokens };
        Ok(BoundVariant { tokens, layers })
    }

    /// Runs a product on fixed input: the time taken, and the resulting bits.
    fn run_once(&mut self, trial: &mut BoundVariant) -> Result<(Duration, Vec<u8>)> {
        let s = &self.scratch;
        let floats = |buffer: &Buffer, first: usize| {
            let n = buffer.len() / 4 - first;
            let floats: Vec<f32> = (0..n as u32).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
            buffer.write(4 * first, bytes_of(&floats))
        };
        // With a zeroed header, so that the residual is the first token's.
        s.state.buffer().write(0, &[0; 4 * HEADER])?;
        floats(s.state.buffer(), HEADER)?;
        floats(&s.gate_up, 0)?;
        floats(&s.act_scales, 0)?;
        let acts: Vec<u8> = (0..s.acts.len()).map(|i| (i % 251) as u8).collect();
        s.acts.write(0, &acts)?;
        let device = &self.model.device;
        let began = Instant::now();
        trial.run(0, device)?;
        device.finish()?;
        let took = began.elapsed();
        let out: &[&Buffer] = match (STEP, trial.tokens) {
            (Step::GateUp, 1) => &[&s.acts, &s.act_scales],
            (Step::GateUp, _) => &[&s.gate_up],
            (Step::Mix, _) => &[&s.mix],
            _ => &[&s.qkv],
        };
        let mut found = Vec::new();
        for buffer in out {
            let at = found.len();
            found.resize(at + buffer.len(), 0);
            buffer.read(0, &mut found[at..])?;
        }
        Ok((took, found))
    }

    /// Time of a product: the fastest of several rounds, if the first run took `first`.
    fn time_product(&mut self, trial: &mut BoundVariant, first: Duration) -> Result<Duration> {
        let times = (TIMED_FOR.as_secs_f64() / 3.0 / first.as_secs_f64().max(1e-6)).clamp(1.0, 64.0) as usize;
        let (mut best, device) = (first, &self.model.device);
        let rounds = if first > TIMED_FOR { 1 } else { 3 };
        for _ in 0..rounds {
            let began = Instant::now();
            (0..times).try_for_each(|i| trial.run(i, device))?;
            device.finish()?;
            best = best.min(began.elapsed() / times as u32);
        }
        Ok(best)
    }
}

/// Name of a variant in messages and markers.
fn full_name(tokens: Tokens, variant: &Variant) -> String {
    let kernel = match tokens {
        Tokens::One => "gemv",
        Tokens::Many => "gemm",
    };
    format!("{kernel}:{}", variant.name)
}

/// Products of [`STEP`] by one variant, ready to run.
struct BoundVariant {
    tokens: usize,
    /// By layer: the launch that prepares the input, and the products.
    layers: Vec<(Option<Launch>, MatmulLaunches)>,
}

impl BoundVariant {
    fn run(&mut self, i: usize, device: &Device) -> Result<()> {
        let (n, layers) = (self.tokens, self.layers.len());
        match &mut self.layers[i % layers] {
            (Some(input), products) => {
                input.run(device, [n, 1])?;
                products.launch_many(device, n)
            }
            (None, products) => products.launch_one(device),
        }
    }
}
