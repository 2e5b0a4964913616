//! The checks of what measures on a device: `bench` and `profile`. They use what the other checks deployed.

use super::checks::{PASSED, expect, phone};
use super::stand::{Bench, Checked, Phone, Running, Said, said};
use super::{Check, Verdict};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub const ALL: &[Check] = &[
    Check { name: "bench through adb", run: bench_adb },
    Check { name: "bench with Android's services", run: bench_services },
    Check { name: "bench in the emulator", run: |bench| bench_in(bench, "qemu") },
    Check { name: "bench on this machine", run: |bench| bench_in(bench, "local") },
    Check { name: "bench passes a refusal on", run: bench_refused },
    Check { name: "Ctrl-C ends a bench", run: bench_interrupted },
    Check { name: "profile through adb", run: profile_adb },
    Check { name: "profile on this machine", run: profile_local },
    Check { name: "profile ends after its seconds", run: profile_seconds },
    Check { name: "an interrupted profile is written", run: profile_interrupted },
    Check { name: "nothing samples on after the tool was killed", run: profile_killed },
];

/// Rows that take little time.
const QUICK: &[&str] = &["--", "-p", "8", "-n", "4", "-r", "1", "-t", "1"];

fn json(file: &Path) -> Checked<Value> {
    let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))
}

/// Both rows, both starts and every run are in the tables and in the file, which is returned.
fn measured(said: &Said, file: &Path, runs: usize) -> Checked<Value> {
    said.ended(0)?;
    for word in ["| pp8 ", "| tg4 ", "| cold ", "| warm ", "cores used"] {
        expect(said.out.contains(word), || format!("no {word:?} in:\n{}", said.out))?;
    }
    let value = json(file)?;
    let positive = |v: &Value| v.as_f64().is_some_and(|x| x > 0.0);
    let all = value["runs"].as_array().filter(|all| all.len() == runs);
    let all = all.ok_or_else(|| format!("not {runs} runs: {}", value["runs"]))?;
    for run in all {
        let start = &run["warm_start"];
        expect(positive(&start["first_token_ms"]) && positive(&start["load_ms"]), || start.to_string())?;
        let cores = run["cores_used"].as_array().is_some_and(|c| !c.is_empty());
        expect(cores, || "no core did the work".into())?;
    }
    let rows = value["rows"].as_array().is_some_and(|r| r.len() == 2);
    expect(rows && positive(&value["rows"][0]["tokens_per_second"]), || value["rows"].to_string())?;
    Ok(value)
}

fn bench_adb(bench: &Bench) -> Checked<Verdict> {
    let (phone, file) = (phone(bench)?, bench.dir.join("adb.json"));
    let flags = ["--runs", "2", "--cool-down", "0", "--json", &file.to_string_lossy()];
    let said = said(&mut phone.task("bench", &[&flags[..], QUICK].concat()))?;
    let value = measured(&said, &file, 2)?;
    expect(value["device"] == phone.serial.as_str(), || value["device"].to_string())?;
    phone.idle()?;
    PASSED
}

/// Puts a program into the search path of the device's shell.
fn program(phone: &Phone<'_>, name: &str, script: &str) -> Checked<PathBuf> {
    let file = phone.root.join("bin").join(name);
    let write = || {
        fs::write(&file, format!("#!/bin/sh\n{script}\n"))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))
    };
    write().map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(file)
}

/// What Android's services say, names that would break a table or a page among it.
const SERVICES: &str = r#"case $1 in
thermalservice) echo "Thermal Status: 1"; echo "	Temperature{mValue=47.5, mType=0, mName=CPU0|<b>, mStatus=0}"
echo "	Temperature{mValue=36.25, mType=3, mName=skin, mStatus=0}"; echo "	Temperature{mValue=zzz";;
battery) printf '  level: 83\n  temperature: 287\n\033[2J  level: x\n';;
esac"#;

