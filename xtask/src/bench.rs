//! `cargo xtask bench`: `antigravity bench` on a device, with cold and warm starts, clocks and temperatures.

mod count;
mod peer;
mod report;
mod serve;
mod start;

use crate::args::{Args, Flag, Flags};
use crate::deploy;
use crate::device::files::Item;
use crate::device::local::Local;
use crate::device::shell::{self, Ears, Input, Program};
use crate::device::{self, Device};
use crate::error::{Error, Result};
use crate::sensors::sampler::{self, Plan, Sample, cores_used};
use crate::sensors::{self, Reading, layout};
use crate::{build, run, sh};
use files::atomic_file;
use peer::Peer;
use serde_json::{Value, json};
use start::Start;
use std::path::Path;
use std::time::{Duration, Instant};

/// All flags, those of `serve` among them.
pub const FLAGS: Flags = &[device::FLAGS, build::MODEL, RUNS_AND_FILE, COOLING, count::FLAGS, serve::FLAGS];
/// Without `serve`.
const OWN: Flags = &[device::FLAGS, build::MODEL, RUNS_AND_FILE, COOLING, count::FLAGS];
const RUNS_AND_FILE: &[Flag] = &[
    Flag::valued("--runs", "N", "how many times all is measured [3, of serve 1]"),
    Flag::valued("--json", "FILE", "write all results there"),
];
const COOLING: &[Flag] =
    &[Flag::valued("--cool-down", "S", "longest time to cool down between runs, in seconds")];
/// Runs, without `--runs`.
const RUNS: u64 = 3;
/// Seconds that cooling may take, without `--cool-down`.
const COOL_DOWN: u64 = 120;
/// The text there whose tokens are measured: real ones.
const PROMPT: &str = "prompt.txt";
/// As warm as at the start, in degrees.
const NEAR: f64 = 3.0;
/// Between looks at a device that cools down.
const PAUSE: Duration = Duration::from_secs(3);
/// Between looks at clocks and temperatures: seldom enough that looking costs nothing.
const INTERVAL: Duration = Duration::from_millis(500);

/// Everything that one run found.
struct Run {
    /// Seconds spent on cooling before it.
    waited: f64,
    before: Reading,
    after: Reading,
    plan: Plan,
    samples: Vec<Sample>,
    /// `None` where the page cache keeps the model.
    cold: Option<Start>,
    warm: Start,
    /// What `antigravity bench -o json` printed.
    bench: Value,
}

impl Run {
    /// Its part of the record.
    fn json(self) -> Value {
        let mut sampled = self.plan.json();
        sampled["samples"] = self.samples.iter().map(Sample::json).collect();
        json!({
            "waited_s": self.waited, "start": self.before.json(), "end": self.after.json(),
            "hottest": sampler::hottest([&self.before, &self.after], &self.samples),
            "cold_start": self.cold.as_ref().map(Start::json), "warm_start": self.warm.json(),
            "cores_used": cores_used(&self.samples), "bench": self.bench, "sampled": sampled,
        })
    }
}

/// What the flags say.
struct Options {
    runs: u64,
    /// `None` is the default.
    cool_down: Option<Duration>,
    flags: Vec<String>,
}

pub fn run(words: &[String]) -> Result<()> {
    let (ours, theirs) = run::split(words);
    if let Some(at) = ours.iter().position(|word| word == "serve") {
        return serve::run(&[&ours[..at], &ours[at + 1..]].concat(), theirs);
    }
    let args = Args::parse(ours, OWN)?;
    args.no_rest_but("flags of `bench` come after --")?;
    if count::asked(&args, theirs)? {
        return count::run(&args);
    }
    let options = options(&args, theirs)?;
    let model = build::chosen_model(&args)?;
    let peer = Peer::of_environment(&model)?;
    let device = device_beside(peer.is_some().then_some("PEER"), &args)?;
    let mut record = measure(&*device, &model, &options)?;
    print!("{}", report::tables(&record));
    if let Some(peer) = peer {
        let dir = deploy::directory(&*device, &model);
        let rows = record["runs"][0]["bench"]["rows"].as_array().cloned().unwrap_or_default();
        let plan = Plan::of(&sensors::read(&*device)?, INTERVAL);
        let ours = |flags: &[String]| bench(&*device, &dir, &plan, flags).map(|(found, _)| found);
        record["peer"] = peer::beside(&peer, &rows, options.runs, &options.flags, ours)?;
        print!("\n{}", peer::table(&record["peer"]));
    }
    if let Some(file) = args.value("--json") {
        let text = format!("{record:#}\n");
        atomic_file::write(Path::new(file), text.as_bytes()).map_err(|e| Error::at(Path::new(file), e))?;
        eprintln!("results: {file}");
    }
    Ok(())
}

