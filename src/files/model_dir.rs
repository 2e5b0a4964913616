//! Reads a model's text files (tokenizer, settings, chat template) from a directory or a bundle.

use crate::bundle::Bundle;
use crate::text_file::strip_bom_bytes;
use crate::{Error, Result};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Names of the text files that are read, each optional.
pub const TEXT_FILES: &[&str] = &[
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// File in which sentence-transformers names the pooling of embeddings.
pub const POOLING_FILE: &str = "1_Pooling/config.json";

/// A directory or bundle with the text files of a model.
#[derive(Debug)]
pub enum ModelDir {
    Dir(PathBuf),
    Bundle(Bundle),
}

impl ModelDir {
    /// Opens the directory or bundle at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: a bundle is damaged.
    pub fn open(path: &Path) -> Result<ModelDir> {
        Ok(Bundle::open(path)?.map_or_else(|| ModelDir::Dir(path.into()), ModelDir::Bundle))
    }

    /// Path of a file for messages.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            ModelDir::Dir(dir) => dir.join(name),
            ModelDir::Bundle(bundle) => bundle.path().join(name),
        }
    }

    /// Size of a file in bytes; `None` if there is no such file.
    pub fn file_size(&self, name: &str) -> Option<u64> {
        match self {
            ModelDir::Dir(dir) => fs::metadata(dir.join(name)).ok().map(|meta| meta.len()),
            ModelDir::Bundle(bundle) => bundle.file_size(name),
        }
    }

    /// Reads a regular file of at most `limit` bytes, without a byte order mark; `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it cannot be read, is too long or is damaged.
    pub fn read_file(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let bytes = match self {
            ModelDir::Dir(dir) => read_regular_file(&dir.join(name), limit)?,
            ModelDir::Bundle(bundle) => bundle.read_file(name)?.map(<[u8]>::to_vec),
        };
        if bytes.as_ref().is_some_and(|bytes| bytes.len() as u64 > limit) {
            let why = format!(
                "is longer than {limit} bytes, more than any such file needs; use the one published with the model"
            );
            return Err(Error::model(&self.path(name), why));
        }
        Ok(bytes.map(strip_bom_bytes))
    }
}

/// Reads up to `limit + 1` bytes of a regular file.
fn read_regular_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let unreadable = |e: std::io::Error| Error::model(path, format!("cannot be read: {e}"));
    let meta = match fs::metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(unreadable)?,
    };
    if !meta.is_file() {
        return Err(Error::model(path, "is not a regular file; put the file published with the model there"));
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|f| f.take(limit + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_sane_size_are_read() {
        let dir = std::env::temp_dir().join(format!("antigravity-folder-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary directory");
        fs::write(dir.join("x.json"), "[1]").expect("a file");
        let folder = ModelDir::open(&dir).expect("a directory");
        assert_eq!(folder.read_file("x.json", 3), Ok(Some(b"[1]".to_vec())));
        fs::write(dir.join("marked.json"), "\u{feff}[1]").expect("a file");
        assert_eq!(folder.read_file("marked.json", 6), Ok(Some(b"[1]".to_vec())));
        assert!(matches!(folder.read_file("x.json", 2), Err(Error::Model(_))));
        assert_eq!(folder.read_file("none", 9), Ok(None));
        assert!(matches!(folder.read_file(".", 9), Err(Error::Model(m)) if m.contains("not a regular file")));
        let devices = ModelDir::Dir("/dev".into());
        assert!(matches!(devices.read_file("zero", 9), Err(Error::Model(_))));
        fs::remove_dir_all(&dir).expect("removable");
    }
}
