//! `cargo xtask profile`: records a generation on a device, with steps, clocks, temperatures and memory over time.

mod export;
mod record;
mod trace;

use crate::deploy;
use crate::device::shell::{self, quote};
use crate::device::{Device, DeviceArgs};
use crate::error::{AtPath, Error, Result};
use crate::sensors::sampler::Plan;
use crate::{bench, build, command, run, sensors};
use clap::Args;
use files::atomic_file;
use record::{Profile, Recording};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use trace::Trace;

#[derive(Args)]
pub struct ProfileArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    model: build::ModelArgs,
    /// Tokens to generate [default: 256]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    num_tokens: Option<i64>,
    /// Generate for this many seconds instead
    #[arg(long, value_name = "S", conflicts_with = "num_tokens", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: Option<u64>,
    /// Milliseconds between samples of clocks and temperatures
    #[arg(long, value_name = "MS", default_value_t = INTERVAL, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    interval: u64,
    /// Print the path of the page, to open it in a browser
    #[arg(long)]
    open: bool,
    /// Flags of `generate`
    #[arg(last = true, value_name = "FLAG")]
    words: Vec<String>,
}

/// Default number of tokens.
const TOKENS: i64 = 256;
/// Default milliseconds between samples, each of which reads some thirty small files.
const INTERVAL: u64 = 200;
/// The file with the program's trace, in its directory on the device.
const TRACE: &str = "profile-trace.json";

/// The settings of a profile.
struct Options {
    /// Flags of `generate`, without `--trace`.
    args: Vec<String>,
    interval: Duration,
    stop_after: Option<Duration>,
}

pub fn run(args: &ProfileArgs) -> Result<()> {
    let options = Options::new(args)?;
    let device = args.device.open()?;
    let model = args.model.dir()?;
    let profile = record(&*device, &model, &options)?;
    let dir = write_files(&profile)?;
    eprintln!("\n{}", profile.summary());
    println!("{}", if args.open { dir.join("index.html") } else { dir }.display());
    Ok(())
}

impl Options {
    fn new(args: &ProfileArgs) -> Result<Options> {
        let theirs = &args.words;
        let mut words = theirs.strip_prefix(&["generate".to_string()]).unwrap_or(theirs).to_vec();
        if let Some(word) = words.first().filter(|w| !w.starts_with('-')) {
            let why = format!("`{word}` cannot be profiled; give flags of `generate` after --");
            return Err(Error::Usage(why));
        }
        let has = |names: &[&str]| {
            theirs.iter().any(|w| names.iter().any(|n| w == n || w.starts_with(&format!("{n}="))))
        };
        if has(&["--trace"]) {
            return Err(Error::Usage("--trace: this task sets it".into()));
        }
        let is_counted = has(&["-n", "--num-tokens", "--predict"]);
        if is_counted && (args.num_tokens.is_some() || args.seconds.is_some()) {
            return Err(Error::Usage("give one of -n and --seconds, once".into()));
        }
        if args.seconds.is_some() {
            words.extend(["--num-tokens", "-1", "--ignore-eos"].map(String::from));
        } else if !is_counted {
            words.extend(["--num-tokens".into(), args.num_tokens.unwrap_or(TOKENS).to_string()]);
        }
        if !has(&["-p", "--prompt", "-f", "--file", "--prompt-file"]) {
            words.extend(["--prompt", "Once upon a time"].map(String::from));
        }
        let stop_after = args.seconds.map(Duration::from_secs);
        Ok(Options { args: words, interval: Duration::from_millis(args.interval), stop_after })
    }
}

/// Runs the generation and collects the samples and the trace.
fn record(device: &dyn Device, model: &Path, options: &Options) -> Result<Profile> {
    let dir = deploy::deploy(device, model, &[])?;
    let file = quote(&format!("{dir}/{TRACE}"));
    shell::capture(device, &format!("rm -f {file}"))?.ok(device)?;
    let before = sensors::read_sensors(device)?;
    let plan = Plan { stop_after: options.stop_after, ..Plan::new(&before, options.interval) };
    let mut args = vec!["generate".to_string()];
    args.extend(options.args.iter().cloned());
    args.extend(["--trace".into(), TRACE.into()]);
    let program = run::deployed_program(device, &dir, args);
    let (code, samples) = bench::run_sampled(device, &program, &plan, &mut print_text)?;
    // An interrupted generation has a trace, too.
    if code != 130 {
        run::check_exit(device, code)?;
    }
    let text = shell::capture(device, &format!("[ ! -f {file} ] || {{ cat {file} && rm -f {file}; }}"))?;
    let text = text.ok(device)?;
    if text.is_empty() {
        run::check_exit(device, code)?;
        return Err(Error::Failed(format!("{}: the program wrote no trace", device.name())));
    }
    let invalid = |e| Error::Failed(format!("{}: invalid trace: {e}", device.name()));
    let trace = Trace::parse(&text).map_err(invalid)?;
    let after = sensors::read_sensors(device)?;
    let (target, model, time) = (device.target().into(), deploy::device_dir_name(model), format_time()?);
    let (device, args) = (device.name(), program.args);
    let recording = Recording { device, target, model, time, args, before, after, plan, samples };
    Ok(Profile::new(recording, trace))
}

/// Prints the text on stderr: stdout is for the profile's path.
fn print_text(text: &[u8]) -> std::io::Result<()> {
    let _ = std::io::stderr().write_all(text);
    Ok(())
}

/// The time now, e.g. `20261121-170559`.
fn format_time() -> Result<String> {
    let text = command::stdout(Command::new("date").args(["-u", "+%Y%m%d-%H%M%S"]))?;
    Ok(String::from_utf8_lossy(&text).trim().into())
}

/// Writes the three files; returns their directory.
fn write_files(profile: &Profile) -> Result<PathBuf> {
    let Recording { device, model, time, .. } = &profile.recording;
    let name = [device, model, time].map(|part| deploy::to_file_name(part)).join("-");
    let dir = build::target_dir().join("profile").join(name);
    std::fs::create_dir_all(&dir).at(&dir)?;
    let numbers = profile.json();
    let files = [
        ("profile.json", format!("{numbers:#}\n")),
        ("trace.json", export::trace_events(profile)),
        ("index.html", export::render_page(numbers)),
    ];
    for (name, text) in files {
        let file = dir.join(name);
        atomic_file::write_file(&file, text.as_bytes()).at(&file)?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_is_always_bounded() {
        let options = |line: &str| Options::new(&crate::parse_args(line)?);
        for (line, flags) in [
            ("", "--num-tokens 256 --prompt Once upon a time"),
            ("-n 8 -- generate --temp 0", "--temp 0 --num-tokens 8 --prompt"),
            ("-n -1 -- -p x", "-p x --num-tokens -1"),
            ("-- -n 9 -p x", "-n 9 -p x"),
            ("--seconds 5", "--num-tokens -1 --ignore-eos"),
        ] {
            let args = options(line).unwrap().args.join(" ");
            assert!(args.contains(flags), "{args}");
        }
        assert_eq!(options("--seconds 5").unwrap().stop_after, Some(Duration::from_secs(5)));
        for line in
            ["--seconds 0", "--interval 1", "-n 5 --seconds 5", "-n 5 -- -n 6", "-- bench", "-- --trace=x"]
        {
            assert_eq!(options(line).err().map(|e| e.exit_code()), Some(2), "{line}");
        }
    }
}
