//! The toolchain for a target: Rust's standard library, a linker, and flags for rustc.

use crate::command;
use crate::error::{Error, Result};
use crate::targets::TARGETS;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The command that installs a linker for every target.
pub const LLD_REMEDY: &str = "sudo apt-get install lld, or install Rust from rustup.rs, which includes it";
/// The text of a static library without members.
pub const EMPTY_ARCHIVE: &str = "!<arch>\n";

/// Sets the linker and adds flags to the user's, as cargo reads only one source of flags.
pub fn link_with(cargo: &mut Command, target: &str, linker: &Path, flags: &[String]) {
    let name = target.to_uppercase().replace('-', "_");
    cargo.env(format!("CARGO_TARGET_{name}_LINKER"), linker);
    add_flags(cargo, flags);
}

/// Adds flags of rustc to the ones of a command, or to the user's if it has none.
pub fn add_flags(cargo: &mut Command, flags: &[String]) {
    let set = cargo.get_envs().find(|(name, _)| *name == FLAGS).and_then(|(_, value)| value);
    let set = set.map(|flags| flags.to_string_lossy().into_owned());
    let encoded = set.or_else(|| std::env::var(FLAGS).ok());
    let plain = std::env::var("RUSTFLAGS").ok();
    let mut all = user_flags(encoded.as_deref(), plain.as_deref());
    all.extend(flags.iter().cloned());
    cargo.env(FLAGS, all.join("\x1f"));
}

/// Cargo's variable for flags that may contain spaces.
const FLAGS: &str = "CARGO_ENCODED_RUSTFLAGS";

fn user_flags(encoded: Option<&str>, plain: Option<&str>) -> Vec<String> {
    let words: Vec<&str> = match (encoded, plain) {
        (Some(encoded), _) => encoded.split('\x1f').collect(),
        (None, Some(plain)) => plain.split(' ').map(str::trim).collect(),
        (None, None) => Vec::new(),
    };
    words.into_iter().filter(|w| !w.is_empty()).map(String::from).collect()
}

pub fn rustc() -> Command {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.current_dir(command::root());
    rustc
}

/// The folder of Rust's standard library for a target.
pub fn find_libdir(target: &str) -> Result<PathBuf> {
    let out = command::stdout(rustc().args(["--print", "target-libdir", "--target", target]))?;
    Ok(String::from_utf8_lossy(&out).trim().into())
}

pub fn has_std(target: &str) -> bool {
    find_libdir(target).is_ok_and(|dir| dir.is_dir())
}

/// Installs Rust's standard library for a target if it is missing.
pub fn ensure_std(target: &str) -> Result<()> {
    let unknown =
        |_| Error::Usage(format!("rustc knows no target {target}; supported: {}", TARGETS.join(", ")));
    if find_libdir(target).map_err(unknown)?.is_dir() {
        return Ok(());
    }
    let add = format!("rustup target add {target}");
    let lacking =
        |e: &str| Error::Failed(format!("Rust's standard library for {target} is missing{e}: {add}"));
    if !command::is_on_path("rustup") {
        return Err(lacking(", and so is rustup; with Rust from rustup.rs"));
    }
    command::run(Command::new("rustup").args(["target", "add", target]))
        .map_err(|_| lacking("; add it by hand"))
}

/// The path of LLVM's linker: rustup's, or the newest in `PATH`.
pub fn find_lld() -> Result<PathBuf> {
    let own = command::stdout(rustc().args(["--print", "target-libdir"]))?;
    let own = Path::new(String::from_utf8_lossy(&own).trim()).join("../bin/gcc-ld/ld.lld");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut others: Vec<(u32, PathBuf)> = Vec::new();
    for dir in std::env::split_paths(&path) {
        for file in fs::read_dir(dir).into_iter().flatten().flatten() {
            let version = lld_version(&file.file_name().to_string_lossy());
            others.extend(version.map(|v| (v, file.path())));
        }
    }
    others.sort();
    let own = fs::canonicalize(own).ok();
    let mut candidates = own.into_iter().chain(others.into_iter().rev().map(|(_, path)| path));
    let works = |lld: &PathBuf| command::stdout(Command::new(lld).arg("--version")).is_ok();
    candidates
        .find(works)
        .ok_or_else(|| Error::Failed(format!("LLVM's linker ld.lld is missing: {LLD_REMEDY}")))
}

/// The version in a linker's name: 19 for `ld.lld-19`, and the maximum for `ld.lld`, the user's default.
fn lld_version(name: &str) -> Option<u32> {
    match name.strip_prefix("ld.lld")? {
        "" => Some(u32::MAX),
        version => version.strip_prefix('-')?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_the_user_are_kept_and_add_up_and_linkers_are_recognised() {
        assert_eq!(user_flags(None, Some("-D  warnings ")), ["-D", "warnings"]);
        assert_eq!(user_flags(Some("-L\x1fa b"), Some("-D warnings")), ["-L", "a b"]);
        let mut cargo = Command::new("cargo");
        cargo.env(FLAGS, "-L\x1fa b");
        add_flags(&mut cargo, &["-O".into()]);
        add_flags(&mut cargo, &["-g".into()]);
        let set: Vec<_> = cargo.get_envs().filter_map(|(_, value)| value?.to_str()).collect();
        assert_eq!(set, ["-L\x1fa b\x1f-O\x1f-g"]);
        assert!(lld_version("ld.lld") > lld_version("ld.lld-19") && lld_version("ld.lld-19") == Some(19));
        assert!(["ld", "ld.lld.exe", "ld.lld-", "ld64.lld"].iter().all(|name| lld_version(name).is_none()));
    }
}
