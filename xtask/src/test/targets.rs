//! The parts of the tests that build the release binary for other targets, look into it, and run it if they can.

use super::Outcome;
use super::report::{Tally, skip};
use crate::error::{Error, Result};
use crate::targets::{ANDROID, Features};
use crate::{android, build, sh, size, toolchain};
use serde_json::Value;
use std::env::consts::ARCH;
use std::path::Path;
use std::process::Command;

/// The case under `tests/golden` that is told again.
const STORY: &str = "tests/golden/story/once.json";

/// Always without an NDK, so that it is the same on every machine.
pub fn android() -> Outcome {
    if let Some((what, remedy)) = android::missing() {
        return Ok(skip(&format!("{what} is missing"), &format!("install it with: {remedy}")));
    }
    let story = build::model_dir("story")?;
    sh::run(&mut build::quick(&story))?;
    let mut tally = Tally::default();
    for features in [Features::None, Features::Default] {
        let binary = build::release_with(features, ANDROID, Some(&story), android::Ndk::Never)?;
        let bytes = size::check(&binary, ANDROID, features)?;
        eprintln!("{} {}: {}", binary.display(), features.words(), size::megabytes(bytes));
        // With a model inside it is still what Android loads.
        let bundle = binary.with_file_name("story");
        build::bundle_by(&build::quick_binary(), &story, &binary, &bundle)?;
        build::fit_for(ANDROID, bundle)?;
        tally += Tally::ONE;
    }
    Ok(tally)
}

/// This machine's own program, with all commands and with the one that it has at least, which tells the story too.
pub fn sizes() -> Outcome {
    let host = build::host();
    if !size::limits(&host) {
        let remedy = "nothing to install; see xtask/src/size.rs";
        return Ok(skip(&format!("there is no budget for {host}"), remedy));
    }
    let story = build::model_dir("story")?;
    let mut tally = Tally::default();
    for features in [Features::None, Features::Default] {
        let binary = build::for_host_with(features, Some(&story))?;
        let bytes = size::check(&binary, &host, features)?;
        eprintln!("{}: {}", features.words(), size::megabytes(bytes));
        told_by(command(&binary, ARCH), &story)?;
        tally += Tally::ONE;
    }
    Ok(tally)
}

/// This machine's own static binary, and that of 64-bit Arm under emulation.
pub fn statics() -> Outcome {
    let mut architectures = vec![ARCH, "aarch64"];
    architectures.dedup();
    let mut tally = Tally::default();
    for architecture in architectures {
        let target = format!("{architecture}-unknown-linux-musl");
        tally += match missing(architecture, &target) {
            Some((what, remedy)) => {
                skip(&format!("{what} is missing"), &format!("install it with: {remedy}"))
            }
            None => same_story(architecture, &target).map(|()| Tally::ONE)?,
        };
    }
    Ok(tally)
}

fn missing(architecture: &str, target: &str) -> Option<(String, String)> {
    if !toolchain::has_std(target) {
        return Some((
            format!("Rust's standard library for {target}"),
            format!("rustup target add {target}"),
        ));
    }
    if toolchain::lld().is_err() {
        return Some(("LLVM's linker".into(), toolchain::LLD_REMEDY.into()));
    }
    let emulator = emulator(architecture)?;
    let lacking = !sh::on_path(&emulator);
    lacking.then(|| (emulator, "sudo apt-get install qemu-user-static".into()))
}

/// The program that runs those of another processor.
fn emulator(architecture: &str) -> Option<String> {
    (architecture != ARCH).then(|| format!("qemu-{architecture}-static"))
}

fn same_story(architecture: &str, target: &str) -> Result<()> {
    let story = build::model_dir("story")?;
    let binary = build::quick_for(target, Some(&story))?;
    told_by(command(&binary, architecture), &story)?;
    if emulator(architecture).is_some() {
        PAGES.iter().try_for_each(|&page| with_pages(&binary, architecture, page))?;
    }
    Ok(())
}

/// Page sizes of kernels for 64-bit Arm besides the usual 4 KiB, which is this machine's.
const PAGES: &[u32] = &[16 << 10, 64 << 10];

/// The same on a kernel with pages of this size, as far as the emulator can be one.
fn with_pages(binary: &Path, architecture: &str, page: u32) -> Result<()> {
    let paged = || {
        let mut run = command(binary, architecture);
        run.env("QEMU_PAGESIZE", page.to_string());
        run
    };
    let report = sh::stdout(paged().arg("doctor"))?;
    let report = String::from_utf8_lossy(&report).into_owned();
    let line = report.lines().find(|line| line.starts_with("page size")).unwrap_or_default();
    if !line.ends_with(&format!(" {} KiB", page >> 10)) {
        return Err(Error::at(binary, format!("{line:?} where pages have {page} bytes")));
    }
    eprintln!("{line}");
    told_by(paged(), &build::model_dir("story")?)
}

/// The program, in an emulator if it is another processor's.
fn command(binary: &Path, architecture: &str) -> Command {
    match emulator(architecture) {
        None => Command::new(binary),
        Some(emulator) => {
            let mut run = Command::new(emulator);
            run.arg(binary);
            run
        }
    }
}

/// Runs the program on the golden case.
fn told_by(mut run: Command, story: &Path) -> Result<()> {
    let file = sh::root().join(STORY);
    let text = std::fs::read_to_string(&file).map_err(|e| Error::at(&file, e))?;
    let case: Value = serde_json::from_str(&text).map_err(|e| Error::at(&file, e))?;
    let field = |pointer: &str| match case.pointer(pointer) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        _ => Err(Error::at(&file, format!("has no {pointer}"))),
    };
    run.args(["generate", "--quiet", "--temperature", "0", "--repetition-penalty", "1"]);
    let flags = [
        ("--prompt", "/prompt"),
        ("--num-tokens", "/tokens"),
        ("--weight-type", "/weights"),
        ("--cache-type-k", "/k"),
        ("--cache-type-v", "/v"),
    ];
    for (flag, pointer) in flags {
        run.arg(flag).arg(field(pointer)?);
    }
    run.arg("--model").arg(story);
    eprintln!("$ {}", sh::show(&run));
    told(&sh::show(&run), &sh::stdout(&mut run)?, &field("/expected/text")?)
}

fn told(by: &str, stdout: &[u8], expected: &str) -> Result<()> {
    let text = String::from_utf8_lossy(stdout);
    if text.trim_end_matches('\n') != expected {
        return Err(Error::Failed(format!(
            "`{by}` told another story than {STORY}:\n    {text}\n    {expected}"
        )));
    }
    eprintln!("as in {STORY}: {expected}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_foreign_programs_are_emulated() {
        assert_eq!(emulator(ARCH), None);
        assert_eq!(emulator("aarch65").as_deref(), Some("qemu-aarch65-static"));
    }

    #[test]
    fn another_story_is_a_failure() {
        let check = |text: &str| told("x", text.as_bytes(), "once");
        assert!(check("once").is_ok() && check("once\n").is_ok());
        assert!(check("twice").is_err() && check("").is_err());
    }
}
