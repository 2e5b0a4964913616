//! Eviction with the real model: positions keep counting, memory stays bounded, the text continues, devices and chunks
//! agree.

pub mod reference;

use crate::support::paths;
use crate::support::process::run_alone;
use antigravity::model::weights::WeightType;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::session::{CancelToken, Session, SessionEvent};
use antigravity::{Engine, EngineOptions, dims};
use files::mapped::page_size;
use numeric::kv::{KvType, KvTypes};
use reference::Reference;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use text::sampler::{Sampler, SamplerOptions};

const POLICIES: [Policy; 3] = [Policy::Sliding, Policy::SnapKv, Policy::H2o];

fn options(policy: Policy, slots: usize, window: usize) -> EngineOptions {
    EngineOptions {
        threads: 2,
        max_seq_len: slots,
        eviction: Eviction { policy, window, prefix: Some(4), memory_threshold: 0 },
        ..EngineOptions::new(paths::model())
    }
}

/// Token ids of text that the model knows.
fn story(engine: &Engine, n: usize) -> Vec<u32> {
    let text =
        "Once upon a time, there was a little girl named Mia who lived in a small house near the forest. ";
    let mut ids = engine.encode(&text.repeat(n / 20 + 1)).unwrap();
    ids.truncate(n);
    ids
}

#[test]
fn positions_keep_counting_after_an_eviction() {
    let (slots, all) = (48, 150);
    let mut o = options(Policy::Sliding, slots, slots);
    (o.weight_type, o.kv_types) = (WeightType::F32, KvTypes::same(KvType::F32));
    let engine = Engine::load(o).unwrap();
    let ids = story(&engine, all);
    let mut session = engine.session().unwrap();
    session.prefill(&ids[..20], &CancelToken::default()).unwrap();
    let model = Reference::load(&paths::model().join("model.safetensors"));
    // What each token sees: the first four, and the last ones that an eighth of the slots leaves.
    let mut held: Vec<usize> = Vec::new();
    let mut visible = Vec::new();
    for t in 0..all {
        if held.len() == slots {
            held.drain(4..4 + slots / 8);
        }
        held.push(t);
        visible.push(held.clone());
    }
    ids[20..].iter().for_each(|&id| session.decode(id).unwrap());
    assert_eq!((session.position(), session.slots()), (all, held.len()));
    let expected = model.logits(&ids, &visible);
    let far = |other: &[f64]| {
        let square = |x: f64| x * x;
        let diff: f64 = other.iter().zip(session.logits()).map(|(&e, &f)| square(e - f64::from(f))).sum();
        (diff / other.iter().map(|&e| square(e)).sum::<f64>()).sqrt()
    };
    assert!(far(&expected) < 1e-4, "relative distance {:.1e}", far(&expected));
    // Positions that began anew at an eviction, or slots that were not evicted, would be found out.
    let everything: Vec<Vec<usize>> = (0..all).map(|t| (0..=t).collect()).collect();
    assert!(far(&model.logits(&ids, &everything)) > 1e-2);
}

/// Result of a generation in a session.
struct Run {
    tokens: Vec<u32>,
    most_slots: usize,
    evictions: usize,
    /// Resident bytes in the middle and at the end.
    resident: [usize; 2],
}

/// Bytes of memory of its own: pages of mapped files, which come as they are first read, can go at any time.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Vec<usize> = statm.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    pages.get(1..3).map_or(0, |pages| (pages[0] - pages[1]) * page_size())
}

fn generate(engine: &Engine, n: usize) -> Run {
    let mut session = engine.session().unwrap();
    let evictions = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&evictions);
    session.set_observer(Box::new(move |e| {
        assert!(matches!(e, SessionEvent::Evicted(_)));
        count.fetch_add(1, Ordering::Relaxed);
    }));
    let mut sampler =
        Sampler::new(SamplerOptions { seed: 7, ..SamplerOptions::default() }, dims::VOCAB).unwrap();
    let mut logits = vec![0.0; dims::VOCAB];
    session.prefill(&story(engine, 30), &CancelToken::default()).unwrap();
    let (mut most_slots, mut middle) = (0, 0);
    for i in 0..n {
        logits.copy_from_slice(session.logits());
        // After the end of a text begins another.
        let ended = session.tokens().last().is_some_and(|last| engine.tokenizer().eos_ids().contains(last));
        let sampled = sampler.sample_token(&mut logits, session.tokens());
        let token = engine.tokenizer().bos_id().filter(|_| ended).unwrap_or(sampled);
        session.decode(token).unwrap();
        most_slots = most_slots.max(session.slots());
        if i == n / 2 {
            middle = resident();
        }
    }
    let tokens = session.tokens().to_vec();
    let evictions = evictions.load(Ordering::Relaxed);
    Run { tokens, most_slots, evictions, resident: [middle, resident()] }
}

