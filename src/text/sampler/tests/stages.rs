//! All stages at once against plain loops written from the definitions, and that what is off leaves no trace.

use super::*;

/// Of the last tokens before `next`, the most that are also the last of all; by trying every length at every place.
fn repeated(recent: &[u32], next: u32) -> usize {
    let is_there = |n: &usize| {
        let newest = &recent[recent.len() - n..];
        recent.windows(n + 1).any(|w| w[*n] == next && w[..*n] == *newest)
    };
    if recent.contains(&next) { (1..recent.len()).rev().find(is_there).unwrap_or(0) } else { 0 }
}

/// Bias and penalties, token by token of the vocabulary.
fn plain_adjust(logits: &mut [f32], recent: &[u32], o: &SamplerOptions) {
    for (id, x) in logits.iter_mut().enumerate() {
        let id = id as u32;
        o.logit_bias.iter().filter(|b| b.0 == id).for_each(|b| *x += b.1);
        let window = &recent[recent.len().saturating_sub(o.repetition_window)..];
        let count = window.iter().filter(|r| **r == id).count();
        for _ in 0..count {
            *x = if *x < 0.0 { *x * o.repetition_penalty } else { *x / o.repetition_penalty };
        }
        if count > 0 {
            *x -= o.presence_penalty + count as f32 * o.frequency_penalty;
        }
        let searched = recent.len() - o.dry.window.unwrap_or(usize::MAX).min(recent.len());
        let length = repeated(&recent[searched..], id);
        if o.dry.multiplier > 0.0 && length >= o.dry.allowed_length {
            let growth = libm::pow(o.dry.base.into(), (length - o.dry.allowed_length) as f64);
            *x -= (f64::from(o.dry.multiplier) * growth) as f32;
        }
    }
}

/// The most typical tokens, best first; `all` is the vocabulary in order of probability, of which the first `k` count.
fn plain_typical(all: &[TokenScore], k: usize, mass: f32) -> Vec<TokenScore> {
    let ln = |p: f32| f64::from(libm::logf(p));
    let mut by_id = all.to_vec();
    by_id.sort_by_key(|r| r.0);
    let entropy = -by_id.iter().filter(|r| r.1 > 0.0).map(|r| f64::from(r.1) * ln(r.1)).sum::<f64>();
    let middle = all[..k].iter().filter(|r| ln(r.1) > -entropy).count();
    let mut order: Vec<usize> = (0..k).collect();
    let deviation = |i: usize| (-ln(all[i].1) - entropy).abs();
    let distance = |i: usize| if i < middle { (0, middle - i) } else { (1, i - middle) };
    order.sort_by(|&a, &b| deviation(a).total_cmp(&deviation(b)).then(distance(a).cmp(&distance(b))));
    let mut sum = 0.0;
    let needed = order.iter().position(|&i| {
        sum += f64::from(all[i].1);
        sum >= f64::from(mass)
    });
    order.truncate(needed.map_or(k, |i| i + 1));
    order.sort_unstable();
    order.iter().map(|&i| all[i]).collect()
}

/// The tokens left to draw from, best first; XTC acts if `exclude` is true.
fn plain_keep(probs: &[f32], o: &SamplerOptions, exclude: impl FnOnce() -> bool) -> Vec<TokenScore> {
    let mut all: Vec<TokenScore> = probs.iter().enumerate().map(|(i, &p)| (i as u32, p)).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    let k = if o.top_k == 0 { all.len() } else { o.top_k.min(all.len()) };
    let mut kept = if o.typical_p < 1.0 { plain_typical(&all, k, o.typical_p) } else { all[..k].to_vec() };
    let mut sum = 0.0;
    let cut = kept.iter().position(|r| {
        sum += f64::from(r.1);
        o.top_p < 1.0 && sum > f64::from(o.top_p)
    });
    kept.truncate(cut.map_or(kept.len(), |i| i + 1));
    let floor = o.min_p * kept[0].1;
    kept.retain(|r| r.1 >= floor);
    let choices = kept.iter().filter(|r| r.1 >= o.xtc.threshold && r.1 > 0.0).count();
    if exclude() && choices > 1 {
        kept.drain(..choices - 1);
    }
    kept
}

