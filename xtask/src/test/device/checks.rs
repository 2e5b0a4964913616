//! The checks, in order: the first deploys what the others use.

use super::stand::{Bench, Checked, Phone, Running, age, here, said, send};
use super::{Check, Verdict};
use crate::sh;
use crate::test::arm;
use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

pub const ALL: &[Check] = &[
    Check { name: "deploy brings every file once", run: deploys },
    Check { name: "one file is all of it", run: bundles },
    Check { name: "a story comes as it is told", run: streams },
    Check { name: "hostile words arrive as they are", run: quotes },
    Check { name: "piped input arrives", run: reads_stdin },
    Check { name: "exit codes and signals come back", run: exit_codes },
    Check { name: "Ctrl-C reaches the program", run: interrupts },
    Check { name: "a chat at a terminal, where Ctrl-C stops the answer only", run: chats },
    Check { name: "nothing runs on after the tool was killed", run: leaves_nothing },
    Check { name: "a closed pipe ends quietly", run: closed_pipe },
    Check { name: "a stream that breaks is an error", run: broken_stream },
    Check { name: "killed during a push", run: killed },
    Check { name: "storage full during a push", run: full },
    Check { name: "too little storage for a push", run: too_small },
    Check { name: "the device vanishes during a push", run: vanishes },
    Check { name: "storage that damages files", run: damages },
    Check { name: "no adb, no device, wrong serial number", run: unavailable },
    Check { name: "two devices", run: two_devices },
    Check { name: "the golden set through adb", run: golden_adb },
    Check { name: "the golden set in the emulator", run: |bench| golden_in(bench, "qemu") },
    Check { name: "the golden set on this machine", run: |bench| golden_in(bench, "local") },
    Check { name: "a golden mismatch names the layer", run: golden_mismatch },
    Check { name: "cargo test through the runner", run: runner },
];

/// The storage that all checks share.
const STORAGE: &str = "phone";
pub const PASSED: Checked<Verdict> = Ok(Verdict::Passed);

pub fn phone(bench: &Bench) -> Checked<Phone<'_>> {
    bench.phone(STORAGE, &[])
}

pub fn expect(holds: bool, what: impl FnOnce() -> String) -> Checked<()> {
    if holds { Ok(()) } else { Err(what()) }
}

fn deploys(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    // Remains of a deployment that was stopped.
    let remains = phone.deployed().join("antigravity.new");
    fs::create_dir_all(phone.deployed())
        .and_then(|()| fs::write(&remains, "x"))
        .map_err(|e| e.to_string())?;
    let missing = said(&mut phone.task("run", &[]))?;
    missing.refused(5, &[&phone.serial, "cargo xtask deploy"])?;
    let first = said(&mut phone.task("deploy", &[]))?;
    first.ended(0)?;
    expect(first.err.contains("all are verified"), || first.err.clone())?;
    expect(first.out.trim() == phone.deployed().to_string_lossy(), || format!("stdout is {}", first.out))?;
    expect(!remains.exists(), || "remains of an older deployment are still there".into())?;
    let second = said(&mut phone.task("deploy", &[]))?;
    second.ended(0)?;
    expect(second.err.contains("up to date") && !second.err.contains("pushing"), || second.err.clone())?;
    phone.runs()?;
    PASSED
}

fn bundles(bench: &Bench) -> Checked<Verdict> {
    let phone = bench.phone("bundle", &[])?;
    // What is there of another deployment.
    fs::create_dir_all(phone.deployed())
        .and_then(|()| fs::write(phone.deployed().join("tokenizer.json"), "x"))
        .map_err(|e| e.to_string())?;
    said(&mut phone.task("deploy", &["--bundle"]))?.ended(0)?;
    let there: Vec<_> = fs::read_dir(phone.deployed()).into_iter().flatten().flatten().collect();
    let names: Vec<_> = there.iter().map(|entry| entry.file_name()).collect();
    expect(names == ["antigravity"], || format!("there is {names:?}"))?;
    let words = ["generate", "--temp", "0", "-n", "6", "-q", "-p", "Once"];
    let run = said(&mut phone.task("run", &[&["--"], &words[..]].concat()))?;
    run.ended(0)?;
    let here = said(&mut here(&words))?;
    expect(run.out == here.out, || format!("there {:?}, here {:?}", run.out, here.out))?;
    PASSED
}

