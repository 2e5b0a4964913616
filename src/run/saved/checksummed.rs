//! A file that is written or read together with a CRC-32 of all bytes so far.

use crc32fast::Hasher;
use std::io::{self, Read, Write};

/// A file and the checksum of the bytes written or read so far.
pub(super) struct Checksummed<F> {
    file: F,
    hasher: Hasher,
}

impl<F> Checksummed<F> {
    pub fn new(file: F) -> Self {
        Self { file, hasher: Hasher::new() }
    }

    fn checksum(&self) -> [u8; 4] {
        self.hasher.clone().finalize().to_le_bytes()
    }
}

impl<F: Write> Checksummed<F> {
    pub fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.file.write_all(bytes)
    }

    /// Writes the checksum of everything before.
    pub fn put_checksum(&mut self) -> io::Result<()> {
        self.put(&self.checksum())
    }
}

impl<F: Read> Checksummed<F> {
    /// Fills `bytes`.
    pub fn take(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(bytes)?;
        self.hasher.update(bytes);
        Ok(())
    }

    /// Reads a checksum, and compares it with that of everything before.
    pub fn checksum_fits(&mut self) -> io::Result<bool> {
        let (expected, mut found) = (self.checksum(), [0; 4]);
        self.take(&mut found)?;
        Ok(found == expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let mut stored = Vec::new();
        let mut out = Checksummed::new(&mut stored);
        out.put(b"123456789").expect("memory");
        out.put_checksum().expect("memory");
        out.put(b"more").expect("memory");
        out.put_checksum().expect("memory");
        // The check value of CRC-32 (IEEE 802.3).
        assert_eq!(stored[9..13], 0xcbf4_3926u32.to_le_bytes());
        let fits = |stored: &[u8]| -> io::Result<(bool, bool)> {
            let mut input = Checksummed::new(stored);
            input.take(&mut [0; 9])?;
            let first = input.checksum_fits()?;
            input.take(&mut [0; 4])?;
            Ok((first, input.checksum_fits()?))
        };
        assert_eq!(fits(&stored).expect("whole"), (true, true));
        for bit in 0..stored.len() * 8 {
            let mut other = stored.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(fits(&other).expect("whole"), (true, true));
        }
        assert!((0..stored.len()).all(|n| fits(&stored[..n]).is_err()));
    }
}
