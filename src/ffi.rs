//! C API: the functions and types of `include/antigravity.h`, which `cargo xtask header` writes from these files.
//!
//! A handle is a number that looks like a pointer and is never dereferenced: the engine or session behind it is found
//! in a table, so that a freed or foreign handle is an error. Options are JSON objects whose fields are the flags of
//! the program. Every function catches panics and returns a status, which is the exit code of the same failure of the
//! program.

mod border;
pub mod engine;
mod handles;
mod jni;
mod options;
pub mod session;
mod status;
