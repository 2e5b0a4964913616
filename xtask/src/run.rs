//! `cargo xtask run`: the deployed program on a device, its arguments passed through.

pub mod serve;

use crate::args::{Args, Flags};
use crate::build;
use crate::deploy::{PROGRAM, directory};
use crate::device::shell::{self, Input, Program};
use crate::device::{self, Device};
use crate::error::{Error, Result};
use std::io::IsTerminal;

/// Without arguments: a story.
const STORY: &[&str] = &["generate", "--prompt", "Once upon a time", "--num-tokens", "200"];

pub const FLAGS: Flags = &[device::FLAGS, build::MODEL, serve::FLAGS];

pub fn run(words: &[String]) -> Result<()> {
    let (ours, theirs) = split(words);
    let args = Args::parse(ours, FLAGS)?;
    args.no_rest_but("the program's own come after --")?;
    let theirs: Vec<String> =
        if theirs.is_empty() { STORY.iter().map(|w| w.to_string()).collect() } else { theirs.to_vec() };
    let serves = serve::asked(&args, &theirs)?;
    let device = device::select(&args)?;
    let dir = directory(&*device, &build::chosen_model(&args)?);
    check_deployed(&*device, &dir)?;
    if serves {
        return serve::run(&*device, &dir, &args, theirs);
    }
    let talks = theirs.first().is_some_and(|command| ["chat", "-cnv", "-i"].contains(&command.as_str()));
    let program = program(&*device, &dir, theirs);
    let at_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let code = if talks && at_terminal {
        shell::talk(&*device, &program)?
    } else {
        shell::stream(&*device, &program, Input::for_program(talks))?
    };
    finished(&*device, code)
}

/// The words before the first `--` and those after it.
pub fn split(words: &[String]) -> (&[String], &[String]) {
    match words.iter().position(|w| w == "--") {
        Some(at) => (&words[..at], &words[at + 1..]),
        None => (words, &[]),
    }
}

/// The program that is deployed in a directory.
pub fn program(device: &dyn Device, dir: &str, args: Vec<String>) -> Program {
    let environment = environment(device, dir);
    Program { dir: dir.into(), environment, path: format!("./{PROGRAM}"), args }
}

/// What the program finds in its environment.
pub fn environment(device: &dyn Device, dir: &str) -> Vec<(&'static str, String)> {
    // What the program notes of its runs stays with the deployment.
    let mut set = vec![("ANTIGRAVITY_MODEL", dir.into()), ("XDG_STATE_HOME", dir.into())];
    if device.target().ends_with("android") {
        // Where vendors keep OpenCL; programs of the shell user do not search there by themselves.
        set.push(("LD_LIBRARY_PATH", "/vendor/lib64:/vendor/lib64/egl:/system/vendor/lib64".into()));
        set.push(("TMPDIR", "/data/local/tmp".into()));
    }
    set
}

fn check_deployed(device: &dyn Device, dir: &str) -> Result<()> {
    let answer = shell::capture(device, &format!("test -f {}", shell::quote(&format!("{dir}/{PROGRAM}"))))?;
    if answer.code == 0 {
        return Ok(());
    }
    let remedy = "run: cargo xtask deploy, with the same flags";
    Err(Error::Device(format!("{}: nothing is deployed in {dir}; {remedy}", device.name())))
}

/// A program's exit code as a result.
pub fn finished(device: &dyn Device, code: u32) -> Result<()> {
    if let Some(signal) = shell::signal_in(code) {
        eprintln!("error: {}: {signal}", device.name());
    }
    match u8::try_from(code) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Error::Program(code)),
        Err(_) => Err(Error::Failed(format!("{}: impossible exit code {code}", device.name()))),
    }
}
