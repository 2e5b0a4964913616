//! The Android archive: its layout and libraries, and its class in a JVM of this machine.

use super::Outcome;
use super::library::build_everything;
use super::python::count_promises;
use super::report::{Tally, skip_missing};
use crate::build::aar::{MACHINES, pack_aar};
use crate::build::library::build_unoptimised_shared;
use crate::error::{AtPath, Error, Result};
use crate::targets::ANDROID;
use crate::{android, command};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Alignment in bytes of what a phone maps from an archive.
const PAGE: usize = 16384;

pub fn run() -> Outcome {
    if !command::is_on_path("javac") {
        return Ok(skip_missing(("a Java compiler", "sudo apt-get install default-jdk-headless")));
    }
    if let Some((what, remedy)) = android::find_missing(ANDROID) {
        return Ok(skip_missing((&what, &remedy)));
    }
    let built = build_everything()?;
    // Of a phone alone, as a library takes a minute to build. Each is checked when it is put into an archive.
    let libraries = [(MACHINES[0], build_unoptimised_shared(&built.model, ANDROID)?)];
    let aar = pack_aar(&built.model, &libraries, Some(&built.bundle), &built.dir)?;
    let (archive, size) = (fs::read(&aar).at(&aar)?, fs::metadata(&built.bundle).at(&built.bundle)?.len());
    let mut tally = Tally::default();
    tally.count("the library can be mapped", find_place(&archive, &libraries[0].1).map(drop));
    let place = find_place(&archive, &built.bundle)?;
    let mut java = Command::new("java");
    java.arg("-Xcheck:jni").arg(format!("-Djava.library.path={}", built.dir.display())).arg("-cp");
    java.arg(built.dir.join("classes.jar")).args(["--add-opens", "java.base/java.io=ALL-UNNAMED"]);
    java.arg(command::root().join("tests/ffi/Check.java")).arg(&built.program).arg(&built.model);
    java.arg(&aar).args([place.to_string(), size.to_string()]).arg(built.dir.join("java-session"));
    tally += count_promises("the Java class", &mut java)?;
    Ok(tally)
}

/// The place of a file in an archive, which must be the beginning of a page.
fn find_place(archive: &[u8], path: &Path) -> Result<usize> {
    let file = fs::read(path).at(path)?;
    let place = (0..archive.len()).step_by(PAGE).find(|&at| archive[at..].starts_with(&file));
    place.ok_or_else(|| Error::at(path, "begins at no page of the archive"))
}