fn bench_services(bench: &Bench) -> Checked<Verdict> {
    let (phone, file) = (phone(bench)?, bench.dir.join("services.json"));
    let services = program(&phone, "dumpsys", SERVICES)?;
    let flags = ["--runs", "1", "--json", &file.to_string_lossy()];
    let said = said(&mut phone.task("bench", &[&flags[..], QUICK].concat()));
    let _ = fs::remove_file(services);
    let said = said?;
    let value = measured(&said, &file, 1)?;
    expect(!said.out.contains("No temperature") && !said.out.contains('\u{1b}'), || said.out.clone())?;
    let start = &value["runs"][0]["start"];
    expect(start["throttling"] == "light" && start["battery"]["percent"] == 83.0, || start.to_string())?;
    let zones = start["temperatures"].as_array().is_some_and(|t| t.iter().any(|t| !t["zone"].is_null()));
    if zones {
        return Ok(Verdict::Skipped("this machine's own sensors hide the service's", "nothing to install"));
    }
    expect(said.out.contains(" 47.5 |"), || said.out.clone())?;
    let first = &value["runs"][0]["sampled"]["samples"][0]["celsius"];
    expect(first[0] == 47.5 && first[1] == 36.25, || format!("sampled {first}"))?;
    PASSED
}

fn bench_in(bench: &Bench, device: &str) -> Checked<Verdict> {
    let file = bench.dir.join(format!("{device}.json"));
    let flags = ["bench", "--device", device, "--runs", "1", "--json", &file.to_string_lossy()];
    let said = said(&mut bench.xtask(&[&flags[..], QUICK].concat()))?;
    measured(&said, &file, 1)?;
    PASSED
}

fn bench_refused(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let flag = said(&mut phone.task("bench", &["--runs", "1", "--", "--no-such-flag"]))?;
    flag.refused(2, &["--no-such-flag"])?;
    said(&mut phone.task("bench", &["--", "-o", "md"]))?.refused(2, &["--json"])?;
    PASSED
}

