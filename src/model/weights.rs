//! The model's weights in typed structs.
//!
//! One table has the names and shapes ([`spec`]). Safetensors and GGUF files are read in place ([`checkpoint`]), and
//! matrices are converted to the [`weight_type`] ([`convert`]): Q4_0 and GGUF's other blocks bit for bit, elements
//! quantised to Q4_0 or used as they are. A packed file ([`pack`]) is mapped: no copy, no conversion.

pub mod bundle;
mod calibration;
mod checkpoint;
mod config;
mod convert;
mod model_path;
pub mod pack;
mod size;
mod spec;
mod storage;
mod weight_type;
mod zeros;

pub use calibration::{Calibration, HeadCalibration, SubtractedMean};
pub use checkpoint::Checkpoint;
pub use config::{load_config, read_text_file};
pub use convert::LoadOptions;
pub use model_path::{ModelPath, OpenModel};
pub use size::WeightBytes;
pub use spec::{TensorRole, TensorSpec, model_tensors};
pub use storage::Storage;
pub use weight_type::WeightType;

use crate::dims::*;
use files::blocks::gguf::decode_values;
use files::blocks::{BlockType, Dtype};
use files::config::LayerKind;
use files::mapped::{AlignedBytes, MappedSlice};
use files::{Error, Result};
use numeric::quant::format::Format;
use numeric::quant::matrix::QuantMatrix;
use spec::{
    ATTENTION_GATE_NAME, ATTN_POST_NORM, DELTA_BIAS, DELTA_CONV, DELTA_DECAY, DELTA_NORM, EMBED, FFN_NORM,
    FFN_POST_NORM, HEAD, LAYER_SCALAR, PER_LAYER_GATE, PER_LAYER_NORM, PER_LAYER_OUT, PER_LAYER_POST_NORM,
    PER_LAYER_PROJECTION, PER_LAYER_TABLE, POSITIONS, SHORT_CONV,
};
use std::collections::HashMap;
use std::ops::BitOr;
use std::sync::OnceLock;
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
            tiles: matches!(self, Self::Quantised(w) if w.format() == Format::Q4_0),
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

/// One transformer block. Biases and norms that the model lacks are empty. A norm is its weights followed by its
/// biases.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct Layer {
    pub attn_norm: Vec<f32>,
    pub mixer: Mixer,
    pub attn_post_norm: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    pub ffn: Ffn,
    pub ffn_post_norm: Vec<f32>,
    /// Embedding of the token for this layer, if the model has such.
    pub per_layer: Option<PerLayerInput>,
    /// Factor of the residual behind the layer.
    pub scalar: f32,
}

/// The first half of a layer, which mixes a token's values with those of earlier tokens.
#[allow(clippy::large_enum_variant, reason = "a layer has one")]
pub enum Mixer {
    /// Attention over keys and values.
    Attention(Attention<Q_DIM, KV_DIM>),
    /// Attention with the narrower heads of sliding-window layers, if they have such.
    LocalAttention(Attention<LOCAL_Q_DIM, LOCAL_KV_DIM>),
    /// A gated short convolution.
    ShortConv(ShortConv),
    /// A gated delta net.
    DeltaNet(DeltaNet),
}

/// The second half of a layer.
#[allow(clippy::large_enum_variant, reason = "a layer has one")]
pub enum Ffn {
    /// Of the usual width.
    Usual(FeedForward<FFN_DIM>),
    /// Of layers that share keys and values, if theirs is wider.
    Wide(FeedForward<SHARED_FFN_DIM>),
}

/// Weights of a feed-forward of `W` columns.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct FeedForward<const W: usize> {
    /// `None` if it has no gate.
    pub gate: Option<Matrix<W, DIM>>,
    pub up: Matrix<W, DIM>,
    pub up_bias: Vec<f32>,
    pub down: Matrix<DIM, W>,
    pub down_bias: Vec<f32>,
}

