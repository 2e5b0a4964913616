//! Tests of devices through the real `adb`, with a fake phone: `tests/device/fake_adbd.py` on loopback, which runs the
//! Arm program in an emulator.

mod harness;

use super::report::{Tally, skip_missing};
use super::{Outcome, arm};
use crate::error::Error;
use crate::targets::ARM_LINUX;
use crate::{build, command};
use harness::{AdbHarness, Checked, expect, run_to_end};
use std::fs;
use std::process::{Command, Stdio};

type Check = fn(&AdbHarness) -> Checked<()>;

/// The checks, in order: the first one deploys for the others.
const CHECKS: [(&str, Check); 5] = [
    ("deploy copies every file once", check_deploy),
    ("hostile words arrive unchanged, exit codes are returned", check_run),
    ("a chat at a terminal, where Ctrl-C stops only the answer", check_chat),
    ("the golden set through adb", check_golden),
    ("a broken stream is an error, and nothing keeps running", check_broken_stream),
];

pub fn run() -> Outcome {
    if let Some(missing) = missing() {
        return Ok(skip_missing(missing));
    }
    // Built first, so that no check waits for a compiler.
    let model = build::model_dir("story")?;
    build::build_tested_for(ARM_LINUX, &model)?;
    build::build_tested(&model)?;
    let harness = AdbHarness::start().map_err(Error::Failed)?;
    let mut tally = Tally::default();
    for (promise, check) in CHECKS {
        tally.count(promise, check(&harness).map_err(Error::Failed));
    }
    Ok(tally)
}

/// The first missing program, and the command that installs it.
fn missing() -> Option<(&'static str, &'static str)> {
    let programs = [("adb", "sudo apt-get install adb"), ("python3", "sudo apt-get install python3")];
    programs.into_iter().find(|(program, _)| !command::is_on_path(program)).or_else(arm::missing)
}

fn check_deploy(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&[])?;
    phone.run_task("run", &[])?.was_refused(5, &[&phone.serial, "cargo xtask deploy"])?;
    // Remains of an interrupted deployment.
    let remains = phone.deployed().join("antigravity.new");
    let written = fs::create_dir_all(phone.deployed()).and_then(|()| fs::write(&remains, "x"));
    written.map_err(|e| e.to_string())?;
    let first = phone.run_task("deploy", &[])?;
    first.ended_with(0)?;
    expect(first.err.contains("all are verified"), || first.err.clone())?;
    expect(first.out.trim() == phone.deployed().to_string_lossy(), || format!("stdout is {}", first.out))?;
    expect(!remains.exists(), || "remains of an older deployment are still there".into())?;
    let second = phone.run_task("deploy", &[])?;
    second.ended_with(0)?;
    expect(second.err.contains("up to date") && !second.err.contains("pushing"), || second.err.clone())
}

fn check_run(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&[])?;
    let hostile = "-it's $HOME `id` $(id) \"x\" 'y' \\n \\ * ? ; & | < > # ! ~ {a,b}\n\ttwo  lines é日🦊 %s";
    let words = ["generate", "--temp", "0", "-n", "6", "-q", "--prompt", hostile];
    let there = phone.run_task("run", &[&["--"], &words[..]].concat())?;
    there.ended_with(0)?;
    let mut program = Command::new(build::debug_binary(&[]));
    let here = run_to_end(program.args(words).arg("-m").arg(command::root().join("models/story")))?;
    expect(there.out == here.out, || format!("there {:?}, here {:?}", there.out, here.out))?;
    phone.run_task("run", &["--", "generate", "-m", "/no/such/model"])?.was_refused(3, &["/no/such/model"])
}

fn check_chat(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&[])?;
    // Texts to wait for, each followed by the keys to type.
    let steps =
        ["> ", "Tell me a story\r", " the", "^C", "again to quit", "/stats\r", "messages: 1", "/exit\r"];
    let task = phone.task("run", &["--", "chat", "--temp", "0", "--ignore-eos"]);
    let mut terminal = Command::new("python3");
    terminal.arg(command::root().join("tests/device/at_terminal.py")).args(steps).arg("--");
    terminal.arg(task.get_program()).args(task.get_args()).stdin(Stdio::null());
    for (name, value) in task.get_envs() {
        match value {
            Some(value) => terminal.env(name, value),
            None => terminal.env_remove(name),
        };
    }
    let shown = run_to_end(&mut terminal)?;
    shown.ended_with(0)?;
    expect(shown.out.contains("Your next message continues from here."), || shown.out.clone())?;
    // There is a terminal on the device: the line editor is on.
    expect(shown.out.contains("\x1b[?2004h"), || shown.out.clone())?;
    phone.wait_until_idle()
}

fn check_golden(harness: &AdbHarness) -> Checked<()> {
    let table = harness.phone(&[])?.run_task("golden", &["--device", "adb"])?;
    table.ended_with(0)?;
    let files = fs::read_dir(command::root().join("tests/golden/story")).map_err(|e| e.to_string())?.count();
    let equal = table.out.lines().filter(|l| l.matches("equal").count() == 3).count();
    expect(equal == files, || format!("{equal} of {files} are equal:\n{}", table.out))
}

fn check_broken_stream(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&["--cut-shells", "exec "])?;
    let words = ["--", "generate", "-n", "-1", "--ignore-eos", "--max-seq-len", "60000"];
    phone.run_task("run", &words)?.was_refused(5, &[&phone.serial, "connection broke"])?;
    phone.wait_until_idle()
}
