//! Weights of a Gemma 4 assistant, a small model that drafts for the baked one.
//!
//! Its layers attend to keys and values of the baked model, and its input is the baked model's embedding and state. So
//! it runs in this program: another one, like a draft model, would need a copy of both. Its sizes are read at run time,
//! because a token of it reads a few megabytes, and one build then runs with or without an assistant.

use crate::dims::*;
use files::blocks::Dtype;
use files::config::{AssistantConfig, ConfigError, LayerKind, ModelConfig, Scales};
use files::mapped::MappedSlice;
use files::source::{Safetensors, Tensor};
use files::text_file::read_text_file;
use files::{Error, Result};
use std::path::Path;

/// A matrix of unquantised elements whose sizes are known at run time.
pub struct DenseMatrix {
    /// Number of rows.
    pub rows: usize,
    /// Type of the elements: f32, f16 or bf16.
    pub dtype: Dtype,
    /// `[rows][columns]`
    pub data: MappedSlice,
}

/// A layer of an assistant.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct AssistantLayer {
    /// The baked model's layer whose keys and values it reads: the last of its kind that has any.
    pub kv_layer: usize,
    pub attn_norm: Vec<f32>,
    /// `[heads * head width][dim]`
    pub wq: DenseMatrix,
    pub q_norm: Vec<f32>,
    /// `[dim][heads * head width]`
    pub wo: DenseMatrix,
    pub attn_post_norm: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    /// `[ffn_dim][dim]`, like `up`.
    pub gate: DenseMatrix,
    pub up: DenseMatrix,
    /// `[dim][ffn_dim]`
    pub down: DenseMatrix,
    pub ffn_post_norm: Vec<f32>,
    /// Factor of the residual behind the layer.
    pub scalar: f32,
}

/// Clusters of tokens. Only the tokens of some clusters, which a token's state chooses, get logits.
pub struct TokenClusters {
    /// Scores of the clusters: `[cluster][dim]`
    pub centroids: DenseMatrix,
    /// Tokens of each cluster: `[cluster][VOCAB / clusters]`
    pub tokens: Vec<u32>,
    /// Number of clusters that are chosen.
    pub used: usize,
}

/// An assistant of the baked model.
pub struct Assistant {
    /// Width of its residual stream.
    pub dim: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of its feed-forward.
    pub ffn_dim: usize,
    /// Joins the baked model's embedding and state: `[dim][2 * DIM]`
    pub pre_projection: DenseMatrix,
    /// Its layers, at least one.
    pub layers: Vec<AssistantLayer>,
    /// The final norm.
    pub norm: Vec<f32>,
    /// Makes the next state: `[DIM][dim]`
    pub post_projection: DenseMatrix,
    /// `[VOCAB][dim]`
    pub head: DenseMatrix,
    /// Clusters, if it has such.
    pub clusters: Option<TokenClusters>,
}

impl Assistant {
    /// Bytes of the tensors in a folder; 0 if they cannot be read, as [`Assistant::load`] then says.
    pub fn stored_bytes(folder: &Path) -> u64 {
        Safetensors::open(folder)
            .map_or(0, |source| source.tensors().map(|t| t.data.bytes().len() as u64).sum())
    }

    /// Loads the assistant in a folder with `config.json` and safetensors; matrices are mapped.
    ///
    /// # Errors
    ///
    /// `Model`: a file is missing or damaged, or it is no assistant of the baked model.
    pub fn load(folder: &Path) -> Result<Self> {
        let file = folder.join("config.json");
        let config = AssistantConfig::parse(&read_text_file(&file)?)
            .and_then(|config| check_fit(&config).map(|()| config))
            .map_err(|e| Error::model(&file, e))?;
        let source = &Safetensors::open(folder)?;
        let ModelConfig { dim, heads, ffn_dim, layer_kinds, .. } = &config.text;
        let (dim, ffn_dim) = (*dim, *ffn_dim);
        let layer = |(l, kind): (usize, &LayerKind)| {
            let kv_layer = find_kv_layer(*kind).expect("invariant: `check_fit` has found it");
            let (width, q_dim) = (head_dim(kv_layer), heads * head_dim(kv_layer));
            let matrix =
                |part, rows, cols| take_dense(source, &format!("model.layers.{l}.{part}"), rows, cols);
            let vector = |part, len| take_values(source, &format!("model.layers.{l}.{part}"), len);
            Ok(AssistantLayer {
                kv_layer,
                attn_norm: vector("input_layernorm.weight", dim)?,
                wq: matrix("self_attn.q_proj.weight", q_dim, dim)?,
                q_norm: vector("self_attn.q_norm.weight", width)?,
                wo: matrix("self_attn.o_proj.weight", dim, q_dim)?,
                attn_post_norm: vector("post_attention_layernorm.weight", dim)?,
                ffn_norm: vector("pre_feedforward_layernorm.weight", dim)?,
                gate: matrix("mlp.gate_proj.weight", ffn_dim, dim)?,
                up: matrix("mlp.up_proj.weight", ffn_dim, dim)?,
                down: matrix("mlp.down_proj.weight", dim, ffn_dim)?,
                ffn_post_norm: vector("post_feedforward_layernorm.weight", dim)?,
                scalar: vector("layer_scalar", 1)?[0],
            })
        };
        let clusters = |(count, used)| {
            Ok(TokenClusters {
                centroids: take_dense(source, "masked_embedding.centroids.weight", count, dim)?,
                tokens: take_order(source, "masked_embedding.token_ordering")?,
                used,
            })
        };
        Ok(Self {
            dim,
            heads: *heads,
            ffn_dim,
            pre_projection: take_dense(source, "pre_projection.weight", dim, 2 * DIM)?,
            layers: layer_kinds.iter().enumerate().map(layer).collect::<Result<_>>()?,
            norm: take_values(source, "model.norm.weight", dim)?,
            post_projection: take_dense(source, "post_projection.weight", DIM, dim)?,
            head: take_dense(source, "model.embed_tokens.weight", VOCAB, dim)?,
            clusters: config.clusters.map(clusters).transpose()?,
        })
    }
}

