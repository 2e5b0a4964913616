//! Writes files that appear whole or not at all.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that is written beside its final place and then moved there; removed unless finished. So the place holds the
/// old content or the new one, whatever happens.
///
/// The name is always the same, so that the next process takes over what a killed one left. A lock, which the system
/// releases when its owner dies, keeps two processes from writing at once.
pub struct Unfinished {
    pub file: File,
    path: Option<PathBuf>,
}

/// How often another process may finish the file between our opening and locking it.
const ATTEMPTS: usize = 1000;

impl Unfinished {
    pub fn create(out: &Path) -> io::Result<Self> {
        let mut name = out.file_name().ok_or(ErrorKind::InvalidFilename)?.to_os_string();
        name.push(".unfinished");
        let path = out.with_file_name(name);
        for _ in 0..ATTEMPTS {
            // Do not follow a link that somebody put there.
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW);
            let file = options.open(&path)?;
            // Wait for another writer. Some file systems have no locks, so a failure is not an error.
            let _ = flock(&file, FlockOperation::LockExclusive);
            // The other writer may have finished or removed it.
            let (ours, there) = (file.metadata()?, fs::symlink_metadata(&path));
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                file.set_len(0)?;
                return Ok(Self { file, path: Some(path) });
            }
        }
        Err(io::Error::new(ErrorKind::ResourceBusy, "others write it all the time"))
    }

    /// Moves the file to its place, and waits until both are on disk.
    pub fn finish(mut self, out: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        if let Some(path) = &self.path {
            fs::rename(path, out)?;
        }
        self.path = None;
        let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match File::open(folder).and_then(|folder| folder.sync_all()) {
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
        }
    }
}
