//! Decode does not allocate: a counting allocator watches every thread.

#[path = "device/place.rs"]
mod place;

use antigravity::kv::{KvType, KvTypes};
use antigravity::sampler::{Sampler, SamplerOptions};
use antigravity::session::CancelToken;
use antigravity::{Engine, EngineOptions, dims};
use std::alloc::{GlobalAlloc, Layout, System};
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
        let mut sampler = Sampler::new(SamplerOptions::default(), dims::VOCAB).unwrap();
        let mut logits = vec![0.0; dims::VOCAB];
        let mut allocating = 0;
        for _ in 0..64 {
            let before = COUNT.load(Ordering::Relaxed);
            logits.copy_from_slice(session.logits());
            let token = sampler.sample(&mut logits, session.tokens());
            session.decode(token).unwrap();
            allocating += usize::from(COUNT.load(Ordering::Relaxed) != before);
        }
        assert_eq!(allocating, 0, "tokens that allocated with {} and {threads} threads", kv.name());
    }
}
