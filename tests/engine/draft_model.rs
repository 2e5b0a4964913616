//! Drafts of another program: the same tokens with every sampler, alone and together, whatever that program says.

use crate::golden;
use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::model::trace::fnv1a_digest;
use antigravity::run::draft_model::{DraftModel, DraftWhen};
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::session::{DraftCounts, Notice};
use antigravity::{BatchItem, Engine, EngineOptions, Error, GenerateOptions};
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use text::sampler::{DryOptions, SamplerOptions, XtcOptions};

const PROMPTS: [&str; 6] = [
    "Once upon a time",
    "Tim had a red ball.",
    "Lily and Ben went to the park",
    "One day, a little dog",
    "The rain fell all night.",
    "There was a boy named Sam",
];

fn base() -> EngineOptions {
    EngineOptions { threads: 2, max_seq_len: 400, ..EngineOptions::new(paths::model()) }
}

/// With drafts of up to `draft` tokens by a program in every pass, and what it is said to the user.
fn with(program: PathBuf, draft: usize, base: EngineOptions) -> (EngineOptions, Arc<Mutex<Vec<String>>>) {
    let said = Arc::new(Mutex::new(Vec::new()));
    let lines = Arc::clone(&said);
    let notice = Notice::new(move |line| lines.lock().unwrap().push(line.into()));
    let (draft_model, draft_when) = (Some(program), DraftWhen::Always);
    (EngineOptions { draft, draft_model, draft_when, notice, ..base }, said)
}

/// An engine whose program has said what it is, or is left out.
fn loaded(o: EngineOptions) -> Engine {
    let engine = Engine::load(o).unwrap();
    settle(&engine, |model| model.draft_length(1) > 0);
    engine
}

/// Waits until the program does something, or is left out.
fn settle(engine: &Engine, does: impl Fn(&DraftModel) -> bool) {
    let (model, began) = (engine.draft_model().unwrap(), Instant::now());
    while !does(model) && model.process_id().is_some() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[derive(Debug, PartialEq)]
struct Told {
    ids: Vec<u32>,
    text: String,
    logits: u64,
}

fn tell(engine: &Engine, prompt: &str, options: &GenerateOptions) -> (Told, Option<DraftCounts>) {
    let mut session = engine.session().unwrap();
    let prompt = engine.encode(prompt).unwrap();
    let mut stream = engine.stream(&mut session, &prompt, options).unwrap();
    let (mut ids, mut text) = (Vec::new(), String::new());
    while let Some(piece) = stream.next() {
        text += &piece.unwrap();
        ids.extend(stream.last_token());
    }
    drop(stream);
    (Told { ids, text, logits: fnv1a_digest(session.logits()) }, session.drafts())
}

fn options(sampler: SamplerOptions, tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens: Some(tokens), sampler, ..Default::default() }
}

fn greedy() -> SamplerOptions {
    SamplerOptions { temperature: 0.0, ..Default::default() }
}

fn samplers() -> Vec<SamplerOptions> {
    let drawn = |seed| SamplerOptions { seed, ..Default::default() };
    vec![
        SamplerOptions { repetition_penalty: 1.0, ..greedy() },
        greedy(),
        drawn(1),
        SamplerOptions { temperature: 1.3, top_k: 0, top_p: 1.0, ..drawn(2) },
        SamplerOptions {
            typical_p: 0.9,
            min_p: 0.02,
            frequency_penalty: 0.2,
            dry: DryOptions { multiplier: 0.3, ..Default::default() },
            xtc: XtcOptions { probability: 0.4, threshold: 0.1 },
            logit_bias: vec![(7, f32::NEG_INFINITY), (300, 1.5)],
            ..drawn(3)
        },
    ]
}

#[test]
fn a_model_that_drafts_changes_no_token() {
    let Some(program) = paths::draft_program() else { return };
    let sliding = Eviction { policy: Policy::Sliding, window: 60, prefix: Some(4), memory_threshold: 0 };
    for (eviction, tokens) in [(Eviction::NEVER, 80), (sliding, 160)] {
        let plain = Engine::load(EngineOptions { eviction, max_seq_len: 96, ..base() }).unwrap();
        for draft in [1, 9] {
            let (o, said) = with(program.clone(), draft, plain.options().clone());
            let drafting = loaded(o);
            let mut accepted = 0;
            for (i, sampler) in samplers().into_iter().enumerate() {
                let stop = vec!["zzz".to_string(), " the end".into()];
                let ignore_eos = eviction.policy != Policy::None;
                let options = GenerateOptions { stop, ignore_eos, ..options(sampler, tokens) };
                let (expected, none) = tell(&plain, PROMPTS[i], &options);
                let (found, drafts) = tell(&drafting, PROMPTS[i], &options);
                assert_eq!(found, expected, "sampler {i}, drafts of {draft}, {:?}", eviction.policy);
                assert!(none.is_none());
                accepted += drafts.unwrap().model_accepted;
            }
            assert!(accepted > 50, "{accepted}");
            assert_eq!(*said.lock().unwrap(), Vec::<String>::new());
        }
    }
}

