//! Immutable bytes of tensors: mapped files and owned memory.

mod aligned_bytes;
mod sigbus;

pub use aligned_bytes::AlignedBytes;

use std::fmt;
use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::ops::{Deref, Range};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use crate::file_range::FileRange;
use crate::{Error, Result};

const HUGE_PAGE: usize = 2 << 20;

/// Bytes whose address and content never change.
enum Memory {
    /// Fields drop in this order: the watch must end before the addresses can be reused.
    File {
        _watch: sigbus::MappedFileGuard,
        map: Mmap,
        file: File,
    },
    Owned(AlignedBytes),
    /// Memory owned by another type, e.g. a device buffer that stays mapped.
    Shared(Box<dyn Deref<Target = [u8]> + Send + Sync>),
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        match self {
            Memory::File { map, .. } => map,
            Memory::Owned(bytes) => bytes.as_slice(),
            Memory::Shared(bytes) => bytes,
        }
    }
}

/// A range of mapped or owned memory, reference-counted. Cheap to clone.
#[derive(Clone)]
pub struct MappedSlice {
    memory: Arc<Memory>,
    range: Range<usize>, // inside the memory, checked at construction
}

impl MappedSlice {
    fn new(memory: Memory) -> MappedSlice {
        let range = 0..memory.bytes().len();
        MappedSlice { memory: Arc::new(memory), range }
    }

    /// Wraps `bytes`, whose address must not change when the value is moved.
    pub fn from_owner(bytes: impl Deref<Target = [u8]> + Send + Sync + 'static) -> MappedSlice {
        MappedSlice::new(Memory::Shared(Box::new(bytes)))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[self.range.clone()]
    }

    /// Bytes from offset `from` of this plane to the end of the underlying file or memory; empty if `from` is beyond
    /// it.
    pub fn to_end_of_memory(&self, from: usize) -> &[u8] {
        self.memory.bytes().get(self.range.start + from..).unwrap_or_default()
    }

    /// Returns the subrange `range`; `None` if it is not inside this plane.
    pub fn slice(&self, range: Range<usize>) -> Option<MappedSlice> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start;
        Some(MappedSlice { memory: self.memory.clone(), range: start + range.start..start + range.end })
    }

    /// Tells the system that these bytes of a mapped file are not needed soon: their pages stop counting as this
    /// process's memory, and are read from the file again when accessed. Does nothing to owned memory.
    ///
    /// Releases a huge page more on each side: Linux 6.18 and later map a whole large folio when one byte of it is
    /// read, so bytes released earlier would come back with the first byte of their neighbours.
    pub fn release_pages(&self) {
        let Memory::File { map, .. } = &*self.memory else { return };
        let around = self.range.start.saturating_sub(HUGE_PAGE)..map.len().min(self.range.end + HUGE_PAGE);
        if let Some(whole) = whole_pages(&around, map.len(), page_size()) {
            // SAFETY: `map` is a shared read-only mapping of a file (made in `map_file`), so dropped
            // pages come back from the file with the same content; nothing written can be lost.
            // A refusal changes nothing, so it is not an error.
            let _ =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, whole.start, whole.len()) };
        }
    }

    /// Tells the system that rows of these bytes of a mapped file are read here and there, so that it reads and keeps
    /// no more of the file than the pages of the rows. (64 rows of a table of 485 MiB were 102 MiB of memory without.)
    pub fn expect_random_reads(&self) {
        let Memory::File { map, .. } = &*self.memory else { return };
        if let Some(whole) = whole_pages(&self.range, map.len(), page_size()) {
            advise_random_reads(map, whole);
        }
    }

    /// Asks the system to read these bytes of a mapped file ahead.
    pub fn prefetch(&self) {
        if let Memory::File { map, .. } = &*self.memory {
            // Only a hint, so a refusal is not an error.
            let _ = map.advise_range(Advice::WillNeed, self.range.start, self.range.len());
        }
    }

    /// The mapping of a file, and its pages that these bytes touch; `None` for owned memory.
    fn touched_pages(&self) -> Option<(&Mmap, Range<usize>)> {
        let Memory::File { map, .. } = &*self.memory else { return None };
        let (page, end) = (page_size(), self.range.end);
        Some((map, self.range.start / page * page..end.next_multiple_of(page).min(map.len())))
    }

    /// Drops the system's cache of the file, as far as it is not in use. Earlier runs filled it with huge pages, of which
    /// a lock on a part keeps all: with 32 MiB locked here and there, a process with 210 MiB was killed.
    pub fn drop_file_cache(&self) {
        if let Memory::File { file, .. } = &*self.memory {
            // Only a hint, so a refusal is not an error.
            let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }

    /// Bytes of the pages that [`MappedSlice::lock_pages`] locks.
    pub fn lockable_bytes(&self) -> usize {
        self.touched_pages().map_or(0, |(_, pages)| pages.len())
    }

    /// Reads the pages of a mapped file that these bytes touch, and keeps them in memory while the file is mapped. Does
    /// nothing to owned memory.
    ///
    /// # Errors
    ///
    /// The system refuses: `RLIMIT_MEMLOCK` is too small, or there is not enough memory.
    pub fn lock_pages(&self) -> io::Result<()> {
        let Some((map, pages)) = self.touched_pages() else { return Ok(()) };
        // Of a huge page, or one read ahead as part of it, all is kept.
        advise_random_reads(map, pages.clone());
        self.prefetch();
        let pages = &map[pages];
        // SAFETY: the range is a part of a mapping that we borrow, and begins with a page. Locking changes neither its
        // content nor its address.
        match unsafe { libc::mlock(pages.as_ptr().cast(), pages.len()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Lets the system drop the pages again.
    pub fn unlock_pages(&self) {
        let Some((map, pages)) = self.touched_pages() else { return };
        let pages = &map[pages];
        // SAFETY: as in `lock_pages`. Pages that are not locked stay so.
        unsafe { libc::munlock(pages.as_ptr().cast(), pages.len()) };
    }
}

impl fmt::Debug for MappedSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(*self.memory, Memory::File { .. }) { "file" } else { "owned" };
        write!(f, "Plane({kind} {:?})", self.range)
    }
}

/// Advice to the system on backing memory with huge pages.
enum HugePages {
    Wanted,
    Unwanted,
}

/// Advises the system on huge pages for whole pages of memory. Uses libc, since memmap2 lacks this advice on Android.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn advise_huge_pages(bytes: &[u8], advice: HugePages) {
    let advice = match advice {
        HugePages::Wanted => libc::MADV_HUGEPAGE,
        HugePages::Unwanted => libc::MADV_NOHUGEPAGE,
    };
    // SAFETY: the range is memory we borrow and its start is aligned to a page (a whole mapping's always is;
    // `zeroed`, `touched_pages` and `expect_random_reads` give only aligned slices). The advice changes how it is backed,
    // not what it holds. Kernels without huge pages refuse, which is fine.
    unsafe { libc::madvise(bytes.as_ptr().cast_mut().cast(), bytes.len(), advice) };
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn advise_huge_pages(_: &[u8], _: HugePages) {}

/// Tells the system that these pages of a mapping are read alone. Only hints, so a refusal is not an error.
fn advise_random_reads(map: &Mmap, pages: Range<usize>) {
    let _ = map.advise_range(Advice::Random, pages.start, pages.len());
    advise_huge_pages(&map[pages], HugePages::Unwanted);
}

/// Finds the whole pages inside a range of a mapping of `len` bytes. The mapping's last page counts as whole even if
/// the file fills only part of it.
fn whole_pages(range: &Range<usize>, len: usize, page: usize) -> Option<Range<usize>> {
    let start = range.start.next_multiple_of(page);
    let end = if range.end == len { len } else { range.end / page * page };
    (start < end).then_some(start..end)
}

/// Bytes of a memory page: 4 KiB, on newer phones 16 KiB, on some servers 64 KiB.
pub fn page_size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: sysconf only reads a system constant; this name exists on every Unix.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).expect("every Unix has a page size")
    })
}

