//! Decode does not allocate, nor does observing attention or evicting: a counting allocator watches every thread.

#[path = "device/place.rs"]
mod place;

use antigravity::model::backend::{Backend, Logits};
use numeric::simd::Isa;
use antigravity::model::cpu::{CpuBackend, CpuOptions};
use antigravity::run::eviction::{Budget, Chooser, Policy};
use numeric::kv::{KvType, KvTypes};
use text::sampler::{DryOptions, Logprobs, Sampler, SamplerOptions, XtcOptions};
use antigravity::run::session::CancelToken;
use antigravity::{Engine, EngineOptions, dims};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    for (kv, threads) in [(KvType::Q4, 2), (KvType::F32, 1), (KvType::Q8, 3)] {
        let options =
            EngineOptions { kv_types: KvTypes::both(kv), threads, ..EngineOptions::new(place::model()) };
        let engine = Engine::load(options).unwrap();
        let mut session = engine.session().unwrap();
        // Long enough that attention is spread over chunks, one token short of the next one.
        let prompt: Vec<u32> = (0..380).map(|i| 5 + i % 3000 % dims::VOCAB as u32).collect();
        session.prefill(&prompt, &CancelToken::default()).unwrap();
        let sampler = Sampler::new(every_sampler(), dims::VOCAB).unwrap();
        let mut sampler = sampler.with_pieces(engine.tokenizer().pieces());
        let mut logprobs = Logprobs::new(5, dims::VOCAB).unwrap();
        let mut logits = vec![0.0; dims::VOCAB];
        let mut allocating = 0;
        for _ in 0..64 {
            let before = COUNT.load(Ordering::Relaxed);
            logits.copy_from_slice(session.logits());
            let token = sampler.sample(&mut logits, session.tokens());
            logprobs.take(session.logits(), token);
            session.decode(token).unwrap();
            allocating += usize::from(COUNT.load(Ordering::Relaxed) != before);
        }
        assert_eq!(allocating, 0, "tokens that allocated with {} and {threads} threads", kv.name());
        assert_eq!(passes_together(&engine), 0, "together, with {} and {threads} threads", kv.name());
        assert_eq!(observed_passes(&engine), 0, "observed, with {} and {threads} threads", kv.name());
    }
}

/// Passes that allocated while they computed a token of several sequences each.
fn passes_together(engine: &Engine) -> usize {
    let mut batch = engine.batch_of(engine.options(), 3).unwrap();
    let prompt: Vec<u32> = (0..140).map(|i| 5 + i % 3000 % dims::VOCAB as u32).collect();
    for sequence in 0..3 {
        batch.prefill(sequence, &prompt[..10 + 60 * sequence], Logits::None).unwrap();
    }
    let mut logits = vec![0.0; 3 * dims::VOCAB];
    let mut allocating = 0;
    for token in 5..30 {
        let before = COUNT.load(Ordering::Relaxed);
        batch.decode(&[(2, token), (0, token), (1, token)], &mut logits).unwrap();
        // Threads allocate when they start.
        allocating += usize::from(token > 10 && COUNT.load(Ordering::Relaxed) != before);
    }
    allocating
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

/// Passes of a backend that allocated while attention was observed and slots were evicted.
fn observed_passes(engine: &Engine) -> usize {
    let o = engine.options();
    let options = CpuOptions {
        threads: o.threads,
        isa: Isa::detect().unwrap(),
        kv_types: o.kv_types,
        capacity: 400,
        max_tokens: 64,
    };
    let mut backend = CpuBackend::new(Arc::clone(engine.weights()), options).unwrap();
    backend.observe(usize::MAX).unwrap();
    let tokens: Vec<u32> = (0..64).map(|i| 5 + i % dims::VOCAB as u32).collect();
    let mut logits = vec![0.0; dims::VOCAB];
    let (mut mass, mut slots) = (vec![0.0; dims::KV_HEADS * 380], Vec::new());
    let budget = Budget { keep: 300, prefix: 4, recent: 32, stale: 0 };
    // Makes room for all choices to come.
    let mut chooser = Chooser::default();
    chooser.choose(Policy::SnapKv, &mass[..380], budget, &mut slots);
    let (mut allocating, mut evictions) = (0, 0);
    for pass in 0..130 {
        let before = COUNT.load(Ordering::Relaxed);
        let n = if pass % 3 == 0 { 1 } else { 40 };
        if backend.len() + n > 380 {
            let mass = &mut mass[..dims::KV_HEADS * backend.len()];
            for layer in 0..dims::LAYERS {
                backend.read_mass(layer, mass).unwrap();
                for (kv_head, mass) in mass.chunks(backend.len()).enumerate() {
                    chooser.choose([Policy::SnapKv, Policy::H2o][evictions % 2], mass, budget, &mut slots);
                    backend.keep(layer, kv_head, &slots).unwrap();
                }
            }
            backend.set_len(300);
            evictions += 1;
        }
        backend.forward(&tokens[..n], 40 * pass, Logits::Last(&mut logits)).unwrap();
        // Threads allocate when they start, which is done by the second eviction.
        allocating += usize::from(evictions > 1 && COUNT.load(Ordering::Relaxed) != before);
    }
    assert!(evictions > 20);
    allocating
}
