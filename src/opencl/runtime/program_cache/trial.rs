//! Trials of what a driver may crash on: each is marked on disk while it is under way.

use super::{Cache, Key, files_of, open_own};
use std::fs::{self, File};
use std::io::{self, Write};
use std::mem::forget;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A trial that takes longer may be what a user ends the program for.
const LONG: Duration = Duration::from_secs(60);

/// Names the marker of binaries that are being loaded.
const LOADING: &str = "loading";

/// Markers of this process, and since when; `None` when it ends.
static UNDER_WAY: Mutex<Option<Vec<(PathBuf, Instant)>>> = Mutex::new(Some(Vec::new()));

fn under_way() -> MutexGuard<'static, Option<Vec<(PathBuf, Instant)>>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the markers of trials under way, before a user's signal ends the program: nothing has crashed. One that has
/// taken a minute stays, as nobody knows whether the driver would ever have returned.
pub fn withdraw_trials() {
    for (path, begun) in under_way().take().into_iter().flatten() {
        if begun.elapsed() < LONG {
            remove(&path);
        }
    }
}

/// Empties the marker first: who has opened it before it is removed must not take it for a crash's.
fn remove(path: &Path) {
    let _ = File::options().write(true).truncate(true).open(path);
    let _ = fs::remove_file(path);
}

/// What is to end before a marker can be found.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    Process,
    /// Some drivers take the whole machine with them; that the marker is on its disk costs milliseconds.
    Machine,
}

/// The beginning of a trial.
pub enum Attempt {
    /// It is under way; without a marker where there is no cache, or another process is at it.
    Begun(Option<Marker>),
    /// An earlier one ended with its process; the marker that it left.
    Crashed(PathBuf),
}

impl Attempt {
    /// Begins a trial, whose marker is the file `path`.
    fn begin(path: PathBuf, ends: Ends) -> Self {
        let mut under_way = under_way();
        let Some(under_way) = &mut *under_way else { return Attempt::Begun(None) };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let Some(mut file) = open_own(&path, &mut options) else { return Attempt::Begun(None) };
        // Another process that has it locked is trying the same now. A process that finds it unlocked and not empty
        // comes after one that did not live to empty it.
        if file.try_lock().is_err() {
            return Attempt::Begun(None);
        }
        match file.metadata() {
            Ok(meta) if meta.len() > 0 => Attempt::Crashed(path),
            Ok(_) if written(&mut file, ends).is_ok() => {
                under_way.push((path.clone(), Instant::now()));
                Attempt::Begun(Some(Marker { _locked: file, path }))
            }
            _ => Attempt::Begun(None),
        }
    }
}

fn written(marker: &mut File, ends: Ends) -> io::Result<()> {
    marker.write_all(b"trying\n")?;
    if ends == Ends::Machine { marker.sync_all() } else { Ok(()) }
}

/// A marker, locked; goes when the trial has ended, well or not.
pub struct Marker {
    _locked: File,
    path: PathBuf,
}

impl Marker {
    /// Leaves it there for good, as if the driver had crashed.
    pub fn stay(self) {
        self.ended();
        forget(self);
    }

    fn ended(&self) {
        if let Some(under_way) = &mut *under_way() {
            under_way.retain(|(path, _)| *path != self.path);
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        self.ended();
        remove(&self.path);
    }
}

impl Cache {
    /// Says on disk that what has this name is being tried, until the marker is dropped.
    pub fn attempt(&self, name: &str) -> Attempt {
        self.try_out(&Key::named(name))
    }

    /// The same of a variant.
    pub(crate) fn try_out(&self, key: &Key) -> Attempt {
        self.make();
        let begin = |marker| Attempt::begin(marker, Ends::Machine);
        self.marker(key).map_or(Attempt::Begun(None), begin)
    }

    /// Whether a variant is being tried, or a driver crashed on it.
    pub(crate) fn is_marked(&self, key: &Key) -> bool {
        self.marker(key).is_some_and(|marker| marker.exists())
    }

    /// Says on disk that a binary is being loaded, until the marker is dropped: at every start and for each program, so it
    /// has to cost little.
    pub(crate) fn loading(&self) -> Option<Marker> {
        match Attempt::begin(self.marker(&Key::named(LOADING))?, Ends::Process) {
            Attempt::Begun(marker) => marker,
            // Of another process, since this one has looked.
            Attempt::Crashed(_) => None,
        }
    }

    /// Removes all that is kept where a process ended while a binary was loaded: what follows is a first start.
    pub(crate) fn begin_anew_after_crash(&self) {
        let Some(marker) = self.marker(&Key::named(LOADING)).filter(|m| m.exists()) else { return };
        let (Attempt::Crashed(marker), Ok(dir)) = (Attempt::begin(marker, Ends::Process), &self.dir) else {
            return;
        };
        for file in files_of(dir).iter().filter(|f| f.is("program")) {
            let _ = fs::remove_file(&file.path);
        }
        remove(&marker);
    }

    fn marker(&self, key: &Key) -> Option<PathBuf> {
        self.path(key, "trying")
    }
}
