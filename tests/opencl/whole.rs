//! What tests of the whole model share: a cache of their own, whether the device is exact, the rows of a session.

use super::bed;
use antigravity::model::backend::KvRows;
use antigravity::dims::LAYERS;
use antigravity::run::session::Session;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Whether the device rounds quotients correctly, which makes everything exact; `None` without a device.
pub fn exact() -> Option<bool> {
    static CACHE: OnceLock<()> = OnceLock::new();
    CACHE.get_or_init(|| {
        // SAFETY: before any OpenCL library is loaded, so other threads use the environment only through Rust's
        // functions, which lock it.
        unsafe { std::env::set_var("ANTIGRAVITY_OPENCL_CACHE", cache_dir()) };
    });
    bed::device().map(|d| d.facts().correct_divide)
}

/// Verdicts, binaries and speeds of this run alone.
pub fn cache_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("opencl-cache-{}", std::process::id()))
}

/// All rows of a sequence, by layer.
pub fn rows(session: &mut Session) -> Vec<KvRows> {
    let mut all = vec![KvRows::default(); LAYERS];
    all.iter_mut().enumerate().for_each(|(layer, rows)| session.read_rows(layer, rows).unwrap());
    all
}
