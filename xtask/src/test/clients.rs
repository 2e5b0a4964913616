//! The server beside real clients: Python packages in an environment of their own, and its page in Chromium.

use super::Outcome;
use super::report::{Tally, skip};
use crate::error::{Error, Result};
use crate::{build, sh};
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGES: [&str; 3] = ["openai>=2,<4", "anthropic>=0.40,<3", "litellm>=1.60,<2"];

pub fn run() -> Outcome {
    let program = build::tested(&build::model_dir("story")?)?;
    let mut tally = match python() {
        Ok(python) => said_by(Command::new(python).arg(sh::root().join("tests/clients.py")).arg(&program))?,
        Err(e) => skip(
            &format!("clients of the server: {e}"),
            "sudo apt-get install python3 python3-venv, and a network for the first time",
        ),
    };
    tally += match ["chromedriver", "python3"].into_iter().find(|program| !sh::on_path(program)) {
        None => said_by(Command::new("python3").arg(sh::root().join("tests/page.py")).arg(&program))?,
        Some(missing) => skip(
            &format!("the page of the server: {missing} is missing"),
            "sudo apt-get install chromium chromium-driver python3",
        ),
    };
    Ok(tally)
}

/// The promises that a script prints, `ok NAME` or `not ok NAME: why`.
fn said_by(script: &mut Command) -> Outcome {
    let mut tally = Tally::default();
    sh::stream(script, |line| match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
        (Some(promise), _) => tally.count(promise, Ok(())),
        (_, Some(broken)) => tally.count("a client", Err(Error::Failed(broken.into()))),
        _ => {}
    })?;
    match tally.passed + tally.failed {
        0 => Err(Error::Failed(format!("`{}` has said nothing", sh::show(script)))),
        _ => Ok(tally),
    }
}

/// Python with the packages; the first time they are fetched.
fn python() -> Result<PathBuf> {
    let dir = sh::root().join("target/clients");
    let python = dir.join("bin/python3");
    if has_packages(&python) {
        return Ok(python);
    }
    sh::run(Command::new("python3").args(["-m", "venv"]).arg(&dir))?;
    sh::run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
    Ok(python)
}

fn has_packages(python: &Path) -> bool {
    let import = Command::new(python)
        .args([
            "-c",
            "import importlib.util as i; assert all(map(i.find_spec, ['openai', 'anthropic', 'litellm']))",
        ])
        .output();
    import.is_ok_and(|out| out.status.success())
}
