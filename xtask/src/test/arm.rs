//! The part of the tests that runs on 64-bit Arm, under emulation.

use super::report::{Tally, skip};
use super::{Outcome, asserting, beside, cargo, counted};
use crate::android::Ndk;
use crate::device::qemu::EMULATOR;
use crate::error::Result;
use crate::{parity, sh, toolchain};
use std::process::Command;

/// Static, so that an emulator needs no other files: what all parts run that run Arm's programs.
pub const TARGET: &str = "aarch64-unknown-linux-musl";
/// Cores without dot products, with them, with matrix products as well, and the sets that each must cover.
pub const CPUS: &[(&str, &str)] = &[
    ("cortex-a53", "scalar neon"),
    ("cortex-a76", "scalar neon neon-dotprod"),
    ("max,sve=off", "scalar neon neon-dotprod neon-i8mm"),
];

/// Tests of time and memory, which those of an emulator say nothing about; and of long texts, where the kind of processor
/// makes no difference.
const ELSEWHERE: [&str; 6] = [
    "the_time_of_a_megabyte_is_not_quadratic",
    "hostile_templates_end_soon_and_in_little_memory",
    "changed_files_are_refused_or_work",
    "a_long_text_has_the_ids_that_it_has_at_once",
    "streams_add_up_to_the_whole_text",
    "many_long_stop_strings_take_no_longer_than_one",
];

pub fn run() -> Outcome {
    if std::env::consts::ARCH == "aarch64" {
        eprintln!("this machine is 64-bit Arm: the tests above covered it");
        return Ok(Tally::ONE);
    }
    if let Some((what, remedy)) = missing() {
        return Ok(skip(&format!("{what} is missing"), &format!("install it with: {remedy}")));
    }
    sh::run(tests()?.args(["--lib", "--test", "engine", "--no-run"]))?;
    // Emulated floating point is slow: the other integration tests only run on this machine's CPU. One of these takes
    // long, on one core.
    let mut golden = tests()?;
    golden.args(["--test", "engine", "golden::"]);
    beside(&mut golden, || {
        let elsewhere = ELSEWHERE.iter().flat_map(|name| ["--skip", name]);
        let mut tally = counted(tests()?.args(["--lib", "--"]).args(elsewhere))?;
        for (cpu, sets) in CPUS {
            let mut kernels = tests()?;
            kernels.args(["--test", "engine", "kernels::"]).env("QEMU_CPU", cpu).env("EXPECTED_SETS", sets);
            tally += counted(&mut kernels)?;
        }
        let parity::Tally { passed, failed } = parity::of_families(TARGET, EMULATOR)?;
        tally += Tally { passed, failed, ..Tally::default() };
        Ok(tally)
    })
}

/// `cargo test` for 64-bit Arm, with Rust's checks of pointers.
pub fn tests() -> Result<Command> {
    let mut command =
        cargo(&["test", "--workspace", "--exclude", "xtask", "--target", TARGET, "--no-fail-fast"]);
    crate::cargo::prepare(&mut command, TARGET, Ndk::Never)?;
    asserting(&mut command);
    Ok(command)
}

/// The first thing that is not installed, and the command that installs it.
pub fn missing() -> Option<(&'static str, &'static str)> {
    if !toolchain::has_std(TARGET) {
        return Some(("Rust's standard library for Arm", "rustup target add aarch64-unknown-linux-musl"));
    }
    if toolchain::lld().is_err() {
        return Some(("LLVM's linker", toolchain::LLD_REMEDY));
    }
    if !sh::on_path(EMULATOR) {
        return Some((EMULATOR, "sudo apt-get install qemu-user-static"));
    }
    None
}
