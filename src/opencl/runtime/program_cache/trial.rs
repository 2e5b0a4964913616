//! Trials of code on which a driver may crash, each marked on disk while in progress.

use super::{Cache, Key, files_of, open_own};
use crate::device_info::DeviceInfo;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::mem::forget;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The user may interrupt the program because of a trial that takes longer.
pub const LONG_TRIAL: Duration = Duration::from_secs(60);

/// Name of the marker for binaries being loaded.
const LOADING: &str = "loading";

/// Contents of a marker.
const TRYING: &str = "trying\n";
/// Contents of one by a process in the background. The system may kill such a process at any time, so what it leaves is
/// tried once more.
const TRYING_IN_BACKGROUND: &str = "trying in the background\n";

/// True in a process in the background.
static IN_BACKGROUND: AtomicBool = AtomicBool::new(false);

/// Makes the markers of this process those of one in the background.
pub fn mark_as_background_process() {
    IN_BACKGROUND.store(true, Ordering::Relaxed);
}

/// Markers of this process with their start times; `None` once it ends.
static UNDER_WAY: Mutex<Option<Vec<(PathBuf, Instant)>>> = Mutex::new(Some(Vec::new()));

fn lock_markers() -> MutexGuard<'static, Option<Vec<(PathBuf, Instant)>>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Deletes the markers of trials in progress before the program ends: nothing has crashed. Markers older than `longest`
/// stay, because the driver may be hanging.
pub fn remove_own_markers(longest: Duration) {
    for (path, begun) in lock_markers().take().into_iter().flatten() {
        if begun.elapsed() < longest {
            remove_marker(&path);
        }
    }
}

/// Deletes a marker. It is emptied first, so that a process that has just opened it does not assume a crash.
fn remove_marker(path: &Path) {
    let _ = File::options().write(true).truncate(true).open(path);
    let _ = fs::remove_file(path);
}

/// Kind of crash that a marker must survive.
#[derive(Clone, Copy, PartialEq)]
enum Durability {
    Process,
    /// Some drivers take the whole machine down; writing the marker to disk costs milliseconds.
    Machine,
}

/// Start of a trial.
pub enum CompileAttempt {
    /// In progress; without a marker if there is no cache or another process is trying the same.
    Started(Option<Marker>),
    /// An earlier trial ended with its process; the path of its marker.
    Crashed(PathBuf),
}

impl CompileAttempt {
    /// Starts a trial whose marker is the file `path`.
    fn begin(path: PathBuf, ends: Durability) -> Self {
        let mut under_way = lock_markers();
        let Some(under_way) = &mut *under_way else { return CompileAttempt::Started(None) };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let Some(mut file) = open_own(&path, &mut options) else { return CompileAttempt::Started(None) };
        // If another process holds the lock, it is trying the same now. A marker that is unlocked but not empty was
        // left by a process that died before emptying it.
        if file.try_lock().is_err() {
            return CompileAttempt::Started(None);
        }
        let mut left = String::new();
        match file.read_to_string(&mut left) {
            Ok(_) if !["", TRYING_IN_BACKGROUND].contains(&left.as_str()) => CompileAttempt::Crashed(path),
            Ok(_) if write_marker(&mut file, ends).is_ok() => {
                under_way.push((path.clone(), Instant::now()));
                CompileAttempt::Started(Some(Marker { _locked: file, path }))
            }
            _ => CompileAttempt::Started(None),
        }
    }
}

fn write_marker(marker: &mut File, ends: Durability) -> io::Result<()> {
    let text = if IN_BACKGROUND.load(Ordering::Relaxed) { TRYING_IN_BACKGROUND } else { TRYING };
    marker.write_all(text.as_bytes())?;
    if ends == Durability::Machine { marker.sync_all() } else { Ok(()) }
}

/// A locked marker, deleted when the trial ends.
pub struct Marker {
    _locked: File,
    path: PathBuf,
}

impl Marker {
    /// Leaves the marker behind permanently, as after a crash.
    pub fn leave_behind(self) {
        self.unregister_marker();
        forget(self);
    }

    fn unregister_marker(&self) {
        if let Some(under_way) = &mut *lock_markers() {
            under_way.retain(|(path, _)| *path != self.path);
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        self.unregister_marker();
        remove_marker(&self.path);
    }
}

impl Cache {
    /// Marks on disk that `name` is being tried, until the marker is dropped.
    pub fn start_trial(&self, name: &str) -> CompileAttempt {
        self.start_variant_trial(&Key::from_name(name))
    }

    /// Marks the trial of a variant.
    pub(crate) fn start_variant_trial(&self, key: &Key) -> CompileAttempt {
        self.create_dir();
        let begin = |marker| CompileAttempt::begin(marker, Durability::Machine);
        self.marker_path(key).map_or(CompileAttempt::Started(None), begin)
    }

    /// True if a variant is being tried, or crashed a driver.
    pub(crate) fn is_marked(&self, key: &Key) -> bool {
        self.marker_path(key).is_some_and(|marker| marker.exists())
    }

    /// Marks on disk that a binary is being loaded, until the marker is dropped. Must be cheap: it happens for every
    /// program at every start.
    pub(crate) fn mark_loading(&self) -> Option<Marker> {
        match CompileAttempt::begin(self.marker_path(&Key::from_name(LOADING))?, Durability::Process) {
            CompileAttempt::Started(marker) => marker,
            // Created by another process since this one checked.
            CompileAttempt::Crashed(_) => None,
        }
    }

    /// Deletes all cached programs if a process ended while loading a binary: everything is compiled again.
    pub(crate) fn clear_after_crash(&self) {
        let Some(marker) = self.marker_path(&Key::from_name(LOADING)).filter(|m| m.exists()) else { return };
        let (CompileAttempt::Crashed(marker), Ok(dir)) =
            (CompileAttempt::begin(marker, Durability::Process), &self.dir)
        else {
            return;
        };
        for file in files_of(dir).iter().filter(|f| f.has_extension("program")) {
            let _ = fs::remove_file(&file.path);
        }
        remove_marker(&marker);
    }

    /// Opens the file whose lock a process holds while it compiles a device's programs at leisure; `None` if nothing can
    /// be stored.
    pub fn open_lock(&self, facts: &DeviceInfo) -> Option<File> {
        self.create_dir();
        let path = self.path(&Key::of("lock", "", facts), "lock")?;
        open_own(&path, File::options().write(true).create(true).truncate(false).mode(0o600))
    }

    fn marker_path(&self, key: &Key) -> Option<PathBuf> {
        self.path(key, "trying")
    }
}
