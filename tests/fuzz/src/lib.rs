//! Functions that the fuzz targets share: they write inputs to files.

use std::fs::{self, File};
use std::path::PathBuf;

/// A file of this process with this content, in memory where there is `/dev/shm`; the same one each time.
pub fn file(name: &str, content: &[u8]) -> PathBuf {
    let path = place(name);
    fs::write(&path, content).expect("the file can be written");
    path
}

/// Writes a file like [`file`], extended up to `len` bytes with zeros that take no room.
pub fn long_file(name: &str, content: &[u8], len: u64) -> PathBuf {
    let path = file(name, content);
    let file = File::options().write(true).open(&path).expect("it is there");
    file.set_len(len.max(content.len() as u64)).expect("the file can be made longer");
    path
}

fn place(name: &str) -> PathBuf {
    let shm = PathBuf::from("/dev/shm");
    let dir = if shm.is_dir() { shm } else { std::env::temp_dir() };
    let dir = dir.join(format!("antigravity-fuzz-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a temporary directory");
    dir.join(name)
}
