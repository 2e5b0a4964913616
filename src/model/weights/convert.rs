//! Converts stored tensors to the engine's storage, sixteen rows at a time and in parallel.
//!
//! A tensor is read in windows, and each window's pages are given back to the system as soon as it is done. So loading
//! needs memory for its result and one window, however large a tensor is.

use super::checkpoint::Checkpoint;
use super::grid;
use super::lora::{DecodedDelta, LoraDelta};
use super::spec::{TensorRole, TensorSpec};
use super::storage::{LoadedTensor, Storage, padded_len};
use super::stored_tensor::{StoredForm, StoredTensor};
use super::weight_type::WeightType;
use super::zeros::{self, StoredValues};
use crate::cpu::InputSquares;
use files::blocks::Dtype;
use files::blocks::gguf::decode_values;
use files::mapped::MappedSlice;
use files::source::gguf::names::RowOrder;
use files::{Error, Result};
use numeric::pool;
use numeric::quant::format::{Format, GROUP_ROWS, put_block};
use numeric::quant::{fit, rows};
use std::ops::Range;
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
    /// Weight of the errors of each column in [calibrated](WeightType::is_calibrated) types.
    pub importance: Importance<'a>,
    /// Called with the number of tensors done and the number of all.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
}

impl LoadOptions<'_> {
    /// Options that report no progress and let all columns count alike.
    pub fn new(weight_type: WeightType, threads: usize) -> Self {
        Self { weight_type, threads, importance: Importance::Alike, progress: &|_, _| {} }
    }
}

/// Source of the importance of columns: the mean squares of the activations that they are multiplied with.
#[derive(Clone, Copy)]
pub enum Importance<'a> {
    /// All columns count alike.
    Alike,
    /// Measured over these tokens of a text.
    Text(&'a [u32]),
    /// Measured before.
    Known(&'a InputSquares),
}

/// True if the file stores a tensor in another form, with its rows in another order, or without what is added to it.
pub fn is_converted(stored: &StoredTensor, storage: Storage) -> bool {
    let is_whole = stored.has_rows() && stored.parts.len() == 1 && stored.deltas.is_empty();
    let asis = storage == Storage::Rows(stored.block) && stored.order == RowOrder::Unchanged && is_whole;
    storage != Storage::Head && !asis
}

/// Loads one tensor. A converted tensor goes into `room`, of [`converted_bytes`] bytes, and has no planes yet: see
/// [`Storage::plane_specs`]. `weight_type` is not `Auto`.
///
/// # Errors
///
/// [`Error::Model`]: the tensor is missing, wrong or cut off, or a converted value is not finite.
pub(super) fn load_tensor(
    checkpoint: &Checkpoint,
    spec: &TensorSpec,
    (weight_type, squares): (WeightType, Option<&InputSquares>),
    threads: usize,
    room: &mut [u8],
) -> Result<LoadedTensor> {
    let stored = checkpoint.find_tensor(spec)?.into_rows(spec)?;
    for (part, data) in stored.parts.iter().enumerate() {
        let (file, name, parts) = (&stored.file, &stored.part_name(part), spec.rows / stored.parts.len());
        zeros::check_not_zeros(spec, &StoredValues { file, name, data, parts })?;
    }
    let storage = stored.choose_storage(spec, weight_type);
    let planes = if spec.role == TensorRole::Vector {
        vec![decode_vector(&stored, spec)?]
    } else if storage == Storage::Head {
        Vec::new()
    } else if is_converted(&stored, storage) {
        let importance = squares.map_or(Vec::new(), |squares| squares.column_weights(&spec.name));
        convert_tensor(&stored, spec, (storage, &importance), threads, room)?;
        stored.parts.iter().for_each(MappedSlice::release_pages);
        stored.deltas.iter().for_each(LoraDelta::release_pages);
        Vec::new()
    } else {
        stored.parts
    };
    Ok(LoadedTensor { storage, planes })
}

/// Bytes of the converted tensor; 0 if [`load_tensor`] does not convert it.
///
/// # Errors
///
/// [`Error::Model`]: the tensor is missing or wrong.
pub(super) fn converted_bytes(
    checkpoint: &Checkpoint,
    spec: &TensorSpec,
    weight_type: WeightType,
) -> Result<usize> {
    let mut stored = checkpoint.find_tensor(spec)?;
    if stored.is_rearranged() {
        // `load_tensor` brings it to rows before.
        (stored.form, stored.order) = (StoredForm::Rows, RowOrder::Unchanged);
    }
    let storage = stored.choose_storage(spec, weight_type);
    let is_converted = spec.role != TensorRole::Vector && is_converted(&stored, storage);
    Ok(if is_converted { storage.padded_bytes(spec) } else { 0 })
}

/// A vector's values as little-endian f32, checked to be finite.
fn decode_vector(stored: &StoredTensor, spec: &TensorSpec) -> Result<MappedSlice> {
    let mut values = vec![0.0; stored.byte_len() / stored.block.bytes_per_block()];
    decode_values(stored.block, stored.parts[0].bytes(), &mut values);
    stored.parts[0].release_pages();
    if let Some(i) = values.iter().position(|x| !x.is_finite()) {
        let message = format!("tensor {}: element {i} is {}", stored.name, values[i]);
        return Err(Error::model(&stored.file, message));
    }
    let value = |i| stored.map.map_value(values[stored.order.file_row(i)]);
    let bytes: Vec<u8> = (0..spec.cols).flat_map(|i| value(i).to_le_bytes()).collect();
    Ok(MappedSlice::from_owner(bytes))
}

/// Sixteen rows of both planes.
struct RowGroup<'a> {
    quants: &'a mut [u8],
    scales: &'a mut [u8],
}

