//! What a task ends with when it does not succeed, and the exit code of each class.

/// A failed task.
#[derive(Debug)]
pub enum Error {
    /// Something was checked, or run, and did not succeed. Exit code 1.
    Failed(String),
    /// Wrong arguments. Exit code 2.
    Usage(String),
    /// A device that is not there, not allowed, full, or went away. Exit code 5.
    Device(String),
    /// Golden results that differ. Exit code 6.
    Golden(String),
    /// A program on a device ended with this code and has said why itself.
    Program(u8),
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
            Error::Device(_) => 5,
            Error::Golden(_) => 6,
            Error::Program(code) => *code,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Usage(text) | Error::Failed(text) | Error::Device(text) | Error::Golden(text) => {
                f.write_str(text)
            }
            Error::Program(code) => write!(f, "the program ended with exit code {code}"),
        }
    }
}
