//! `cargo xtask run`: the deployed program on a device, its arguments passed through.

pub mod serve;

use crate::build;
use crate::deploy::{PROGRAM, directory};
use crate::device::shell::{self, Input, Program};
use crate::device::{Device, DeviceArgs};
use crate::error::{Error, Result};
use clap::Args;
use std::io::IsTerminal;

const STORY: &[&str] = &["generate", "--prompt", "Once upon a time", "--num-tokens", "200"];

#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    model: build::ModelArgs,
    #[command(flatten)]
    serve: serve::ServeArgs,
    /// The program's command and its flags
    #[arg(last = true, value_name = "COMMAND")]
    pub words: Vec<String>,
}

pub fn run(args: &RunArgs) -> Result<()> {
    let mut words = args.words.clone();
    if words.is_empty() {
        words = STORY.iter().map(|w| w.to_string()).collect();
    }
    let serves = words[0] == "serve";
    args.serve.check(serves)?;
    let device = args.device.open()?;
    let dir = directory(&*device, &args.model.dir()?);
    check_deployed(&*device, &dir)?;
    if serves {
        return serve::run(&*device, &dir, &args.serve, words);
    }
    let talks = ["chat", "-cnv", "-i"].contains(&words[0].as_str());
    let program = program(&*device, &dir, words);
    let at_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let code = if talks && at_terminal {
        shell::talk(&*device, &program)?
    } else {
        shell::stream(&*device, &program, Input::for_program(talks))?
    };
    check_exit(&*device, code)
}

/// The program that is deployed in a directory.
pub fn program(device: &dyn Device, dir: &str, args: Vec<String>) -> Program {
    let environment = environment(device, dir);
    Program { dir: dir.into(), environment, path: format!("./{PROGRAM}"), args }
}

/// The program's environment.
pub fn environment(device: &dyn Device, dir: &str) -> Vec<(&'static str, String)> {
    // Notes that the program takes of its runs stay with the deployment.
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
pub fn check_exit(device: &dyn Device, code: u32) -> Result<()> {
    if let Some(signal) = shell::signal_in(code) {
        eprintln!("error: {}: {signal}", device.name());
    }
    match u8::try_from(code) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Error::Program(code)),
        Err(_) => Err(Error::Failed(format!("{}: impossible exit code {code}", device.name()))),
    }
}
