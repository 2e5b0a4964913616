//! Sequences on the CPU and an OpenCL device in turn: the CPU's bits, whatever moves and whatever fails.

use crate::device;
use crate::device::{cache_dir, is_exact, rows, said};
use crate::faults::shim;
use crate::support::command::binary;
use crate::support::paths;
use antigravity::model::weights::WeightType;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::options::BackendKind;
use antigravity::run::session::{CancelToken, FixedSchedule, Notice, Session, SessionEvent, Side};
use antigravity::{Engine, EngineOptions, dims};
use numeric::kv::{KvType, KvTypes};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

fn options(kv: KvType) -> EngineOptions {
    EngineOptions {
        kv_types: KvTypes::same(kv),
        threads: 2,
        max_seq_len: 400,
        prefill_chunk: 64,
        cl_device: Some("0".into()),
        notice: Notice::new(|line| panic!("{line}")),
        ..EngineOptions::new(dims::MODEL_DIR)
    }
}

/// Both devices; nothing moves by itself.
fn hybrid(o: &EngineOptions) -> Engine {
    let by_hand = FixedSchedule { prefill: Side::Cpu, to_gpu: vec![usize::MAX], to_cpu: vec![] };
    let by_hand = if o.hybrid == FixedSchedule::default_schedule() { by_hand } else { o.hybrid.clone() };
    Engine::load(EngineOptions { backend: BackendKind::Hybrid, hybrid: by_hand, ..o.clone() }).unwrap()
}

/// Greedy ids after a prompt, with a move before every `every`-th token.
fn greedy(session: &mut Session, prompt: &[u32], n: usize, every: usize) -> Vec<u32> {
    device::greedy(session, prompt, n, |session, i| {
        if i % every == every - 1 {
            session.switch_device("test").unwrap();
        }
    })
}

#[test]
fn moves_every_few_tokens_give_the_golden_ids() {
    if !is_exact() {
        return;
    }
    let file = Path::new("tests/golden/story/once_f32.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let list = |name: &str| -> Vec<u32> {
        golden["expected"][name].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
    };
    let engine = hybrid(&EngineOptions { weight_type: WeightType::F32, ..options(KvType::F32) });
    for every in [1, 7, 64] {
        let ids = greedy(&mut engine.session().unwrap(), &list("prompt"), list("ids").len(), every);
        assert_eq!(ids, list("ids"), "a move every {every} tokens");
    }
}

#[test]
fn device_switches_change_no_text_with_any_cache_and_policy() {
    if !is_exact() {
        return;
    }
    for kv in KvType::ALL {
        for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
            let eviction = Eviction { policy, window: 64, prefix: Some(4), memory_threshold: 0 };
            let o = EngineOptions { eviction, ..options(kv) };
            let (one, two) = (Engine::load(o.clone()).unwrap(), hybrid(&o));
            let prompt: Vec<u32> = (0..60).map(|i| 10 + i * 37 % 3000).collect();
            let (mut one, mut two) = (one.session().unwrap(), two.session().unwrap());
            let expected = greedy(&mut one, &prompt, 80, usize::MAX);
            let found = greedy(&mut two, &prompt, 80, 7);
            let what = format!("{} {policy:?}", kv.name());
            assert_eq!(found, expected, "{what}");
            assert!(one.logits() == two.logits(), "{what}: other logits");
            let before = rows(&mut two);
            assert!(before == rows(&mut one), "{what}: other rows");
            two.switch_device("there").unwrap();
            two.switch_device("and back").unwrap();
            assert!(before == rows(&mut two), "{what}: rows make a round trip");
        }
    }
}

#[test]
fn a_cache_on_any_device_is_exported_and_imported() {
    if !is_exact() {
        return;
    }
    let o = options(KvType::Q8);
    let gpu = Engine::load(EngineOptions { backend: BackendKind::OpenCl, ..o.clone() }).unwrap();
    let (cpu, both) = (Engine::load(o.clone()).unwrap(), hybrid(&o));
    let prompt: Vec<u32> = (0..60).map(|i| 10 + i * 37 % 3000).collect();
    let mut session = cpu.session().unwrap();
    session.prefill(&prompt, &CancelToken::default()).unwrap();
    let past = session.past_key_values(&cpu).unwrap();
    session.decode(7).unwrap();
    for (name, engine, moves) in
        [("gpu", &gpu, false), ("hybrid", &both, false), ("hybrid, moved", &both, true)]
    {
        let mut other = engine.session().unwrap().with_past(&past, engine).unwrap();
        if moves {
            other.switch_device("test").unwrap();
        }
        assert!(other.past_key_values(engine).unwrap() == past, "{name}: another cache");
        other.decode(7).unwrap();
        assert!(other.logits() == session.logits(), "{name}: other logits");
    }
}

