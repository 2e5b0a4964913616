//! An opened model file of either kind, and its tensors by the engine's names.

use super::pack;
use super::spec::{HEAD, Role, Spec};
use super::weight_type::{WeightType, row_bytes};
use crate::dims::{ARCH, HEAD_DIM, TIED};
use files::mapped::Plane;
use files::source::gguf::block::BlockType;
use files::source::gguf::names::{Rows, stored};
use files::source::gguf::{self, Gguf};
use files::source::{Dtype, Source, Tensor};
use files::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// An opened model.
pub enum Checkpoint {
    /// Safetensors, whole or in shards; a packed file too.
    Safetensors(Source),
    /// A GGUF file.
    Gguf(Gguf),
}

/// A tensor as it is stored, its shape checked.
#[derive(Debug, Clone)]
pub struct Stored {
    /// As the file calls it.
    pub name: String,
    /// How its values are stored.
    pub block: BlockType,
    /// Which stored row is which.
    pub order: Rows,
    /// `[rows][cols / block.values()][block.bytes()]`
    pub data: Plane,
    /// Where it comes from.
    pub file: Arc<Path>,
    row_bytes: usize,
}

impl Stored {
    /// Row `row` of the matrix, wherever the file has it.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.data.bytes()[self.order.stored(row) * self.row_bytes..][..self.row_bytes]
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Elements have a type; blocks have none.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::of(self.block)
    }
}

/// Whether a path is that of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

impl Checkpoint {
    /// Opens a `.gguf` file, or what [`Source::open`] takes.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] in one line.
    pub fn open(path: &Path) -> Result<Self> {
        match is_gguf(path) {
            true => Gguf::open(path).map(Checkpoint::Gguf),
            false => Source::open(path).map(Checkpoint::Safetensors),
        }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        match self {
            Checkpoint::Safetensors(source) => source.path(),
            Checkpoint::Gguf(gguf) => gguf.path(),
        }
    }

    /// An id of the content.
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
            Checkpoint::Safetensors(source) => files::packed_file::layout_version(source).map(|_| source),
            Checkpoint::Gguf(_) => None,
        }
    }

    /// What [`WeightType::Auto`] is for this file; the others are what they are.
    pub fn settle(&self, weight_type: WeightType) -> WeightType {
        match (weight_type, self) {
            (WeightType::Auto, Checkpoint::Gguf(_)) => WeightType::Native,
            (WeightType::Auto, Checkpoint::Safetensors(source)) => pack::weight_type(source),
            (other, _) => other,
        }
    }

    /// The stored tensor of a spec.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if it is missing, of another shape or of a type that cannot be its.
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

/// The shape that a spec's tensor has in a file.
fn shape(spec: &Spec) -> Vec<usize> {
    if spec.role == Role::Vector { vec![spec.cols] } else { vec![spec.rows, spec.cols] }
}

fn of_source(source: &Source, spec: &Spec) -> Result<Stored> {
    if spec.name == HEAD && !TIED && source.get(HEAD).is_none() {
        let hint = "if the embedding serves as the head, config.json must say tie_word_embeddings: true";
        return Err(Error::model(source.path(), format!("tensor {HEAD} is missing; {hint}")));
    }
    let Tensor { dtype, shape: found, data, file, .. } = source.require(&spec.stored_as)?;
    let (name, want) = (spec.stored_as.clone(), shape(spec));
    if *found != want {
        let message = format!("tensor {name} has shape {found:?}; config.json makes it {want:?}");
        return Err(Error::model(file, message));
    }
    let Some(block) = dtype.block() else { return Err(unreadable(file, &name, &format!("{dtype:?}"))) };
    let row_bytes = row_bytes(block, spec.cols);
    Ok(Stored { name, block, order: Rows::Plain, data: data.clone(), file: file.clone(), row_bytes })
}

fn of_gguf(gguf: &Gguf, spec: &Spec) -> Result<Stored> {
    let name = stored(&spec.stored_as).unwrap_or_else(|| spec.stored_as.clone());
    let gguf::Tensor { block, shape: found, data, file, .. } = gguf.require(&name)?;
    let want = shape(spec);
    if *found != want {
        let message = format!("tensor {name} has shape {found:?}; the metadata make it {want:?}");
        return Err(Error::model(file, message));
    }
    let order = Rows::of(ARCH, &spec.stored_as, HEAD_DIM);
    let row_bytes = row_bytes(*block, spec.cols);
    Ok(Stored { name, block: *block, order, data: data.clone(), file: file.clone(), row_bytes })
}
