//! Bounded reads from a GGUF header, in order and little-endian.
//!
//! Every length in the file is compared with the bytes that are left before anything is read or allocated.

/// Maximum bytes of a header; the largest vocabularies need a sixth of this.
const MAX_HEADER: usize = 128 << 20;

/// A position in a header.
pub struct Cursor<'a> {
    head: &'a [u8], // at most MAX_HEADER bytes
    file_len: usize,
    at: usize, // at most `head.len()`
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of a file.
    pub fn new(file: &'a [u8]) -> Self {
        Self { head: &file[..file.len().min(MAX_HEADER)], file_len: file.len(), at: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.at
    }

    fn bytes_left(&self) -> usize {
        self.head.len() - self.at
    }

    /// Takes the next `len` bytes; `what` names them in messages.
    pub fn take_bytes(&mut self, len: u64, what: &str) -> Result<&'a [u8], String> {
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= self.bytes_left()) else {
            return Err(self.past_the_end(&format!("{what} of {len} bytes at byte {}", self.at)));
        };
        let bytes = &self.head[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    fn past_the_end(&self, what: &str) -> String {
        if self.head.len() == self.file_len {
            format!("{what} goes past the end of the file, {} bytes", self.file_len)
        } else {
            format!("{what} goes past byte {MAX_HEADER}, the limit of a header")
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take_bytes(N as u64, what)?);
        Ok(out)
    }

    /// Reads the next four bytes as an integer.
    pub fn read_u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// Reads the next eight bytes as an integer.
    pub fn read_u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a count of at most `most` items, each of which takes at least `least` bytes (not 0) of the rest.
    pub fn read_count(&mut self, what: &str, least: usize, most: usize) -> Result<usize, String> {
        let count = self.read_u64(what)?;
        if count > most as u64 {
            return Err(format!("{what} is {count}, more than {most}"));
        }
        if count > (self.bytes_left() / least) as u64 {
            return Err(self.past_the_end(&format!("{what} {count} at byte {}", self.at - 8)));
        }
        Ok(count as usize)
    }

    /// Reads a string as bytes: its length (u64), then its content.
    pub fn read_string_bytes(&mut self, what: &str) -> Result<&'a [u8], String> {
        let len = self.read_u64(what)?;
        self.take_bytes(len, what)
    }

    /// Reads a string of at most `longest` bytes.
    pub fn read_string(&mut self, what: &str, longest: usize) -> Result<String, String> {
        let start = self.at;
        let bytes = self.read_string_bytes(what)?;
        if bytes.len() > longest {
            return Err(format!("{what} at byte {start} is {} bytes long, more than {longest}", bytes.len()));
        }
        // Copied first: the bytes of a mapped file could change after the check.
        String::from_utf8(bytes.to_vec()).map_err(|_| format!("{what} at byte {start} is not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end() {
        let bytes = [3u8, 0, 0, 0, 0, 0, 0, 0, b'a', b'b', b'c', 9];
        let mut cursor = Cursor::new(&bytes);
        assert_eq!(cursor.read_string("name", 3).unwrap(), "abc");
        assert_eq!((cursor.position(), cursor.bytes_left()), (11, 1));
        for len in [2, u64::MAX, u64::MAX - 10, 1 << 32] {
            assert!(cursor.take_bytes(len, "x").unwrap_err().contains(&len.to_string()));
        }
        assert!(cursor.read_u32("x").is_err() && cursor.read_u64("x").is_err());
        assert_eq!(cursor.take_bytes(1, "x").unwrap(), [9]);
        assert!(cursor.take_bytes(0, "x").unwrap().is_empty() && cursor.take_bytes(1, "x").is_err());
    }

    #[test]
    fn a_count_needs_room_for_its_items() {
        let file = |count: u64, rest: usize| {
            let mut bytes = count.to_le_bytes().to_vec();
            bytes.resize(8 + rest, 0);
            bytes
        };
        let count = |bytes: &[u8], least| Cursor::new(bytes).read_count("n", least, 100);
        assert_eq!(count(&file(4, 12), 3), Ok(4));
        assert!(count(&file(5, 12), 3).unwrap_err().contains("n 5 at byte 0"));
        assert!(count(&file(101, 500), 1).unwrap_err().contains("more than 100"));
        assert!(count(&file(u64::MAX, 12), 1).is_err());
    }

    #[test]
    fn a_header_ends_within_the_limit() {
        let file = vec![0; MAX_HEADER + 1];
        let error = Cursor::new(&file).take_bytes(file.len() as u64, "x").unwrap_err();
        assert!(error.contains("limit of a header"), "{error}");
    }
}
