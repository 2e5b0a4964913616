//! The part of the tests that runs some of those of OpenCL devices on other runtimes than PoCL: their compilers are others,
//! and they have subgroups, integer dot products and recordings of launches.

use super::report::{Tally, skip};
use super::{Outcome, all_tests, counted};
use crate::error::{Error, Result};
use crate::{build, fetch, sh};
use std::fs;
use std::path::{Path, PathBuf};

/// On Intel's runtime: every variant of kernels, recordings, batches, and moves with every cache and every eviction.
const ON_INTEL: [&str; 5] = [
    "hybrid::",
    "model::text_is_the_same",
    "shared::a_recorded_token_has_the_bits_of_one_that_is_not",
    "shared::a_token_of_each_of_many_sequences_is_computed_as_alone",
    "variants::every_variant_changes_nothing",
];
/// On rusticl, which is slow.
const ON_RUSTICL: [&str; 2] = ["model::text_is_the_same", "variants::every_variant_changes_nothing"];
/// Where Debian has rusticl's entry for the loader.
const RUSTICL: &str = "/etc/OpenCL/vendors/rusticl.icd";

pub fn run() -> Outcome {
    build::build_draft()?;
    sh::run(all_tests().args(["--test", "opencl", "--no-run"]))?;
    let mut tally = match intel() {
        Some(libraries) => on(&entry_of(&libraries)?, &libraries, &ON_INTEL)?,
        None => without_intel(),
    };
    match has_rusticl() {
        true => tally += on(Path::new(RUSTICL), Path::new(""), &ON_RUSTICL)?,
        // Nobody can install what a distribution does not have.
        false => eprintln!(
            "NOT TRIED: rusticl; Debian's mesa-opencl-icd has it, one that runs these kernels from 13 on"
        ),
    }
    Ok(tally)
}

/// Whether there is a rusticl that can be used: that of Debian 12 gives kernels groups of 32 items.
fn has_rusticl() -> bool {
    let old = fs::read_to_string("/etc/debian_version").is_ok_and(|version| version.starts_with("12."));
    Path::new(RUSTICL).exists() && !old
}

/// The libraries of Intel's runtime for CPUs, where `.ci/run` puts them.
pub fn intel() -> Option<PathBuf> {
    let dir = fetch::folder()?.join("intel-opencl/lib");
    dir.join("libintelocl.so").exists().then_some(dir)
}

/// Says that it is missing.
pub fn without_intel() -> Tally {
    let remedy = "pip install --prefix ~/.cache/antigravity/intel-opencl intel-opencl-rt";
    skip("Intel's OpenCL runtime is missing", remedy)
}

/// What the loader reads to find it.
fn entry_of(libraries: &Path) -> Result<PathBuf> {
    let entry = build::target_dir().join("intel.icd");
    let library = libraries.join("libintelocl.so");
    fs::write(&entry, format!("{}\n", library.display())).map_err(|e| Error::at(&entry, e))?;
    Ok(entry)
}

/// Runs tests with the runtime of this entry alone, which finds its libraries in a folder.
fn on(entry: &Path, libraries: &Path, tests: &[&str]) -> Outcome {
    let mut run = all_tests();
    run.args(["--test", "opencl", "--"]).args(tests);
    run.env("OCL_ICD_VENDORS", entry).env("LD_LIBRARY_PATH", libraries).env("RUSTICL_ENABLE", "llvmpipe");
    // They do not keep what they compile, as PoCL does.
    let tally = counted(run.env("ANTIGRAVITY_OPENCL_BINARIES", "1"))?;
    match (tally.passed + tally.failed + tally.skipped) < tests.len() as u64 {
        true => Err(Error::Failed(format!("a name of {tests:?} is no test's"))),
        false => Ok(tally),
    }
}
