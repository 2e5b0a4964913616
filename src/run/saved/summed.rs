//! Bytes into and out of a file, with a CRC-32 of all that went by.

use crc32fast::Hasher;
use std::io::{self, Read, Write};

/// A file and the sum of its bytes so far.
pub(super) struct Summed<F> {
    file: F,
    sum: Hasher,
}

impl<F> Summed<F> {
    pub fn new(file: F) -> Self {
        Self { file, sum: Hasher::new() }
    }

    fn sum(&self) -> [u8; 4] {
        self.sum.clone().finalize().to_le_bytes()
    }
}

impl<F: Write> Summed<F> {
    pub fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.file.write_all(bytes)
    }

    /// Writes the sum of everything before.
    pub fn put_sum(&mut self) -> io::Result<()> {
        self.put(&self.sum())
    }
}

impl<F: Read> Summed<F> {
    /// Fills `bytes`.
    pub fn take(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(bytes)?;
        self.sum.update(bytes);
        Ok(())
    }

    /// Reads a sum; whether it is that of everything before.
    pub fn sum_fits(&mut self) -> io::Result<bool> {
        let (expected, mut found) = (self.sum(), [0; 4]);
        self.take(&mut found)?;
        Ok(found == expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_taken_and_every_other_bit_is_noticed() {
        let mut stored = Vec::new();
        let mut out = Summed::new(&mut stored);
        out.put(b"123456789").expect("memory");
        out.put_sum().expect("memory");
        out.put(b"more").expect("memory");
        out.put_sum().expect("memory");
        // The check value of CRC-32 (IEEE 802.3).
        assert_eq!(stored[9..13], 0xcbf4_3926u32.to_le_bytes());
        let fits = |stored: &[u8]| -> io::Result<(bool, bool)> {
            let mut input = Summed::new(stored);
            input.take(&mut [0; 9])?;
            let first = input.sum_fits()?;
            input.take(&mut [0; 4])?;
            Ok((first, input.sum_fits()?))
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
