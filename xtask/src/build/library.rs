//! The C library: a shared object, a static library and the header.

use super::{
    LIBRARY_PROFILE, build_for, build_for_host, bundle_with, bundled_name, link_model_files,
    make_reproducible, model_flags, output_path, print_size,
};
use crate::android::NdkUse;
use crate::elf::{Elf, find_library_problems};
use crate::error::{AtPath, Error, Result};
use crate::targets::{Product, TARGETS, host_triple, is_static, target_dir};
use crate::{command, header, toolchain};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Files of a library.
pub const SHARED: &str = "libantigravity.so";
pub const STATIC: &str = "libantigravity.a";

/// Builds the library for a model and a target, and copies it with its header beside the model's program. Returns the
/// folder.
pub fn build_library(model: &Path, target: Option<&str>, ndk: NdkUse) -> Result<PathBuf> {
    let host = host_triple();
    let triple = target.unwrap_or(&host);
    let built = release_library(model, triple, ndk)?;
    let dir = output_path(model, target).with_file_name("lib");
    fs::create_dir_all(&dir).at(&dir)?;
    for name in library_files(triple) {
        let (from, to) = (built.join(name), dir.join(name));
        fs::copy(&from, &to).at(&to)?;
        print_size(&to)?;
    }
    let header = dir.join("antigravity.h");
    fs::copy(header::header_path(), &header).at(&header)?;
    println!("{}", header.display());
    link_model_files(model, &dir)?;
    Ok(dir)
}

/// The files that a target has; static programs load no shared libraries.
fn library_files(target: &str) -> &'static [&'static str] {
    if is_static(target) { &[STATIC] } else { &[SHARED, STATIC] }
}

/// Builds the library as it is shipped, and returns the folder it is in.
pub fn release_library(model: &Path, target: &str, ndk: NdkUse) -> Result<PathBuf> {
    let words =
        ["rustc", "--profile", LIBRARY_PROFILE, "--package", "antigravity", "--lib", "--no-default-features"];
    let mut cargo = command::cargo(&words);
    let features = if target == "x86_64-unknown-linux-gnu" { "ffi,nvidia" } else { "ffi" };
    cargo.args(["--features", features, "--crate-type", crate_types(target)]);
    cargo.env("ANTIGRAVITY_MODEL", bundled_name(model));
    let mut cargo = make_reproducible(cargo, &command::root(), &target_dir())?;
    if !is_static(target) {
        // Threads and signal handlers of the library outlive an unloading.
        toolchain::add_flags(&mut cargo, &["-Clink-arg=-z".into(), "-Clink-arg=nodelete".into()]);
    }
    build_for(cargo, target, (ndk, Product::Library))?;
    let dir = target_dir().join(target).join(LIBRARY_PROFILE);
    strip_static(&dir.join(STATIC));
    if !is_static(target) {
        check_shared(target, &dir.join(SHARED))?;
    }
    Ok(dir)
}

fn crate_types(target: &str) -> &'static str {
    if is_static(target) { "staticlib" } else { "cdylib,staticlib" }
}

/// Removes what a linker does not need from a static library, if this machine has a program for it.
fn strip_static(library: &Path) {
    let strip = ["llvm-strip", "strip"].into_iter().find(|program| command::is_on_path(program));
    if let Some(strip) = strip {
        // Another machine's objects are left as they are.
        let _ = command::stdout(Command::new(strip).arg("--strip-debug").arg(library));
    }
}

/// Checks that a loader of the target accepts the shared object.
fn check_shared(target: &str, library: &Path) -> Result<()> {
    if TARGETS.contains(&target) {
        let file = fs::read(library).at(library)?;
        let problems = find_library_problems(target, &Elf::parse(&file).at(library)?);
        if !problems.is_empty() {
            return Err(Error::at(library, format!("not fit for {target}: it {}", problems.join("; it "))));
        }
    }
    Ok(())
}

/// Writes the model into the shared object of a folder, from which `antigravity_load` takes it without a path.
pub fn bundle_shared(model: &Path, dir: &Path) -> Result<()> {
    let (library, out) = (dir.join(SHARED), dir.join("bundle").join(SHARED));
    fs::create_dir_all(dir.join("bundle")).at(&out)?;
    bundle_with(&build_for_host(Some(model))?, model, Some(&library), &out)?;
    print_size(&out)
}

/// Settings of the `dev` profile for a library that is not run: stripped, and built in a third of the time.
const UNOPTIMISED: [&str; 4] = [
    "strip=true",
    "opt-level=0",
    "package.antigravity-model.opt-level=0",
    "package.antigravity-numeric.opt-level=0",
];

/// Builds the shared library for another target as fast as can be, for checks that do not run it. Returns its path.
pub fn build_unoptimised_shared(model: &Path, target: &str) -> Result<PathBuf> {
    let words = ["rustc", "--package", "antigravity", "--lib", "--no-default-features", "--features", "ffi"];
    let mut cargo = command::cargo(&words);
    cargo.args(["--crate-type", "cdylib"]).env("ANTIGRAVITY_MODEL", bundled_name(model));
    for setting in UNOPTIMISED {
        cargo.args(["--config", &format!("profile.dev.{setting}")]);
    }
    build_for(cargo, target, (NdkUse::Never, Product::Library))?;
    let library = target_dir().join(target).join("debug").join(SHARED);
    check_shared(target, &library)?;
    Ok(library)
}

/// Builds the library of tests for a model, next to the test program, whose crates it shares. Returns the folder.
pub fn build_tested_library(model: &Path) -> Result<PathBuf> {
    let mut cargo = command::cargo(&["rustc", "--package", "antigravity", "--lib", "--features", "ffi"]);
    cargo.args(["--crate-type", "cdylib,staticlib"]).args(model_flags(model));
    command::build(cargo.env("ANTIGRAVITY_MODEL", bundled_name(model)))?;
    Ok(target_dir().join("debug"))
}
