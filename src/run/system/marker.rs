//! A file that exists while a model runs, so that the next start notices a kill.
//!
//! The system's low-memory killer sends SIGKILL, which no process can catch. So a marker whose process is gone means that
//! the process was killed. A marker holds the process's number and start time, because numbers are reused, and the boot,
//! because a restart of the machine is not a kill. Nothing depends on markers: if none can be written, there are none.

use super::text_file::read;
use files::mapped;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The end of a marker's name, `<model>-<process>.running`.
const SUFFIX: &str = ".running";

/// The marker of this process, which has at most one.
static OURS: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Keeps this process's marker until it is dropped.
#[must_use = "the marker goes when this is dropped"]
pub struct Marker(());

impl Marker {
    /// No marker, for want of a directory.
    pub fn none() -> Marker {
        Marker(())
    }

    /// Writes a marker into `dir`, which is created if missing: this process runs the model with this fingerprint and
    /// has planned `need` bytes. Failures are silent.
    pub fn leave(dir: &Path, model: &str, need: u64) -> Marker {
        let process = std::process::id();
        // Without the start time, no later process could tell whether this one still runs.
        let Some(started) = started(process) else { return Marker(()) };
        let file = dir.join(format!("{model}-{process}{SUFFIX}"));
        let record = Record { process, started, boot: boot(), need };
        if fs::create_dir_all(dir).is_ok() && fs::write(&file, record.text()).is_ok() {
            mapped::remove_if_lost(&file);
            if let Ok(mut ours) = OURS.lock() {
                *ours = Some(file);
            }
        }
        Marker(())
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        remove();
    }
}

/// Removes this process's marker, before an end that runs no destructors.
pub fn remove() {
    if let Some(file) = OURS.lock().ok().and_then(|mut ours| ours.take()) {
        // Another process may have removed it already.
        let _ = fs::remove_file(file);
    }
}

/// Where markers are: with the user's state, on a phone beside the program. `None` if there is no such directory.
pub fn directory() -> Option<PathBuf> {
    if cfg!(target_os = "android") {
        return Some(std::env::current_exe().ok()?.parent()?.into());
    }
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = path("XDG_STATE_HOME").or_else(|| Some(path("HOME")?.join(".local/state")));
    state.map(|dir| dir.join("antigravity"))
}

/// Removes the markers of killed runs of a model and returns the largest of their plans, in bytes. Only one caller gets
/// each marker.
pub fn killed(dir: &Path, model: &str) -> Option<u64> {
    let mut most = None;
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let name = entry.file_name();
        let ours = name.to_str().and_then(|n| n.strip_prefix(model)?.strip_prefix('-')?.strip_suffix(SUFFIX));
        let Some(process) = ours.and_then(|p| p.parse::<u32>().ok()) else { continue };
        let record = read(&entry.path().to_string_lossy()).and_then(|text| Record::parse(&text));
        let alive = match &record {
            Some(r) => r.boot == boot() && started(r.process) == Some(r.started),
            // Being written, or cut short.
            None => started(process).is_some(),
        };
        // Of several processes that see it, one removes it.
        if alive || fs::remove_file(entry.path()).is_err() {
            continue;
        }
        if let Some(record) = record.filter(|r| r.boot == boot()) {
            most = most.max(Some(record.need));
        }
    }
    most
}

/// The one line of a marker.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    process: u32,
    /// Clock ticks from the start of the system to the start of the process.
    started: u64,
    /// The id of the boot; empty if the system does not tell.
    boot: String,
    need: u64,
}

impl Record {
    fn text(&self) -> String {
        let Self { process, started, boot, need } = self;
        format!("{process} {started} {} {need}\n", if boot.is_empty() { "-" } else { boot })
    }

    /// `None` unless it is a whole line.
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.strip_suffix('\n')?.split(' ').collect();
        let [process, started, boot, need] = words[..] else { return None };
        Some(Self {
            process: process.parse().ok()?,
            started: started.parse().ok()?,
            boot: if boot == "-" { String::new() } else { boot.into() },
            need: need.parse().ok()?,
        })
    }
}

/// The id of the current boot.
fn boot() -> String {
    read("/proc/sys/kernel/random/boot_id").map_or(String::new(), |id| id.trim().into())
}

/// When a process started; `None` if it is gone or a zombie.
fn started(process: u32) -> Option<u64> {
    start_time(&read(&format!("/proc/{process}/stat"))?)
}

/// Field 22 of `/proc/<process>/stat`. Field 2, the program's name in brackets, may contain blanks and brackets.
fn start_time(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if ["Z", "X"].contains(&state) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("antigravity-marker-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        dir
    }

    fn record(process: u32, started: u64, need: u64) -> Record {
        Record { process, started, boot: boot(), need }
    }

    #[test]
    fn start_times_are_read_past_odd_program_names() {
        let stat = |state: &str| {
            format!("7 (a) b (c)) {state} 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20\n")
        };
        assert_eq!(start_time(&stat("R")), Some(4242));
        assert_eq!(start_time(&stat("Z")), None);
        assert_eq!(start_time("7 (x) R 1 2"), None);
        assert_eq!(start_time(""), None);
        assert!(started(std::process::id()).is_some());
    }

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        let whole = record(12, 34, 56);
        assert_eq!(Record::parse(&whole.text()), Some(whole.clone()));
        let untold = Record { boot: String::new(), ..whole.clone() };
        assert_eq!(Record::parse(&untold.text()), Some(untold));
        let text = whole.text();
        (0..text.len()).for_each(|n| assert_eq!(Record::parse(&text[..n]), None));
    }

    #[test]
    fn killed_runs_of_this_model_and_boot_are_reported_once() {
        let dir = scratch("killed");
        let mine = std::process::id();
        let alive = record(mine, started(mine).expect("this process runs"), 1);
        let write = |name: &str, text: &str| fs::write(dir.join(name), text).expect("a file");
        write(&format!("m-{mine}.running"), &alive.text());
        write("m-1.running", &record(1, u64::MAX, 300).text()); // the number is in use again
        write("m-4194305.running", &record(4_194_305, 5, 200).text()); // beyond all process numbers
        write("m-4194306.running", &Record { boot: "another".into(), ..record(4_194_306, 5, 900) }.text());
        write("m-4194307.running", "cut sho");
        write("other-4194305.running", &record(4_194_305, 5, 800).text());
        write("m-notes.txt", "not a marker");
        assert_eq!(killed(&dir, "m"), Some(300));
        assert_eq!(killed(&dir, "m"), None);
        let mut left: Vec<String> = fs::read_dir(&dir)
            .expect("the folder")
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        left.sort();
        assert_eq!(left, [format!("m-{mine}.running"), "m-notes.txt".into(), "other-4194305.running".into()]);
        fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(killed(&dir, "m"), None);
    }

    #[test]
    fn a_marker_exists_while_it_is_held() {
        let dir = scratch("held").join("made");
        let held = Marker::leave(&dir, "m", 7);
        let file = dir.join(format!("m-{}.running", std::process::id()));
        let text = fs::read_to_string(&file).expect("the marker");
        assert_eq!(Record::parse(&text).map(|r| (r.process, r.need)), Some((std::process::id(), 7)));
        assert_eq!(killed(&dir, "m"), None);
        drop(held);
        assert!(!file.exists());
        fs::remove_dir_all(dir.parent().expect("a folder")).expect("removed");
        drop(Marker::leave(Path::new("/proc/no/such/place"), "m", 7));
    }
}
