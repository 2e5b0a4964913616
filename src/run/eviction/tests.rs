//! SnapKV's choice against the authors' algorithm, and what holds of every policy's.

use super::*;
use serde_json::Value;
use std::path::PathBuf;

fn folder() -> PathBuf {
    crate::project().join("tests/fixtures/kv_eviction")
}

fn floats(case: &Value, what: &str) -> Vec<f32> {
    let name = case["name"].as_str().expect("a name");
    let bytes = std::fs::read(folder().join(format!("{name}.{what}.f32"))).expect("a fixture");
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn number(case: &Value, what: &str) -> usize {
    case[what].as_u64().expect("a number") as usize
}

fn lists(case: &Value, what: &str) -> Option<Vec<Vec<u32>>> {
    serde_json::from_value(case["per_kv_head"][what].clone()).ok()
}

/// Attention that each slot gets of the window's queries, summed over the heads of the group: `[kv_head][token]`.
fn mass(case: &Value) -> Vec<Vec<f32>> {
    let [heads, kv_heads, dim, tokens, window] =
        ["query_heads", "kv_heads", "head_dim", "tokens", "window"].map(|w| number(case, w));
    let (q, k) = (floats(case, "q_window"), floats(case, "k"));
    let mut mass = vec![vec![0.0f64; tokens]; kv_heads];
    for head in 0..heads {
        let kv_head = head / (heads / kv_heads);
        for t in 0..window {
            let q = &q[(head * window + t) * dim..][..dim];
            let score = |slot: usize| -> f64 {
                let k = &k[(kv_head * tokens + slot) * dim..][..dim];
                q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / (dim as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=tokens - window + t).map(|s| libm::exp(score(s))).collect();
            let sum: f64 = weights.iter().sum();
            mass[kv_head].iter_mut().zip(&weights).for_each(|(m, w)| *m += w / sum);
        }
    }
    mass.iter().map(|m| m.iter().map(|&m| m as f32).collect()).collect()
}

fn assert_close(got: &[f32], want: &[f32], factor: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (slot, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g * factor - w).abs() <= 1e-5, "{what}[{slot}]: {} instead of {w}", g * factor);
    }
}

#[test]
fn snapkv_chooses_as_its_authors_do() {
    let text = std::fs::read_to_string(folder().join("cases.json")).expect("cases.json");
    let cases: Value = serde_json::from_str(&text).expect("JSON");
    let mut seen = 0;
    for case in cases["cases"].as_array().expect("cases") {
        let name = case["name"].as_str().expect("a name");
        if case["pooling"] != "max" {
            continue;
        }
        let group = number(case, "query_heads") / number(case, "kv_heads");
        let late = number(case, "tokens") - number(case, "window");
        let (scores, pooled) = (floats(case, "scores_per_kv_head"), floats(case, "pooled_per_kv_head"));
        let selected = lists(case, "selected").expect("slots");
        for (head, mass) in mass(case).iter().enumerate() {
            let (mut ours, mut slots) = (Vec::new(), Vec::new());
            let factor = 1.0 / group as f32; // the mean over the group, where ours is the sum
            assert_close(&mass[..late], &scores[head * late..][..late], factor, &format!("{name} scores"));
            pool_max(&mass[..late], number(case, "kernel"), &mut ours);
            assert_close(&ours, &pooled[head * late..][..late], factor, &format!("{name} pooled"));
            take_best(&ours, 0, number(case, "select"), &mut slots);
            assert_eq!(slots, selected[head], "{name} head {head}");
            if let Some((certain, tied)) = lists(case, "certain").zip(lists(case, "tied")) {
                assert!(certain[head].iter().all(|s| slots.contains(s)));
                assert!(slots.iter().all(|s| certain[head].contains(s) || tied[head].contains(s)));
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 4);
}

/// Multiplicative congruential numbers of 31 bits.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn every_choice_ascends_counts_right_and_holds_prefix_and_recent() {
    let mut r = Numbers(1);
    let (mut chooser, mut slots) = (SlotSelector::default(), Vec::new());
    for round in 0..4000 {
        let mut mass: Vec<f32> = (0..r.below(300)).map(|_| r.below(50) as f32).collect();
        if round % 7 == 0 && !mass.is_empty() {
            let slot = r.below(mass.len());
            mass[slot] = f32::NAN;
        }
        let budget =
            Budget { keep: r.below(200), prefix: r.below(40), recent: r.below(120), stale: r.below(200) };
        for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
            chooser.choose_slots(policy, &mass, budget, &mut slots);
            assert!(slots.windows(2).all(|w| w[0] < w[1]), "{policy:?} {budget:?}");
            assert!(slots.iter().all(|&s| (s as usize) < mass.len()));
            let all = policy == Policy::None || mass.len() <= budget.keep;
            assert_eq!(slots.len(), if all { mass.len() } else { budget.keep }, "{policy:?} {budget:?}");
            let prefix = budget.prefix.min(slots.len());
            assert!((0..prefix as u32).eq(slots[..prefix].iter().copied()));
            let recent = budget.recent.min(slots.len() - prefix);
            let last = (mass.len() - recent) as u32..mass.len() as u32;
            assert!(last.eq(slots[slots.len() - recent..].iter().copied()), "{policy:?} {budget:?}");
        }
    }
}