/// Perplexity of the last tokens of a text, by the same model without eviction.
fn perplexity(engine: &Engine, tokens: &[u32]) -> f64 {
    let mut session = engine
        .session_with(&EngineOptions { eviction: Eviction::NEVER, ..engine.options().clone() })
        .unwrap();
    let mut sum = 0.0;
    session
        .logits_of_all(tokens, |i, row| {
            let Some(&next) = tokens.get(i + 1) else { return };
            let most = row.iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = row.iter().map(|&x| f64::from(x - most).exp()).sum();
            sum += total.ln() - f64::from(row[next as usize] - most);
        })
        .unwrap();
    (sum / (tokens.len() - 1) as f64).exp()
}

#[test]
fn six_thousand_tokens_fit_a_thousand_slots() {
    run_alone("eviction::six_thousand_tokens_fit_a_thousand_slots", generate_far_beyond_the_slots);
}

fn generate_far_beyond_the_slots() {
    for policy in POLICIES {
        let mut o = options(policy, 1024, 1024);
        // The first tokens would be further away at the end than the model ever looked.
        o.eviction.prefix = Some(0);
        let engine = Engine::load(o).unwrap();
        let run = generate(&engine, 6000);
        assert_eq!(run.tokens.len(), 6030);
        assert!(run.most_slots <= 1024 && run.evictions >= 30, "{policy:?}: {} evictions", run.evictions);
        let grown = run.resident[1].saturating_sub(run.resident[0]);
        assert!(grown < 1 << 20, "{policy:?}: {grown} bytes more at the end than in the middle");
        // The end is still text to the model, to which words in any order are worth some thousands, and no loop. To
        // write far beyond the 2,048 tokens that this model was trained on costs something with any policy.
        let (first, last) =
            (perplexity(&engine, &run.tokens[..600]), perplexity(&engine, &run.tokens[5430..]));
        eprintln!("{policy:?}: perplexity {first:.2} at first, {last:.2} at the end");
        assert!(last < 20.0, "{policy:?}: perplexity {first:.2} at first, {last:.2} at the end");
        let fours: std::collections::HashSet<_> = run.tokens[5030..].windows(4).collect();
        assert!(fours.len() > 600, "{policy:?}: {} different runs of four among a thousand", fours.len());
    }
}

/// Rows of full-attention layers, and logits, after a prompt and some tokens.
fn state(engine: &Engine, o: &EngineOptions, ids: &[u32], prompt: usize) -> (Vec<u8>, Vec<f32>) {
    let mut session: Session = engine.session_with(o).unwrap();
    session.prefill(&ids[..prompt], &CancelToken::default()).unwrap();
    ids[prompt..].iter().for_each(|&id| session.decode(id).unwrap());
    let (mut rows, mut all) = (Default::default(), Vec::new());
    for layer in dims::full_attention_layers() {
        session.read_rows(layer, &mut rows).unwrap();
        all.extend_from_slice(&rows.k);
        all.extend_from_slice(&rows.v);
    }
    (all, session.logits().to_vec())
}

#[test]
fn what_is_evicted_does_not_depend_on_threads_or_chunks() {
    for (policy, kv) in POLICIES.into_iter().flat_map(|p| KvType::ALL.map(|kv| (p, kv))) {
        let o = EngineOptions { kv_types: KvTypes::same(kv), ..options(policy, 160, 96) };
        let engine = Engine::load(o.clone()).unwrap();
        let ids = story(&engine, 400);
        let first = state(&engine, &o, &ids, 250);
        for (threads, prefill_chunk) in [(1, 7), (3, 64)] {
            let other = state(&engine, &EngineOptions { threads, prefill_chunk, ..o.clone() }, &ids, 250);
            assert!(
                other == first,
                "{policy:?}, {}: {threads} threads, chunks of {prefill_chunk}",
                kv.name()
            );
        }
    }
}

#[test]
fn eviction_events_report_the_slots_and_policy() {
    let engine = Engine::load(options(Policy::Sliding, 160, 96)).unwrap();
    let mut session = engine.session().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    session.set_observer(Box::new(move |e| kept.lock().unwrap().push(e.clone())));
    session.prefill(&story(&engine, 150), &CancelToken::default()).unwrap();
    let SessionEvent::Evicted(e) = seen.lock().unwrap()[0].clone() else { panic!("nothing moved") };
    assert_eq!((e.removed, e.slots, e.position, e.why.name()), (54, 96, 150, "window reached"));
}