/// Alignment in bytes of the parts of a file that are mapped; see [`FileRange`].
const PART_ALIGN: usize = 64;

/// Maps a regular file for reading, whole or the part that the path names. A part at an unaligned offset is copied.
///
/// If the file shrinks or its disk fails while the plane is in use, the process prints one line and ends with exit code
/// 3 (see `sigbus`).
///
/// # Errors
///
/// [`Error::Model`]: the file cannot be read, is empty or is not a regular file, or too many files are mapped.
pub fn map_file(path: &Path) -> Result<MappedSlice> {
    let Some(FileRange { file, range }) = FileRange::parse(path) else { return map_whole_file(path) };
    let whole = map_whole_file(&file)?;
    let part = whole.slice(range.start as usize..range.end as usize);
    let part = part.ok_or_else(|| Error::model(path, "the file was truncated meanwhile; restore it"))?;
    if part.bytes().as_ptr().align_offset(PART_ALIGN) == 0 {
        return Ok(part);
    }
    let mut copy = AlignedBytes::zeroed(part.bytes().len())?;
    copy.as_mut_slice().copy_from_slice(part.bytes());
    Ok(copy.freeze())
}

fn map_whole_file(path: &Path) -> Result<MappedSlice> {
    let failed = |what: &'static str, remedy: &'static str| {
        move |e: io::Error| Error::model(path, format_args!("{what}: {e}; {remedy}"))
    };
    let remedy = "check the path and its permissions";
    // Checked before opening, since opening some devices has side effects, and again afterwards.
    let before = fs::metadata(path).map_err(failed("cannot be read", remedy))?;
    check_regular(path, before.file_type())?;
    // O_NONBLOCK: if the file was just replaced by a FIFO, opening it must not wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(failed("cannot be opened", remedy))?;
    let meta = file.metadata().map_err(failed("cannot be read", "check its disk"))?;
    check_regular(path, meta.file_type())?;
    if meta.len() == 0 {
        return Err(Error::model(path, "the file is empty; download or copy it again"));
    }
    // SAFETY: the mapping is read as plain bytes, for which any value is valid, and nothing that was read is
    // trusted to stay the same. A file that shrinks raises SIGBUS, which `sigbus` handles; it is registered below,
    // before anyone sees the bytes.
    let map = unsafe { Mmap::map(&file) }
        .map_err(failed("cannot be mapped into memory", "copy it to a local disk"))?;
    // On file systems with large folios, pages are then read in units of 2 MiB, and decoding reads a third faster.
    // Elsewhere the advice has no effect.
    advise_huge_pages(&map, HugePages::Wanted);
    let Some(watch) = sigbus::MappedFileGuard::register(path, &map) else {
        let limit = sigbus::MAX_FILES;
        return Err(Error::model(path, format_args!("more than {limit} model files are open; close some")));
    };
    Ok(MappedSlice::new(Memory::File { _watch: watch, map, file }))
}

