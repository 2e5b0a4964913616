//! A part of an open file, such as an asset inside an Android package, with a path of its own.

use crate::{Error, Result};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Folder in which the system lists the open files of a process.
const OPEN_FILES: &str = "/proc/self/fd/";

/// A part of an open file. Its path is `/proc/self/fd/FD@OFFSET+LENGTH`, with `.gguf` at the end if it is a GGUF file,
/// and is valid as long as the descriptor is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange {
    /// Path of the whole file.
    pub file: PathBuf,
    /// In bytes.
    pub range: Range<u64>,
}

impl FileRange {
    /// Makes the path of `length` bytes from `offset` on of an open file; a length of 0 means to its end.
    ///
    /// # Errors
    ///
    /// `Usage`: it is not a regular file, or the range is empty or not inside it.
    pub fn path_of(fd: BorrowedFd<'_>, offset: u64, length: u64) -> Result<PathBuf> {
        let number = fd.as_raw_fd();
        let wrong = |why: String| Error::Usage(format!("file descriptor {number}: {why}"));
        let file = fd.try_clone_to_owned().map(File::from).map_err(|e| wrong(e.to_string()))?;
        let meta = file.metadata().map_err(|e| wrong(e.to_string()))?;
        let end = if length == 0 { Some(meta.len()) } else { offset.checked_add(length) };
        let Some(end) = end.filter(|&end| meta.is_file() && offset < end && end <= meta.len()) else {
            let why = format!(
                "bytes {offset}+{length} are not inside a regular file of {} bytes; give the range of the model",
                meta.len()
            );
            return Err(wrong(why));
        };
        let mut magic = [0; 4];
        let is_gguf = file.read_exact_at(&mut magic, offset).is_ok() && &magic == b"GGUF";
        let extension = if is_gguf { ".gguf" } else { "" };
        Ok(format!("{OPEN_FILES}{number}@{offset}+{}{extension}", end - offset).into())
    }

    /// Parses such a path; `None` for any other.
    pub fn parse(path: &Path) -> Option<Self> {
        let rest = path.to_str()?.strip_prefix(OPEN_FILES)?;
        let (number, range) = rest.strip_suffix(".gguf").unwrap_or(rest).split_once('@')?;
        let (offset, length) = range.split_once('+')?;
        let offset: u64 = offset.parse().ok()?;
        let end = offset.checked_add(length.parse().ok()?)?;
        Some(Self { file: format!("{OPEN_FILES}{}", number.parse::<u32>().ok()?).into(), range: offset..end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapped::map_file;
    use std::os::fd::AsFd;

    #[test]
    fn a_part_of_an_open_file_is_mapped_by_its_path() {
        let name = std::env::temp_dir().join(format!("antigravity-range-{}", std::process::id()));
        let text = [&[7; 100][..], b"GGUF", &[1; 200]].concat();
        std::fs::write(&name, &text).expect("written");
        let file = File::open(&name).expect("opened");
        let path = FileRange::path_of(file.as_fd(), 100, 150).expect("a path");
        assert!(path.to_str().is_some_and(|p| p.ends_with("@100+150.gguf")), "{path:?}");
        let mapped = map_file(&path).expect("mapped");
        assert_eq!(mapped.bytes(), &text[100..250]);
        assert_eq!(mapped.bytes().as_ptr().align_offset(64), 0, "an unaligned part is copied");
        let rest = FileRange::path_of(file.as_fd(), 64, 0).expect("a path");
        assert!(rest.extension().is_none());
        assert_eq!(map_file(&rest).expect("mapped").bytes(), &text[64..]);
        for (offset, length) in [(304, 0), (0, 305), (u64::MAX, 2), (300, 5)] {
            let refused = FileRange::path_of(file.as_fd(), offset, length).expect_err("outside");
            assert!(refused.to_string().contains("not inside a regular file of 304 bytes"), "{refused}");
        }
        for other in ["/proc/self/fd/3", "/proc/self/fd/x@1+2", "/proc/self/fd/3@1", "/tmp/3@1+2"] {
            assert_eq!(FileRange::parse(Path::new(other)), None, "{other}");
        }
        std::fs::remove_file(name).expect("removed");
    }
}
