//! What matrices become when a model is loaded, and how each tensor is kept.

use super::spec::{Role, Spec};
use crate::dims::TIED;
use files::Error;
use files::blocks::BLOCK;
use files::source::Dtype;
use files::source::gguf::block::BlockType;
use numeric::quant::format::{Format, GROUP_ROWS};
use std::fmt;
use std::str::FromStr;

/// What matrices become when a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightType {
    /// As the file is meant: native for a GGUF file, Q4_0 for safetensors; a packed file as it is.
    #[default]
    Auto,
    /// As stored, never quantised anew: blocks in the layout that kernels read, elements as they are.
    Native,
    /// Quantised to Q4_0 where rows are whole blocks; stored Q4_0 stays as it is.
    Q4_0,
    /// Computed in f32: elements as stored, blocks decoded to f32 in memory. The reference.
    F32,
}

impl WeightType {
    /// All of them, by what the command line calls them.
    const NAMES: [(&str, WeightType); 4] = [
        ("auto", WeightType::Auto),
        ("native", WeightType::Native),
        ("q4_0", WeightType::Q4_0),
        ("f32", WeightType::F32),
    ];
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let s = if s == "q4" { "q4_0" } else { s };
        let found = Self::NAMES.iter().find(|(name, _)| *name == s);
        found
            .map(|(_, t)| *t)
            .ok_or_else(|| Error::Usage(format!("--weight-type {s}: use auto, native, q4_0 or f32")))
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::NAMES.iter().find(|(_, t)| t == self);
        f.write_str(found.map_or("", |(name, _)| name))
    }
}

/// How a tensor is kept, in memory and in a packed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Blocks in the packed layout: two planes.
    Blocks(Format),
    /// Row-major in one plane: elements, or the stored blocks of an embedding.
    Rows(BlockType),
    /// An embedding of which nothing is kept, as the output projection has its values.
    Head,
}

/// What a packed file's metadata call [`Form::Head`].
const HEAD_NAME: &str = "head";

impl Form {
    /// What a tensor stored as `block` becomes. (A checkpoint has settled what [`WeightType::Auto`] is.)
    pub fn of(spec: &Spec, block: BlockType, weight_type: WeightType) -> Form {
        match spec.role {
            Role::Vector => Form::Rows(BlockType::F32),
            Role::Matrix => Form::of_matrix(spec.cols, block, weight_type),
            // Only quantising would change the values.
            Role::Embedding => match Form::of_matrix(spec.cols, block, weight_type) {
                Form::Blocks(format) if format.block() != block => Form::Rows(block),
                _ if TIED => Form::Head,
                _ => Form::Rows(block),
            },
        }
    }

    fn of_matrix(cols: usize, block: BlockType, weight_type: WeightType) -> Form {
        match weight_type {
            WeightType::Q4_0 if cols.is_multiple_of(BLOCK) => Form::Blocks(Format::Q4_0),
            WeightType::F32 if Dtype::of(block).is_none() => Form::Rows(BlockType::F32),
            WeightType::F32 => Form::Rows(block),
            _ => Format::of(block).map_or(Form::Rows(block), Form::Blocks),
        }
    }

    /// The name that a packed file's metadata have for it; none where the reader knows without.
    pub fn name(self, spec: &Spec) -> Option<String> {
        match self {
            Form::Blocks(Format::Q4_0) => None,
            Form::Blocks(format) => Some(format.block().name()),
            Form::Rows(_) if spec.role == Role::Vector => None,
            Form::Rows(block) => Some(block.name()),
            Form::Head => Some(HEAD_NAME.into()),
        }
    }

    /// The form that `name` stands for; none if this tensor cannot have it.
    pub fn from_name(spec: &Spec, name: Option<&str>) -> Option<Form> {
        let Some(name) = name else {
            return match spec.role {
                Role::Matrix if spec.quantises() => Some(Form::Blocks(Format::Q4_0)),
                _ => Some(Form::Rows(BlockType::F32)),
            };
        };
        if name == HEAD_NAME {
            return (spec.role == Role::Embedding && TIED).then_some(Form::Head);
        }
        let block = BlockType::ALL.into_iter().find(|block| block.name() == name)?;
        let format = Format::of(block);
        let form = match spec.role {
            Role::Vector => return None,
            Role::Embedding => Form::Rows(block),
            Role::Matrix if block == BlockType::Q4_0 => return None,
            Role::Matrix => format.map_or(Form::Rows(block), Form::Blocks),
        };
        spec.cols.is_multiple_of(block.values()).then_some(form)
    }

    /// Bytes of the planes of one group of sixteen rows: quants (or rows), and scales.
    pub fn group_bytes(self, cols: usize) -> (usize, usize) {
        match self {
            Form::Blocks(format) => format.group_bytes(cols),
            Form::Rows(block) => (GROUP_ROWS * row_bytes(block, cols), 0),
            Form::Head => (0, 0),
        }
    }

    /// Bytes of both planes. No product overflows: they are of dimensions that `config` has limited.
    pub fn bytes(self, spec: &Spec) -> (usize, usize) {
        match self {
            Form::Rows(block) => (spec.rows.saturating_mul(row_bytes(block, spec.cols)), 0),
            _ => {
                let (groups, (quants, scales)) =
                    (spec.rows.div_ceil(GROUP_ROWS), self.group_bytes(spec.cols));
                (groups.saturating_mul(quants), groups.saturating_mul(scales))
            }
        }
    }
}

/// Bytes of a stored row, whole blocks.
pub fn row_bytes(block: BlockType, cols: usize) -> usize {
    cols / block.values() * block.bytes()
}
