//! JSON files; every error names the file.

use crate::error::{Error, Result};
use files::atomic_file;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;

pub fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file).map_err(|e| Error::at(file, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::at(file, e))
}

/// Writes a value in lines, whole or not at all.
pub fn write(file: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::at(file, e))? + "\n";
    atomic_file::write(file, text.as_bytes()).map_err(|e| Error::at(file, e))
}
