//! Targets and features of programs, Android's requirements, and cargo's target directory.

use crate::command;
use std::path::PathBuf;

pub const ANDROID: &str = "aarch64-linux-android";
/// Android's emulator on a PC, which has only libraries in apps.
pub const ANDROID_X86: &str = "x86_64-linux-android";
/// The oldest Android API level that is supported: 24 is Android 7.
pub const ANDROID_API: u32 = 24;
/// Alignment of segments in bytes: phones with pages of 16 KiB refuse less.
pub const ANDROID_PAGE: u64 = 16384;
/// The dynamic linker of Android.
pub const ANDROID_LOADER: &str = "/system/bin/linker64";

/// Linux on 64-bit Arm, static, so that an emulator needs no other files. All emulated tests are built for it.
pub const ARM_LINUX: &str = "aarch64-unknown-linux-musl";

/// Supported targets. Programs for others are built too, but not checked.
pub const TARGETS: &[&str] = &[
    ANDROID,
    ANDROID_X86,
    "aarch64-unknown-linux-gnu",
    ARM_LINUX,
    "x86_64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
];

/// Cargo features that the program is built with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Features {
    /// The default features, as users get it.
    Default,
    /// None: generation only.
    None,
}

impl Features {
    /// The words for cargo and for reports.
    pub fn words(self) -> &'static str {
        match self {
            Features::Default => "with default features",
            Features::None => "--no-default-features",
        }
    }
}

/// Kind of file that a build links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Product {
    Program,
    /// A shared object, which has no start and no loader of its own.
    Library,
}

/// This machine's target triple.
pub fn host_triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

pub fn is_android(target: &str) -> bool {
    target.ends_with("-linux-android")
}

/// True if programs for the target are static.
pub fn is_static(target: &str) -> bool {
    target.ends_with("-linux-musl")
}

/// Cargo's target directory.
pub fn target_dir() -> PathBuf {
    let dir = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    command::root().join(dir)
}
