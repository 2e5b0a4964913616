//! A start with kernels to compile: the CPU begins, and the text continues on the device.

use crate::cache::files;
use crate::device::{PROMPT, device, generate, greedy, is_exact, rows, said};
use crate::support::command::binary;
use crate::support::test_dir::TestDir;
use antigravity::opencl::variants::VARIANT_VARIABLE;
use antigravity::run::options::BackendKind;
use antigravity::run::session::{Notice, Session, SessionEvent};
use antigravity::{Engine, EngineOptions, Progress, dims};
use numeric::kv::{KvType, KvTypes};
use std::ffi::OsStr;
use std::fs;
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

#[test]
fn kernels_are_counted_before_the_first_is_compiled() {
    if device().is_none() {
        return;
    }
    for (gpu_attn, batch) in [(false, 1), (true, 2)] {
        let reports = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&reports);
        let options = EngineOptions {
            threads: 2,
            max_seq_len: 400,
            backend: BackendKind::OpenCl,
            gpu_attn,
            batch,
            cl_device: Some("0".into()),
            compile_progress: Progress::new(move |done, all| seen.lock().unwrap().push((done, all))),
            ..EngineOptions::new(dims::MODEL_DIR)
        };
        let engine = Engine::load(options.clone()).unwrap();
        let sessions = engine.sessions_with(&options, batch).unwrap();
        let reports = reports.lock().unwrap();
        let all = reports.last().expect("reports").1;
        let first = reports.iter().position(|&(_, expected)| expected == all).expect("the last one");
        assert!(reports[first..].iter().all(|&(_, expected)| expected == all), "{reports:?}");
        let counts: Vec<usize> = reports[first..].iter().map(|&(done, _)| done).collect();
        assert!(counts.len() > 8 && counts.windows(2).all(|pair| pair[1] == pair[0] + 1), "{reports:?}");
        assert_eq!(counts.last(), Some(&all), "{reports:?}");
        assert_eq!(sessions.len(), batch);
    }
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
        let progress = |line: &str| line.contains("once") || line.contains("in the background");
        assert!(said.lines().all(progress), "{said}");
    }
    wait_for_background(&cache);
    assert_eq!(markers(&cache), 0);
    let expected = run("24", &["-b", "cpu"]).0;
    assert_eq!(run("24", &GPU), (expected, String::new()), "all is compiled");
}

/// Flags on which programs depend, each with another value than by default.
const OTHERS: [&str; 6] = ["--kv-type", "q8", "--draft", "2", "--eviction-policy", "sliding"];
/// Words of the line that a process is started which goes on compiling.
const GOES_ON: &str = "compiling the remaining programs in the background";

/// Ids of the processes that compile for a cache.
fn background(cache: &TestDir) -> Vec<i32> {
    let setting = format!("ANTIGRAVITY_OPENCL_CACHE={}\0", cache.0.display());
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|process| {
        let read = |file: &str| fs::read(process.path().join(file)).unwrap_or_default();
        let has = |bytes: &[u8], words: &str| bytes.windows(words.len()).any(|w| w == words.as_bytes());
        let is_one = has(&read("cmdline"), "\0compile\0") && has(&read("environ"), &setting);
        process.file_name().to_str()?.parse().ok().filter(|_| is_one)
    });
    ids.collect()
}

