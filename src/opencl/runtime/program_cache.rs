//! Disk cache of built programs: the driver's binary and the results of self-tests.
//!
//! There is one file per key. The key holds everything a built program depends on; it is stored in full and compared. A
//! file is ignored if it is missing, truncated, damaged, of another key, a link, owned by another user, or writable by
//! others. Failed writes are ignored too: the cache only saves time and never fails. Files are created by renaming, so
//! they are always complete.
//!
//! A marker beside the file exists while a variant is compiled or tried. If the driver crashes, the marker remains, and
//! that variant is not tried again. Another marker exists while a binary is loaded: if the driver crashed on its own
//! binary, everything is compiled again.

mod trial;

use super::device_info::DeviceInfo;
use files::atomic_file::AtomicFile;
use rustix::fs::{Access, access};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub use trial::{CompileAttempt, LONG_TRIAL, Marker, mark_as_background_process, remove_own_markers};

/// Environment variable with the directory to use, or `off`.
pub const CACHE_VARIABLE: &str = "ANTIGRAVITY_OPENCL_CACHE";
/// First bytes of a file; the digit is the version of the format and of the meaning of its metadata.
const MAGIC: &[u8; 8] = b"agclprg1";
/// Maximum size of all files together; the oldest are deleted first.
const MAX_BYTES: u64 = 128 << 20;

/// Cache of built programs, or the reason why it is disabled.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: Result<PathBuf, CacheDisabled>,
    binaries: bool,
}

/// Reason for a missing directory.
#[derive(Debug, Clone)]
enum CacheDisabled {
    /// Disabled on request, in these words.
    Off(String),
    Unknown(String),
}

impl Cache {
    /// A disabled cache.
    pub fn disabled() -> Self {
        Self::without_dir(CacheDisabled::Off("off".into()))
    }

    /// The user's cache: the directory in `ANTIGRAVITY_OPENCL_CACHE`, otherwise `antigravity/opencl` in the XDG cache
    /// directory; on Android `opencl-cache` next to the program.
    pub fn for_user() -> Self {
        match std::env::var_os(CACHE_VARIABLE).filter(|v| !v.is_empty()) {
            Some(off) if off == "off" => {
                Self::without_dir(CacheDisabled::Off(format!("off by {CACHE_VARIABLE}")))
            }
            Some(dir) => Self::in_dir(dir),
            None => match default_dir() {
                Some(dir) => Self::in_dir(dir),
                None => {
                    let why =
                        format!("no home directory for compiled programs; {CACHE_VARIABLE} names another");
                    Self::without_dir(CacheDisabled::Unknown(why))
                }
            },
        }
    }

    /// A cache in `dir`, which is created on the first write, and used only if no one else can write there.
    pub fn in_dir(dir: impl Into<PathBuf>) -> Self {
        Self { dir: Ok(dir.into()), binaries: true }
    }

    /// Stores metadata about programs, but not their binaries.
    pub fn without_binaries(self) -> Self {
        Self { binaries: false, ..self }
    }

    fn without_dir(why: CacheDisabled) -> Self {
        Self { dir: Err(why), binaries: false }
    }

