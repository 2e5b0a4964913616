//! How a tensor is stored, in memory and in a packed file.

use super::calibration::Calibration;
use super::spec::{Role, Spec};
use super::weight_type::WeightType;
use files::blocks::{BLOCK, BlockType, Dtype};
use files::mapped::Plane;
use numeric::quant::format::{Format, GROUP_ROWS};
use std::collections::HashMap;
use std::path::PathBuf;

/// How a tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Blocks in the packed layout: a plane of quants and one of scales.
    Blocks(Format),
    /// One row-major plane: elements, or the unchanged blocks of an embedding. A vector is elements of f32.
    Rows(BlockType),
    /// No planes: an embedding whose values the output projection holds.
    Head,
}

/// A tensor, ready for use.
pub struct Loaded {
    pub storage: Storage,
    /// As [`Storage::parts`] lists them.
    pub planes: Vec<Plane>,
}

/// All tensors of a model.
pub struct LoadedModel {
    /// By [`Spec::name`].
    pub tensors: HashMap<String, Loaded>,
    /// What a packed file holds of them.
    pub calibration: Option<Calibration>,
    /// What matrices became; never [`WeightType::Auto`].
    pub weight_type: WeightType,
    /// Identifies the checkpoint.
    pub fingerprint: String,
    /// The file to name in errors.
    pub file: PathBuf,
}

/// One plane of a tensor.
pub struct Part {
    /// What follows the tensor's name in a packed file.
    pub suffix: &'static str,
    /// Bytes.
    pub len: usize,
}

/// Bytes that a plane begins at a multiple of.
const ALIGN: usize = 64;

/// The bytes that a plane takes in a packed file, or among others in memory.
pub fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// The name of [`Storage::Head`] in a packed file's metadata.
const HEAD_NAME: &str = "head";

impl Storage {
    /// How a tensor that the file stores as `block` is stored after loading; `weight_type` is not `Auto`.
    pub fn of(spec: &Spec, block: BlockType, weight_type: WeightType) -> Storage {
        match spec.role {
            Role::Vector => Storage::Rows(BlockType::F32),
            Role::Matrix => Storage::of_matrix(spec.cols, block, weight_type),
            // Only quantising would change the values.
            Role::Embedding => match Storage::of_matrix(spec.cols, block, weight_type) {
                Storage::Blocks(format) if format.block() != block => Storage::Rows(block),
                _ if spec.tied => Storage::Head,
                _ => Storage::Rows(block),
            },
            Role::Positions => Storage::Rows(block),
        }
    }

    fn of_matrix(cols: usize, block: BlockType, weight_type: WeightType) -> Storage {
        match weight_type {
            WeightType::Q4_0 if cols.is_multiple_of(BLOCK) => Storage::Blocks(Format::Q4_0),
            WeightType::F32 if Dtype::of(block).is_none() => Storage::Rows(BlockType::F32),
            WeightType::F32 => Storage::Rows(block),
            _ => Format::of(block).map_or(Storage::Rows(block), Storage::Blocks),
        }
    }

    /// Its name in a packed file's metadata; `None` where it is the default, which is left out.
    pub fn name(self, spec: &Spec) -> Option<String> {
        match self {
            Storage::Blocks(Format::Q4_0) => None,
            Storage::Blocks(format) => Some(format.block().name()),
            Storage::Rows(_) if spec.role == Role::Vector => None,
            Storage::Rows(block) => Some(block.name()),
            Storage::Head => Some(HEAD_NAME.into()),
        }
    }

    /// The storage that [`Storage::name`] stands for; `None` if this tensor cannot have it.
    pub fn from_name(spec: &Spec, name: Option<&str>) -> Option<Storage> {
        let Some(name) = name else {
            let storage =
                if spec.quantises() { Storage::Blocks(Format::Q4_0) } else { Storage::Rows(BlockType::F32) };
            return Some(storage);
        };
        if name == HEAD_NAME {
            return (spec.role == Role::Embedding && spec.tied).then_some(Storage::Head);
        }
        let block = BlockType::ALL.into_iter().find(|block| block.name() == name)?;
        let storage = match spec.role {
            Role::Embedding | Role::Positions => Storage::Rows(block),
            Role::Matrix if block != BlockType::Q4_0 => {
                Format::of(block).map_or(Storage::Rows(block), Storage::Blocks)
            }
            _ => return None,
        };
        spec.cols.is_multiple_of(block.values()).then_some(storage)
    }

    /// Bytes of a group of sixteen rows: quants (or rows), and scales.
    pub fn group_bytes(self, cols: usize) -> (usize, usize) {
        match self {
            Storage::Blocks(format) => format.group_bytes(cols),
            Storage::Rows(block) => (GROUP_ROWS * block.row_bytes(cols), 0),
            Storage::Head => (0, 0),
        }
    }

    /// The tensor's planes.
    pub fn parts(self, spec: &Spec) -> Vec<Part> {
        let (quants, scales) = self.group_bytes(spec.cols);
        let groups = spec.rows.div_ceil(GROUP_ROWS);
        match self {
            Storage::Rows(block) => {
                vec![Part { suffix: "", len: spec.rows.saturating_mul(block.row_bytes(spec.cols)) }]
            }
            Storage::Blocks(_) => vec![
                Part { suffix: ".quants", len: groups.saturating_mul(quants) },
                Part { suffix: ".scales", len: groups.saturating_mul(scales) },
            ],
            Storage::Head => Vec::new(),
        }
    }

    /// Bytes of all planes, each padded.
    pub fn room(self, spec: &Spec) -> usize {
        self.parts(spec).iter().map(|part| padded(part.len)).fold(0, usize::saturating_add)
    }

    /// The planes in the [`Storage::room`] bytes of `memory` from `at` on.
    pub fn planes(self, spec: &Spec, memory: &Plane, mut at: usize) -> Vec<Plane> {
        let plane = |part: Part| {
            let plane = memory.slice(at..at + part.len);
            at += padded(part.len);
            plane.expect("invariant: there is room for all planes")
        };
        self.parts(spec).into_iter().map(plane).collect()
    }
}