/// The whole sampler: one random number for the token, and before it was looked at another for XTC.
fn plain_sample(logits: &[f32], recent: &[u32], o: &SamplerOptions, rng: &mut Rng) -> u32 {
    let mut x = logits.to_vec();
    plain_adjust(&mut x, recent, o);
    if o.temperature == 0.0 {
        return argmax(&x);
    }
    x.iter_mut().for_each(|x| *x /= o.temperature);
    softmax(&mut x, 1.0);
    let uniform = f64::from(rng.next_f32());
    let kept = plain_keep(&x, o, || {
        o.xtc.probability > 0.0 && o.xtc.threshold <= 0.5 && rng.next_f32() < o.xtc.probability
    });
    let mut rest = uniform * kept.iter().map(|r| f64::from(r.1)).sum::<f64>();
    for r in &kept {
        rest -= f64::from(r.1);
        if rest <= 0.0 {
            return r.0;
        }
    }
    kept.iter().rfind(|r| r.1 > 0.0).expect("a token that is possible").0
}

/// Options in which every stage is on in some rounds.
fn some_options(round: usize) -> SamplerOptions {
    let pick = |values: &[f32], every: usize| values[(round / every) % values.len()];
    SamplerOptions {
        temperature: pick(&[0.7, 1.0, 1.5, 0.7, 1.0, 0.0], 1),
        top_k: [0, 40, 5, 0, 300][round % 5],
        typical_p: pick(&[1.0, 0.9, 0.5, 0.2, 0.999], 2),
        top_p: pick(&[1.0, 0.9, 0.5], 3),
        min_p: pick(&[0.0, 0.05], 4),
        repetition_penalty: pick(&[1.0, 1.3], 5),
        repetition_window: [0, 8, 64][round % 3],
        presence_penalty: pick(&[0.0, 0.5, -1.0], 6),
        frequency_penalty: pick(&[0.0, 0.25], 7),
        logit_bias: [vec![], vec![(2, 1.5), (3, f32::NEG_INFINITY), (2, -0.5)]][(round / 8) % 2].clone(),
        dry: DryOptions {
            multiplier: pick(&[0.0, 0.8], 2),
            base: pick(&[1.75, 1.0, 1.1], 3),
            allowed_length: 1 + round % 3,
            window: [None, Some(12), Some(0)][(round / 4) % 3],
            breakers: Vec::new(),
        },
        xtc: XtcOptions {
            probability: pick(&[0.0, 0.5, 1.0], 5),
            threshold: pick(&[0.1, 0.02, 0.0, 0.6], 3),
        },
        #[cfg(feature = "grammar")]
        grammar: None,
        seed: round as u64,
    }
}

#[test]
fn every_stage_does_what_a_plain_loop_does() {
    let mut random = Rng::new(23);
    for round in 0..600 {
        let o = some_options(round);
        let vocab = [7, 40, 300, 1500][round % 4];
        let spread = [1.0, 5.0, 15.0][round % 3];
        let mut sampler = Sampler::new(o.clone(), vocab).expect("valid");
        let mut rng = Rng::new(o.seed);
        let room = (sampler.ranking.best.capacity(), sampler.counts.capacity());
        // Few different tokens, so that sequences are there again.
        let mut recent: Vec<u32> =
            (0..random.next_u64() % 50).map(|_| (random.next_u64() % 3) as u32).collect();
        for _ in 0..4 {
            let logits: Vec<f32> =
                (0..vocab).map(|_| (random.next_f32() * 40.0).floor() / 40.0 * spread).collect();
            let want = plain_sample(&logits, &recent, &o, &mut rng);
            assert_eq!(sampler.sample_token(&mut logits.clone(), &recent), want, "{round} {o:?}");
            assert_eq!(*sampler.rng(), rng, "random numbers taken: {round} {o:?}");
            assert!(sampler.counts.iter().all(|n| *n == 0));
            recent.push(want);
        }
        assert_eq!((sampler.ranking.best.capacity(), sampler.counts.capacity()), room, "allocates nothing");
    }
}

