//! Bytes of the weights, by where they will be, before anything is loaded.

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

/// Bytes of the weights, by where they will be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// In memory of our own.
    pub own: u64,
    /// In pages of a mapped file that every token reads.
    pub mapped: u64,
    /// In pages of a mapped file of which little is read.
    pub dropped: u64,
    /// On an OpenCL device: matrices padded to whole groups of rows, vectors.
    pub device: u64,
    /// The largest stored tensor that is read, quantised and dropped again while loading.
    pub passing: u64,
}

impl WeightBytes {
    /// The bytes of an opened model.
    pub fn of(model: &OpenModel) -> Self {
        match model.checkpoint.packed() {
            Some(source) => packed(source),
            None => checkpoint(&model.checkpoint, model.weight_type),
        }
    }

    /// The bytes of a packed file as `pack` makes it from a model in 16 bits.
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

/// A packed file: all is mapped, vectors are copied.
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

/// A checkpoint: what is converted becomes ours, the rest stays mapped.
fn checkpoint(opened: &Checkpoint, weight_type: WeightType) -> WeightBytes {
    let mut bytes = WeightBytes::default();
    for spec in opened.table() {
        // A tensor that is missing or wrong is reported when it is loaded.
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

/// Bytes of a tensor on an OpenCL device: rows of elements are padded to whole groups.
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

/// Bytes of a tensor in this form.
fn kept(spec: &Spec, form: Storage) -> u64 {
    form.parts(spec).iter().fold(0, |sum, part| add(sum, part.len as u64))
}

/// Bytes of a tensor of elements of `size` bytes.
fn dense(spec: &Spec, size: usize) -> u64 {
    mul(mul(spec.rows as u64, spec.cols as u64), size as u64)
}

fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

fn mul(a: u64, b: u64) -> u64 {
    a.saturating_mul(b)
}
