//! Layers on an OpenCL device and on the CPU, or on two OpenCL devices, the first and the last that there are, perhaps of
//! two runtimes: the CPU's bits.

use crate::device::{exact, is_exact_with};
use crate::support::logits::collect_logit_bits;
use crate::support::random::ids;
use antigravity::dims::{self, LAYERS};
use antigravity::model::split::LAST_CUT;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::options::BackendKind;
use antigravity::run::plan::Plan;
use antigravity::run::split::{Split, StageDevice};
use antigravity::session::{CancelToken, Notice};
use antigravity::{BatchItem, Engine, EngineOptions, GenerateOptions};
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::device::list_devices;
use text::sampler::SamplerOptions;

fn options(kv: KvType) -> EngineOptions {
    let options = EngineOptions::new(dims::MODEL_DIR);
    // A pass of a long prompt has two micro-batches.
    EngineOptions { kv_types: KvTypes::same(kv), threads: 2, max_seq_len: 240, prefill_chunk: 130, ..options }
}

fn gpu() -> StageDevice {
    StageDevice::OpenCl(Some("0".into()))
}

fn last_gpu() -> StageDevice {
    StageDevice::OpenCl(Some((list_devices().unwrap().len() - 1).to_string()))
}

/// Tells whether both devices are exact.
fn are_exact() -> bool {
    let last = || list_devices().unwrap().last().is_some_and(|entry| is_exact_with(&entry.facts));
    exact() == Some(true) && last()
}

fn load_split(split: Split, o: &EngineOptions) -> Engine {
    // A fallback to other kernels or to the CPU would be a failure.
    let notice = Notice::new(|line| panic!("{line}"));
    let (split, backend) = (Some(split), BackendKind::OpenCl);
    Engine::load(EngineOptions { split, backend, gpu_attn: true, notice, ..o.clone() }).unwrap()
}

/// The CPU before and behind an OpenCL device, two OpenCL devices, and three stages; experts on the CPU, if there are any.
fn splits(cut: usize) -> Vec<Split> {
    let (cpu, rest) = (StageDevice::Cpu, LAYERS - cut);
    let mut all = vec![
        vec![(gpu(), cut), (cpu.clone(), rest)],
        vec![(cpu.clone(), cut), (gpu(), rest)],
        vec![(gpu(), cut), (last_gpu(), rest)],
    ];
    if cut > 1 {
        all.push(vec![(cpu, 1), (last_gpu(), cut - 1), (gpu(), rest)]);
    }
    let without_experts = [vec![(gpu(), LAYERS)], all[0].clone()].map(|stages| Split::new(stages).unwrap());
    let without_experts = without_experts.into_iter().filter_map(|split| split.with_cpu_experts().ok());
    all.into_iter().map(|stages| Split::new(stages).unwrap()).chain(without_experts).collect()
}

/// Logits behind a long prompt.
fn logit_bits(engine: &Engine) -> Vec<u32> {
    let mut session = engine.session().unwrap();
    session.prefill(&ids(130), &CancelToken::default()).unwrap();
    collect_logit_bits(&mut session, &ids(20), 5)
}

#[test]
fn every_split_has_the_cpus_bits() {
    if !are_exact() {
        return;
    }
    for (kv, cuts) in [
        (KvType::Q4, (1..=LAST_CUT).collect::<Vec<_>>()),
        (KvType::F32, vec![LAST_CUT.div_ceil(2)]),
        (KvType::Q8, vec![LAST_CUT]),
        (KvType::F16, vec![1]),
    ] {
        let o = options(kv);
        let expected = logit_bits(&Engine::load(o.clone()).unwrap());
        for split in cuts.into_iter().flat_map(splits) {
            let what = format!("{} cache, {split}", kv.name());
            assert!(logit_bits(&load_split(split, &o)) == expected, "{what}");
        }
    }
}

fn evicting(policy: Policy) -> Eviction {
    Eviction { policy, window: 48, memory_threshold: 0, ..Eviction::NEVER }
}

fn texts(engine: &Engine) -> Vec<String> {
    let sampler = SamplerOptions { temperature: 0.0, ..Default::default() };
    let options = GenerateOptions { max_tokens: Some(40), ignore_eos: true, sampler, ..Default::default() };
    let long = "The cat sat on the mat. The dog sat on the mat. ".repeat(5);
    let prompts = ["Once upon a time", "The cat sat on the mat. The dog sat on the mat. The cat", &long];
    let items = prompts.map(|prompt| BatchItem { prompt: prompt.into(), options: options.clone() });
    engine.generate_batch(&items).unwrap().map(|answer| answer.unwrap().text).collect()
}

#[test]
fn batches_drafts_and_evictions_have_the_cpus_texts() {
    if !are_exact() {
        return;
    }
    let base = options(KvType::Q4);
    for o in [
        EngineOptions { batch: 3, ..base.clone() },
        EngineOptions { draft: 4, ..base.clone() },
        EngineOptions { max_seq_len: 140, eviction: evicting(Policy::Sliding), ..base.clone() },
        EngineOptions { max_seq_len: 140, eviction: evicting(Policy::H2o), ..base },
    ] {
        let expected = texts(&Engine::load(o.clone()).unwrap());
        for split in splits(LAST_CUT.div_ceil(2)) {
            let what = format!("{:?}, batch {}, draft {}, {split}", o.eviction.policy, o.batch, o.draft);
            assert_eq!(texts(&load_split(split, &o)), expected, "{what}");
        }
    }
}

/// A device gets the weights, rows and buffers of its layers, and nothing else.
#[test]
fn a_stage_allocates_what_is_planned_for_it() {
    if exact().is_none() {
        return;
    }
    let behind = vec![(StageDevice::Cpu, LAST_CUT), (gpu(), LAYERS - LAST_CUT)];
    let has_one_device = |split: &Split| split.to_string().matches("cl:").count() == 1;
    for split in splits(1).into_iter().filter(has_one_device).chain([Split::new(behind).unwrap()]) {
        for policy in [Policy::None, Policy::H2o] {
            let o = EngineOptions { eviction: evicting(policy), ..options(KvType::Q4) };
            let engine = load_split(split.clone(), &o);
            let plan = Plan::new(engine.options()).unwrap();
            let mut session = engine.session().unwrap();
            session.prefill(&ids(60), &CancelToken::default()).unwrap();
            let allocated = engine.device().unwrap().allocated_bytes();
            assert_eq!(plan.device_bytes(), allocated, "{split} {policy:?}: {:#?}", plan.plan_items());
        }
    }
}
