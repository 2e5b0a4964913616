//! Bundles: one executable file with the program, its packed model and the text files of the model's directory.
//!
//! Layout: the program, zeros to a multiple of 64 bytes, a mark of 32 bytes ([`MARK`], version, CRC-32), and a
//! safetensors file with one U8 tensor per file. The mark and the JSON of that file (the table) fill 4 KiB together;
//! the CRC-32 covers the table and its length. The packed model comes last, at a multiple of 2 MiB, so that its pages
//! are aligned as in a packed file. Loaders read only the program; its ELF header gives its end ([`elf`]). Tools like
//! `strip` drop everything after it.
//!
//! The table has the CRC-32 of every file and the packed model's fingerprint. Text files are checked when they are
//! read; the packed model's header, samples and GGUF metadata are checked when it is opened. Only
//! [`Bundle::verify_checksums`] checks all weights: reading them takes a phone longer than starting.

mod elf;
mod write;

pub use write::BundleWriter;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::file_range::FileRange;
use crate::mapped::{MappedSlice, map_file};
use crate::packed_file::{self, LAYOUT_VERSION, PACKED_NAME};
use crate::source::header::{Header, TensorEntry};
use crate::source::{Safetensors, hash_files};
use crate::{Error, Result};

/// Start of the mark, before the layout version.
const MARK: &[u8; 20] = b"antigravity bundle\n\0";
const VERSION: u32 = 1;
/// Bytes of the mark with version, checksum and four zeros.
const MARK_LEN: usize = 32;
/// Bytes of mark and table.
const HEAD: usize = 4096;
/// Minimum bytes after the program of a bundle.
const LEAST: u64 = 1 << 16;
/// Alignment of the mark in bytes.
const ALIGN: u64 = 64;
/// Alignment of the packed model in bytes: a huge page.
const MODEL_ALIGN: u64 = 2 << 20;

/// Keys of the table's metadata that describe the packed model.
mod key {
    /// Bytes of its header.
    pub const HEADER: &str = "header";
    /// Its fingerprint; see [`Safetensors::hash_files`](crate::source::Safetensors::hash_files).
    pub const FINGERPRINT: &str = "fingerprint";
    /// The CRC-32 of its GGUF metadata, if it has any.
    pub const GGUF: &str = "gguf";
}

/// An opened bundle, whose table has been checked.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    /// By name, without the padding.
    files: BTreeMap<String, MappedSlice>,
    metadata: BTreeMap<String, String>,
}

/// Text in a program's file that precedes the JSON of the baked config and a line feed. The program in a bundle can be
/// replaced by another build with the same text and config.
pub fn program_marker() -> String {
    format!("antigravity with bundle layout {VERSION} and packed layout {LAYOUT_VERSION} is built for ")
}

/// Reads the program at `path`, without the files of a bundle.
///
/// # Errors
///
/// [`Error::Other`]: it cannot be read or is not a program.
pub fn read_program(path: &Path) -> Result<Vec<u8>> {
    let unreadable = |e| Error::io(path, format_args!("cannot be read: {e}"));
    let file = File::open(path).map_err(unreadable)?;
    let len = file.metadata().map_err(unreadable)?.len();
    let end = elf::find_end(&file, len).map_err(unreadable)?;
    let end = end.filter(|&end| end <= len).and_then(|end| usize::try_from(end).ok());
    let end =
        end.ok_or_else(|| Error::io(path, "is not a complete 64-bit program; give one that cargo built"))?;
    let mut program = vec![0; end];
    file.read_exact_at(&mut program, 0).map_err(unreadable)?;
    Ok(program)
}

/// Finds the mark of the bundle at `path`, which may have no program; `None` if it is another file or cannot be read. A
/// program followed by at least [`LEAST`] bytes without a mark counts as a bundle with a damaged mark. A [`FileRange`]
/// must begin with the mark.
pub fn find_mark(path: &Path) -> Option<u64> {
    let mut mark = [0; MARK.len()];
    if let Some(FileRange { file, range }) = FileRange::parse(path) {
        File::open(file).and_then(|file| file.read_exact_at(&mut mark, range.start)).ok()?;
        return (mark == *MARK).then_some(0);
    }
    // Regular files only: opening others could block for ever.
    let file = path.is_file().then(|| File::open(path).ok()).flatten()?;
    let len = file.metadata().ok()?.len();
    let end = elf::find_end(&file, len).ok()?;
    let start = end.unwrap_or(0).checked_next_multiple_of(ALIGN)?;
    file.read_exact_at(&mut mark, start).ok()?;
    // Other tools append less to a program.
    (mark == *MARK || end.is_some() && len - start >= LEAST).then_some(start)
}

