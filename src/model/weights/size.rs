//! Memory needed by the weights, computed before anything is loaded.

use super::checkpoint::Checkpoint;
use super::convert::{WINDOW, is_converted};
use super::model_path::OpenModel;
use super::mtp;
use super::pack::tensor_storages;
use super::spec::{HEAD, LAYER_SCALAR, TensorRole, TensorSpec, model_tensors};
use super::storage::Storage;
use super::stored_tensor::StoredForm;
use super::weight_type::WeightType;
use crate::dims::{HAS_PER_LAYER, HEAD_DIM, LAYERS, QK_NORM};
use files::blocks::{BlockType, Dtype};
use files::config::QkNorm;
use files::packed_file;
use files::source::Safetensors;
use std::ops::Range;

/// Bytes of the weights by kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightBytes {
    /// In allocated memory.
    pub own: u64,
    /// In pages of a mapped file that every token reads.
    pub mapped: u64,
    /// In pages of a mapped file that are hardly read: embeddings.
    pub dropped: u64,
    /// The part of `mapped` that holds the experts which a token chooses.
    pub chosen: u64,
    /// In pages of a mapped file that hold the experts which a token leaves out.
    pub unchosen: u64,
    /// On an OpenCL device: vectors, and matrices padded to whole groups of rows.
    pub device: u64,
    /// Of these, the matrices and vectors of each layer.
    pub device_layers: [u64; LAYERS],
    /// Of those, the feed-forwards with experts, which may stay on the CPU.
    pub device_experts: [u64; LAYERS],
    /// Of all, the output head.
    pub device_head: u64,
    /// Largest part of a checkpoint that is in memory at once while it is converted.
    pub conversion_window: u64,
}

impl Default for WeightBytes {
    fn default() -> Self {
        Self {
            own: 0,
            mapped: 0,
            dropped: 0,
            chosen: 0,
            unchosen: 0,
            device: 0,
            device_layers: [0; LAYERS],
            device_experts: [0; LAYERS],
            device_head: 0,
            conversion_window: 0,
        }
    }
}

impl WeightBytes {
    /// Bytes of an opened model.
    pub fn for_model(model: &OpenModel) -> Self {
        match model.checkpoint.packed() {
            Some(source) => packed_bytes(source),
            None => checkpoint_bytes(&model.checkpoint, model.weight_type),
        }
    }

    /// Bytes of a packed file that `pack` would make from a 16-bit checkpoint.
    pub fn estimate() -> Self {
        let form = |spec: &TensorSpec| Storage::for_tensor(spec, BlockType::F16, WeightType::Q4_0);
        let mut bytes = Self::default();
        for spec in model_tensors() {
            bytes.add_device(&spec, form(&spec));
            match spec.role {
                TensorRole::Vector => bytes.own = add(bytes.own, mul(2, dense_bytes(&spec, 2))),
                TensorRole::Matrix => bytes.add_mapped(&spec, stored_bytes(&spec, form(&spec))),
                TensorRole::Embedding | TensorRole::Table => {
                    bytes.dropped = add(bytes.dropped, dense_bytes(&spec, 2))
                }
            }
        }
        bytes
    }

    /// Adds a tensor on an OpenCL device.
    fn add_device(&mut self, spec: &TensorSpec, form: Storage) {
        let bytes = device_bytes(spec, form);
        self.device = add(self.device, bytes);
        let layer =
            spec.name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        match layer.filter(|layer: &usize| *layer < LAYERS) {
            Some(layer) => {
                self.device_layers[layer] = add(self.device_layers[layer], bytes);
                if spec.is_of_experts(layer) {
                    self.device_experts[layer] = add(self.device_experts[layer], bytes);
                }
            }
            None if spec.name == HEAD => self.device_head = bytes,
            None => {}
        }
    }

    /// Bytes of the feed-forwards with experts of some layers.
    pub fn expert_bytes(&self, layers: &Range<usize>) -> u64 {
        self.device_experts[layers.clone()].iter().fold(0, |sum, &n| add(sum, n))
    }

    /// Bytes on a device that computes only some layers: theirs, and what all stages need besides; the output head on the
    /// last one.
    pub fn stage_bytes(&self, layers: &Range<usize>) -> u64 {
        let of_layers = |layers: &[u64]| layers.iter().fold(0, |sum, &n| add(sum, n));
        let rest = self.device - of_layers(&self.device_layers) - self.device_head;
        let head = if layers.end == LAYERS { self.device_head } else { 0 };
        add(of_layers(&self.device_layers[layers.clone()]), add(rest, head))
    }

    /// Adds a matrix in a mapped file.
    fn add_mapped(&mut self, spec: &TensorSpec, bytes: u64) {
        self.mapped = add(self.mapped, spec.share_of_token(bytes));
        self.add_experts(spec, bytes);
    }

    /// Adds the shares of a mapped matrix of experts that a token reads and leaves out.
    fn add_experts(&mut self, spec: &TensorSpec, bytes: u64) {
        if spec.is_expert() {
            let read = spec.share_of_token(bytes);
            self.chosen = add(self.chosen, read);
            self.unchosen = add(self.unchosen, bytes - read);
        }
    }
}

