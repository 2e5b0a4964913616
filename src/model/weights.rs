//! A model's weights: one table of names and shapes ([`spec`]), three ways to fill it.
//!
//! Hugging Face safetensors and GGUF files are read in place ([`checkpoint`]); matrices are packed in parallel
//! ([`convert`]), Q4_0 and GGUF's other blocks bit for bit, elements quantised to Q4_0 or used as they are, as the
//! [`weight_type`] says. A packed file (`antigravity pack`) is mapped: no copy, no conversion.

pub mod checkpoint;
pub mod convert;
mod model_path;
pub mod pack;
pub mod spec;
pub mod weight_type;

pub use checkpoint::Checkpoint;
pub use model_path::{ModelPath, check_config};
pub use spec::{Role, Spec, table};
pub use weight_type::{Form, WeightType};

use crate::dims::*;
use files::blocks::gguf::decode;
use files::mapped::Plane;
use files::source::Dtype;
use files::source::gguf::block::BlockType;
use files::{Error, Result};
use numeric::quant::format::Format;
use numeric::quant::matrix::Quantised;
use spec::{EMBED, HEAD};
use std::collections::HashMap;
use std::ops::BitOr;
use std::path::{Path, PathBuf};

/// A matrix that is multiplied with.
pub enum Matrix<const ROWS: usize, const COLS: usize> {
    /// In blocks, in the packed layout.
    Quantised(Quantised<ROWS, COLS>),
    /// Row-major, as stored.
    Dense {
        /// Element type.
        dtype: Dtype,
        /// `[ROWS][COLS]`
        data: Plane,
    },
}

impl<const ROWS: usize, const COLS: usize> Matrix<ROWS, COLS> {
    /// The activations it is multiplied with.
    pub fn reads(&self) -> Reads {
        let floats = matches!(self, Self::Dense { .. });
        Reads { floats, blocks: !floats, tiles: matches!(self, Self::Quantised(w) if w.format() == Format::Q4_0) }
    }

    /// Writes one row's values, exactly, into `x` of `COLS`.
    ///
    /// # Panics
    ///
    /// There is no such row, or `x` has another length.
    pub fn row(&self, row: usize, x: &mut [f32]) {
        match self {
            Matrix::Quantised(w) => w.row(row, x),
            Matrix::Dense { dtype, data } => {
                let bytes = &data.bytes()[row * COLS * dtype.size()..][..COLS * dtype.size()];
                dtype.widen_all(bytes, x);
            }
        }
    }
}

/// In which forms matrices read activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reads {
    /// As floats.
    pub floats: bool,
    /// Quantised, in blocks.
    pub blocks: bool,
    /// These laid out in tiles too, where the instruction set has any.
    pub tiles: bool,
}

impl BitOr for Reads {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            floats: self.floats | other.floats,
            blocks: self.blocks | other.blocks,
            tiles: self.tiles | other.tiles,
        }
    }
}

/// The embedding matrix: `[VOCAB][DIM]`.
enum Embedding {
    /// As stored, elements or blocks.
    Rows { block: BlockType, data: Plane },
    /// The rows of the output projection.
    Head,
}

/// One transformer block. Biases and norms that the model lacks are empty.
#[allow(missing_docs, reason = "the field names are the steps' names")]
pub struct Layer {
    pub attn_norm: Vec<f32>,
    pub wq: Matrix<Q_DIM, DIM>,
    pub wk: Matrix<KV_DIM, DIM>,
    pub wv: Matrix<KV_DIM, DIM>,
    pub q_bias: Vec<f32>,
    pub k_bias: Vec<f32>,
    pub v_bias: Vec<f32>,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub wo: Matrix<DIM, Q_DIM>,
    pub o_bias: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    pub gate: Matrix<FFN_DIM, DIM>,
    pub up: Matrix<FFN_DIM, DIM>,
    pub down: Matrix<DIM, FFN_DIM>,
}