/// A text that does not end by itself.
const ENDLESS: &[&str] = &["--", "generate", "-n", "-1", "--ignore-eos", "--max-seq-len", "60000"];

fn streams(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let mut run = Running::start(&mut phone.task("run", &[]))?;
    run.read(20)?;
    let running = run.child.try_wait().map_err(|e| e.to_string())?.is_none();
    expect(running, || "the text came only when it was complete".into())?;
    let said = run.end()?;
    said.ended(0)?;
    expect(said.err.contains("TTFT: ") && !said.out.contains("TTFT"), || "stderr is not apart".into())?;
    PASSED
}

fn quotes(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let hostile = "-it's $HOME `id` $(id) \"x\" 'y' \\n \\ * ? ; & | < > # ! ~ {a,b}\n\ttwo  lines é日🦊 %s";
    let words = ["generate", "--temp", "0", "-n", "6", "-q", "--prompt", hostile];
    let there = said(&mut phone.task("run", &[&["--"], &words[..]].concat()))?;
    let here = said(&mut here(&words))?;
    there.ended(0)?;
    expect(there.out == here.out, || format!("there {:?}, here {:?}", there.out, here.out))?;
    PASSED
}

fn reads_stdin(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let words = ["generate", "--temp", "0", "-n", "6", "-q"];
    let mut task = phone.task("run", &[&["--"], &words[..], &["-f", "-"]].concat());
    let mut run = Running::start(task.stdin(Stdio::piped()))?;
    let mut stdin = run.child.stdin.take().expect("piped");
    stdin.write_all(b"Once upon a time").map_err(|e| e.to_string())?;
    drop(stdin);
    let there = run.end()?;
    there.ended(0)?;
    let here = said(&mut here(&[&words[..], &["-p", "Once upon a time"]].concat()))?;
    expect(there.out == here.out, || format!("there {:?}, here {:?}", there.out, here.out))?;
    PASSED
}

fn exit_codes(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let usage = said(&mut phone.task("run", &["--", "generate", "--no-such-flag"]))?;
    usage.refused(2, &["--no-such-flag"])?;
    let model = said(&mut phone.task("run", &["--", "generate", "-m", "/no/such/model"]))?;
    model.refused(3, &["/no/such/model"])?;
    let mut run = Running::start(&mut phone.task("run", ENDLESS))?;
    run.read(1)?;
    for (pid, _) in
        phone.processes().iter().filter(|(_, line)| line.starts_with("qemu") || line.contains("/qemu"))
    {
        send("KILL", *pid)?;
    }
    run.end()?.refused(137, &["signal 9", "memory"])?;
    PASSED
}

fn interrupts(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    for signal in ["INT", "TERM", "HUP"] {
        let mut run = Running::start(&mut phone.task("run", ENDLESS))?;
        run.read(1)?;
        run.signal(signal)?;
        let said = run.end()?;
        said.ended(130)?;
        expect(said.err.contains("stop: interrupt"), || said.err.clone())?;
        phone.idle()?;
    }
    PASSED
}

fn chats(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    // What to wait for, and what is then typed.
    let steps =
        ["> ", "Tell me a story\r", " the", "^C", "again to quit", "/stats\r", "messages: 1", "/exit\r"];
    let task = phone.task("run", &["--", "chat", "--temp", "0", "--ignore-eos"]);
    let mut terminal = std::process::Command::new("python3");
    terminal.arg(sh::root().join("tests/device/at_terminal.py")).args(steps).arg("--");
    terminal.arg(task.get_program()).args(task.get_args()).stdin(Stdio::null());
    for (name, value) in task.get_envs() {
        match value {
            Some(value) => terminal.env(name, value),
            None => terminal.env_remove(name),
        };
    }
    let said = said(&mut terminal)?;
    said.ended(0).map_err(|why| format!("{why}{}", said.out))?;
    expect(said.out.contains("Your next message continues from here."), || said.out.clone())?;
    // The terminal there is a terminal: the line editor is on, and the right edge is known.
    expect(said.out.contains("\x1b[?2004h"), || said.out.clone())?;
    phone.idle()?;
    PASSED
}