/// Weights by which the embedding that a layer has of a token joins the residual.
pub struct PerLayerInput {
    /// Gate of the embedding: a projection of the residual.
    pub gate: Matrix<PER_LAYER_DIM, DIM>,
    /// Projection to the residual.
    pub out: Matrix<DIM, PER_LAYER_DIM>,
    /// Norm of its result.
    pub norm: Vec<f32>,
}

/// The embeddings that all layers have of a token.
pub struct PerLayerEmbeddings {
    table: (BlockType, MappedSlice),
    /// Projection of the token's usual embedding.
    pub projection: Matrix<PER_LAYER_ROW, DIM>,
    /// Norm of its result, of each layer: `[PER_LAYER_DIM]`
    pub norm: Vec<f32>,
}

impl PerLayerEmbeddings {
    /// Decodes the row of a token, exactly, into `x` of [`PER_LAYER_ROW`] values.
    pub fn decode_row(&self, token: usize, x: &mut [f32]) {
        let (block, data) = &self.table;
        let len = block.row_bytes(PER_LAYER_ROW);
        decode_values(*block, &data.bytes()[token * len..][..len], x);
    }
}

/// Weights of attention with queries of `Q` and keys of `KV` columns.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct Attention<const Q: usize, const KV: usize> {
    pub wq: Matrix<Q, DIM>,
    /// `None`, like `wv`, if the layer reads keys and values of another.
    pub wk: Option<Matrix<KV, DIM>>,
    pub wv: Option<Matrix<KV, DIM>>,
    pub q_bias: Vec<f32>,
    pub k_bias: Vec<f32>,
    pub v_bias: Vec<f32>,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    /// Gate of the output, if the model has one.
    pub gate: Option<Matrix<GATE_DIM, DIM>>,
    pub wo: Matrix<DIM, Q>,
    pub o_bias: Vec<f32>,
}

/// Weights of a gated short convolution.
pub struct ShortConv {
    /// Two gates and the convolution's input, `[b | c | x]`.
    pub w_in: Matrix<{ 3 * DIM }, DIM>,
    /// `[CONV_TAPS][DIM]`, oldest first.
    pub taps: Vec<f32>,
    pub w_out: Matrix<DIM, DIM>,
}

/// Weights of a gated delta net.
pub struct DeltaNet {
    /// Queries, keys and values before the convolution.
    pub qkv: Matrix<CONV_CHANNELS, DIM>,
    /// Gate of the output.
    pub z: Matrix<DELTA_VALUE_DIM, DIM>,
    /// Strength of each head's update.
    pub b: Matrix<{ DELTA_NET.value_heads }, DIM>,
    /// Decay of each head's state.
    pub a: Matrix<{ DELTA_NET.value_heads }, DIM>,
    /// `[CONV_TAPS][CONV_CHANNELS]`, oldest first.
    pub taps: Vec<f32>,
    /// Bias of `a`.
    pub bias: Vec<f32>,
    /// Factor of each head's decay, negative.
    pub decay: Vec<f32>,
    /// Norm of each head's output.
    pub norm: Vec<f32>,
    pub w_out: Matrix<DIM, DELTA_VALUE_DIM>,
    /// Consecutive value heads that share a key head. The order of value heads is the file's: in groups, each with a
    /// key head, or, in GGUF files, the first heads of all groups, then the second ones.
    pub shared_run: usize,
}

impl Layer {
    /// Forms of the normed residual that its matrices read.
    pub fn normed_forms(&self) -> ActivationForms {
        let mixer = match &self.mixer {
            Mixer::Attention(w) => w.normed_forms(),
            Mixer::LocalAttention(w) => w.normed_forms(),
            Mixer::ShortConv(w) => w.w_in.activation_forms(),
            Mixer::DeltaNet(w) => {
                let gates = w.z.activation_forms() | w.b.activation_forms() | w.a.activation_forms();
                w.qkv.activation_forms() | gates
            }
        };
        let ffn = match &self.ffn {
            Ffn::Usual(w) => w.normed_forms(),
            Ffn::Wide(w) => w.normed_forms(),
        };
        mixer | ffn | forms_of(self.per_layer.as_ref().map(|w| &w.gate))
    }

