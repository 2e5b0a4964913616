//! The plan: exact where it can be, never overflowing, and honest about what fits.

use super::*;
use crate::model::device::KvRows;
use crate::model::weights::{TensorRole, TensorSpec, model_tensors};
use files::Error;
use files::blocks::{BLOCK, BlockQ4};
use numeric::kv::{KvType, KvTypes};

fn plan(slots: usize) -> Plan {
    let mut options = EngineOptions::new("nowhere");
    options.max_seq_len = slots;
    options.threads = 2;
    let mut plan = Plan::estimate(&options).expect("a plan");
    plan.tokenizer_file = 1000;
    plan
}

fn with_memory(slots: usize, available: u64) -> Plan {
    Plan { memory: Memory { available: Some(available), ..Memory::default() }, ..plan(slots) }
}

/// Keys and values of different types included.
#[test]
fn the_planned_cache_has_the_bytes_of_the_allocated_one() {
    for (k, v) in KvType::ALL.into_iter().flat_map(|k| KvType::ALL.map(|v| (k, v))) {
        let mut p = plan(100);
        p.options.kv_types = KvTypes { k, v };
        let bytes = 100 * LAYERS * KV_HEADS * (k.row_bytes(HEAD_DIM) + v.row_bytes(HEAD_DIM));
        let rows = KvRows::zeroed(p.options.kv_types, 100, HEAD_DIM);
        assert_eq!(bytes, LAYERS * (rows.k.len() + rows.v.len()), "what backends hold");
        let items = p.plan_items();
        let line = items.iter().find(|i| i.purpose.starts_with("KV cache")).expect("a line for the cache");
        assert_eq!((line.bytes, line.kind), (bytes as u64, MemoryKind::Own), "{k:?} {v:?}");
        assert!(line.purpose.contains(&p.options.kv_types.to_string()), "{}", line.purpose);
    }
}

#[test]
fn attention_mass_is_exact_and_only_where_a_policy_looks_at_it() {
    use crate::run::eviction::Policy;
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let mut p = plan(100);
        p.options.eviction.policy = policy;
        p.options.prefill_chunk = 30;
        let observed = matches!(policy, Policy::SnapKv | Policy::H2o);
        let line = p.plan_items().into_iter().find(|i| i.purpose == "attention mass").map(|i| i.bytes);
        let bytes = 4 * LAYERS * KV_HEADS * 100 + 8 * HEADS * 30;
        assert_eq!(line, observed.then_some(bytes as u64), "{policy:?}");
        p.options.max_seq_len = usize::MAX;
        assert_eq!(p.needed_bytes(), u64::MAX);
    }
}

#[cfg(feature = "serve")]
#[test]
fn a_server_plans_for_requests_by_the_memory_that_there_is() {
    for (mib, budget) in [(1, 16), (400, 50), (1 << 20, 128)] {
        let mut p = with_memory(100, mib << 20);
        let (need, empty) = (p.needed_bytes(), p.idle_bytes());
        assert_eq!(p.add_requests(), budget << 20);
        assert!(p.needed_bytes() - need > (budget << 20) + ((CONNECTIONS * CONNECTION_BUFFER) as u64));
        assert_eq!(p.idle_bytes(), empty, "nobody asks");
        let line = p.plan_items().into_iter().find(|i| i.purpose == "requests and answers").expect("a line");
        assert_eq!(line.bytes, p.needed_bytes() - need);
    }
}

#[test]
fn huge_plans_do_not_overflow() {
    for slots in [0, 1, usize::MAX / 2, usize::MAX] {
        let mut p = plan(slots);
        p.options.prefill_chunk = usize::MAX;
        p.options.threads = usize::MAX;
        assert!(p.needed_bytes() > 0 && p.peak_bytes() >= p.needed_bytes());
    }
    assert_eq!(plan(usize::MAX).needed_bytes(), u64::MAX);
}

#[test]
fn what_does_not_fit_is_refused_with_the_context_that_does() {
    let need = plan(1000).needed_bytes();
    assert_eq!(with_memory(1000, need).check(), Ok(()));
    let Err(Error::Memory(message)) = with_memory(1001, need).check() else { panic!("not refused") };
    let longest = plan(1001).longest_context(need).expect("1000 slots fit");
    assert!(
        longest >= 1000 && plan(longest).needed_bytes() <= need && plan(longest + 1).needed_bytes() > need
    );
    assert!(message.contains(&format!("use `EngineOptions::max_seq_len` {longest} or less")), "{message}");
    assert!(
        message.contains(&format_mib(need)) && message.contains("`EngineOptions::max_seq_len` 1001"),
        "{message}"
    );
}

#[test]
fn a_model_that_never_fits_says_so() {
    let error = with_memory(1, 1 << 20).check().expect_err("1 MiB is too little");
    assert_eq!(error.exit_code(), 4);
    assert!(error.to_string().contains("no context fits"), "{error}");
    assert_eq!(plan(1).longest_context(0), None);
    assert_eq!(plan(1).longest_context(u64::MAX), Some(1 << 24));
}

