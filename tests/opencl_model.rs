//! The model of this build through OpenCL against the CPU: logits, greedy text, rows of the cache.
//!
//! Runs on whatever device there is, CPU-type ones (PoCL) included. Without OpenCL these tests are skipped, loudly; in
//! CI they fail.

use antigravity::backend::KvRows;
use antigravity::dims::VOCAB;
use antigravity::engine::BackendKind;
use antigravity::kv::{KvType, KvTypes};
use antigravity::session::{CancelToken, Session};
use antigravity::weights::WeightType;
use antigravity::{Engine, EngineOptions, dims};
use std::sync::Once;

/// Prepares the environment of this process; false where there is no OpenCL.
fn opencl() -> bool {
    static READY: Once = Once::new();
    READY.call_once(|| {
        let dir = std::env::temp_dir().join(format!("antigravity-pocl-{}", std::process::id()));
        // SAFETY: tests call this first, and nothing else in this process writes the environment.
        unsafe {
            std::env::set_var("ANTIGRAVITY_OPENCL_CPU", "1");
            if std::env::var_os("POCL_CACHE_DIR").is_none() {
                std::env::set_var("POCL_CACHE_DIR", dir);
            }
        }
    });
    match antigravity::opencl::Device::open(None, antigravity::opencl::Cache::off()) {
        Ok(_) => true,
        Err(why) if std::env::var_os("CI").is_some() => panic!("{why}"),
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            false
        }
    }
}

fn options(kv: KvType) -> EngineOptions {
    EngineOptions {
        kv_types: KvTypes::both(kv),
        threads: 2,
        max_seq_len: 300,
        prefill_chunk: 64,
        ..EngineOptions::new(dims::MODEL_DIR)
    }
}

fn engine(options: EngineOptions) -> Engine {
    Engine::load(options).unwrap()
}

/// The same on OpenCL.
fn on_device(options: &EngineOptions) -> EngineOptions {
    EngineOptions { backend: BackendKind::OpenCl, ..options.clone() }
}

/// Token ids that are no text but spread over the vocabulary.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % VOCAB as u32).collect()
}

/// Relative L2 distance of two tables.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let (mut diff, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        diff += square(a - b);
        norm += square(b);
    }
    (diff / norm).sqrt()
}

/// The largest, and how far the second is behind.
fn best(row: &[f32]) -> (usize, f32) {
    let (mut first, mut second) = (0, f32::NEG_INFINITY);
    for (i, &x) in row.iter().enumerate().skip(1) {
        if x > row[first] {
            (first, second) = (i, row[first]);
        } else {
            second = second.max(x);
        }
    }
    (first, row[first] - second)
}