/// Rejects anything but a regular file; the error names the kind of file found.
fn check_regular(path: &Path, kind: FileType) -> Result<()> {
    let other = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(Error::model(path, format_args!("is {other}; give a regular file, which can be mapped into memory")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_survives_release() {
        let path = std::env::temp_dir().join(format!("antigravity-mapped-{}", std::process::id()));
        let data: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        fs::write(&path, &data).unwrap();
        let plane = map_file(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(plane.bytes(), data);
        let page = page_size();
        for range in [0..data.len(), 0..1, page - 1..page + 1, 1..200_000, 299_999..300_000, 7..7] {
            let part = plane.slice(range.clone()).unwrap();
            part.prefetch();
            part.release_pages();
            assert_eq!(part.bytes(), &data[range]);
        }
    }

    #[test]
    fn only_whole_pages_are_released_whatever_their_size() {
        for page in [4096, 16384, 65536] {
            let len = 5 * page + 7;
            let whole = |range| whole_pages(&range, len, page);
            assert_eq!(whole(0..len), Some(0..len));
            assert_eq!(whole(1..len), Some(page..len));
            assert_eq!(whole(1..len - 1), Some(page..5 * page));
            assert_eq!(whole(page..2 * page), Some(page..2 * page));
            assert_eq!(whole(page - 1..2 * page + 1), Some(page..2 * page));
            assert_eq!(whole(5 * page..len), Some(5 * page..len));
            for nothing in
                [1..page, page + 1..2 * page, page..page, 5 * page + 1..len, 5 * page..len - 1, len..len]
            {
                assert_eq!(whole(nothing), None);
            }
        }
        assert!(page_size().is_power_of_two() && HUGE_PAGE.is_multiple_of(page_size()));
    }

    /// A file of `len` ones, mapped, and what /proc says of the mapping.
    #[cfg(target_os = "linux")]
    fn map_ones(name: &str, len: usize) -> (MappedSlice, impl Fn(&MappedSlice, &str) -> String) {
        let path = std::env::temp_dir().join(format!("antigravity-{name}-{}", std::process::id()));
        fs::write(&path, vec![1u8; len]).unwrap();
        let plane = map_file(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let field = |plane: &MappedSlice, name: &str| {
            let text = fs::read_to_string("/proc/self/smaps").unwrap();
            let start = format!("{:x}-", plane.bytes().as_ptr() as usize);
            let entry = text.split_once(&start).unwrap().1;
            entry.split_once(&format!("{name}:")).unwrap().1.lines().next().unwrap().trim().to_string()
        };
        (plane, field)
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn random_reads_are_expected_of_these_bytes_alone() {
        let (plane, field) = map_ones("random", 8 << 20);
        let rows = plane.slice(2 << 20..4 << 20).unwrap();
        rows.expect_random_reads();
        let is_random = |plane| field(plane, "VmFlags").split(' ').any(|flag| flag == "rr");
        assert!(is_random(&rows) && !is_random(&plane));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_pages_of_these_bytes_alone_are_locked_and_unlocked() {
        let (plane, field) = map_ones("locked", 64 * page_size());
        let is_locked = |plane: &MappedSlice| field(plane, "VmFlags").split(' ').any(|flag| flag == "lo");
        let (before, page) = (plane.slice(0..page_size()).unwrap(), page_size());
        let part = plane.slice(page + 1..3 * page + 1).unwrap();
        let pages = plane.slice(page..4 * page).unwrap();
        assert_eq!(part.lockable_bytes(), 3 * page);
        part.lock_pages().expect("the usual limit is larger");
        assert!(is_locked(&pages) && !is_locked(&before));
        assert_eq!(field(&pages, "Size"), format!("{} kB", (3 * page) >> 10));
        part.unlock_pages();
        assert!(!is_locked(&plane));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn released_pages_leave_the_resident_set() {
        let len = 32 << 20;
        let (plane, field) = map_ones("rss", len);
        let resident = || {
            let rss = field(&plane, "Rss");
            rss.split(' ').next().unwrap().parse::<usize>().unwrap() << 10
        };
        assert_eq!(plane.bytes().iter().map(|&b| b as usize).sum::<usize>(), len);
        assert_eq!(resident(), len);
        plane.slice(1..len / 2).unwrap().release_pages();
        assert!(resident() <= len / 2 + 2 * page_size());
        plane.release_pages();
        assert_eq!(resident(), 0);
    }
}