    /// Report: the directory and its contents, or why it is not used.
    pub fn describe_contents(&self) -> String {
        let dir = match &self.dir {
            Ok(dir) => dir,
            Err(CacheDisabled::Off(why) | CacheDisabled::Unknown(why)) => return why.clone(),
        };
        match fs::metadata(dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return format!("{}: not created yet", dir.display());
            }
            Err(e) => return format!("not used: {}: {e}", dir.display()),
            Ok(meta) => {
                if let Some(why) = untrusted_reason(&meta) {
                    return format!("not used: {}: {why}", dir.display());
                }
            }
        }
        let files = files_of(dir);
        let crashed = files.iter().filter(|f| f.has_extension("trying")).count();
        let bytes: u64 = files.iter().map(|f| f.bytes).sum();
        let programs = files.iter().filter(|f| f.has_extension("program")).count();
        let crashed = match crashed {
            0 => String::new(),
            n => format!("; {n} crashed the driver, or are being tried now (*.trying)"),
        };
        format!(
            "{}: {programs} programs, {:.1} MiB{crashed}",
            dir.display(),
            bytes as f64 / f64::from(1 << 20)
        )
    }

    /// Reason why nothing can be stored, unless that was requested.
    pub fn unusable_reason(&self) -> Option<String> {
        let dir = match &self.dir {
            Ok(dir) => dir,
            Err(CacheDisabled::Off(_)) => return None,
            Err(CacheDisabled::Unknown(why)) => return Some(why.clone()),
        };
        self.create_dir();
        let why = match fs::metadata(dir) {
            Err(e) => e.to_string(),
            Ok(meta) => untrusted_reason(&meta).or_else(|| unwritable_reason(dir))?,
        };
        Some(format!("{}: {why}; {CACHE_VARIABLE} names another", dir.display()))
    }

    /// Entry of a key; `None` unless it is intact and matches.
    pub(super) fn load(&self, key: &Key) -> Option<Entry> {
        let file = open_own(&self.path(key, "program")?, File::options().read(true))?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).ok()?;
        Entry::parse(&bytes, key)
    }

    /// True if binaries are stored. Some drivers take long to return them.
    pub(super) fn keeps_binaries(&self) -> bool {
        self.binaries
    }

    /// Stores an entry; failures are ignored.
    pub(super) fn save(&self, key: &Key, entry: &Entry) {
        self.create_dir();
        let (Some(path), Ok(dir)) = (self.path(key, "program"), &self.dir) else { return };
        if fs::symlink_metadata(&path).is_ok_and(|meta| !meta.is_file()) {
            // Replaces a link instead of following it. A directory stays.
            let _ = fs::remove_file(&path);
        }
        let write = || -> std::io::Result<()> {
            let unfinished = AtomicFile::create(&path)?;
            // Independent of the umask, because files that others can write are not loaded.
            unfinished.file.set_permissions(Permissions::from_mode(0o600))?;
            (&unfinished.file).write_all(&entry.to_bytes(key))?;
            unfinished.commit()
        };
        if write().is_ok() {
            prune_files(dir);
        }
    }

    /// Text stored by [`Cache::put_text`] under a name.
    pub fn get_text(&self, name: &str) -> Option<String> {
        self.load(&Key::from_name(name))?.metadata.remembered
    }

    /// Stores a short text under a name; failures are ignored.
    pub fn put_text(&self, name: &str, text: &str) {
        let metadata = ProgramMetadata { remembered: Some(text.into()), ..ProgramMetadata::default() };
        self.save(&Key::from_name(name), &Entry { binary: Vec::new(), metadata });
    }

    /// Creates the directory, private, if it is missing; failures are ignored.
    fn create_dir(&self) {
        if let Ok(dir) = &self.dir {
            let _ = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        }
    }

    /// Path of a key's file; `None` if the directory is missing or untrusted.
    fn path(&self, key: &Key, extension: &str) -> Option<PathBuf> {
        let dir = self.dir.as_ref().ok()?;
        let trusted = untrusted_reason(&fs::metadata(dir).ok()?).is_none();
        trusted.then(|| dir.join(format!("{:032x}.{extension}", fnv128(&key.0))))
    }
}

fn default_dir() -> Option<PathBuf> {
    if cfg!(target_os = "android") {
        return Some(std::env::current_exe().ok()?.parent()?.join("opencl-cache"));
    }
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(base.join("antigravity/opencl"))
}

/// Reason why binaries in this directory must not be run.
fn untrusted_reason(meta: &Metadata) -> Option<String> {
    if !meta.is_dir() {
        Some("it is not a directory".into())
    } else if meta.uid() != user_id() {
        Some(format!("it belongs to user {}", meta.uid()))
    } else if others_may_write(meta) {
        Some("others may write there; chmod go-w makes it safe".into())
    } else {
        None
    }
}

fn others_may_write(meta: &Metadata) -> bool {
    meta.mode() & 0o022 != 0
}

/// Opens a file that no one else can have written; checks the open file, which no one can replace.
fn open_own(path: &Path, options: &mut OpenOptions) -> Option<File> {
    // Do not block on a pipe.
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).ok()?;
    let meta = file.metadata().ok()?;
    (meta.is_file() && meta.uid() == user_id() && !others_may_write(&meta)).then_some(file)
}

/// Reason why nothing can be added to a directory.
fn unwritable_reason(dir: &Path) -> Option<String> {
    access(dir, Access::WRITE_OK | Access::EXEC_OK).err().map(|e| std::io::Error::from(e).to_string())
}

fn user_id() -> u32 {
    geteuid().as_raw()
}

struct CacheFile {
    path: PathBuf,
    bytes: u64,
    changed: SystemTime,
}

impl CacheFile {
    fn has_extension(&self, extension: &str) -> bool {
        self.path.extension().is_some_and(|e| e == extension)
    }
}

fn files_of(dir: &Path) -> Vec<CacheFile> {
    let kept = |entry: fs::DirEntry| {
        let meta = entry.metadata().ok()?;
        meta.is_file().then_some(CacheFile {
            path: entry.path(),
            bytes: meta.len(),
            changed: meta.modified().ok()?,
        })
    };
    fs::read_dir(dir).map(|entries| entries.flatten().filter_map(kept).collect()).unwrap_or_default()
}

/// Deletes the oldest files beyond [`MAX_BYTES`].
fn prune_files(dir: &Path) {
    let mut files = files_of(dir);
    // A process may hold it.
    files.retain(|f| !f.has_extension("lock"));
    files.sort_by_key(|f| f.changed);
    let mut bytes: u64 = files.iter().map(|f| f.bytes).sum();
    for file in files {
        if bytes <= MAX_BYTES {
            return;
        }
        // If a file cannot be deleted, the next save tries again.
        let _ = fs::remove_file(&file.path);
        bytes -= file.bytes;
    }
}

/// Everything that a built program and its metadata depend on.
pub(super) struct Key(Vec<u8>);

