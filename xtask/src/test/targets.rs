//! The parts that build binaries for 64-bit Arm and inspect them, or run them in an emulator.

use super::report::{Tally, skip_missing};
use super::{Outcome, arm};
use crate::error::{Error, Result};
use crate::golden::case::read_case;
use crate::targets::{ANDROID, ARM_LINUX, Features};
use crate::{android, build, command, size};
use std::env::consts::ARCH;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The case that is run again.
const STORY: &str = "tests/golden/story/once.json";

/// Starts the builds for [`sizes`] on cores that other parts leave idle: they take two cores for minutes. Cargo's lock
/// makes `sizes` wait for them. A failure here is ignored: it happens again in `sizes`, which reports it.
pub fn build_early() {
    if android::find_missing(ANDROID).is_some() {
        return;
    }
    std::thread::spawn(|| {
        // On Linux this affects only this thread and its children.
        let _ = rustix::process::nice(19);
        ANDROID_BUILDS.into_iter().try_for_each(|features| for_android(features).map(drop))
    });
}

/// Builds the release binaries for Android, with all features and with none, and checks their sizes and that Android can
/// load them. They are built without an NDK, to be the same on every machine.
pub fn sizes() -> Outcome {
    if let Some((what, remedy)) = android::find_missing(ANDROID) {
        return Ok(skip_missing((&what, &remedy)));
    }
    let story = build::model_dir("story")?;
    let maker = build::build_tested(&story)?;
    let mut tally = Tally::default();
    for features in ANDROID_BUILDS {
        let binary = for_android(features)?;
        let bytes = size::check(&binary, ANDROID, features)?;
        eprintln!("{} {}: {}", binary.display(), features.words(), size::megabytes(bytes));
        // Android can load it with a model inside too.
        let bundle = binary.with_file_name("story");
        build::bundle_with(&maker, &story, Some(&binary), &bundle)?;
        build::check_loadable(ANDROID, bundle)?;
        tally += Tally::ONE;
    }
    Ok(tally)
}

const ANDROID_BUILDS: [Features; 2] = [Features::None, Features::Default];

fn for_android(features: Features) -> Result<PathBuf> {
    build::build_release_aside(features, ANDROID, &build::model_dir("story")?)
}

/// Runs the static binary for 64-bit Arm, emulated on other machines.
pub fn on_arm() -> Outcome {
    if let Some(missing) = arm::missing() {
        return Ok(skip_missing(missing));
    }
    let story = build::model_dir("story")?;
    let binary = build::build_tested_for(ARM_LINUX, &story)?;
    check_story(command(&binary, "aarch64"), &story)?;
    if emulator("aarch64").is_some() {
        PAGES.iter().try_for_each(|&page| with_pages(&binary, "aarch64", page))?;
    }
    Ok(Tally::ONE)
}

/// The emulator of another processor.
fn emulator(architecture: &str) -> Option<String> {
    (architecture != ARCH).then(|| format!("qemu-{architecture}-static"))
}

/// Page sizes of kernels for 64-bit Arm, besides the usual 4 KiB.
const PAGES: &[u32] = &[16 << 10, 64 << 10];

/// Runs the program with this page size, as far as the emulator supports it.
fn with_pages(binary: &Path, architecture: &str, page: u32) -> Result<()> {
    let paged = || {
        let mut run = command(binary, architecture);
        run.env("QEMU_PAGESIZE", page.to_string());
        run
    };
    let report = command::stdout(paged().arg("doctor"))?;
    let report = String::from_utf8_lossy(&report).into_owned();
    let line = report.lines().find(|line| line.starts_with("page size")).unwrap_or_default();
    if !line.ends_with(&format!(" {} KiB", page >> 10)) {
        return Err(Error::at(binary, format!("{line:?} where pages have {page} bytes")));
    }
    eprintln!("{line}");
    check_story(paged(), &build::model_dir("story")?)
}

/// The program, in an emulator if it is for another processor.
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
pub fn check_story(mut run: Command, story: &Path) -> Result<()> {
    let case = read_case(&command::root().join(STORY))?;
    run.arg("generate").args(&case.settings).args(&case.generate).arg("--model").arg(story);
    eprintln!("$ {}", command::show(&run));
    case.check_output(&command::stdout(&mut run)?)
}
