//! The model's weights in typed structs.
//!
//! One table has the names and shapes ([`spec`]). Safetensors and GGUF files are read in place ([`checkpoint`]), and
//! matrices are converted to the [`weight_type`] ([`convert`]): Q4_0 and GGUF's other blocks bit for bit, elements
//! quantised to Q4_0 or used as they are, after adapters are added ([`lora`]). A packed file ([`pack`]) is mapped: no
//! copy, no conversion.

mod assistant;
pub mod bundle;
mod calibration;
mod checkpoint;
mod config;
mod convert;
mod expert_uses;
mod grid;
mod imatrix;
mod layer;
mod lora;
mod model_path;
mod mtp;
pub mod pack;
mod size;
mod spec;
mod storage;
mod stored_tensor;
mod weight_type;
mod zeros;

pub use assistant::{Assistant, AssistantLayer, DenseMatrix, TokenClusters};
pub use calibration::{Calibration, HeadCalibration, SubtractedMean};
pub use checkpoint::{Checkpoint, ModelFile};
pub use config::load_config;
pub use convert::{Importance, LoadOptions};
pub use expert_uses::ExpertUses;
pub use imatrix::ImportanceFile;
pub use layer::{
    Attention, DeltaNet, FeedForward, Ffn, FfnBranches, Layer, Mamba, Mixer, MixtureOfExperts,
    PerLayerEmbeddings, PerLayerInput, ShortConv,
};
pub use model_path::{ModelPath, OpenModel};
pub use mtp::{MtpBlock, mtp_tensors};
pub use size::WeightBytes;
pub use spec::{TensorRole, TensorSpec, model_tensors};
pub use storage::Storage;
pub use weight_type::WeightType;

use crate::cpu::InputSquares;
use crate::dims::*;
use files::blocks::gguf::decode_values;
use files::blocks::{BlockType, Dtype};
use files::mapped::{AlignedBytes, MappedSlice};
use files::{Error, Result};
pub(crate) use layer::forms_of;
use layer::take_layer;
use numeric::quant::format::GROUP_ROWS;
use numeric::quant::matrix::QuantMatrix;
use spec::{EMBED, HEAD, PER_LAYER_NORM, PER_LAYER_PROJECTION, PER_LAYER_TABLE, POSITIONS};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::{BitOr, Range};
use std::sync::{Arc, OnceLock};
use storage::{LoadedModel, LoadedTensor};

/// A matrix that is multiplied with activations.
pub enum Matrix<const ROWS: usize, const COLS: usize> {
    /// Quantised blocks, in the packed layout.
    Quantised(QuantMatrix<ROWS, COLS>),
    /// Unquantised elements (f32, f16, bf16).
    Dense {
        dtype: Dtype,
        /// `[ROWS][COLS]`
        data: MappedSlice,
    },
}

impl<const ROWS: usize, const COLS: usize> Matrix<ROWS, COLS> {
    /// The forms of activations that this matrix is multiplied with.
    pub fn activation_forms(&self) -> ActivationForms {
        let floats = matches!(self, Self::Dense { .. });
        ActivationForms {
            floats,
            blocks: !floats,
            tiles: matches!(self, Self::Quantised(w) if w.format().reads_tiles()),
        }
    }

    /// Decodes one row, exactly, into `x` of `COLS` values.
    ///
    /// # Panics
    ///
    /// There is no such row, or `x` has another length.
    pub fn decode_row(&self, row: usize, x: &mut [f32]) {
        match self {
            Matrix::Quantised(w) => w.decode_row(row, x),
            Matrix::Dense { dtype, data } => {
                let bytes = &data.bytes()[row * COLS * dtype.byte_size()..][..COLS * dtype.byte_size()];
                dtype.widen_slice(bytes, x);
            }
        }
    }

    /// The memory of some rows: whole groups, if they are quantised.
    fn slice_rows(&self, rows: Range<usize>) -> Vec<MappedSlice> {
        match self {
            Matrix::Quantised(w) => {
                w.slice_groups(rows.start / GROUP_ROWS..rows.end.div_ceil(GROUP_ROWS)).into()
            }
            Matrix::Dense { dtype, data } => {
                let len = COLS * dtype.byte_size();
                data.slice(rows.start * len..rows.end * len).into_iter().collect()
            }
        }
    }

