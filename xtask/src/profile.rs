//! `cargo xtask profile`: a generation on a device, with its steps, clocks, temperatures and memory on one clock.

mod chrome;
mod page;
mod record;
mod trace;

use crate::args::{Args, Flag, Flags};
use crate::deploy;
use crate::device::shell::{self, quote};
use crate::device::{self, Device};
use crate::error::{Error, Result};
use crate::sensors::sampler::Plan;
use crate::{bench, build, run, sensors, sh};
use files::atomic_file;
use record::{Profile, Recording};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use trace::Trace;

pub const FLAGS: Flags = &[
    device::FLAGS,
    build::MODEL,
    &[
        Flag::valued("-n", "N", "tokens to generate [256]"),
        Flag::valued("--num-tokens", "N", "the same"),
        Flag::valued("--seconds", "S", "generate for so long instead"),
        Flag::valued("--interval", "MS", "milliseconds between samples of clocks and temperatures"),
        Flag::switch("--open", "print the path of the page itself, for a program that opens pages"),
    ],
];
/// Tokens, where neither -n nor --seconds is given.
const TOKENS: &str = "256";
/// Milliseconds between samples, where --interval is not given: some thirty reads of small files each time.
const INTERVAL: u64 = 200;
/// The program's own trace, in its directory there.
const TRACE: &str = "profile-trace.json";

/// What the flags say.
struct Options {
    /// Of `generate`, without `--trace`.
    args: Vec<String>,
    interval: Duration,
    stop_after: Option<Duration>,
}

pub fn run(words: &[String]) -> Result<()> {
    let (ours, theirs) = run::split(words);
    let args = Args::parse(ours, FLAGS)?;
    args.no_rest_but("flags of `generate` come after --")?;
    let options = options(&args, theirs)?;
    let device = device::select(&args)?;
    let model = build::chosen_model(&args)?;
    let profile = record(&*device, &model, &options)?;
    let dir = write(&profile)?;
    eprintln!("\n{}", profile.summary());
    // The page's path is what a program that opens pages wants; the directory has everything.
    println!("{}", if args.has("--open") { dir.join("index.html") } else { dir }.display());
    Ok(())
}

fn options(args: &Args, theirs: &[String]) -> Result<Options> {
    let seconds = args.number("--seconds", 1..=86_400)?;
    let interval = args.number("--interval", 10..=60_000)?.unwrap_or(INTERVAL);
    let tokens = args.value("-n").or(args.value("--num-tokens"));
    let mut words = theirs.strip_prefix(&["generate".to_string()]).unwrap_or(theirs).to_vec();
    if let Some(word) = words.first().filter(|w| !w.starts_with('-')) {
        return Err(Error::Usage(format!("`{word}` cannot be profiled; give flags of `generate` after --")));
    }
    let has = |names: &[&str]| {
        theirs.iter().any(|w| names.iter().any(|n| w == n || w.starts_with(&format!("{n}="))))
    };
    if has(&["--trace"]) {
        return Err(Error::Usage("--trace: this task takes the trace itself".into()));
    }
    let counted = has(&["-n", "--num-tokens", "--predict"]);
    if [tokens.is_some(), seconds.is_some(), counted].iter().filter(|given| **given).count() > 1 {
        return Err(Error::Usage("give one of -n and --seconds, once".into()));
    }
    let mut add = |flags: &[&str]| words.extend(flags.iter().map(|f| f.to_string()));
    match (seconds, tokens) {
        (Some(_), _) => add(&["--num-tokens", "-1", "--ignore-eos"]),
        (None, Some(n)) => add(&["--num-tokens", n]),
        (None, None) if !counted => add(&["--num-tokens", TOKENS]),
        (None, None) => {}
    }
    if !has(&["-p", "--prompt", "-f", "--file", "--prompt-file"]) {
        add(&["--prompt", "Once upon a time"]);
    }
    let interval = Duration::from_millis(interval);
    Ok(Options { args: words, interval, stop_after: seconds.map(Duration::from_secs) })
}

