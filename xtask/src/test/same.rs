//! Two clones in two folders, with two folders of cargo's, make the same static program, which runs on any Linux.

use super::report::{Tally, skip};
use super::{Outcome, targets};
use crate::android::Ndk;
use crate::error::{Error, Result};
use crate::{build, cargo, sh, toolchain};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn run() -> Outcome {
    let target = target();
    if !toolchain::has_std(&target) || toolchain::lld().is_err() {
        let remedy = format!("rustup target add {target}; {}", toolchain::LLD_REMEDY);
        return Ok(skip(
            &format!("Rust's standard library for {target} or LLVM's linker is missing"),
            &remedy,
        ));
    }
    let place = build::target_dir().join("same");
    // What an earlier run left may be of other files.
    let _ = fs::remove_dir_all(&place);
    let builds = ["here", "there/further"].map(|name| program(&place.join(name)));
    let [a, b] = builds;
    let (a, b) = (a?, b?);
    let story = build::model_dir("story")?;
    targets::told_by(Command::new(&a), &story)?;
    says_what_brings_grammars(&a, &story)?;
    let [a, b] = [&a, &b].map(|file| fs::read(file).map_err(|e| Error::at(file, e)));
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

/// The least program has none, and says what brings them.
fn says_what_brings_grammars(program: &Path, model: &Path) -> Result<()> {
    for flag in ["--grammar", "--json-schema"] {
        let mut run = Command::new(program);
        let out = sh::output(run.args(["generate", "-p", "x", flag, "{}", "--model"]).arg(model))?;
        let said = String::from_utf8_lossy(&out.stderr);
        if out.status.code() != Some(2) || ![flag, "--features grammar"].iter().all(|w| said.contains(w)) {
            return Err(Error::Failed(format!("`{}` ends with {}: {said}", sh::show(&run), out.status)));
        }
    }
    Ok(())
}

fn target() -> String {
    format!("{}-unknown-linux-musl", std::env::consts::ARCH)
}

/// The program built from a copy of this project's files in `place`.
fn program(place: &Path) -> Result<PathBuf> {
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
    let triple = self::target();
    let mut command = sh::cargo(&["build", "--package", "antigravity", "--no-default-features", "--target"]);
    // Not optimised, which would take four times as long and put no path anywhere.
    let profile = ["opt-level=0", "package.antigravity-model.opt-level=0"];
    command.arg(&triple).args(profile.iter().flat_map(|s| ["--config".into(), format!("profile.dev.{s}")]));
    command.current_dir(&clone).env("CARGO_HOME", &home).env("CARGO_TARGET_DIR", &target);
    command.env("ANTIGRAVITY_MODEL", "story");
    cargo::prepare(&mut command, &triple, Ndk::Never)?;
    sh::run(&mut build::shipped(command, &clone, &target)?)?;
    Ok(target.join(triple).join("debug/antigravity"))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().expect("a file in a folder")).map_err(|e| Error::at(to, e))?;
    fs::copy(from, to).map(|_| ()).map_err(|e| Error::at(to, e))
}
