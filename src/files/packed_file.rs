//! Packed files, as far as they can be read without the model: metadata, and the metadata of a GGUF source.
//!
//! A packed file is a safetensors file that `antigravity pack` wrote.

use crate::Result;
use crate::source::Source;
use crate::source::gguf::Gguf;

/// The default name in a model's directory.
pub const PACKED_NAME: &str = "model.packed.safetensors";
/// The layout version that this program writes and reads.
pub const LAYOUT: u32 = 1;
/// The tensor that holds the header of a GGUF file.
pub const GGUF: &str = "gguf";

/// Metadata keys.
pub mod key {
    /// The layout version. Only packed files have this key.
    pub const LAYOUT: &str = "antigravity.layout";
    /// Text of a `config.json`.
    pub const CONFIG: &str = "config";
    /// How each tensor is stored, where that is not the default; JSON.
    pub const DTYPES: &str = "dtypes";
    /// Fingerprint of the checkpoint.
    pub const SOURCE: &str = "source";
    /// What matrices became.
    pub const WEIGHTS: &str = "weights";
}

/// The layout version of a packed file; `None` for any other file.
pub fn layout_version(source: &Source) -> Option<u32> {
    source.metadata().get(key::LAYOUT).map(|v| v.parse().unwrap_or(0))
}

/// What the matrices of a packed file became, as a name.
pub fn weight_type(source: &Source) -> Option<&str> {
    layout_version(source)?;
    source.metadata().get(key::WEIGHTS).map(String::as_str)
}

/// The metadata of the GGUF file that a packed file was made from.
///
/// # Errors
///
/// [`Error::Model`](crate::Error::Model) if they are not those of a GGUF file.
pub fn gguf(source: &Source) -> Result<Option<Gguf>> {
    let found = source.get(GGUF).filter(|_| layout_version(source).is_some());
    found.map(|tensor| Gguf::within(source.path(), tensor.data.clone())).transpose()
}
