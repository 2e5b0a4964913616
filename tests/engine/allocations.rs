//! Decode does not allocate, nor does observing attention or evicting: a counting allocator watches every thread of a
//! process of its own.

use crate::support::cpu_sequence::CpuSequence;
use crate::support::paths;
use crate::support::process::run_alone;
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, Logits, Run};
use antigravity::run::eviction::{Budget, Policy, SlotSelector};
use antigravity::run::session::{CancelToken, forward};
use antigravity::{Engine, EngineOptions, dims};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use text::sampler::{DryOptions, Logprobs, Sampler, SamplerOptions, XtcOptions};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is ours.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_a_token_allocates_nothing() {
    run_alone("allocations::decoding_a_token_allocates_nothing", decode_counting);
}

fn decode_counting() {
    for (kv, threads) in [(KvType::Q4, 2), (KvType::F32, 1), (KvType::Q8, 3)] {
        let options =
            EngineOptions { kv_types: KvTypes::same(kv), threads, ..EngineOptions::new(paths::model()) };
        let engine = Engine::load(options).unwrap();
        let mut session = engine.session().unwrap();
        // Long enough that attention is spread over chunks, one token short of the next one.
        let prompt: Vec<u32> = (0..380).map(|i| (5 + i) % dims::VOCAB as u32).collect();
        session.prefill(&prompt, &CancelToken::default()).unwrap();
        let sampler = Sampler::new(every_sampler(), dims::VOCAB).unwrap();
        let mut sampler = sampler.with_pieces(engine.tokenizer().pieces());
        let mut logprobs = Logprobs::new(5, dims::VOCAB).unwrap();
        let mut logits = vec![0.0; dims::VOCAB];
        let mut allocating = 0;
        for _ in 0..64 {
            let before = COUNT.load(Ordering::Relaxed);
            logits.copy_from_slice(session.logits());
            let token = sampler.sample_token(&mut logits, session.tokens());
            logprobs.compute_logprobs(session.logits(), token);
            session.decode(token).unwrap();
            allocating += usize::from(COUNT.load(Ordering::Relaxed) != before);
        }
        assert_eq!(allocating, 0, "tokens that allocated with {} and {threads} threads", kv.name());
        assert_eq!(passes_together(&engine), 0, "together, with {} and {threads} threads", kv.name());
        assert_eq!(sequences_together(&engine), 0, "sequences, with {} and {threads} threads", kv.name());
        assert_eq!(observed_passes(&engine), 0, "observed, with {} and {threads} threads", kv.name());
    }
}

/// Passes that allocated while they computed a token of several sequences each.
fn passes_together(engine: &Engine) -> usize {
    let mut device = CpuDevice::new(Arc::clone(engine.weights()), options(engine)).unwrap();
    let mut caches = [0; 3].map(|_| device.new_cache(400).unwrap());
    let prompt: Vec<u32> = (0..140).map(|i| (5 + i) % dims::VOCAB as u32).collect();
    let mut lengths = [10, 70, 130];
    for (cache, n) in caches.iter_mut().zip(lengths) {
        for (i, chunk) in prompt[..n].chunks(64).enumerate() {
            device.forward(&mut [Run::new(&mut **cache, chunk, 64 * i, Logits::None)], None).unwrap();
        }
    }
    let mut logits = vec![0.0; 3 * dims::VOCAB];
    let mut allocating = 0;
    for token in 5..30 {
        let before = COUNT.load(Ordering::Relaxed);
        let [a, b, c] = &mut caches;
        let (first, rest) = logits.split_at_mut(dims::VOCAB);
        let (second, third) = rest.split_at_mut(dims::VOCAB);
        let tokens = [token];
        let mut runs = [
            Run::new(&mut **c, &tokens, lengths[2], Logits::Last(first)),
            Run::new(&mut **a, &tokens, lengths[0], Logits::Last(second)),
            Run::new(&mut **b, &tokens, lengths[1], Logits::Last(third)),
        ];
        device.forward(&mut runs, None).unwrap();
        lengths.iter_mut().for_each(|n| *n += 1);
        // Threads allocate when they start.
        allocating += usize::from(token > 10 && COUNT.load(Ordering::Relaxed) != before);
    }
    allocating
}

