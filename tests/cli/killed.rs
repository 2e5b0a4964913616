//! The marker of a running model: what the start after a kill says, and that nothing else leaves one.

use crate::support::command::*;
use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Its state goes into `dir`, else nowhere.
fn with_state(dir: &TestDir, args: &[&str]) -> Command {
    let mut command = antigravity(args).into_std();
    command.env("XDG_STATE_HOME", &dir.0).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Its state goes into `dir`, and there is a little less memory than the run may touch.
fn where_memory_is_short(dir: &TestDir, args: &[&str]) -> Command {
    let slots = args.iter().position(|&a| a == "-c").map_or("2048", |at| args[at + 1]);
    let plan = antigravity(["plan", "--format", "json", "-c", slots]).text();
    let plan: serde_json::Value = serde_json::from_str(&plan).expect("JSON");
    let bytes = |key: &str| plan[key].as_u64().expect("bytes");
    let mib = bytes("need_bytes").div_ceil(1 << 20);
    assert!(mib << 20 < bytes("peak_bytes"), "{plan}");
    let mut command = with_state(dir, args);
    command.env("ANTIGRAVITY_MEMORY_MIB", mib.to_string());
    command
}

const ENDLESS: [&str; 6] = ["generate", "-n", "-1", "--ignore-eos", "-p", "Once"];
const SHORT: [&str; 5] = ["generate", "-n", "1", "-p", "Once"];

/// A generation that goes on, its first byte read.
fn running(dir: &TestDir) -> (Child, ChildStdout) {
    begun(where_memory_is_short(dir, &ENDLESS))
}

fn begun(mut command: Command) -> (Child, ChildStdout) {
    let mut child = command.spawn().expect("the binary starts");
    let mut out = child.stdout.take().expect("piped");
    out.read_exact(&mut [0]).expect("some text");
    (child, out)
}

/// Names of the markers in the state directory, where other things lie too.
fn markers(dir: &TestDir) -> Vec<String> {
    let beside = binary().parent().expect("a folder").to_path_buf();
    let place = if cfg!(target_os = "android") { beside } else { dir.0.join("antigravity") };
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".running")).collect()
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(status.expect("a kill program").success());
}

/// The warning of a run, if it has one.
fn warning(dir: &TestDir, args: &[&str]) -> Option<String> {
    let said = run_command(with_state(dir, args));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let lines: Vec<&str> = said.err.lines().filter(|l| l.contains("killed")).collect();
    assert!(lines.len() < 2, "{}", said.err);
    lines.first().map(|l| l.to_string())
}

#[test]
fn the_start_after_a_kill_suggests_less_once() {
    let dir = TestDir::new();
    let (mut child, out) = running(&dir);
    assert_eq!(markers(&dir).len(), 1);
    // Another process is no sign of a kill, and takes its own marker away only.
    assert_eq!(warning(&dir, &SHORT), None);
    assert_eq!(markers(&dir).len(), 1);
    signal(&child, "-KILL");
    child.wait().expect("it ends");
    drop(out);
    // Commands that run no model say nothing about it.
    assert_eq!(warning(&dir, &["plan"]), None);
    assert_eq!(warning(&dir, &["doctor"]), None);
    let line = warning(&dir, &SHORT).expect("a warning");
    mentions(&line, &["warning: ", "MiB", "try --max-seq-len 1024 --prefill-chunk 32 (planned: "]);
    assert_eq!(warning(&dir, &SHORT), None);
    assert!(markers(&dir).is_empty());
}

#[test]
fn a_kill_where_memory_was_plentiful_is_nobodys_business() {
    let dir = TestDir::new();
    let (mut child, _out) = begun(with_state(&dir, &ENDLESS));
    assert_eq!(markers(&dir).len(), 1);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert_eq!(warning(&dir, &SHORT), None);
    assert!(markers(&dir).is_empty());
}

#[test]
fn who_has_chosen_less_or_asked_for_quiet_is_left_alone() {
    for args in
        [[&SHORT[..], &["-q"]].concat(), [&SHORT[..], &["-c", "1024", "--prefill-chunk", "32"]].concat()]
    {
        let dir = TestDir::new();
        let (mut child, _out) = running(&dir);
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert_eq!(warning(&dir, &args), None);
        assert!(markers(&dir).is_empty());
    }
}

#[test]
fn what_is_suggested_can_be_typed() {
    let dir = TestDir::new();
    let (mut child, _out) = running(&dir);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let more = ["--kv-type", "f16", "-c", "4096"];
    let line = warning(&dir, &[&SHORT[..], &more].concat()).expect("a warning");
    let (_, advice) = line.split_once("; try ").expect("an advice");
    let flags: Vec<&str> = advice.split(" (planned").next().unwrap_or("").split(' ').collect();
    assert_eq!(flags, ["--kv-type", "q4", "--max-seq-len", "2048", "--prefill-chunk", "32"]);
    antigravity(SHORT).args(&flags).text();
}

#[test]
fn orderly_ends_leave_nothing() {
    let dir = TestDir::new();
    assert_eq!(warning(&dir, &SHORT), None);
    for (signals, code) in
        [(&["-INT"][..], Some(130)), (&["-INT", "-INT"], Some(130)), (&["-TERM"], None), (&["-HUP"], None)]
    {
        let (mut child, mut out) = running(&dir);
        for name in signals {
            signal(&child, name);
        }
        let _ = out.read_to_end(&mut Vec::new());
        assert_eq!(child.wait().expect("it ends").code(), code, "{signals:?}");
        assert_eq!(markers(&dir), [""; 0], "{signals:?}");
    }
    // Errors, with the model loaded and before.
    let long = "once upon a time ".repeat(20);
    for args in [&["generate", "-c", "16", "-p", &long][..], &["generate", "-p", "x", "-m", "/no/such"]] {
        let status = with_state(&dir, args).output().expect("the binary starts").status;
        assert!(!status.success());
        assert_eq!(markers(&dir), [""; 0]);
    }
    // A reader that leaves.
    let (mut child, out) = running(&dir);
    drop(out);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert_eq!(markers(&dir), [""; 0]);
}

#[test]
fn no_place_for_a_marker_is_no_error() {
    let temp = TestDir::new();
    let file = temp.write("file", "");
    let said = antigravity(SHORT).env("XDG_STATE_HOME", file).run();
    assert_eq!(said.code, Some(0), "{}", said.err);
}
