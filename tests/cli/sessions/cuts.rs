//! A text that is saved and loaded at any token is the text that was never cut.

use super::engine;
use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::model::trace::fnv1a_digest;
use antigravity::run::generate::stream::ResumePoint;
use antigravity::run::saved::{self, SavedContent, SavedState};
use antigravity::run::session::StopReason;
use antigravity::{Engine, EngineOptions, GenerateOptions, Progress};
use numeric::kv::{KvType, KvTypes};
use std::path::Path;
use text::sampler::SamplerOptions;

const PROMPT: &str = "Once upon a time";
const TOKENS: usize = 40;

#[derive(Debug, Default, PartialEq)]
struct Run {
    ids: Vec<u32>,
    text: String,
    logits: u64,
    reason: Option<StopReason>,
}

/// Nearly random tokens: many are parts of characters.
fn options(stop: &[String]) -> GenerateOptions {
    let wild =
        SamplerOptions { temperature: 8.0, top_k: 0, top_p: 1.0, seed: 12, ..SamplerOptions::default() };
    GenerateOptions { sampler: wild, stop: stop.into(), ignore_eos: true, ..GenerateOptions::default() }
}

/// `n` tokens more of the session in `file`, which begins if there is none.
fn go_on(engine: &Engine, file: &Path, n: usize, options: &GenerateOptions) -> (Run, ResumePoint) {
    let mut session = engine.session().unwrap();
    let (mut rng, mut pause) = (None, ResumePoint::default());
    let mut tokens = engine.encode(PROMPT).unwrap();
    if let Some(state) = saved::load_session(file, &mut session, engine).unwrap() {
        rng = Some(state.rng);
        let SavedContent::Text(text) = state.content else { panic!("a conversation") };
        tokens = [session.tokens(), &text.tokens].concat();
        pause = text;
    }
    let options = GenerateOptions { max_tokens: Some(n), ..options.clone() };
    let stream = engine.stream(&mut session, &tokens, &options).unwrap();
    let mut stream = stream.resume_from(pause.unshown.as_ref());
    if let Some(rng) = rng {
        stream.sampler_mut().set_rng(rng);
    }
    let mut run = Run::default();
    while let Some(piece) = stream.next() {
        run.text += &piece.unwrap();
        run.ids.extend(stream.last_token());
    }
    run.reason = stream.stop_reason();
    let (pause, rng) = (stream.resume_point(), stream.sampler_mut().rng().clone());
    drop(stream);
    run.logits = fnv1a_digest(session.logits());
    let state = SavedState { seed: 11, rng, content: SavedContent::Text(pause.clone()) };
    saved::save_session(file, &mut session, engine, state).unwrap();
    (run, pause)
}

/// The whole text, and the cuts at which bytes and stop strings were held back.
fn cut_everywhere(engine: &Engine, stop: &[String]) -> (Run, usize, usize) {
    let temp = TestDir::new();
    let options = options(stop);
    let (whole, _) = go_on(engine, &temp.0.join("whole"), TOKENS, &options);
    let (mut bytes, mut stops) = (0, 0);
    for cut in 0..whole.ids.len() {
        let file = temp.0.join(cut.to_string());
        let (first, pause) = go_on(engine, &file, cut, &options);
        let (second, _) = go_on(engine, &file, TOKENS - cut, &options);
        let ids = [first.ids, second.ids].concat();
        let text = first.text + &second.text;
        let both = Run { ids, text, logits: second.logits, reason: second.reason };
        assert_eq!(both, whole, "cut at {cut}");
        let unshown = serde_json::to_value(&pause).unwrap()["unshown"].take();
        bytes += usize::from(unshown["bytes"]["pending"].as_array().is_some_and(|b| !b.is_empty()));
        stops += usize::from(unshown["stop"].as_str().is_some_and(|s| !s.is_empty()));
    }
    (whole, bytes, stops)
}

#[test]
fn cuts_in_characters_and_stop_strings_do_not_show() {
    let engine = engine(KvTypes::same(KvType::Q4), 128);
    let (whole, bytes, _) = cut_everywhere(&engine, &[]);
    assert_eq!((whole.reason, whole.ids.len()), (Some(StopReason::Length), TOKENS));
    assert!(bytes > 0, "no cut in a character of {:?}", whole.text);
    // Stop strings that begin in the text in many places and end nowhere.
    let chars: Vec<char> = whole.text.chars().collect();
    let half: Vec<String> = chars.chunks(5).map(|c| c.iter().chain(&['\u{1}']).collect()).collect();
    let (same, _, stops) = cut_everywhere(&engine, &half);
    assert!(whole.text.starts_with(&same.text) && same.ids == whole.ids);
    assert!(stops > 2, "{stops}");
    // One that ends the text.
    let middle = chars.len() * 3 / 4;
    let full: String = chars[middle..middle + 6].iter().collect();
    let (stopped, _, _) = cut_everywhere(&engine, std::slice::from_ref(&full));
    assert_eq!(stopped.reason, Some(StopReason::Stop));
    assert_eq!(stopped.text, whole.text[..whole.text.find(&full).unwrap()]);
}

#[test]
fn a_cancelled_prompt_goes_on() {
    let temp = TestDir::new();
    let kv_types = KvTypes { k: KvType::F16, v: KvType::Q8 };
    let model =
        EngineOptions { kv_types, prefill_chunk: 2, threads: 2, ..EngineOptions::new(paths::model()) };
    let engine = Engine::load(model).unwrap();
    let mut options = options(&[]);
    let (whole, _) = go_on(&engine, &temp.0.join("whole"), 20, &options);
    let file = temp.0.join("cancelled");
    let cancel = options.cancel.clone();
    options.progress = Progress::new(move |done, _| {
        if done == 2 {
            cancel.cancel();
        }
    });
    let (none, pause) = go_on(&engine, &file, 20, &options);
    assert_eq!((none.ids.len(), none.reason), (0, Some(StopReason::Interrupt)));
    assert_eq!(pause.tokens, engine.encode(PROMPT).unwrap()[2..]);
    options.cancel.reset();
    options.progress = Progress::default();
    assert_eq!(go_on(&engine, &file, 20, &options).0, whole);
}

/// The files in `tests/fixtures/sessions` were written by `generate --temp 0 -p "Once upon a time" -n 12`: `version4`
/// before keys of q4 were stored less their means, `version5` before they were scaled,
/// `version6` before windows had rows of their own, `version7` before rows were aligned.
#[test]
fn sessions_of_older_programs_go_on() {
    let temp = TestDir::new();
    let engine = engine(KvTypes::same(KvType::Q4), 64);
    let options = GenerateOptions {
        sampler: SamplerOptions { temperature: 0.0, ..SamplerOptions::default() },
        ..GenerateOptions::default()
    };
    for old in ["version4", "version5", "version6", "version7"] {
        let file = temp.file(old);
        std::fs::copy(paths::root().join("tests/fixtures/sessions").join(old), &file).unwrap();
        let (run, _) = go_on(&engine, &file, 12, &options);
        assert_eq!(run.text, " town of Longside. He was known to be clumsy.", "{old}");
        // It was saved with the others' keys, and goes on from there.
        assert_eq!(std::fs::read(&file).unwrap()[..8], *b"AGSAVED8");
        go_on(&engine, &file, 1, &options);
    }
}
