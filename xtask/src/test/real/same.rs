//! One text of a real model, whichever way the program computes it: the golden files of `tests/golden` on every
//! instruction set, on emulated Arm, on an OpenCL device; in a batch, over a session, in a conversation.

use super::SMOLLM;
use crate::device::qemu::EMULATOR;
use crate::error::{Error, Result};
use crate::golden::case::{Case, cases, outcome};
use crate::parity::engine::Engine;
use crate::test::report::{Tally, skip};
use crate::test::{arm, runtimes};
use crate::{build, sh};
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

/// The case of the default settings, and one that emulated Arm computes in time.
const DEFAULT: &str = "default";
const SHORT: &str = "short";
/// The case whose prompt is longer than the cache of [`evicting`].
const LONG: &str = "long";
/// Three messages of a conversation.
const MESSAGES: &str = "What is gravity?\nWho described it first?\nSay it in one word.\n";

pub(super) fn check(engine: &Engine, tally: &mut Tally) -> Result<()> {
    let cases = cases(&build::model_dir(SMOLLM.name)?)?;
    let named = |name: &str| {
        let missing = || Error::Failed(format!("tests/golden/{}/{name}.json is missing", SMOLLM.name));
        cases.iter().find(|case| case.name == name).ok_or_else(missing)
    };
    let (default, short) = (named(DEFAULT)?, named(SHORT)?);
    for case in &cases {
        let told = tells(case, &mut command(engine, case));
        tally.count(&format!("{} is as its golden file says", case.name), told);
    }
    for set in instruction_sets(engine)? {
        let mut run = command(engine, default);
        run.env("ANTIGRAVITY_SIMD", &set).args(["--threads", "1", "--prefill-chunk", "3"]);
        tally.count(&format!("the same with {set}"), tells(default, &mut run));
    }
    on_arm(engine, short, tally)?;
    on_device(engine, default, tally);
    let long = named(LONG)?;
    for policy in ["sliding", "snapkv", "h2o"] {
        tally.count(&format!("a text with {policy}"), evicting(engine, long, policy));
    }
    tally.count("a batch tells each of its texts", batch(engine));
    tally.count("a saved text goes on as if it had not been interrupted", session(engine));
    tally.count("a conversation of three turns", conversation(engine));
    Ok(())
}

fn command(engine: &Engine, case: &Case) -> Command {
    let mut command = engine.command("generate");
    command.args(&case.settings).args(&case.generate);
    command
}

/// Runs the command, which tells this case.
fn tells(case: &Case, command: &mut Command) -> Result<()> {
    equal(case, &sh::stdout(command)?)
}

fn equal(case: &Case, printed: &[u8]) -> Result<()> {
    let found = outcome(&case.name, &String::from_utf8_lossy(printed))?;
    if found == case.expected {
        return Ok(());
    }
    Err(Error::Failed(format!("{found:?} instead of {:?}", case.expected)))
}

/// What `doctor` lists.
fn instruction_sets(engine: &Engine) -> Result<Vec<String>> {
    let facts = sh::stdout(&mut engine.command("doctor"))?;
    let facts = String::from_utf8_lossy(&facts);
    let line = facts.lines().find_map(|line| line.strip_prefix("instruction sets"));
    let sets = line.and_then(|line| line.split(['(', ';']).next()).unwrap_or_default();
    let sets: Vec<String> = sets.split([',', ' ']).filter(|s| !s.is_empty()).map(String::from).collect();
    if sets.is_empty() {
        return Err(Error::Failed(format!("`doctor` lists no instruction set: {facts}")));
    }
    Ok(sets)
}

/// A few tokens on cores of three kinds.
fn on_arm(engine: &Engine, case: &Case, tally: &mut Tally) -> Result<()> {
    if std::env::consts::ARCH == "aarch64" {
        return Ok(());
    }
    if let Some((what, remedy)) = arm::missing() {
        *tally += skip(&format!("{what} is missing"), &format!("install it with: {remedy}"));
        return Ok(());
    }
    let program = build::checked_for(arm::TARGET, &build::model_dir(SMOLLM.name)?)?;
    for (cpu, _) in arm::CPUS {
        let mut run = Command::new(EMULATOR);
        run.arg(&program).arg("generate").arg("-m").arg(engine.model());
        run.args(&case.settings).args(&case.generate).args(["--threads", "1"]).env("QEMU_CPU", cpu);
        tally.count(&format!("the same on Arm's {cpu}"), tells(case, &mut run));
    }
    Ok(())
}