    /// Norms of queries and of keys; empty without.
    ///
    /// # Panics
    ///
    /// If it is a recurrent layer.
    pub fn qk_norms(&self) -> [&[f32]; 2] {
        match &self.mixer {
            Mixer::Attention(w) => [&w.q_norm, &w.k_norm],
            Mixer::LocalAttention(w) => [&w.q_norm, &w.k_norm],
            _ => unreachable!("invariant: the layer has attention"),
        }
    }
}

impl<const Q: usize, const KV: usize> Attention<Q, KV> {
    fn normed_forms(&self) -> ActivationForms {
        let keys = forms_of(self.wk.as_ref()) | forms_of(self.wv.as_ref());
        self.wq.activation_forms() | keys | forms_of(self.gate.as_ref())
    }
}

impl<const W: usize> FeedForward<W> {
    fn normed_forms(&self) -> ActivationForms {
        self.up.activation_forms() | forms_of(self.gate.as_ref())
    }
}

/// Forms of activations that a matrix reads, if there is one.
pub(crate) fn forms_of<const ROWS: usize, const COLS: usize>(
    matrix: Option<&Matrix<ROWS, COLS>>,
) -> ActivationForms {
    matrix.map_or(ActivationForms::default(), Matrix::activation_forms)
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
    /// Set at load if a packed file holds it, otherwise when it is first needed.
    calibration: OnceLock<Calibration>,
    /// Bytes that every decoded token reads.
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
            return build_weights(from_checkpoint(checkpoint, weight_type, options)?);
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

fn from_checkpoint(
    checkpoint: &Checkpoint,
    weight_type: WeightType,
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
        loaded.push(convert::load_tensor(checkpoint, spec, weight_type, options.threads, room)?);
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
            (Embedding::Rows { block, data: data.clone() }, block.row_bytes(DIM))
        }
        Some((Storage::Head, _)) if TIED => {
            (Embedding::Head, model.tensors.get(HEAD).map_or(0, bytes) / VOCAB)
        }
        _ => return Err(Error::model(&model.file, format!("tensor {EMBED} is not {VOCAB} x {DIM}"))),
    };
    let positions = LEARNED_POSITIONS.then(|| take_table(&mut model, POSITIONS, (MAX_POSITION, DIM)));
    let table = (PER_LAYER_DIM > 0).then(|| take_table(&mut model, PER_LAYER_TABLE, (VOCAB, PER_LAYER_ROW)));
    let (positions, table) = (positions.transpose()?, table.transpose()?);
    let per_layer_row = table.as_ref().map_or(0, |(block, _)| block.row_bytes(PER_LAYER_ROW));
    let bytes_per_token = row + per_layer_row + model.tensors.values().map(bytes).sum::<usize>();
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
        layers: (0..LAYERS).map(|l| take_layer(&model, l)).collect::<Result<_>>()?,
        norm: take_norm(&model, "model.norm")?,
        head: take_matrix(&model, HEAD)?,
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