/// The error for a damaged bundle.
fn damaged(path: &Path, why: impl Display) -> Error {
    let remedy = "copy it again, or make it again with antigravity bundle";
    Error::model(path, format_args!("is a damaged bundle: {why}; {remedy}"))
}

impl Bundle {
    /// Opens the bundle at `path`; `None` if it is another file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is damaged or has another version.
    pub fn open(path: &Path) -> Result<Option<Bundle>> {
        let Some(start) = find_mark(path) else { return Ok(None) };
        let plane = map_file(path)?;
        let read = || {
            let start = usize::try_from(start).map_err(|_| "it is too long for this machine".to_string())?;
            Self::parse(path, &plane, start)
        };
        read().map(Some).map_err(|why| damaged(path, why))
    }

    /// Parses the bundle at `path`, which is mapped as `plane` and has its mark at byte `start`.
    fn parse(path: &Path, plane: &MappedSlice, start: usize) -> std::result::Result<Bundle, String> {
        let len = plane.bytes().len();
        let inside = plane.slice(start..len).ok_or("the file was truncated meanwhile")?;
        let (mark, rest) =
            inside.bytes().split_first_chunk::<MARK_LEN>().ok_or("the file was truncated meanwhile")?;
        let number = |at: usize| u32::from_le_bytes([mark[at], mark[at + 1], mark[at + 2], mark[at + 3]]);
        if !mark.starts_with(MARK) {
            return Err(format!(
                "{} bytes follow the program, but do not begin with the bundle mark",
                len - start
            ));
        }
        if number(MARK.len()) != VERSION {
            return Err(format!("layout version is {}; supported: {VERSION}", number(MARK.len())));
        }
        let table = rest.get(..HEAD - MARK_LEN).ok_or("the file ends within its table")?;
        if crc32fast::hash(table) != number(MARK.len() + 4) {
            return Err("the checksum of its table is wrong".into());
        }
        let Header { len: from, metadata, entries } = Header::parse(rest)?;
        let from = start + MARK_LEN + from;
        let file = |(name, entry): (String, TensorEntry)| {
            let (begin, end) = entry.data_offsets;
            // The header's ranges are inside the file.
            Some((name, plane.slice(from + begin..from + end)?))
        };
        let named = entries.into_iter().filter(|(name, _)| name != write::PADDING);
        Ok(Bundle { path: path.into(), files: named.filter_map(file).collect(), metadata })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of its files.
    pub fn file_names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Reads a file and checks it; `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: its checksum is wrong.
    pub fn read_file(&self, name: &str) -> Result<Option<&[u8]>> {
        let Some(plane) = self.files.get(name) else { return Ok(None) };
        self.check_crc(name, plane.bytes(), name)?;
        Ok(Some(plane.bytes()))
    }

    /// Size of a file in bytes; `None` if there is no such file.
    pub fn file_size(&self, name: &str) -> Option<u64> {
        self.files.get(name).map(|plane| plane.bytes().len() as u64)
    }

    /// Opens the packed model.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is missing or damaged.
    pub fn open_model(&self) -> Result<Safetensors> {
        let plane = self.files.get(PACKED_NAME).ok_or_else(|| damaged(&self.path, "it contains no model"))?;
        let bytes = plane.bytes();
        let header = self.metadata.get(key::HEADER).and_then(|text| text.parse().ok());
        let found = header.filter(|&header: &usize| header <= bytes.len());
        let found = found.map(|header| hash_files(std::iter::once((plane, header))));
        if found.is_none() || found.as_ref() != self.metadata.get(key::FINGERPRINT) {
            return Err(damaged(&self.path, "the fingerprint of its model is wrong"));
        }
        let source = Safetensors::open_embedded(&self.path, plane.clone())?;
        if let Some(gguf) = source.get(packed_file::GGUF_TENSOR) {
            self.check_crc(key::GGUF, gguf.data.bytes(), "the model's metadata")?;
        }
        Ok(source)
    }

    /// Reads and checks every byte of every file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: the first file whose checksum is wrong.
    pub fn verify_checksums(&self) -> Result<()> {
        self.open_model()?;
        self.files.iter().try_for_each(|(name, plane)| self.check_crc(name, plane.bytes(), name))
    }

    /// Compares bytes with the checksum under this key; `what` names them in the error.
    fn check_crc(&self, key: &str, bytes: &[u8], what: &str) -> Result<()> {
        if self.metadata.get(key) == Some(&format_crc(bytes)) {
            return Ok(());
        }
        Err(damaged(&self.path, format_args!("the checksum of {what} is wrong")))
    }
}

/// Formats a CRC-32 as in the table.
fn format_crc(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

#[cfg(test)]
mod tests;
