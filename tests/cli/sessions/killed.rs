//! SIGKILL while a session is saved: the file is the old one or the new one, and what is left over goes.

use super::engine;
use crate::support::command::{TestDir, antigravity};
use antigravity::Engine;
use antigravity::run::generate::stream::ResumePoint;
use antigravity::run::saved::{self, SavedContent, SavedState};
use antigravity::run::session::Sequence;
use numeric::kv::{KvType, KvTypes};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use text::sampler::Rng;

/// Enough of them that a save takes a while: 12 MiB.
const SLOTS: usize = 2000;
const CONTEXT: usize = 2100;

/// Saves a long sequence whose rows are zeros, which no prompt has to be computed for.
fn long_session(file: &Path, engine: &Engine) {
    let mut session = engine.session().expect("a session");
    let (tokens, cuts) = (vec![5; SLOTS], Vec::new());
    let sequence = Sequence {
        tokens,
        slots: SLOTS,
        cuts,
        prefix: 0,
        dense_from: 0,
        observed_since: None,
        positions: vec![],
        oldest: 0,
    };
    session.restore(sequence, |_, _, _| Ok(())).expect("restored");
    let state = SavedState { seed: 1, rng: Rng::new(1), content: SavedContent::Text(ResumePoint::default()) };
    saved::save_session(file, &mut session, engine, state).expect("saved");
}

/// Tokens of the session, computed or not.
fn tokens(file: &Path, engine: &Engine) -> usize {
    let mut session = engine.session().expect("a session");
    let state = saved::load_session(file, &mut session, engine).expect("it loads").expect("it is there");
    let SavedContent::Text(pause) = state.content else { panic!("a conversation") };
    session.tokens().len() + pause.tokens.len()
}

/// The file that a save writes until it is whole.
fn unfinished(folder: &Path) -> Option<PathBuf> {
    let mut files = fs::read_dir(folder).expect("the folder").map(|e| e.expect("an entry").path());
    files.find(|file| file.to_string_lossy().ends_with(".unfinished"))
}

/// Starts a run that adds a token and waits until its save has begun.
fn saving(file: &Path) -> Child {
    let folder = file.parent().expect("a folder");
    if let Some(left) = unfinished(folder) {
        fs::remove_file(left).expect("it was there");
    }
    let context = CONTEXT.to_string();
    let args = ["generate", "-q", "-n", "1", "--ignore-eos", "--kv-type", "f32", "-c", &context, "--session"];
    let mut run = antigravity(args).into_std();
    let mut child = run.arg(file).stdout(Stdio::null()).spawn().expect("the binary starts");
    let begun =
        || unfinished(folder).and_then(|file| fs::metadata(file).ok()).is_some_and(|meta| meta.len() > 0);
    while !begun() {
        if let Some(status) = child.try_wait().expect("a child") {
            assert!(status.success(), "{status}");
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    child
}

#[test]
fn a_killed_save_leaves_the_old_file_or_the_new_one() {
    let temp = TestDir::new();
    let engine = engine(KvTypes::same(KvType::F32), CONTEXT);
    let file = temp.0.join("state");
    long_session(&file, &engine);
    let mut child = saving(&file);
    let began = Instant::now();
    assert!(child.wait().expect("it ends").success());
    // About how long a save takes, which other work on this machine changes.
    let mut save = began.elapsed();
    let mut rng = Rng::new(3);
    let (mut held, mut amid) = (tokens(&file, &engine), 0);
    assert_eq!(held, SLOTS + 1);
    for _ in 0..50 {
        let mut child = saving(&file);
        std::thread::sleep(save.mul_f32(rng.next_f32()));
        child.kill().expect("not waited for yet");
        child.wait().expect("it ends");
        let left = unfinished(&temp.0).is_some();
        amid += usize::from(left);
        save = save.mul_f32(if left { 1.2 } else { 0.7 });
        let now = tokens(&file, &engine);
        assert!(now == held || now == held + 1, "{held} tokens, then {now}");
        held = now;
    }
    assert!(amid >= 10, "{amid} kills fell into the save, which took {save:?}");
    assert!(held > SLOTS + 1, "no save was finished");
    // What is left over goes with the next save; nothing else lies there.
    fs::write(temp.0.join(".state.0123456789abcdef.unfinished"), "left over").expect("a file");
    assert_eq!(tokens(&file, &engine), held);
    let left: Vec<PathBuf> =
        fs::read_dir(&temp.0).expect("the folder").map(|e| e.expect("an entry").path()).collect();
    assert_eq!(left, [file]);
}
