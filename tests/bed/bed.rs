//! What the tests of all four binaries share: where files are, the program, made-up files, numbers that repeat.
#![allow(dead_code, reason = "each binary takes what it needs")]

pub mod alone;
pub mod child;
pub mod gguf;
pub mod hostile;
pub mod place;
#[cfg(unix)]
pub mod program;
pub mod random;
pub mod temp;
