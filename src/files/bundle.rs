//! Bundles: one executable file that is the program, its packed model and the text files of the model's directory.
//!
//! Layout: the program, zeros to the next 64 bytes, a mark of 32 bytes ([`MARK`], the version, a CRC-32), and a
//! safetensors file whose U8 tensors are the files by their names. The JSON of that file, the table, fills what is left
//! of 4 KiB; the CRC-32 is that of the table with its length. Last comes the packed model, at a multiple of 2 MiB, so
//! that its pages are as those of a packed file by itself. Loaders read only the program, which says itself where it
//! ends ([`elf`]). `strip` and its like drop all that follows.
//!
//! The table has the CRC-32 of every file, and the packed model's fingerprint. The text files are checked when they are
//! read, the packed model's header, samples and GGUF metadata when it is opened, and all the rest by [`Bundle::verify`]
//! alone: to read all weights would take a phone longer than to start.

mod elf;
mod write;

pub use write::Begun;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::mapped::{Plane, map_file};
use crate::packed_file::{self, LAYOUT, PACKED_NAME};
use crate::source::header::{Entry, Header};
use crate::source::{Source, fingerprint};
use crate::{Error, Result};

/// What follows a program that is a bundle, before the layout's version.
const MARK: &[u8; 20] = b"antigravity bundle\n\0";
const VERSION: u32 = 1;
/// Bytes of mark, version, checksum and four zeros.
const MARK_LEN: usize = 32;
/// Bytes of mark and table.
const HEAD: usize = 4096;
/// Every bundle has more bytes behind its program.
const LEAST: u64 = 1 << 16;
/// The mark begins at a multiple of this, in bytes.
const ALIGN: u64 = 64;
/// The packed model begins at a multiple of this, in bytes: a huge page.
const MODEL_ALIGN: u64 = 2 << 20;

/// Keys of the table's metadata that are no files: what is known of the packed model.
mod key {
    /// Bytes of its header.
    pub const HEADER: &str = "header";
    /// Its fingerprint, as of a packed file.
    pub const FINGERPRINT: &str = "fingerprint";
    /// The CRC-32 of its GGUF metadata, if it has any.
    pub const GGUF: &str = "gguf";
}

/// An opened bundle, whose table is right.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    /// By name, without the padding.
    files: BTreeMap<String, Plane>,
    metadata: BTreeMap<String, String>,
}

/// What stands in a program's file before the JSON of the config that it is built for and a line feed. A bundle of one
/// build can hold the program of another that has the same.
pub fn built_for() -> String {
    format!("antigravity with bundle layout {VERSION} and packed layout {LAYOUT} is built for ")
}

/// The bytes of the program at `path`: its file without what a bundle adds.
///
/// # Errors
///
/// [`Error::Other`]: it cannot be read, or is no program.
pub fn program(path: &Path) -> Result<Vec<u8>> {
    let unreadable = |e| Error::io(path, format_args!("cannot be read: {e}"));
    let file = File::open(path).map_err(unreadable)?;
    let len = file.metadata().map_err(unreadable)?.len();
    let end = elf::end(&file, len).map_err(unreadable)?;
    let end = end.filter(|&end| end <= len).and_then(|end| usize::try_from(end).ok());
    let end = end.ok_or_else(|| Error::io(path, "is no whole 64-bit program; give one that cargo built"))?;
    let mut program = vec![0; end];
    file.read_exact_at(&mut program, 0).map_err(unreadable)?;
    Ok(program)
}

/// Where the mark of the bundle at `path` is; `None` if it is another file, or cannot be read. As much as a model that
/// follows a program without a mark is taken for a bundle whose mark is damaged.
pub fn start(path: &Path) -> Option<u64> {
    // Regular files only: opening others could block for ever.
    let file = path.is_file().then(|| File::open(path).ok()).flatten()?;
    let len = file.metadata().ok()?.len();
    let start = elf::end(&file, len).ok()??.checked_next_multiple_of(ALIGN)?;
    let mut mark = [0; MARK.len()];
    file.read_exact_at(&mut mark, start).ok()?;
    // Other tools leave less behind a program.
    (mark == *MARK || len - start >= LEAST).then_some(start)
}

/// Why a bundle cannot be used, and the remedy.
fn damaged(path: &Path, why: impl Display) -> Error {
    let remedy = "copy it again, or make it again with antigravity bundle";
    Error::model(path, format_args!("is a damaged bundle: {why}; {remedy}"))
}