fn leaves_nothing(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let mut run = Running::start(&mut phone.task("run", ENDLESS))?;
    run.read(1)?;
    run.signal("KILL")?;
    run.child.wait().map_err(|e| e.to_string())?;
    phone.idle()?;
    PASSED
}

fn closed_pipe(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let mut run = Running::start(&mut phone.task("run", ENDLESS))?;
    run.read(10)?;
    let Running { mut child, stdout } = run;
    drop(stdout);
    let status = child.wait().map_err(|e| e.to_string())?;
    expect(status.success(), || format!("ended with {status}"))?;
    phone.idle()?;
    PASSED
}

fn broken_stream(bench: &Bench) -> Checked<Verdict> {
    let phone = bench.phone(STORAGE, &["--cut-shells", "exec "])?;
    let said = said(&mut phone.task("run", ENDLESS))?;
    said.refused(5, &[&phone.serial, "connection broke"])?;
    phone.idle()?;
    PASSED
}

/// Deploys to `phone`, where an older program is, and expects a failure with these words (no words: it is
/// killed in the middle). Whatever happened, the old program must be there and run, and the next
/// deployment must replace it.
fn fails_and_recovers(bench: &Bench, phone: Phone<'_>, words: &[&str]) -> Checked<Verdict> {
    let old = age(&phone.program())?;
    let deploy = Running::start(&mut phone.task("deploy", &[]))?;
    if words.is_empty() {
        let (new, end) = (phone.deployed().join("antigravity.new"), Instant::now() + Duration::from_secs(60));
        while !fs::metadata(&new).is_ok_and(|m| m.len() > 100_000) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        deploy.signal("KILL")?;
        deploy.end()?.ended(137)?;
    } else {
        let said = deploy.end()?;
        said.refused(5, words)?;
        expect(said.err.contains(&phone.serial), || format!("does not name the device: {}", said.err))?;
    }
    let program = phone.program();
    drop(phone);
    let phone = self::phone(bench)?;
    expect(fs::read(&program).is_ok_and(|now| now == old), || "the old program is gone".into())?;
    phone.runs()?;
    said(&mut phone.task("deploy", &[]))?.ended(0)?;
    expect(fs::read(&program).is_ok_and(|now| now.len() + 1 == old.len()), || "it was not replaced".into())?;
    phone.runs()?;
    PASSED
}

fn killed(bench: &Bench) -> Checked<Verdict> {
    fails_and_recovers(bench, bench.phone(STORAGE, &["--push-rate", "1000000"])?, &[])
}

fn full(bench: &Bench) -> Checked<Verdict> {
    let phone = bench.phone(STORAGE, &["--capacity", "1000000"])?;
    fails_and_recovers(bench, phone, &["No space left on device", "antigravity.new"])
}

fn too_small(bench: &Bench) -> Checked<Verdict> {
    let phone = bench.phone(STORAGE, &["--df-free-kb", "4000"])?;
    fails_and_recovers(bench, phone, &["4.10 MB free", "are needed"])
}

fn vanishes(bench: &Bench) -> Checked<Verdict> {
    fails_and_recovers(bench, bench.phone(STORAGE, &["--vanish-after", "1000000"])?, &["cannot push"])
}

fn damages(bench: &Bench) -> Checked<Verdict> {
    fails_and_recovers(bench, bench.phone(STORAGE, &["--damage"])?, &["arrived with another content"])
}

fn unavailable(bench: &Bench) -> Checked<Verdict> {
    for task in ["deploy", "run", "golden", "bench", "profile"] {
        let mut no_adb = bench.xtask(&[task, "--device", "adb"]);
        said(no_adb.env("PATH", "/nonexistent"))?.refused(5, &["adb is missing", "apt-get install adb"])?;
        said(&mut bench.xtask(&[task, "--serial", "nobody"]))?.refused(5, &["nobody"])?;
    }
    let phone = phone(bench)?;
    said(&mut bench.xtask(&["run", "--serial", "nobody"]))?.refused(5, &["nobody", &phone.serial])?;
    drop(phone);
    if bench.crowded {
        return Ok(Verdict::Skipped("other devices are attached", "unplug them"));
    }
    said(&mut bench.xtask(&["deploy"]))?.refused(5, &["no device", "USB debugging"])?;
    PASSED
}