/// The remedy after the last semicolon.
fn remedy(plan: &Plan, context: ContextName) -> String {
    let said = plan.check_for(context).expect_err("too little").to_string();
    said.rsplit_once("; ").expect("a remedy").1.into()
}

#[test]
fn a_smaller_cache_is_advised_where_it_helps() {
    let mut p = with_memory(1000, plan(1000).needed_bytes());
    p.options.kv_types = KvTypes::same(KvType::F32);
    let longest = p.longest_context(p.memory.usable_bytes().expect("it is known")).expect("some slots fit");
    assert!(longest < 1000);
    let remedy = remedy(&p, ContextName::MaxSeqLen);
    assert_eq!(
        remedy,
        format!(
            "use `EngineOptions::max_seq_len` {longest} or less, `EngineOptions::kv_types` q4 with `EngineOptions::max_seq_len` 1000 or less, or close other programs"
        )
    );
}

#[test]
fn where_no_context_fits_settings_are_named_with_which_one_does() {
    let mut p = plan(1000);
    (p.options.kv_types, p.options.prefill_chunk) = (KvTypes::same(KvType::F32), 4096);
    let mut smaller = p.clone();
    (smaller.options.kv_types, smaller.options.prefill_chunk) = (KvTypes::same(KvType::Q4), 32);
    // Scratch for a single slot is small; memory for a few slots is enough for small chunks only.
    let have = smaller.needed_bytes_for(3);
    p.memory.available = Some(have);
    match p.longest_context(have) {
        Some(n) => assert!(n <= smaller.longest_context(have).expect("three slots fit")),
        None => assert!(remedy(&p, ContextName::Chunk).starts_with("use `EngineOptions::kv_types` q4")),
    }
    // A calibration is more than a slot saves.
    let one_slot = KvType::ALL.map(|kind| {
        smaller.options.kv_types = KvTypes::same(kind);
        smaller.needed_bytes_for(1)
    });
    p.memory.available = one_slot.into_iter().min().map(|least| least - 1);
    assert_eq!(remedy(&p, ContextName::Row), "no context fits: close other programs or use a smaller model");
    p.options.weight_type = WeightType::F32;
    assert!(remedy(&p, ContextName::Chunk).contains("`EngineOptions::weight_type` q4_0"));
}

#[test]
fn plans_beside_each_other_count_together() {
    let (a, b) = (with_memory(500, plan(1000).needed_bytes()), with_memory(900, plan(1000).needed_bytes()));
    assert_eq!(check_sequences_fit(std::slice::from_ref(&b), ContextName::Row, "less"), Ok(b.needed_bytes()));
    let said = check_sequences_fit(&[a.clone(), b.clone(), b.clone()], ContextName::Row, "less")
        .expect_err("too much");
    assert!(said.to_string().ends_with("; less"), "{said}");
    // Each has weights of its own.
    let have = 2 * plan(70).needed_bytes();
    let pair = |slots| [with_memory(slots, have), with_memory(slots, have)];
    assert_eq!(check_models_fit(&pair(70), ContextName::Chunk), Ok(()));
    let said = check_models_fit(&pair(71), ContextName::Chunk).expect_err("too much").to_string();
    assert!(
        said.contains("`Context::Chunk` 71 for 2 settings")
            && said.ends_with("; use `Context::Chunk` 70 or less"),
        "{said}"
    );
}

#[test]
fn an_unknown_machine_is_not_refused() {
    let p = Plan { memory: Memory::default(), ..plan(usize::MAX) };
    assert_eq!(p.check(), Ok(()));
}

#[test]
fn a_longer_context_needs_more_memory() {
    let mut last = 0;
    for slots in [1, 2, 127, 128, 129, 255, 256, 257, 2048, 1 << 20] {
        assert!(plan(slots).needed_bytes() > last, "{slots}");
        last = plan(slots).needed_bytes();
    }
}

#[test]
fn a_checkpoint_becomes_own_memory_and_f32_stays_mapped() {
    let mut options = EngineOptions::new(MODEL_DIR);
    if !options.model.join("model.safetensors").exists() {
        return; // a model of which only the config is here
    }
    let q4 = Plan::new(&options).expect("a plan");
    if q4.form == WeightsForm::Checkpoint {
        let matrices =
            model_tensors().into_iter().filter(|s| s.role == TensorRole::Matrix && s.is_quantised());
        let q4_0 = |s: TensorSpec| (s.rows * s.cols / BLOCK * BlockQ4::BYTES) as u64;
        assert!(q4.weights.own >= matrices.map(q4_0).sum());
        assert!(q4.weights.conversion_window > 0 && q4.peak_bytes() > q4.needed_bytes());
    }
    options.weight_type = WeightType::F32;
    let dense = Plan::new(&options).expect("a plan");
    assert_eq!(dense.form, WeightsForm::Checkpoint);
    assert!(dense.weights.mapped > dense.weights.own && dense.weights.conversion_window == 0);
}
