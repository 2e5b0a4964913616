//! The device that tests run on, or a loud skip; directories that go when a test ends.

use antigravity::opencl::{Cache, Device};
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The first device, a CPU if need be. Without OpenCL the test says so and passes, or fails where `CI` is set.
#[track_caller]
pub fn device() -> Option<Device> {
    device_with(Cache::off())
}

#[track_caller]
pub fn device_with(cache: Cache) -> Option<Device> {
    fresh_pocl();
    match Device::open(Some("0"), cache) {
        Ok(device) => Some(device),
        Err(e) => {
            skip(&e.to_string());
            None
        }
    }
}

/// Says that a test did not run; fails where `CI` is set.
#[track_caller]
pub fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "cannot run: {why}");
    eprintln!("SKIPPED: {why}");
}

/// PoCL keeps what it compiles; tests must not see what others left there.
fn fresh_pocl() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let dir = std::env::temp_dir().join(format!("antigravity-pocl-{}", std::process::id()));
        // SAFETY: before any OpenCL library is loaded, so nothing but Rust's own locked environment is used
        // by other threads.
        unsafe { std::env::set_var("POCL_CACHE_DIR", dir) };
    });
}

/// A directory that is removed with everything in it.
pub struct Temp(pub PathBuf);

impl Temp {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("antigravity-opencl-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).expect("a temporary directory");
        Self(dir)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
