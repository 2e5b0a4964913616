//! What the program is built for: targets and features, what Android asks of a program, where cargo puts results.

use crate::sh;
use std::path::PathBuf;

pub const ANDROID: &str = "aarch64-linux-android";
/// The Android version programs are made for, at least: 24 is Android 7.
pub const ANDROID_API: u32 = 24;
/// Phones with pages of 16 KiB load nothing that is aligned to less.
pub const ANDROID_PAGE: u64 = 16384;
/// The program of Android that loads others.
pub const ANDROID_LOADER: &str = "/system/bin/linker64";

/// What the program is made for. Other targets are tried as they are, unchecked.
pub const TARGETS: &[&str] = &[
    ANDROID,
    "aarch64-unknown-linux-gnu",
    "aarch64-unknown-linux-musl",
    "x86_64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
];

/// Which of the program's features are built.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Features {
    /// All that users get.
    Default,
    /// Only what generating needs.
    None,
}

impl Features {
    /// As cargo is told, and as reports say it.
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

/// Whether programs for a target hold all they need.
pub fn is_static(target: &str) -> bool {
    target.ends_with("-linux-musl")
}

/// Where cargo puts its results.
pub fn target_dir() -> PathBuf {
    let dir = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    sh::root().join(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_targets() {
        assert!(is_static("aarch64-unknown-linux-musl") && is_static("x86_64-unknown-linux-musl"));
        assert!(!is_static("aarch64-unknown-linux-gnu") && !is_static(ANDROID));
    }
}
