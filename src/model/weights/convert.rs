//! Converts stored tensors to the engine's storage, sixteen rows at a time and in parallel.
//!
//! A tensor is read in windows, and each window's pages are given back to the system as soon as it is done. So loading
//! needs memory for its result and one window, however large a tensor is.

use super::checkpoint::{Checkpoint, Stored};
use super::spec::{Role, Spec};
use super::storage::{Loaded, Storage, padded};
use super::weight_type::WeightType;
use super::zeros::{self, Values};
use files::blocks::Dtype;
use files::blocks::gguf::decode;
use files::mapped::Plane;
use files::source::gguf::names::Rows;
use files::{Error, Result};
use numeric::pool;
use numeric::quant::format::GROUP_ROWS;
use numeric::quant::rows;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum bytes of a checkpoint that conversion keeps in memory.
pub const WINDOW: usize = 4 << 20;

/// Settings for loading weights.
pub struct LoadOptions<'a> {
    /// Type of the matrices.
    pub weight_type: WeightType,
    /// Threads for converting.
    pub threads: usize,
    /// Called with the number of tensors done and the number of all.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
}

/// True if the file stores a tensor in another form or with its rows in another order.
pub fn is_converted(stored: &Stored, storage: Storage) -> bool {
    let asis = storage == Storage::Rows(stored.block) && stored.order == Rows::Plain && !stored.transposed;
    storage != Storage::Head && !asis
}

/// Loads one tensor. A converted tensor goes into `room`, of [`room_of`] bytes, and has no planes yet: see
/// [`Storage::planes`]. `weight_type` is not `Auto`.
///
/// # Errors
///
/// [`Error::Model`]: the tensor is missing, wrong or cut off, or a converted value is not finite.
pub(super) fn load_one(
    checkpoint: &Checkpoint,
    spec: &Spec,
    weight_type: WeightType,
    threads: usize,
    room: &mut [u8],
) -> Result<Loaded> {
    let stored = checkpoint.find(spec)?.straight(spec)?;
    let Stored { name, data, file, .. } = &stored;
    zeros::check(spec, &Values { file, name, data, parts: spec.rows })?;
    let storage = Storage::of(spec, stored.block, weight_type);
    let planes = if spec.role == Role::Vector {
        vec![vector(&stored, spec)?]
    } else if storage == Storage::Head {
        Vec::new()
    } else if is_converted(&stored, storage) {
        convert(&stored, spec, storage, threads, room)?;
        stored.data.release();
        Vec::new()
    } else {
        vec![stored.data]
    };
    Ok(Loaded { storage, planes })
}

/// Bytes of the converted tensor; 0 if [`load_one`] does not convert it.
///
/// # Errors
///
/// [`Error::Model`]: the tensor is missing or wrong.
pub(super) fn room_of(checkpoint: &Checkpoint, spec: &Spec, weight_type: WeightType) -> Result<usize> {
    let mut stored = checkpoint.find(spec)?;
    stored.transposed = false; // `load_one` transposes it before.
    let storage = Storage::of(spec, stored.block, weight_type);
    let is_converted = spec.role != Role::Vector && is_converted(&stored, storage);
    Ok(if is_converted { storage.room(spec) } else { 0 })
}

/// A vector's values as little-endian f32, checked to be finite.
fn vector(stored: &Stored, spec: &Spec) -> Result<Plane> {
    let mut values = vec![0.0; spec.cols];
    decode(stored.block, stored.data.bytes(), &mut values);
    stored.data.release();
    if let Some(i) = values.iter().position(|x| !x.is_finite()) {
        let message = format!("tensor {}: element {i} is {}", stored.name, values[i]);
        return Err(Error::model(&stored.file, message));
    }
    if stored.beside_one {
        values.iter_mut().for_each(|x| *x += 1.0);
    }
    let bytes: Vec<u8> = (0..spec.cols).flat_map(|i| values[stored.order.stored(i)].to_le_bytes()).collect();
    Ok(Plane::shared(bytes))
}

/// Sixteen rows of both planes.
struct Group<'a> {
    quants: &'a mut [u8],
    scales: &'a mut [u8],
}

/// Some groups of one tensor.
struct Task<'a, 'b> {
    stored: &'a Stored,
    spec: &'a Spec,
    storage: Storage,
    /// Index of the first group.
    first: usize,
    /// The groups, each locked once by the thread that converts it.
    groups: &'a [Mutex<Group<'b>>],
}