fn bench_interrupted(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let words = ["--runs", "1", "--", "-p", "512", "-n", "512", "-r", "100"];
    let running = Running::start(&mut phone.task("bench", &words))?;
    let end = Instant::now() + Duration::from_secs(60);
    while !phone.processes().iter().any(|(_, line)| line.contains("--output json")) {
        expect(Instant::now() < end, || "it does not begin".into())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    // Right after its start the program cannot yet tell an interruption from its end.
    std::thread::sleep(Duration::from_secs(2));
    running.signal("INT")?;
    running.end()?.ended(130)?;
    phone.idle()?;
    PASSED
}

/// The three files of a profile, whose directory or page is all that is on stdout.
fn profiled(said: &Said) -> Checked<(Value, Value, String)> {
    said.ended(0)?;
    let path = Path::new(said.out.trim());
    let dir = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let page = fs::read_to_string(dir.join("index.html")).map_err(|e| format!("{}: {e}", said.out))?;
    let (profile, trace) = (json(&dir.join("profile.json"))?, json(&dir.join("trace.json"))?);
    let _ = fs::remove_dir_all(dir);
    expect(profile["schema"] == 1 && profile["clock"]["aligned"] == true, || profile["clock"].to_string())?;
    let samples = profile["samples"].as_array().map_or(&[][..], Vec::as_slice);
    let memory = samples.iter().any(|s| s["rss_bytes"].as_u64() > Some(1 << 20));
    expect(memory && samples.iter().all(|s| s["t"].as_f64() >= Some(0.0)), || format!("{samples:?}"))?;
    let events = trace["traceEvents"].as_array().map_or(&[][..], Vec::as_slice);
    for (phase, name) in [("X", "attend"), ("C", "memory MiB"), ("C", "tokens/s"), ("M", "process_name")] {
        let there = events.iter().any(|e| e["ph"] == phase && e["name"] == name);
        expect(there, || format!("no event {phase} {name} in the trace"))?;
    }
    // One clock: the steps lie within what was sampled, or at most a little before or after.
    let last = samples.last().and_then(|s| s["t"].as_f64()).unwrap_or(0.0);
    let span = |e: &&Value| e["ph"] == "X";
    let within = |e: &Value| e["ts"].as_f64().is_some_and(|ts| ts > -0.1e6 && ts < (last + 3.0) * 1e6);
    expect(events.iter().filter(span).all(within), || format!("steps outside of 0 to {last} s"))?;
    for title in ["Speed", "Time per step", "Memory of the program"] {
        expect(page.contains(&format!("<figcaption>{title}<")), || format!("no chart {title}"))?;
    }
    Ok((profile, trace, page))
}

fn profile_adb(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let flags = ["-n", "24", "--interval", "50", "--open", "--", "--prompt", "The <fox>", "--temp", "0"];
    let services = program(&phone, "dumpsys", SERVICES)?;
    let said = said(&mut phone.task("profile", &flags));
    let _ = fs::remove_file(services);
    let said = said?;
    expect(said.out.trim().ends_with("/index.html"), || format!("stdout is {}", said.out))?;
    let (profile, _, page) = profiled(&said)?;
    expect(profile["decode"]["tokens"] == 23, || profile["decode"].to_string())?;
    expect(page.contains("The \\u003cfox>") && !page.contains("<fox>"), || "not escaped".into())?;
    let throttling = &profile["start"]["throttling"];
    expect(throttling.as_str().is_some_and(|t| t.contains("light")), || throttling.to_string())?;
    let left = phone.deployed().join("profile-trace.json");
    expect(!left.exists(), || format!("{} was left there", left.display()))?;
    unsampled(&phone)?;
    PASSED
}

fn profile_local(bench: &Bench) -> Checked<Verdict> {
    let said = said(&mut bench.xtask(&["profile", "--device", "local", "-n", "200", "--interval", "20"]))?;
    let (profile, _, _) = profiled(&said)?;
    expect(profile["decode"]["tokens"].as_u64() > Some(1), || profile["decode"].to_string())?;
    PASSED
}

fn profile_seconds(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let flags = ["--seconds", "6", "--", "--max-seq-len", "60000"];
    let (profile, _, _) = profiled(&said(&mut phone.task("profile", &flags))?)?;
    let seconds = profile["seconds"].as_f64().unwrap_or(0.0);
    expect((1.0..60.0).contains(&seconds), || format!("{seconds} s"))?;
    phone.idle()?;
    unsampled(&phone)?;
    PASSED
}

/// A profile that goes on until it is told to end, once it tells its story.
fn endless(phone: &Phone<'_>) -> Checked<Running> {
    let words = ["-n", "-1", "--interval", "50", "--", "--ignore-eos", "--max-seq-len", "60000"];
    let running = Running::start(&mut phone.task("profile", &words))?;
    let end = Instant::now() + Duration::from_secs(60);
    while phone.commands("smaps_rollup").is_empty() || phone.processes().is_empty() {
        expect(Instant::now() < end, || "it does not begin".into())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(2));
    Ok(running)
}

fn profile_interrupted(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let running = endless(&phone)?;
    running.signal("INT")?;
    profiled(&running.end()?)?;
    phone.idle()?;
    unsampled(&phone)?;
    PASSED
}

fn profile_killed(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let mut running = endless(&phone)?;
    running.signal("KILL")?;
    running.child.wait().map_err(|e| e.to_string())?;
    phone.idle()?;
    unsampled(&phone)?;
    PASSED
}

/// Waits until no loop samples there.
fn unsampled(phone: &Phone<'_>) -> Checked<()> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match phone.commands("smaps_rollup") {
            left if left.is_empty() => return Ok(()),
            left if Instant::now() > end => return Err(format!("still sampling: {left:?}")),
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
