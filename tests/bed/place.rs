//! Where the project's files and program are on the machine that runs the tests, which may be a phone:
//! the environment says it, as cargo and `cargo xtask runner` set it, else they are where they were built.
#![allow(dead_code, reason = "each test takes what it needs")]

use antigravity::dims;
use std::path::{Path, PathBuf};

/// The project's directory.
pub fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

/// The directory of the model that was built in.
pub fn model() -> PathBuf {
    match Path::new(dims::MODEL_DIR) {
        built if built.exists() => built.into(),
        _ => root().join("models").join(dims::MODEL),
    }
}
