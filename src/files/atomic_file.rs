//! Writes files that appear whole or not at all.

use rustix::fs::{FlockOperation, flock};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file that is written beside its final place and then moved there; removed unless finished. So the place holds the
/// old content or the new one, whatever happens. What is no regular file, as `/dev/null` and pipes, is written as it is.
///
/// Its name, `.NAME.RANDOM.unfinished`, is new, so it is never a user's file. Its lock, which the system releases when
/// its owner dies, tells the next process that a killed one left it.
pub struct Unfinished {
    pub file: File,
    /// Where it is to be.
    place: PathBuf,
    /// Where it is until then; `None` if it is there already.
    path: Option<PathBuf>,
}

const SUFFIX: &str = ".unfinished";
/// Hexadecimal digits of the random part.
const DIGITS: usize = 16;
/// How often another process may remove the file between our making and locking it.
const ATTEMPTS: usize = 1000;

/// What this process has begun.
static BEGUN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn begun() -> MutexGuard<'static, Vec<PathBuf>> {
    BEGUN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what this process has begun and not finished, before an end that runs no destructors.
pub fn remove_unfinished() {
    for path in begun().drain(..) {
        let _ = fs::remove_file(path);
    }
}

/// Writes a whole file.
pub fn write(out: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = Unfinished::create(out)?;
    unfinished.file.write_all(bytes)?;
    unfinished.finish()
}

impl Unfinished {
    /// Begins the file, with the permissions of the one that it replaces.
    ///
    /// # Errors
    ///
    /// It cannot be written. Links are followed; one that leads nowhere is an error.
    pub fn create(out: &Path) -> io::Result<Self> {
        let place = place(out)?;
        let old = fs::metadata(&place).ok();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            let file = OpenOptions::new().write(true).open(&place)?;
            return Ok(Self { file, place, path: None });
        }
        let name = place.file_name().ok_or(ErrorKind::InvalidFilename)?;
        remove_left(&place, name);
        for _ in 0..ATTEMPTS {
            let random = RandomState::new().build_hasher().finish();
            let mut unfinished = OsString::from(".");
            unfinished.push(name);
            unfinished.push(format!(".{random:0DIGITS$x}{SUFFIX}"));
            let path = place.with_file_name(unfinished);
            // Never a file or a link that is there.
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            begun().push(path.clone());
            // Some file systems have no locks, so a failure is not an error.
            let _ = flock(&file, FlockOperation::LockExclusive);
            let this = Self { file, place: place.clone(), path: Some(path) };
            // Another process may have taken it for one that was left.
            if this.is_there()? {
                if let Some(old) = old {
                    // Some file systems have no modes.
                    let _ = this.file.set_permissions(old.permissions());
                }
                return Ok(this);
            }
        }
        Err(io::Error::new(ErrorKind::ResourceBusy, "others remove it all the time"))
    }

    /// Where the file is until it is finished; `None` where it is written in place.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    fn is_there(&self) -> io::Result<bool> {
        let Some(path) = &self.path else { return Ok(true) };
        let (ours, there) = (self.file.metadata()?, fs::symlink_metadata(path));
        Ok(there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
    }

    /// Moves the file to its place, and waits until both are on disk.
    pub fn finish(mut self) -> io::Result<()> {
        let Some(path) = &self.path else { return self.file.flush() };
        self.file.sync_all()?;
        fs::rename(path, &self.place)?;
        begun().retain(|begun| begun != path);
        self.path = None;
        match File::open(folder(&self.place)).and_then(|folder| folder.sync_all()) {
            // Some systems cannot open or synchronise directories.
            Err(e) if !matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::InvalidInput) => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
            begun().retain(|begun| begun != path);
        }
    }
}

/// The target if `out` is a link, so that writing does not replace the link.
fn place(out: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(out) {
        Ok(place) => Ok(place),
        Err(_) if fs::symlink_metadata(out).is_ok_and(|meta| meta.is_symlink()) => {
            Err(io::Error::new(ErrorKind::NotFound, "is a link that leads nowhere; remove it"))
        }
        Err(_) => Ok(out.into()),
    }
}

fn folder(place: &Path) -> &Path {
    place.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes what killed processes left of the file `name` at `place`. Without locks nobody knows, and it stays.
fn remove_left(place: &Path, name: &OsStr) {
    for entry in fs::read_dir(folder(place)).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let rest = found.as_bytes().strip_prefix(b".").and_then(|found| found.strip_prefix(name.as_bytes()));
        let random = rest.and_then(|rest| rest.strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes()));
        let ours = random.is_some_and(|r| r.len() == DIGITS && r.iter().all(u8::is_ascii_hexdigit));
        if !ours || !entry.file_type().is_ok_and(|t| t.is_file()) {
            continue;
        }
        let lock = |file: File| flock(&file, FlockOperation::NonBlockingLockExclusive).map(|()| file);
        // It stays locked until it is gone.
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
    fn no_file_of_a_user_is_touched_and_what_a_killed_process_left_goes() {
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
        // One that another writer is at work on stays.
        let other = Unfinished::create(&place).expect("begun");
        write(&place, b"whole").expect("written");
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
        write(&link, b"new").expect("written");
        let meta = fs::metadata(&file).expect("there");
        assert_eq!(
            (fs::read(&file).expect("there"), meta.permissions().mode() & 0o777),
            (b"new".to_vec(), 0o640)
        );
        assert!(fs::symlink_metadata(&link).is_ok_and(|meta| meta.is_symlink()));
        assert!(write(&dangling, b"new").is_err_and(|e| e.to_string().contains("leads nowhere")));
        write(Path::new("/dev/null"), b"gone").expect("no regular file");
        assert!(write(Path::new("/dev/full"), b"too much").is_err());
        fs::remove_dir_all(dir).expect("removed");
    }
}
