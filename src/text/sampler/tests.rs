//! Every stage against reference vectors computed in f64, and the shortcuts against plain sorting.

mod dry;
mod logprobs;
mod stages;

use super::softmax::exp_approx;
use super::*;
use crate::Error;
use serde_json::Value;
use std::path::PathBuf;

const REL: f32 = 1e-5;

fn folder() -> PathBuf {
    crate::project().join("tests/fixtures/sampler")
}

fn floats(entry: &Value) -> Vec<f32> {
    let file = folder().join(entry["file"].as_str().expect("a file name"));
    let bytes = std::fs::read(file).expect("a fixture");
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= REL * w.abs() + 1e-37, "{what}[{i}]: {g} instead of {w}");
    }
}

fn spread(kept: &[(u32, f32)], vocab: usize) -> Vec<f32> {
    let mut all = vec![0.0; vocab];
    for &(id, p) in kept {
        all[id as usize] = p;
    }
    all
}

fn options(params: &Value) -> SamplerOptions {
    let f = |k: &str| params[k].as_f64().expect("a number") as f32;
    let n = |k: &str| params[k].as_u64().expect("a count") as usize;
    SamplerOptions {
        temperature: f("temperature"),
        top_p: f("top_p"),
        top_k: n("top_k"),
        repetition_penalty: f("repetition_penalty"),
        repetition_window: n("repetition_window"),
        ..Default::default()
    }
}

/// The tokens of `probs` that pass top-k, typicality, top-p and min-p: best first, not renormalised.
fn keep(sampler: &mut Sampler, probs: &[f32]) -> Vec<(u32, f32)> {
    let kept = sampler.rank_tokens(probs, sampler.cut_rule(probs));
    sampler.ranking.best[kept].to_vec()
}

#[test]
fn stages_follow_the_reference_vectors() {
    let text = std::fs::read_to_string(folder().join("cases.json")).expect("cases.json");
    let cases: Value = serde_json::from_str(&text).expect("JSON");
    let vocab = cases["vocab_size"].as_u64().expect("a size") as usize;
    let mut seen = 0;
    for case in cases["cases"].as_array().expect("cases") {
        let name = case["name"].as_str().expect("a name");
        let o = options(&case["params"]);
        let recent: Vec<u32> = serde_json::from_value(case["recent"].clone()).expect("ids");
        let mut x = floats(&cases["logits"][case["logits"].as_str().expect("a name")]);
        let mut whole = x.clone();
        let step = |s: &str| floats(&case["steps"][s]);
        apply_repetition_penalty(&mut x, &recent, o.repetition_penalty, o.repetition_window);
        assert_close(&x, &step("after_penalty"), name);
        seen += 1;
        if o.temperature == 0.0 {
            let first = case["info"]["greedy_candidates"].as_array().or(case["greedy_candidates"].as_array());
            let want = first.expect("candidates").iter().filter_map(Value::as_u64).min();
            assert_eq!(Some(u64::from(argmax(&x))), want, "{name}");
            let mut sampler = Sampler::new(o, vocab).expect("valid");
            assert_eq!(Some(u64::from(sampler.sample_token(&mut whole, &recent))), want, "{name}");
            continue;
        }
        softmax(&mut x, o.temperature);
        assert_close(&x, &step("softmax"), name);
        let off = if o.top_k == 0 { "_k_off" } else { "" };
        let mut only_k = Sampler::new(SamplerOptions { top_p: 1.0, ..o.clone() }, vocab).expect("valid");
        assert_close(&spread(&keep(&mut only_k, &x), vocab), &step(&format!("top_k{off}")), name);
        let mut sampler = Sampler::new(o, vocab).expect("valid");
        let kept = keep(&mut sampler, &x);
        assert_close(&spread(&kept, vocab), &step(&format!("top_p{off}")), name);
        if let (Some(ids), "") = (case["info"]["kept_ids"].as_array(), off) {
            let got: Vec<u64> = kept.iter().map(|r| r.0.into()).collect();
            assert_eq!(got, ids.iter().filter_map(Value::as_u64).collect::<Vec<_>>(), "{name}");
        }
        let total: f64 = kept.iter().map(|r| f64::from(r.1)).sum();
        let renormed: Vec<_> = kept.iter().map(|r| (r.0, (f64::from(r.1) / total) as f32)).collect();
        assert_close(&spread(&renormed, vocab), &step(&format!("final{off}")), name);
        let id = sampler.sample_token(&mut whole, &recent);
        assert!(kept.iter().any(|r| r.0 == id), "{name}: {id} was not kept");
    }
    assert_eq!(seen, 30);
}

