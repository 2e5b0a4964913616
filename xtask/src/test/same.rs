//! Checks that builds are reproducible: two clones with separate cargo folders build the same static program, which
//! runs on any Linux.

use super::report::{Tally, skip};
use super::{Outcome, targets};
use crate::android::NdkUse;
use crate::error::{AtPath, Error, Result};
use crate::targets::Product;
use crate::{build, cargo, command, toolchain};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn run() -> Outcome {
    let target = target();
    if !toolchain::has_std(&target) || toolchain::find_lld().is_err() {
        let remedy = format!("rustup target add {target}; {}", toolchain::LLD_REMEDY);
        return Ok(skip(
            &format!("Rust's standard library for {target} or LLVM's linker is missing"),
            &remedy,
        ));
    }
    let place = build::target_dir().join("same");
    // An earlier run may have left a build of other files.
    let _ = fs::remove_dir_all(&place);
    // Each build ends with the linker, which uses one core.
    let (a, b) = std::thread::scope(|scope| {
        let other = scope.spawn(|| build_clone(&place.join("there/further")));
        let one = build_clone(&place.join("here"));
        (one, other.join().expect("invariant: nothing in it panics"))
    });
    let (a, b) = (a?, b?);
    let story = build::model_dir("story")?;
    targets::check_story(Command::new(&a), &story)?;
    check_grammar_hint(&a, &story)?;
    let read = |file: &PathBuf| fs::read(file).at(file);
    let (a, b) = (read(&a)?, read(&b)?);
    if a != b {
        let at = a.iter().zip(&b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
        let (a, b) = (a.len(), b.len());
        return Err(Error::Failed(format!("two builds differ from byte {at} on ({a} and {b} bytes)")));
    }
    for path in [&place, &command::root()].into_iter().chain(&std::env::home_dir()) {
        let path = path.as_os_str().as_encoded_bytes();
        // `/` and the like are in every program.
        if path.len() > 4 && a.windows(path.len()).any(|part| part == path) {
            return Err(Error::Failed(format!("the program holds {}", String::from_utf8_lossy(path))));
        }
    }
    let _ = fs::remove_dir_all(&place);
    Ok(Tally::ONE)
}

/// Checks that the program without features names the feature that adds grammars.
fn check_grammar_hint(program: &Path, model: &Path) -> Result<()> {
    for flag in ["--grammar", "--json-schema"] {
        let mut run = Command::new(program);
        let out = command::output(run.args(["generate", "-p", "x", flag, "{}", "--model"]).arg(model))?;
        let said = String::from_utf8_lossy(&out.stderr);
        if out.status.code() != Some(2) || ![flag, "--features grammar"].iter().all(|w| said.contains(w)) {
            return Err(Error::Failed(format!("`{}` ends with {}: {said}", command::show(&run), out.status)));
        }
    }
    Ok(())
}

fn target() -> String {
    format!("{}-unknown-linux-musl", std::env::consts::ARCH)
}

/// Builds the program from a copy of this project's files in `place`.
fn build_clone(place: &Path) -> Result<PathBuf> {
    let (clone, home, target) = (place.join("clone"), place.join("cargo"), place.join("target"));
    let files = command::stdout(Command::new("git").args(["ls-files", "-z"]).current_dir(command::root()))?;
    for file in String::from_utf8_lossy(&files).split_terminator('\0') {
        // Deleted, but not committed.
        if command::root().join(file).is_file() {
            copy(&command::root().join(file), &clone.join(file))?;
        }
    }
    fs::create_dir_all(&home).at(&home)?;
    for kept in ["registry", "git", "config.toml"] {
        let there = build::cargo_home().join(kept);
        if there.exists() {
            symlink(&there, home.join(kept)).at(&home)?;
        }
    }
    let triple = self::target();
    let mut command =
        command::cargo(&["build", "--package", "antigravity", "--no-default-features", "--target"]);
    // Not optimised: that would take four times as long, and adds no paths.
    let profile = ["opt-level=0", "package.antigravity-model.opt-level=0"];
    command.arg(&triple).args(profile.iter().flat_map(|s| ["--config".into(), format!("profile.dev.{s}")]));
    command.current_dir(&clone).env("CARGO_HOME", &home).env("CARGO_TARGET_DIR", &target);
    command.env("ANTIGRAVITY_MODEL", "story");
    cargo::prepare(&mut command, &triple, (NdkUse::Never, Product::Program))?;
    command::build(&mut build::make_reproducible(command, &clone, &target)?)?;
    Ok(target.join(triple).join("debug/antigravity"))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().expect("a file in a folder")).at(to)?;
    fs::copy(from, to).map(|_| ()).at(to)
}
