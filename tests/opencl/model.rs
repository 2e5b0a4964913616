//! The model of this build through OpenCL against the CPU: the same bits of logits, text and rows of the cache.

use crate::device::{cache_dir, device, exact, generate, rows, said};
use crate::faults::shim;
use crate::support::command::binary;
use crate::support::logits::collect_logits;
use crate::support::random::ids;
use antigravity::dims::{HAS_EXPERTS, VOCAB};
use antigravity::model::device::{KvRows, Logits, Run, lock_device};
use antigravity::model::weights::WeightType;
use antigravity::opencl::selftest::TOLERANCE;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::options::BackendKind;
use antigravity::run::plan::Plan;
use antigravity::run::session::{CancelToken, Notice};
use antigravity::{Engine, EngineOptions, dims};
use numeric::kv::{KvType, KvTypes};
use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};

fn options(kv_types: KvTypes) -> EngineOptions {
    EngineOptions {
        kv_types,
        threads: 2,
        max_seq_len: 300,
        prefill_chunk: 64,
        ..EngineOptions::new(dims::MODEL_DIR)
    }
}

/// Loads an engine on OpenCL; a fallback to the CPU would be a failure.
fn on_device(options: &EngineOptions, gpu_attn: bool) -> Engine {
    Engine::load(EngineOptions {
        backend: BackendKind::OpenCl,
        cl_device: Some("0".into()),
        gpu_attn,
        // A device with memory of its own cannot share weights.
        notice: Notice::new(|line| assert!(line.starts_with("--zero-copy: "), "{line}")),
        ..options.clone()
    })
    .unwrap()
}

fn on_cpu(options: &EngineOptions) -> Engine {
    Engine::load(options.clone()).unwrap()
}

/// Bit for bit where the device is exact; else as near as rounding flips leave it.
#[track_caller]
fn agree(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let exact = exact().unwrap();
    for (t, (f, e)) in found.chunks(VOCAB).zip(expected.chunks(VOCAB)).enumerate() {
        let square = |x: f32| f64::from(x).powi(2);
        let diff: f64 = f.iter().zip(e).map(|(f, e)| square(f - e)).sum();
        let d = (diff / e.iter().map(|&e| square(e)).sum::<f64>()).sqrt();
        let same = f.iter().zip(e).all(|(f, e)| f.to_bits() == e.to_bits());
        assert!(same || (!exact && d <= TOLERANCE), "{what}: token {t}: relative distance {d:.1e}");
    }
}

/// Both backends over the same ids, with all ways of attention.
fn compare(base: &EngineOptions, n: usize, more: usize) {
    let ids = ids(n);
    let mut cpu = on_cpu(base).session().unwrap();
    let expected = collect_logits(&mut cpu, &ids, more);
    for gpu_attn in [true, false] {
        let what = format!("{} weights, {} cache, gpu_attn {gpu_attn}", base.weight_type, base.kv_types);
        let mut gpu = on_device(base, gpu_attn).session().unwrap();
        agree(&what, &collect_logits(&mut gpu, &ids, more), &expected);
        if exact() == Some(true) {
            assert!(rows(&mut gpu) == rows(&mut cpu), "{what}: other rows");
        }
    }
}

#[test]
fn every_type_of_weights_has_the_cpus_bits() {
    if exact().is_some() {
        for weight_type in [WeightType::Q4_0, WeightType::F32] {
            compare(&EngineOptions { weight_type, ..options(KvTypes::same(KvType::F32)) }, 150, 20);
        }
    }
}

#[test]
fn every_type_of_cache_has_the_cpus_bits() {
    if exact().is_some() {
        for types in [KvType::F16, KvType::Q8, KvType::Q4].map(KvTypes::same) {
            compare(&options(types), 140, 10);
        }
        compare(&options(KvTypes { k: KvType::Q8, v: KvType::Q4 }), 70, 5);
    }
}