#[test]
fn adjusted_logits_have_the_bits_of_the_plain_loops() {
    let mut random = Rng::new(24);
    for round in 0..300 {
        let o = some_options(round);
        let mut sampler = Sampler::new(o.clone(), 40).expect("valid");
        let recent: Vec<u32> = (0..random.next_u64() % 60).map(|_| (random.next_u64() % 4) as u32).collect();
        let mut logits: Vec<f32> = (0..40).map(|_| random.next_f32() * 20.0 - 10.0).collect();
        let mut want = logits.clone();
        sampler.apply_penalties(&mut logits, &recent);
        plain_adjust(&mut want, &recent, &o);
        assert_eq!(logits, want, "{round} {o:?} {recent:?}");
    }
}

#[test]
fn a_stage_that_is_off_changes_no_logit() {
    let plain = SamplerOptions { seed: 9, ..Default::default() };
    let off = [
        SamplerOptions { typical_p: 1.0, presence_penalty: -0.0, frequency_penalty: 0.0, ..plain.clone() },
        SamplerOptions { xtc: XtcOptions { probability: 0.0, threshold: 0.0 }, ..plain.clone() },
        SamplerOptions { xtc: XtcOptions { probability: 1.0, threshold: 0.6 }, ..plain.clone() },
        SamplerOptions { dry: DryOptions { allowed_length: 1, ..DryOptions::default() }, ..plain.clone() },
        SamplerOptions {
            dry: DryOptions { multiplier: 5.0, window: Some(0), ..DryOptions::default() },
            ..plain.clone()
        },
        SamplerOptions { logit_bias: vec![(4, 0.0)], ..plain.clone() },
    ];
    for o in off {
        let mut random = Rng::new(1);
        let mut reference = Sampler::new(plain.clone(), 300).expect("valid");
        let mut sampler = Sampler::new(o.clone(), 300).expect("valid");
        let mut recent = vec![1, 2, 1, 2];
        for _ in 0..50 {
            let mut logits: Vec<f32> = (0..300).map(|_| random.next_f32() * 9.0).collect();
            let mut same = logits.clone();
            let token = reference.sample_token(&mut logits, &recent);
            assert_eq!(sampler.sample_token(&mut same, &recent), token, "{o:?}");
            assert_eq!(logits, same, "{o:?}");
            recent.push(token);
        }
        assert_eq!(sampler.rng(), reference.rng(), "{o:?}");
        // One number a token.
        let mut rng = Rng::new(9);
        (0..50).for_each(|_| _ = rng.next_f32());
        assert_eq!(*sampler.rng(), rng);
    }
}

