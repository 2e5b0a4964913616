//! Immutable bytes of tensors: mapped files and owned memory.

mod sigbus;

use std::fmt;
use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use memmap2::{Advice, Mmap, MmapMut, UncheckedAdvice};

use crate::file_range::FileRange;
use crate::{Error, Result};

/// Owned memory of at least this many bytes is aligned to huge pages, and uses them if the system can.
const HUGE_FROM: usize = 4 << 20;
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

/// Zeroed memory to fill and then freeze. Aligned to 64 bytes, or to a huge page from 4 MiB on.
///
/// It is mapped, not allocated from the heap: pages are zero and use no memory until written, huge pages can be
/// requested before the first access, and all of it returns to the system when dropped.
pub struct AlignedBytes {
    /// While parts of files are mapped into it. It drops before `map`, as its addresses can be reused then.
    watch: Option<sigbus::MappedFileGuard>,
    map: MmapMut,
    range: Range<usize>, // the aligned part of `map`
}

impl AlignedBytes {
    pub fn zeroed(len: usize) -> Result<AlignedBytes> {
        let huge = len >= HUGE_FROM;
        let refused = |e: &dyn fmt::Display| {
            let mib = len as f64 / (1 << 20) as f64;
            Error::Memory(format!(
                "cannot allocate {len} bytes ({mib:.1} MiB): {e}; \
                 close other programs, or use a smaller model or a shorter context"
            ))
        };
        let padded = len.checked_add(if huge { HUGE_PAGE } else { 0 });
        let padded = padded.ok_or_else(|| refused(&"more than the address space"))?;
        // The system refuses a mapping of 0 bytes.
        let map = MmapMut::map_anon(padded.max(1)).map_err(|e| refused(&e))?;
        let start = if huge { map.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        let mut bytes = AlignedBytes { watch: None, map, range: start..start + len };
        if huge {
            advise_huge_pages(bytes.as_mut_slice(), HugePages::Wanted);
        }
        Ok(bytes)
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.map[self.range.clone()]
    }

    /// Replaces a range by the bytes of a file from `offset` on, without copying: pages stay in the system's cache of the
    /// file, shared with all who map them, until they are written; a written page is this memory's own, and the file
    /// does not change. The rest of the range's last page is the file's too, or zero after its end. Returns false if
    /// the range or the offset does not begin a page, or the system refuses; then nothing has changed.
    ///
    /// If the file shrinks meanwhile, the process ends as with [`map_file`], naming `path`: that of the first file since
    /// [`AlignedBytes::unmap_files`].
    pub fn map_file(&mut self, range: Range<usize>, (path, file, offset): (&Path, &File, u64)) -> bool {
        assert!(range.start <= range.end && range.end <= self.range.len());
        let (page, start) = (page_size(), self.range.start + range.start);
        let size = file.metadata().map_or(0, |meta| meta.len());
        let is_inside = offset.checked_add(range.len() as u64).is_some_and(|end| end <= size);
        if !start.is_multiple_of(page)
            || !offset.is_multiple_of(page as u64)
            || range.is_empty()
            || !is_inside
        {
            return false;
        }
        if self.watch.is_none() {
            self.watch = sigbus::MappedFileGuard::register(path, &self.map);
        }
        let Ok(offset) = libc::off_t::try_from(offset) else { return false };
        if self.watch.is_none() {
            return false;
        }
        let at = self.map[start..].as_mut_ptr();
        // SAFETY: the pages belong to `map`, which we borrow mutably, so nobody sees their bytes change, and they stay
        // private memory that can be read and written, of which any value is valid. The last page is whole in `map`,
        // as the system maps whole pages. A file that shrinks raises SIGBUS, which `sigbus` handles.
        let mapped = unsafe {
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED);
            libc::mmap(at.cast(), range.len(), access, flags, file.as_raw_fd(), offset)
        };
        mapped != libc::MAP_FAILED
    }

