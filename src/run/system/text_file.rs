//! Small text files of the system.

use std::fs;

/// The text of a system file; `None` if it cannot be read.
pub fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}
