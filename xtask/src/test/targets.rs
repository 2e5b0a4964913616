//! The parts that build the released binaries, inspect them, and run them if this machine can.

use super::report::{Tally, skip, skip_missing};
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

/// Starts the builds for [`sizes`] on cores that other parts leave idle: they take two cores for eight minutes. Cargo's
/// lock makes `sizes` wait for them. A failure here is ignored: it happens again in `sizes`, which reports it.
pub fn build_early() {
    let builds: [fn() -> Result<()>; 2] = [
        || match android::find_missing(ANDROID) {
            Some(_) => Ok(()),
            None => ANDROID_BUILDS.into_iter().try_for_each(|features| for_android(features).map(drop)),
        },
        || if size::has_budget(&build::host_triple()) { for_here().map(drop) } else { Ok(()) },
    ];
    for build in builds {
        std::thread::spawn(move || {
            // On Linux this affects only this thread and its children.
            let _ = rustix::process::nice(19);
            build()
        });
    }
}

/// Builds the release binaries for Android, with all features and with none, and for this machine. Most of the time
/// goes to the linker, which uses one core, so two are built at the same time.
pub fn sizes() -> Outcome {
    std::thread::scope(|scope| {
        let android = scope.spawn(android);
        let mut tally = here()?;
        tally += android.join().expect("invariant: nothing in it panics")?;
        Ok(tally)
    })
}

/// Checks that Android can load the binary. It is always built without an NDK, to be the same on every machine.
fn android() -> Outcome {
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

fn for_here() -> Result<PathBuf> {
    build::build_for_target(&build::host_triple(), Some(&build::model_dir("story")?))
}

/// This machine's own program tells the story.
fn here() -> Outcome {
    let host = build::host_triple();
    if !size::has_budget(&host) {
        let remedy = "nothing to install; see xtask/src/size.rs";
        return Ok(skip(&format!("no size budget for {host}"), remedy));
    }
    let binary = for_here()?;
    let bytes = size::check(&binary, &host, Features::Default)?;
    eprintln!("{}: {}", binary.display(), size::megabytes(bytes));
    check_story(command(&binary, ARCH), &build::model_dir("story")?)?;
    Ok(Tally::ONE)
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
