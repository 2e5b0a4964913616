//! GGUF files, versions 2 and 3, as named tensors over a mapped file, with their metadata.
//!
//! Like safetensors they come from strangers: [`header`] checks everything that a file says about itself before a
//! tensor is handed out. A tensor's bytes are inside its file and as many as its type and shape say; nothing is
//! known about their alignment in memory or their values. The parser is written here, on bounded reads of slices:
//! what crates there are allocate by the file's own counts or read whole files.
//!
//! The modules below are compiled twice: `build.rs` bakes dimensions from a header with the same code.

pub mod block;
pub mod cursor;
pub mod header;
pub mod metadata;
pub mod model;
pub mod names;
pub mod value;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::quoted::quoted;
use crate::blocks::gguf::decode;
use crate::config::ModelConfig;
use crate::mapped::{Plane, map_file};
use crate::{Error, Result};
use block::BlockType;
use header::Header;
use metadata::Metadata;

/// An opened file.
#[derive(Debug)]
pub struct Gguf {
    file: Arc<Path>,
    header: Header,
    tensors: BTreeMap<String, Tensor>,
    plane: Plane,
}

/// One tensor: row-major, at any alignment in memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// As in the file, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// How its values are stored; each row is whole blocks.
    pub block: BlockType,
    /// A matrix is `[rows, cols]`, a vector `[len]`; no dimension is 0.
    pub shape: Vec<usize>,
    /// As many bytes as shape and block ask for: `[rows][cols / block.values()][block.bytes()]`.
    pub data: Plane,
    /// Where it comes from.
    pub file: Arc<Path>,
}

impl Gguf {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] in one line with the file's name: it is no regular file, or the field and value that are
    /// wrong or not supported.
    pub fn open(path: &Path) -> Result<Gguf> {
        Self::within(path, map_file(path)?)
    }

    /// A file whose content is `plane`, in the file at `path`.
    ///
    /// # Errors
    ///
    /// As of [`Gguf::open`].
    pub fn within(path: &Path, plane: Plane) -> Result<Gguf> {
        let file: Arc<Path> = path.into();
        let bytes = plane.bytes();
        let header = Header::parse(bytes, bytes.len() as u64).map_err(|e| {
            Error::model(
                path,
                format_args!("{e}; use a whole GGUF file of a supported kind, downloaded again"),
            )
        })?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in &header.tensors {
            let data = plane.slice(entry.range.clone()).expect("the header's ranges are inside the file");
            let (name, block, shape, file) = (name.clone(), entry.block, entry.shape.clone(), file.clone());
            tensors.insert(name.clone(), Tensor { name, block, shape, data, file });
        }
        Ok(Gguf { file, header, tensors, plane })
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Bytes of the header, most of them the tokenizer's.
    pub fn header_len(&self) -> usize {
        self.header.len
    }

    /// The pairs of the header.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// Dimensions and switches of the model.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] with the key or tensor that is missing, wrong or not supported.
    pub fn config(&self) -> Result<ModelConfig> {
        model::config(&self.header, |range| self.plane.bytes()[range].to_vec())
            .map_err(|e| Error::model(&self.file, e))
    }

    /// The tensor of that name, if it is there.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The tensor of that name.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if there is none.
    pub fn require(&self, name: &str) -> Result<&Tensor> {
        self.get(name).ok_or_else(|| {
            let missing = format_args!("tensor {} is missing; download the whole model", quoted(name));
            Error::model(&self.file, missing)
        })
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// A file with the same metadata and no tensors.
    pub fn without_tensors(&self) -> Vec<u8> {
        self.header.without_tensors(self.plane.bytes())
    }

    /// An id of the content, as [`Source::fingerprint`](super::Source::fingerprint) makes it.
    pub fn fingerprint(&self) -> String {
        super::fingerprint(std::iter::once((self.plane.bytes(), self.header.len)))
    }
}

impl Tensor {
    /// All values, row-major, decoded as [`decode`] does it.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.data.bytes().len() / self.block.bytes() * self.block.values()];
        decode(self.block, self.data.bytes(), &mut values);
        values
    }

    /// Row `row`, counted over all dimensions but the last, as it is stored.
    ///
    /// # Panics
    ///
    /// There is no such row.
    pub fn row(&self, row: usize) -> &[u8] {
        let cols = self.shape.last().copied().unwrap_or(0);
        let len = cols / self.block.values() * self.block.bytes();
        &self.data.bytes()[row * len..][..len]
    }
}