/// Checks that repeated text is guessed from the text, and all else by the model.
#[test]
fn drafts_come_from_repeated_text_or_else_from_the_model() {
    let Some(program) = paths::draft_program() else { return };
    let plain = Engine::load(base()).unwrap();
    // One word again and again: until it has stood there eight times, only the model can know.
    let word = *plain.encode(" the").unwrap().last().unwrap();
    let sampler = SamplerOptions { logit_bias: vec![(word, 1e6)], repetition_penalty: 1.0, ..greedy() };
    let options = options(sampler, 60);
    let (expected, _) = tell(&plain, "Once upon", &options);
    let (o, _) = with(program, 3, base());
    let (found, drafts) = tell(&loaded(o), "Once upon", &options);
    assert_eq!(found, expected);
    let drafts = drafts.unwrap();
    assert!(0 < drafts.model_drafted && drafts.model_drafted < drafts.drafted, "{drafts:?}");
}

#[test]
fn golden_texts_are_drafted_to_the_same_bits() {
    let Some(program) = paths::draft_program() else { return };
    for (file, case) in golden::cases() {
        let (o, _) = with(program.clone(), 8, EngineOptions { threads: 2, ..golden::options_of(&case) });
        let (found, expected) = (golden::run_on(&loaded(o), &case), &case["expected"]);
        let found =
            json!({"prompt": found.prompt, "ids": found.ids, "text": found.text, "digest": found.digest});
        assert_eq!(found, *expected, "{}", file.display());
    }
}

/// Checks the acceptance and tokens a pass that models/story-draft/README.md promises.
#[test]
fn drafts_of_stories_are_accepted_as_often_as_promised() {
    let Some(program) = paths::draft_program() else { return };
    let (o, _) = with(program, 8, base());
    let engine = loaded(o);
    let drawn = SamplerOptions { seed: 5, ..Default::default() };
    let plain = SamplerOptions { repetition_penalty: 1.0, ..greedy() };
    for (what, sampler) in [("greedy", plain), ("greedy with a penalty", greedy()), ("drawn", drawn)] {
        let (mut tokens, mut drafted, mut accepted) = (0, 0, 0);
        for prompt in PROMPTS {
            let (told, drafts) = tell(&engine, prompt, &options(sampler.clone(), 300));
            let drafts = drafts.unwrap();
            tokens += told.ids.len();
            drafted += drafts.drafted;
            accepted += drafts.accepted;
        }
        // Every token that was not accepted took a pass.
        let (share, a_pass) =
            (100.0 * accepted as f64 / drafted as f64, tokens as f64 / (tokens - accepted) as f64);
        println!("{what}: {share:.1} % of {drafted} drafted tokens, {a_pass:.2} tokens a pass");
        assert!(share >= 75.0 && a_pass >= 2.5, "{what}: {share:.1} %, {a_pass:.2} tokens a pass");
    }
}

#[test]
fn prompts_together_are_drafted_and_each_is_as_alone() {
    let items: Vec<BatchItem> = PROMPTS
        .iter()
        .enumerate()
        .map(|(i, prompt)| {
            let sampler = samplers().swap_remove(i % 5);
            let stop = if i == 2 { vec![".".into()] } else { vec![] };
            let options = GenerateOptions { stop, ..options(sampler, 20 + 17 * i) };
            BatchItem { prompt: prompt.to_string(), options }
        })
        .collect();
    let answers = |o: EngineOptions| {
        let engine = if o.draft_model.is_some() { loaded(o) } else { Engine::load(o).unwrap() };
        let mut batch = engine.generate_batch(&items).unwrap();
        let mut answers: Vec<_> = batch.by_ref().map(Result::unwrap).collect();
        answers.sort_by_key(|a| a.index);
        (answers, batch.drafts())
    };
    let (expected, none) = answers(base());
    assert!(none.is_none());
    for batch in [2, 3, 6] {
        let base = EngineOptions { batch, prefill_chunk: 30, ..base() };
        let (found, drafts) = answers(EngineOptions { draft: 5, ..base.clone() });
        assert!(found == expected && drafts.is_some(), "{batch} together, from the text");
        let Some(program) = paths::draft_program() else { continue };
        let (o, said) = with(program, 5, base);
        let (found, drafts) = answers(o);
        assert_eq!(found, expected, "{batch} together");
        assert!(drafts.unwrap().model_accepted > 50, "{drafts:?}");
        assert_eq!(*said.lock().unwrap(), Vec::<String>::new());
    }
}