impl Layer {
    /// What the matrices read that take the normed residual.
    pub fn read_normed(&self) -> Reads {
        self.wq.reads() | self.wk.reads() | self.wv.reads() | self.gate.reads() | self.up.reads()
    }
}

/// All weights of the baked model.
pub struct Weights {
    embed: Embedding,
    /// Transformer blocks.
    pub layers: Vec<Layer>,
    /// Final norm.
    pub norm: Vec<f32>,
    /// Output projection.
    pub head: Matrix<VOCAB, DIM>,
    /// Bytes that every decoded token reads.
    pub bytes_per_token: usize,
    /// Identifies the checkpoint these weights came from.
    pub fingerprint: String,
    /// What matrices became; never [`WeightType::Auto`].
    pub weight_type: WeightType,
}

/// One tensor, loaded.
pub(crate) enum Loaded {
    Quantised {
        format: Format,
        quants: Plane,
        scales: Plane,
    },
    /// `[rows][cols / block.values()][block.bytes()]`
    Rows {
        block: BlockType,
        data: Plane,
    },
    Vector(Vec<f32>),
    /// [`Form::Head`]
    Head,
}

/// How loading is told of.
pub struct LoadOptions<'a> {
    /// What matrices become.
    pub weight_type: WeightType,
    /// Threads for packing.
    pub threads: usize,
    /// Called with the tensors done and all tensors.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
}

impl Weights {
    /// Loads the model that `path` names, after comparing its config with the baked one.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: a file cannot be used. [`Error::Usage`]: a packed file has other weights than asked for.
    /// [`Error::Memory`]: there is not enough.
    pub fn load(path: &ModelPath, options: &LoadOptions<'_>) -> Result<Self> {
        let checkpoint = path.open(options.weight_type)?;
        path.config_of(&checkpoint)?;
        let Some(packed) = checkpoint.packed() else {
            return Self::from_checkpoint(&checkpoint, options);
        };
        let (wanted, found) = (checkpoint.settle(options.weight_type), pack::weight_type(packed));
        if wanted != found {
            return Err(Error::Usage(format!(
                "--weight-type {wanted}: {} is packed as {found}; give the checkpoint it was packed from",
                packed.path().display()
            )));
        }
        pack::read(packed)
    }

    /// Writes a token's embedding, exactly, into `x` of `DIM` values.
    ///
    /// # Panics
    ///
    /// There is no such token, or `x` has another length.
    pub fn embed(&self, token: usize, x: &mut [f32]) {
        match &self.embed {
            Embedding::Head => self.head.row(token, x),
            Embedding::Rows { block, data } => {
                let len = weight_type::row_bytes(*block, DIM);
                decode(*block, &data.bytes()[token * len..][..len], x);
            }
        }
    }

    fn from_checkpoint(checkpoint: &Checkpoint, options: &LoadOptions<'_>) -> Result<Self> {
        let (specs, weight_type) = (table(), checkpoint.settle(options.weight_type));
        let mut loaded = HashMap::with_capacity(specs.len());
        for (i, spec) in specs.iter().enumerate() {
            (options.progress)(i, specs.len());
            loaded.insert(spec.name.clone(), convert::load_one(checkpoint, spec, weight_type, options)?);
        }
        (options.progress)(specs.len(), specs.len());
        let file = checkpoint.path().into();
        Assembly { loaded, file, weight_type }.assemble(checkpoint.fingerprint())
    }
}

/// Reads a small text file that a person may have broken.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    const LIMIT: u64 = 16 << 20;
    let meta = std::fs::metadata(path).map_err(|e| Error::model(path, format!("cannot read: {e}")))?;
    if !meta.is_file() {
        return Err(Error::model(path, "is not a regular file"));
    }
    if meta.len() > LIMIT {
        return Err(Error::model(path, format!("is {} bytes long; at most {LIMIT} are read", meta.len())));
    }
    std::fs::read_to_string(path).map_err(|e| Error::model(path, format!("cannot read: {e}")))
}

