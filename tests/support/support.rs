//! Support of all four test binaries: where files are, the program, made-up files, numbers that repeat.
#![allow(dead_code, unused_imports, reason = "each binary takes what it needs")]

#[cfg(unix)]
pub mod command;
pub mod cpu_sequence;
pub mod gguf;
pub mod hostile;
pub mod logits;
pub mod paths;
pub mod process;
pub mod random;
pub mod test_dir;