#[test]
fn only_greedy_choice_leaves_logits_as_they_are() {
    let logits = [1.0, 3.0, f32::NAN, 3.0, 2.0];
    let greedy = SamplerOptions { temperature: 0.0, repetition_penalty: 1.0, ..Default::default() };
    let choice = |o: SamplerOptions| Sampler::new(o, logits.len()).expect("valid").greedy_token(&logits);
    assert_eq!(choice(greedy.clone()), Some(1));
    let dry = DryOptions { multiplier: 1.0, ..Default::default() };
    for other in [
        SamplerOptions { temperature: 0.1, ..greedy.clone() },
        SamplerOptions { repetition_penalty: 1.1, ..greedy.clone() },
        SamplerOptions { presence_penalty: 0.5, ..greedy.clone() },
        SamplerOptions { frequency_penalty: -0.5, ..greedy.clone() },
        SamplerOptions { logit_bias: vec![(1, -1.0)], ..greedy.clone() },
        SamplerOptions { dry, ..greedy },
    ] {
        assert_eq!(choice(other.clone()), None, "{other:?}");
    }
    assert!(all_finite(&[0.0, -1.0, f32::MAX]) && !all_finite(&logits));
    assert!(!all_finite(&[[0.0; 33].as_slice(), &[f32::NEG_INFINITY]].concat()));
}

#[test]
fn exp_is_within_two_ulp() {
    for i in 0..=873_000 {
        let x = i as f32 * -1e-4;
        let want = libm::exp(f64::from(x));
        let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1) - want as f32);
        let got = f64::from(exp_approx(x));
        assert!((got - want).abs() <= 2.0 * ulp, "exp({x}) = {got} instead of {want}");
    }
    assert_eq!(exp_approx(0.0), 1.0);
    for x in [f32::NEG_INFINITY, f32::NAN, -f32::MAX, -100.0] {
        assert_eq!(exp_approx(x), 0.0);
    }
}

#[test]
fn softmax_has_these_bits_on_every_machine() {
    let mut rng = Rng::new(11);
    let mut x: Vec<f32> = (0..1000).map(|_| rng.next_f32() * 30.0).collect();
    softmax(&mut x, 1.0);
    let digest = x.iter().fold(0u64, |h, p| (h ^ u64::from(p.to_bits())).wrapping_mul(0x100_0000_01b3));
    assert_eq!(digest, 7697166919809036519);
}

/// The specification read literally: sort everything, cut, walk.
fn plain(probs: &[f32], o: &SamplerOptions, uniform: f32) -> u32 {
    let mut all: Vec<(u32, f32)> = probs.iter().enumerate().map(|(i, &p)| (i as u32, p)).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    if o.top_k > 0 {
        all.truncate(o.top_k);
    }
    let mut sum = 0.0;
    if o.top_p < 1.0 {
        let cut = all.iter().position(|r| {
            sum += f64::from(r.1);
            sum > f64::from(o.top_p)
        });
        all.truncate(cut.map_or(all.len(), |i| i + 1));
    }
    let floor = o.min_p * all[0].1;
    all.retain(|r| r.1 >= floor);
    let mut rest = f64::from(uniform) * all.iter().map(|r| f64::from(r.1)).sum::<f64>();
    for r in &all {
        rest -= f64::from(r.1);
        if rest <= 0.0 {
            return r.0;
        }
    }
    all[all.len() - 1].0
}

#[test]
fn partial_ranking_draws_what_a_full_sort_draws() {
    let mut rng = Rng::new(42);
    for round in 0..400 {
        let vocab = [1, 2, 7, 300, 1500, 5000][round % 6];
        let levels = [3.0, 50.0, 1e6][round % 3];
        let spread = [0.5, 4.0, 20.0][(round / 3) % 3];
        let logits: Vec<f32> =
            (0..vocab).map(|_| (rng.next_f32() * levels).floor() / levels * spread).collect();
        let o = SamplerOptions {
            temperature: 1.0,
            top_k: [0, 1, 40, 700, 100_000][round % 5],
            top_p: [1.0, 0.9, 0.3, 0.999, 0.0][(round / 5) % 5],
            min_p: [0.0, 0.05, 1.0][(round / 7) % 3],
            repetition_penalty: 1.0,
            seed: round as u64,
            ..Default::default()
        };
        let mut probs = logits.clone();
        softmax(&mut probs, 1.0);
        let uniform = Rng::new(o.seed).next_f32();
        let mut sampler = Sampler::new(o.clone(), vocab).expect("valid");
        let room = sampler.ranking.best.capacity();
        assert_eq!(
            sampler.sample_token(&mut logits.clone(), &[]),
            plain(&probs, &o, uniform),
            "{round} {o:?}"
        );
        assert_eq!(sampler.ranking.best.capacity(), room, "drawing allocates nothing");
    }
}

