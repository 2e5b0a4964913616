//! The part of the tests that runs on 64-bit Arm, under emulation.

use super::report::{Tally, skip};
use super::{Outcome, cargo, counted};
use crate::{build, sh};
use std::path::Path;

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Cores without and with dot products and half floats, and all there is but SVE.
const CPUS: &[&str] = &["cortex-a53", "cortex-a76", "max,sve=off"];

pub fn run() -> Outcome {
    if std::env::consts::ARCH == "aarch64" {
        eprintln!("this machine is 64-bit Arm: the tests above covered it");
        return Ok(Tally::ONE);
    }
    if let Some((what, remedy)) = missing() {
        return Ok(skip(&format!("{what} is missing"), &format!("install it with: {remedy}")));
    }
    let test = ["test", "--package", "antigravity", "--target", TARGET, "--no-fail-fast"];
    // Emulated floating point is slow: the other integration tests only run on this machine's CPU.
    let mut tally = counted(cargo(&test).args(["--lib", "--test", "golden", "--test", "kernels"]))?;
    for cpu in CPUS {
        tally += counted(cargo(&test).args(["--test", "kernels"]).env("QEMU_CPU", cpu))?;
    }
    Ok(tally)
}

/// The first thing that is not installed, and the command that installs it.
fn missing() -> Option<(&'static str, &'static str)> {
    let gcc = sh::on_path("aarch64-linux-gnu-gcc");
    let libc = Path::new("/usr/aarch64-linux-gnu/lib/libc.so").exists();
    if !build::has_target(TARGET) {
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