impl Key {
    /// Key of something that is not a program.
    fn from_name(name: &str) -> Self {
        Self::of_parts([name])
    }

    /// Key of the program that a device's compiler builds from `text` with `options`.
    pub fn of(text: &str, options: &str, facts: &DeviceInfo) -> Self {
        Self::of_parts([text, options].into_iter().chain(facts.cache_key_parts()))
    }

    fn of_parts<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut key = Vec::new();
        parts.into_iter().for_each(|part| put_part(&mut key, part.as_bytes()));
        Self(key)
    }
}

/// Result of a kernel's self-test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    Passed,
    Failed,
}

/// Facts found out about a program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProgramMetadata {
    /// Self-test results by kernel.
    pub verdicts: BTreeMap<String, Verdict>,
    /// Stored text, if the key is not a program's.
    #[serde(default)]
    pub remembered: Option<String>,
}

/// Contents of a cache file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// Binary from the driver; empty if there is none.
    pub binary: Vec<u8>,
    pub metadata: ProgramMetadata,
}

impl Entry {
    /// Magic, checksum of the rest, then key, metadata (JSON) and binary, each preceded by its length.
    fn to_bytes(&self, key: &Key) -> Vec<u8> {
        let metadata = serde_json::to_vec(&self.metadata).expect("maps of strings");
        let mut rest = Vec::with_capacity(key.0.len() + metadata.len() + self.binary.len() + 24);
        [&key.0, &metadata, &self.binary].into_iter().for_each(|part| put_part(&mut rest, part));
        let mut bytes = MAGIC.to_vec();
        bytes.extend(fnv128(&rest).to_le_bytes());
        bytes.append(&mut rest);
        bytes
    }

    fn parse(bytes: &[u8], key: &Key) -> Option<Self> {
        let (sum, mut rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<16>()?;
        if u128::from_le_bytes(*sum) != fnv128(rest) || take_part(&mut rest)? != key.0 {
            return None;
        }
        let metadata = serde_json::from_slice(take_part(&mut rest)?).ok()?;
        let binary = take_part(&mut rest)?.to_vec();
        rest.is_empty().then_some(Self { binary, metadata })
    }
}

fn put_part(to: &mut Vec<u8>, part: &[u8]) {
    to.extend((part.len() as u64).to_le_bytes());
    to.extend(part);
}

fn take_part<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, rest) = from.split_first_chunk::<8>()?;
    let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    *from = rest;
    Some(part)
}

/// 128-bit FNV-1a. Detects damage and names files; write permissions are checked separately.
fn fnv128(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, &b| (hash ^ u128::from(b)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> (Key, Entry) {
        let metadata = ProgramMetadata {
            verdicts: [("a".into(), Verdict::Passed), ("b".into(), Verdict::Failed)].into(),
            ..ProgramMetadata::default()
        };
        (Key(b"key".to_vec()), Entry { binary: vec![1, 2, 3], metadata })
    }

    #[test]
    fn the_hash_of_a_key_is_fnv_1a() {
        // Vectors of the IETF draft (draft-eastlake-fnv).
        assert_eq!(fnv128(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv128(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(fnv128(b"foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn a_stored_entry_is_read_back_unchanged() {
        let (key, entry) = entry();
        assert_eq!(Entry::parse(&entry.to_bytes(&key), &key), Some(entry));
        let none = Entry::default();
        assert_eq!(Entry::parse(&none.to_bytes(&key), &key), Some(none));
    }

    #[test]
    fn a_damaged_or_foreign_entry_is_ignored() {
        let (key, entry) = entry();
        let bytes = entry.to_bytes(&key);
        for n in 0..bytes.len() {
            assert_eq!(Entry::parse(&bytes[..n], &key), None, "cut to {n}");
            let mut damaged = bytes.clone();
            damaged[n] ^= 1;
            assert_eq!(Entry::parse(&damaged, &key), None, "byte {n}");
        }
        assert_eq!(Entry::parse(&[&bytes[..], b"x"].concat(), &key), None);
        assert_eq!(Entry::parse(&bytes, &Key(b"other".to_vec())), None);
        // A checksum that fits, lengths that do not.
        let rest = u64::MAX.to_le_bytes();
        let sum = fnv128(&rest).to_le_bytes();
        assert_eq!(Entry::parse(&[&MAGIC[..], &sum, &rest].concat(), &key), None);
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let facts = |name: &str| DeviceInfo { name: name.into(), ..DeviceInfo::unknown_device() };
        let key = |text: &str, options: &str, name: &str| Key::of(text, options, &facts(name)).0;
        let base = key("ab", "c", "d");
        assert_eq!(base, key("ab", "c", "d"));
        for other in [key("a", "bc", "d"), key("ab", "", "cd"), key("ab", "c", "e")] {
            assert_ne!(base, other);
        }
        let newer = DeviceInfo { driver: "2".into(), ..facts("d") };
        assert_ne!(base, Key::of("ab", "c", &newer).0);
    }
}