impl Bundle {
    /// Opens the bundle at `path`; `None` if it is another file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is damaged, or of another version.
    pub fn open(path: &Path) -> Result<Option<Bundle>> {
        let Some(start) = start(path) else { return Ok(None) };
        let plane = map_file(path)?;
        let read = || {
            let start = usize::try_from(start).map_err(|_| "it is too long for this machine".to_string())?;
            Self::parse(path, &plane, start)
        };
        read().map(Some).map_err(|why| damaged(path, why))
    }

    /// The bundle at `path`, which is `plane`, and whose mark is at `start`.
    fn parse(path: &Path, plane: &Plane, start: usize) -> std::result::Result<Bundle, String> {
        let len = plane.bytes().len();
        let inside = plane.slice(start..len).ok_or("it became shorter")?;
        let (mark, rest) = inside.bytes().split_first_chunk::<MARK_LEN>().ok_or("it became shorter")?;
        let number = |at: usize| u32::from_le_bytes([mark[at], mark[at + 1], mark[at + 2], mark[at + 3]]);
        if !mark.starts_with(MARK) {
            return Err(format!(
                "{} bytes follow the program, and they do not begin with its mark",
                len - start
            ));
        }
        if number(MARK.len()) != VERSION {
            return Err(format!("layout {}, where this program reads {VERSION}", number(MARK.len())));
        }
        let table = rest.get(..HEAD - MARK_LEN).ok_or("it ends in its table")?;
        if crc32fast::hash(table) != number(MARK.len() + 4) {
            return Err("its table is not as it was written".into());
        }
        let Header { len: from, metadata, entries } = Header::parse(rest)?;
        let from = start + MARK_LEN + from;
        let file = |(name, entry): (String, Entry)| {
            let (begin, end) = entry.data_offsets;
            // The header's ranges are inside the file.
            Some((name, plane.slice(from + begin..from + end)?))
        };
        let named = entries.into_iter().filter(|(name, _)| name != write::PADDING);
        Ok(Bundle { path: path.into(), files: named.filter_map(file).collect(), metadata })
    }

    /// The bundle's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of its files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// The bytes of a file, checked; `None` if it has none of that name.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: they are not what was put in.
    pub fn file(&self, name: &str) -> Result<Option<&[u8]>> {
        let Some(plane) = self.files.get(name) else { return Ok(None) };
        self.check(name, plane.bytes(), name)?;
        Ok(Some(plane.bytes()))
    }

    /// Bytes of a file; `None` if it has none of that name.
    pub fn len_of(&self, name: &str) -> Option<u64> {
        self.files.get(name).map(|plane| plane.bytes().len() as u64)
    }

    /// The packed model.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is missing or damaged.
    pub fn packed(&self) -> Result<Source> {
        let plane = self.files.get(PACKED_NAME).ok_or_else(|| damaged(&self.path, "it holds no model"))?;
        let bytes = plane.bytes();
        let header = self.metadata.get(key::HEADER).and_then(|text| text.parse().ok());
        let found = header.filter(|&header: &usize| header <= bytes.len());
        let found = found.map(|header| fingerprint(std::iter::once((plane, header))));
        if found.is_none() || found.as_ref() != self.metadata.get(key::FINGERPRINT) {
            return Err(damaged(&self.path, "the model is not what was put in"));
        }
        let source = Source::within(&self.path, plane.clone())?;
        if let Some(gguf) = source.get(packed_file::GGUF) {
            self.check(key::GGUF, gguf.data.bytes(), "the model's metadata")?;
        }
        Ok(source)
    }

    /// Reads every byte of every file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: the first that is not what was put in.
    pub fn verify(&self) -> Result<()> {
        self.packed()?;
        self.files.iter().try_for_each(|(name, plane)| self.check(name, plane.bytes(), name))
    }

    /// Compares bytes with the checksum of this key.
    fn check(&self, key: &str, bytes: &[u8], what: &str) -> Result<()> {
        if self.metadata.get(key) == Some(&checksum(bytes)) {
            return Ok(());
        }
        Err(damaged(&self.path, format_args!("{what} is not what was put in")))
    }
}

/// A CRC-32, as the table has it.
fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

/// Fails as a write does.
fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
