//! `cargo xtask runner`: runs a test binary of cargo on a device, with the files that the tests read.
//! `.cargo/config.toml` makes it the runner of the Android target.

use crate::deploy::PROGRAM;
use crate::device::files::{Item, find_existing, install};
use crate::device::shell::{self, DeviceProgram, Input, quote};
use crate::device::{DeviceArgs, DeviceKind};
use crate::error::{AtPath, Error, Result};
use crate::{build, command, run};
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders of the project that tests read.
const DATA: &[&str] = &["models/story", "tests/fixtures", "tests/golden"];
const ARCHIVE: &str = "data.tar";
/// Script: unpacks the archive with hash `$h` unless it is unpacked already.
const UNPACK: &str =
    "{ [ \"$(cat unpacked 2>/dev/null)\" = \"$h\" ] || { tar -xf data.tar && echo \"$h\" >unpacked; }; }";

#[derive(Args)]
pub struct RunnerArgs {
    /// The test binary
    program: PathBuf,
    /// Its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARG")]
    words: Vec<String>,
}

pub fn run(args: &RunnerArgs) -> Result<()> {
    let kind = std::env::var("ANTIGRAVITY_DEVICE").unwrap_or_else(|_| "adb".into());
    let kind = DeviceKind::from_str(&kind, true)
        .map_err(|_| Error::Usage(format!("ANTIGRAVITY_DEVICE={kind}: use adb, qemu or local")))?;
    let device = DeviceArgs::of_kind(kind).open()?;
    let (dir, home) = (format!("{}/tests", device.home()), device.home());
    let binary = args.program.as_path();
    let name = binary.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| Error::Usage(format!("{}: not a program", binary.display())))?;
    let archive = make_archive()?;
    install(&*device, &dir, &[Item::new(archive, ARCHIVE), Item::new(binary, &strip_hash(name))])?;
    let unpack = format!("cd {} && h=$(sha256sum {ARCHIVE}) && {UNPACK}", quote(&dir));
    shell::capture(&*device, &unpack)?.ok(&*device)?;
    // Tests start the program, which cargo has built beside them and which finds the model in its own folder.
    let model = format!("{dir}/models/story");
    let built = binary.parent().and_then(Path::parent);
    install(&*device, &model, &built.map_or_else(Vec::new, |d| find_existing(d, &[PROGRAM])))?;
    let mut environment = run::program_environment(&*device, &dir);
    environment.retain(|(name, _)| *name != "ANTIGRAVITY_MODEL");
    environment.push(("CARGO_MANIFEST_DIR", dir.clone()));
    environment.push(("CARGO_BIN_EXE_antigravity", format!("{model}/{PROGRAM}")));
    let passed_on = ["ANTIGRAVITY_SIMD", "RUST_BACKTRACE"].into_iter();
    environment.extend(passed_on.filter_map(|name| Some((name, std::env::var(name).ok()?))));
    let program =
        DeviceProgram { dir, environment, path: format!("./{}", strip_hash(name)), args: args.words.clone() };
    eprintln!("{}: {name} in {home}/tests", device.name());
    run::check_exit(&*device, shell::run_streamed(&*device, &program, Input::Nothing)?)
}

/// A test binary's name without cargo's hash, so that a new build replaces the old one.
fn strip_hash(name: &str) -> String {
    let stem = name.rsplit_once('-').filter(|(_, hash)| hash.len() == 16);
    format!("test-{}", stem.map_or(name, |(stem, _)| stem))
}

/// An archive of [`DATA`]: the same data make the same bytes.
fn make_archive() -> Result<PathBuf> {
    let dir = build::target_dir().join("device");
    std::fs::create_dir_all(&dir).at(&dir)?;
    let (archive, fresh) = (dir.join(ARCHIVE), dir.join(format!("{ARCHIVE}.{}", std::process::id())));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--format=ustar"]);
    let tar = tar.arg("-cf").arg(&fresh).arg("-C").arg(command::root()).args(DATA);
    command::stdout(tar)?;
    std::fs::rename(&fresh, &archive).at(&archive)?;
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_test_binaries_lose_cargos_hash() {
        assert_eq!(strip_hash("golden-0123456789abcdef"), "test-golden");
        assert_eq!(strip_hash("my-test"), "test-my-test");
    }
}
