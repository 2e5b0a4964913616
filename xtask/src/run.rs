//! `cargo xtask run`: runs the deployed program on a device with the arguments after `--`.

pub mod serve;

use crate::build;
use crate::deploy::{PROGRAM, deployment_dir};
use crate::device::shell::{self, DeviceProgram, Input};
use crate::device::{Device, DeviceArgs};
use crate::error::{Error, Result};
use clap::Args;
use std::io::IsTerminal;

/// The command that runs where none is given.
const STORY: [&str; 5] = ["generate", "--prompt", "Once upon a time", "--num-tokens", "200"];

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
    let words = if args.words.is_empty() { STORY.map(String::from).into() } else { args.words.clone() };
    let serves = words[0] == "serve";
    args.serve.check(serves)?;
    let device = args.device.open()?;
    let dir = deployment_dir(&*device, &args.model.dir()?);
    check_deployed(&*device, &dir, args)?;
    if serves {
        return serve::run(&*device, &dir, &args.serve, words);
    }
    let talks = ["chat", "-cnv", "-i"].contains(&words[0].as_str());
    let program = deployed_program(&*device, &dir, words);
    // There prompt, text and statistics are one stream, in order, and keys are typed into the program.
    let at_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let code = if at_terminal && (talks || std::io::stderr().is_terminal()) {
        shell::run_at_terminal(&*device, &program)?
    } else {
        shell::run_streamed(&*device, &program, Input::for_program(talks))?
    };
    check_exit(&*device, code)
}

/// The program that is deployed in a directory.
pub fn deployed_program(device: &dyn Device, dir: &str, args: Vec<String>) -> DeviceProgram {
    let environment = program_environment(device, dir);
    DeviceProgram { dir: dir.into(), environment, path: format!("./{PROGRAM}"), args }
}

/// The environment of the program.
pub fn program_environment(device: &dyn Device, dir: &str) -> Vec<(&'static str, String)> {
    // The program keeps the state of its runs beside the deployment.
    let mut set = vec![("ANTIGRAVITY_MODEL", dir.into()), ("XDG_STATE_HOME", dir.into())];
    if device.target().ends_with("android") {
        // Folders where vendors keep OpenCL; programs of the shell user do not search them by default.
        set.push(("LD_LIBRARY_PATH", "/vendor/lib64:/vendor/lib64/egl:/system/vendor/lib64".into()));
        set.push(("TMPDIR", "/data/local/tmp".into()));
    }
    set
}

fn check_deployed(device: &dyn Device, dir: &str, args: &RunArgs) -> Result<()> {
    let answer = shell::capture(device, &format!("test -f {}", shell::quote(&format!("{dir}/{PROGRAM}"))))?;
    if answer.code == 0 {
        return Ok(());
    }
    let flags = [args.device.words(), args.model.words()].concat();
    Err(Error::Device(format!("{}: {dir} has no deployment; run: cargo xtask deploy{flags}", device.name())))
}

/// The result that a program's exit code stands for; a signal is printed.
pub fn check_exit(device: &dyn Device, code: u32) -> Result<()> {
    if let Some(signal) = shell::signal_in(code) {
        eprintln!("error: {}: {signal}", device.name());
    }
    match u8::try_from(code) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Error::Program(code)),
        Err(_) => Err(Error::Failed(format!("{}: exit code {code} is out of range", device.name()))),
    }
}
