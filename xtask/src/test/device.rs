//! Tests of devices through the real `adb`, with a fake phone: `tests/device/fake_adbd.py` on loopback, which runs the
//! Arm program in an emulator.

mod harness;

use super::report::{Tally, skip_missing};
use super::{Outcome, arm};
use crate::error::Error;
use crate::run::serve::free_port;
use crate::targets::ARM_LINUX;
use crate::{build, command};
use harness::{AdbHarness, Checked, TaskOutput, expect, run_to_end};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

type Check = fn(&AdbHarness) -> Checked<()>;

/// The checks, in order: the first one deploys for the others.
const CHECKS: [(&str, Check); 7] = [
    ("deploy copies every file once, and says what to type", check_deploy),
    ("hostile words arrive unchanged, exit codes are returned", check_run),
    ("the statistics come after prompt and text, in a pipe and at a terminal", check_order),
    ("a server has one address, the one here", check_server),
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
    let next: Vec<&str> = first.err.lines().rev().take(3).collect();
    let run = format!("cargo xtask run --serial {}", phone.serial);
    let ends = [format!("{run} --open -- serve"), format!("{run} -- chat"), run];
    expect(next.iter().zip(&ends).all(|(line, end)| line.ends_with(end.as_str())), || first.err.clone())?;
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

fn check_order(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&[])?;
    let words = ["--", "generate", "--temp", "0", "-n", "40", "--prompt", "Once upon"];
    let text = phone.run_task("run", &words)?.out;
    let task = phone.task("run", &words);
    let mut piped = in_shell("exec \"$0\" \"$@\" 2>&1", &task);
    let piped = run_to_end(&mut piped)?.out;
    let after = piped.strip_prefix(text.as_str()).filter(|rest| rest.starts_with("TTFT: "));
    expect(after.is_some(), || piped.clone())?;
    let shown = at_terminal(&task, &[])?.out.replace('\r', "");
    let whole = format!("Once upon\x1b[0m{text}\x1b[2mTTFT: ");
    expect(shown.contains(&whole), || shown.clone())
}

/// A task run by a script of this machine's shell.
fn in_shell(script: &str, task: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(task.get_program()).args(task.get_args());
    copy_environment(&mut shell, task);
    shell
}

fn copy_environment(to: &mut Command, task: &Command) {
    for (name, value) in task.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}

/// Runs a task at a terminal. The steps are texts to wait for, each followed by the keys to type.
fn at_terminal(task: &Command, steps: &[&str]) -> Checked<TaskOutput> {
    let mut terminal = Command::new("python3");
    terminal.arg(command::root().join("tests/device/at_terminal.py")).args(steps).arg("--");
    terminal.arg(task.get_program()).args(task.get_args()).stdin(Stdio::null());
    copy_environment(&mut terminal, task);
    let shown = run_to_end(&mut terminal)?;
    shown.ended_with(0)?;
    Ok(shown)
}

fn check_server(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&[])?;
    let port = free_port().map_err(|e| e.to_string())?;
    let mut task = phone.task("run", &["--port", &port.to_string(), "--", "serve", "--port", "0"]);
    let server = task.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut server = server.map_err(|e| e.to_string())?;
    let mut line = String::new();
    let _ = BufReader::new(server.stdout.take().expect("piped")).read_line(&mut line);
    let get = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])";
    let answer = run_to_end(Command::new("python3").args(["-c", get, &format!("{}health", line.trim())]));
    let _ = Command::new("kill").args(["-INT", &server.id().to_string()]).status();
    let out = server.wait_with_output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    expect(line == format!("http://127.0.0.1:{port}/\n"), || format!("{line}{said}"))?;
    expect(said.matches("http://").count() == 1 && said.contains(line.trim()), || said.clone())?;
    answer?.ended_with(0)?;
    phone.wait_until_idle()
}

fn check_chat(harness: &AdbHarness) -> Checked<()> {
    let phone = harness.phone(&[])?;
    // Texts to wait for, each followed by the keys to type.
    let steps =
        ["> ", "Tell me a story\r", " the", "^C", "again to quit", "/stats\r", "messages: 1", "/exit\r"];
    let task = phone.task("run", &["--", "chat", "--temp", "0", "--ignore-eos"]);
    let shown = at_terminal(&task, &steps)?;
    expect(shown.out.contains("Your next message continues from here."), || shown.out.clone())?;
    // There is a terminal on the device: the line editor is on.
    expect(shown.out.contains("\x1b[?2004h"), || shown.out.clone())?;
    at_terminal(&task, &["> ", "^D"])?;
    let piped = phone.task("run", &["--", "chat", "--temp", "0", "-n", "9"]);
    let piped = run_to_end(&mut in_shell("echo 'Tell me a story' | \"$0\" \"$@\"", &piped))?;
    piped.ended_with(0)?;
    expect(piped.out.split(' ').count() > 3 && !piped.out.contains('\x1b'), || piped.out.clone())?;
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
