//! Writes GGUF files: headers right and wrong, blocks of every format, the whole baked model.

pub mod encoder;
pub mod file;
pub mod writer;
