//! The block that predicts the token after the next one (multi-token prediction), which a checkpoint may hold: a layer
//! with full attention, and what joins a token's embedding with the state before it. Its tensors have the names of
//! DeepSeek V3's files, as those of a layer behind the last one.

use super::layer::{Layer, take_layer};
use super::spec::{CheckpointPlace, TensorRole, TensorSpec, checkpoint_place, put_layer};
use super::storage::LoadedModel;
use super::{Matrix, take_matrix, take_vector};
use crate::dims::*;
use files::Result;
use files::source::Safetensors;

const EMBED_NORM: &str = "enorm.weight";
const HIDDEN_NORM: &str = "hnorm.weight";
const JOIN: &str = "eh_proj.weight";
const NORM: &str = "shared_head.norm.weight";

/// Weights of the block. It shares the model's embedding and output head.
pub struct MtpBlock {
    /// Norm of a token's embedding: `[DIM]`
    pub embed_norm: Vec<f32>,
    /// Norm of the model's final state of the token before it: `[DIM]`
    pub hidden_norm: Vec<f32>,
    /// Joins them, `[embedding | state]`, to the input of the layer.
    pub join: Matrix<DIM, { 2 * DIM }>,
    /// The layer.
    pub layer: Layer,
    /// Norm before the output head: `[DIM]`
    pub norm: Vec<f32>,
}

/// True for the engine's name of a tensor of the block.
pub(super) fn is_tensor(name: &str) -> bool {
    HAS_MTP && name.starts_with(&tensor_name(""))
}

/// The block's tensors.
pub fn mtp_tensors() -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    let mut put = |name: String, (rows, cols): (usize, usize), role: TensorRole| {
        let stored = find_place(&name, if role == TensorRole::Vector { cols } else { rows });
        specs.push(TensorSpec { name, stored, rows, cols, role, tied: false, has_more_bits: false });
    };
    put(tensor_name(EMBED_NORM), (1, DIM), TensorRole::Vector);
    put(tensor_name(HIDDEN_NORM), (1, DIM), TensorRole::Vector);
    put(tensor_name(JOIN), (DIM, 2 * DIM), TensorRole::Matrix);
    put_layer(&mut put, &tensor_name, MTP_LAYER);
    put(tensor_name(NORM), (1, DIM), TensorRole::Vector);
    specs
}

/// True if a packed file has the block.
pub(super) fn is_packed(source: &Safetensors) -> bool {
    HAS_MTP && source.get(&tensor_name(NORM)).is_some()
}

/// Takes the block out of the loaded tensors, if it is there.
pub(super) fn take_mtp(model: &LoadedModel) -> Result<Option<MtpBlock>> {
    if !HAS_MTP || !model.tensors.contains_key(&tensor_name(NORM)) {
        return Ok(None);
    }
    Ok(Some(MtpBlock {
        embed_norm: take_vector(model, &tensor_name(EMBED_NORM))?,
        hidden_norm: take_vector(model, &tensor_name(HIDDEN_NORM))?,
        join: take_matrix(model, &tensor_name(JOIN))?,
        layer: take_layer(model, &tensor_name, MTP_LAYER)?,
        norm: take_vector(model, &tensor_name(NORM))?,
    }))
}

/// The engine's name of a tensor of the block, which GGUF files know too.
fn tensor_name(part: &str) -> String {
    format!("model.layers.{LAYERS}.{part}")
}

/// Place of a tensor of the block in a checkpoint.
fn find_place(name: &str, rows: usize) -> CheckpointPlace {
    let part = name.strip_prefix(&tensor_name("")).unwrap_or(name);
    let stored = match part {
        EMBED_NORM => "mtp.pre_fc_norm_embedding.weight".into(),
        HIDDEN_NORM => "mtp.pre_fc_norm_hidden.weight".into(),
        JOIN => "mtp.fc.weight".into(),
        NORM => "mtp.norm.weight".into(),
        part => format!("mtp.layers.0.{part}"),
    };
    checkpoint_place(&stored, rows)
}