    fn new(loaded: &LoadedTensor) -> Option<Self> {
        match (loaded.storage, &loaded.planes[..]) {
            (Storage::Blocks(format), [quants, scales]) => {
                QuantMatrix::new(format, quants.clone(), scales.clone()).map(Matrix::Quantised)
            }
            (Storage::Rows(block), [data]) => Dtype::from_block_type(block)
                .filter(|dtype| data.bytes().len() == ROWS * COLS * dtype.byte_size())
                .map(|dtype| Matrix::Dense { dtype, data: data.clone() }),
            _ => None,
        }
    }
}

/// The forms of activations that matrices read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ActivationForms {
    /// As floats.
    pub floats: bool,
    /// Quantised, in blocks.
    pub blocks: bool,
    /// Quantised blocks arranged in tiles, for instruction sets that read them (AMX, dotprod, i8mm).
    pub tiles: bool,
}

impl BitOr for ActivationForms {
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
    /// Elements or blocks, as in the checkpoint.
    Rows { block: BlockType, data: MappedSlice },
    /// The rows of the output projection, which the embedding is tied to.
    Head,
}

/// All weights of the baked model.
pub struct Weights {
    embed: Embedding,
    /// `[MAX_POSITION][DIM]`, if positions are learned.
    positions: Option<(BlockType, MappedSlice)>,
    /// Embeddings that each layer has of a token, if the model has such.
    pub per_layer: Option<PerLayerEmbeddings>,
    /// The transformer blocks.
    pub layers: Vec<Layer>,
    /// The final norm.
    pub norm: Vec<f32>,
    /// The output projection.
    pub head: Matrix<VOCAB, DIM>,
    /// The block that predicts the token after the next one, if the file has it.
    pub mtp: Option<MtpBlock>,
    /// Set at load if a packed file holds it, otherwise when it is first needed.
    calibration: OnceLock<Calibration>,
    /// Bytes that a decoded token reads.
    pub bytes_per_token: usize,
    /// Identifies the checkpoint.
    pub fingerprint: String,
    /// Type of the matrices; never [`WeightType::Auto`].
    pub weight_type: WeightType,
}

impl Weights {
    /// Loads an opened model, after comparing its config with the baked one.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: a file cannot be used. [`Error::Usage`]: a packed file has another weight type than asked for.
    /// [`Error::Memory`]: there is not enough memory.
    pub fn load(model: &OpenModel, options: &LoadOptions<'_>) -> Result<Self> {
        model.check_config()?;
        let checkpoint = &model.checkpoint;
        let weight_type = checkpoint.resolve_weight_type(options.weight_type);
        let Some(packed) = checkpoint.packed() else {
            let squares = measure_inputs(checkpoint, weight_type, options)?;
            return build_weights(from_checkpoint(checkpoint, (weight_type, squares.as_deref()), options)?);
        };
        checkpoint.check_packed_as(weight_type)?;
        build_weights(pack::read_packed(packed, weight_type)?)
    }

    /// The calibration, if it is set.
    pub fn calibration(&self) -> Option<&Calibration> {
        self.calibration.get()
    }

    /// One layer's calibration; until it is set, one that changes nothing.
    pub fn layer_calibration(&self, layer: usize) -> &[f32] {
        self.calibration().map_or(&Calibration::NONE, |all| all.layer(layer))
    }

    /// Sets the calibration. A second caller has computed the same one, so it is ignored.
    pub fn set_calibration(&self, calibration: Calibration) {
        let _ = self.calibration.set(calibration);
    }

