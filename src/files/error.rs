//! The error type, whose classes are the exit codes, and how messages quote a file's text.

use std::path::Path;

/// What went wrong, by who can fix it. Every message names the file or flag, the value and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Anything else, e.g. an output file that cannot be written. Exit code 1.
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
    /// A device that is missing or not in this build. Exit code 5.
    #[error("{0}")]
    Device(String),
    /// A golden test that differs. Exit code 6.
    #[error("{0}")]
    Golden(String),
    /// Stopped by the user. Exit code 130.
    #[error("interrupted")]
    Interrupted,
    /// The reader of the output has gone, which is not a failure. Exit code 0.
    #[error("output closed")]
    ClosedPipe,
}

/// A result with this [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `path: message`, for a model or tokenizer file that cannot be used.
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

/// A value from an untrusted file, for a message: quoted, escaped and shortened.
pub fn quoted(text: &str) -> String {
    const LONGEST: usize = 100; // characters
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_text_is_short_and_has_no_control_characters() {
        assert_eq!(quoted("a\n\u{1b}[2J"), r#""a\n\u{1b}[2J""#);
        assert!(quoted(&"é".repeat(10_000)).chars().count() < 110);
    }
}
