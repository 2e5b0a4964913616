//! Layers on several devices: every place of the cut has the bits of one device, with all that a sequence can do.

use crate::support::logits::collect_logit_bits;
use crate::support::paths;
use crate::support::random::ids;
use antigravity::dims::{self, KV_HEADS, LAYERS, has_mass};
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, KvCache, KvRows, Logits, Run};
use antigravity::model::split::{LAST_CUT, SplitDevice, Stage, stage_ranges};
use antigravity::model::trace::Trace;
use antigravity::model::weights::Weights;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::options::BackendKind;
use antigravity::run::split::{Split, StageDevice};
use antigravity::session::{CancelToken, Session};
use antigravity::{BatchItem, Engine, EngineOptions, Error, GenerateOptions};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use text::sampler::SamplerOptions;

const PROMPT: &str =
    "The cat sat on the mat. The dog sat on the mat. The bird sat on the mat. The cat sat on";

/// A pass of a long prompt has two micro-batches.
fn options() -> EngineOptions {
    EngineOptions { threads: 2, max_seq_len: 240, prefill_chunk: 130, ..EngineOptions::new(paths::model()) }
}

/// The engine with its layers on two devices, both of them the CPU.
fn split_at(cut: usize, o: &EngineOptions) -> Engine {
    let split = Split::new([(StageDevice::Cpu, cut), (StageDevice::Cpu, LAYERS - cut)]).unwrap();
    let o = EngineOptions { split: Some(split), backend: BackendKind::OpenCl, gpu_attn: true, ..o.clone() };
    Engine::load(o).unwrap()
}

/// First, middle and last place.
fn cuts() -> Vec<usize> {
    let mut cuts = vec![1, LAST_CUT.div_ceil(2), LAST_CUT];
    cuts.dedup();
    cuts
}

fn items(tokens: usize) -> Vec<BatchItem> {
    let sampler = SamplerOptions { temperature: 0.0, ..Default::default() };
    let options =
        GenerateOptions { max_tokens: Some(tokens), ignore_eos: true, sampler, ..Default::default() };
    let item = |prompt: &str| BatchItem { prompt: prompt.into(), options: options.clone() };
    vec![item("Once upon a time"), item(PROMPT), item("Lily and Tom"), item(&PROMPT.repeat(6))]
}

fn texts(engine: &Engine, tokens: usize) -> Vec<String> {
    let items = items(tokens);
    engine.generate_batch(&items).unwrap().map(|answer| answer.unwrap().text).collect()
}

/// Logits behind a long prompt.
fn logit_bits(engine: &Engine) -> Vec<u32> {
    let mut session = engine.session().unwrap();
    session.prefill(&ids(130), &CancelToken::default()).unwrap();
    collect_logit_bits(&mut session, &ids(20), 5)
}

#[test]
fn every_cut_has_the_bits_of_one_device() {
    for kv in KvType::ALL {
        let o = EngineOptions { kv_types: KvTypes::same(kv), ..options() };
        let expected = logit_bits(&Engine::load(o.clone()).unwrap());
        let all = if kv == KvType::Q4 { (1..=LAST_CUT).collect() } else { cuts() };
        for cut in all {
            assert!(logit_bits(&split_at(cut, &o)) == expected, "{} cache, cut {cut}", kv.name());
        }
    }
}

/// Batches, drafts and evictions, whose rows, states and mass each stage has for its layers.
#[test]
fn texts_of_a_split_are_those_of_one_device() {
    let eviction = |policy| Eviction { policy, window: 48, memory_threshold: 0, ..Eviction::NEVER };
    let policies = [Policy::Sliding, Policy::SnapKv, Policy::H2o].into_iter();
    let evicting = |policy| EngineOptions { max_seq_len: 140, eviction: eviction(policy), ..options() };
    // The model's layers may all have a window, or a state.
    let policies = policies.filter(|_| dims::FULL_ATTENTION_LAYERS > 0);
    let mut all: Vec<EngineOptions> = policies.map(evicting).collect();
    all.extend([EngineOptions { batch: 3, ..options() }, EngineOptions { draft: 4, ..options() }]);
    all.push(EngineOptions { batch: 2, draft: 3, ..options() });
    for o in all {
        let expected = texts(&Engine::load(o.clone()).unwrap(), 60);
        for cut in cuts() {
            let what = format!("{:?}, batch {}, draft {}, cut {cut}", o.eviction.policy, o.batch, o.draft);
            assert_eq!(texts(&split_at(cut, &o), 60), expected, "{what}");
        }
    }
}

/// Rows and states go from a split to another cut and to one device, as when a session is saved.
#[test]
fn a_sequence_moves_between_splits() {
    let (ids, whole) = (ids(70), Engine::load(options()).unwrap());
    let engines: Vec<Engine> =
        cuts().into_iter().map(|cut| split_at(cut, &options())).chain([whole]).collect();
    let mut alone = engines.last().unwrap().session().unwrap();
    alone.prefill(&ids, &CancelToken::default()).unwrap();
    for (from, to) in engines.iter().zip(engines.iter().rev()) {
        let (mut first, mut second) = (from.session().unwrap(), to.session().unwrap());
        first.prefill(&ids[..60], &CancelToken::default()).unwrap();
        let sequence = first.sequence();
        let copy = |layer: usize, rows: &mut KvRows, mass: &mut Vec<f32>| {
            first.read_rows(layer, rows)?;
            first.read_mass(layer, mass)
        };
        second.restore(sequence, copy).unwrap();
        ids[60..].iter().for_each(|&id| second.decode(id).unwrap());
        let bits = |session: &Session| session.logits().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&second) == bits(&alone));
    }
}