    /// Zeroes all of the memory if parts of files are mapped into it, which ends the sharing; else does nothing.
    pub fn unmap_files(&mut self) {
        if self.watch.is_none() {
            return;
        }
        let (at, len) = (self.map.as_mut_ptr(), self.map.len());
        // SAFETY: as in `map_file`; the new pages are anonymous.
        let mapped = unsafe {
            let (access, fixed) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED);
            libc::mmap(at.cast(), len, access, fixed | libc::MAP_ANONYMOUS, -1, 0)
        };
        if mapped == libc::MAP_FAILED {
            // As it was.
            return;
        }
        self.watch = None;
        if self.range.len() >= HUGE_FROM {
            advise_huge_pages(self.as_mut_slice(), HugePages::Wanted);
        }
    }

    /// Returns the whole pages inside a range to the system. The content of the range is unspecified afterwards.
    pub fn discard_pages(&mut self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.range.len());
        let range = self.range.start + range.start..self.range.start + range.end;
        if let Some(whole) = whole_pages(&range, self.map.len(), page_size()) {
            // SAFETY: `map` is private memory, borrowed mutably here, so nobody else sees its bytes change; pages
            // dropped come back as zeros or as those of a mapped file. A refusal changes nothing, so it is not an error.
            let _ = unsafe {
                self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, whole.start, whole.len())
            };
        }
    }

    /// Makes the bytes immutable.
    pub fn freeze(self) -> MappedSlice {
        MappedSlice::new(Memory::Owned(self))
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
    fn owned_bytes_are_zero_and_aligned_and_slices_are_checked() {
        for len in [0, 1, 63, 4097, HUGE_FROM - 1, HUGE_FROM, HUGE_FROM + 12345] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            let align = if len >= HUGE_FROM { HUGE_PAGE } else { 64 };
            assert_eq!(bytes.as_slice().as_ptr() as usize % align, 0, "{len}");
            assert_eq!(bytes.as_slice().len(), len);
            assert!(bytes.as_slice().iter().all(|&b| b == 0));
            bytes.as_mut_slice().fill(7);
            let plane = bytes.freeze();
            plane.release_pages();
            plane.prefetch();
            assert!(plane.bytes().len() == len && plane.bytes().iter().all(|&b| b == 7));
        }
        let mut bytes = AlignedBytes::zeroed(8).unwrap();
        bytes.as_mut_slice().copy_from_slice(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let plane = bytes.freeze();
        let part = plane.slice(2..6).unwrap();
        drop(plane);
        assert_eq!(part.bytes(), [2, 3, 4, 5]);
        assert_eq!(part.slice(1..3).unwrap().bytes(), [3, 4]);
        assert!(part.slice(4..4).unwrap().bytes().is_empty());
        #[allow(clippy::reversed_empty_ranges)]
        for bad in [0..5, 5..5, 3..2, 0..usize::MAX, usize::MAX..usize::MAX] {
            assert!(part.slice(bad).is_none());
        }
    }

    #[test]
    fn discarding_leaves_bytes_outside_the_range() {
        let page = page_size();
        for len in [5 * page, 5 * page + 7, HUGE_FROM + 3 * page] {
            for range in [0..len, 1..len - 1, page..3 * page, page - 1..2 * page + 1, 2 * page + 3..len, 9..9]
            {
                let mut bytes = AlignedBytes::zeroed(len).unwrap();
                bytes.as_mut_slice().fill(7);
                bytes.discard_pages(range.clone());
                let outside = |at: usize| {
                    let last = if range.end == len { len } else { range.end / page * page };
                    at < range.start.next_multiple_of(page) || at >= last
                };
                assert!((0..len).all(|at| bytes.as_slice()[at] == 7 || !outside(at)), "{len} {range:?}");
                if cfg!(target_os = "linux") && range.len() > 2 * page {
                    assert_eq!(
                        bytes.as_slice()[2 * page + 3..3 * page].contains(&7),
                        outside(2 * page),
                        "{range:?}"
                    );
                }
                bytes.as_mut_slice().fill(9);
                assert!(bytes.as_slice().iter().all(|&b| b == 9));
            }
        }
    }

    #[test]
    fn a_file_mapped_into_memory_is_shared_until_it_is_written() {
        let page = page_size();
        let path = std::env::temp_dir().join(format!("antigravity-shared-{}", std::process::id()));
        let data: Vec<u8> = (0..3 * page + 100).map(|i| (i % 251) as u8 + 1).collect();
        fs::write(&path, &data).unwrap();
        let file = File::open(&path).unwrap();
        let mut memory = AlignedBytes::zeroed(8 * page).unwrap();
        memory.as_mut_slice().fill(255);
        let mut map = |from: usize, len: usize, offset: usize| {
            let mapped = memory.map_file(from..from + len, (&path, &file, offset as u64));
            (mapped, memory.as_slice().to_vec())
        };
        for (from, len, offset) in
            [(1, page, 0), (page, page, 1), (0, 0, 0), (0, 4 * page, 0), (0, page, 4 * page)]
        {
            assert!(!map(from, len, offset).0, "{from} {len} {offset}");
        }
        let (mapped, bytes) = map(2 * page, data.len() - page, page);
        assert!(mapped && bytes[..2 * page].iter().all(|&b| b == 255));
        assert_eq!(bytes[2 * page..][..data.len() - page], data[page..]);
        assert!(
            bytes[5 * page..].iter().all(|&b| b == 255)
                && bytes[4 * page + 100..5 * page].iter().all(|&b| b == 0)
        );
        memory.as_mut_slice()[2 * page..5 * page].fill(9);
        assert_eq!(fs::read(&path).unwrap(), data);
        memory.discard_pages(0..8 * page);
        memory.as_mut_slice().fill(7);
        memory.unmap_files();
        assert!(memory.as_slice().iter().all(|&b| b == 0));
        memory.as_mut_slice().fill(7);
        memory.unmap_files();
        assert!(memory.as_slice().iter().all(|&b| b == 7));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn impossible_sizes_are_refused_by_number() {
        for len in [usize::MAX, usize::MAX - HUGE_PAGE, usize::MAX / 2, usize::MAX / 4] {
            let Err(Error::Memory(message)) = AlignedBytes::zeroed(len) else { panic!("{len}") };
            assert!(message.contains(&len.to_string()), "{message}");
        }
    }

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