/// The device that the flags name; for a program of this machine that is measured too, this machine.
fn device_beside(other: Option<&str>, args: &Args) -> Result<Box<dyn Device>> {
    match (other, args.value("--device")) {
        (None, _) | (Some(_), Some("local")) => device::select(args),
        (Some(_), None) => Ok(Box::new(Local::open())),
        (Some(other), Some(device)) => Err(Error::Usage(format!(
            "--device {device}: {other} names a program of this machine; use local"
        ))),
    }
}

fn options(args: &Args, theirs: &[String]) -> Result<Options> {
    let runs = args.number("--runs", 1..=1000)?.unwrap_or(RUNS);
    let cool_down = args.number("--cool-down", 0..=86_400)?.map(Duration::from_secs);
    let flags = theirs.strip_prefix(&["bench".to_string()]).unwrap_or(theirs).to_vec();
    let output = |w: &&String| w.starts_with("-o") || w.starts_with("--output");
    if let Some(word) = flags.iter().find(output) {
        return Err(Error::Usage(format!("{word}: this task reads the output itself; use --json FILE")));
    }
    Ok(Options { runs, cool_down, flags })
}

/// The record: all runs, and what they were made on.
fn measure(device: &dyn Device, model: &Path, options: &Options) -> Result<Value> {
    let dir = deploy::deploy(device, model, &[Item::new(sh::root().join("README.md"), PROMPT)])?;
    let first = sensors::read(device)?;
    let mut notes = unreadable(&first, options);
    let mut runs = Vec::new();
    for i in 0..options.runs {
        let look = || sensors::read(device).map(|r| r.hottest());
        let waited = if i == 0 { 0.0 } else { cool(first.hottest(), options.cool_down, PAUSE, look)? };
        eprintln!("{}: run {} of {}", device.name(), i + 1, options.runs);
        let before = sensors::read(device)?;
        // In turn, so that neither is always the one on the warmer machine.
        let before_cold = if i % 2 == 1 { Some(start::warm(device, &dir)?) } else { None };
        let cold = start::cold(device, &dir)?;
        let warm = before_cold.map_or_else(|| start::warm(device, &dir), Ok)?;
        if let Some(note) = cold.note.filter(|n| !notes.contains(n)) {
            notes.push(note);
        }
        let plan = Plan::of(&before, INTERVAL);
        let (bench, samples) = bench(device, &dir, &plan, &options.flags)?;
        let after = sensors::read(device)?;
        let cold = cold.start;
        runs.push(Run { waited, before, after, plan, samples, cold, warm, bench }.json());
    }
    let layout = Some(layout(&first.clusters())).filter(|text| !text.is_empty());
    Ok(json!({
        "schema": 1, "device": device.name(), "target": device.target(), "model": deploy::name(model),
        "layout": layout, "rows": report::rows(&runs), "notes": notes, "runs": runs,
    }))
}

/// What cannot be told about this device, once and in words.
fn unreadable(reading: &Reading, options: &Options) -> Vec<String> {
    let mut notes = Vec::new();
    if reading.hottest().is_none() {
        let pause = match options.cool_down {
            Some(time) => format!("runs are {} s apart", time.as_secs()),
            None => "runs follow each other at once (--cool-down SECONDS puts a pause between them)".into(),
        };
        notes.push(format!("No temperature can be read there; {pause}."));
    }
    if reading.cores.iter().all(|c| c.khz.is_none()) {
        notes.push("No clock can be read there.".into());
    }
    if reading.throttling().is_none() {
        notes.push("Nothing there says whether the clocks are throttled.".into());
    }
    notes
}

/// Waits until the device is about as warm as at the start, looking every `pause`; returns the seconds waited.
/// Where there is no temperature, it waits as long as `limit` says, else not at all.
fn cool(
    start: Option<f64>,
    limit: Option<Duration>,
    pause: Duration,
    mut look: impl FnMut() -> Result<Option<f64>>,
) -> Result<f64> {
    let began = Instant::now();
    let Some(start) = start else {
        std::thread::sleep(limit.unwrap_or_default());
        return Ok(began.elapsed().as_secs_f64());
    };
    let limit = limit.unwrap_or(Duration::from_secs(COOL_DOWN));
    while let Some(now) = look()?.filter(|now| *now > start + NEAR) {
        let left = limit.saturating_sub(began.elapsed());
        if left.is_zero() {
            eprintln!("still {now:.1} °C after {} s of cooling, {start:.1} °C at the start", limit.as_secs());
            break;
        }
        eprintln!("cooling down: {now:.1} °C, {start:.1} °C at the start");
        std::thread::sleep(left.min(pause));
    }
    Ok(began.elapsed().as_secs_f64())
}