/// The CPU with some layers, which asks before each pass, with its number, whether it can compute it.
struct Asking<F>(CpuDevice, F, usize);

impl<F: FnMut(usize) -> Result<(), Error> + Send + 'static> Asking<F> {
    fn stage(weights: &Arc<Weights>, layers: Range<usize>, can_compute: F) -> Stage {
        let (isa, kv_types) = (Isa::detect().unwrap(), KvTypes::same(KvType::F16));
        let options = CpuOptions { threads: 1, isa, kv_types, slots: 64, max_tokens: 256 };
        let cpu = CpuDevice::new(Arc::clone(weights), options).unwrap().with_layers(layers.clone());
        Stage::new(Box::new(Self(cpu, can_compute, 0)), layers)
    }
}

#[rustfmt::skip]
impl<F: FnMut(usize) -> Result<(), Error> + Send> Device for Asking<F> {
    fn name(&self) -> String { "asking".into() }
    fn max_tokens(&self) -> usize { self.0.max_tokens() }
    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn KvCache>, Error> { self.0.new_cache(slots) }
    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<(), Error> {
        self.2 += 1;
        (self.1)(self.2 - 1).and_then(|()| self.0.forward(runs, cancel))
    }
    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> { self.0.set_trace(trace) }
}

/// Computes the first 64 tokens of four sequences in one pass: four micro-batches.
fn forward_four(device: &mut SplitDevice, caches: &mut [Box<dyn KvCache>; 4]) -> Result<(), Error> {
    let ids = ids(64);
    let mut runs = caches.each_mut().map(|cache| Run::new(&mut **cache, &ids, 0, Logits::None));
    device.forward(&mut runs, None)
}

/// The first stage begins a micro-batch before the second one ends that before it, and in a trace does not.
#[test]
fn stages_compute_at_the_same_time() {
    let engine = Engine::load(options()).unwrap();
    let [first, second] = <[_; 2]>::try_from(stage_ranges(&[1, LAYERS - 1]).unwrap()).unwrap();
    let ((send, begun), mut seen) = (channel(), 0);
    let begins = move |pass| send.send(pass).map_err(|e| Error::Device(e.to_string()));
    let ends = move |pass| {
        while pass < 3 && seen < pass + 2 {
            let late = |_| Error::Device(format!("the first stage waits for micro-batch {pass} to end"));
            seen = 1 + begun.recv_timeout(Duration::from_secs(20)).map_err(late)?;
        }
        // That of the trace.
        assert!(pass < 4 || begun.try_iter().eq([4]), "pass {pass}");
        Ok(())
    };
    let mut device = SplitDevice::new(vec![
        Asking::stage(engine.weights(), first, begins),
        Asking::stage(engine.weights(), second, ends),
    ]);
    let mut caches = [0; 4].map(|_| device.new_cache(64).unwrap());
    forward_four(&mut device, &mut caches).unwrap();
    caches.iter_mut().for_each(|cache| cache.set_len(0));
    device.set_trace(Some(Trace::default()));
    forward_four(&mut device, &mut caches).unwrap();
    let names: Vec<_> = device.set_trace(None).unwrap().step_totals();
    assert!(!names.is_empty(), "both passes were traced");
}

/// A failed pass adds no token to any stage, whatever it had computed, and mass is allocated by the first write to any
/// layer.
#[test]
fn a_stage_that_fails_leaves_no_token_behind() {
    let engine = Engine::load(options()).unwrap();
    let [first, second] = <[_; 2]>::try_from(stage_ranges(&[1, LAYERS - 1]).unwrap()).unwrap();
    let lost = |_| Err(Error::Device("lost".into()));
    for lost_in in [0, 2] {
        let mut device = SplitDevice::new(vec![
            Asking::stage(engine.weights(), first.clone(), |_| Ok(())),
            Asking::stage(
                engine.weights(),
                second.clone(),
                move |n| if n < lost_in { Ok(()) } else { lost(n) },
            ),
        ]);
        let mut caches = [0; 4].map(|_| device.new_cache(64).unwrap());
        let failed = forward_four(&mut device, &mut caches);
        assert!(matches!(failed, Err(Error::Device(_))), "{failed:?}");
        for cache in &mut caches {
            for layer in (0..LAYERS).filter(|&layer| has_mass(layer)) {
                let mut mass = vec![1.0; KV_HEADS * cache.extent().len];
                cache.write_mass(layer, &vec![0.0; mass.len()]).unwrap();
                cache.read_mass(layer, &mut mass).unwrap();
                assert!(mass.is_empty(), "a stage has kept its tokens");
            }
            assert_eq!(cache.extent().len, 0);
        }
    }
}

#[test]
fn a_cut_must_leave_each_stage_what_it_reads() {
    assert!(stage_ranges(&[LAST_CUT, LAYERS - LAST_CUT]).is_ok());
    for wrong in [vec![], vec![0, LAYERS], vec![LAYERS - 1], vec![LAYERS, 1], vec![usize::MAX, 2]] {
        assert!(matches!(stage_ranges(&wrong), Err(Error::Usage(_))), "{wrong:?}");
    }
    for cut in (1..LAYERS).filter(|&cut| cut > LAST_CUT) {
        let found = stage_ranges(&[cut, LAYERS - cut]);
        assert!(matches!(&found, Err(Error::Usage(why)) if why.contains("share")), "{found:?}");
    }
}
