//! Where the program in a file ends. The file may be anything.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// 64 bits, little-endian: every target of this program.
const MAGIC: &[u8; 6] = b"\x7fELF\x02\x01";
const HEADER: usize = 64;
/// A kind of section that has no bytes in the file.
const NOBITS: u64 = 8;

/// A table of the header: where its offset, the size of an entry and their number stand.
struct Table {
    offset: usize,
    entry: usize,
    count: usize,
    /// Bytes of an entry.
    size: usize,
}

const SEGMENTS: Table = Table { offset: 32, entry: 54, count: 56, size: 56 };
const SECTIONS: Table = Table { offset: 40, entry: 58, count: 60, size: 64 };

/// The end of the last thing that an ELF file's tables name, or of the tables; `None` for other files of `len` bytes.
/// It may lie behind the end of a file that was cut short.
pub(super) fn end(file: &File, len: u64) -> io::Result<Option<u64>> {
    let mut header = [0; HEADER];
    if len < HEADER as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(MAGIC) {
        return Ok(None);
    }
    let mut ends = vec![Some(HEADER as u64)];
    for table in [SEGMENTS, SECTIONS] {
        let (at, count) = (number(&header, table.offset, 8), number(&header, table.count, 2));
        if at == 0 && count == 0 {
            continue;
        }
        if number(&header, table.entry, 2) != table.size as u64 {
            return Ok(None);
        }
        let table_end = at.checked_add(count * table.size as u64);
        ends.push(table_end);
        // Of a file that is cut there, at least this end is known.
        if table_end.is_some_and(|end| end <= len) {
            let mut bytes = vec![0; count as usize * table.size];
            file.read_exact_at(&mut bytes, at)?;
            ends.extend(bytes.chunks_exact(table.size).map(|entry| end_of(entry, table.size)));
        }
    }
    Ok(ends.into_iter().try_fold(0, |last, end| Some(end?.max(last))))
}

/// Where the bytes of a segment or section end; `None` if that is no number.
fn end_of(entry: &[u8], size: usize) -> Option<u64> {
    let (at, bytes) = if size == SEGMENTS.size {
        (number(entry, 8, 8), number(entry, 32, 8))
    } else if number(entry, 4, 4) == NOBITS {
        (0, 0)
    } else {
        (number(entry, 24, 8), number(entry, 32, 8))
    };
    at.checked_add(bytes)
}

/// The number of `len` bytes at `at`, which is inside.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}