/// Some groups of one tensor.
struct ConversionTask<'a, 'b> {
    stored: &'a StoredTensor,
    spec: &'a TensorSpec,
    storage: Storage,
    deltas: &'a [DecodedDelta<'a>],
    /// See [`grid`].
    is_on_grid: bool,
    /// Importance of each column; empty if all count alike.
    importance: &'a [f32],
    /// Index of the first group.
    first: usize,
    /// The groups, each locked once by the thread that converts it.
    groups: &'a [Mutex<RowGroup<'b>>],
}

/// Converts a tensor into `room`, which is [`Storage::padded_bytes`] zeros.
fn convert_tensor(
    stored: &StoredTensor,
    spec: &TensorSpec,
    (storage, importance): (Storage, &[f32]),
    threads: usize,
    room: &mut [u8],
) -> Result<()> {
    let parts = storage.plane_specs(spec);
    let len = |i: usize| parts.get(i).map_or(0, |part| part.len);
    let (quants, mut rest) = room.split_at_mut(padded_len(len(0)));
    let (group_quants, group_scales) = storage.group_bytes(spec.cols);
    let split = |quants| {
        let scales = rest.split_off_mut(..group_scales).expect("invariant: scales for every group");
        Mutex::new(RowGroup { quants, scales })
    };
    let groups: Vec<_> = quants[..len(0)].chunks_mut(group_quants).map(split).collect();
    let deltas: Vec<DecodedDelta<'_>> = stored.deltas.iter().map(LoraDelta::decode).collect();
    let bad_row = AtomicUsize::new(usize::MAX);
    let is_on_grid = storage == Storage::Blocks(Format::Q4_0)
        && deltas.is_empty()
        && grid::is_on_grid(stored, spec, threads);
    let width = (WINDOW / (GROUP_ROWS * stored.row_bytes.max(1))).max(1);
    for (i, window) in groups.chunks(width).enumerate() {
        let task = ConversionTask {
            stored,
            spec,
            storage,
            deltas: &deltas,
            is_on_grid,
            importance,
            first: i * width,
            groups: window,
        };
        convert_groups(&task, threads, &bad_row);
        let rows = i * width * GROUP_ROWS..spec.rows.min((i * width + window.len()) * GROUP_ROWS);
        stored.release_rows(rows);
    }
    match bad_row.into_inner() {
        usize::MAX => Ok(()),
        row => {
            let (name, row) = stored.find_row(row);
            let message = format!(
                "tensor {name}, row {row}: holds NaN, infinity or values too large for an f16 scale; \
                 the checkpoint is broken{}",
                if deltas.is_empty() { "" } else { ", or the adapter for another one" }
            );
            Err(Error::model(&stored.file, message))
        }
    }
}

