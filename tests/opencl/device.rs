//! The device that tests run on, or a loud skip; whether it is exact; the program that writes there; the rows of a
//! session.

use crate::support::command::binary;
use antigravity::dims::LAYERS;
use antigravity::model::device::KvRows;
use antigravity::run::session::{CancelToken, Session};
use opencl_runtime::device::{list_devices, select_info};
use opencl_runtime::{Cache, Device, DeviceInfo, DeviceType};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use text::sampler::argmax;

/// The first device, a CPU if need be. Without OpenCL the test says so and passes, or fails where `CI` is set.
#[track_caller]
pub fn device() -> Option<Device> {
    own_caches();
    // Of oclgrind nothing is kept, and PoCL keeps what it compiles.
    let compiles_slowly = select_info(Some("0")).is_some_and(|facts| {
        !facts.has_program_cache() && !facts.platform.to_lowercase().contains("oclgrind")
    });
    device_with(if compiles_slowly { Cache::for_user() } else { Cache::disabled() })
}

#[track_caller]
pub fn device_with(cache: Cache) -> Option<Device> {
    own_caches();
    match Device::open(Some("0"), cache) {
        Ok(device) => {
            // Where one that `cargo xtask test runtimes` names fails to load, another would be found.
            let found: Vec<_> = list_devices().unwrap().iter().map(|entry| &entry.facts.platform).collect();
            for expected in std::env::var("EXPECTED_PLATFORMS").unwrap_or_default().split(',') {
                assert!(found.iter().any(|name| name.contains(expected)), "{found:?} have no {expected}");
            }
            Some(device)
        }
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

/// PoCL keeps what it compiles, and the program its verdicts, binaries and speeds: tests neither use what others left
/// there nor add to it. The tests of this process share both.
fn own_caches() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let pocl = std::env::var_os("POCL_CACHE_DIR")
            .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("pocl"), PathBuf::from);
        // SAFETY: before any OpenCL library is loaded, since every test opens its device through this module, so other
        // threads use the environment only through Rust's functions, which lock it.
        unsafe {
            std::env::set_var("POCL_CACHE_DIR", pocl);
            std::env::set_var("ANTIGRAVITY_OPENCL_CACHE", cache_dir());
            // A test's device waits while PoCL's threads compile for other tests' devices.
            let others = [("ANTIGRAVITY_OPENCL_VARIANT", "tile"), ("ANTIGRAVITY_OPENCL_LIMIT", "60")];
            for (name, value) in others.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
                std::env::set_var(name, value);
            }
        }
    });
}

/// Tells whether a device rounds quotients correctly and so is exact: CPUs do, whatever their drivers promise.
pub fn is_exact_with(facts: &DeviceInfo) -> bool {
    facts.has_correct_divide || facts.device_type == DeviceType::Cpu
}

/// Tells whether the tests' device is exact; `None` without a device.
#[track_caller]
pub fn exact() -> Option<bool> {
    device().map(|d| is_exact_with(d.info()))
}

/// Text of the program's stderr, without the lines in which PoCL's compiler counts its warnings.
pub fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    text.lines().filter(|l| !l.ends_with(" generated.")).map(|l| format!("{l}\n")).collect()
}

/// Tells whether there is an exact device, and reports a skip if the device is not exact.
#[track_caller]
pub fn is_exact() -> bool {
    let found = exact();
    if found == Some(false) {
        skip("this device does not divide exactly");
    }
    found == Some(true)
}

/// Prompt that the tests here continue.
pub const PROMPT: &str = "Once upon a time there was";

/// The program that writes `n` tokens, with what it keeps of a device in `cache`.
pub fn generate(cache: impl AsRef<OsStr>, n: &str) -> Command {
    let mut command = Command::new(binary());
    command.args(["generate", "-p", PROMPT, "-n", n, "--temp", "0", "-t", "2", "-c", "200", "-q"]);
    command.stdin(Stdio::null()).env("ANTIGRAVITY_OPENCL_CACHE", cache).env("ANTIGRAVITY_OPENCL_CPU", "1");
    command
}

/// Greedy ids after a prompt; `before` each token with its number.
pub fn greedy(
    session: &mut Session,
    prompt: &[u32],
    n: usize,
    before: impl Fn(&mut Session, usize),
) -> Vec<u32> {
    session.prefill(prompt, &CancelToken::default()).unwrap();
    let mut ids = Vec::new();
    for i in 0..n {
        ids.push(argmax(session.logits()) as u32);
        before(session, i);
        session.decode(ids[i]).unwrap();
    }
    ids
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
