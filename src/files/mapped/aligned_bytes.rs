//! Memory of a tensor or a cache: zeroed, aligned, with parts of files where they are mapped into it.

use super::sigbus::MappedFileGuard;
use super::{HUGE_PAGE, HugePages, MappedSlice, Memory, advise_huge_pages, page_size, whole_pages};
use crate::{Error, Result};
use memmap2::{MmapMut, UncheckedAdvice};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Owned memory of at least this many bytes is aligned to huge pages, and uses them if the system can.
const HUGE_FROM: usize = 4 << 20;

/// Zeroed memory to fill and then freeze. Aligned to 64 bytes, or to a huge page from 4 MiB on.
///
/// It is mapped, not allocated from the heap: pages are zero and use no memory until written, huge pages can be
/// requested before the first access, and all of it returns to the system when dropped.
pub struct AlignedBytes {
    /// While parts of files are mapped into it. It drops before `map`, as its addresses can be reused then.
    watch: Option<MappedFileGuard>,
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
    /// If the file shrinks meanwhile, the process ends as with [`map_file`](super::map_file), naming `path`: that of the first file since
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
        let Ok(offset) = libc::off_t::try_from(offset) else { return false };
        if self.watch.is_none() {
            self.watch = MappedFileGuard::register(path, &self.map);
        }
        self.watch.is_some() && self.replace_pages(start..start + range.len(), Some((file, offset)))
    }

    /// Zeroes all of the memory if parts of files are mapped into it, which ends the sharing; else does nothing.
    pub fn unmap_files(&mut self) {
        if self.watch.is_none() {
            return;
        }
        if !self.replace_pages(0..self.map.len(), None) {
            // As it was.
            return;
        }
        self.watch = None;
        if self.range.len() >= HUGE_FROM {
            advise_huge_pages(self.as_mut_slice(), HugePages::Wanted);
        }
    }

    /// Replaces pages of `map` by those of a file from an offset on, or by zeroed ones. Returns false if the system refuses.
    fn replace_pages(&mut self, pages: Range<usize>, file: Option<(&File, libc::off_t)>) -> bool {
        let at = self.map[pages.clone()].as_mut_ptr();
        let (kind, descriptor, offset) = match file {
            Some((file, offset)) => (0, file.as_raw_fd(), offset),
            None => (libc::MAP_ANONYMOUS, -1, 0),
        };
        // SAFETY: the pages belong to `map`, which we borrow mutably, so nobody sees their bytes change, and they stay
        // private memory that can be read and written, of which any value is valid. The last page is whole in `map`,
        // as the system maps whole pages. A file that shrinks raises SIGBUS, which `sigbus` handles.
        let mapped = unsafe {
            let (access, fixed) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED);
            libc::mmap(at.cast(), pages.len(), access, fixed | kind, descriptor, offset)
        };
        mapped != libc::MAP_FAILED
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
}
