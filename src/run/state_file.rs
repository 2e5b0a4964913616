//! Files of one model in the user's state directory: a line that names what the content depends on, the content, a
//! checksum.

use super::system;
use crate::dims;
use crate::model::weights::WeightType;
use files::atomic_file;
use files::source::hash_parts;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::PathBuf;

/// Bytes of the checksum, in hexadecimal digits.
const SUM: usize = 32;

/// A file for some weights.
pub struct StateFile {
    path: PathBuf,
    /// First line: everything that the content depends on.
    name: String,
}

impl StateFile {
    /// The file of a kind for the weights with this fingerprint: one per model and weight type, replaced when the
    /// weights change. `details` is what else the content depends on. `None` if the user has no state directory.
    pub fn new(kind: &str, fingerprint: &str, weight_type: WeightType, details: &str) -> Option<Self> {
        let name = format!("antigravity {kind} {fingerprint} {weight_type} {details}\n");
        let file = format!("{}-{weight_type}.{kind}", dims::MODEL);
        Some(Self { path: system::state_directory()?.join(file), name })
    }

    /// Reads the content of `len` bytes.
    ///
    /// # Errors
    ///
    /// `NotFound`: there is no file. `InvalidData`: it is damaged, or of other weights.
    pub fn read(&self, len: usize) -> io::Result<Vec<u8>> {
        let meta = fs::metadata(&self.path)?;
        let foreign = || io::Error::new(ErrorKind::InvalidData, "is damaged, or belongs to another model");
        let want = self.name.len() + len + SUM;
        if !meta.is_file() || meta.len() != want as u64 {
            return Err(foreign());
        }
        let mut bytes = Vec::with_capacity(want);
        File::open(&self.path)?.take(want as u64).read_to_end(&mut bytes)?;
        let content = bytes.strip_prefix(self.name.as_bytes()).and_then(|rest| rest.split_at_checked(len));
        match content {
            Some((content, sum)) if sum == hash_parts([content]).as_bytes() => Ok(content.to_vec()),
            _ => Err(foreign()),
        }
    }

    /// Writes the content, replacing the file.
    pub fn write(&self, content: &[u8]) -> io::Result<()> {
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir)?;
        }
        let sum = hash_parts([content]);
        atomic_file::write_file(&self.path, &[self.name.as_bytes(), content, sum.as_bytes()].concat())
    }

    /// Its path.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_for_other_weights_is_refused() {
        let dir = std::env::temp_dir().join(format!("antigravity-kept-{}", std::process::id()));
        let kept = |name: &str| StateFile { path: dir.join("model.kind"), name: format!("{name}\n") };
        let read = |name: &str, len| kept(name).read(len).map_err(|e| e.kind());
        assert_eq!(read("a", 3), Err(ErrorKind::NotFound));
        kept("a").write(b"abc").expect("written");
        assert_eq!(read("a", 3), Ok(b"abc".to_vec()));
        for (name, len) in [("b", 3), ("longer", 3), ("a", 2), ("a", 4), ("a", usize::MAX / 2)] {
            assert_eq!(read(name, len), Err(ErrorKind::InvalidData), "{name} {len}");
        }
        kept("b").write(b"xyz").expect("written");
        assert_eq!((read("b", 3), read("a", 3)), (Ok(b"xyz".to_vec()), Err(ErrorKind::InvalidData)));
        // Right length, but one bit is wrong.
        let mut bytes = fs::read(&kept("b").path).expect("a file");
        bytes[2] ^= 1;
        fs::write(&kept("b").path, bytes).expect("written");
        assert_eq!(read("b", 3), Err(ErrorKind::InvalidData));
        let _ = fs::remove_dir_all(dir);
    }
}