    /// Writes the embedding of a token at a position into `x` of `DIM` values: exact, unless the model scales it or
    /// adds a position embedding.
    ///
    /// # Panics
    ///
    /// There is no such token or position, or `x` has another length.
    pub fn embed_token(&self, token: usize, pos: usize, x: &mut [f32]) {
        match &self.embed {
            Embedding::Head => self.head.decode_row(token, x),
            Embedding::Rows { block, data } => {
                let len = block.row_bytes(DIM);
                decode_values(*block, &data.bytes()[token * len..][..len], x);
            }
        }
        if EMBEDDING_SCALE != 1.0 {
            x.iter_mut().for_each(|x| *x *= EMBEDDING_SCALE as f32);
        }
        if let Some((block, data)) = self.positions.as_ref().filter(|_| LEARNED_POSITIONS) {
            let (len, mut learned) = (block.row_bytes(DIM), [0.0; DIM]);
            decode_values(*block, &data.bytes()[pos * len..][..len], &mut learned);
            x.iter_mut().zip(learned).for_each(|(x, learned)| *x += learned);
        }
    }
}

/// Measures the inputs of the matrices of a checkpoint over a text, if its type needs that.
fn measure_inputs<'a>(
    checkpoint: &Checkpoint,
    weight_type: WeightType,
    options: &LoadOptions<'a>,
) -> Result<Option<Cow<'a, InputSquares>>> {
    let text = match options.importance {
        Importance::Text(text) if weight_type.is_calibrated() && !text.is_empty() => text,
        Importance::Known(squares) => return Ok(Some(Cow::Borrowed(squares))),
        _ => return Ok(None),
    };
    let options = LoadOptions { progress: &|_, _| {}, ..*options };
    let native = build_weights(from_checkpoint(checkpoint, (WeightType::Native, None), &options)?)?;
    InputSquares::measure(Arc::new(native), text, options.threads).map(|squares| Some(Cow::Owned(squares)))
}

fn from_checkpoint(
    checkpoint: &Checkpoint,
    (weight_type, squares): (WeightType, Option<&InputSquares>),
    options: &LoadOptions<'_>,
) -> Result<LoadedModel> {
    let specs = checkpoint.tensor_specs();
    let rooms = specs.iter().map(|spec| convert::converted_bytes(checkpoint, spec, weight_type));
    let rooms = rooms.collect::<Result<Vec<usize>>>()?;
    // One allocation for all, so that small matrices are in huge pages too: with 4 KiB pages for them, decode of a 1B
    // model was 10 % slower.
    let mut memory = AlignedBytes::zeroed(rooms.iter().fold(0, |sum, n| sum.saturating_add(*n)))?;
    let mut rest = memory.as_mut_slice();
    let mut loaded = Vec::with_capacity(specs.len());
    for (i, (spec, room)) in specs.iter().zip(&rooms).enumerate() {
        (options.progress)(i, specs.len());
        let room = rest.split_off_mut(..*room).expect("invariant: the sum of all");
        loaded.push(convert::load_tensor(checkpoint, spec, (weight_type, squares), options.threads, room)?);
    }
    (options.progress)(specs.len(), specs.len());
    let (memory, mut at, mut tensors) = (memory.freeze(), 0, HashMap::with_capacity(specs.len()));
    for ((spec, room), mut loaded) in specs.iter().zip(rooms).zip(loaded) {
        if room > 0 {
            loaded.planes = loaded.storage.slice_planes(spec, &memory, at);
            at += room;
        }
        tensors.insert(spec.name.clone(), loaded);
    }
    let fingerprint = checkpoint.fingerprint();
    let (file, from_gguf) = (checkpoint.path().into(), checkpoint.gguf().is_some());
    Ok(LoadedModel { tensors, calibration: None, weight_type, fingerprint, file, from_gguf })
}