#[test]
fn the_same_seed_draws_the_same_tokens() {
    for round in 0..12 {
        let run = |seed: u64| {
            let o = SamplerOptions {
                temperature: 1.0,
                seed,
                xtc: XtcOptions { probability: 0.5, threshold: 0.05 },
                ..some_options(round)
            };
            let mut sampler = Sampler::new(o, 40).expect("valid");
            let mut recent = Vec::new();
            for i in 0..60u32 {
                let mut logits: Vec<f32> = (0..40).map(|id| ((id * 7 + i * 3) % 11) as f32 * 0.3).collect();
                recent.push(sampler.sample_token(&mut logits, &recent));
            }
            recent
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
    }
}

#[test]
fn typical_p_removes_the_most_expected_token() {
    let probs = [0.5, 0.125, 0.125, 0.125, 0.125];
    let entropy = rank::compute_entropy(&probs);
    assert!((entropy - 2.0 * std::f64::consts::LN_2).abs() < 1e-6, "{entropy}");
    let skewed = [0.6, 0.2, 0.1, 0.06, 0.04];
    let o = SamplerOptions { typical_p: 0.25, top_k: 0, top_p: 1.0, ..Default::default() };
    // Entropy 1.16; surprises 0.51, 1.61, 2.30, 2.81, 3.22.
    let mut sampler = Sampler::new(o.clone(), 5).expect("valid");
    assert_eq!(keep(&mut sampler, &skewed), [(0, 0.6), (1, 0.2)]);
    let mut sampler = Sampler::new(SamplerOptions { typical_p: 0.2, ..o.clone() }, 5).expect("valid");
    assert_eq!(keep(&mut sampler, &skewed), [(1, 0.2)]);
    let mut sampler = Sampler::new(SamplerOptions { typical_p: 0.999, ..o.clone() }, 5).expect("valid");
    assert_eq!(keep(&mut sampler, &skewed).len(), 5);
    // Where top-k leaves nothing typical, the nearest there is.
    let mut sampler = Sampler::new(SamplerOptions { typical_p: 0.2, top_k: 1, ..o }, 5).expect("valid");
    assert_eq!(keep(&mut sampler, &skewed), [(0, 0.6)]);
}

#[test]
fn xtc_leaves_the_least_probable_of_the_choices() {
    let best = [(7, 0.4), (2, 0.3), (5, 0.2), (1, 0.1)];
    let excluded = |threshold: f32| rank::count_xtc_excluded(&best, threshold);
    assert_eq!(
        [excluded(0.5), excluded(0.35), excluded(0.3), excluded(0.15), excluded(0.0)],
        [0, 0, 1, 2, 3]
    );
    assert_eq!(rank::count_xtc_excluded(&[], 0.1), 0);
}

#[test]
fn tokens_that_are_ruled_out_are_never_drawn() {
    let ruled_out: Vec<(u32, f32)> = (1..40).map(|id| (id, f32::NEG_INFINITY)).collect();
    for temperature in [0.0, 1.0] {
        let logit_bias = ruled_out.clone();
        let o = SamplerOptions { temperature, logit_bias, top_k: 0, top_p: 1.0, ..Default::default() };
        let mut sampler = Sampler::new(o, 40).expect("valid");
        for round in 0..200 {
            let mut logits: Vec<f32> = (0..40).map(|id| ((id + round) % 40) as f32).collect();
            assert_eq!(sampler.sample_token(&mut logits, &[0, 0, 3]), 0);
        }
    }
}

#[test]
fn bad_options_of_the_other_stages_name_the_flag_too() {
    let good = SamplerOptions::default();
    let dry = |dry: DryOptions| SamplerOptions { dry, ..SamplerOptions::default() };
    let xtc = |probability: f32, threshold: f32| SamplerOptions {
        xtc: XtcOptions { probability, threshold },
        ..SamplerOptions::default()
    };
    let on = DryOptions::default;
    let mut cases = vec![
        ("`SamplerOptions::typical_p` 0", SamplerOptions { typical_p: 0.0, ..good.clone() }),
        ("`SamplerOptions::typical_p` 1.5", SamplerOptions { typical_p: 1.5, ..good.clone() }),
        (
            "`SamplerOptions::logit_bias` 40",
            SamplerOptions { logit_bias: vec![(39, 1.0), (40, 1.0)], ..good.clone() },
        ),
        (
            "`SamplerOptions::logit_bias`",
            SamplerOptions { logit_bias: vec![(3, f32::INFINITY)], ..good.clone() },
        ),
        ("`DryOptions::base` 0.5", dry(DryOptions { base: 0.5, ..on() })),
        ("`DryOptions::allowed_length` 0", dry(DryOptions { allowed_length: 0, ..on() })),
        (
            "`DryOptions::breakers` \"\"",
            dry(DryOptions { breakers: vec!["a".into(), String::new()], ..on() }),
        ),
        ("`XtcOptions::probability` 2", xtc(2.0, 0.1)),
        ("`XtcOptions::threshold` -1", xtc(0.5, -1.0)),
    ];
    for x in [f32::NAN, f32::INFINITY] {
        cases.extend([
            ("`SamplerOptions::typical_p`", SamplerOptions { typical_p: x, ..good.clone() }),
            ("`SamplerOptions::presence_penalty`", SamplerOptions { presence_penalty: x, ..good.clone() }),
            ("`SamplerOptions::frequency_penalty`", SamplerOptions { frequency_penalty: x, ..good.clone() }),
            ("`SamplerOptions::logit_bias`", SamplerOptions { logit_bias: vec![(3, x)], ..good.clone() }),
            ("`DryOptions::multiplier`", dry(DryOptions { multiplier: x, ..on() })),
            ("`DryOptions::base`", dry(DryOptions { base: x, ..on() })),
            ("`XtcOptions::probability`", xtc(x, 0.1)),
            ("`XtcOptions::threshold`", xtc(0.5, x)),
        ]);
    }
    for (flag, o) in cases {
        let Err(Error::Usage(message)) = Sampler::new(o.clone(), 40).map(|_| ()) else {
            panic!("{o:?} was accepted")
        };
        assert!(message.starts_with(flag) && message.contains("use "), "{message}");
    }
}
