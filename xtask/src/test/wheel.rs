//! The Python package: a wheel that pip installs into an environment of its own.

use super::Outcome;
use super::library::build_everything;
use super::python::{REMEDY, count_promises};
use super::report::{Tally, skip};
use crate::build::library::SHARED;
use crate::build::{host_triple, wheel};
use crate::command;
use crate::error::Result;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest Python 3.N that the package is for, which distributions no longer have.
const OLDEST: u32 = 9;
/// A later one than there will be soon.
const LATER: u32 = 30;

pub fn run() -> Outcome {
    let built = build_everything()?;
    let wheel = wheel::pack_wheel(&built.model, &built.dir.join(SHARED), &host_triple(), &built.dir)?;
    let reference = command::root().join("tests/fixtures/embeddings/story.json");
    let mut tally = Tally::default();
    let oldest = find_python(OLDEST);
    if oldest.is_none() {
        eprintln!("******** NOT TRIED: the Python package with Python 3.{OLDEST}, which is missing");
    }
    let newest = (OLDEST + 1..LATER).rev().find_map(find_python).unwrap_or("python3".into());
    for (number, python) in oldest.into_iter().chain([newest]).enumerate() {
        let python = match install(&python, &wheel, &built.dir.join(format!("venv-{number}"))) {
            Ok(python) => python,
            Err(e) => {
                tally += skip(&format!("the Python package: {e}"), REMEDY);
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

/// A Python 3.N in `PATH`, or one that pyenv keeps.
fn find_python(minor: u32) -> Option<PathBuf> {
    let pyenv = std::env::home_dir().unwrap_or_default().join(".pyenv/versions");
    let kept = fs::read_dir(pyenv).into_iter().flatten().flatten().map(|version| version.path());
    let version = format!("3.{minor}.");
    let kept =
        kept.filter(|dir| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&version)));
    let kept = kept.map(|dir| dir.join("bin/python3"));
    let runs = |python: &PathBuf| command::stdout(Command::new(python).arg("--version")).is_ok();
    std::iter::once(format!("python3.{minor}").into()).chain(kept).find(runs)
}

/// Installs a wheel into a new environment in `dir`, without a network.
fn install(python: &Path, wheel: &Path, dir: &Path) -> Result<PathBuf> {
    command::run(Command::new(python).args(["-m", "venv", "--clear"]).arg(dir))?;
    let own = dir.join("bin/python3");
    command::run(
        Command::new(&own).args(["-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]).arg(wheel),
    )?;
    Ok(own)
}
