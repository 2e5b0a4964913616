//! Tests that only new data crosses between CPU and device, however much is there already.

use crate::device::is_exact_with;
use crate::shared::{
    CAPACITY, alone, cpu, evict, forward, gpu, gpu_with_host, mass_of, model, observed, rows_of,
};
use crate::support::random::ids;
use antigravity::dims::{FULL_ATTENTION_LAYERS, HEAD_DIM, KV_HEADS, LAYERS, Q_DIM, VOCAB};
use antigravity::model::device::{Device, KvRows};
use antigravity::opencl::{self, Model, Place};
use numeric::kv::{KvType, KvTypes};

/// Transfers, and bytes, of what is done.
fn of(model: &Model, what: impl FnOnce()) -> (u64, u64) {
    let before = model.device().transfer_stats();
    what();
    let after = model.device().transfer_stats();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn a_token_that_the_host_attends_to_costs_the_same_at_any_depth() {
    let _alone = alone();
    let Some(model) = model() else { return };
    for types in KvType::ALL.map(KvTypes::same) {
        let mut on = gpu_with_host(model, types);
        let mut cache = on.new_cache(CAPACITY).unwrap();
        let mut token = |more: usize| {
            forward(&mut on, &mut *cache, &ids(more));
            of(model, || drop(forward(&mut on, &mut *cache, &[1])))
        };
        let (first, later) = (token(1), token(250));
        assert_eq!(first, later, "{types}");
        // Of each layer queries, keys and values as they are and as rows, and attention; then the logits.
        let layer = 4 * (opencl::QKV + Q_DIM) + types.slot_bytes(1, KV_HEADS, HEAD_DIM);
        assert_eq!(later, ((4 * LAYERS + 1) as u64, (LAYERS * layer + 4 * VOCAB) as u64), "{types}");
    }
}

#[test]
fn an_eviction_moves_rows_where_they_are() {
    let _alone = alone();
    let Some(model) = model() else { return };
    for types in KvType::ALL.map(KvTypes::same).into_iter().chain([KvTypes { k: KvType::Q8, v: KvType::Q4 }])
    {
        let mut on = gpu(model, types, Place::Device);
        let mut cache = on.new_cache(CAPACITY).unwrap();
        cache.write_mass(0, &[]).unwrap();
        observed(&mut on, &mut *cache, &ids(250), 20);
        let (rows, mass) = (rows_of(&mut *cache), mass_of(&mut *cache));
        let found = of(model, || evict(&mut *cache));
        let kept = cache.extent().len;
        // Of each layer which slots its heads keep.
        assert_eq!(
            found,
            (FULL_ATTENTION_LAYERS as u64, (FULL_ATTENTION_LAYERS * KV_HEADS * kept * 4) as u64),
            "{types}"
        );
        // The same by hand.
        let slot = |head: usize, i: usize| match i + 1 == kept {
            true => 249,
            false => 3 * i + usize::from(head == 1),
        };
        let moved = |plane: &[u8], row: usize| {
            let rows = (0..KV_HEADS).flat_map(|head| (0..kept).map(move |i| head * 250 + slot(head, i)));
            rows.flat_map(|at| plane[at * row..(at + 1) * row].to_vec()).collect::<Vec<u8>>()
        };
        let [k, v] = [types.k, types.v].map(|t| t.row_bytes(HEAD_DIM));
        let expected = rows.iter().map(|rows| KvRows { k: moved(&rows.k, k), v: moved(&rows.v, v) });
        assert!(rows_of(&mut *cache) == expected.collect::<Vec<_>>(), "{types}: other rows");
        let bytes: Vec<u8> = mass.iter().flat_map(|m| m.to_le_bytes()).collect();
        let expected = bytes.chunks(KV_HEADS * 250 * 4).flat_map(|layer| moved(layer, 4));
        let found = mass_of(&mut *cache).into_iter().flat_map(u32::to_le_bytes);
        assert!(found.eq(expected), "{types}: other mass");
    }
}

#[test]
fn mass_and_rows_of_a_layer_are_a_transfer_each() {
    let _alone = alone();
    let Some(model) = model() else { return };
    let types = KvTypes::same(KvType::F16);
    let mut on = gpu(model, types, Place::Device);
    let mut cache = on.new_cache(CAPACITY).unwrap();
    cache.write_mass(0, &[]).unwrap();
    observed(&mut on, &mut *cache, &ids(100), 9);
    let mut mass = vec![0.0; KV_HEADS * 100];
    assert_eq!(of(model, || cache.read_mass(0, &mut mass).unwrap()), (1, 4 * mass.len() as u64));
    let mut rows = KvRows::default();
    let bytes = types.slot_bytes(1, KV_HEADS, HEAD_DIM) as u64;
    let read = of(model, || cache.read_rows(0, 30..70, &mut rows).unwrap());
    assert_eq!(read, (2, 40 * bytes));
    assert_eq!(of(model, || cache.write_rows(0, 30..70, &rows).unwrap()), (2, 40 * bytes));
    // They are what the CPU has there.
    let mut cpu = cpu(types);
    let mut other = cpu.new_cache(CAPACITY).unwrap();
    forward(&mut cpu, &mut *other, &ids(100));
    let mut expected = KvRows::default();
    other.read_rows(0, 30..70, &mut expected).unwrap();
    assert!(rows == expected || !is_exact_with(model.device().info()));
}
