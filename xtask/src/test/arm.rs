//! The part of the tests that runs on 64-bit Arm, under emulation.

use super::Outcome;
use super::cargo_test::{CargoTest, run_beside};
use super::report::{Tally, skip_missing};
use crate::device::qemu::EMULATOR;
use crate::targets::ARM_LINUX;
use crate::{command, parity, toolchain};

/// Cores without dot products, with them, and with matrix products too; and the instruction sets that each must cover.
pub const CPUS: [(&str, &str); 3] = [
    ("cortex-a53", "scalar neon"),
    ("cortex-a76", "scalar neon neon-dotprod"),
    ("max,sve=off", "scalar neon neon-dotprod neon-i8mm"),
];

/// Tests that an emulator cannot judge, of time and memory; and tests of long texts, which do not depend on the
/// processor.
const ELSEWHERE: [&str; 7] = [
    "the_time_of_a_megabyte_is_not_quadratic",
    "random_reads_are_expected_of_these_bytes_alone",
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
    if let Some(missing) = missing() {
        return Ok(skip_missing(missing));
    }
    let tests = |targets: &[&str]| CargoTest::new(targets).for_target(ARM_LINUX).with_pointer_checks();
    tests(&["--lib", "--test", "engine"]).build()?;
    // Emulated floating point is slow: the other integration tests only run on this machine's CPU. One of these takes
    // long, on one core.
    run_beside(
        &tests(&["--test", "engine"])
            .only(&["golden::", "quantise::a_packed_file_has_the_same_bytes_on_every_machine"]),
        || {
            let mut tally = tests(&["--lib"]).skip(&ELSEWHERE).run()?;
            for (cpu, sets) in CPUS {
                let kernels = tests(&["--test", "engine"]).only(&["kernels::"]);
                tally += kernels.env("QEMU_CPU", cpu).env("EXPECTED_SETS", sets).run()?;
            }
            tally += parity::check_families(ARM_LINUX, EMULATOR)?;
            Ok(tally)
        },
    )
}

/// The first thing that is not installed, and the command that installs it.
pub fn missing() -> Option<(&'static str, &'static str)> {
    if !toolchain::has_std(ARM_LINUX) {
        return Some(("Rust's standard library for Arm", "rustup target add aarch64-unknown-linux-musl"));
    }
    if toolchain::find_lld().is_err() {
        return Some(("LLVM's linker", toolchain::LLD_REMEDY));
    }
    if !command::is_on_path(EMULATOR) {
        return Some((EMULATOR, "sudo apt-get install qemu-user-static"));
    }
    None
}