/// Counts the allocating passes of sequences that run as on the server, all in each pass.
fn sequences_together(engine: &Engine) -> usize {
    let mut sessions = engine.sessions_with(engine.options(), 3).unwrap();
    for (i, session) in sessions.iter_mut().enumerate() {
        session.prefill(&vec![7; 10 + 60 * i], &CancelToken::default()).unwrap();
    }
    let mut allocating = 0;
    for token in 5..30 {
        let before = COUNT.load(Ordering::Relaxed);
        for session in &mut sessions {
            session.stage_token(token).unwrap();
        }
        let [a, b, c] = &mut sessions[..] else { panic!("three") };
        forward(&mut [a, b, c], None).unwrap();
        allocating += usize::from(COUNT.load(Ordering::Relaxed) != before);
    }
    // Each thread allocates when it starts, which it may do late.
    allocating.saturating_sub(engine.options().threads)
}

fn options(engine: &Engine) -> CpuOptions {
    let o = engine.options();
    let isa = Isa::detect().unwrap();
    CpuOptions { threads: o.threads, isa, kv_types: o.kv_types, slots: 400, max_tokens: 64 }
}

/// All stages of the sampler on.
fn every_sampler() -> SamplerOptions {
    SamplerOptions {
        min_p: 0.01,
        typical_p: 0.95,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        logit_bias: vec![(5, 1.0)],
        dry: DryOptions { multiplier: 0.8, allowed_length: 1, ..DryOptions::default() },
        xtc: XtcOptions { probability: 0.5, threshold: 0.1 },
        ..SamplerOptions::default()
    }
}

/// Passes that allocated while attention was observed and slots were evicted.
fn observed_passes(engine: &Engine) -> usize {
    let mut alone = CpuSequence::new(Arc::clone(engine.weights()), options(engine));
    alone.observe(usize::MAX);
    let tokens: Vec<u32> = (0..64).map(|i| 5 + i % dims::VOCAB as u32).collect();
    let mut logits = vec![0.0; dims::VOCAB];
    let (mut mass, mut slots) = (vec![0.0; dims::KV_HEADS * 380], Vec::new());
    let budget = Budget { keep: 300, prefix: 4, recent: 32, stale: 0 };
    // Makes room for all choices to come.
    let mut chooser = SlotSelector::default();
    chooser.choose_slots(Policy::SnapKv, &mass[..380], budget, &mut slots);
    let (mut allocating, mut evictions) = (0, 0);
    for pass in 0..130 {
        let before = COUNT.load(Ordering::Relaxed);
        let n = if pass % 3 == 0 { 1 } else { 40 };
        if alone.len() + n > 380 {
            let mass = &mut mass[..dims::KV_HEADS * alone.len()];
            for layer in dims::attention_layers() {
                alone.cache.read_mass(layer, mass).unwrap();
                for (kv_head, mass) in mass.chunks(alone.len()).enumerate() {
                    chooser.choose_slots(
                        [Policy::SnapKv, Policy::H2o][evictions % 2],
                        mass,
                        budget,
                        &mut slots,
                    );
                    alone.cache.retain_slots(layer, kv_head, &slots).unwrap();
                }
            }
            alone.cache.set_len(300);
            evictions += 1;
        }
        alone.forward_at(&tokens[..n], 40 * pass, Logits::Last(&mut logits));
        // Threads allocate when they start, which is done by the second eviction.
        allocating += usize::from(evictions > 1 && COUNT.load(Ordering::Relaxed) != before);
    }
    assert!(evictions > 20);
    allocating
}