/// Loaded tensors on their way into typed places.
pub(crate) struct Assembly {
    pub loaded: HashMap<String, Loaded>,
    pub file: PathBuf,
    pub weight_type: WeightType,
}

impl Assembly {
    fn matrix<const ROWS: usize, const COLS: usize>(&mut self, name: &str) -> Result<Matrix<ROWS, COLS>> {
        match self.loaded.remove(name) {
            Some(Loaded::Quantised { format, quants, scales }) => {
                Quantised::new(format, quants, scales).map(Matrix::Quantised)
            }
            Some(Loaded::Rows { block, data }) => Dtype::of(block)
                .filter(|dtype| data.bytes().len() == ROWS * COLS * dtype.size())
                .map(|dtype| Matrix::Dense { dtype, data }),
            _ => None,
        }
        .ok_or_else(|| {
            Error::model(&self.file, format!("tensor {name} does not hold {ROWS} x {COLS} weights"))
        })
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>> {
        match self.loaded.remove(name) {
            Some(Loaded::Vector(v)) => Ok(v),
            None => Ok(Vec::new()),
            Some(_) => Err(Error::model(&self.file, format!("tensor {name} is not a vector"))),
        }
    }

    pub fn assemble(mut self, fingerprint: String) -> Result<Weights> {
        let bytes = |t: &Loaded| match t {
            Loaded::Quantised { quants, scales, .. } => quants.bytes().len() + scales.bytes().len(),
            Loaded::Rows { data, .. } => data.bytes().len(),
            Loaded::Vector(v) => 4 * v.len(),
            Loaded::Head => 0,
        };
        let (embed, row) = match self.loaded.remove(EMBED) {
            Some(Loaded::Rows { block, data })
                if DIM.is_multiple_of(block.values())
                    && data.bytes().len() == VOCAB * weight_type::row_bytes(block, DIM) =>
            {
                (Embedding::Rows { block, data }, weight_type::row_bytes(block, DIM))
            }
            Some(Loaded::Head) if TIED => (Embedding::Head, self.loaded.get(HEAD).map_or(0, bytes) / VOCAB),
            _ => return Err(Error::model(&self.file, format!("tensor {EMBED} is not {VOCAB} x {DIM}"))),
        };
        let bytes_per_token = row + self.loaded.values().map(bytes).sum::<usize>();
        let layers = (0..LAYERS).map(|l| self.layer(l)).collect::<Result<_>>()?;
        let (norm, head) = (self.vector("model.norm.weight")?, self.matrix(HEAD)?);
        let weight_type = self.weight_type;
        Ok(Weights { embed, layers, norm, head, bytes_per_token, fingerprint, weight_type })
    }

    fn layer(&mut self, l: usize) -> Result<Layer> {
        let at = |s: &str| format!("model.layers.{l}.{s}");
        Ok(Layer {
            attn_norm: self.vector(&at("input_layernorm.weight"))?,
            wq: self.matrix(&at("self_attn.q_proj.weight"))?,
            wk: self.matrix(&at("self_attn.k_proj.weight"))?,
            wv: self.matrix(&at("self_attn.v_proj.weight"))?,
            q_bias: self.vector(&at("self_attn.q_proj.bias"))?,
            k_bias: self.vector(&at("self_attn.k_proj.bias"))?,
            v_bias: self.vector(&at("self_attn.v_proj.bias"))?,
            q_norm: self.vector(&at("self_attn.q_norm.weight"))?,
            k_norm: self.vector(&at("self_attn.k_norm.weight"))?,
            wo: self.matrix(&at("self_attn.o_proj.weight"))?,
            o_bias: self.vector(&at("self_attn.o_proj.bias"))?,
            ffn_norm: self.vector(&at("post_attention_layernorm.weight"))?,
            gate: self.matrix(&at("mlp.gate_proj.weight"))?,
            up: self.matrix(&at("mlp.up_proj.weight"))?,
            down: self.matrix(&at("mlp.down_proj.weight"))?,
        })
    }
}
