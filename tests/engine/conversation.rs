//! A conversation computes only what is new in each turn, also after an undone, edited or regenerated one; and its
//! answers are those of a session that computes everything.

use crate::support::paths;
use antigravity::dims::VOCAB;
use antigravity::run::session::{CancelToken, Session};
use antigravity::{Engine, EngineOptions};

const TURNS: usize = 10;
/// Tokens of a question, enough for its last one to be computed apart; and of an answer.
const QUESTION: usize = 80;
const ANSWER: usize = 8;

fn question(turn: usize) -> Vec<u32> {
    (0..QUESTION).map(|i| ((turn * 7919 + i * 104_729) % (VOCAB - 1) + 1) as u32).collect()
}

/// Answers a prompt greedily; returns the answer, and the number of the prompt's tokens that were computed.
fn answer(session: &mut Session, prompt: &[u32]) -> (Vec<u32>, usize) {
    let held = session.reuse_prefix(prompt).unwrap();
    session.prefill(&prompt[held..], &CancelToken::default()).unwrap();
    let mut ids = Vec::new();
    for _ in 0..ANSWER {
        let best = session.logits().iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        ids.push(best.map_or(0, |(id, _)| id as u32));
        session.decode(ids[ids.len() - 1]).unwrap();
    }
    (ids, prompt.len() - held)
}

#[test]
fn a_turn_computes_only_its_new_tokens() {
    let options = EngineOptions { max_seq_len: 1024, ..EngineOptions::new(paths::model()) };
    let engine = Engine::load(options).unwrap();
    let mut session = engine.session().unwrap();
    let (mut prompt, mut turns) = (Vec::new(), Vec::new());
    let alone = |prompt: &[u32]| answer(&mut engine.session().unwrap(), prompt).0;
    for turn in 0..TURNS {
        prompt.extend(question(turn));
        let (ids, computed) = answer(&mut session, &prompt);
        assert_eq!(ids, alone(&prompt), "turn {turn}");
        // The last token of an answer is computed with the next question at the latest.
        assert!(computed <= QUESTION + 1, "turn {turn}: {computed} tokens");
        turns.push(prompt.clone());
        prompt.extend(ids);
    }

    let (again, computed) = answer(&mut session, &turns[TURNS - 1]);
    assert!((1..=2).contains(&computed) && again == prompt[turns[TURNS - 1].len()..], "{computed} tokens");

    // Without the last turn, and with another question in its place.
    let mut edited = turns[TURNS - 1].clone();
    let end = edited.len();
    edited[end - QUESTION..].rotate_left(7);
    let (ids, computed) = answer(&mut session, &edited);
    assert!(computed <= QUESTION + ANSWER + 1, "{computed} tokens");
    assert_eq!(ids, alone(&edited));

    // Several turns back: at most the answer there, which follows the prompt whose state is kept.
    let (again, computed) = answer(&mut session, &turns[TURNS / 2]);
    assert!(computed <= QUESTION + ANSWER + 1, "{computed} tokens");
    assert_eq!(again, alone(&turns[TURNS / 2]));
}
