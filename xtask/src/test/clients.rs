//! The server beside real clients: the Python packages `openai` and `anthropic`, in an environment of their own.

use super::report::Tally;
use super::{Outcome, cargo};
use crate::error::{Error, Result};
use crate::sh;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGES: [&str; 2] = ["openai>=2,<4", "anthropic>=0.40,<3"];

pub fn run() -> Outcome {
    let mut tally = Tally::default();
    let python = match python() {
        Ok(python) => python,
        Err(e) => {
            eprintln!("******** SKIPPED: clients of the server: {e}");
            eprintln!("sudo apt-get install python3 python3-venv, and a network for the first time");
            tally.skipped += 1;
            return Ok(tally);
        }
    };
    sh::run(&mut cargo(&["build", "--package", "antigravity"]))?;
    let program = sh::root().join("target/debug/antigravity");
    let mut clients = Command::new(python);
    clients.arg(sh::root().join("tests/clients.py")).arg(program);
    sh::stream(&mut clients, |line| match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
        (Some(promise), _) => tally.count(promise, Ok(())),
        (_, Some(broken)) => tally.count("a client", Err(Error::Failed(broken.into()))),
        _ => {}
    })?;
    match tally.passed + tally.failed {
        0 => Err(Error::Failed("no client has said anything".into())),
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
    let import = Command::new(python).args(["-c", "import openai, anthropic"]).output();
    import.is_ok_and(|out| out.status.success())
}
