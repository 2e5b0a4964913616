//! The part that runs some OpenCL tests on other runtimes than PoCL, which have other compilers, subgroups and integer
//! dot products.

use super::Outcome;
use super::cargo_test::CargoTest;
use super::report::{Tally, skip, skip_missing};
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
/// On Intel's runtime and PoCL, with some layers of the model on each.
const ON_BOTH: [&str; 2] =
    ["split::batches_drafts_and_evictions_have_the_cpus_texts", "split::every_split_has_the_cpus_bits"];
/// On rusticl, which is slow.
const ON_RUSTICL: [&str; 2] =
    ["model::the_text_is_the_same_as_on_the_cpu", "variants::every_variant_gives_the_same_text"];
/// Rusticl's entry for the loader in Debian.
const RUSTICL: &str = "/etc/OpenCL/vendors/rusticl.icd";

pub fn run() -> Outcome {
    build::build_draft_program()?;
    let mut tally = match intel() {
        Some(libraries) => {
            let intel = libraries.join("libintelocl.so").display().to_string();
            let mut tally = run_on(&[("Intel", &intel)], &ON_INTEL)?;
            match pocl() {
                Some(pocl) => tally += run_on(&[("Intel", &intel), ("Portable", &pocl)], &ON_BOTH)?,
                None => tally += skip_missing(("PoCL", "apt-get install pocl-opencl-icd")),
            }
            tally
        }
        None => without_intel(),
    };
    if has_rusticl() {
        tally += run_on(&[("rusticl", "libRusticlOpenCL.so.1")], &ON_RUSTICL)?;
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

/// PoCL's library, as its entry for the loader names it.
fn pocl() -> Option<String> {
    let entries = fs::read_dir("/etc/OpenCL/vendors").ok()?.flatten().map(|entry| entry.path());
    let entry = entries.into_iter().find(|path| path.to_string_lossy().contains("pocl"))?;
    Some(fs::read_to_string(entry).ok()?.trim().to_owned())
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

/// Runs tests on the devices of some platforms, given by their names and libraries.
fn run_on(platforms: &[(&str, &str)], tests: &[&str]) -> Outcome {
    let names = platforms.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(",");
    // The loader finds them here, and nothing else.
    let entries = build::target_dir().join("runtimes").join(&names);
    for (name, library) in platforms {
        let entry = entries.join(format!("{name}.icd"));
        let written = fs::create_dir_all(&entries).and_then(|()| fs::write(&entry, format!("{library}\n")));
        written.at(&entry)?;
    }
    let mut run = CargoTest::new(&["--test", "opencl"]).only(tests).env("OCL_ICD_VENDORS", entries);
    run = run.env("RUSTICL_ENABLE", "llvmpipe").env("EXPECTED_PLATFORMS", names);
    let libraries = platforms.iter().filter_map(|(_, library)| Path::new(library).parent());
    if let Some(libraries) = libraries.into_iter().find(|dir| !dir.as_os_str().is_empty()) {
        run = run.env("LD_LIBRARY_PATH", libraries);
    }
    let tally = run.run()?;
    if tally.total() < tests.len() as u64 {
        return Err(Error::Failed(format!("{tests:?}: one of these names no test")));
    }
    Ok(tally)
}
