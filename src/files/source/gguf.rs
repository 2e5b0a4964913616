//! GGUF files, versions 2 and 3: named tensors over a mapped file, and metadata.
//!
//! Files are untrusted, so [`header`] checks everything that a file says about itself before a tensor is handed out. A
//! tensor's bytes are inside its file and as many as its type and shape require. Their alignment in memory and values
//! are not checked. The parser is our own and made of bounded reads: existing crates allocate by the file's own counts
//! or read whole files.

mod cursor;
mod divisors;
mod fields;
pub mod header;
pub mod metadata;
pub mod model;
pub mod names;
mod unread;
pub mod value;

use std::collections::BTreeMap;
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::blocks::BlockType;
use crate::blocks::gguf::decode_values;
use crate::config::ModelConfig;
use crate::error::quote;
use crate::mapped::{MappedSlice, map_file};
use crate::{Error, Result};
use header::GgufHeader;
use metadata::Metadata;

/// An opened file.
#[derive(Debug)]
pub struct Gguf {
    file: Arc<Path>,
    header: GgufHeader,
    tensors: BTreeMap<String, GgufTensor>,
    plane: MappedSlice,
}

/// One tensor: row-major, at any alignment in memory.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// As in the file, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Each row is whole blocks.
    pub block: BlockType,
    /// A matrix is `[rows, cols]`, a vector `[len]`. No dimension is 0.
    pub shape: Vec<usize>,
    /// `[rows][cols / block.values()][block.bytes()]`
    pub data: MappedSlice,
    pub file: Arc<Path>,
}

/// Returns true if this is the path of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

/// Finds the only GGUF file of a directory; `None` if there is none.
///
/// # Errors
///
/// [`Error::Model`]: the directory cannot be read or has several.
pub fn find_only_gguf(dir: &Path) -> Result<Option<PathBuf>> {
    const SHOWN: usize = 5;
    let unreadable =
        |e| Error::model(dir, format!("cannot be read: {e}; check the permissions and the disk"));
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(unreadable)?;
    let mut found: Vec<PathBuf> = entries.iter().map(DirEntry::path).filter(|p| is_gguf(p)).collect();
    if found.len() < 2 {
        return Ok(found.pop());
    }
    found.sort();
    let names = found.iter().take(SHOWN).filter_map(|p| Some(quote(&p.file_name()?.to_string_lossy())));
    let names = names.collect::<Vec<_>>().join(", ");
    let more = if found.len() > SHOWN { ", …" } else { "" };
    Err(Error::model(dir, format!("has {} GGUF files: {names}{more}; name one of them", found.len())))
}

impl Gguf {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], one line: it is not a regular file, or a field has a value that is wrong or not supported.
    pub fn open(path: &Path) -> Result<Gguf> {
        Self::open_embedded(path, map_file(path)?)
    }

    /// Opens a GGUF file that is embedded as `plane` in the file at `path`.
    ///
    /// # Errors
    ///
    /// See [`Gguf::open`].
    pub fn open_embedded(path: &Path, plane: MappedSlice) -> Result<Gguf> {
        let file: Arc<Path> = path.into();
        let remedy = "use a whole GGUF file of a supported kind, downloaded again";
        let header = GgufHeader::parse(plane.bytes())
            .map_err(|e| Error::model(path, format_args!("{e}; {remedy}")))?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in &header.tensors {
            let data = plane.slice(entry.range.clone()).expect("the header's ranges are inside the file");
            let (name, block, shape, file) = (name.clone(), entry.block, entry.shape.clone(), file.clone());
            tensors.insert(name.clone(), GgufTensor { name, block, shape, data, file });
        }
        Ok(Gguf { file, header, tensors, plane })
    }

    /// The opened file.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Bytes of the header, mostly the tokenizer.
    pub fn header_len(&self) -> usize {
        self.header.len
    }

    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// Reads the model's config from the metadata.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: a key or tensor is missing, wrong or not supported.
    pub fn read_config(&self) -> Result<ModelConfig> {
        model::read_config(&self.header, self.plane.bytes()).map_err(|e| Error::model(&self.file, e))
    }

    /// Looks up a tensor by name.
    pub fn get(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.get(name)
    }

    /// Looks up a tensor by name.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is missing.
    pub fn get_required(&self, name: &str) -> Result<&GgufTensor> {
        self.get(name).ok_or_else(|| super::missing_tensor(&self.file, name))
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &GgufTensor> {
        self.tensors.values()
    }

    /// Builds the content of a GGUF file with the same metadata and no tensors.
    pub fn without_tensors(&self) -> Vec<u8> {
        self.header.without_tensors(self.plane.bytes())
    }

    /// Hash of the content, which tells files apart.
    pub fn fingerprint(&self) -> String {
        super::hash_files(std::iter::once((&self.plane, self.header.len)))
    }
}

impl GgufTensor {
    /// Decodes all values, row-major; see [`decode_values`](crate::blocks::gguf::decode_values).
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values =
            vec![0.0; self.data.bytes().len() / self.block.bytes_per_block() * self.block.values_per_block()];
        decode_values(self.block, self.data.bytes(), &mut values);
        values
    }

    /// Stored bytes of row `row`, counted over all dimensions but the last.
    ///
    /// # Panics
    ///
    /// There is no such row.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let len = self.block.row_bytes(self.shape.last().copied().unwrap_or(0));
        &self.data.bytes()[row * len..][..len]
    }
}
