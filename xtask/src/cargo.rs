//! Cargo commands for another target: linked as well as this machine can. `cargo xtask cargo` is one.

use crate::error::{AtPath, Error, Result};
use crate::targets::{Product, is_android, is_static, target_dir};
use crate::{android, command, toolchain};
use clap::Args;
use std::env::consts::ARCH;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

#[derive(Args)]
pub struct CargoArgs {
    /// Cargo's own words, --target among them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    pub words: Vec<String>,
}

/// Lets a cargo command build for a target, adding Rust's standard library where it is missing. Returns what
/// is worth saying about the linking.
pub fn prepare(
    cargo: &mut Command,
    target: &str,
    linking: (android::NdkUse, Product),
) -> Result<Option<String>> {
    toolchain::ensure_std(target)?;
    if is_android(target) {
        return android::prepare_build(cargo, target, linking).map(Some);
    }
    if is_static(target) {
        let libraries = format!("-Lnative={}", make_empty_libraries()?.display());
        // The `dev` profile, which tests build with, does not strip, and `check_loadable` takes stripped files only.
        let flags = ["-Clinker-flavor=ld".into(), "-Clink-arg=--strip-all".into(), libraries];
        toolchain::link_with(cargo, target, &toolchain::find_lld()?, &flags);
    }
    if target == "aarch64-unknown-linux-gnu"
        && ARCH != "aarch64"
        && !command::is_on_path("aarch64-linux-gnu-gcc")
    {
        let install = "sudo apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross";
        return Err(Error::Failed(format!(
            "{target} links with aarch64-linux-gnu-gcc, which is missing: {install}"
        )));
    }
    Ok(None)
}

/// Hands the words on to cargo, prepared for the target among them.
pub fn run(args: &CargoArgs) -> Result<()> {
    let target = find_target(&args.words).ok_or_else(|| {
        Error::Usage("give a cargo command and --target, e.g. test --target aarch64-linux-android".into())
    })?;
    let mut cargo = command::cargo(&args.words.iter().map(String::as_str).collect::<Vec<_>>());
    if let Some(note) = prepare(&mut cargo, target, (android::NdkUse::IfFound, Product::Program))? {
        eprintln!("{target}: {note}");
    }
    command::run(&mut cargo)
}

/// The target that cargo is told to build for; words after `--` are not for cargo.
fn find_target(words: &[String]) -> Option<&str> {
    let ours = words.split(|word| word == "--").next()?;
    let inline = ours.iter().find_map(|word| word.strip_prefix("--target="));
    let apart = || Some(ours.get(ours.iter().position(|word| word == "--target")? + 1)?.as_str());
    inline.or_else(apart)
}

/// A folder of empty libraries: crates ask by name for parts of the C library that musl has in one piece.
fn make_empty_libraries() -> Result<PathBuf> {
    let dir = target_dir().join("musl-stubs");
    fs::create_dir_all(&dir).at(&dir)?;
    for name in ["dl", "m", "pthread", "rt", "util"] {
        let file = dir.join(format!("lib{name}.a"));
        if !file.exists() {
            fs::write(&file, toolchain::EMPTY_ARCHIVE).at(&file)?;
        }
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_found_among_the_words() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        for line in ["test --target t --lib", "test --target=t", "test --target t -- --target x"] {
            assert_eq!(find_target(&words(line)), Some("t"), "{line}");
        }
        for line in ["test", "test --target", "test -- --target t"] {
            assert_eq!(find_target(&words(line)), None, "{line}");
        }
    }
}
