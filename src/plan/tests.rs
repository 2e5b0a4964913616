//! The plan: exact where it can be, never overflowing, and honest about what fits.

use super::*;
use crate::kv::{KvType, KvTypes};

fn plan(slots: usize) -> Plan {
    let mut options = EngineOptions::new("nowhere");
    options.max_seq_len = slots;
    options.threads = 2;
    let mut plan = Plan::assumed(&options);
    plan.tokenizer_file = 1000;
    plan
}

fn with_memory(slots: usize, available: u64) -> Plan {
    Plan { memory: Memory { available: Some(available), ..Memory::default() }, ..plan(slots) }
}

#[test]
fn the_cache_is_exact() {
    for kv in KvType::ALL {
        let mut p = plan(100);
        p.options.kv_types = KvTypes::both(kv);
        let bytes = 100 * 2 * LAYERS * KV_HEADS * kv.row_bytes(HEAD_DIM);
        let items = p.items();
        let line = items.iter().find(|i| i.what.starts_with("KV cache")).expect("a line for the cache");
        assert_eq!((line.bytes, line.kind), (bytes as u64, Kind::Own));
    }
}

#[test]
fn sums_do_not_overflow() {
    for slots in [0, 1, usize::MAX / 2, usize::MAX] {
        let mut p = plan(slots);
        p.options.prefill_chunk = usize::MAX;
        p.options.threads = usize::MAX;
        assert!(p.need() > 0 && p.peak() >= p.need());
    }
    assert_eq!(plan(usize::MAX).need(), u64::MAX);
}

#[test]
fn what_does_not_fit_is_refused_with_the_context_that_does() {
    let need = plan(1000).need();
    assert_eq!(with_memory(1000, need).check(), Ok(()));
    let Err(Error::Memory(message)) = with_memory(1001, need).check() else { panic!("not refused") };
    let longest = plan(1001).longest(need).expect("1000 slots fit");
    assert!(longest >= 1000 && plan(longest).need() <= need && plan(longest + 1).need() > need);
    assert!(message.contains(&format!("use --max-seq-len {longest} or less")), "{message}");
    assert!(message.contains(&mib(need)) && message.contains("--max-seq-len 1001"), "{message}");
}

#[test]
fn a_model_that_never_fits_says_so() {
    let error = with_memory(1, 1 << 20).check().expect_err("1 MiB is too little");
    assert_eq!(error.exit_code(), 4);
    assert!(error.to_string().contains("does not fit with any context"), "{error}");
    assert_eq!(plan(1).longest(0), None);
    assert_eq!(plan(1).longest(u64::MAX), Some(1 << 24));
}

#[test]
fn an_unknown_machine_is_not_refused() {
    let p = Plan { memory: Memory::default(), ..plan(usize::MAX) };
    assert_eq!(p.check(), Ok(()));
}

#[test]
fn need_grows_with_the_context() {
    let mut last = 0;
    for slots in [1, 2, 127, 128, 129, 255, 256, 257, 2048, 1 << 20] {
        assert!(plan(slots).need() > last, "{slots}");
        last = plan(slots).need();
    }
}

#[test]
fn a_checkpoint_becomes_own_memory_and_f32_stays_mapped() {
    let mut options = EngineOptions::new(MODEL_DIR);
    if !options.model.join("model.safetensors").exists() {
        return; // a model of which only the config is here
    }
    let q4 = Plan::new(&options).expect("a plan");
    if q4.form == Form::Checkpoint {
        let matrices = table().into_iter().filter(|s| s.role == Role::Matrix && s.quantises());
        assert!(q4.weights.own >= matrices.map(|s| matrix(&s)).sum());
        assert!(q4.weights.passing > 0 && q4.peak() > q4.need());
    }
    options.weight_type = WeightType::F32;
    let dense = Plan::new(&options).expect("a plan");
    assert_eq!(dense.form, Form::Checkpoint);
    assert!(dense.weights.mapped > dense.weights.own && dense.weights.passing == 0);
}
