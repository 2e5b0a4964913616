//! The statuses that functions return: the exit codes of the program.
#![allow(dead_code, reason = "C code uses them")]

/// Version of the functions and types in this header. It rises when one of them changes its meaning.
pub const ANTIGRAVITY_ABI_VERSION: u32 = 1;

/// The call did what it should.
pub const ANTIGRAVITY_OK: i32 = 0;
/// Any other failure, such as a file that cannot be written.
pub const ANTIGRAVITY_ERROR: i32 = 1;
/// An argument or an option is wrong.
pub const ANTIGRAVITY_ERROR_USAGE: i32 = 2;
/// The model or its tokenizer cannot be used.
pub const ANTIGRAVITY_ERROR_MODEL: i32 = 3;
/// There is not enough memory.
pub const ANTIGRAVITY_ERROR_MEMORY: i32 = 4;
/// The device is missing or failed.
pub const ANTIGRAVITY_ERROR_DEVICE: i32 = 5;
/// The call was cancelled before its first token.
pub const ANTIGRAVITY_ERROR_CANCELLED: i32 = 130;

#[cfg(test)]
mod tests {
    use super::*;
    use files::Error;

    #[test]
    fn statuses_are_the_exit_codes() {
        for (error, status) in [
            (Error::Other(String::new()), ANTIGRAVITY_ERROR),
            (Error::Usage(String::new()), ANTIGRAVITY_ERROR_USAGE),
            (Error::Model(String::new()), ANTIGRAVITY_ERROR_MODEL),
            (Error::Memory(String::new()), ANTIGRAVITY_ERROR_MEMORY),
            (Error::Device(String::new()), ANTIGRAVITY_ERROR_DEVICE),
            (Error::Interrupted, ANTIGRAVITY_ERROR_CANCELLED),
        ] {
            assert_eq!(error.exit_code(), status, "{error:?}");
        }
    }
}
