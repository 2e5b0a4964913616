//! A start with kernels to compile: the CPU begins, and the text continues on the device.

use crate::cache::files;
use crate::device::{PROMPT, device, generate, greedy, is_exact, rows, said};
use crate::support::test_dir::TestDir;
use antigravity::opencl::variants::VARIANT_VARIABLE;
use antigravity::run::options::BackendKind;
use antigravity::run::session::{Notice, Session, SessionEvent};
use antigravity::{Engine, EngineOptions, dims};
use numeric::kv::{KvType, KvTypes};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The model on a backend with values of a type that no other test has beside these keys, so that nothing is known of
/// the device.
fn engine(backend: BackendKind, v: KvType) -> (Engine, Arc<Mutex<Vec<String>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let said = Arc::clone(&lines);
    let options = EngineOptions {
        kv_types: KvTypes { k: KvType::Q8, v },
        threads: 2,
        max_seq_len: 400,
        draft: 3,
        backend,
        gpu_attn: true,
        wait_for_gpu: false,
        cl_device: Some("0".into()),
        notice: Notice::new(move |line| said.lock().unwrap().push(line.to_string())),
        ..EngineOptions::new(dims::MODEL_DIR)
    };
    (Engine::load(options).unwrap(), lines)
}

/// The ids of the prompt, a sequence that has gone on from it on the CPU, and the `n` ids that came.
fn on_cpu(v: KvType, n: usize) -> (Vec<u32>, Session, Vec<u32>) {
    let (cpu, _) = engine(BackendKind::Cpu, v);
    let (prompt, mut session) = (cpu.encode(PROMPT).unwrap(), cpu.session().unwrap());
    let ids = greedy(&mut session, &prompt, n, |_, _| {});
    (prompt, session, ids)
}

#[test]
fn a_sequence_begins_at_once_and_goes_on_on_the_device() {
    if !is_exact() {
        return;
    }
    let (prompt, mut alone, expected) = on_cpu(KvType::F16, 40);
    let (engine, lines) = engine(BackendKind::OpenCl, KvType::F16);
    let mut session = engine.session().unwrap();
    assert!(!session.device_name().contains("opencl"), "{}", session.device_name());
    let moves = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&moves);
    session.set_observer(Box::new(move |event| {
        if let SessionEvent::Switched(s) = event {
            seen.lock().unwrap().push(s.why.clone());
        }
    }));
    let began = Instant::now();
    let found = greedy(&mut session, &prompt, 40, |session, i| {
        if i != 10 {
            return;
        }
        // What the device got ready for is remembered when it is.
        while engine.must_compile() {
            assert!(began.elapsed() < Duration::from_secs(300), "{:?}", lines.lock());
            std::thread::sleep(Duration::from_millis(10));
        }
        // It is handed over right after.
        std::thread::sleep(Duration::from_millis(500));
        assert!(!session.device_name().contains("opencl"), "nothing moves between two tokens");
    });
    assert_eq!(found, expected);
    assert!(session.device_name().contains("opencl"), "{}", session.device_name());
    assert!(rows(&mut session) == rows(&mut alone));
    assert_eq!(*moves.lock().unwrap(), ["its kernels are compiled"]);
    {
        let lines = lines.lock().unwrap();
        assert!(lines.len() == 1 && lines[0].ends_with("(only once); the CPU starts meanwhile"), "{lines:?}");
    }
    // Nothing is left to be waited for.
    assert!(engine.session().unwrap().device_name().contains("opencl"));
}

/// The device is compared with the CPU once it is ready, and never again.
#[test]
fn auto_begins_on_the_cpu_while_kernels_compile() {
    if !is_exact() {
        return;
    }
    let (prompt, mut alone, expected) = on_cpu(KvType::F32, 300);
    let (engine, lines) = engine(BackendKind::Auto, KvType::F32);
    let mut session = engine.session().unwrap();
    assert!(engine.must_compile() && !session.device_name().contains("opencl"));
    let began = Instant::now();
    let found = greedy(&mut session, &prompt, 300, |_, i| {
        if i < 250 && engine.must_compile() {
            assert!(began.elapsed() < Duration::from_secs(300), "{:?}", lines.lock());
            // 325 s in all.
            std::thread::sleep(Duration::from_millis((i * i / 16) as u64));
        }
    });
    assert_eq!(found, expected);
    assert!(rows(&mut session) == rows(&mut alone));
    assert!(!engine.must_compile(), "{:?}", lines.lock());
    let said = |lines: &Mutex<Vec<String>>| lines.lock().unwrap().join("\n");
    let said_first = said(&lines);
    assert!(said_first.contains("the CPU starts meanwhile\nauto: "), "{said_first}");
    let (engine, lines) = self::engine(BackendKind::Auto, KvType::F32);
    engine.session().unwrap();
    assert_eq!(said(&lines), said_first.lines().last().unwrap());
}

const GPU: [&str; 3] = ["-b", "opencl", "--gpu-attn"];

/// Writes `n` tokens, with kernels compiled and timed in a cache of its own.
fn timed(cache: &TestDir, n: &str, flags: &[&str]) -> Command {
    let mut command = generate(&cache.0, n);
    command.args(flags).env(VARIANT_VARIABLE, "");
    command
}

/// Counts the cache's `trying` files, which mark what a driver is suspected of crashing on.
fn markers(cache: &TestDir) -> usize {
    files(&cache.0, "trying").len()
}

#[test]
fn a_text_that_ends_before_the_device_is_ready_ends_the_program() {
    if device().is_none() {
        return;
    }
    let cache = TestDir::new();
    let run = |n: &str, flags: &[&str]| {
        let Output { status, stdout, stderr } = timed(&cache, n, flags).output().unwrap();
        let said = said(&stderr);
        assert!(status.success(), "{status}: {said}");
        (stdout, said)
    };
    let expected = run("2", &["-b", "cpu"]).0;
    for _ in 0..3 {
        let (text, said) = run("2", &GPU);
        assert_eq!(text, expected);
        // Nothing is suspected of a crash, and nothing has failed.
        let progress = |line: &str| line.contains("once") || line.contains("still being compiled");
        assert!(said.lines().all(progress), "{said}");
        assert_eq!(markers(&cache), 0);
    }
    let expected = run("24", &["-b", "cpu"]).0;
    let (text, said) = run("24", &[&GPU[..], &["--wait-for-gpu"]].concat());
    assert_eq!(text, expected);
    assert!(!said.contains("meanwhile") && !said.contains("left out"), "{said}");
    assert_eq!(run("24", &GPU), (expected, String::new()));
}

#[test]
fn a_signal_while_kernels_are_tried_is_no_crash() {
    if device().is_none() {
        return;
    }
    // While they are waited for, and while the CPU writes.
    for flags in [&["--wait-for-gpu"][..], &["--eviction-policy", "sliding"]] {
        let cache = TestDir::new();
        let flags = [&GPU[..], &["--eviction-window", "100", "--ignore-eos"], flags].concat();
        let mut run = timed(&cache, "-1", &flags);
        let mut child = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let began = Instant::now();
        while markers(&cache) == 0 {
            assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: sends a signal to a child that is not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        assert!(!child.wait().unwrap().success());
        assert_eq!(markers(&cache), 0, "{flags:?}");
    }
}