#[test]
fn draws_are_in_proportion_and_repeatable() {
    let o = SamplerOptions { temperature: 1.0, top_p: 1.0, seed: 5, ..Default::default() };
    let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
    let run = |sampler: &mut Sampler| sampler.sample_token(&mut logits.clone(), &[]);
    let mut sampler = Sampler::new(o.clone(), 4).expect("valid");
    let mut counts = [0u32; 4];
    for _ in 0..50_000 {
        counts[run(&mut sampler) as usize] += 1;
    }
    for (id, &n) in counts.iter().enumerate() {
        let want = 5_000.0 * (id + 1) as f64;
        assert!((f64::from(n) - want).abs() < 350.0, "{counts:?}");
    }
    let mut other = Sampler::new(o, 4).expect("valid");
    other.set_rng(Rng::from_words(sampler.rng().words()).expect("a state"));
    for _ in 0..100 {
        assert_eq!(run(&mut sampler), run(&mut other));
    }
}

#[test]
fn strange_logits_do_not_panic() {
    let inf = f32::INFINITY;
    for logits in [
        vec![f32::NAN; 5],
        vec![-inf; 5],
        vec![inf; 5],
        vec![f32::NAN, 1.0, inf, -inf, 3.0],
        vec![f32::NAN, 1.0, -inf, -inf, f32::NAN],
        vec![f32::MAX, -f32::MAX, 0.0, -0.0, 1e-45],
    ] {
        for temperature in [0.0, 1e-40, 1e-3, 1.0, 1e30] {
            for top_k in [0, 1, 3] {
                let o = SamplerOptions { temperature, top_k, ..Default::default() };
                let others = SamplerOptions {
                    typical_p: 0.5,
                    presence_penalty: 1.0,
                    dry: DryOptions { multiplier: 1.0, allowed_length: 1, ..DryOptions::default() },
                    xtc: XtcOptions { probability: 1.0, threshold: 0.0 },
                    ..o.clone()
                };
                for o in [o, others] {
                    let mut sampler = Sampler::new(o, 5).expect("valid");
                    for _ in 0..10 {
                        let id = sampler.sample_token(&mut logits.clone(), &[0, 4, 4, 99, 4]) as usize;
                        assert!(id < 5);
                        assert!(!logits[id].is_nan() || logits.iter().all(|x| x.is_nan()), "{logits:?} {id}");
                    }
                }
            }
        }
    }
    // A temperature near 0 is nearly greedy, though quotients would overflow.
    let o = SamplerOptions { temperature: 1e-38, repetition_penalty: 1.0, ..Default::default() };
    assert_eq!(Sampler::new(o, 3).expect("valid").sample_token(&mut [9.0, 10.0, 8.0], &[]), 1);
}

#[test]
fn bad_options_are_usage_errors_that_name_the_flag() {
    let good = SamplerOptions::default();
    assert_eq!(good.validate(), Ok(()));
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];
    let cases = bad.iter().flat_map(|&x| {
        [
            ("`SamplerOptions::temperature`", SamplerOptions { temperature: x, ..good.clone() }),
            ("`SamplerOptions::top_p`", SamplerOptions { top_p: x, ..good.clone() }),
            ("`SamplerOptions::min_p`", SamplerOptions { min_p: x, ..good.clone() }),
            (
                "`SamplerOptions::repetition_penalty`",
                SamplerOptions { repetition_penalty: x, ..good.clone() },
            ),
        ]
    });
    for (flag, o) in cases.chain([
        ("`SamplerOptions::top_p`", SamplerOptions { top_p: 1.5, ..good.clone() }),
        ("`SamplerOptions::repetition_penalty`", SamplerOptions { repetition_penalty: 0.0, ..good.clone() }),
    ]) {
        let Err(Error::Usage(message)) = o.validate() else { panic!("{o:?} was accepted") };
        assert!(message.starts_with(flag) && message.contains("use a number"), "{message}");
    }
}
