//! A file that exists while a model runs, so that the next start notices a kill for want of memory.
//!
//! The system's low-memory killer sends SIGKILL, which no process can catch. So a marker whose process is gone means that
//! the process was killed. Others kill too: it was for want of memory if the system has counted such kills since, or if
//! there was too little memory from the start. A marker holds the process's number and start time, because numbers are
//! reused, and the boot, because a restart of the machine is not a kill. It is locked while its process lives, which
//! may be in another container. Nothing depends on markers: if none can be written, there are none.

use super::Memory;
use super::cgroup;
use super::text_file::read;
use files::mapped;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The end of a marker's name, `<model>-<process>-<start>.running`.
const SUFFIX: &str = ".running";

/// The marker of this process, which has at most one, and its lock.
static OURS: Mutex<Option<(PathBuf, File)>> = Mutex::new(None);

/// What a run has planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Bytes that must fit.
    pub need: u64,
    /// Bytes that it may touch.
    pub peak: u64,
}

/// Keeps this process's marker until it is dropped.
#[must_use = "the marker goes when this is dropped"]
pub struct Marker(());

impl Marker {
    /// No marker, for want of a directory.
    pub fn none() -> Marker {
        Marker(())
    }

    /// Writes a marker into `dir`, which is created if missing: this process runs the model with this fingerprint in
    /// this memory. Failures are silent.
    pub fn leave(dir: &Path, model: &str, planned: Planned, memory: &Memory) -> Marker {
        let process = std::process::id();
        // Without the start time, no later process could tell whether this one still runs.
        let Some(started) = started(process) else { return Marker(()) };
        let path = dir.join(format!("{model}-{process}-{started}{SUFFIX}"));
        let tight = memory.usable().is_some_and(|free| free < planned.peak);
        let record = Record { process, started, boot: boot(), need: planned.need, kills: kills(), tight };
        let write = || {
            fs::create_dir_all(dir)?;
            let mut file = File::create(&path)?;
            // Where there are no locks, the start time tells.
            let _ = flock(&file, FlockOperation::LockExclusive);
            file.write_all(record.text().as_bytes()).map(|()| file)
        };
        if let Ok(file) = write() {
            mapped::remove_if_lost(&path);
            if let Ok(mut ours) = OURS.lock() {
                *ours = Some((path, file));
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
    if let Some((file, _)) = OURS.lock().ok().and_then(|mut ours| ours.take()) {
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

/// Removes the markers of killed runs of a model and returns the largest plan, in bytes, of those that were killed for
/// want of memory. Only one caller gets each marker.
pub fn killed(dir: &Path, model: &str) -> Option<u64> {
    killed_since(dir, model, kills())
}

/// [`killed`], where the system has counted so many kills for want of memory.
fn killed_since(dir: &Path, model: &str, kills: Option<u64>) -> Option<u64> {
    let mut most = None;
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let name = entry.file_name();
        let ours = name.to_str().and_then(|n| n.strip_prefix(model)?.strip_prefix('-')?.strip_suffix(SUFFIX));
        let Some(process) = ours.and_then(|p| p.split('-').next()?.parse::<u32>().ok()) else { continue };
        let record = read(&entry.path().to_string_lossy()).and_then(|text| Record::parse(&text));
        let alive = match &record {
            Some(r) => r.boot == boot() && started(r.process) == Some(r.started),
            // Being written, or cut short.
            None => started(process).is_some(),
        };
        // Of several processes that see it, one removes it.
        if alive || is_locked(&entry.path()) || fs::remove_file(entry.path()).is_err() {
            continue;
        }
        if let Some(record) = record.filter(|r| r.boot == boot() && r.lacked_memory(kills)) {
            most = most.max(Some(record.need));
        }
    }
    most
}

/// Whether a living process holds a marker.
fn is_locked(path: &Path) -> bool {
    let lock = |file| flock(&file, FlockOperation::NonBlockingLockExclusive);
    File::open(path).is_ok_and(|file| lock(file) == Err(rustix::io::Errno::WOULDBLOCK))
}

/// How many processes the system has killed for want of memory. Android's own killer counts none.
fn kills() -> Option<u64> {
    if cfg!(target_os = "android") {
        return None;
    }
    // The machine's number includes its groups'.
    read("/proc/vmstat").and_then(|text| cgroup::count(&text, "oom_kill")).or_else(cgroup::kills)
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
    /// [`kills`] at the start.
    kills: Option<u64>,
    /// Less was free at the start than the run may touch.
    tight: bool,
}

impl Record {
    fn text(&self) -> String {
        let Self { process, started, boot, need, kills, tight } = self;
        let boot = if boot.is_empty() { "-" } else { boot };
        let kills = kills.map_or("-".into(), |n| n.to_string());
        format!("{process} {started} {boot} {need} {kills} {}\n", if *tight { "tight" } else { "ample" })
    }

    /// Whether memory is why the run was killed, now that the system has counted so many kills.
    fn lacked_memory(&self, kills: Option<u64>) -> bool {
        self.tight || self.kills.zip(kills).is_some_and(|(then, now)| now > then)
    }

    /// `None` unless it is a whole line.
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.strip_suffix('\n')?.split(' ').collect();
        let [process, started, boot, need, kills, tight] = words[..] else { return None };
        Some(Self {
            process: process.parse().ok()?,
            started: started.parse().ok()?,
            boot: if boot == "-" { String::new() } else { boot.into() },
            need: need.parse().ok()?,
            kills: if kills == "-" { None } else { Some(kills.parse().ok()?) },
            tight: tight == "tight",
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
        Record { process, started, boot: boot(), need, kills: Some(5), tight: false }
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
        let untold = Record { boot: String::new(), kills: None, tight: true, ..whole.clone() };
        assert_eq!(Record::parse(&untold.text()), Some(untold));
        let text = whole.text();
        (0..text.len()).for_each(|n| assert_eq!(Record::parse(&text[..n]), None));
    }

    #[test]
    fn runs_of_this_model_and_boot_that_lacked_memory_are_reported_once() {
        let dir = scratch("killed");
        let mine = std::process::id();
        let alive = record(mine, started(mine).expect("this process runs"), 1);
        let write = |name: &str, text: &str| fs::write(dir.join(name), text).expect("a file");
        write(&format!("m-{mine}-7.running"), &alive.text());
        write("m-1-7.running", &record(1, u64::MAX, 300).text()); // the number is in use again
        write("m-4194305-7.running", &record(4_194_305, 5, 200).text()); // beyond all process numbers
        write("m-4194306-7.running", &Record { boot: "another".into(), ..record(4_194_306, 5, 900) }.text());
        write("m-4194308-7.running", &record(4_194_308, 5, 950).text()); // of another container, and alive
        let container = File::open(dir.join("m-4194308-7.running")).expect("a file");
        flock(&container, FlockOperation::LockExclusive).expect("locked");
        write("m-4194307.running", "cut sho");
        write("other-4194305.running", &record(4_194_305, 5, 800).text());
        write("m-notes.txt", "not a marker");
        assert_eq!(killed_since(&dir, "m", Some(6)), Some(300));
        assert_eq!(killed_since(&dir, "m", Some(6)), None);
        drop(container);
        // Somebody else killed it: nobody has counted a kill for want of memory.
        assert_eq!(killed_since(&dir, "m", Some(5)), None);
        let mut left: Vec<String> = fs::read_dir(&dir)
            .expect("the folder")
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        left.sort();
        assert_eq!(
            left,
            [format!("m-{mine}-7.running"), "m-notes.txt".into(), "other-4194305.running".into()]
        );
        fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(killed(&dir, "m"), None);
    }

    #[test]
    fn kills_count_where_they_were_counted_or_memory_was_short() {
        let ample = record(1, 2, 3);
        assert!(!ample.lacked_memory(Some(5)) && ample.lacked_memory(Some(6)) && !ample.lacked_memory(None));
        let untold = Record { kills: None, ..ample.clone() };
        assert!(!untold.lacked_memory(Some(6)) && Record { tight: true, ..untold }.lacked_memory(None));
    }

    #[test]
    fn a_marker_exists_while_it_is_held() {
        let dir = scratch("held").join("made");
        let (planned, id) = (Planned { need: 7, peak: 9 }, std::process::id());
        let memory = |available| Memory { available: Some(available), ..Memory::default() };
        let held = Marker::leave(&dir, "m", planned, &memory(8));
        let file = dir.join(format!("m-{id}-{}.running", started(id).expect("this process runs")));
        let text = fs::read_to_string(&file).expect("the marker");
        assert_eq!(Record::parse(&text).map(|r| (r.process, r.need, r.tight)), Some((id, 7, true)));
        assert!(is_locked(&file));
        assert_eq!(killed(&dir, "m"), None);
        drop(held);
        assert!(!file.exists());
        fs::remove_dir_all(dir.parent().expect("a folder")).expect("removed");
        drop(Marker::leave(Path::new("/proc/no/such/place"), "m", planned, &memory(9)));
    }
}
