//! The golden files of a real model on every path: every instruction set, emulated Arm, an OpenCL device, a batch, a
//! saved session, a conversation.

use super::SMOLLM;
use crate::device::qemu::EMULATOR;
use crate::error::{AtPath, Error, Result};
use crate::golden::case::{Case, read_cases};
use crate::parity::engine::Engine;
use crate::parity::execution_paths;
use crate::targets::ARM_LINUX;
use crate::test::report::{Tally, skip_missing};
use crate::test::{arm, runtimes};
use crate::{build, command};
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

/// The case of the default settings, and one that is short enough for emulated Arm.
const DEFAULT: &str = "default";
const SHORT: &str = "short";
/// The case whose prompt is longer than the cache of [`check_eviction`].
const LONG: &str = "long";
const PROMPT: &str = "Once upon a time, in a small village";
/// Three messages of a conversation.
const MESSAGES: &str = "What is gravity?\nWho described it first?\nSay it in one word.\n";

pub(super) fn check(engine: &Engine, tally: &mut Tally) -> Result<()> {
    let cases = read_cases(&build::model_dir(SMOLLM.name)?)?;
    let named = |name: &str| {
        let missing = || Error::Failed(format!("tests/golden/{}/{name}.json is missing", SMOLLM.name));
        cases.iter().find(|case| case.name == name).ok_or_else(missing)
    };
    let (default, short) = (named(DEFAULT)?, named(SHORT)?);
    for case in &cases {
        let outcome = check_case(case, &mut command(engine, case));
        tally.count(&format!("{} matches its golden file", case.name), outcome);
    }
    for set in instruction_sets(engine)? {
        let mut run = command(engine, default);
        run.env("ANTIGRAVITY_SIMD", &set).args(["--threads", "1", "--prefill-chunk", "3"]);
        tally.count(&format!("the same with {set}"), check_case(default, &mut run));
    }
    count_on_arm(engine, short, tally)?;
    count_on_device(engine, default, tally);
    let long = named(LONG)?;
    for policy in ["sliding", "snapkv", "h2o"] {
        tally.count(&format!("a text with {policy}"), check_eviction(engine, long, policy));
    }
    *tally += execution_paths::check_prompt(engine, SMOLLM.name, PROMPT, &[]);
    tally.count("a conversation of three turns", check_conversation(engine));
    Ok(())
}

fn command(engine: &Engine, case: &Case) -> Command {
    let mut command = engine.command("generate");
    command.args(&case.settings).args(&case.generate);
    command
}

fn check_case(case: &Case, command: &mut Command) -> Result<()> {
    case.check_output(&command::stdout(command)?)
}

/// The instruction sets that `doctor` lists.
fn instruction_sets(engine: &Engine) -> Result<Vec<String>> {
    let facts = command::stdout(&mut engine.command("doctor"))?;
    let facts = String::from_utf8_lossy(&facts);
    let line = facts.lines().find_map(|line| line.strip_prefix("instruction sets"));
    let sets = line.and_then(|line| line.split(['(', ';']).next()).unwrap_or_default();
    let sets: Vec<String> = sets.split([',', ' ']).filter(|s| !s.is_empty()).map(String::from).collect();
    if sets.is_empty() {
        return Err(Error::Failed(format!("`doctor` lists no instruction set: {facts}")));
    }
    Ok(sets)
}

/// Checks a few tokens on three kinds of Arm cores.
fn count_on_arm(engine: &Engine, case: &Case, tally: &mut Tally) -> Result<()> {
    if std::env::consts::ARCH == "aarch64" {
        return Ok(());
    }
    if let Some(missing) = arm::missing() {
        *tally += skip_missing(missing);
        return Ok(());
    }
    let program = build::build_unoptimised_for(ARM_LINUX, &build::model_dir(SMOLLM.name)?)?;
    for (cpu, _) in arm::CPUS {
        let mut run = Command::new(EMULATOR);
        run.arg(&program).arg("generate").arg("-m").arg(engine.model());
        run.args(&case.settings).args(&case.generate).args(["--threads", "1"]).env("QEMU_CPU", cpu);
        tally.count(&format!("the same on Arm's {cpu}"), check_case(case, &mut run));
    }
    Ok(())
}

fn count_on_device(engine: &Engine, case: &Case, tally: &mut Tally) {
    let Some(dir) = runtimes::intel() else {
        *tally += runtimes::without_intel();
        return;
    };
    for path in [&["opencl", "--gpu-attn"][..], &["opencl"], &["hybrid", "--switch-threshold", "12"]] {
        let mut run = engine.command("generate");
        run.args(&case.settings).args(case.generate.iter().filter(|flag| *flag != "--quiet"));
        run.args(["--cl-device", "0", "--wait-for-gpu", "--backend"]).args(path);
        run.env("ANTIGRAVITY_OPENCL_LIB", dir.join("libintelocl.so"));
        run.env("LD_LIBRARY_PATH", &dir).env("ANTIGRAVITY_OPENCL_CACHE", engine.file("opencl"));
        tally.count(&format!("the same with {}", path.join(" ")), check_on_device(case, &mut run));
    }
}

/// Checks the text, and by the last line of stderr that the OpenCL device computed it.
fn check_on_device(case: &Case, run: &mut Command) -> Result<()> {
    let out = command::output(run)?;
    let said = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() || !said.lines().next_back().is_some_and(|line| line.contains(", opencl (")) {
        return Err(Error::Failed(format!("`{}`: {}: {said}", command::show(run), out.status)));
    }
    case.check_output(&out.stdout)
}

/// Checks a prompt longer than the cache, in chunks of another size than the default.
fn check_eviction(engine: &Engine, case: &Case, policy: &str) -> Result<()> {
    let flags = ["--num-tokens", "32", "--max-seq-len", "256", "--eviction-window", "128"];
    let more = [&flags[..], &["--eviction-policy", policy, "--prefill-chunk", "100"]].concat();
    check_golden_text(&format!("{policy}.txt"), &engine.generate_text(&case.text, &more)?)
}

fn check_conversation(engine: &Engine) -> Result<()> {
    let mut run = engine.command("chat");
    run.args(["--quiet", "--temperature", "0", "--repetition-penalty", "1", "--num-tokens", "40"]);
    let mut chat = run
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| command::cannot_start(&run, e))?;
    let mut stdin = chat.stdin.take().expect("stdin is piped");
    stdin.write_all(MESSAGES.as_bytes()).map_err(|e| Error::Failed(format!("chat: {e}")))?;
    drop(stdin);
    let out = chat.wait_with_output().map_err(|e| Error::Failed(format!("chat: {e}")))?;
    check_golden_text("conversation.txt", &String::from_utf8_lossy(&out.stdout))
}

/// Compares a text with the golden one, which `ANTIGRAVITY_BLESS` rewrites.
fn check_golden_text(file: &str, printed: &str) -> Result<()> {
    let file = command::root().join("tests/golden").join(SMOLLM.name).join(file);
    if std::env::var_os("ANTIGRAVITY_BLESS").is_some() {
        fs::write(&file, printed).at(&file)?;
    }
    let expected = fs::read_to_string(&file).at(&file)?;
    if printed == expected {
        return Ok(());
    }
    Err(Error::Failed(format!("{printed:?} instead of {expected:?}")))
}
