//! `cargo xtask golden`: the golden tests in release on this machine, or the golden set on a device through the
//! deployed program. There its texts are compared with the golden files and with the ones of this machine; where they
//! differ, the first layer that differs is found.

pub mod case;
pub mod comparison;

use crate::device::files::{Item, install};
use crate::device::shell::{self, Answer};
use crate::device::{Device, DeviceArgs};
use crate::error::{AtPath, Error, Result};
use crate::{build, command, deploy, run};
use case::{Case, parse_outcome, read_cases};
use clap::Args;
use comparison::CaseResult;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

#[derive(Args)]
pub struct GoldenArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    model: build::ModelArgs,
    /// Rewrite the golden files from the results of this machine
    #[arg(long)]
    bless: bool,
}

pub fn run(args: &GoldenArgs) -> Result<()> {
    if !args.device.is_empty() || args.model.model.is_some() {
        if args.bless {
            return Err(Error::Usage(
                "--bless writes the results of this machine; leave --device out".into(),
            ));
        }
        return run_on_device(args);
    }
    let mut test =
        command::cargo(&["test", "--release", "--package", "antigravity", "--test", "engine", "golden::"]);
    if args.bless {
        test.env("ANTIGRAVITY_BLESS", "1");
    }
    command::run(&mut test)
}

/// The checkpoint on the device, for cases whose weights are not quantised. By its name the program takes the packed
/// file for all others.
const CHECKPOINT: &str = "checkpoint.safetensors";
const TOKENS: &str = "golden-tokens.json";

/// The program on the device and on this machine.
struct Programs<'a> {
    device: &'a dyn Device,
    dir: String,
    model: PathBuf,
    program: PathBuf,
}

fn run_on_device(args: &GoldenArgs) -> Result<()> {
    let device = args.device.open()?;
    let model = args.model.dir()?;
    let cases = read_cases(&model)?;
    let mut more = Vec::new();
    if cases.iter().any(|c| c.exact_weights) {
        more.push(Item::new(model.join("model.safetensors"), CHECKPOINT));
    }
    let dir = deploy::deploy(&*device, &model, &more)?;
    let program = build::build_for_host(Some(&model))?;
    let programs = Programs { device: &*device, dir, model, program };
    let mut rows = Vec::new();
    let mut differences = Vec::new();
    for case in &cases {
        let began = Instant::now();
        let there = parse_outcome(&case.name, &programs.run_there(case, &case.generate, "generate")?.stdout)?;
        let seconds = began.elapsed().as_secs_f64();
        let here = parse_outcome(&case.name, &programs.run_here(case, &case.generate, "generate")?.stdout)?;
        let row =
            CaseResult { name: case.name.clone(), there, here, expected: case.expected.clone(), seconds };
        eprintln!("{}: {} {}", device.name(), case.name, if row.passed() { "equal" } else { "DIFFERS" });
        if !row.passed() {
            let layer = programs.find_difference(case).unwrap_or_else(|e| format!("layer unknown: {e}"));
            differences.push(format!("{}: {}; {layer}", case.name, comparison::describe_difference(&row)));
        }
        rows.push(row);
    }
    println!("{} ({})", device.name(), device.target());
    print!("{}", comparison::format_results(&rows));
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::Golden(format!("{}: {}", device.name(), differences.join("\n       "))))
}

impl Programs<'_> {
    fn run_there(&self, case: &Case, flags: &[String], command: &str) -> Result<Answer> {
        let mut args = vec![command.to_string()];
        args.extend(case.settings.iter().chain(flags).cloned());
        if case.exact_weights {
            args.extend(["--model-path".into(), format!("{}/{CHECKPOINT}", self.dir)]);
        }
        let answer =
            shell::capture_program(self.device, &run::deployed_program(self.device, &self.dir, args))?;
        if let Some(signal) = shell::signal_in(answer.code) {
            return Err(Error::Failed(format!("{}: {}: {signal}", self.device.name(), case.name)));
        }
        if answer.code != 0 {
            return Err(Error::Failed(answer.ok(self.device).err().map_or(String::new(), |e| e.to_string())));
        }
        Ok(answer)
    }

    fn run_here(&self, case: &Case, flags: &[String], command: &str) -> Result<Answer> {
        let mut program = Command::new(&self.program);
        program.arg(command).args(&case.settings).args(flags).arg("--model-path").arg(&self.model);
        let out = command::output(program.env_remove("ANTIGRAVITY_MODEL"))?;
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        if !out.status.success() {
            return Err(Error::Failed(format!(
                "`{}`: {}",
                command::show(&program),
                command::last_lines(&stderr, 1)
            )));
        }
        Ok(Answer { code: 0, stdout: String::from_utf8_lossy(&out.stdout).into_owned(), stderr })
    }

    /// The first layer whose residuals differ, computed over the prompt and the expected text.
    fn find_difference(&self, case: &Case) -> Result<String> {
        let file = build::target_dir().join("device").join(TOKENS);
        let tokens: Vec<u32> = case.prompt.iter().chain(&case.expected.ids).copied().collect();
        std::fs::write(&file, format!("{tokens:?}")).at(&file)?;
        install(self.device, &self.dir, &[Item::new(&file, TOKENS)])?;
        let flags = |tokens: &str| -> Vec<String> {
            ["--tokens", tokens, "--out", "/dev/null", "--trace-hash"].map(String::from).into()
        };
        let there = self.run_there(case, &flags(TOKENS), "logits")?.stderr;
        let here = self.run_here(case, &flags(&file.to_string_lossy()), "logits")?.stderr;
        Ok(comparison::find_first_layer(&there, &here))
    }
}