/// Moves loaded tensors into the typed structs.
fn build_weights(mut model: LoadedModel) -> Result<Weights> {
    let bytes = |t: &LoadedTensor| t.planes.iter().map(|plane| plane.bytes().len()).sum::<usize>();
    let embed = model.tensors.remove(EMBED);
    let (embed, row) = match embed.as_ref().map(|t| (t.storage, &t.planes[..])) {
        Some((Storage::Rows(block), [data]))
            if DIM.is_multiple_of(block.values_per_block())
                && data.bytes().len() == VOCAB * block.row_bytes(DIM) =>
        {
            data.expect_random_reads();
            (Embedding::Rows { block, data: data.clone() }, block.row_bytes(DIM))
        }
        Some((Storage::Head, _)) if TIED => {
            (Embedding::Head, model.tensors.get(HEAD).map_or(0, bytes) / VOCAB)
        }
        _ => return Err(Error::model(&model.file, format!("tensor {EMBED} is not {VOCAB} x {DIM}"))),
    };
    let positions = LEARNED_POSITIONS.then(|| take_table(&mut model, POSITIONS, (MAX_POSITION, DIM)));
    let table = (HAS_PER_LAYER).then(|| take_table(&mut model, PER_LAYER_TABLE, (VOCAB, PER_LAYER_ROW)));
    let (positions, table) = (positions.transpose()?, table.transpose()?);
    let per_layer_row = table.as_ref().map_or(0, |(block, _)| block.row_bytes(PER_LAYER_ROW));
    let read = |spec: TensorSpec| {
        let stored = model.tensors.get(&spec.name).map_or(0, bytes);
        spec.share_of_token(stored as u64) as usize
    };
    let bytes_per_token = row + per_layer_row + model_tensors().into_iter().map(read).sum::<usize>();
    let per_layer = |table| {
        Ok(PerLayerEmbeddings {
            table,
            projection: take_matrix(&model, PER_LAYER_PROJECTION)?,
            norm: take_vector(&model, PER_LAYER_NORM)?,
        })
    };
    Ok(Weights {
        embed,
        positions,
        per_layer: table.map(per_layer).transpose()?,
        layers: (0..LAYERS)
            .map(|l| take_layer(&model, &|part| format!("model.layers.{l}.{part}"), l))
            .collect::<Result<_>>()?,
        norm: take_norm(&model, "model.norm")?,
        head: take_matrix(&model, HEAD)?,
        mtp: mtp::take_mtp(&model)?,
        calibration: model.calibration.map(OnceLock::from).unwrap_or_default(),
        bytes_per_token,
        fingerprint: model.fingerprint,
        weight_type: model.weight_type,
    })
}

fn take_matrix<const ROWS: usize, const COLS: usize>(
    model: &LoadedModel,
    name: &str,
) -> Result<Matrix<ROWS, COLS>> {
    model.tensors.get(name).and_then(Matrix::new).ok_or_else(|| {
        Error::model(&model.file, format!("tensor {name} does not hold {ROWS} x {COLS} weights"))
    })
}

/// A vector's values; empty if the model does not have it.
fn take_vector(model: &LoadedModel, name: &str) -> Result<Vec<f32>> {
    let Some(loaded) = model.tensors.get(name) else { return Ok(Vec::new()) };
    match (loaded.storage, &loaded.planes[..]) {
        (Storage::Rows(BlockType::F32), [data]) => Ok(Dtype::F32.to_f32(data.bytes())),
        _ => Err(Error::model(&model.file, format!("tensor {name} is not a vector"))),
    }
}

/// A table whose rows are looked up.
fn take_table(
    model: &mut LoadedModel,
    name: &str,
    (rows, cols): (usize, usize),
) -> Result<(BlockType, MappedSlice)> {
    match model.tensors.remove(name).as_ref().map(|t| (t.storage, &t.planes[..])) {
        Some((Storage::Rows(block), [data]))
            if cols.is_multiple_of(block.values_per_block())
                && data.bytes().len() == rows * block.row_bytes(cols) =>
        {
            data.expect_random_reads();
            Ok((block, data.clone()))
        }
        _ => Err(Error::model(&model.file, format!("tensor {name} is not {rows} x {cols}"))),
    }
}

/// A norm's weights followed by its biases; empty if the model does not have it.
fn take_norm(model: &LoadedModel, name: &str) -> Result<Vec<f32>> {
    let mut norm = take_vector(model, &format!("{name}.weight"))?;
    if NORM_BIAS {
        norm.extend(take_vector(model, &format!("{name}.bias"))?);
    }
    Ok(norm)
}
