//! The part of the tests that runs on 64-bit Arm, under emulation.

use super::report::{Tally, skip};
use super::{Outcome, asserting, cargo, counted};
use crate::{sh, toolchain};
use std::path::Path;

pub const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Cores without dot products, with them, with matrix products as well, and the sets that each must cover.
pub const CPUS: &[(&str, &str)] = &[
    ("cortex-a53", "scalar neon"),
    ("cortex-a76", "scalar neon neon-dotprod"),
    ("max,sve=off", "scalar neon neon-dotprod neon-i8mm"),
];

pub fn run() -> Outcome {
    if std::env::consts::ARCH == "aarch64" {
        eprintln!("this machine is 64-bit Arm: the tests above covered it");
        return Ok(Tally::ONE);
    }
    if let Some((what, remedy)) = missing() {
        return Ok(skip(&format!("{what} is missing"), &format!("install it with: {remedy}")));
    }
    let test = ["test", "--workspace", "--exclude", "xtask", "--target", TARGET, "--no-fail-fast"];
    // Emulated floating point is slow: the other integration tests only run on this machine's CPU.
    let mut tally = counted(asserting(&mut cargo(&test)).arg("--lib"))?;
    tally += counted(asserting(&mut cargo(&test)).args(["--test", "engine", "golden::"]))?;
    for (cpu, sets) in CPUS {
        let mut kernels = cargo(&test);
        asserting(&mut kernels)
            .args(["--test", "engine", "kernels::"])
            .env("QEMU_CPU", cpu)
            .env("EXPECTED_SETS", sets);
        tally += counted(&mut kernels)?;
    }
    Ok(tally)
}

/// The first thing that is not installed, and the command that installs it.
pub fn missing() -> Option<(&'static str, &'static str)> {
    let gcc = sh::on_path("aarch64-linux-gnu-gcc");
    let libc = Path::new("/usr/aarch64-linux-gnu/lib/libc.so").exists();
    if !toolchain::has_std(TARGET) {
        return Some(("Rust's aarch64 standard library", "rustup target add aarch64-unknown-linux-gnu"));
    }
    if !gcc || !libc {
        return Some((
            "the aarch64 linker",
            "sudo apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
        ));
    }
    if !sh::on_path("qemu-aarch64-static") {
        return Some(("qemu-aarch64-static", "sudo apt-get install qemu-user-static"));
    }
    None
}
