//! Finds the end of an ELF program in a file. The file is untrusted.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// 64 bits, little-endian: every target of this program.
const MAGIC: &[u8; 6] = b"\x7fELF\x02\x01";
const HEADER: usize = 64;
/// The type of a section that has no bytes in the file.
const NOBITS: u64 = 8;

/// A table described by the ELF header: positions of the header fields with its offset, entry size and entry count.
struct Table {
    offset: usize,
    entry: usize,
    count: usize,
    /// Required bytes of an entry.
    size: usize,
}

const SEGMENTS: Table = Table { offset: 32, entry: 54, count: 56, size: 56 };
const SECTIONS: Table = Table { offset: 40, entry: 58, count: 60, size: 64 };

/// Finds the end of an ELF file of `len` bytes: the end of its last segment, section or table; `None` for other files.
/// It may be beyond the end of a truncated file.
pub(super) fn find_end(file: &File, len: u64) -> io::Result<Option<u64>> {
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
        let (at, count) = (read_number(&header, table.offset, 8), read_number(&header, table.count, 2));
        if at == 0 && count == 0 {
            continue;
        }
        if read_number(&header, table.entry, 2) != table.size as u64 {
            return Ok(None);
        }
        let table_end = at.checked_add(count * table.size as u64);
        ends.push(table_end);
        // In a file truncated before that, at least this end is known.
        if table_end.is_some_and(|end| end <= len) {
            let mut bytes = vec![0; count as usize * table.size];
            file.read_exact_at(&mut bytes, at)?;
            ends.extend(bytes.chunks_exact(table.size).map(|entry| end_of(entry, table.size)));
        }
    }
    Ok(ends.into_iter().try_fold(0, |last, end| Some(end?.max(last))))
}

/// End of a segment or section in the file; `None` on overflow.
fn end_of(entry: &[u8], size: usize) -> Option<u64> {
    let (at, bytes) = if size == SEGMENTS.size {
        (read_number(entry, 8, 8), read_number(entry, 32, 8))
    } else if read_number(entry, 4, 4) == NOBITS {
        (0, 0)
    } else {
        (read_number(entry, 24, 8), read_number(entry, 32, 8))
    };
    at.checked_add(bytes)
}

/// Reads the little-endian number of `len` bytes at `at`, which is inside.
fn read_number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}