/// Bytes of a packed file: everything is mapped, and vectors are copied.
fn packed_bytes(source: &Safetensors) -> WeightBytes {
    let all = source.tensors().fold(0, |sum, t| add(sum, t.data.bytes().len() as u64));
    let of_role = |role| model_tensors().into_iter().filter(move |s| s.role == role);
    let dropped = of_role(TensorRole::Embedding)
        .chain(of_role(TensorRole::Table))
        .map(|s| s.name)
        .chain([packed_file::GGUF_TENSOR.to_owned()])
        .filter_map(|name| source.get(&name))
        .fold(0, |sum, t| add(sum, t.data.bytes().len() as u64));
    let own = of_role(TensorRole::Vector).fold(0, |sum, s| add(sum, dense_bytes(&s, 4)));
    let (specs, forms) = (model_tensors(), tensor_storages(source));
    let mut bytes = WeightBytes { own, dropped, ..WeightBytes::default() };
    for (spec, form) in specs.iter().zip(forms) {
        bytes.add_device(spec, form);
        bytes.add_experts(spec, stored_bytes(spec, form));
    }
    bytes.mapped = all.saturating_sub(add(dropped, bytes.unchosen));
    bytes
}

/// Bytes of a checkpoint: converted tensors are allocated, the rest stays mapped.
fn checkpoint_bytes(opened: &Checkpoint, weight_type: WeightType) -> WeightBytes {
    let mut bytes = WeightBytes::default();
    for spec in opened.tensor_specs() {
        // A missing or wrong tensor is reported when it is loaded.
        let stored = opened.find_tensor(&spec).ok();
        let missing = || Storage::for_tensor(&spec, BlockType::F32, weight_type);
        let form = stored.as_ref().map_or_else(missing, |t| t.choose_storage(&spec, weight_type));
        let converted = stored.as_ref().is_none_or(|t| is_converted(t, form));
        let is_quantised = stored.as_ref().is_some_and(|t| matches!(t.form, StoredForm::Quantised(..)));
        bytes.add_device(&spec, form);
        match spec.role {
            TensorRole::Vector => bytes.own = add(bytes.own, dense_bytes(&spec, 4)),
            TensorRole::Embedding | TensorRole::Table if !is_quantised => {
                bytes.dropped = add(bytes.dropped, stored_bytes(&spec, form))
            }
            _ if converted => {
                bytes.own = add(bytes.own, stored_bytes(&spec, form));
                let deltas = stored.iter().flat_map(|t| &t.deltas);
                let added = deltas.fold(0, |sum, delta| add(sum, delta.decoded_bytes()));
                let window = stored.map_or(dense_bytes(&spec, Dtype::F32.byte_size()), |t| {
                    let most = if t.is_read_by_rows() { WINDOW as u64 } else { u64::MAX };
                    most.min(t.byte_len() as u64)
                });
                bytes.conversion_window = bytes.conversion_window.max(add(window, added));
            }
            _ => bytes.add_mapped(&spec, stored_bytes(&spec, form)),
        }
    }
    bytes
}

/// Bytes of a tensor on an OpenCL device, where unquantised matrices are padded to whole groups of rows.
fn device_bytes(spec: &TensorSpec, form: Storage) -> u64 {
    let padded = |n: usize| n.next_multiple_of(16) as u64;
    match (spec.role, form) {
        _ if mtp::is_tensor(&spec.name) => 0,
        (TensorRole::Embedding | TensorRole::Table, _) => 0,
        (TensorRole::Matrix, Storage::Rows(block)) => {
            mul(mul(padded(spec.rows), spec.cols as u64), block.bytes_per_block() as u64)
        }
        (TensorRole::Matrix, _) => stored_bytes(spec, form),
        (TensorRole::Vector, _) if spec.name.ends_with("_proj.bias") => mul(padded(spec.cols), 4),
        // Behind each norm of a layer's outputs.
        (TensorRole::Vector, _) if spec.name.ends_with(LAYER_SCALAR) => 4 * (2 + u64::from(HAS_PER_LAYER)),
        // Padded to the heads of the cache.
        (TensorRole::Vector, _) if QK_NORM == QkNorm::PerHead && is_head_norm(&spec.name) => {
            4 * HEAD_DIM as u64
        }
        (TensorRole::Vector, _) => dense_bytes(spec, 4),
    }
}

fn is_head_norm(name: &str) -> bool {
    ["self_attn.q_norm.weight", "self_attn.k_norm.weight"].iter().any(|norm| name.ends_with(norm))
}

/// Bytes of a tensor in this storage.
fn stored_bytes(spec: &TensorSpec, form: Storage) -> u64 {
    form.plane_specs(spec).iter().fold(0, |sum, part| add(sum, part.len as u64))
}

/// Bytes of a tensor with elements of `size` bytes.
fn dense_bytes(spec: &TensorSpec, size: usize) -> u64 {
    mul(mul(spec.rows as u64, spec.cols as u64), size as u64)
}

fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

fn mul(a: u64, b: u64) -> u64 {
    a.saturating_mul(b)
}