/// Logits after a prompt of `n` tokens, then of each of `more` tokens decoded one by one.
fn logits(session: &mut Session, ids: &[u32], more: usize) -> Vec<f32> {
    let (prompt, rest) = ids.split_at(ids.len() - more);
    let mut all = Vec::new();
    session.logits_of_all(prompt, |_, row| all.extend_from_slice(row)).unwrap();
    for &id in rest {
        session.decode(id).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

/// Compares two runs over the same ids: all logits, and the greedy choice where it is clear.
fn agree(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    let d = distance(found, expected);
    eprintln!("{what}: relative distance {d:.1e}");
    assert!(d <= tolerance, "{what}: relative distance {d:.1e} of the logits, allowed {tolerance:.0e}");
    for (t, (f, e)) in found.chunks(VOCAB).zip(expected.chunks(VOCAB)).enumerate() {
        let (id, margin) = best(e);
        assert!(margin <= 1e-2 || best(f).0 == id, "{what}: token {t}: other greedy choice, margin {margin}");
    }
}

/// Both backends over the same ids.
fn compare(what: &str, base: &EngineOptions, device: &EngineOptions, tolerance: f64) {
    let ids = ids(150);
    let (cpu, gpu) = (engine(base.clone()), engine(device.clone()));
    let expected = logits(&mut cpu.session().unwrap(), &ids, 20);
    let found = logits(&mut gpu.session().unwrap(), &ids, 20);
    agree(what, &found, &expected, tolerance);
}

#[test]
fn logits_are_those_of_the_cpu() {
    if !opencl() {
        return;
    }
    for gpu_attn in [true, false] {
        for weight_type in [WeightType::Q4_0, WeightType::F32] {
            let base = EngineOptions { weight_type, ..options(KvType::F32) };
            let device = EngineOptions { gpu_attn, ..on_device(&base) };
            compare(&format!("{weight_type} weights, gpu_attn {gpu_attn}"), &base, &device, 1e-3);
        }
    }
}

#[test]
fn every_type_of_cache() {
    if !opencl() {
        return;
    }
    // A rounding flip of a stored element costs more the coarser the type; a wrong formula costs everything.
    for (k, v, tolerance) in [
        (KvType::F16, KvType::F16, 2e-3),
        (KvType::Q8, KvType::Q8, 1e-2),
        (KvType::Q4, KvType::Q4, 5e-2),
        (KvType::Q8, KvType::Q4, 5e-2),
    ] {
        let base = EngineOptions { kv_types: KvTypes { k, v }, ..options(k) };
        for gpu_attn in [true, false] {
            let device = EngineOptions { gpu_attn, ..on_device(&base) };
            compare(&format!("cache {}, gpu_attn {gpu_attn}", base.kv_types), &base, &device, tolerance);
        }
    }
}

#[test]
fn the_story_is_the_same() {
    if !opencl() || dims::MODEL != "story" {
        return;
    }
    let cpu = engine(options(KvType::Q4));
    let prompt = "Once upon a time there was a little";
    let mut generate = antigravity::GenerateOptions { max_tokens: Some(64), ..Default::default() };
    generate.sampler.temperature = 0.0;
    let text = cpu.generate(prompt, &generate).unwrap();
    for gpu_attn in [true, false] {
        let device = EngineOptions { gpu_attn, ..on_device(cpu.options()) };
        assert_eq!(engine(device).generate(prompt, &generate).unwrap(), text, "gpu_attn {gpu_attn}");
    }
}

/// Rows written by one backend are rows of the other: a sequence goes on where it was left.
#[test]
fn sequences_move_between_backends() {
    if !opencl() {
        return;
    }
    let ids = ids(120);
    for kv in KvType::ALL {
        let base = options(kv);
        let (cpu, gpu) = (engine(base.clone()), engine(EngineOptions { gpu_attn: true, ..on_device(&base) }));
        let tolerance = if kv == KvType::F32 { 1e-3 } else { 5e-2 };
        for (from, to) in [(&cpu, &gpu), (&gpu, &cpu)] {
            let mut first = from.session().unwrap();
            first.prefill(&ids[..100], &CancelToken::default()).unwrap();
            let rows = first.rows().unwrap();
            let mut second = to.session().unwrap();
            second.restore(ids[..100].to_vec(), 100, 100, &rows).unwrap();
            assert_eq!(second.rows().unwrap(), rows, "{} rows make a round trip", kv.name());
            for &id in &ids[100..] {
                first.decode(id).unwrap();
                second.decode(id).unwrap();
                agree(&format!("{} rows moved", kv.name()), second.logits(), first.logits(), tolerance);
            }
            assert_close(kv, &first.rows().unwrap(), &second.rows().unwrap());
        }
    }
}

/// Most bytes of rows that both computed are equal: a rounding flip is rare.
fn assert_close(kv: KvType, a: &[KvRows], b: &[KvRows]) {
    if kv == KvType::F32 {
        return;
    }
    let bytes = |rows: &[KvRows]| rows.iter().flat_map(|r| [&r.k[..], &r.v[..]].concat()).collect::<Vec<u8>>();
    let (a, b) = (bytes(a), bytes(b));
    let other = a.iter().zip(&b).filter(|(a, b)| a != b).count();
    assert!(other * 20 < a.len(), "{}: {other} of {} bytes differ", kv.name(), a.len());
}

#[test]
fn rewinding_resizing_and_keeping() {
    if !opencl() {
        return;
    }
    let base = options(KvType::Q4);
    let gpu = engine(EngineOptions { gpu_attn: true, ..on_device(&base) });
    let ids = ids(100);
    let mut whole = gpu.session().unwrap();
    let expected = logits(&mut whole, &ids, 10);
    let mut session = gpu.session().unwrap();
    logits(&mut session, &ids, 0);
    session.rewind(40).unwrap();
    session.resize(128).unwrap();
    let found = logits(&mut session, &ids[40..], 10);
    agree("after rewinding", &found, &expected[40 * VOCAB..], 1e-3);
}

/// Text of a greedy run of the program, and what it said on stderr.
fn program(more: &[&str], environment: &[(&str, &str)]) -> (String, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_antigravity"));
    command.args(["generate", "-p", "Once upon a time", "-n", "40", "--temp", "0", "-q", "--threads", "2"]);
    let out = command.args(more).envs(environment.iter().copied()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    assert!(out.status.success(), "{}", text(out.stderr));
    (text(out.stdout), text(out.stderr))
}

#[test]
fn a_lost_device_does_not_change_the_text() {
    if !opencl() {
        return;
    }
    let (expected, _) = program(&[], &[]);
    for pass in ["1", "2", "17"] {
        let flags = ["--backend", "opencl", "--gpu-attn"];
        let (found, said) = program(&flags, &[("ANTIGRAVITY_OPENCL_LOSE", pass)]);
        assert_eq!(found, expected, "lost in pass {pass}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("going on on the CPU"), "{said}");
    }
}
