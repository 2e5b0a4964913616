//! Drops a model's files from the page cache, for cold starts. Read permission is enough.

use files::{Error, Result, bundle};
use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Distance between the bytes that are looked up in the cache.
#[cfg(not(target_os = "android"))]
const STRIDE: u64 = 1 << 20;

/// Read-ahead past the end of the program stops at a multiple of this many bytes.
const READ_AHEAD: u64 = 1 << 20;

/// Drops the files of a model directory, one file, or the model in a bundle. In the returned JSON, `dropped` is false
/// if some are still cached, and null if the system does not report it, as for file systems in memory.
pub fn drop_cache(model: &Path) -> Result<Value> {
    let (mut bytes, mut dropped) = (0, Some(true));
    for path in model_files(model).map_err(|e| Error::io(model, e))? {
        let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
        let len = file.metadata().map_err(|e| Error::io(&path, e))?.len();
        // The pages of the program at a bundle's start stay, because it is running.
        let from = bundle::find_mark(&path).map_or(0, |start| start.next_multiple_of(READ_AHEAD).min(len));
        // Dirty pages cannot be dropped.
        let _ = file.sync_data();
        let refused = fadvise(&file, from, None, Advice::DontNeed).is_err();
        let gone = if refused { Some(false) } else { is_cached(&file, from..len).map(|cached| !cached) };
        dropped = dropped.zip(gone).map(|(a, b)| a && b);
        bytes += len - from;
    }
    Ok(json!({"dropped": dropped, "bytes": bytes}))
}

/// The model's files, without the running program, which may be in the same directory.
fn model_files(model: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !model.is_dir() {
        return Ok(vec![model.into()]);
    }
    let files = std::fs::read_dir(model)?.flatten().map(|entry| entry.path());
    let ours = |p: &PathBuf| p.extension().is_some_and(|e| e == "safetensors" || e == "json" || e == "gguf");
    Ok(files.filter(|p| ours(p) && p.is_file()).collect())
}

/// True if any part is cached: a read that must not wait for the disk then succeeds.
#[cfg(not(target_os = "android"))]
fn is_cached(file: &File, bytes: Range<u64>) -> Option<bool> {
    use rustix::io::{Errno, ReadWriteFlags, preadv2};
    for at in bytes.step_by(STRIDE as usize) {
        let mut byte = [0];
        match preadv2(file, &mut [std::io::IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
            Ok(0) | Err(Errno::AGAIN) => {}
            Ok(_) => return Some(true),
            Err(_) => return None,
        }
    }
    Some(false)
}

/// Unknown on Android: Bionic has `preadv2` only from API level 33 on.
#[cfg(target_os = "android")]
fn is_cached(_: &File, _: Range<u64>) -> Option<bool> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_models_files_are_dropped() {
        let dir = std::env::temp_dir().join(format!("antigravity-page-cache-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("model.safetensors"), [7; 1000]).unwrap();
        std::fs::write(dir.join("config.json"), [7; 10]).unwrap();
        std::fs::write(dir.join("antigravity"), [7; 100]).unwrap();
        let answer = drop_cache(&dir).unwrap();
        assert_eq!(answer["bytes"], 1010);
        assert!(answer["dropped"].is_boolean() || answer["dropped"].is_null(), "{answer}");
        assert_eq!(drop_cache(&dir.join("config.json")).unwrap()["bytes"], 10);
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(drop_cache(&dir).unwrap_err().to_string().contains("antigravity-page-cache"));
    }
}
