//! What is kept of built programs on disk.

use std::path::PathBuf;

/// Where built programs are kept; `None` keeps nothing.
#[derive(Debug, Clone, Default)]
pub struct Cache {
    #[allow(dead_code)]
    dir: Option<PathBuf>,
}

impl Cache {
    /// Keeps nothing.
    pub fn off() -> Self {
        Self { dir: None }
    }
}
