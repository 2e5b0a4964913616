//! An opened model file of either kind, and its tensors by the engine's names.

use super::spec::{HEAD, Role, Spec};
use super::weight_type::WeightType;
use crate::dims::{ARCH, HEAD_DIM, TIED};
use files::blocks::{BlockType, Dtype};
use files::bundle::Bundle;
use files::mapped::Plane;
use files::packed_file;
use files::source::gguf::names::{Rows, stored};
use files::source::gguf::{self, Gguf, is_gguf};
use files::source::{Source, Tensor};
use files::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// An opened model file.
#[derive(Debug)]
pub enum Checkpoint {
    /// Safetensors, whole or in shards; also a packed file.
    Safetensors(Source),
    Gguf(Gguf),
}

/// A tensor as the file stores it. Its shape has been checked.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The file's name for it.
    pub name: String,
    pub block: BlockType,
    /// The order of its rows in the file.
    pub order: Rows,
    /// `[rows][cols / block.values()][block.bytes()]`
    pub data: Plane,
    pub file: Arc<Path>,
    row_bytes: usize,
}

impl Stored {
    /// The bytes of the matrix's row `row`, wherever it is in the file.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.data.bytes()[self.order.stored(row) * self.row_bytes..][..self.row_bytes]
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The element type; `None` for blocks.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::of(self.block)
    }
}

impl Checkpoint {
    /// Opens a `.gguf` file, a bundle, or anything that [`Source::open`] takes.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], one line.
    pub fn open(path: &Path) -> Result<Self> {
        if is_gguf(path) {
            Gguf::open(path).map(Checkpoint::Gguf)
        } else if let Some(bundle) = Bundle::open(path)? {
            bundle.packed().map(Checkpoint::Safetensors)
        } else {
            Source::open(path).map(Checkpoint::Safetensors)
        }
    }

    /// The opened file or directory.
    pub fn path(&self) -> &Path {
        match self {
            Checkpoint::Safetensors(source) => source.path(),
            Checkpoint::Gguf(gguf) => gguf.path(),
        }
    }

    /// Identifies the content.
    pub fn fingerprint(&self) -> String {
        match self {
            Checkpoint::Safetensors(source) => source.fingerprint(),
            Checkpoint::Gguf(gguf) => gguf.fingerprint(),
        }
    }

    /// The GGUF file, if it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        match self {
            Checkpoint::Safetensors(_) => None,
            Checkpoint::Gguf(gguf) => Some(gguf),
        }
    }

    /// The packed file, if it is one.
    pub fn packed(&self) -> Option<&Source> {
        match self {
            Checkpoint::Safetensors(source) => packed_file::layout_version(source).map(|_| source),
            Checkpoint::Gguf(_) => None,
        }
    }

    /// Resolves [`WeightType::Auto`] for this file; a packed file stays as it is.
    pub fn settle(&self, weight_type: WeightType) -> WeightType {
        match self {
            _ if weight_type != WeightType::Auto => weight_type,
            Checkpoint::Gguf(_) => WeightType::Native,
            Checkpoint::Safetensors(source) => {
                let found = packed_file::weight_type(source).and_then(|name| name.parse().ok());
                found.filter(|t| *t != WeightType::Auto).unwrap_or(WeightType::Q4_0)
            }
        }
    }

    /// Checks that a packed file has this type of weights, which is not [`WeightType::Auto`].
    ///
    /// # Errors
    ///
    /// [`Error::Usage`]: it has another.
    pub fn check_packed_as(&self, weight_type: WeightType) -> Result<()> {
        let found = self.settle(WeightType::Auto);
        if self.packed().is_none() || weight_type == found {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "`EngineOptions::weight_type` {weight_type}: {} is packed as {found}; give the checkpoint it was packed from",
            self.path().display()
        )))
    }

    /// The stored tensor of a spec.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if it is missing, or has a wrong shape or type.
    pub fn find(&self, spec: &Spec) -> Result<Stored> {
        let stored = match self {
            Checkpoint::Safetensors(source) => of_source(source, spec)?,
            Checkpoint::Gguf(gguf) => of_gguf(gguf, spec)?,
        };
        if spec.role == Role::Vector && stored.dtype().is_none() {
            return Err(unreadable(&stored.file, &stored.name, &stored.block.name()));
        }
        Ok(stored)
    }
}

fn unreadable(file: &Path, name: &str, found: &str) -> Error {
    Error::model(file, format!("tensor {name} has type {found}; supported: F32, F16, BF16"))
}

/// Compares a tensor's shape with the one that the config asks for.
fn check_shape(file: &Path, spec: &Spec, name: &str, found: &[usize], config: &str) -> Result<()> {
    let want = if spec.role == Role::Vector { vec![spec.cols] } else { vec![spec.rows, spec.cols] };
    if found == want {
        return Ok(());
    }
    Err(Error::model(file, format!("tensor {name} has shape {found:?}; {config} it {want:?}")))
}

fn of_source(source: &Source, spec: &Spec) -> Result<Stored> {
    if spec.name == HEAD && !TIED && source.get(HEAD).is_none() {
        let hint = "if the embedding serves as the head, config.json must say tie_word_embeddings: true";
        return Err(Error::model(source.path(), format!("tensor {HEAD} is missing; {hint}")));
    }
    let Tensor { dtype, shape, data, file, .. } = source.require(&spec.stored_as)?;
    let (name, data, file) = (spec.stored_as.clone(), data.clone(), file.clone());
    check_shape(&file, spec, &name, shape, "config.json makes")?;
    let block = dtype.block().ok_or_else(|| unreadable(&file, &name, &format!("{dtype:?}")))?;
    Ok(Stored { name, block, order: Rows::Plain, data, file, row_bytes: block.row_bytes(spec.cols) })
}

fn of_gguf(gguf: &Gguf, spec: &Spec) -> Result<Stored> {
    let name = stored(&spec.stored_as).unwrap_or_else(|| spec.stored_as.clone());
    let gguf::Tensor { block, shape, data, file, .. } = gguf.require(&name)?.clone();
    check_shape(&file, spec, &name, &shape, "the metadata make")?;
    let order = Rows::of(ARCH, &spec.stored_as, HEAD_DIM);
    Ok(Stored { name, block, order, data, file, row_bytes: block.row_bytes(spec.cols) })
}