#[test]
fn only_rows_that_the_other_lacks_are_copied() {
    if !is_exact() {
        return;
    }
    let fixed = FixedSchedule { prefill: Side::Cpu, to_gpu: vec![50, 90], to_cpu: vec![70] };
    let engine = hybrid(&EngineOptions { hybrid: fixed, ..options(KvType::Q8) });
    let mut session = engine.session().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    session.set_observer(Box::new(move |e| {
        if let SessionEvent::Switched(s) = e {
            kept.lock().unwrap().push((s.position, s.slots, s.bytes));
        }
    }));
    greedy(&mut session, &[5; 40], 60, usize::MAX);
    let slot = KvTypes::same(KvType::Q8).slot_bytes(dims::LAYERS, dims::KV_HEADS, dims::HEAD_DIM);
    let expected = [(50, 50), (70, 20), (90, 20)].map(|(p, n)| (p, n, (n * slot) as u64));
    assert_eq!(*seen.lock().unwrap(), expected);
}

#[test]
fn auto_measures_chooses_and_says_why() {
    if !is_exact() {
        return;
    }
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let o = EngineOptions {
        backend: BackendKind::Auto,
        notice: Notice::new(|line| SAID.lock().unwrap().push(line.into())),
        ..options(KvType::Q4)
    };
    for _ in 0..2 {
        let engine = Engine::load(o.clone()).unwrap();
        let found = greedy(&mut engine.session().unwrap(), &[5; 40], 30, usize::MAX);
        let alone = Engine::load(options(KvType::Q4)).unwrap();
        assert_eq!(found, greedy(&mut alone.session().unwrap(), &[5; 40], 30, usize::MAX));
    }
    let said = SAID.lock().unwrap();
    assert!(said.len() == 2 && said[0].starts_with("auto: ") && said[0].contains("tokens/s"), "{said:?}");
    assert_eq!(said[0], said[1], "speeds are remembered");
}

/// Bytes of this process's mappings of a file that are in memory.
#[cfg(target_os = "linux")]
fn resident_of(file: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut ours, mut bytes, mut found) = (false, 0, false);
    for line in maps.lines() {
        if let Some(kb) = line.strip_prefix("Rss:").filter(|_| ours) {
            bytes += kb.trim().strip_suffix(" kB").and_then(|n| n.parse::<usize>().ok()).unwrap() << 10;
        } else if line.split_whitespace().next().is_some_and(|w| !w.ends_with(':')) {
            ours = line.ends_with(file.to_str().unwrap());
            found |= ours;
        }
    }
    assert!(found, "{} is mapped", file.display());
    bytes
}

#[test]
#[cfg(target_os = "linux")]
fn shared_weights_are_in_memory_once() {
    if !is_exact() {
        return;
    }
    if !device::device().is_some_and(|d| d.info().unified_memory) {
        return device::skip("this device has memory of its own");
    }
    let dir = cache_dir().join("packed");
    std::fs::create_dir_all(&dir).unwrap();
    for file in std::fs::read_dir(dims::MODEL_DIR).unwrap().map(|f| f.unwrap().path()) {
        if file.is_file() {
            std::fs::copy(&file, dir.join(file.file_name().unwrap())).unwrap();
        }
    }
    let pack = ["pack", "-m", dir.to_str().unwrap()];
    assert!(Command::new(binary()).args(pack).output().unwrap().status.success());
    let file = dir.join("model.packed.safetensors");
    let whole = std::fs::metadata(&file).unwrap().len() as usize;
    let mapped = |zero_copy: bool| {
        let engine = hybrid(&EngineOptions { zero_copy, model: dir.clone(), ..options(KvType::Q4) });
        greedy(&mut engine.session().unwrap(), &[5; 40], 10, 3);
        resident_of(&file)
    };
    let (apart, shared) = (mapped(false), mapped(true));
    // What is left is the embedding, two fifths of this file, of which the system may map more than is read.
    assert!(shared < whole / 2, "{shared} of {whole} bytes are in memory besides the shared copy");
    assert!(
        apart > shared + whole / 3,
        "{apart} of {whole} bytes where the CPU reads its own, {shared} otherwise"
    );
}