fn take_layer(model: &LoadedModel, l: usize) -> Result<Layer> {
    let at = |s: &str| format!("model.layers.{l}.{s}");
    let pre_norm = |name: &str| if PRE_NORMS { take_norm(model, &at(name)) } else { Ok(Vec::new()) };
    Ok(Layer {
        attn_norm: pre_norm("input_layernorm")?,
        mixer: match LAYER_KINDS[l] {
            LayerKind::ShortConv => Mixer::ShortConv(ShortConv {
                w_in: take_matrix(model, &at("conv.in_proj.weight"))?,
                taps: take_vector(model, &at(SHORT_CONV))?,
                w_out: take_matrix(model, &at("conv.out_proj.weight"))?,
            }),
            LayerKind::DeltaNet => Mixer::DeltaNet(DeltaNet {
                qkv: take_matrix(model, &at("linear_attn.in_proj_qkv.weight"))?,
                z: take_matrix(model, &at("linear_attn.in_proj_z.weight"))?,
                b: take_matrix(model, &at("linear_attn.in_proj_b.weight"))?,
                a: take_matrix(model, &at("linear_attn.in_proj_a.weight"))?,
                taps: take_vector(model, &at(DELTA_CONV))?,
                bias: take_vector(model, &at(DELTA_BIAS))?,
                decay: take_vector(model, &at(DELTA_DECAY))?,
                norm: take_vector(model, &at(DELTA_NORM))?,
                w_out: take_matrix(model, &at("linear_attn.out_proj.weight"))?,
                shared_run: if model.from_gguf { 1 } else { HEADS_PER_KEY },
            }),
            LayerKind::SlidingWindow if HAS_LOCAL_HEADS => Mixer::LocalAttention(take_attention(model, &at)?),
            _ => Mixer::Attention(take_attention(model, &at)?),
        },
        attn_post_norm: if POST_NORMS { take_norm(model, &at(ATTN_POST_NORM))? } else { Vec::new() },
        ffn_norm: pre_norm(FFN_NORM)?,
        ffn: if ffn_dim(l) == FFN_DIM {
            Ffn::Usual(take_feed_forward(model, &at)?)
        } else {
            Ffn::Wide(take_feed_forward(model, &at)?)
        },
        ffn_post_norm: if POST_NORMS { take_norm(model, &at(FFN_POST_NORM))? } else { Vec::new() },
        per_layer: (PER_LAYER_DIM > 0).then(|| take_per_layer(model, &at)).transpose()?,
        scalar: if LAYER_SCALARS {
            take_vector(model, &at(LAYER_SCALAR))?.first().copied().unwrap_or(1.0)
        } else {
            1.0
        },
    })
}

fn take_feed_forward<const W: usize>(
    model: &LoadedModel,
    at: &dyn Fn(&str) -> String,
) -> Result<FeedForward<W>> {
    Ok(FeedForward {
        gate: HAS_GATE.then(|| take_matrix(model, &at("mlp.gate_proj.weight"))).transpose()?,
        up: take_matrix(model, &at("mlp.up_proj.weight"))?,
        up_bias: take_vector(model, &at("mlp.up_proj.bias"))?,
        down: take_matrix(model, &at("mlp.down_proj.weight"))?,
        down_bias: take_vector(model, &at("mlp.down_proj.bias"))?,
    })
}

fn take_per_layer(model: &LoadedModel, at: &dyn Fn(&str) -> String) -> Result<PerLayerInput> {
    Ok(PerLayerInput {
        gate: take_matrix(model, &at(PER_LAYER_GATE))?,
        out: take_matrix(model, &at(PER_LAYER_OUT))?,
        norm: take_norm(model, &at(PER_LAYER_POST_NORM))?,
    })
}

fn take_attention<const Q: usize, const KV: usize>(
    model: &LoadedModel,
    at: &dyn Fn(&str) -> String,
) -> Result<Attention<Q, KV>> {
    let has_keys = model.tensors.contains_key(&at("self_attn.k_proj.weight"));
    let projection = |part: &str| {
        has_keys.then(|| take_matrix(model, &at(&format!("self_attn.{part}_proj.weight")))).transpose()
    };
    Ok(Attention {
        wq: take_matrix(model, &at("self_attn.q_proj.weight"))?,
        wk: projection("k")?,
        wv: projection("v")?,
        q_bias: take_vector(model, &at("self_attn.q_proj.bias"))?,
        k_bias: take_vector(model, &at("self_attn.k_proj.bias"))?,
        v_bias: take_vector(model, &at("self_attn.v_proj.bias"))?,
        q_norm: take_vector(model, &at("self_attn.q_norm.weight"))?,
        k_norm: take_vector(model, &at("self_attn.k_norm.weight"))?,
        gate: HAS_ATTENTION_GATE.then(|| take_matrix(model, &at(ATTENTION_GATE_NAME))).transpose()?,
        wo: take_matrix(model, &at("self_attn.o_proj.weight"))?,
        o_bias: take_vector(model, &at("self_attn.o_proj.bias"))?,
    })
}
