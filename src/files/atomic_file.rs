//! Atomic writes: a file appears complete or not at all.

use rustix::fs::{FlockOperation, flock};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A temporary file next to its target, renamed to the target by [`finish`](Self::commit) and removed when dropped
/// before that. The target therefore holds the old content or the new one at any time. Targets that are not regular
/// files, such as `/dev/null` and pipes, are written directly.
///
/// The temporary name, `.NAME.RANDOM.unfinished`, is always new, so it is never a user's file. The file is locked while
/// it is written; the system releases the lock when the process dies, so an unlocked one is a leftover.
pub struct AtomicFile {
    pub file: File,
    target: PathBuf,
    /// Path of the temporary file; `None` if the target itself is written.
    path: Option<PathBuf>,
}

const SUFFIX: &str = ".unfinished";
/// Hexadecimal digits of the random part of the name.
const DIGITS: usize = 16;
/// Attempts to create and lock the file; another process may remove it between the two.
const ATTEMPTS: usize = 1000;

/// Temporary files of this process.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn lock_temporary() -> MutexGuard<'static, Vec<PathBuf>> {
    TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the temporary files of this process, before an exit that runs no destructors.
pub fn remove_temporary_files() {
    for path in lock_temporary().drain(..) {
        let _ = fs::remove_file(path);
    }
}

/// Writes a file atomically.
pub fn write_file(out: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = AtomicFile::create(out)?;
    unfinished.file.write_all(bytes)?;
    unfinished.commit()
}

impl AtomicFile {
    /// Creates the temporary file, with the permissions of the file that it will replace.
    ///
    /// # Errors
    ///
    /// It cannot be written. Links are followed; a dangling link is an error.
    pub fn create(out: &Path) -> io::Result<Self> {
        let target = resolve_link(out)?;
        let old = fs::metadata(&target).ok();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            let file = OpenOptions::new().write(true).open(&target)?;
            return Ok(Self { file, target, path: None });
        }
        let name = target.file_name().ok_or(ErrorKind::InvalidFilename)?;
        remove_leftovers(&target, name);
        for _ in 0..ATTEMPTS {
            let random = RandomState::new().build_hasher().finish();
            let mut unfinished = OsString::from(".");
            unfinished.push(name);
            unfinished.push(format!(".{random:0DIGITS$x}{SUFFIX}"));
            let path = target.with_file_name(unfinished);
            // Never opens an existing file or link.
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            lock_temporary().push(path.clone());
            // Some file systems have no locks, so a failure is not an error.
            let _ = flock(&file, FlockOperation::LockExclusive);
            let this = Self { file, target: target.clone(), path: Some(path) };
            // Another process may have removed it as a leftover before it was locked.
            if this.exists()? {
                if let Some(old) = old {
                    // Some file systems have no modes.
                    let _ = this.file.set_permissions(old.permissions());
                }
                return Ok(this);
            }
        }
        Err(io::Error::new(ErrorKind::ResourceBusy, "another process keeps removing the temporary file"))
    }

    /// Path of the temporary file; `None` if the target is written directly.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns true if the path still leads to the open file.
    fn exists(&self) -> io::Result<bool> {
        let Some(path) = &self.path else { return Ok(true) };
        let (ours, there) = (self.file.metadata()?, fs::symlink_metadata(path));
        Ok(there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
    }

    /// Renames the file to its target and waits until both are on disk.
    pub fn commit(mut self) -> io::Result<()> {
        let Some(path) = &self.path else { return self.file.flush() };
        self.file.sync_all()?;
        fs::rename(path, &self.target)?;
        lock_temporary().retain(|temporary| temporary != path);
        self.path = None;
        match File::open(parent_dir(&self.target)).and_then(|dir| dir.sync_all()) {
            // Some systems cannot open or synchronise directories.
            Err(e) if !matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::InvalidInput) => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
            lock_temporary().retain(|temporary| temporary != path);
        }
    }
}

/// Follows a link, so that writing replaces the file behind it and not the link.
fn resolve_link(out: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(out) {
        Ok(target) => Ok(target),
        Err(_) if fs::symlink_metadata(out).is_ok_and(|meta| meta.is_symlink()) => {
            Err(io::Error::new(ErrorKind::NotFound, "is a dangling link; remove it"))
        }
        Err(_) => Ok(out.into()),
    }
}

fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes temporary files that killed processes left for the target `name`. On file systems without locks they stay.
fn remove_leftovers(target: &Path, name: &OsStr) {
    for entry in fs::read_dir(parent_dir(target)).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let rest = found.as_bytes().strip_prefix(b".").and_then(|found| found.strip_prefix(name.as_bytes()));
        let random = rest.and_then(|rest| rest.strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes()));
        let ours = random.is_some_and(|r| r.len() == DIGITS && r.iter().all(u8::is_ascii_hexdigit));
        if !ours || !entry.file_type().is_ok_and(|t| t.is_file()) {
            continue;
        }
        let lock = |file: File| flock(&file, FlockOperation::NonBlockingLockExclusive).map(|()| file);
        // Holds the lock until the file is removed.
        if let Ok(Ok(_locked)) = File::open(entry.path()).map(lock) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("antigravity-atomic-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        dir
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).expect("the folder");
        let mut names: Vec<_> = entries.map(|e| e.expect("an entry").file_name().into_string()).collect();
        names.sort();
        names.into_iter().map(|n| n.expect("UTF-8")).collect()
    }

    #[test]
    fn leftovers_are_removed_and_user_files_stay() {
        let dir = scratch("user");
        let left = format!(".out.{:016x}.unfinished", 7);
        let theirs = [
            "out.unfinished",
            ".out.unfinished",
            ".out.xyz.unfinished",
            ".other.0000000000000007.unfinished",
        ];
        theirs.iter().for_each(|name| fs::write(dir.join(name), "mine").expect("a file"));
        fs::write(dir.join(&left), "half").expect("a file");
        let place = dir.join("out");
        // A file that another writer holds stays.
        let other = AtomicFile::create(&place).expect("begun");
        write_file(&place, b"whole").expect("written");
        assert_eq!(fs::read(&place).expect("there"), b"whole");
        assert_eq!(names(&dir).len(), theirs.len() + 2);
        drop(other);
        assert_eq!(names(&dir).len(), theirs.len() + 1);
        assert!(!dir.join(left).exists());
        assert!(theirs.iter().all(|name| fs::read(dir.join(name)).is_ok_and(|b| b == b"mine")));
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn links_are_followed_and_permissions_stay() {
        let dir = scratch("links");
        let (file, link, dangling) = (dir.join("file"), dir.join("link"), dir.join("dangling"));
        fs::write(&file, "old").expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
        symlink(&file, &link).expect("a link");
        symlink(dir.join("nowhere"), &dangling).expect("a link");
        write_file(&link, b"new").expect("written");
        let meta = fs::metadata(&file).expect("there");
        assert_eq!(
            (fs::read(&file).expect("there"), meta.permissions().mode() & 0o777),
            (b"new".to_vec(), 0o640)
        );
        assert!(fs::symlink_metadata(&link).is_ok_and(|meta| meta.is_symlink()));
        assert!(write_file(&dangling, b"new").is_err_and(|e| e.to_string().contains("dangling link")));
        write_file(Path::new("/dev/null"), b"gone").expect("no regular file");
        assert!(write_file(Path::new("/dev/full"), b"too much").is_err());
        fs::remove_dir_all(dir).expect("removed");
    }
}
