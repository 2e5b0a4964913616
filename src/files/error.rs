//! One error type, one exit code a class.

use std::path::Path;

/// What went wrong, by who can mend it. Every message names the file or flag, the value and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Something else, e.g. an output file that cannot be written. Exit code 1.
    #[error("{0}")]
    Other(String),
    /// A flag or argument. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// A model or tokenizer file. Exit code 3.
    #[error("{0}")]
    Model(String),
    /// Does not fit in memory. Exit code 4.
    #[error("{0}")]
    Memory(String),
    /// A device that is not there or not in this build. Exit code 5.
    #[error("{0}")]
    Device(String),
    /// A golden test that differs. Exit code 6.
    #[error("{0}")]
    Golden(String),
    /// Stopped by the user. Exit code 130.
    #[error("interrupted")]
    Interrupted,
    /// Whoever read the output has gone; not a failure. Exit code 0.
    #[error("output closed")]
    ClosedPipe,
}

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `path: message`, for an unusable model or tokenizer file.
    pub fn model(path: &Path, message: impl std::fmt::Display) -> Self {
        Error::Model(format!("{}: {message}", path.display()))
    }

    /// `path: message`, for a file that cannot be read or written.
    pub fn io(path: &Path, message: impl std::fmt::Display) -> Self {
        Error::Other(format!("{}: {message}", path.display()))
    }

    /// The process exit code of this class.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::ClosedPipe => 0,
            Error::Other(_) => 1,
            Error::Usage(_) => 2,
            Error::Model(_) => 3,
            Error::Memory(_) => 4,
            Error::Device(_) => 5,
            Error::Golden(_) => 6,
            Error::Interrupted => 130,
        }
    }
}