#[test]
fn sliding_keeps_the_prefix_and_the_latest_slots() {
    let mut slots = Vec::new();
    let budget =
        Budget::for_eviction(&Eviction { policy: Policy::Sliding, prefix: Some(4), ..Eviction::NEVER }, 10);
    assert_eq!(budget, Budget { keep: 10, prefix: 4, recent: 6, stale: 0 });
    SlotSelector::default().choose_slots(Policy::Sliding, &[0.0; 100], budget, &mut slots);
    assert_eq!(slots, [0, 1, 2, 3, 94, 95, 96, 97, 98, 99]);
}

#[test]
fn heavy_hitters_stay_and_of_equals_the_first() {
    let (mut chooser, mut slots) = (SlotSelector::default(), Vec::new());
    let mut mass = vec![1.0; 100];
    (mass[17], mass[50], mass[89]) = (9.0, 2.0, 3.0);
    let h2o = Budget::for_eviction(&Eviction { policy: Policy::H2o, prefix: Some(2), ..Eviction::NEVER }, 12);
    assert_eq!(h2o, Budget { keep: 12, prefix: 2, recent: 5, stale: 0 });
    chooser.choose_slots(Policy::H2o, &mass, h2o, &mut slots);
    assert_eq!(slots, [0, 1, 2, 3, 17, 50, 89, 95, 96, 97, 98, 99]);

    let snap =
        Budget::for_eviction(&Eviction { policy: Policy::SnapKv, prefix: Some(0), ..Eviction::NEVER }, 14);
    assert_eq!(snap, Budget { keep: 14, prefix: 0, recent: 7, stale: 0 });
    chooser.choose_slots(Policy::SnapKv, &mass, snap, &mut slots);
    assert_eq!(slots, [11, 12, 13, 14, 15, 16, 17, 93, 94, 95, 96, 97, 98, 99], "with its neighbours");
    let much =
        Budget::for_eviction(&Eviction { policy: Policy::SnapKv, prefix: Some(9), ..Eviction::NEVER }, 1000);
    assert_eq!(much, Budget { keep: 1000, prefix: 9, recent: SNAP_WINDOW, stale: 0 });
}

#[test]
fn slots_too_far_back_stay_only_for_want_of_others() {
    let (mut chooser, mut slots) = (SlotSelector::default(), Vec::new());
    let mass: Vec<f32> = (0..100).map(|i| 100.0 - i as f32).collect();
    let budget = Budget { keep: 12, prefix: 2, recent: 5, stale: 40 };
    chooser.choose_slots(Policy::H2o, &mass, budget, &mut slots);
    assert_eq!(slots, [0, 1, 40, 41, 42, 43, 44, 95, 96, 97, 98, 99]);
    chooser.choose_slots(Policy::H2o, &mass, Budget { stale: 93, ..budget }, &mut slots);
    assert_eq!(slots, [0, 1, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99]);
}

#[test]
fn a_budget_never_exceeds_what_stays() {
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        for keep in 0..40 {
            let budget = Budget::for_eviction(&Eviction { policy, prefix: Some(8), ..Eviction::NEVER }, keep);
            assert!(budget.prefix + budget.recent <= budget.keep && budget.keep == keep);
        }
    }
}

#[test]
fn attention_sinks_stay_unless_another_number_is_given() {
    for (policy, sinks) in [(Policy::Sliding, 4), (Policy::SnapKv, 4), (Policy::H2o, 0), (Policy::None, 0)] {
        let unsaid = Eviction { policy, ..Eviction::NEVER };
        let prefixes: Vec<usize> = (0..10).map(|keep| Budget::for_eviction(&unsaid, keep).prefix).collect();
        let expected: Vec<usize> = (0..10).map(|keep: usize| sinks.min(keep / 2)).collect();
        assert_eq!(prefixes, expected, "{policy:?}: half of a small window at most");
        for given in [0, 1, 6] {
            let budget = Budget::for_eviction(&Eviction { prefix: Some(given), ..unsaid }, 100);
            assert_eq!(budget.prefix, given, "{policy:?}");
        }
        // Where nobody asked for any, no window is too narrow for them.
        assert!(Eviction { window: 2, ..unsaid }.validate().is_ok());
        assert!(Eviction { window: 5, prefix: Some(4), ..unsaid }.validate().is_err());
    }
}
