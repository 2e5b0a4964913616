//! What building for a target needs of the machine: Rust's standard library for it, a linker, and a way to add flags.

use crate::command;
use crate::error::{Error, Result};
use crate::targets::TARGETS;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How to get a linker for every target.
pub const LLD_REMEDY: &str = "sudo apt-get install lld, or a Rust of rustup.rs, which brings it";
/// A file of this text is a library without members.
pub const EMPTY_ARCHIVE: &str = "!<arch>\n";

/// Names the linker and adds flags to those the user has set, since cargo takes only one of its sources.
pub fn link_with(cargo: &mut Command, target: &str, linker: &Path, flags: &[String]) {
    let name = target.to_uppercase().replace('-', "_");
    cargo.env(format!("CARGO_TARGET_{name}_LINKER"), linker);
    add_flags(cargo, flags);
}

/// Adds flags of rustc to those that a command has already, else to those the user has set.
pub fn add_flags(cargo: &mut Command, flags: &[String]) {
    let set = cargo.get_envs().find(|(name, _)| *name == FLAGS).and_then(|(_, value)| value);
    let set = set.map(|flags| flags.to_string_lossy().into_owned());
    let encoded = set.or_else(|| std::env::var(FLAGS).ok());
    let plain = std::env::var("RUSTFLAGS").ok();
    let mut all = user_flags(encoded.as_deref(), plain.as_deref());
    all.extend(flags.iter().cloned());
    cargo.env(FLAGS, all.join("\x1f"));
}

/// Cargo's variable for flags that may hold blanks.
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

/// Where Rust's standard library for a target is, or would be.
pub fn libdir(target: &str) -> Result<PathBuf> {
    let out = command::stdout(rustc().args(["--print", "target-libdir", "--target", target]))?;
    Ok(String::from_utf8_lossy(&out).trim().into())
}

pub fn has_std(target: &str) -> bool {
    libdir(target).is_ok_and(|dir| dir.is_dir())
}

/// Installs Rust's standard library for a target if it is missing.
pub fn ensure_std(target: &str) -> Result<()> {
    let unknown =
        |_| Error::Usage(format!("rustc knows no target {target}; supported: {}", TARGETS.join(", ")));
    if libdir(target).map_err(unknown)?.is_dir() {
        return Ok(());
    }
    let add = format!("rustup target add {target}");
    let lacking =
        |e: &str| Error::Failed(format!("Rust's standard library for {target} is missing{e}: {add}"));
    if !command::is_on_path("rustup") {
        return Err(lacking(" and there is no rustup; with Rust of rustup.rs"));
    }
    command::run(Command::new("rustup").args(["target", "add", target]))
        .map_err(|_| lacking("; add it by hand"))
}

/// LLVM's linker under a name by which it takes the usual arguments: rustup's, or the newest in `PATH`.
pub fn lld() -> Result<PathBuf> {
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

/// 19 for `ld.lld-19`, and more than any for `ld.lld`, which is the one the user prefers.
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
    fn flags_of_the_user_are_kept() {
        assert_eq!(user_flags(None, None), [""; 0]);
        assert_eq!(user_flags(None, Some("-D  warnings ")), ["-D", "warnings"]);
        assert_eq!(user_flags(Some("-L\x1fa b"), Some("-D warnings")), ["-L", "a b"]);
        assert_eq!(user_flags(Some(""), Some("-D warnings")), [""; 0]);
    }

    #[test]
    fn flags_add_up() {
        let mut cargo = Command::new("cargo");
        cargo.env(FLAGS, "-L\x1fa b");
        add_flags(&mut cargo, &["-O".into()]);
        add_flags(&mut cargo, &["-g".into()]);
        let set: Vec<_> = cargo.get_envs().filter_map(|(_, value)| value?.to_str()).collect();
        assert_eq!(set, ["-L\x1fa b\x1f-O\x1f-g"]);
    }

    #[test]
    fn linkers_are_recognised() {
        assert_eq!(lld_version("ld.lld-19"), Some(19));
        assert!(lld_version("ld.lld") > lld_version("ld.lld-19"));
        for name in ["ld", "ld.lld.exe", "ld.lld-", "ld64.lld", "ld.lld-x"] {
            assert_eq!(lld_version(name), None, "{name}");
        }
    }
}
