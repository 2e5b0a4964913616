//! Memory needed by the weights, computed before anything is loaded.

use super::checkpoint::Checkpoint;
use super::convert::{WINDOW, is_converted};
use super::model_path::OpenModel;
use super::pack::storages;
use super::spec::{Role, Spec, table};
use super::storage::Storage;
use super::weight_type::WeightType;
use files::blocks::{BlockType, Dtype};
use files::packed_file;
use files::source::Source;

/// Bytes of the weights by kind of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// In allocated memory.
    pub own: u64,
    /// In pages of a mapped file that every token reads.
    pub mapped: u64,
    /// In pages of a mapped file that are hardly read: embeddings.
    pub dropped: u64,
    /// On an OpenCL device: vectors, and matrices padded to whole groups of rows.
    pub device: u64,
    /// Largest part of a checkpoint that is in memory at once while it is converted.
    pub passing: u64,
}

impl WeightBytes {
    /// Bytes of an opened model.
    pub fn of(model: &OpenModel) -> Self {
        match model.checkpoint.packed() {
            Some(source) => packed(source),
            None => checkpoint(&model.checkpoint, model.weight_type),
        }
    }

    /// Bytes of a packed file that `pack` would make from a 16-bit checkpoint.
    pub fn assumed() -> Self {
        let form = |spec: &Spec| Storage::of(spec, BlockType::F16, WeightType::Q4_0);
        let mut bytes = Self::default();
        for spec in table() {
            bytes.device = add(bytes.device, on_device(&spec, form(&spec)));
            match spec.role {
                Role::Vector => bytes.own = add(bytes.own, mul(2, dense(&spec, 2))),
                Role::Matrix => bytes.mapped = add(bytes.mapped, kept(&spec, form(&spec))),
                Role::Embedding | Role::Positions => bytes.dropped = add(bytes.dropped, dense(&spec, 2)),
            }
        }
        bytes
    }
}

/// Bytes of a packed file: everything is mapped, and vectors are copied.
fn packed(source: &Source) -> WeightBytes {
    let all = source.tensors().fold(0, |sum, t| add(sum, t.data.bytes().len() as u64));
    let of_role = |role| table().into_iter().filter(move |s| s.role == role);
    let dropped = of_role(Role::Embedding)
        .chain(of_role(Role::Positions))
        .map(|s| s.name)
        .chain([packed_file::GGUF.to_owned()])
        .filter_map(|name| source.get(&name))
        .fold(0, |sum, t| add(sum, t.data.bytes().len() as u64));
    let own = of_role(Role::Vector).fold(0, |sum, s| add(sum, dense(&s, 4)));
    let forms = storages(source);
    let device = table().iter().zip(forms).fold(0, |sum, (s, form)| add(sum, on_device(s, form)));
    WeightBytes { own, mapped: all.saturating_sub(dropped), dropped, device, passing: 0 }
}

/// Bytes of a checkpoint: converted tensors are allocated, the rest stays mapped.
fn checkpoint(opened: &Checkpoint, weight_type: WeightType) -> WeightBytes {
    let mut bytes = WeightBytes::default();
    for spec in opened.table() {
        // A missing or wrong tensor is reported when it is loaded.
        let stored = opened.find(&spec).ok();
        let form = Storage::of(&spec, stored.as_ref().map_or(BlockType::F32, |t| t.block), weight_type);
        let converted = stored.as_ref().is_none_or(|t| is_converted(t, form));
        bytes.device = add(bytes.device, on_device(&spec, form));
        match spec.role {
            Role::Vector => bytes.own = add(bytes.own, dense(&spec, 4)),
            Role::Embedding | Role::Positions => bytes.dropped = add(bytes.dropped, kept(&spec, form)),
            Role::Matrix if converted => {
                bytes.own = add(bytes.own, kept(&spec, form));
                let stored = stored.map_or(dense(&spec, Dtype::F32.size()), |t| t.data.bytes().len() as u64);
                let window = if spec.is_transposed() { u64::MAX } else { WINDOW as u64 };
                bytes.passing = bytes.passing.max(stored.min(window));
            }
            Role::Matrix => bytes.mapped = add(bytes.mapped, kept(&spec, form)),
        }
    }
    bytes
}

/// Bytes of a tensor on an OpenCL device, where unquantised matrices are padded to whole groups of rows.
fn on_device(spec: &Spec, form: Storage) -> u64 {
    let padded = |n: usize| n.next_multiple_of(16) as u64;
    match (spec.role, form) {
        (Role::Embedding | Role::Positions, _) => 0,
        (Role::Matrix, Storage::Rows(block)) => {
            mul(mul(padded(spec.rows), spec.cols as u64), block.bytes() as u64)
        }
        (Role::Matrix, _) => kept(spec, form),
        (Role::Vector, _) if spec.name.ends_with("_proj.bias") => mul(padded(spec.cols), 4),
        (Role::Vector, _) => dense(spec, 4),
    }
}

/// Bytes of a tensor in this storage.
fn kept(spec: &Spec, form: Storage) -> u64 {
    form.parts(spec).iter().fold(0, |sum, part| add(sum, part.len as u64))
}

/// Bytes of a tensor with elements of `size` bytes.
fn dense(spec: &Spec, size: usize) -> u64 {
    mul(mul(spec.rows as u64, spec.cols as u64), size as u64)
}

fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

fn mul(a: u64, b: u64) -> u64 {
    a.saturating_mul(b)
}