fn on_device(engine: &Engine, case: &Case, tally: &mut Tally) {
    let Some(dir) = runtimes::intel() else {
        *tally += runtimes::without_intel();
        return;
    };
    for way in [&["opencl", "--gpu-attn"][..], &["opencl"], &["hybrid", "--switch-threshold", "12"]] {
        let mut run = engine.command("generate");
        run.args(&case.settings).args(case.generate.iter().filter(|flag| *flag != "--quiet"));
        run.args(["--cl-device", "0", "--wait-for-gpu", "--backend"]).args(way);
        run.env("ANTIGRAVITY_OPENCL_LIB", dir.join("libintelocl.so"));
        run.env("LD_LIBRARY_PATH", &dir).env("ANTIGRAVITY_OPENCL_CACHE", engine.file("opencl"));
        tally.count(&format!("the same with {}", way.join(" ")), by_device(case, &mut run));
    }
}

/// The text, where no other than the device told it: its end says who did.
fn by_device(case: &Case, run: &mut Command) -> Result<()> {
    let out = sh::output(run)?;
    let said = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() || !said.lines().next_back().is_some_and(|line| line.contains(", opencl (")) {
        return Err(Error::Failed(format!("`{}`: {}: {said}", sh::show(run), out.status)));
    }
    equal(case, &out.stdout)
}

/// A prompt that does not fit, in other chunks than by default.
fn evicting(engine: &Engine, case: &Case, policy: &str) -> Result<()> {
    let flags = ["--num-tokens", "32", "--max-seq-len", "256", "--eviction-window", "128"];
    let more = [&flags[..], &["--eviction-policy", policy, "--prefill-chunk", "100"]].concat();
    printed_as(&format!("{policy}.txt"), &engine.told(&case.text, &more)?)
}

fn expect(found: &str, expected: &str) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Failed(format!("{found:?} instead of {expected:?}"))) }
}

const PROMPTS: [&str; 3] = ["Water boils at", "1, 1, 2, 3, 5, 8,", "Once upon a time, in a small village"];

fn batch(engine: &Engine) -> Result<()> {
    let flags = ["--num-tokens", "16"];
    for (prompt, found) in PROMPTS.iter().zip(engine.batch(&PROMPTS, &flags)?) {
        expect(&found, &engine.told(prompt, &flags)?)?;
    }
    Ok(())
}

fn session(engine: &Engine) -> Result<()> {
    let file = engine.file("text.session");
    let _ = fs::remove_file(&file);
    let file = file.to_string_lossy();
    let whole = engine.told(PROMPTS[0], &["--num-tokens", "22"])?;
    let begun = engine.told(PROMPTS[0], &["--num-tokens", "10", "--session", &file])?;
    let so_far = format!("{}{begun}", PROMPTS[0]);
    let rest = engine.told(&so_far, &["--num-tokens", "12", "--session", &file])?;
    expect(&format!("{begun}{rest}"), &whole)
}

fn conversation(engine: &Engine) -> Result<()> {
    let mut run = engine.command("chat");
    run.args(["--quiet", "--temperature", "0", "--repetition-penalty", "1", "--num-tokens", "40"]);
    let mut chat =
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|e| sh::cannot_start(&run, e))?;
    let mut stdin = chat.stdin.take().expect("stdin is piped");
    stdin.write_all(MESSAGES.as_bytes()).map_err(|e| Error::Failed(format!("chat: {e}")))?;
    drop(stdin);
    let out = chat.wait_with_output().map_err(|e| Error::Failed(format!("chat: {e}")))?;
    printed_as("conversation.txt", &String::from_utf8_lossy(&out.stdout))
}

/// Whether that is what the golden text says; with `ANTIGRAVITY_BLESS` it says that from now on.
fn printed_as(file: &str, printed: &str) -> Result<()> {
    let file = sh::root().join("tests/golden").join(SMOLLM.name).join(file);
    if std::env::var_os("ANTIGRAVITY_BLESS").is_some() {
        fs::write(&file, printed).map_err(|e| Error::at(&file, e))?;
    }
    let expected = fs::read_to_string(&file).map_err(|e| Error::at(&file, e))?;
    expect(printed, &expected)
}