/// The plan is what is allocated, to the byte.
#[test]
fn the_plan_is_what_is_allocated() {
    if exact().is_some() {
        for weight_type in [WeightType::Q4_0, WeightType::F32] {
            for (gpu_attn, zero_copy) in [(true, false), (false, false), (true, true), (false, true)] {
                let base = options(KvTypes { k: KvType::Q8, v: KvType::F16 });
                let base = EngineOptions { weight_type, zero_copy, ..base };
                let engine = on_device(&base, gpu_attn);
                let plan = Plan::new(engine.options()).unwrap();
                let _session = engine.session().unwrap();
                let allocated = engine.device().unwrap().allocated_bytes();
                let what = format!("{weight_type} weights, gpu_attn {gpu_attn}, zero_copy {zero_copy}");
                assert_eq!(plan.device_bytes(), allocated, "{what}: {:#?}", plan.plan_items());
            }
        }
        // Several sequences, whose tokens are attended at once on the device.
        for gpu_attn in [true, false] {
            let engine =
                on_device(&EngineOptions { batch: 3, ..options(KvTypes::same(KvType::Q4)) }, gpu_attn);
            let plan = Plan::new(engine.options()).unwrap();
            let _sessions = engine.sessions_with(engine.options(), 3).unwrap();
            let allocated = engine.device().unwrap().allocated_bytes();
            assert_eq!(
                plan.device_bytes(),
                allocated,
                "three, gpu_attn {gpu_attn}: {:#?}",
                plan.plan_items()
            );
        }
    }
}

/// Checks the planned device bytes under an eviction policy that observes attention.
#[test]
fn the_plan_counts_buffers_that_observe_attention() {
    if exact().is_some() {
        for gpu_attn in [true, false] {
            let eviction = Eviction { policy: Policy::H2o, ..Eviction::NEVER };
            let base = EngineOptions { eviction, ..options(KvTypes::same(KvType::Q4)) };
            let engine = on_device(&base, gpu_attn);
            let mut cache = engine.device_cache(engine.options()).unwrap().unwrap();
            cache.cache().write_mass(0, &[]).unwrap();
            let device = cache.device();
            let run = Run { observed_tokens: 1, ..Run::new(cache.cache(), &[1], 0, Logits::None) };
            lock_device(&device).forward(&mut [run], None).unwrap();
            (0..dims::KV_HEADS).for_each(|head| cache.cache().retain_slots(0, head, &[0]).unwrap());
            let plan = Plan::new(engine.options()).unwrap();
            let allocated = engine.device().unwrap().allocated_bytes();
            assert_eq!(plan.device_bytes(), allocated, "gpu_attn {gpu_attn}: {:#?}", plan.plan_items());
        }
    }
}

/// Chunks of attention beyond those that the output projection merges, and prefill over many chunks.
#[test]
fn a_long_context_has_the_cpus_bits() {
    if exact().is_some() {
        let base = options(KvTypes::same(KvType::Q4));
        compare(&EngineOptions { max_seq_len: 1100, prefill_chunk: 256, ..base }, 1060, 4);
    }
}

#[test]
fn sequences_move_between_backends() {
    if exact().is_none() {
        return;
    }
    let ids = ids(120);
    for kv in KvType::ALL {
        let base = options(KvTypes::same(kv));
        let (cpu, gpu) = (on_cpu(&base), on_device(&base, true));
        for (from, to) in [(&cpu, &gpu), (&gpu, &cpu)] {
            let mut first = from.session().unwrap();
            first.prefill(&ids[..100], &CancelToken::default()).unwrap();
            let all = rows(&mut first);
            let mut second = to.session().unwrap();
            let copy = |layer: usize, rows: &mut KvRows, _: &mut Vec<f32>| {
                rows.clone_from(&all[layer]);
                Ok(())
            };
            second.restore(first.sequence(), copy).unwrap();
            assert!(rows(&mut second) == all, "{} rows make a round trip", kv.name());
            for &id in &ids[100..] {
                first.decode(id).unwrap();
                second.decode(id).unwrap();
                agree(&format!("{} rows moved", kv.name()), second.logits(), first.logits());
            }
        }
    }
}

