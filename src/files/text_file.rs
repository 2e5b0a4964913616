//! Reads UTF-8 text files and strips the byte order mark (BOM) that some editors put first.

use crate::{Error, Result};
use std::fs;
use std::io::Read;
use std::path::Path;

const BOM: char = '\u{feff}';

/// Strips a leading byte order mark from a text.
pub fn strip_bom(text: &str) -> &str {
    text.strip_prefix(BOM).unwrap_or(text)
}

/// Strips a leading byte order mark from the bytes of a text.
pub fn strip_bom_bytes(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut bom = [0; 4];
    let bom = BOM.encode_utf8(&mut bom).as_bytes();
    if bytes.starts_with(bom) {
        bytes.drain(..bom.len());
    }
    bytes
}

/// Parses the JSON of a config. Python's `Infinity`, which is not JSON, becomes null.
///
/// # Errors
///
/// It is not JSON.
pub fn parse_config_json(json: &[u8]) -> serde_json::Result<serde_json::Value> {
    serde_json::from_slice(json).or_else(|e| {
        let replaced = std::str::from_utf8(json).unwrap_or_default().replace("Infinity", "null");
        serde_json::from_str(&replaced).map_err(|_| e)
    })
}

/// Reads UTF-8 text of at most `limit` bytes, without a byte order mark.
///
/// # Errors
///
/// The reason, to be appended to the file's name: unreadable, too long or not UTF-8.
pub fn read_text(input: impl Read, limit: u64) -> std::result::Result<String, String> {
    let mut bytes = Vec::new();
    input.take(limit + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if bytes.len() as u64 > limit {
        return Err(format!("is longer than {} MiB; give a shorter text", limit >> 20));
    }
    String::from_utf8(bytes)
        .map(|text| strip_bom(&text).into())
        .map_err(|e| format!("byte {} is not UTF-8; convert the file", e.utf8_error().valid_up_to()))
}

/// Reads a small text file.
///
/// # Errors
///
/// [`Error::Model`]: it cannot be read, is not a regular file or is too large.
pub fn read_text_file(path: &Path) -> Result<String> {
    const LIMIT: u64 = 16 << 20;
    let unreadable = |e| Error::model(path, format!("cannot read: {e}"));
    let meta = fs::metadata(path).map_err(unreadable)?;
    if !meta.is_file() {
        return Err(Error::model(path, "is not a regular file"));
    }
    if meta.len() > LIMIT {
        return Err(Error::model(path, format!("is {} bytes long; at most {LIMIT} are read", meta.len())));
    }
    let file = fs::File::open(path).map_err(unreadable)?;
    read_text(file, LIMIT).map_err(|why| Error::model(path, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_order_mark_at_the_start_is_removed() {
        let cases =
            [("\u{feff}a", "a"), ("a\u{feff}", "a\u{feff}"), ("\u{feff}\u{feff}", "\u{feff}"), ("", "")];
        for (text, want) in cases {
            assert_eq!(strip_bom(text), want);
            assert_eq!(read_text(text.as_bytes(), 1 << 20).as_deref(), Ok(want));
            assert_eq!(strip_bom_bytes(text.into()), want.as_bytes());
        }
        assert_eq!(read_text(&b"a\xff"[..], 1 << 20).unwrap_err(), "byte 1 is not UTF-8; convert the file");
        let long = vec![b'a'; (1 << 20) + 1];
        assert!(read_text(&long[..], 1 << 20).unwrap_err().contains("longer than 1 MiB"));
        assert!(read_text(&long[..], 2 << 20).is_ok());
    }
}
