//! The errors of tasks, and the exit code of each kind.

use std::fmt::Display;
use std::path::Path;

/// A failed task.
#[derive(Debug)]
pub enum Error {
    /// A check or a command that failed. Exit code 1.
    Failed(String),
    /// Wrong arguments. Exit code 2.
    Usage(String),
    /// A device that is missing, locked, full or disconnected. Exit code 5.
    Device(String),
    /// Golden results that differ. Exit code 6.
    Golden(String),
    /// Exit code of a program on a device, which has printed the reason itself.
    Program(u8),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `path: message`.
    pub fn at(path: &Path, message: impl Display) -> Self {
        Error::Failed(format!("{}: {message}", path.display()))
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Failed(_) => 1,
            Error::Usage(_) => 2,
            Error::Device(_) => 5,
            Error::Golden(_) => 6,
            Error::Program(code) => *code,
        }
    }
}

/// Errors that name the file they are about.
pub trait AtPath<T> {
    fn at(self, path: &Path) -> Result<T>;
}

impl<T, E: Display> AtPath<T> for std::result::Result<T, E> {
    fn at(self, path: &Path) -> Result<T> {
        self.map_err(|e| Error::at(path, e))
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Usage(text) | Error::Failed(text) | Error::Device(text) | Error::Golden(text) => {
                f.write_str(text)
            }
            Error::Program(code) => write!(f, "the program ended with exit code {code}"),
        }
    }
}
