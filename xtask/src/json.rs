//! JSON files. Every error names the file.

use crate::error::{AtPath, Result};
use files::atomic_file;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;

pub fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file).at(file)?;
    serde_json::from_slice(&text).at(file)
}

/// Writes a value with one line per field, atomically.
pub fn write(file: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).at(file)? + "\n";
    atomic_file::write_file(file, text.as_bytes()).at(file)
}