/// Runs the generation and collects what is known about it.
fn record(device: &dyn Device, model: &Path, options: &Options) -> Result<Profile> {
    let dir = deploy::deploy(device, model, &[])?;
    let file = quote(&format!("{dir}/{TRACE}"));
    shell::capture(device, &format!("rm -f {file}"))?.ok(device)?;
    let before = sensors::read(device)?;
    let plan = Plan { stop_after: options.stop_after, ..Plan::of(&before, options.interval) };
    let mut args = vec!["generate".to_string()];
    args.extend(options.args.iter().cloned());
    args.extend(["--trace".into(), TRACE.into()]);
    let program = run::program(device, &dir, args);
    let (code, samples) = bench::sampled(device, &program, &plan, &mut show)?;
    // A generation that was interrupted, by us or by the user, has its trace.
    if code != 130 {
        run::finished(device, code)?;
    }
    let text = shell::capture(device, &format!("[ ! -f {file} ] || {{ cat {file} && rm -f {file}; }}"))?;
    let text = text.ok(device)?;
    if text.is_empty() {
        run::finished(device, code)?;
        return Err(Error::Failed(format!("{}: the program wrote no trace", device.name())));
    }
    let trace =
        Trace::parse(&text).map_err(|e| Error::Failed(format!("{}: its trace: {e}", device.name())))?;
    let after = sensors::read(device)?;
    let (target, model, time) = (device.target().into(), deploy::name(model), time()?);
    let (device, args) = (device.name(), program.args);
    let recording = Recording { device, target, model, time, args, before, after, plan, samples };
    Ok(Profile::new(recording, trace))
}

/// The text goes past on stderr: on stdout is the profile's path alone.
fn show(text: &[u8]) -> std::io::Result<()> {
    let _ = std::io::stderr().write_all(text);
    Ok(())
}

/// Now, e.g. `20261121-170559`.
fn time() -> Result<String> {
    let text = sh::stdout(Command::new("date").args(["-u", "+%Y%m%d-%H%M%S"]))?;
    Ok(String::from_utf8_lossy(&text).trim().into())
}

/// Writes the three files; returns their directory.
fn write(profile: &Profile) -> Result<PathBuf> {
    let Recording { device, model, time, .. } = &profile.recording;
    let name = [device, model, time].map(|part| deploy::plain(part)).join("-");
    let dir = build::target_dir().join("profile").join(name);
    std::fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
    let numbers = profile.json();
    let files = [
        ("profile.json", format!("{numbers:#}\n")),
        ("trace.json", chrome::events(profile)),
        ("index.html", page::html(numbers)),
    ];
    for (name, text) in files {
        let file = dir.join(name);
        atomic_file::write(&file, text.as_bytes()).map_err(|e| Error::at(&file, e))?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str, theirs: &str) -> Result<Options> {
        let split = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
        options(&Args::parse(&split(words), FLAGS)?, &split(theirs))
    }

    #[test]
    fn a_generation_is_always_bounded() {
        let ends = |words, theirs, flags: &str| {
            let args = parsed(words, theirs).unwrap().args.join(" ");
            assert!(args.contains(flags), "{args}");
        };
        ends("", "", "--num-tokens 256 --prompt Once upon a time");
        ends("-n 8", "generate --temp 0", "--temp 0 --num-tokens 8 --prompt");
        ends("", "-n 9 -p x", "-n 9 -p x");
        ends("--seconds 5", "", "--num-tokens -1 --ignore-eos");
        assert_eq!(parsed("--seconds 5", "").unwrap().stop_after, Some(Duration::from_secs(5)));
        assert_eq!(parsed("", "--prompt=x --predict=3").unwrap().args, ["--prompt=x", "--predict=3"]);
    }

    #[test]
    fn what_cannot_be_is_a_usage_error() {
        for (words, theirs) in [
            ("--seconds 0", ""),
            ("--seconds x", ""),
            ("--interval 1", ""),
            ("-n 5 --seconds 5", ""),
            ("-n 5", "-n 6"),
            ("", "bench"),
            ("", "--trace x"),
            ("", "--trace=x"),
        ] {
            let e = parsed(words, theirs).err().unwrap_or_else(|| panic!("{words} -- {theirs}"));
            assert_eq!(e.exit_code(), 2, "{words} -- {theirs}: {e}");
        }
    }
}
