//! Two clones in two folders, with two folders of cargo's, make the same program.

use super::Outcome;
use super::report::Tally;
use crate::error::{Error, Result};
use crate::{build, sh};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

pub fn run() -> Outcome {
    let place = build::target_dir().join("same");
    // What an earlier run left may be of other files.
    let _ = fs::remove_dir_all(&place);
    let builds = ["here", "there/further"].map(|name| program(&place.join(name)));
    let [a, b] = builds;
    let (a, b) = (a?, b?);
    if a != b {
        let at = a.iter().zip(&b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
        let (a, b) = (a.len(), b.len());
        return Err(Error::Failed(format!("two builds differ from byte {at} on ({a} and {b} bytes)")));
    }
    for path in [&place, &sh::root()].into_iter().chain(&std::env::home_dir()) {
        let path = path.as_os_str().as_encoded_bytes();
        // `/` and the like are in every program.
        if path.len() > 4 && a.windows(path.len()).any(|part| part == path) {
            return Err(Error::Failed(format!("the program holds {}", String::from_utf8_lossy(path))));
        }
    }
    let _ = fs::remove_dir_all(&place);
    Ok(Tally::ONE)
}

/// The program built from a copy of this project's files in `place`.
fn program(place: &Path) -> Result<Vec<u8>> {
    let (clone, home, target) = (place.join("clone"), place.join("cargo"), place.join("target"));
    let files = sh::stdout(Command::new("git").args(["ls-files", "-z"]).current_dir(sh::root()))?;
    for file in String::from_utf8_lossy(&files).split_terminator('\0') {
        // Deleted, but not committed.
        if sh::root().join(file).is_file() {
            copy(&sh::root().join(file), &clone.join(file))?;
        }
    }
    fs::create_dir_all(&home).map_err(|e| Error::at(&home, e))?;
    for kept in ["registry", "git", "config.toml"] {
        let there = build::cargo_home().join(kept);
        if there.exists() {
            symlink(&there, home.join(kept)).map_err(|e| Error::at(&home, e))?;
        }
    }
    // Not optimised, which would take four times as long and put no path anywhere.
    let words = ["build", "--package", "antigravity", "--profile", "quick", "--no-default-features"];
    let mut cargo = sh::cargo(&words);
    cargo.args([
        "--config",
        "profile.quick.opt-level=0",
        "--config",
        "profile.quick.package.'*'.opt-level=0",
    ]);
    cargo.current_dir(&clone).env("CARGO_HOME", &home).env("CARGO_TARGET_DIR", &target);
    cargo.env("ANTIGRAVITY_MODEL", "story");
    sh::run(&mut build::shipped(cargo, &clone, &target)?)?;
    let binary = target.join("quick/antigravity");
    fs::read(&binary).map_err(|e| Error::at(&binary, e))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().expect("a file in a folder")).map_err(|e| Error::at(to, e))?;
    fs::copy(from, to).map(|_| ()).map_err(|e| Error::at(to, e))
}