/// Checks that an assistant was made for a model like the baked one: only its own widths may differ.
fn check_fit(
    AssistantConfig { text, model_dim, .. }: &AssistantConfig,
) -> std::result::Result<(), ConfigError> {
    let baked = baked_config();
    let like = ModelConfig {
        layers: text.layers,
        dim: text.dim,
        heads: text.heads,
        ffn_dim: text.ffn_dim,
        shared_ffn_dim: text.shared_ffn_dim,
        layer_kinds: text.layer_kinds.clone(),
        sliding_window: if text.sliding_window == 0 { 0 } else { baked.sliding_window },
        shared_kv_layers: 0,
        per_layer_dim: 0,
        expert_layers: text.expert_layers.clone(),
        scales: Scales { embedding: text.scales.embedding, ..baked.scales },
        logit_softcap: text.logit_softcap,
        tie_embeddings: text.tie_embeddings,
        ..baked
    };
    let remedy = |value: String| format!("{value}, as in the model {MODEL}; give that model's own assistant");
    if let Some((field, here, there)) = like.find_difference(text) {
        return Err(ConfigError::new(field, there, remedy(here)));
    }
    if *model_dim != DIM {
        let supported = remedy(DIM.to_string());
        return Err(ConfigError::new("backbone_hidden_size", model_dim.to_string(), supported));
    }
    match text.layer_kinds.iter().find(|kind| find_kv_layer(**kind).is_none()) {
        Some(kind) => {
            Err(ConfigError::new("layer_types", format!("{kind:?}"), remedy(format!("{LAYER_KINDS:?}"))))
        }
        None => Ok(()),
    }
}

/// The last layer of a kind with keys and values.
fn find_kv_layer(kind: LayerKind) -> Option<usize> {
    (0..LAYERS).rev().find(|&layer| has_cache(layer) && LAYER_KINDS[layer] == kind)
}

/// A tensor of this shape and of one of these types.
fn take_shaped<'a>(
    source: &'a Safetensors,
    name: &str,
    shape: &[usize],
    types: &[Dtype],
) -> Result<&'a Tensor> {
    let tensor = source.get_required(name)?;
    if tensor.shape == shape && types.contains(&tensor.dtype) {
        return Ok(tensor);
    }
    let (found, dtype) = (&tensor.shape, tensor.dtype);
    let message =
        format!("tensor {name} is {dtype:?} of shape {found:?}; an assistant needs {types:?} of {shape:?}");
    Err(Error::model(&tensor.file, message))
}

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

fn take_dense(source: &Safetensors, name: &str, rows: usize, cols: usize) -> Result<DenseMatrix> {
    let Tensor { dtype, data, .. } = take_shaped(source, name, &[rows, cols], &FLOATS)?;
    Ok(DenseMatrix { rows, dtype: *dtype, data: data.clone() })
}

fn take_values(source: &Safetensors, name: &str, len: usize) -> Result<Vec<f32>> {
    let Tensor { dtype, data, .. } = take_shaped(source, name, &[len], &FLOATS)?;
    Ok(dtype.to_f32(data.bytes()))
}

/// All tokens in the order of their clusters.
fn take_order(source: &Safetensors, name: &str) -> Result<Vec<u32>> {
    let Tensor { dtype, data, file, .. } = take_shaped(source, name, &[VOCAB], &[Dtype::I32, Dtype::I64])?;
    // Little-endian: a token's low half is the token if its high half is 0.
    let tokens = data.bytes().chunks_exact(dtype.byte_size()).map(|bytes| {
        let (low, high) = bytes.split_first_chunk().expect("invariant: at least four bytes");
        let token = u32::from_le_bytes(*low);
        (high.iter().all(|&byte| byte == 0) && (token as usize) < VOCAB).then_some(token)
    });
    tokens.collect::<Option<_>>().ok_or_else(|| {
        Error::model(
            file,
            format!("tensor {name} has tokens beyond the vocabulary of {VOCAB}; download it again"),
        )
    })
}
