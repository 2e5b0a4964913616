//! A saved sequence that several sessions load: they map its rows, share their memory, and compute what one that
//! computed the prefix itself computes.

use crate::support::paths;
use crate::support::process::run_alone;
use crate::support::test_dir::TestDir;
use antigravity::run::generate::stream::ResumePoint;
use antigravity::run::saved::{self, SavedContent, SavedState};
use antigravity::session::{CancelToken, Session};
use antigravity::{Engine, EngineOptions};
use numeric::kv::{KvType, KvTypes};
use std::fs;
use std::path::Path;
use text::sampler::Rng;

/// Tokens of the prefix: a head's rows are 80 KiB.
const PREFIX: usize = 640;

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i + seed) * i * 31 % 3000) as u32 + 10).collect()
}

fn load_engine(slots: usize) -> Engine {
    let kv_types = KvTypes::same(KvType::F32);
    Engine::load(EngineOptions {
        kv_types,
        max_seq_len: slots,
        threads: 2,
        ..EngineOptions::new(paths::model())
    })
    .unwrap()
}

/// Computes more of a text and returns the logits after it.
fn go_on(session: &mut Session, more: &[u32]) -> Vec<u32> {
    session.prefill(more, &CancelToken::default()).unwrap();
    session.decode(7).unwrap();
    session.logits().iter().map(|x| x.to_bits()).collect()
}

fn load_session(engine: &Engine, file: &Path) -> Session {
    let mut session = engine.session().unwrap();
    assert!(saved::read_session(file, &mut session, engine).unwrap().is_some());
    assert_eq!(session.tokens().len(), PREFIX);
    session
}

/// Mappings of the file in this process.
fn count_mappings(file: &Path) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&*file.to_string_lossy())).count()
}

/// Bytes of the file's mappings that are this process's own: /proc/self/smaps' field `Anonymous`.
fn count_own_bytes(file: &Path) -> usize {
    let (mut own, mut inside) = (0, false);
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            inside = line.contains(&*file.to_string_lossy());
        }
        if let Some(kib) = line.strip_prefix("Anonymous:").filter(|_| inside) {
            own += kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
        }
    }
    own
}

#[test]
fn sessions_that_load_a_file_share_its_memory() {
    run_alone("shared_prefix::sessions_that_load_a_file_share_its_memory", share);
}

fn share() {
    let temp = TestDir::new();
    let file = temp.file("prefix.session");
    let engine = load_engine(1024);
    let mut first = engine.session().unwrap();
    first.prefill(&tokens(PREFIX, 0), &CancelToken::default()).unwrap();
    let state = SavedState { seed: 0, rng: Rng::new(0), content: SavedContent::Text(ResumePoint::default()) };
    saved::save_session(&file, &mut first, &engine, state).unwrap();
    let before = fs::read(&file).unwrap();
    let (question, other) = (tokens(9, 5), tokens(70, 11));
    let expected = go_on(&mut first, &question);

    let mut sessions: Vec<Session> = (0..3).map(|_| load_session(&engine, &file)).collect();
    if cfg!(target_os = "linux") {
        // Neighbouring rows of a plane may be one mapping; keys and values are not neighbours.
        assert!(count_mappings(&file) >= 2 * sessions.len(), "{}", count_mappings(&file));
        assert_eq!(count_own_bytes(&file), 0);
    }
    for session in &mut sessions {
        assert!(go_on(session, &question) == expected);
    }
    assert!(fs::read(&file).unwrap() == before, "the file has changed");
    if cfg!(target_os = "linux") {
        let rows = sessions.len() * before.len();
        assert!(count_own_bytes(&file) < rows / 4, "{} of {rows}", count_own_bytes(&file));
    }

    // Rows of the file are written over in one session; the others keep theirs.
    first.rewind(PREFIX / 2).unwrap();
    let expected_other = go_on(&mut first, &other);
    sessions[0].rewind(PREFIX / 2).unwrap();
    assert!(go_on(&mut sessions[0], &other) == expected_other);
    sessions[1].rewind(PREFIX).unwrap();
    assert!(go_on(&mut sessions[1], &question) == expected);
    assert!(fs::read(&file).unwrap() == before, "the file has changed");

    // The file may be replaced or removed meanwhile.
    fs::remove_file(&file).unwrap();
    sessions[2].rewind(PREFIX).unwrap();
    sessions[2].resize(2048).unwrap();
    assert!(go_on(&mut sessions[2], &question) == expected);
    sessions.iter_mut().for_each(Session::clear);
    assert_eq!(count_mappings(&file), 0);

    // Where the rows of a head are not whole pages, they are copied.
    fs::write(&file, &before).unwrap();
    let mut copied = load_session(&load_engine(1000), &file);
    assert_eq!(count_mappings(&file), 0);
    assert!(go_on(&mut copied, &question) == expected);
}
