//! `cargo xtask bench`: `antigravity bench` on a device, with cold and warm starts, clocks and temperatures.

mod peer;
mod report;
mod serve;
mod start;

use crate::deploy;
use crate::device::files::Item;
use crate::device::shell::{self, DeviceProgram, Input, ProgramOutput, Stderr};
use crate::device::{Device, DeviceArgs, DeviceKind};
use crate::error::{Error, Result};
use crate::sensors::sampler::{self, Plan, Sample, cores_used};
use crate::sensors::{self, Reading, describe_clusters};
use crate::{build, command, json as json_file, run};
use clap::Args;
use peer::Peer;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file with the prompt, a real text, on the device.
const PROMPT: &str = "prompt.txt";
/// Degrees above the temperature at the start that count as cool.
const COOL_MARGIN: f64 = 3.0;
/// Time between two readings of a device that cools down.
const PAUSE: Duration = Duration::from_secs(3);
/// Time between two samples of clocks and temperatures, long enough to cost nothing.
const INTERVAL: Duration = Duration::from_millis(500);

#[derive(Args)]
pub struct BenchArgs {
    /// serve: measure the server under load
    #[arg(value_parser = ["serve"])]
    mode: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    model: build::ModelArgs,
    /// Repetitions of everything [default: 3, with serve 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: Option<u64>,
    /// Write all results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Maximum time to cool down between runs, in seconds [default: 120]
    #[arg(long, value_name = "S", conflicts_with = "mode", value_parser = clap::value_parser!(u64).range(..=86_400))]
    cool_down: Option<u64>,
    #[command(flatten)]
    load: serve::LoadArgs,
    /// Flags of `antigravity bench`, or of the server
    #[arg(last = true, value_name = "FLAG")]
    words: Vec<String>,
}

pub fn run(args: &BenchArgs) -> Result<()> {
    let record = if args.mode.is_some() { serve::run(args)? } else { measure_model(args)? };
    if let Some(file) = &args.json {
        json_file::write(file, &record)?;
        eprintln!("results: {}", file.display());
    }
    Ok(())
}

fn measure_model(args: &BenchArgs) -> Result<Value> {
    let (runs, flags) = (args.runs.unwrap_or(3), bench_flags(&args.words)?);
    let model = args.model.dir()?;
    let peer = Peer::of_environment(&model)?;
    let device = match (&peer, args.device.device) {
        (None, _) | (Some(_), Some(DeviceKind::Local)) => args.device.open()?,
        (Some(_), None) => DeviceArgs::of_kind(DeviceKind::Local).open()?,
        (Some(_), Some(_)) => {
            return Err(Error::Usage("PEER names a program of this machine; use --device local".into()));
        }
    };
    let mut record = measure(&*device, &model, (runs, args.cool_down.map(Duration::from_secs)), &flags)?;
    print!("{}", report::tables(&record));
    if let Some(peer) = peer {
        let dir = deploy::deployment_dir(&*device, &model);
        let rows = record["runs"][0]["bench"]["rows"].as_array().cloned().unwrap_or_default();
        let plan = Plan::new(&sensors::read_sensors(&*device)?, INTERVAL);
        let ours = |flags: &[String]| run_bench(&*device, &dir, &plan, flags).map(|(found, _)| found);
        record["peer"] = peer::measure_beside(&peer, (&rows, runs), &flags, ours)?;
        print!("\n{}", peer::table(&record["peer"]));
    }
    Ok(record)
}

fn bench_flags(words: &[String]) -> Result<Vec<String>> {
    let flags = words.strip_prefix(&["bench".to_string()]).unwrap_or(words).to_vec();
    let output = |w: &&String| w.starts_with("-o") || w.starts_with("--output");
    let refused = |word| Error::Usage(format!("{word}: not available here; use --json FILE"));
    flags.iter().find(output).map_or(Ok(()), |word| Err(refused(word)))?;
    Ok(flags)
}

/// Measures a model on a device; returns the record of all runs.
fn measure(
    device: &dyn Device,
    model: &Path,
    (count, cool_down): (u64, Option<Duration>),
    flags: &[String],
) -> Result<Value> {
    let dir = deploy::deploy(device, model, &[Item::new(command::root().join("README.md"), PROMPT)])?;
    let first = sensors::read_sensors(device)?;
    let mut notes = describe_unreadable(&first);
    let mut runs = Vec::new();
    for i in 0..count {
        let look = || sensors::read_sensors(device).map(|r| r.hottest());
        let waited = if i == 0 { 0.0 } else { wait_until_cool(first.hottest(), cool_down, PAUSE, look)? };
        eprintln!("{}: run {} of {count}", device.name(), i + 1);
        let before = sensors::read_sensors(device)?;
        // Cold and warm take turns in being first, as the second one runs on a warmer device.
        let before_cold = if i % 2 == 1 { Some(start::measure_warm(device, &dir)?) } else { None };
        let cold = start::measure_cold(device, &dir)?;
        let warm = before_cold.map_or_else(|| start::measure_warm(device, &dir), Ok)?;
        notes.extend(cold.note.filter(|note| !notes.contains(note)));
        let plan = Plan::new(&before, INTERVAL);
        let (bench, samples) = run_bench(device, &dir, &plan, flags)?;
        let after = sensors::read_sensors(device)?;
        let mut sampled = plan.json();
        sampled["samples"] = json!(samples);
        runs.push(json!({
            "waited_s": waited, "start": before.json(), "end": after.json(),
            "hottest": sampler::find_hottest([&before, &after], &samples),
            "cold_start": cold.start, "warm_start": warm,
            "cores_used": cores_used(&samples), "bench": bench, "sampled": sampled,
        }));
    }
    let layout = Some(describe_clusters(&first.clusters())).filter(|text| !text.is_empty());
    Ok(json!({
        "schema": 1, "device": device.name(), "target": device.target(), "model": deploy::device_dir_name(model),
        "layout": layout, "rows": report::rows(&runs), "notes": notes, "runs": runs,
    }))
}