/// Converts a tensor into `room`, which is [`Storage::room`] zeros.
fn convert(stored: &Stored, spec: &Spec, storage: Storage, threads: usize, room: &mut [u8]) -> Result<()> {
    let parts = storage.parts(spec);
    let len = |i: usize| parts.get(i).map_or(0, |part| part.len);
    let (quants, mut rest) = room.split_at_mut(padded(len(0)));
    let (group_quants, group_scales) = storage.group_bytes(spec.cols);
    let split = |quants| {
        let scales = rest.split_off_mut(..group_scales).expect("invariant: scales for every group");
        Mutex::new(Group { quants, scales })
    };
    let groups: Vec<_> = quants[..len(0)].chunks_mut(group_quants).map(split).collect();
    let bad_row = AtomicUsize::new(usize::MAX);
    let width = (WINDOW / (GROUP_ROWS * stored.row_bytes.max(1))).max(1);
    for (i, window) in groups.chunks(width).enumerate() {
        let task = Task { stored, spec, storage, first: i * width, groups: window };
        in_parallel(&task, threads, &bad_row);
        let rows = i * width * GROUP_ROWS..spec.rows.min((i * width + window.len()) * GROUP_ROWS);
        let bytes = rows.start * stored.row_bytes..rows.end * stored.row_bytes;
        if let Some(done) = stored.data.slice(bytes) {
            done.release();
        }
    }
    match bad_row.into_inner() {
        usize::MAX => Ok(()),
        row => Err(Error::model(
            &stored.file,
            format!(
                "tensor {}, row {}: holds NaN, infinity or values too large for an f16 scale; \
                 the checkpoint is broken",
                stored.name,
                stored.order.stored(row)
            ),
        )),
    }
}

/// Converts the groups of a task on several threads. `bad_row` becomes the first row that is not finite.
fn in_parallel(task: &Task<'_, '_>, threads: usize, bad_row: &AtomicUsize) {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut decoded = Decoded::default();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(group) = task.groups.get(i) else { return };
            let mut group = group.lock().expect("invariant: locked once");
            if let Storage::Blocks(format) = task.storage
                && format.padding() != 0
            {
                // The rows missing in the last group are zeros.
                group.quants.fill(format.padding());
            }
            let first = (task.first + i) * GROUP_ROWS;
            for row in first..task.spec.rows.min(first + GROUP_ROWS) {
                if !put_row(task, row, &mut group, &mut decoded) {
                    bad_row.fetch_min(row, Ordering::Relaxed);
                }
            }
        }
    };
    pool::at_once(threads.min(task.groups.len()), work);
}

/// Buffer for one decoded row.
#[derive(Default)]
struct Decoded {
    values: Vec<f32>,
    bytes: Vec<u8>, // the values, little-endian
}

impl Decoded {
    /// Decodes a stored row; false if a value is not finite.
    fn set(&mut self, stored: &Stored, row: usize, cols: usize) -> bool {
        self.values.resize(cols, 0.0);
        decode(stored.block, stored.row(row), &mut self.values);
        self.bytes.clear();
        self.bytes.extend(self.values.iter().flat_map(|x| x.to_le_bytes()));
        self.values.iter().all(|x| x.is_finite())
    }
}

/// Puts a row into its group; false if a value is not finite.
fn put_row(task: &Task<'_, '_>, row: usize, group: &mut Group<'_>, decoded: &mut Decoded) -> bool {
    let (stored, cols, lane) = (task.stored, task.spec.cols, row % GROUP_ROWS);
    let Group { quants, scales } = group;
    let mut copy = |bytes: &[u8]| quants[lane * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
    match (task.storage, stored.dtype()) {
        (Storage::Blocks(format), _) if format.block() == stored.block => {
            format.put_row(quants, scales, lane, stored.row(row))
        }
        // Q4_0, the only format that is quantised to.
        (Storage::Blocks(_), Some(dtype)) => rows::quantise(dtype, stored.row(row), lane, quants, scales),
        (Storage::Blocks(_), None) => {
            decoded.set(stored, row, cols) && rows::quantise(Dtype::F32, &decoded.bytes, lane, quants, scales)
        }
        (Storage::Rows(block), _) if block == stored.block => {
            copy(stored.row(row));
            true
        }
        (Storage::Rows(_) | Storage::Head, _) => {
            let finite = decoded.set(stored, row, cols);
            copy(&decoded.bytes);
            finite
        }
    }
}
