//! Reads the text files of a model directory with the care that files from elsewhere need.

use super::bounded;
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Settings files are a few kilobytes, with long lists of added tokens a few hundred.
const MAX_SETTINGS: u64 = 16 << 20;
/// serde_json itself gives up at 128; no real file of ours goes beyond 12.
const MAX_NESTING: usize = 64;

/// The bytes of a regular file of at most `limit` bytes; `None` where there is no such file.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let unreadable = |e: std::io::Error| Error::model(path, format!("cannot be read: {e}"));
    let meta = match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(unreadable)?,
    };
    if !meta.is_file() {
        return Err(Error::model(path, "is not a regular file; put the file published with the model there"));
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|f| f.take(limit + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if bytes.len() as u64 > limit {
        return Err(Error::model(
            path,
            format!(
                "has more than {limit} bytes, which no such file needs; use the one published with the model"
            ),
        ));
    }
    Ok(Some(bytes))
}

/// A JSON object with a model's settings; `None` where there is no such file.
pub(crate) fn read_settings(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(bytes) = read(path, MAX_SETTINGS)? else { return Ok(None) };
    let broken = |why: String| Error::model(path, format!("{why}; use the file published with the model"));
    check_nesting(&bytes).map_err(broken)?;
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    match bounded::value(&mut json).and_then(|value| json.end().map(|()| value)) {
        Ok(Some(Value::Object(map))) => Ok(Some(map)),
        Ok(other) => Err(broken(format!("holds {}, not a JSON object", shown(&other.unwrap_or_default())))),
        Err(e) => Err(broken(format!("is not valid JSON ({e})"))),
    }
}

/// Brackets nested too deep, found without recursion.
pub(crate) fn check_nesting(json: &[u8]) -> std::result::Result<(), String> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for &b in json {
        match b {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => {
                depth += 1;
                if depth > MAX_NESTING {
                    return Err(format!("is nested more than {MAX_NESTING} levels deep"));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

/// A value for a message, cut to a readable length.
pub(crate) fn shown(value: &Value) -> String {
    cut(&value.to_string())
}

/// A text for a message, on one line of a readable length.
pub(crate) fn cut(text: &str) -> String {
    let mut short: String = text.chars().take(100).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_counted_outside_strings() {
        assert_eq!(check_nesting(br#"{"a":["\"[[[["]}"#), Ok(()));
        assert_eq!(check_nesting("[]".repeat(1000).as_bytes()), Ok(()));
        assert!(check_nesting("[".repeat(65).as_bytes()).is_err());
        assert!(check_nesting("{\"a\":".repeat(100_000).as_bytes()).is_err());
    }

    #[test]
    fn only_regular_files_of_a_sane_size_are_read() {
        let dir = std::env::temp_dir().join(format!("antigravity-files-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary directory");
        let file = dir.join("x.json");
        fs::write(&file, "[1]").expect("a file");
        assert_eq!(read(&file, 3), Ok(Some(b"[1]".to_vec())));
        assert!(matches!(read(&file, 2), Err(Error::Model(_))));
        assert_eq!(read(&dir.join("none"), 9), Ok(None));
        assert!(matches!(read(&dir, 9), Err(Error::Model(m)) if m.contains("not a regular file")));
        assert!(matches!(read_settings(&file), Err(Error::Model(m)) if m.contains("[1], not a JSON object")));
        #[cfg(unix)]
        assert!(matches!(read(Path::new("/dev/zero"), 9), Err(Error::Model(_))));
        fs::remove_dir_all(&dir).expect("removable");
    }
}
