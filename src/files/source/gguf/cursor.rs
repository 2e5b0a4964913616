//! The bytes of a GGUF header, read in order: little-endian, and never past the end.
//!
//! Every length that the file gives is compared with what is left before anything is read or allocated for it.

/// Where reading has come to.
pub struct Cursor<'a> {
    head: &'a [u8],
    file_len: u64,
    at: usize, // at most `head.len()`
}

impl<'a> Cursor<'a> {
    /// Reads from the start of `head`, the first bytes of a file of `file_len` bytes.
    pub fn new(head: &'a [u8], file_len: u64) -> Self {
        Self { head, file_len, at: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Bytes that are left of the head.
    fn left(&self) -> usize {
        self.head.len() - self.at
    }

    /// The next `len` bytes, of which a message says that they are `what`.
    pub fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], String> {
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= self.left()) else {
            return Err(self.past_the_end(&format!("{what} of {len} bytes at byte {}", self.at)));
        };
        let bytes = &self.head[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    fn past_the_end(&self, what: &str) -> String {
        let (head, file) = (self.head.len(), self.file_len);
        if head as u64 == file {
            format!("{what} goes past the end of the file, {file} bytes")
        } else {
            format!("{what} goes past byte {head}, which no header may")
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    /// The next four bytes as an integer.
    pub fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// The next eight bytes as an integer.
    pub fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of things of which each takes at least `least` bytes (not 0) of what follows, and of which there
    /// are at most `most`.
    pub fn count(&mut self, what: &str, least: usize, most: usize) -> Result<usize, String> {
        let count = self.u64(what)?;
        if count > most as u64 {
            return Err(format!("{what} is {count}, more than {most}"));
        }
        if count > (self.left() / least) as u64 {
            return Err(self.past_the_end(&format!("{what} {count} at byte {}", self.at - 8)));
        }
        Ok(count as usize)
    }

    /// A string's bytes: its length (u64), then itself.
    pub fn text_bytes(&mut self, what: &str) -> Result<&'a [u8], String> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// A string of at most `longest` bytes.
    pub fn text(&mut self, what: &str, longest: usize) -> Result<String, String> {
        let start = self.at;
        let bytes = self.text_bytes(what)?;
        if bytes.len() > longest {
            return Err(format!("{what} at byte {start} is {} bytes long, more than {longest}", bytes.len()));
        }
        // A copy before the check, since the bytes of a mapped file could change after it.
        String::from_utf8(bytes.to_vec()).map_err(|_| format!("{what} at byte {start} is not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end() {
        let bytes = [3u8, 0, 0, 0, 0, 0, 0, 0, b'a', b'b', b'c', 9];
        let mut cursor = Cursor::new(&bytes, 12);
        assert_eq!(cursor.text("name", 3).unwrap(), "abc");
        assert_eq!((cursor.position(), cursor.left()), (11, 1));
        for len in [2, u64::MAX, u64::MAX - 10, 1 << 32] {
            assert!(cursor.take(len, "x").unwrap_err().contains(&len.to_string()));
        }
        assert!(cursor.u32("x").is_err() && cursor.u64("x").is_err());
        assert_eq!(cursor.take(1, "x").unwrap(), [9]);
        assert!(cursor.take(0, "x").unwrap().is_empty() && cursor.take(1, "x").is_err());
    }

    #[test]
    fn counts_are_held_against_the_bytes_that_follow() {
        let file = |count: u64, rest: usize| {
            let mut bytes = count.to_le_bytes().to_vec();
            bytes.resize(8 + rest, 0);
            bytes
        };
        let count = |bytes: &[u8], least| Cursor::new(bytes, bytes.len() as u64).count("n", least, 100);
        assert_eq!(count(&file(4, 12), 3), Ok(4));
        assert!(count(&file(5, 12), 3).unwrap_err().contains("n 5 at byte 0"));
        assert!(count(&file(101, 500), 1).unwrap_err().contains("more than 100"));
        assert!(count(&file(u64::MAX, 12), 1).is_err());
        let longer = Cursor::new(&file(9, 1), 1 << 40).count("n", 1, 100).unwrap_err();
        assert!(longer.contains("no header"), "{longer}");
    }
}