/// Waits until nothing compiles for a cache.
#[track_caller]
fn wait_for_background(cache: &TestDir) {
    let began = Instant::now();
    while !background(cache).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(300), "a process compiles for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A short text with the flags of [`OTHERS`], and what was said.
#[track_caller]
fn short_text(cache: impl AsRef<OsStr>, flags: &[&str]) -> String {
    let out = generate(cache, "2").args(GPU).args(OTHERS).args(flags).output().unwrap();
    assert!(out.status.success(), "{}", said(&out.stderr));
    said(&out.stderr)
}

#[test]
fn the_second_start_uses_the_device_however_short_the_texts_are() {
    if device().is_none() {
        return;
    }
    let cache = TestDir::new();
    let first = short_text(&cache.0, &[]);
    let last = first.lines().last().unwrap();
    let doctor = "`antigravity doctor --tune --gpu-attn --kv-type q8 --draft 2 --eviction-policy \
                  sliding` does it now";
    assert!(last.contains(GOES_ON) && last.ends_with(doctor), "{first}");
    let [process] = background(&cache)[..] else { panic!("one process") };
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The fields behind the name: state, parent, group, session, terminal.
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    assert_eq!(
        (fields[3], fields[4]),
        (process.to_string().as_str(), "0"),
        "it has left the terminal: {stat}"
    );
    wait_for_background(&cache);
    assert_eq!(short_text(&cache.0, &[]), "");
    let mut loud = Command::new(binary());
    loud.args(["-n", "2", "-c", "200"]).args(GPU).args(OTHERS).stdin(Stdio::null());
    loud.env("ANTIGRAVITY_OPENCL_CACHE", &cache.0).env("ANTIGRAVITY_OPENCL_CPU", "1");
    let statistics = said(&loud.output().unwrap().stderr);
    assert!(statistics.contains(", opencl ("), "{statistics}");
    assert!(background(&cache).is_empty());
}

#[test]
fn two_starts_at_once_leave_one_process_behind() {
    if device().is_none() {
        return;
    }
    let cache = TestDir::new();
    let start = || {
        let mut command = generate(&cache.0, "2");
        command.args(GPU).args(OTHERS).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let said: String =
        [start(), start()].map(|child| said(&child.wait_with_output().unwrap().stderr)).concat();
    assert_eq!(said.matches(GOES_ON).count(), 1, "{said}");
    assert!(background(&cache).len() <= 1, "{said}");
    wait_for_background(&cache);
    assert_eq!(short_text(&cache.0, &[]), "");
}

#[test]
fn a_process_that_is_killed_while_it_compiles_leaves_nothing_broken() {
    if device().is_none() {
        return;
    }
    let cache = TestDir::new();
    timed(&cache, "2", &GPU).output().unwrap();
    let began = Instant::now();
    while markers(&cache) == 0 && !background(&cache).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(300));
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: sends a signal to a process that this test has started.
    background(&cache)
        .iter()
        .for_each(|&process| assert_eq!(unsafe { libc::kill(process, libc::SIGKILL) }, 0));
    wait_for_background(&cache);
    // What only tuning needs is compiled after the text; on a busy machine, the time for it ends before all is tried.
    for starts in 1.. {
        let out = timed(&cache, "2", &[&GPU[..], &["--wait-for-gpu"]].concat()).output().unwrap();
        let said = said(&out.stderr);
        assert!(out.status.success() && !said.contains("left out"), "{said}");
        wait_for_background(&cache);
        if markers(&cache) == 0 {
            break;
        }
        assert!(starts < 5, "{:?}", files(&cache.0, "trying"));
    }
}

#[test]
fn nothing_is_left_behind_where_nothing_can_be_stored() {
    if device().is_none() {
        return;
    }
    let temp = TestDir::new();
    for (cache, line) in
        [("off", ""), (&temp.write("file", ""), "the device's kernels are compiled at each start")]
    {
        let said = short_text(cache, &[]);
        assert!(said.contains(line) && !said.contains("background"), "{said}");
    }
}

#[test]
fn doctor_compiles_what_a_text_with_the_same_flags_needs() {
    if device().is_none() {
        return;
    }
    let cache = TestDir::new();
    let mut doctor = Command::new(binary());
    doctor.args(["doctor", "--tune", "--gpu-attn", "-c", "200"]).args(OTHERS);
    doctor.env("ANTIGRAVITY_OPENCL_CACHE", &cache.0).env("ANTIGRAVITY_OPENCL_CPU", "1");
    let out = doctor.output().unwrap();
    let said = said(&out.stderr);
    assert!(out.status.success() && said.contains(" OpenCL programs are ready for "), "{said}");
    assert_eq!(short_text(&cache.0, &[]), "");
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
