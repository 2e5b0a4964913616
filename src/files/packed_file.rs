//! Metadata of packed files: safetensors files written by `antigravity pack`.

use crate::Result;
use crate::source::Safetensors;
use crate::source::gguf::Gguf;
use std::collections::BTreeMap;

/// Default name in a model's directory.
pub const PACKED_NAME: &str = "model.packed.safetensors";
/// The layout version that this program writes and reads.
pub const LAYOUT_VERSION: u32 = 1;
/// The tensor that holds the header of a GGUF file.
pub const GGUF_TENSOR: &str = "gguf";

/// Metadata keys.
pub mod key {
    /// Names and scales of the adapters that were added, for people; [`SOURCE`] identifies them.
    pub const ADAPTERS: &str = "adapters";
    /// The layout version. Only packed files have this key.
    pub const LAYOUT_VERSION: &str = "antigravity.layout";
    /// Content of a `config.json`.
    pub const CONFIG: &str = "config";
    /// Element types of the tensors that are not stored in the default one; JSON.
    pub const DTYPES: &str = "dtypes";
    /// Fingerprint of the checkpoint with its adapters.
    pub const SOURCE: &str = "source";
    /// Name of the weight type that matrices were converted to.
    pub const WEIGHTS: &str = "weights";
}

/// Reads the layout version of a packed file; `None` for any other file.
pub fn read_layout_version(source: &Safetensors) -> Option<u32> {
    source.metadata().get(key::LAYOUT_VERSION).map(|v| v.parse().unwrap_or(0))
}

/// Reads the name of the weight type of a packed file's matrices.
pub fn read_weight_type(source: &Safetensors) -> Option<&str> {
    read_layout_version(source)?;
    source.metadata().get(key::WEIGHTS).map(String::as_str)
}

/// Reads the types of a packed file's tensors that are not stored in the default one, by the tensors' names. None if
/// they cannot be read.
pub fn read_dtypes(source: &Safetensors) -> BTreeMap<String, String> {
    let dtypes = source.metadata().get(key::DTYPES).and_then(|text| serde_json::from_str(text).ok());
    dtypes.unwrap_or_default()
}

/// Opens the embedded metadata of the GGUF file that a packed file was made from.
///
/// # Errors
///
/// [`Error::Model`](crate::Error::Model): they are not valid GGUF.
pub fn open_gguf_metadata(source: &Safetensors) -> Result<Option<Gguf>> {
    let found = source.get(GGUF_TENSOR).filter(|_| read_layout_version(source).is_some());
    found.map(|tensor| Gguf::open_embedded(source.path(), tensor.data.clone())).transpose()
}