/// The program's own measurement, sampled meanwhile.
fn bench(device: &dyn Device, dir: &str, plan: &Plan, flags: &[String]) -> Result<(Value, Vec<Sample>)> {
    let mut args: Vec<String> = ["bench", "--output", "json"].map(String::from).into();
    args.extend(flags.iter().cloned());
    if !flags.iter().any(|word| ["-f", "--file", "--prompt-file"].iter().any(|flag| word.starts_with(flag))) {
        args.extend(["--prompt-file", PROMPT].map(String::from));
    }
    let program = run::program(device, dir, args);
    let mut text = Vec::new();
    let (code, samples) = sampled(device, &program, plan, &mut |piece| {
        text.extend_from_slice(piece);
        Ok(())
    })?;
    run::finished(device, code)?;
    let value: Value = serde_json::from_slice(&text).unwrap_or_default();
    if !value["rows"].is_array() {
        let end = sh::one_line(&sh::last_lines(&String::from_utf8_lossy(&text), 1));
        return Err(Error::Failed(format!("{}: these are no results of `bench`: {end}", device.name())));
    }
    Ok((value, samples))
}

/// Runs a program that reads nothing, and samples the device until it ends.
pub fn sampled(
    device: &dyn Device,
    program: &Program,
    plan: &Plan,
    text: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<(u32, Vec<Sample>)> {
    std::thread::scope(|scope| {
        let mut sampler = None;
        let mut started = |pid| sampler = Some(scope.spawn(move || plan.run(device, pid)));
        let code = shell::stream_to(device, program, Input::Nothing, Ears { text, started: &mut started })?;
        // It ends with the program. What it could not bring is missing from the tables, no more.
        let samples = sampler.and_then(|s| s.join().ok()?.ok()).unwrap_or_default();
        Ok((code, samples))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sensors::Temperature;

    fn parsed(words: &str, theirs: &[&str]) -> Result<Options> {
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        let theirs: Vec<String> = theirs.iter().map(|w| w.to_string()).collect();
        options(&Args::parse(&words, OWN)?, &theirs)
    }

    #[test]
    fn flags_are_read() {
        let o = parsed("--runs 2 --cool-down=5", &["bench", "-p", "16"]).unwrap();
        assert_eq!(
            (o.runs, o.cool_down, o.flags),
            (2, Some(Duration::from_secs(5)), vec!["-p".into(), "16".into()])
        );
        assert_eq!(parsed("", &[]).unwrap().runs, RUNS);
        for words in ["--runs 0", "--runs x", "--runs -1", "--cool-down 1e9", "--runs 1001"] {
            assert_eq!(parsed(words, &[]).err().map(|e| e.exit_code()), Some(2), "{words}");
        }
        for word in ["-o", "-ojson", "--output=md"] {
            assert!(parsed("", &[word]).err().unwrap().to_string().contains("--json"), "{word}");
        }
    }

    #[test]
    fn a_program_of_this_machine_is_measured_here() {
        let device = |words: &str| {
            let words: Vec<String> = words.split_whitespace().map(String::from).collect();
            device_beside(Some("PEER"), &Args::parse(&words, OWN)?)
        };
        assert_eq!(device("").unwrap().name(), "this machine");
        assert_eq!(device("--device local").unwrap().name(), "this machine");
        assert_eq!(device("--device qemu").err().map(|e| e.exit_code()), Some(2));
    }

    #[test]
    fn a_device_cools_until_it_is_as_at_the_start() {
        let looks = |temperatures: &[f64], limit: u64| {
            let (mut given, mut count) = (temperatures.iter(), 0);
            let look = || {
                count += 1;
                Ok(given.next().copied())
            };
            cool(Some(40.0), Some(Duration::from_secs(limit)), Duration::ZERO, look).unwrap();
            count
        };
        assert_eq!(looks(&[42.9], 60), 1);
        assert_eq!(looks(&[60.0, 50.0, 43.0, 99.0], 60), 3);
        // Out of time at once, and a sensor that stops to answer.
        assert_eq!(looks(&[60.0, 50.0, 43.0], 0), 1);
        assert_eq!(looks(&[60.0], 60), 2);
        assert!(cool(None, None, PAUSE, || panic!("nothing to look at")).unwrap() < 60.0);
    }

    #[test]
    fn what_cannot_be_read_is_said_once() {
        let o = parsed("", &[]).unwrap();
        assert_eq!(unreadable(&Reading::default(), &o).len(), 3);
        let warm = Temperature { name: "cpu".into(), celsius: 40.0, zone: Some(0) };
        let known = Reading { temperatures: vec![warm], thermal_status: Some(0), ..Reading::default() };
        assert_eq!(unreadable(&known, &o), ["No clock can be read there."]);
    }
}
