//! Tests, in a process of their own, that the cache returns memory that it no longer needs to the system.

use crate::support::paths;
use crate::support::process::run_alone;
use antigravity::dims::{HEAD_DIM, KV_HEADS, LAYERS};
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, KvCache, KvRows};
use antigravity::{Engine, EngineOptions};
use files::mapped::page_size;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::sync::Arc;

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * page_size()
}

#[test]
fn evicted_slots_give_their_memory_back() {
    run_alone("cache_memory::evicted_slots_give_their_memory_back", fill_and_evict);
}

fn fill_and_evict() {
    let types = KvTypes::same(KvType::F32);
    let slot = types.slot_bytes(LAYERS, KV_HEADS, HEAD_DIM);
    // 64 MiB, of which an eighth stays.
    let slots = (64 << 20) / slot;
    let kept = slots / 8;
    let engine = Engine::load(EngineOptions::new(paths::model())).unwrap();
    let options =
        CpuOptions { threads: 1, isa: Isa::detect().unwrap(), kv_types: types, slots, max_tokens: 1 };
    let mut device = CpuDevice::new(Arc::clone(engine.weights()), options).unwrap();
    let mut cache: Box<dyn KvCache> = device.new_cache(slots).unwrap();
    let mut rows = KvRows::zeroed(types, slots, HEAD_DIM);
    rows.k.fill(1);
    rows.v.fill(2);
    for layer in 0..LAYERS {
        cache.write_rows(layer, 0..slots, &rows).unwrap();
    }
    cache.set_len(slots);
    let full = resident();
    assert!(full > 64 << 20);

    // A few tokens back cost nothing.
    cache.set_len(slots - 10);
    assert!(full.saturating_sub(resident()) < 1 << 20);

    cache.set_len(kept);
    // Pages that hold a kept slot too stay, two a head.
    let shared = LAYERS * KV_HEADS * 2 * page_size();
    let freed = full.saturating_sub(resident());
    assert!(freed + shared + (1 << 20) >= (slots - kept) * slot, "{freed} of {}", (slots - kept) * slot);

    let mut left = KvRows::default();
    for layer in 0..LAYERS {
        cache.read_rows(layer, 0..kept, &mut left).unwrap();
        assert!(left.k.iter().all(|&b| b == 1) && left.v.iter().all(|&b| b == 2));
        cache.write_rows(layer, 0..slots, &rows).unwrap();
    }
    cache.set_len(slots);
    for layer in 0..LAYERS {
        cache.read_rows(layer, 0..slots, &mut left).unwrap();
        assert!(left == rows);
    }
}
