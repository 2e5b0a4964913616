//! A 64-bit Arm CPU, emulated in user mode: this machine's shell with programs of another architecture.

use super::local::{Local, home};
use crate::error::{Error, Result};
use crate::{command, toolchain};

pub const EMULATOR: &str = "qemu-aarch64-static";
/// The default CPU, overridden by `QEMU_CPU`. Without SVE, which makes emulation slower.
const CPU: &str = "max,sve=off";
/// Supported targets. The first is static; the second needs Debian's C library for Arm.
const TARGETS: &[&str] = &["aarch64-unknown-linux-musl", "aarch64-unknown-linux-gnu"];

/// Opens the emulator for one of [`TARGETS`], by default the first whose standard library is installed.
pub fn open(target: Option<&str>) -> Result<Local> {
    if let Some(other) = target.filter(|t| !TARGETS.contains(t)) {
        return Err(Error::Usage(format!("--target {other}: use {}", TARGETS.join(" or "))));
    }
    if !command::is_on_path(EMULATOR) {
        return Err(Error::Device(format!("{EMULATOR} is missing: sudo apt-get install qemu-user-static")));
    }
    let installed = || TARGETS.iter().copied().find(|t| toolchain::has_std(t));
    let target = target.or_else(installed).ok_or_else(|| {
        Error::Device(format!("no standard library for 64-bit Arm: rustup target add {}", TARGETS[0]))
    })?;
    let cpu = std::env::var("QEMU_CPU").unwrap_or_else(|_| CPU.into());
    Ok(Local {
        name: format!("qemu ({cpu})"),
        target: target.into(),
        home: home("qemu"),
        environment: vec![
            ("ANTIGRAVITY_EMULATOR", EMULATOR.into()),
            ("QEMU_CPU", cpu),
            ("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu".into()),
        ],
    })
}
