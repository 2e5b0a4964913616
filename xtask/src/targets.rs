//! Targets and features that programs are built for, Android's demands on a program, and cargo's folder.

use crate::command;
use std::path::PathBuf;

pub const ANDROID: &str = "aarch64-linux-android";
/// The Android version programs are made for, at least: 24 is Android 7.
pub const ANDROID_API: u32 = 24;
/// Phones with pages of 16 KiB load nothing that is aligned to less.
pub const ANDROID_PAGE: u64 = 16384;
/// The program of Android that loads others.
pub const ANDROID_LOADER: &str = "/system/bin/linker64";

/// Linux on 64-bit Arm, static, so that an emulator needs no other files: all tests that run Arm's programs run these.
pub const ARM_LINUX: &str = "aarch64-unknown-linux-musl";

/// Targets that the program is made for. Other targets are tried as they are, unchecked.
pub const TARGETS: &[&str] = &[
    ANDROID,
    "aarch64-unknown-linux-gnu",
    ARM_LINUX,
    "x86_64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
];

/// Features of the program that are built.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Features {
    /// All that users get.
    Default,
    /// Only what generating needs.
    None,
}

impl Features {
    /// Words for cargo and for reports.
    pub fn words(self) -> &'static str {
        match self {
            Features::Default => "with default features",
            Features::None => "--no-default-features",
        }
    }
}

/// This machine's target triple.
pub fn host() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Programs for the target hold all they need.
pub fn is_static(target: &str) -> bool {
    target.ends_with("-linux-musl")
}

/// Cargo's folder of results.
pub fn target_dir() -> PathBuf {
    let dir = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    command::root().join(dir)
}