#[test]
fn rewinding_and_resizing_change_no_logits() {
    if exact().is_none() {
        return;
    }
    let gpu = on_device(&options(KvTypes::same(KvType::Q4)), true);
    let ids = ids(100);
    let expected = collect_logits(&mut gpu.session().unwrap(), &ids, 10);
    let mut session = gpu.session().unwrap();
    collect_logits(&mut session, &ids, 0);
    session.rewind(40).unwrap();
    session.resize(128).unwrap();
    agree("after rewinding", &collect_logits(&mut session, &ids[40..], 10), &expected[40 * VOCAB..]);
    assert!(session.resize(99).is_err());
}

/// The program with these flags after its command, and with more environment.
fn program(command: &[&str], environment: &[(&str, &str)]) -> Output {
    let common = ["--threads", "2", "-c", "200", "--prefill-chunk", "32"];
    let mut run = Command::new(binary());
    run.args(command).args(common).envs(environment.iter().copied());
    let out = run.env("ANTIGRAVITY_OPENCL_CACHE", "off").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out
}

const GENERATE: [&str; 8] = ["generate", "-p", "Once upon a time there was", "-n", "40", "--temp", "0", "-q"];
const DEVICE: [&str; 5] = ["--backend", "opencl", "--cl-device", "0", "--wait-for-gpu"];

/// Environment variables that give the OpenCL library of a test an instruction.
fn told<'a>(what: &'a str, value: &'a str) -> [(&'a str, &'a str); 2] {
    [("ANTIGRAVITY_OPENCL_LIB", shim().expect("the caller has looked")), (what, value)]
}

/// Greedy text of a device, with some trouble, against the CPU's; what was said on stderr.
fn text_with(flags: &[&str], environment: &[(&str, &str)]) -> String {
    text_of(&[], flags, environment)
}

/// Checks that a device's greedy text is the CPU's under the same settings; returns the device's stderr.
fn text_of(settings: &[&str], flags: &[&str], environment: &[(&str, &str)]) -> String {
    let expected = program(&[&GENERATE[..], settings].concat(), &[]).stdout;
    let out = program(&[&GENERATE[..], settings, &DEVICE, flags].concat(), environment);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    assert_eq!(text(out.stdout), text(expected), "{flags:?} {environment:?}");
    said(&out.stderr)
}

#[test]
fn the_text_is_the_same_as_on_the_cpu() {
    if exact().is_some() {
        for flags in [&["--gpu-attn"][..], &[], &["--zero-copy"], &["--zero-copy", "--gpu-attn"]] {
            assert_eq!(text_with(flags, &[]), "", "{flags:?}");
            assert_eq!(text_of(&["--weight-type", "f32"], flags, &[]), "", "f32, {flags:?}");
        }
    }
}

#[test]
fn drafts_on_the_device_change_no_text() {
    if exact().is_none() {
        return;
    }
    let mut all = vec![vec!["--draft".to_string(), "6".into()]];
    if let Some(program) = crate::support::paths::draft_program() {
        let model = ["--draft-when", "always", "--draft-model", program.to_str().unwrap()];
        all.push(model.map(str::to_owned).into());
    }
    for drafts in &all {
        let drafts: Vec<&str> = drafts.iter().map(String::as_str).collect();
        for flags in [&["--gpu-attn"][..], &[]] {
            let flags = [flags, &drafts].concat();
            assert_eq!(text_of(&["--repeat-penalty", "1"], &flags, &[]), "", "{flags:?}");
            assert_eq!(text_with(&flags, &[]), "", "{flags:?}");
        }
    }
}

