//! Writes a bundle around a packed model.

use super::{ALIGN, HEAD, MARK, MARK_LEN, MODEL_ALIGN, VERSION, format_crc, key};
use crate::mapped::map_file;
use crate::packed_file::{self, PACKED_NAME};
use crate::source::Safetensors;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Name of the tensor that pads the packed model to its alignment.
pub(super) const PADDING: &str = "padding";

/// A bundle that still lacks its packed model, which is written next, and its table.
pub struct BundleWriter<'a> {
    file: &'a File,
    /// Offset of the mark, in bytes.
    start: u64,
    /// Offset of the packed model, in bytes.
    pub model: u64,
    tensors: Map<String, Value>,
    metadata: Map<String, Value>,
}

impl<'a> BundleWriter<'a> {
    /// Writes the program and the text files.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn new(file: &'a File, program: &[u8], files: &[(String, Vec<u8>)]) -> io::Result<Self> {
        let start = (program.len() as u64).next_multiple_of(ALIGN);
        let data = start + HEAD as u64;
        let (mut tensors, mut metadata, mut len) = (Map::new(), Map::new(), 0);
        let mut bytes = program.to_vec();
        bytes.resize(data as usize, 0);
        for (name, content) in files {
            tensors.insert(name.clone(), tensor_json(len, content.len() as u64));
            metadata.insert(name.clone(), format_crc(content).into());
            bytes.extend(content);
            len += content.len() as u64;
        }
        let model = (data + len).next_multiple_of(MODEL_ALIGN);
        tensors.insert(PADDING.into(), tensor_json(len, model - data - len));
        bytes.resize(model as usize, 0);
        let mut to = file;
        to.write_all(&bytes)?;
        Ok(Self { file, start, model, tensors, metadata })
    }

    /// Writes the table, after the packed model has been written to the file, which is now at `path`. Returns the
    /// bundle's size in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Other`]: the file cannot be written. [`Error::Model`]: the packed model is not valid.
    pub fn finish(mut self, path: &Path) -> Result<u64> {
        let fail = |e: io::Error| Error::io(path, format_args!("cannot write: {e}"));
        let whole = map_file(path)?;
        let len = whole.bytes().len();
        let plane = whole.slice(self.model as usize..len);
        let plane = plane.ok_or_else(|| fail(io::Error::other("the file ends before the model")))?;
        let source = Safetensors::open_embedded(path, plane.clone())?;
        let header = plane.bytes().first_chunk().map_or(0, |n| 8 + u64::from_le_bytes(*n));
        let mut put = |key: &str, value: String| self.metadata.insert(key.into(), value.into());
        put(PACKED_NAME, format_crc(plane.bytes()));
        put(key::HEADER, header.to_string());
        put(key::FINGERPRINT, source.hash_files());
        if let Some(gguf) = source.get(packed_file::GGUF_TENSOR) {
            put(key::GGUF, format_crc(gguf.data.bytes()));
        }
        let from = self.model - self.start - HEAD as u64;
        self.tensors.insert(PACKED_NAME.into(), tensor_json(from, plane.bytes().len() as u64));
        self.tensors.insert("__metadata__".into(), self.metadata.into());
        let mut table = Value::Object(self.tensors);
        table.sort_all_objects();
        let head = build_head(table.to_string().into_bytes());
        head.and_then(|head| self.file.write_all_at(&head, self.start)).map_err(fail)?;
        Ok(len as u64)
    }
}

fn tensor_json(start: u64, len: u64) -> Value {
    json!({"dtype": "U8", "shape": [len], "data_offsets": [start, start + len]})
}

/// Builds the mark and the table.
fn build_head(mut json: Vec<u8>) -> io::Result<Vec<u8>> {
    let room = HEAD - MARK_LEN - 8;
    if json.len() > room {
        return Err(io::Error::other("the table of its files is too long"));
    }
    json.resize(room, b' ');
    let table = [&(room as u64).to_le_bytes()[..], &json].concat();
    let checksum = crc32fast::hash(&table).to_le_bytes();
    Ok([MARK, &VERSION.to_le_bytes()[..], &checksum, &[0; 4], &table].concat())
}
