//! Packed files, as far as they can be read without the model: the layout's version, the metadata of a GGUF source.

use crate::Result;
use crate::source::Source;
use crate::source::gguf::Gguf;

/// File name that `antigravity pack` writes by default and that a directory is searched for.
pub const PACKED_NAME: &str = "model.packed.safetensors";
/// Version of the layout this program writes and reads.
pub const LAYOUT: u32 = 1;
/// The key of the metadata that has the version.
pub const VERSION_KEY: &str = "antigravity.layout";
/// The tensor that is a GGUF file of metadata.
pub const GGUF: &str = "gguf";

/// The layout version of a packed file; `None` for anything else.
pub fn layout_version(source: &Source) -> Option<u32> {
    source.metadata().get(VERSION_KEY).map(|v| v.parse().unwrap_or(0))
}

/// The metadata of the GGUF file that a packed file was made from.
///
/// # Errors
///
/// [`Error::Model`] for metadata that no GGUF file has.
pub fn gguf(source: &Source) -> Result<Option<Gguf>> {
    let found = source.get(GGUF).filter(|_| layout_version(source).is_some());
    found.map(|tensor| Gguf::within(source.path(), tensor.data.clone())).transpose()
}