/// The program with these flags; its output.
fn program(flags: &[&str], environment: &[(&str, &str)]) -> Output {
    let common =
        ["generate", "-p", "Once upon a time there was", "-n", "60", "--temp", "0", "-t", "2", "-c", "300"];
    let mut run = Command::new(binary());
    run.args(common).args(flags).envs(environment.iter().copied());
    let out = run.env("ANTIGRAVITY_OPENCL_CACHE", cache_dir()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out
}

const HYBRID: [&str; 7] =
    ["--backend", "hybrid", "--cl-device", "0", "--wait-for-gpu", "--switch-threshold", "20,50"];

#[test]
fn the_program_switches_at_the_given_positions() {
    if !is_exact() {
        return;
    }
    let expected = program(&["-q"], &[]).stdout;
    let unified = device::device().is_some_and(|d| d.info().unified_memory);
    for zero_copy in ["false", "true"] {
        let flags = [&HYBRID[..], &["--switch-back", "40", "--zero-copy", zero_copy]].concat();
        assert_eq!(program(&[&flags[..], &["-q"]].concat(), &[]).stdout, expected);
        let lines =
            String::from_utf8(program(&[&flags[..], &["--format", "jsonl"]].concat(), &[]).stdout).unwrap();
        let events: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let moves: Vec<_> = events.iter().filter(|e| e["t"] == "switch").collect();
        let positions: Vec<_> = moves.iter().map(|e| e["position"].as_u64().unwrap()).collect();
        assert_eq!(positions, [20, 40, 50]);
        if zero_copy == "true" && unified {
            assert!(
                moves.iter().all(|e| e["bytes"] == 0 && e["slots"] == 0),
                "one memory: nothing is copied"
            );
        }
    }
}

#[test]
fn drafts_go_on_where_the_text_moves() {
    if !is_exact() {
        return;
    }
    let mut all = vec![vec!["--draft".to_string(), "6".into()]];
    if let Some(program) = paths::draft_program() {
        let model = ["--draft-when", "always", "--draft-model", program.to_str().unwrap()];
        all.push(model.map(str::to_owned).into());
    }
    for settings in [&["-q"][..], &["-q", "--repeat-penalty", "1"]] {
        let expected = program(settings, &[]).stdout;
        for drafts in &all {
            let drafts: Vec<&str> = drafts.iter().map(String::as_str).collect();
            let out = program(&[settings, &HYBRID, &["--switch-back", "40"], &drafts].concat(), &[]);
            assert_eq!(said(&out.stderr), "", "{drafts:?}");
            assert_eq!(out.stdout, expected, "{drafts:?} {settings:?}");
        }
    }
}

#[test]
fn losing_the_device_at_any_call_changes_no_text() {
    if !is_exact() || shim().is_none() {
        return;
    }
    const OPENCL: [&str; 6] = ["--backend", "opencl", "--cl-device", "0", "--gpu-attn", "--wait-for-gpu"];
    let evicting =
        |policy| ["--eviction-policy", policy, "--eviction-window", "24", "--memory-threshold-mb", "0"];
    let (h2o, snapkv) = (evicting("h2o"), evicting("snapkv"));
    // The first reads are those of the self-test, unless its verdict is known.
    for (read, settings, device) in [
        ("1", &[][..], &HYBRID[..]),
        ("12", &[], &HYBRID),
        ("12", &[], &[&HYBRID[..], &["--zero-copy"]].concat()),
        ("9", &["--kv-type", "f32"], &HYBRID),
        ("12", &h2o, &HYBRID),
        ("20", &h2o, &[&HYBRID[..], &["--zero-copy"]].concat()),
        ("30", &h2o, &OPENCL),
        ("45", &snapkv, &OPENCL),
    ] {
        let expected = program(&[settings, &["-q"]].concat(), &[]).stdout;
        let flags = [settings, device, &["-q"]].concat();
        let fault = format!("clEnqueueReadBuffer:{read}:-5");
        let out = program(&flags, &[("ANTIGRAVITY_OPENCL_LIB", shim().unwrap()), ("SHIM_FAULT", &fault)]);
        let said = said(&out.stderr);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(text(&out.stdout), text(&expected), "{flags:?}: {said}");
        assert!(said.lines().count() == 1 && said.contains("CPU"), "{flags:?}: {said}");
    }
}

/// The driver maps copies, which turn to nonsense when they are unmapped.
#[test]
fn nothing_is_read_or_written_through_a_stale_view() {
    if !is_exact() || shim().is_none() {
        return;
    }
    let evicting = ["--eviction-policy", "h2o", "--eviction-window", "24", "--memory-threshold-mb", "0"];
    for settings in [&[][..], &evicting] {
        let expected = program(&[settings, &["-q"]].concat(), &[]).stdout;
        let flags = [settings, &HYBRID, &["--switch-back", "40", "--zero-copy", "-q"]].concat();
        let out = program(&flags, &[("ANTIGRAVITY_OPENCL_LIB", shim().unwrap()), ("SHIM_COPIES", "1")]);
        assert_eq!(said(&out.stderr), "", "{flags:?}");
        assert_eq!(out.stdout, expected, "{flags:?}");
    }
}
