//! Writes archives of stored files, as wheels and Android archives are. Stored files can be mapped where they are.

use crate::error::{Error, Result};

/// Alignment in bytes of large files: a page of every phone.
const ALIGN: usize = 16384;
/// Files of at least this many bytes are aligned.
const LARGE: usize = 1 << 16;
/// The day that every file has, 1980-01-01, so that archives are reproducible.
const DAY: u16 = 0x21;
/// Mode bits of a file, `-rw-r--r--`, as Unix programs store them.
const MODE: u32 = 0o100_644 << 16;

/// An archive of files with their names.
#[derive(Default)]
pub struct Zip {
    bytes: Vec<u8>,
    directory: Vec<u8>,
    count: u16,
}

impl Zip {
    /// Adds a file.
    ///
    /// # Errors
    ///
    /// The archive would have more than 4 GiB.
    pub fn add_file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let start = self.bytes.len();
        let data = start + 30 + name.len();
        // An extra field of zeros is a valid one if it has a header of four bytes.
        let padding = if content.len() >= LARGE { (data + 4).next_multiple_of(ALIGN) - data } else { 0 };
        let too_large = |_| Error::Failed("the archive would have more than 4 GiB".into());
        let size = u32::try_from(content.len()).map_err(too_large)?;
        let offset = u32::try_from(start).map_err(too_large)?;
        u32::try_from(data + padding + content.len()).map_err(too_large)?;
        // Version 2.0, no flags, stored, time and day, CRC-32, both sizes, length of the name.
        let mut entry = [20u16, 0, 0, 0, DAY].map(u16::to_le_bytes).concat();
        entry.extend([crc32fast::hash(content), size, size].map(u32::to_le_bytes).concat());
        entry.extend((name.len() as u16).to_le_bytes());
        self.bytes
            .extend([b"PK\x03\x04", &entry[..], &(padding as u16).to_le_bytes(), name.as_bytes()].concat());
        if padding > 0 {
            // A private field: its number, and the bytes that follow.
            self.bytes.extend([0xd935u16, (padding - 4) as u16].map(u16::to_le_bytes).concat());
            self.bytes.resize(data + padding, 0);
        }
        self.bytes.extend(content);
        // Made on Unix; no extra field, comment or disk; mode and place.
        self.directory.extend([b"PK\x01\x02", &(3u16 << 8 | 20).to_le_bytes()[..], &entry, &[0; 8]].concat());
        self.directory.extend([MODE, offset].map(u32::to_le_bytes).concat());
        self.directory.extend(name.as_bytes());
        self.count += 1;
        Ok(())
    }

    /// The whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        let ends = [self.directory.len() as u32, self.bytes.len() as u32].map(u32::to_le_bytes).concat();
        let counts = [0, 0, self.count, self.count].map(u16::to_le_bytes).concat();
        self.bytes.extend(self.directory);
        self.bytes.extend([b"PK\x05\x06", &counts[..], &ends, &[0; 2]].concat());
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command;
    use std::process::Command;

    #[test]
    fn python_reads_the_archive_and_large_files_are_aligned() {
        let mut zip = Zip::default();
        let large = vec![7; LARGE];
        zip.add_file("a/small.txt", b"text").unwrap();
        zip.add_file("a/large", &large).unwrap();
        zip.add_file("last", b"").unwrap();
        let bytes = zip.finish();
        let at = bytes.windows(LARGE).position(|w| w == large).unwrap();
        assert_eq!(at % ALIGN, 0);
        if !command::is_on_path("python3") {
            return;
        }
        let file = std::env::temp_dir().join(format!("xtask-zip-{}", std::process::id()));
        std::fs::write(&file, bytes).unwrap();
        let script = "import sys, zipfile as z\nf = z.ZipFile(sys.argv[1])\nassert f.testzip() is None\n\
                      print([(i.filename, i.file_size) for i in f.infolist()], f.read('a/small.txt'))";
        let out = command::stdout(Command::new("python3").args(["-c", script]).arg(&file)).unwrap();
        std::fs::remove_file(&file).unwrap();
        let expected = format!("[('a/small.txt', 4), ('a/large', {LARGE}), ('last', 0)] b'text'\n");
        assert_eq!(String::from_utf8_lossy(&out), expected);
    }
}
