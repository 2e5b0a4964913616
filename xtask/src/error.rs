//! What a task ends with when it does not succeed, and the exit code of each class.

/// A failed task.
#[derive(Debug)]
pub enum Error {
    /// Wrong arguments. Exit code 2.
    Usage(String),
    /// Something was checked, or run, and did not succeed. Exit code 1.
    Failed(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `path: message`.
    pub fn at(path: &std::path::Path, message: impl std::fmt::Display) -> Self {
        Error::Failed(format!("{}: {message}", path.display()))
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Failed(_) => 1,
            Error::Usage(_) => 2,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Usage(text) | Error::Failed(text) => f.write_str(text),
        }
    }
}