fn two_devices(bench: &Bench) -> Checked<Verdict> {
    if bench.crowded {
        return Ok(Verdict::Skipped("other devices are attached", "unplug them"));
    }
    let one = phone(bench)?;
    said(&mut bench.xtask(&["run", "--", "generate", "-n", "2"]))?.ended(0)?;
    let two = bench.phone("second phone", &[])?;
    said(&mut bench.xtask(&["run"]))?.refused(5, &[&one.serial, &two.serial, "--serial"])?;
    said(&mut two.task("deploy", &[]))?.ended(0)?;
    two.runs()?;
    let mut by_environment = bench.xtask(&["run", "--", "generate", "-n", "2"]);
    said(by_environment.env("ANDROID_SERIAL", &two.serial))?.ended(0)?;
    PASSED
}

/// The table has a line a golden file, and all are equal.
fn all_equal(table: &str) -> Checked<()> {
    let files = fs::read_dir(sh::root().join("tests/golden/story")).map_err(|e| e.to_string())?.count();
    let rows = table.lines().filter(|l| l.matches("equal").count() == 3).count();
    expect(rows == files && !table.contains("DIFFERS"), || format!("{rows} of {files} are equal:\n{table}"))
}

fn golden_adb(bench: &Bench) -> Checked<Verdict> {
    let said = said(&mut phone(bench)?.task("golden", &["--device", "adb"]))?;
    said.ended(0)?;
    all_equal(&said.out)?;
    eprint!("{}", said.out);
    PASSED
}

fn golden_in(bench: &Bench, device: &str) -> Checked<Verdict> {
    let said = said(&mut bench.xtask(&["golden", "--device", device]))?;
    said.ended(0)?;
    all_equal(&said.out)?;
    PASSED
}

/// The emulator of this device takes another model than the one that was checked.
fn golden_mismatch(bench: &Bench) -> Checked<Verdict> {
    let storage = bench.dir.join(STORAGE);
    let (good, bad) = (storage.join("antigravity/story"), storage.join("bad"));
    let prepare = || -> std::io::Result<()> {
        fs::create_dir_all(&bad)?;
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            fs::copy(good.join(name), bad.join(name))?;
        }
        let packed = "model.packed.safetensors";
        let mut bytes = fs::read(good.join(packed))?;
        let middle = bytes.len() / 2;
        bytes[middle..middle + 4096].iter_mut().for_each(|b| *b ^= 0x11);
        fs::write(bad.join(packed), bytes)?;
        let emulator = bench.dir.join("emulator");
        let script =
            format!("#!/bin/sh\nANTIGRAVITY_MODEL={} exec qemu-aarch64-static \"$@\"\n", bad.display());
        fs::write(&emulator, script)?;
        fs::set_permissions(&emulator, std::os::unix::fs::PermissionsExt::from_mode(0o755))
    };
    prepare().map_err(|e| e.to_string())?;
    let emulator = bench.dir.join("emulator");
    let phone = bench.phone(STORAGE, &["--emulator", &emulator.to_string_lossy()])?;
    let said = said(&mut phone.task("golden", &[]))?;
    said.refused(6, &[&phone.serial, "expected", "first differing layer: "])?;
    expect(said.out.contains("DIFFERS"), || said.out.clone())?;
    PASSED
}

fn runner(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let xtask = bench.xtask(&[]);
    let mut test = arm::tests().map_err(|e| e.to_string())?;
    test.args(["--test", "engine", "--", "random_interleavings"]).stdin(Stdio::null());
    for (name, value) in xtask.get_envs() {
        match value {
            Some(value) => test.env(name, value),
            None => test.env_remove(name),
        };
    }
    test.env(
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER",
        format!("{} runner", xtask.get_program().to_string_lossy()),
    );
    let said = said(test.env("ANDROID_SERIAL", &phone.serial))?;
    said.ended(0)?;
    expect(said.out.contains("1 passed") && said.err.contains(&phone.serial), || said.out.clone())?;
    PASSED
}