#[test]
fn a_draft_that_is_killed_in_a_text_costs_no_token() {
    let Some(program) = paths::draft_program() else { return };
    let options = options(SamplerOptions { seed: 4, ..Default::default() }, 120);
    let (expected, _) = tell(&Engine::load(base()).unwrap(), PROMPTS[0], &options);
    let (o, said) = with(program, 4, base());
    let engine = loaded(o);
    let stream = engine.generate_stream(PROMPTS[0], &options).unwrap();
    let mut text = String::new();
    for (token, piece) in stream.enumerate() {
        text += &piece.unwrap();
        if token == 40 {
            let process = engine.draft_model().unwrap().process_id().expect("it runs");
            assert!(Command::new("kill").args(["-9", &process.to_string()]).status().unwrap().success());
        }
    }
    assert_eq!(text, expected.text);
    let said = said.lock().unwrap();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("has ended (signal: 9") && said[0].ends_with("; continuing without it"),
        "{said:?}"
    );
    assert!(engine.draft_model().unwrap().process_id().is_none());
}

#[test]
fn a_program_that_lies_is_left_out_after_one_line() {
    let temp = TestDir::new();
    let plain = Engine::load(base()).unwrap();
    let options = options(SamplerOptions { seed: 6, ..Default::default() }, 24);
    let (expected, _) = tell(&plain, PROMPTS[1], &options);
    let digest = plain.tokenizer().pieces().compute_checksum();
    let greets = |version: u32, tokenizer: u32, sequences: usize| {
        let hello = json!({"antigravity_draft": version, "tokenizer": tokenizer, "sequences": sequences});
        format!("echo '{hello}'")
    };
    let hello = greets(1, digest, 1);
    let answers = |answer: &str| format!("{hello}\nwhile read line; do echo '{answer}'; done");
    let many = format!("{{\"id\":1,\"tokens\":{:?}}}", vec![5; 9]);
    let long = format!("{hello}\nread line\nwhile :; do printf aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done");
    for (i, (body, words)) in [
        ("exit 3".to_string(), "has ended (exit status: 3)"),
        ("echo Hello".into(), "sends no valid handshake"),
        (greets(2, digest, 1), "uses version 2 of the draft protocol, not 1"),
        (greets(1, digest ^ 1, 1), "has another tokenizer"),
        (greets(1, digest, 2), "keeps 2 texts, not 1"),
        (hello.clone(), "has ended"),
        (answers("\x1b[2J"), "says what is not a message"),
        (answers("{\"id\":99,\"tokens\":[]}"), "answers a request that was not made"),
        (answers("{\"id\":1,\"tokens\":[99999999]}"), "drafts token 99999999; the vocabulary ends at "),
        (answers("{\"id\":1,\"tokens\":[-1]}"), "says what is not a message"),
        (answers(&many), "drafts 9 tokens where 8 were asked for"),
        (long, "a line of more than 4096 bytes"),
    ]
    .iter()
    .enumerate()
    {
        let (o, said) = with(temp.script(&format!("liar{i}"), body), 8, base());
        let engine = loaded(o);
        let (found, drafts) = tell(&engine, PROMPTS[1], &options);
        assert_eq!(found, expected, "{words}");
        settle(&engine, |model| model.draft_length(0) > 0);
        assert_eq!(drafts.unwrap().model_drafted, 0, "{words}");
        let said = said.lock().unwrap();
        assert_eq!(said.len(), 1, "{words}: {said:?}");
        assert!(said[0].contains(words) && said[0].ends_with("; continuing without it"), "{said:?}");
        assert!(!said[0].contains(char::is_control), "{said:?}");
    }
    let (o, _) = with(temp.file("none"), 8, base());
    let Err(Error::Usage(line)) = Engine::load(o) else { panic!("there is no such program") };
    assert!(line.contains("`EngineOptions::draft_model`") && line.contains("cannot be started"), "{line}");
}

