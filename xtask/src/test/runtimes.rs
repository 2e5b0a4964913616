//! The part that runs some OpenCL tests on other runtimes than PoCL, which have other compilers, subgroups and integer
//! dot products.

use super::Outcome;
use super::cargo_test::CargoTest;
use super::report::{Tally, skip};
use crate::error::{AtPath, Error};
use crate::{build, fetch};
use std::fs;
use std::path::{Path, PathBuf};

/// On Intel's runtime: every variant of kernels, batches, and moves with every cache and every eviction.
const ON_INTEL: [&str; 4] = [
    "hybrid::",
    "model::the_text_is_the_same_as_on_the_cpu",
    "shared::a_token_of_each_of_many_sequences_is_computed_as_alone",
    "variants::every_variant_gives_the_same_text",
];
/// On rusticl, which is slow.
const ON_RUSTICL: [&str; 2] =
    ["model::the_text_is_the_same_as_on_the_cpu", "variants::every_variant_gives_the_same_text"];
/// Rusticl's entry for the loader in Debian.
const RUSTICL: &str = "/etc/OpenCL/vendors/rusticl.icd";

pub fn run() -> Outcome {
    build::build_draft_program()?;
    let mut tally = match intel() {
        Some(libraries) => run_on("Intel", &libraries.join("libintelocl.so"), &ON_INTEL)?,
        None => without_intel(),
    };
    if has_rusticl() {
        tally += run_on("rusticl", Path::new("libRusticlOpenCL.so.1"), &ON_RUSTICL)?;
    } else {
        // The distribution may not have it.
        eprintln!(
            "NOT TRIED: rusticl; Debian's mesa-opencl-icd has it, one that runs these kernels from 13 on"
        );
    }
    Ok(tally)
}

/// Finds a usable rusticl; the one of Debian 12 limits work-groups to 32 work-items.
fn has_rusticl() -> bool {
    let old = fs::read_to_string("/etc/debian_version").is_ok_and(|version| version.starts_with("12."));
    Path::new(RUSTICL).exists() && !old
}

/// The libraries of Intel's runtime for CPUs, installed by `.ci/run`.
pub fn intel() -> Option<PathBuf> {
    let dir = fetch::cache_dir()?.join("intel-opencl/lib");
    dir.join("libintelocl.so").exists().then_some(dir)
}

/// Says that it is missing.
pub fn without_intel() -> Tally {
    let remedy = "pip install --prefix ~/.cache/antigravity/intel-opencl intel-opencl-rt";
    skip("Intel's OpenCL runtime is missing", remedy)
}

/// Runs tests on the device of the platform with this name, which has its own library.
fn run_on(platform: &str, library: &Path, tests: &[&str]) -> Outcome {
    // The loader finds it here, and nothing else.
    let entries = build::target_dir().join("runtimes").join(platform);
    let entry = entries.join("own.icd");
    let written =
        fs::create_dir_all(&entries).and_then(|()| fs::write(&entry, format!("{}\n", library.display())));
    written.at(&entry)?;
    let mut run = CargoTest::new(&["--test", "opencl"]).only(tests).env("OCL_ICD_VENDORS", entries);
    run = run.env("RUSTICL_ENABLE", "llvmpipe").env("EXPECTED_PLATFORM", platform);
    if let Some(libraries) = library.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        run = run.env("LD_LIBRARY_PATH", libraries);
    }
    let tally = run.run()?;
    if tally.total() < tests.len() as u64 {
        return Err(Error::Failed(format!("{tests:?}: one of these names no test")));
    }
    Ok(tally)
}
