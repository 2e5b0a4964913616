//! Paths of the project's files and programs on the machine that runs the tests, which may be a phone. The environment
//! names them, as cargo and `cargo xtask runner` set it; else they are where they were built.

use antigravity::dims;
use std::path::{Path, PathBuf};

/// The project's directory.
pub fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

/// The program: as the environment says, else where it was built.
#[cfg(unix)]
pub fn binary() -> PathBuf {
    let built = || env!("CARGO_BIN_EXE_antigravity").into();
    std::env::var_os("CARGO_BIN_EXE_antigravity").unwrap_or_else(built).into()
}

/// The directory of the model that was built in.
pub fn model() -> PathBuf {
    match Path::new(dims::MODEL_DIR) {
        built if built.exists() => built.into(),
        _ => root().join("models").join(dims::MODEL),
    }
}

/// The program of `models/story-draft`, which `cargo xtask test` builds. Without it the test says so and passes, or
/// fails in CI.
#[track_caller]
pub fn draft_program() -> Option<PathBuf> {
    let found = std::env::var_os("ANTIGRAVITY_DRAFT").map(PathBuf::from);
    if found.is_none() {
        let why = "no draft program; `cargo xtask test cargo` builds it and names it in ANTIGRAVITY_DRAFT";
        assert!(std::env::var("CI").as_deref() != Ok("true"), "cannot run: {why}");
        eprintln!("SKIPPED: {why}");
    }
    found.inspect(|path| assert!(path.is_file(), "ANTIGRAVITY_DRAFT: no {}", path.display()))
}