#[test]
fn a_program_that_hangs_costs_a_moment() {
    let temp = TestDir::new();
    let plain = Engine::load(base()).unwrap();
    let options = options(greedy(), 60);
    let (expected, _) = tell(&plain, PROMPTS[2], &options);
    let digest = plain.tokenizer().pieces().compute_checksum();
    let hello = json!({"antigravity_draft": 1, "tokenizer": digest, "sequences": 1});
    for body in ["exec sleep 60".to_string(), format!("echo '{hello}'\nexec sleep 60")] {
        let (o, said) = with(temp.script("sleeper", &body), 8, base());
        let engine = Engine::load(o).unwrap();
        let began = Instant::now();
        let (found, _) = tell(&engine, PROMPTS[2], &options);
        let took = began.elapsed();
        assert_eq!(found, expected);
        assert!(took < Duration::from_secs(12), "{took:?}");
        assert_eq!(*said.lock().unwrap(), Vec::<String>::new());
        // It ends with the engine.
        let process = engine.draft_model().unwrap().process_id().expect("it may come round");
        drop(engine);
        let alive = Command::new("kill").args(["-0", &process.to_string()]).output().unwrap();
        assert!(!alive.status.success());
    }
}

/// Wrong guesses and late answers are no lies.
#[test]
fn a_program_that_guesses_wrong_changes_no_token() {
    let temp = TestDir::new();
    let plain = Engine::load(base()).unwrap();
    let digest = plain.tokenizer().pieces().compute_checksum();
    let hello = json!({"antigravity_draft": 1, "tokenizer": digest, "sequences": 1});
    let body = format!(
        "echo '{hello}'\nn=0\nwhile read line; do n=$((n+1)); [ $n = 3 ] && sleep 1; \
         echo \"{{\\\"id\\\":$n,\\\"tokens\\\":[5,6,7]}}\"; done"
    );
    let (o, said) = with(temp.script("guesser", &body), 8, base());
    let engine = loaded(o);
    let mut drafted = 0;
    for sampler in samplers() {
        let options = options(sampler, 40);
        settle(&engine, |model| model.draft_length(1) > 0);
        let (found, drafts) = tell(&engine, PROMPTS[3], &options);
        assert_eq!(found, tell(&plain, PROMPTS[3], &options).0);
        drafted += drafts.unwrap().model_drafted;
    }
    assert!(drafted > 100, "{drafted}");
    assert_eq!(*said.lock().unwrap(), Vec::<String>::new());
}

/// Checks that several texts hardly wait for a draft that takes far longer than the tokens that it might save.
#[test]
fn a_slow_program_holds_three_texts_up_only_a_little() {
    let temp = TestDir::new();
    let items: Vec<BatchItem> = PROMPTS[..3]
        .iter()
        .map(|prompt| BatchItem { prompt: prompt.to_string(), options: options(greedy(), 80) })
        .collect();
    let base = EngineOptions { batch: 3, ..base() };
    let texts = |engine: &Engine| {
        let began = Instant::now();
        let mut all: Vec<_> = engine.generate_batch(&items).unwrap().map(Result::unwrap).collect();
        all.sort_by_key(|a| a.index);
        (all, began.elapsed())
    };
    let plain = Engine::load(base.clone()).unwrap();
    let (expected, quiet) = texts(&plain);
    let hello = json!({"antigravity_draft": 1, "tokenizer": plain.tokenizer().pieces().compute_checksum(), "sequences": 3});
    let body = format!(
        "echo '{hello}'\nn=0\nwhile read line; do n=$((n+1)); sleep 0.45; \
         echo \"{{\\\"id\\\":$n,\\\"tokens\\\":[5,6,7]}}\"; done"
    );
    let (mut o, said) = with(temp.script("slow", &body), 8, base);
    o.draft_when = DraftWhen::Pays;
    let engine = Engine::load(o).unwrap();
    let (found, took) = texts(&engine);
    assert_eq!(found, expected);
    assert!(took < 4 * quiet + Duration::from_secs(6), "{took:?}, and {quiet:?} without");
    assert_eq!(*said.lock().unwrap(), Vec::<String>::new());
}

/// More sequences than the program has caches for, in turn.
#[test]
fn sequences_take_turns_in_the_caches_of_the_program() {
    let Some(program) = paths::draft_program() else { return };
    let (o, said) = with(program, 4, base());
    let (drafting, plain) = (loaded(o), Engine::load(base()).unwrap());
    let each = |engine: &Engine| {
        let options: Vec<_> =
            (0..3).map(|seed| options(SamplerOptions { seed, ..Default::default() }, 30)).collect();
        let mut streams: Vec<_> =
            PROMPTS.iter().zip(&options).map(|(p, o)| engine.generate_stream(p, o).unwrap()).collect();
        let mut texts = vec![String::new(); streams.len()];
        for _ in 0..31 {
            for (stream, text) in streams.iter_mut().zip(&mut texts) {
                text.extend(stream.next().map(Result::unwrap));
            }
        }
        texts
    };
    assert_eq!(each(&drafting), each(&plain));
    assert_eq!(*said.lock().unwrap(), Vec::<String>::new());
}
