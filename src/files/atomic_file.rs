//! Files that appear whole or not at all.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file being written beside its final place, which has the new content or the old one, whatever happens; removed
/// unless finished.
///
/// Its name is always the same, so that what a killed process left is taken over by the next. A lock, which the
/// system releases when its owner dies, keeps two processes from writing at once.
pub struct Unfinished {
    pub file: File,
    path: Option<PathBuf>,
}

/// How often another process may have finished the file between opening and locking it.
const ATTEMPTS: usize = 1000;

impl Unfinished {
    pub fn create(out: &Path) -> io::Result<Self> {
        let mut name = out.file_name().ok_or(ErrorKind::InvalidFilename)?.to_os_string();
        name.push(".unfinished");
        let path = out.with_file_name(name);
        for _ in 0..ATTEMPTS {
            // A link that somebody put there is not followed.
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW);
            let file = options.open(&path)?;
            // Waits for whoever writes it; some file systems have no locks.
            let _ = flock(&file, FlockOperation::LockExclusive);
            // By now it may have been finished or removed.
            let (ours, there) = (file.metadata()?, fs::symlink_metadata(&path));
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                file.set_len(0)?;
                return Ok(Self { file, path: Some(path) });
            }
        }
        Err(io::Error::new(ErrorKind::ResourceBusy, "others write it all the time"))
    }

    /// Puts the file in its place, and both on the disk.
    pub fn finish(mut self, out: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        if let Some(path) = &self.path {
            fs::rename(path, out)?;
        }
        self.path = None;
        let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match File::open(folder).and_then(|folder| folder.sync_all()) {
            // Where folders cannot be opened or synchronised, the system is left to do it.
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
