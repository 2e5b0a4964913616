//! The Python package: a wheel that pip installs into an environment of its own.

use super::Outcome;
use super::library::build_everything;
use super::python::{REMEDY, count_promises};
use super::report::{Tally, skip};
use crate::build::library::SHARED;
use crate::build::{host_triple, wheel};
use crate::command;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest Python that the package is for, which distributions no longer have.
const OLDEST: &str = "python3.9";

pub fn run() -> Outcome {
    let built = build_everything()?;
    let wheel = wheel::pack_wheel(&built.model, &built.dir.join(SHARED), &host_triple(), &built.dir)?;
    let reference = command::root().join("tests/fixtures/embeddings/story.json");
    let mut tally = Tally::default();
    for name in [OLDEST, "python3"] {
        if name == OLDEST && !is_installed(name) {
            eprintln!("******** NOT TRIED: the Python package with {name}, which is missing");
            continue;
        }
        let python = match install(name, &wheel, &built.dir.join(format!("venv-{name}"))) {
            Ok(python) => python,
            Err(e) => {
                tally += skip(&format!("the Python package with {name}: {e}"), REMEDY);
                continue;
            }
        };
        let mut script = Command::new(python);
        script.arg(command::root().join("tests/ffi/wheel.py")).arg(&built.program).arg(&built.model);
        tally += count_promises(
            "the Python package",
            script.arg(built.dir.join("python-session")).arg(&reference),
        )?;
    }
    Ok(tally)
}

fn is_installed(python: &str) -> bool {
    command::stdout(Command::new(python).arg("--version")).is_ok()
}

/// Installs a wheel into a new environment in `dir`, without a network.
fn install(python: &str, wheel: &Path, dir: &Path) -> Result<PathBuf> {
    if !is_installed(python) {
        return Err(Error::Failed(format!("{python} is missing")));
    }
    command::run(Command::new(python).args(["-m", "venv", "--clear"]).arg(dir))?;
    let own = dir.join("bin/python3");
    command::run(
        Command::new(&own).args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]).arg(wheel),
    )?;
    Ok(own)
}
