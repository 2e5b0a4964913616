//! Drafts change no token: greedy or drawn, with penalties, over stop strings, beside eviction.

use crate::support::paths;
use antigravity::model::trace::fnv1a_digest;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::session::{DraftCounts, StopReason};
use antigravity::{Engine, EngineOptions, GenerateOptions, dims};
use text::sampler::{DryOptions, SamplerOptions, XtcOptions};

const PROMPT: &str =
    "The cat sat on the mat. The dog sat on the mat. The bird sat on the mat. The cat sat on";

struct Run {
    ids: Vec<u32>,
    text: String,
    stop: Option<StopReason>,
    logits: u64,
    drafts: Option<DraftCounts>,
}

fn run(engine: &Engine, o: &EngineOptions, options: &GenerateOptions) -> Run {
    let mut session = engine.session_with(o).unwrap();
    let prompt = engine.encode(PROMPT).unwrap();
    let mut stream = engine.stream(&mut session, &prompt, options).unwrap();
    let (mut ids, mut text) = (Vec::new(), String::new());
    while let Some(piece) = stream.next() {
        text += &piece.unwrap();
        ids.extend(stream.last_token());
    }
    let stop = stream.stop_reason();
    drop(stream);
    assert_eq!(session.slots(), session.extent().len, "something is ahead still");
    Run { ids, text, stop, logits: fnv1a_digest(session.logits()), drafts: session.drafts() }
}

fn samplers() -> Vec<SamplerOptions> {
    let plain = SamplerOptions { repetition_penalty: 1.0, ..Default::default() };
    let mut all = vec![
        SamplerOptions { temperature: 0.0, ..plain.clone() },
        SamplerOptions { temperature: 0.0, repetition_penalty: 1.1, repetition_window: 8, ..plain.clone() },
    ];
    for seed in 1..4 {
        all.push(SamplerOptions { seed, temperature: 0.6, ..plain.clone() });
        all.push(SamplerOptions { seed, repetition_penalty: 1.1, repetition_window: 6, ..plain.clone() });
        // Of a few tokens only, so that much stood there before.
        let few = (20..24).map(|id| (id, 1000.0)).collect();
        all.push(SamplerOptions { seed, temperature: 0.5, logit_bias: few, ..plain.clone() });
        all.push(SamplerOptions {
            seed,
            temperature: 0.7,
            frequency_penalty: 0.2,
            presence_penalty: 0.1,
            dry: DryOptions { multiplier: 0.2, ..DryOptions::default() },
            xtc: XtcOptions { probability: 0.2, threshold: 0.2 },
            ..plain.clone()
        });
    }
    all
}

#[test]
fn drafts_change_no_token_whoever_chooses_them() {
    let base = EngineOptions { threads: 2, max_seq_len: 160, ..EngineOptions::new(paths::model()) };
    let engine = Engine::load(base.clone()).unwrap();
    let sliding = Eviction { policy: Policy::Sliding, window: 60, prefix: Some(4), memory_threshold: 0 };
    let mut accepted = 0;
    for eviction in [Eviction::NEVER, sliding] {
        for (i, sampler) in samplers().into_iter().enumerate() {
            for stop in [vec![], vec![" on the".to_string(), "mat. The d".into()]] {
                let o = EngineOptions { eviction, ..base.clone() };
                let options = GenerateOptions {
                    max_tokens: if stop.is_empty() { None } else { Some(100) },
                    ignore_eos: !stop.is_empty() || eviction.policy == Policy::None,
                    sampler: sampler.clone(),
                    stop,
                    ..Default::default()
                };
                // Without an end in sight, where slots are evicted.
                let options = GenerateOptions { max_tokens: options.max_tokens.or(Some(200)), ..options };
                let plain = run(&engine, &o, &options);
                assert_eq!(plain.drafts, None);
                for draft in [1, 5, 24] {
                    let drafted = run(&engine, &EngineOptions { draft, ..o.clone() }, &options);
                    let at = format!("sampler {i}, drafts of {draft}, stop {:?}", options.stop);
                    assert_eq!(plain.ids, drafted.ids, "{at}");
                    assert_eq!((&plain.text, plain.stop), (&drafted.text, drafted.stop), "{at}");
                    assert_eq!(plain.logits, drafted.logits, "{at}");
                    accepted += drafted.drafts.unwrap().accepted;
                }
            }
        }
    }
    assert!(accepted > 100, "{accepted} of the tokens were drafted");
}

/// A policy that looks at attention, and none to draft from.
#[test]
fn drafts_are_off_where_they_would_be_seen() {
    let base = EngineOptions { threads: 1, draft: 4, ..EngineOptions::new(paths::model()) };
    let engine = Engine::load(base.clone()).unwrap();
    for policy in [Policy::SnapKv, Policy::H2o] {
        let eviction = Eviction { policy, window: 64, prefix: Some(0), memory_threshold: 0 };
        let session = engine.session_with(&EngineOptions { eviction, ..base.clone() }).unwrap();
        assert_eq!(session.drafts(), None);
    }
    let mut session = engine.session().unwrap();
    let ids: Vec<u32> = (0..30).map(|i| i * 7 % dims::VOCAB as u32).collect();
    session.prefill(&ids, &Default::default()).unwrap();
    session.decode(5).unwrap();
    assert_eq!(session.drafts(), Some(DraftCounts::default()));
}