/// One sentence about each kind of value that cannot be read on this device.
fn describe_unreadable(reading: &Reading) -> Vec<String> {
    let known = [
        (
            reading.hottest().is_some(),
            "No temperature can be read on the device; --cool-down SECONDS sets a pause between runs.",
        ),
        (reading.cores.iter().any(|c| c.khz.is_some()), "No clock can be read on the device."),
        (reading.throttling().is_some(), "It is unknown whether the clocks are throttled."),
    ];
    known.into_iter().filter(|(known, _)| !known).map(|(_, note)| note.into()).collect()
}

/// Waits until the device is about as cool as at the start, at most `limit`, with a reading every `pause`. Without a
/// temperature it waits for `limit`, or not at all. Returns the seconds waited.
fn wait_until_cool(
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
    let limit = limit.unwrap_or(Duration::from_secs(120));
    while let Some(now) = look()?.filter(|now| *now > start + COOL_MARGIN) {
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

/// Runs `antigravity bench` and samples the device meanwhile.
fn run_bench(device: &dyn Device, dir: &str, plan: &Plan, flags: &[String]) -> Result<(Value, Vec<Sample>)> {
    let mut args: Vec<String> = ["bench", "--output", "json"].map(String::from).into();
    args.extend(flags.iter().cloned());
    if !flags.iter().any(|word| ["-f", "--file", "--prompt-file"].iter().any(|flag| word.starts_with(flag))) {
        args.extend(["--prompt-file", PROMPT].map(String::from));
    }
    let program = run::deployed_program(device, dir, args);
    let mut text = Vec::new();
    let (code, samples) = run_sampled(device, &program, plan, &mut |piece| {
        text.extend_from_slice(piece);
        Ok(())
    })?;
    run::check_exit(device, code)?;
    let value: Value = serde_json::from_slice(&text).unwrap_or_default();
    if !value["rows"].is_array() {
        let end = command::last_line(&String::from_utf8_lossy(&text)).unwrap_or_default();
        return Err(Error::Failed(format!("{}: not the output of `bench`: {end}", device.name())));
    }
    Ok((value, samples))
}

/// Runs a program without stdin, and samples the device until it ends.
pub fn run_sampled(
    device: &dyn Device,
    program: &DeviceProgram,
    plan: &Plan,
    text: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<(u32, Vec<Sample>)> {
    std::thread::scope(|scope| {
        let mut sampler = None;
        let mut started = |pid| sampler = Some(scope.spawn(move || plan.run(device, pid)));
        let output = ProgramOutput { text, stderr: Stderr::Apart, started: &mut started };
        let code = shell::stream_to(device, program, Input::Nothing, output)?;
        // The sampler ends with the program. If it fails, the tables lack its samples.
        let samples = sampler.and_then(|s| s.join().ok()?.ok()).unwrap_or_default();
        Ok((code, samples))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bench_flags_are_parsed_and_checked() {
        let parse = crate::parse_args::<BenchArgs>;
        let args = parse("--runs 2 --cool-down=5 -- bench -p 16").unwrap();
        assert_eq!(
            (args.runs, args.cool_down, bench_flags(&args.words).unwrap().len()),
            (Some(2), Some(5), 2)
        );
        assert!(parse("--device local serve --clients 1,8 -- -t 1").unwrap().mode.is_some());
        for line in ["--runs 0", "--runs -1", "--cool-down 1e9", "--seconds 3", "serve --cool-down 1", "x"] {
            assert_eq!(parse(line).err().map(|e| e.exit_code()), Some(2), "{line}");
        }
        assert!(bench_flags(&["-ojson".into()]).unwrap_err().to_string().contains("--json"));
    }

    #[test]
    fn a_device_cools_down_to_its_temperature_at_the_start() {
        let looks = |temperatures: &[f64], limit: u64| {
            let (mut given, mut count) = (temperatures.iter(), 0);
            let look = || {
                count += 1;
                Ok(given.next().copied())
            };
            wait_until_cool(Some(40.0), Some(Duration::from_secs(limit)), Duration::ZERO, look).unwrap();
            count
        };
        assert_eq!(looks(&[60.0, 50.0, 43.0, 99.0], 60), 3);
        // Out of time at once, and a sensor that stops to answer.
        assert_eq!(looks(&[60.0, 50.0, 43.0], 0), 1);
        assert_eq!(looks(&[60.0], 60), 2);
        assert!(wait_until_cool(None, None, PAUSE, || panic!("nothing to look at")).unwrap() < 60.0);
    }
}