#[test]
fn prompts_together_have_the_texts_of_the_cpu() {
    if exact().is_none() {
        return;
    }
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("prompts_together.jsonl");
    let line = |i: usize| {
        let prompt = "Once upon a time there was a red ball. ".repeat(i % 3 + 1);
        format!("{{\"prompt\": \"{prompt}\", \"max_tokens\": {}, \"temperature\": 0}}\n", 8 + 3 * i)
    };
    std::fs::write(&file, (0..7).map(line).collect::<String>()).unwrap();
    let generate = ["generate", "--prompts", file.to_str().unwrap(), "-q"];
    let lines = |flags: &[&str]| {
        let out = program(&[&generate[..], flags].concat(), &[]);
        assert_eq!(said(&out.stderr), "", "{flags:?}");
        let mut lines: Vec<_> = String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let expected = lines(&["--batch", "1"]);
    for flags in [&["--batch", "5"][..], &["--batch", "3", "--draft", "4", "--repeat-penalty", "1"]] {
        let expected = if flags.len() == 2 { expected.clone() } else { lines(&flags[2..]) };
        for attention in [&["--gpu-attn"][..], &[]] {
            assert_eq!(lines(&[flags, attention, &DEVICE].concat()), expected, "{flags:?} {attention:?}");
        }
    }
}

/// Matrices in chunks of rows, and fewer tokens at once: a buffer holds 256 KiB and then 64 KiB.
#[test]
fn small_buffers_change_no_logits() {
    if exact().is_some() && shim().is_some() {
        for bytes in ["262144", "65536"] {
            assert_eq!(text_of(&["--kv-type", "q8"], &["--gpu-attn"], &told("SHIM_MAX_ALLOC", bytes)), "");
        }
    }
}

#[test]
fn a_lost_device_changes_no_text() {
    if exact().is_some() && shim().is_some() {
        // The first passes are those of the self-test.
        for fault in ["clEnqueueReadBuffer:2:-5", "clEnqueueReadBuffer:5:-5", "clEnqueueReadBuffer:17:-5"] {
            let flags: &[&str] = if HAS_EXPERTS { &["--cpu-moe"] } else { &["--gpu-attn"] };
            let said = text_with(flags, &told("SHIM_FAULT", fault));
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains("CPU"), "{said}");
        }
    }
}

#[test]
fn a_corrupted_kernel_changes_nothing() {
    if exact().is_some() && shim().is_some() {
        for kernel in ["gemv", "gemm", "activations"] {
            let said = text_with(&["--gpu-attn"], &told("SHIM_WRONG", kernel));
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains("wrong results") && said.contains("using the CPU"), "{said}");
        }
    }
}

/// A device that moves rows wrongly at evictions is not used.
#[test]
fn a_corrupted_eviction_changes_nothing() {
    if exact().is_some() && shim().is_some() {
        let evicting = ["--eviction-policy", "h2o", "--eviction-window", "24", "--memory-threshold-mb", "0"];
        assert_eq!(text_of(&evicting, &["--gpu-attn"], &[]), "");
        let said = text_of(&evicting, &["--gpu-attn"], &told("SHIM_WRONG", "compact_kv"));
        assert!(said.lines().count() == 1 && said.contains("using the CPU"), "{said}");
    }
}

/// Checks that all threads keep to the mask; the driver's stay on the cores that they start on.
#[test]
fn every_thread_keeps_to_the_mask() {
    if device().is_none() {
        return;
    }
    let core = numeric::topology::allowed_cores().pop().expect("this test runs on one");
    let mut command = generate(cache_dir(), "190");
    command.args(["--ignore-eos", "-b", "opencl", "--gpu-attn", "--cpu-mask", &format!("{core}-{core}")]);
    let mut running = command.stdout(Stdio::piped()).spawn().unwrap();
    // A piece of the text: all threads are there.
    running.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let tasks = fs::read_dir(format!("/proc/{}/task", running.id())).unwrap();
    let status =
        |task: std::io::Result<fs::DirEntry>| fs::read_to_string(task.ok()?.path().join("status")).ok();
    let statuses: Vec<String> = tasks.filter_map(status).collect();
    running.kill().unwrap();
    running.wait().unwrap();
    let keeps = format!("Cpus_allowed_list:\t{core}\n");
    assert!(statuses.len() > 2 && statuses.iter().all(|status| status.contains(&keeps)), "{statuses:#?}");
}
