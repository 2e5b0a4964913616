//! `cargo xtask bench`: `antigravity bench` on a device, with cold and warm starts, clocks and temperatures.

mod report;
mod start;

use crate::args::Args;
use crate::deploy::{self, PROGRAM};
use crate::device::shell::{self, Ears, Input, Program};
use crate::device::{self, Device};
use crate::error::{Error, Result};
use crate::sensors::sampler::{Plan, Sample};
use crate::sensors::{self, Reading};
use crate::{build, run, sh};
use serde_json::Value;
use start::Start;
use std::path::Path;
use std::time::{Duration, Instant};

const FLAGS: &[&str] = &["--model", "--runs", "--cool-down", "--json"];
/// Runs, without `--runs`.
const RUNS: u64 = 3;
/// Seconds that cooling may take, without `--cool-down`.
const COOL_DOWN: u64 = 120;
/// As warm as at the start, in degrees.
const NEAR: f64 = 3.0;
/// Between looks at a device that cools down.
const PAUSE: Duration = Duration::from_secs(3);
/// Between looks at clocks and temperatures: seldom enough that looking costs nothing.
const INTERVAL: Duration = Duration::from_millis(500);

/// Everything that one run found.
pub struct Run {
    pub before: Reading,
    pub after: Reading,
    pub plan: Plan,
    pub samples: Vec<Sample>,
    /// `None` where the page cache keeps the model.
    pub cold: Option<Start>,
    pub warm: Start,
    /// What `antigravity bench -o json` printed.
    pub bench: Value,
    /// Seconds spent on cooling before it.
    pub waited: f64,
}

/// All runs, and what they were made on.
pub struct Results {
    pub device: String,
    pub target: String,
    pub model: String,
    pub runs: Vec<Run>,
    /// Sentences about what could not be measured.
    pub notes: Vec<String>,
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
    let args = Args::parse(ours, &[device::FLAGS, FLAGS].concat(), &[])?;
    if let Some(word) = args.rest.first() {
        return Err(Error::Usage(format!("unexpected argument `{word}`; flags of `bench` come after --")));
    }
    let options = options(&args, theirs)?;
    let device = device::select(&args)?;
    let model = build::chosen_model(&args)?;
    let results = measure(&*device, &model, &options)?;
    print!("{}", report::markdown(&results));
    if let Some(file) = args.value("--json") {
        let text = format!("{:#}\n", report::json(&results));
        std::fs::write(file, text).map_err(|e| Error::at(Path::new(file), e))?;
        eprintln!("results: {file}");
    }
    Ok(())
}

fn options(args: &Args, theirs: &[String]) -> Result<Options> {
    let number = |flag: &str, most: u64| -> Result<Option<u64>> {
        let Some(text) = args.value(flag) else { return Ok(None) };
        let number = text.parse().ok().filter(|n| *n <= most);
        number.map(Some).ok_or_else(|| Error::Usage(format!("{flag} {text}: use a number up to {most}")))
    };
    let runs = number("--runs", 1000)?.unwrap_or(RUNS);
    if runs == 0 {
        return Err(Error::Usage("--runs 0: at least one run is needed".into()));
    }
    let cool_down = number("--cool-down", 86_400)?.map(Duration::from_secs);
    let flags = theirs.strip_prefix(&["bench".to_string()]).unwrap_or(theirs).to_vec();
    let output = |w: &&String| w.starts_with("-o") || w.starts_with("--output");
    if let Some(word) = flags.iter().find(output) {
        return Err(Error::Usage(format!("{word}: this task reads the output itself; use --json FILE")));
    }
    Ok(Options { runs, cool_down, flags })
}

fn measure(device: &dyn Device, model: &Path, options: &Options) -> Result<Results> {
    let dir = deploy::deploy(device, model, &[])?;
    let first = sensors::read(device)?;
    let mut notes = unreadable(&first, options);
    let mut runs: Vec<Run> = Vec::new();
    for i in 0..options.runs {
        let look = || sensors::read(device).map(|r| r.hottest());
        let waited = if i == 0 { 0.0 } else { cool(first.hottest(), options.cool_down, PAUSE, look)? };
        eprintln!("{}: run {} of {}", device.name(), i + 1, options.runs);
        let before = sensors::read(device)?;
        // In turn, so that neither is always the one on the warmer machine.
        let (cold, warm) = match i % 2 {
            0 => {
                let cold = start::cold(device, &dir)?;
                (cold, start::warm(device, &dir)?)
            }
            _ => {
                let warm = start::warm(device, &dir)?;
                (start::cold(device, &dir)?, warm)
            }
        };
        if let Some(note) = cold.note.filter(|n| !notes.contains(n)) {
            notes.push(note);
        }
        let plan = Plan::of(&before, INTERVAL);
        let (bench, samples) = bench(device, &dir, &plan, &options.flags)?;
        let after = sensors::read(device)?;
        runs.push(Run { before, after, plan, samples, cold: cold.start, warm, bench, waited });
    }
    Ok(Results {
        device: device.name(),
        target: device.target().into(),
        model: deploy::name(model),
        runs,
        notes,
    })
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
    let environment = run::environment(device, dir);
    let path = format!("./{PROGRAM}");
    let program = Program { dir, environment: &environment, path: &path, args: &args };
    let mut text = Vec::new();
    let (code, samples) = sampled(device, &program, plan, &mut |piece| {
        text.extend_from_slice(piece);
        Ok(())
    })?;
    run::finished(device, code)?;
    let value: Value = serde_json::from_slice(&text).unwrap_or_default();
    if !value["rows"].is_array() {
        let end = sh::last_lines(&String::from_utf8_lossy(&text), 1);
        let end: String = end.trim().chars().take(200).flat_map(char::escape_debug).collect();
        return Err(Error::Failed(format!("{}: these are no results of `bench`: {end}", device.name())));
    }
    Ok((value, samples))
}

/// Runs a program that reads nothing, and samples the device until it ends.
pub fn sampled(
    device: &dyn Device,
    program: &Program<'_>,
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
        options(&Args::parse(&words, FLAGS, &[])?, &theirs)
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
