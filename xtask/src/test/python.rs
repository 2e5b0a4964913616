//! Python scripts: environments with packages, and the promises that the scripts print.

use super::Outcome;
use super::report::Tally;
use crate::command;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The advice when a script cannot run.
pub const REMEDY: &str = "sudo apt-get install python3 python3-venv, and a network for the first time";

/// Python with the given packages and modules in `target/NAME`, installed the first time.
pub fn with_packages(name: &str, packages: &[&str], modules: &[&str]) -> Result<PathBuf> {
    let dir = command::root().join("target").join(name);
    let python = dir.join("bin/python3");
    if has_modules(&python, modules) {
        return Ok(python);
    }
    command::run(Command::new("python3").args(["-m", "venv"]).arg(&dir))?;
    command::run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages))?;
    Ok(python)
}

fn has_modules(python: &Path, modules: &[&str]) -> bool {
    let import = "import importlib.util as i, sys; assert all(map(i.find_spec, sys.argv[1:]))";
    let found = Command::new(python).args(["-c", import]).args(modules).output();
    found.is_ok_and(|out| out.status.success())
}

/// Counts the promises that a script prints, `ok NAME` or `not ok NAME: why`; `of` is their kind in messages.
pub fn count_promises(of: &str, script: &mut Command) -> Outcome {
    let mut tally = Tally::default();
    command::stream(script, |line| match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
        (Some(promise), _) => tally.count(promise, Ok(())),
        (_, Some(broken)) => tally.count(of, Err(Error::Failed(broken.into()))),
        // Java's checks of native methods.
        _ if line.starts_with("WARNING") => tally.count(of, Err(Error::Failed(line.into()))),
        _ => {}
    })?;
    match tally.passed + tally.failed {
        0 => Err(Error::Failed(format!("`{}` printed nothing", command::show(script)))),
        _ => Ok(tally),
    }
}
