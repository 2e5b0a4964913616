//! Kernel variants: all give the same bits, a wrong one is not used, and none is tried again and again.

use crate::device::{cache_dir, device, generate, is_exact_with, said};
use crate::faults::shim;
use crate::support::test_dir::TestDir;
use antigravity::opencl::variants::{VARIANT_VARIABLE, VARIANTS};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Held by tests that time kernels, for which there are some seconds.
static ALONE: Mutex<()> = Mutex::new(());

/// The program, whose kernels are timed.
fn command(cache: &str) -> Command {
    let mut command = generate(cache, "24");
    command.env(VARIANT_VARIABLE, "");
    command
}

fn on_device(cache: &str) -> Command {
    let mut command = command(cache);
    command.args(["-b", "opencl", "--gpu-attn", "--wait-for-gpu"]);
    command
}

/// Runs, expects the CPU's text; what was said.
#[track_caller]
fn goes_on(command: &mut Command) -> String {
    let expected = self::command("off").output().unwrap().stdout;
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = said(&stderr);
    assert!(status.success() && stdout == expected, "{command:?}: {status}: {said}");
    said
}

#[test]
fn every_variant_gives_the_same_text() {
    let Some(device) = device() else { return };
    let facts = device.info();
    for variant in VARIANTS.iter().filter(|v| is_exact_with(facts) && v.missing_feature(facts).is_none()) {
        let mut command = on_device(cache_dir().to_str().unwrap());
        assert_eq!(goes_on(command.env(VARIANT_VARIABLE, variant.name)), "", "{}", variant.name);
    }
}

#[test]
fn an_unknown_variant_is_one_line_of_error() {
    if device().is_none() {
        return;
    }
    for (name, code) in [("fast", 2), ("tile-four", 2), ("rows-dot-", 2)] {
        let mut command = on_device(cache_dir().to_str().unwrap());
        let out = command.env(VARIANT_VARIABLE, name).output().unwrap();
        let said = said(&out.stderr);
        assert!(out.status.code() == Some(code) && said.lines().count() == 1, "{name}: {said}");
        assert!(said.contains(name) && said.contains("use one of tile, floats"), "{said}");
    }
}

/// Tells whether there is a device whose kernels are timed and have the CPU's bits.
fn is_timed() -> bool {
    device().is_some_and(|device| device.info().compute_capability.is_none() && is_exact_with(device.info()))
}

/// A planted fault: the variant is left out with a line, and nothing is tried again.
#[test]
fn a_variant_that_is_wrong_or_does_not_compile_is_left_out() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_timed() {
        return;
    }
    if shim().is_none() {
        return;
    }
    let faults = [
        ("SHIM_WRONG", "gemm,-DBY_FLOATS,-DROWS_PER_ITEM=1", "gemm:floats is left out: it computes wrong"),
        // The plain kernel and what prepares its input come first.
        ("SHIM_FAULT", "clBuildProgram:4:-11:once", "is left out: "),
    ];
    for (variable, fault, expected) in faults {
        let own = TestDir::new();
        let run = |fault: &str| {
            let mut command = on_device(&own.0.to_string_lossy());
            if !fault.is_empty() {
                command.env("ANTIGRAVITY_OPENCL_LIB", shim().unwrap()).env(variable, fault);
            }
            goes_on(&mut command)
        };
        let said = run(fault);
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines.len() == 2 && lines[0].contains("timing kernels"), "{fault}: {said}");
        assert!(lines[1].contains(expected), "{fault}: {said}");
        assert_eq!(run(""), "", "{fault}: it is kept");
    }
}

/// Checks that all steps use the baseline if a variant is wrong with a step that it is not timed with.
#[test]
fn a_variant_that_is_wrong_with_one_step_is_not_used() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_timed() || shim().is_none() {
        return;
    }
    let own = TestDir::new();
    let run = || {
        let mut command = on_device(&own.0.to_string_lossy());
        command.env("ANTIGRAVITY_OPENCL_LIB", shim().unwrap()).env(VARIANT_VARIABLE, "floats");
        goes_on(command.env("SHIM_WRONG", "gemm,-DBY_FLOATS,-DSTEP_DOWN"))
    };
    for _ in 0..2 {
        let said = run();
        let expected = said.contains("computes wrong results") && said.contains("using baseline kernels");
        assert!(said.lines().count() == 1 && expected, "{said}");
    }
}