/// Converts the groups of a task on several threads. `bad_row` becomes the first row that is not finite.
fn convert_groups(task: &ConversionTask<'_, '_>, threads: usize, bad_row: &AtomicUsize) {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut decoded = DecodedRow::default();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(group) = task.groups.get(i) else { return };
            let mut group = group.lock().expect("invariant: locked once");
            if let Storage::Blocks(format) = task.storage
                && format.padding_byte() != 0
            {
                // The rows missing in the last group are zeros.
                group.quants.fill(format.padding_byte());
            }
            let first = (task.first + i) * GROUP_ROWS;
            let rows = first..task.spec.rows.min(first + GROUP_ROWS);
            let bad = if task.is_fitted() {
                fit_group(task, rows, &mut group)
            } else {
                rows.into_iter().find(|row| !put_row(task, *row, &mut group, &mut decoded))
            };
            bad.map(|row| bad_row.fetch_min(row, Ordering::Relaxed));
        }
    };
    pool::run_on_threads(threads.min(task.groups.len()), work);
}

/// Buffer for one decoded row.
#[derive(Default)]
struct DecodedRow {
    values: Vec<f32>,
    bytes: Vec<u8>, // the values, little-endian
}

impl DecodedRow {
    /// Decodes a row of the task's tensor; false if a value is not finite.
    fn decode_row(&mut self, task: &ConversionTask<'_, '_>, row: usize) -> bool {
        self.values.resize(task.spec.cols, 0.0);
        task.decode_row(row, &mut self.values);
        self.bytes.clear();
        self.bytes.extend(self.values.iter().flat_map(|x| x.to_le_bytes()));
        self.values.iter().all(|x| x.is_finite())
    }
}

impl ConversionTask<'_, '_> {
    /// Decodes a stored row, and adds what is to be added.
    fn decode_row(&self, row: usize, values: &mut [f32]) {
        self.stored.decode_row(row, values);
        self.deltas.iter().for_each(|delta| delta.add_to_row(row, values));
    }

    /// True if groups are quantised as a whole.
    fn is_fitted(&self) -> bool {
        matches!(self.storage, Storage::Blocks(format)
            if fit::is_fitted(format) && self.stored.block != format.block_type())
    }
}

/// Quantises the rows of a group together; returns one with a value that is not finite, if there is any.
fn fit_group(task: &ConversionTask<'_, '_>, rows: Range<usize>, group: &mut RowGroup<'_>) -> Option<usize> {
    let mut values = vec![0.0; GROUP_ROWS * task.spec.cols];
    for (row, values) in rows.clone().zip(values.chunks_exact_mut(task.spec.cols)) {
        task.decode_row(row, values);
    }
    let Storage::Blocks(format) = task.storage else { return None };
    let fitted = fit::quantise_group(format, &values, task.importance, (group.quants, group.scales));
    fitted.err().map(|lane| rows.start + lane)
}

/// Puts a row into its group; false if a value is not finite.
fn put_row(
    task: &ConversionTask<'_, '_>,
    row: usize,
    group: &mut RowGroup<'_>,
    decoded: &mut DecodedRow,
) -> bool {
    let (stored, lane, is_added) = (task.stored, row % GROUP_ROWS, !task.deltas.is_empty());
    let RowGroup { quants, scales } = group;
    let mut copy = |bytes: &[u8]| quants[lane * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
    match (task.storage, stored.element_type()) {
        (Storage::Blocks(format), _) if format.block_type() == stored.block => {
            format.put_row(quants, scales, lane, &stored.row_bytes_at(row))
        }
        (Storage::Blocks(_), Some(dtype)) if task.is_on_grid => {
            let row = stored.row_bytes_at(row);
            grid::find_blocks(dtype, &row).enumerate().fold(true, |all, (b, block)| {
                block.is_some_and(|block| put_block(quants, scales, b, lane, &block)) && all
            })
        }
        // Q4_0, the only format that is quantised to row by row.
        (Storage::Blocks(_), Some(dtype)) if !is_added => {
            rows::quantise_row(dtype, &stored.row_bytes_at(row), lane, quants, scales)
        }
        (Storage::Blocks(_), _) => {
            decoded.decode_row(task, row)
                && rows::quantise_row(Dtype::F32, &decoded.bytes, lane, quants, scales)
        }
        (Storage::Rows(block), _) if block == stored.block && !is_added => {
            copy(&stored.row_bytes_at(row));
            true
        }
        (Storage::Rows(block), Some(dtype)) if block == stored.block && dtype != Dtype::F32 => {
            decoded.decode_row(task, row);
            let rounded = dtype.round_values(&decoded.values);
            copy(&rounded);
            dtype.to_f32(&rounded).iter().all(|x| x.is_finite())
        }
        (Storage::Rows(_) | Storage::Head, _) => {
            let finite = decoded.decode_row(task, row);
            copy(&decoded.bytes);
            finite
        }
    }
}