/// Kernels for few tokens at once that are wrong are followed by the baseline.
#[test]
fn kernels_for_few_tokens_that_are_wrong_are_done_without() {
    let Some(device) = device() else { return };
    if !is_exact_with(device.info()) || shim().is_none() {
        return;
    }
    for fault in ["gemm,-DFEW", "attend_one,-DSEVERAL"] {
        let prompts = TestDir::new();
        let file = prompts.0.join("prompts.jsonl");
        let line = "{\"prompt\": \"Once upon a time\", \"max_tokens\": 12, \"temperature\": 0}\n";
        std::fs::write(&file, line.repeat(3)).unwrap();
        let run = |flags: &[&str], fault: &str| {
            let mut command = Command::new(crate::support::command::binary());
            command.args([
                "generate",
                "--prompts",
                file.to_str().unwrap(),
                "--batch",
                "3",
                "-c",
                "100",
                "-q",
            ]);
            command.args(flags).env("ANTIGRAVITY_OPENCL_CACHE", &prompts.0).env(VARIANT_VARIABLE, "tile");
            command.env("ANTIGRAVITY_OPENCL_LIB", shim().unwrap());
            let out = command.env("SHIM_WRONG", fault).output().unwrap();
            assert!(out.status.success());
            let mut lines: Vec<String> =
                String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect();
            lines.sort();
            (lines, said(&out.stderr))
        };
        let device = ["-b", "opencl", "--cl-device", "0", "--gpu-attn"];
        let (expected, _) = run(&[], "");
        let (found, said) = run(&device, fault);
        assert_eq!(found, expected, "{fault}");
        assert!(said.lines().count() == 1 && said.contains("using baseline kernels"), "{fault}: {said}");
        assert_eq!(run(&device, fault).1, said, "the verdict is kept");
    }
}

/// A slow compiler uses up the time that many tokens have for it before anything but the plain kernel is there.
#[test]
fn a_form_is_tried_however_slow_the_compiler_is() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_timed() || shim().is_none() {
        return;
    }
    let own = TestDir::new();
    let mut doctor = Command::new(crate::support::command::binary());
    doctor
        .args(["doctor", "--tune", "--cl-device", "0"])
        .env("ANTIGRAVITY_OPENCL_CACHE", &own.0)
        .env(VARIANT_VARIABLE, "")
        .env("ANTIGRAVITY_OPENCL_LIB", shim().unwrap())
        .env("SHIM_FAULT", "clBuildProgram:1:slow:once");
    let out = doctor.output().unwrap();
    let table = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{}", said(&out.stderr));
    for (tokens, way) in [("many tokens", "gemm:floats "), ("one token", "gemv:rows ")] {
        let found = table.lines().any(|line| line.contains(tokens) && line.contains(way));
        assert!(found, "{tokens}: {table}");
    }
}

#[test]
fn a_variant_that_hangs_is_left_out_from_then_on() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = device() else { return };
    if device.info().compute_capability.is_some() || shim().is_none() {
        return;
    }
    let (own, before) = (TestDir::new(), TestDir::new());
    // A driver that compiles at the first launch takes as long as one that hangs; PoCL keeps what it has compiled.
    goes_on(&mut on_device(&before.0.to_string_lossy()));
    let mut hanging = on_device(&own.0.to_string_lossy());
    hanging.env("ANTIGRAVITY_OPENCL_LIB", shim().unwrap()).env("ANTIGRAVITY_OPENCL_LIMIT", "2");
    // The weights and the plain kernel are waited for before.
    let said = goes_on(hanging.env("SHIM_FAULT", "clFinish:6:hang"));
    assert!(said.contains("has not returned for") && said.contains("using the CPU"), "{said}");
    let again = goes_on(&mut on_device(&own.0.to_string_lossy()));
    assert!(again.contains("is left out: the driver crashed or hung on it"), "{again}");
    assert_eq!(goes_on(&mut on_device(&own.0.to_string_lossy())), "");
}
