//! Stored tensors into the forms that the engine multiplies with, groups of sixteen rows in parallel.
//!
//! A tensor is taken in windows, and each window's pages of the mapped file are given back once it is done: so loading
//! needs what it makes and one window, however large a tensor is.

use super::checkpoint::{Checkpoint, Stored};
use super::spec::{Role, Spec};
use super::weight_type::{Form, WeightType};
use super::{LoadOptions, Loaded};
use files::blocks::gguf::decode;
use files::mapped::{AlignedBytes, Plane};
use files::source::Dtype;
use files::source::gguf::names::Rows;
use files::{Error, Result};
use numeric::quant::format::GROUP_ROWS;
use numeric::quant::rows;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most bytes of a checkpoint that are in memory at a time while tensors are converted.
pub const WINDOW: usize = 4 << 20;

/// Whether a tensor is converted: its form, or the order of its rows, is not that of the file.
pub fn is_converted(stored: &Stored, form: Form) -> bool {
    form != Form::Head && (form != Form::Rows(stored.block) || stored.order != Rows::Plain)
}

/// Loads one tensor of a checkpoint in the form that `weight_type`, which the checkpoint has settled, gives it.
///
/// # Errors
///
/// [`Error::Model`]: the tensor is missing or wrong, or holds what is no finite number where that is looked at.
pub(super) fn load_one(
    checkpoint: &Checkpoint,
    spec: &Spec,
    weight_type: WeightType,
    options: &LoadOptions<'_>,
) -> Result<Loaded> {
    let stored = checkpoint.find(spec)?;
    let form = Form::of(spec, stored.block, weight_type);
    if spec.role == Role::Vector {
        return vector(&stored, spec).map(Loaded::Vector);
    }
    if form == Form::Head {
        return Ok(Loaded::Head);
    }
    if !is_converted(&stored, form) {
        return Ok(Loaded::Rows { block: stored.block, data: stored.data });
    }
    let (quants, scales) = convert(&stored, spec, form, options.threads)?;
    stored.data.release();
    Ok(match form {
        Form::Blocks(format) => Loaded::Quantised { format, quants, scales },
        Form::Rows(block) => Loaded::Rows { block, data: quants },
        Form::Head => unreachable!("invariant: left above"),
    })
}

/// A vector's values, finite.
fn vector(stored: &Stored, spec: &Spec) -> Result<Vec<f32>> {
    let mut values = vec![0.0; spec.cols];
    decode(stored.block, stored.data.bytes(), &mut values);
    if let Some(i) = values.iter().position(|x| !x.is_finite()) {
        let message = format!("tensor {}: element {i} is {}", stored.name, values[i]);
        return Err(Error::model(&stored.file, message));
    }
    Ok(match stored.order {
        Rows::Plain => values,
        order => (0..spec.cols).map(|i| values[order.stored(i)]).collect(),
    })
}

/// One group of rows on its way: its part of both planes.
type Group<'a> = Mutex<(&'a mut [u8], &'a mut [u8])>;

/// Both planes of a tensor; the second is empty where the form has one.
fn convert(stored: &Stored, spec: &Spec, form: Form, threads: usize) -> Result<(Plane, Plane)> {
    let (quants_len, scales_len) = form.bytes(spec);
    let (mut quants, mut scales) = (AlignedBytes::zeroed(quants_len)?, AlignedBytes::zeroed(scales_len)?);
    let (of_quants, of_scales) = form.group_bytes(spec.cols);
    let mut rest = scales.as_mut_slice();
    let groups: Vec<Group<'_>> = quants
        .as_mut_slice()
        .chunks_mut(of_quants)
        .map(|quants| {
            let (scales, after) = std::mem::take(&mut rest).split_at_mut(of_scales);
            rest = after;
            Mutex::new((quants, scales))
        })
        .collect();
    let bad_row = AtomicUsize::new(usize::MAX);
    let width = (WINDOW / (GROUP_ROWS * stored.row_bytes().max(1))).max(1);
    for (i, window) in groups.chunks(width).enumerate() {
        let task = Task { stored, spec, form, first: i * width, groups: window };
        in_parallel(&task, threads, &bad_row);
        let rows = i * width * GROUP_ROWS..spec.rows.min((i * width + window.len()) * GROUP_ROWS);
        let bytes = rows.start * stored.row_bytes()..rows.end * stored.row_bytes();
        if let Some(done) = stored.data.slice(bytes) {
            done.release();
        }
    }
    drop(groups);
    match bad_row.into_inner() {
        usize::MAX => Ok((quants.into_plane(), scales.into_plane())),
        row => Err(Error::model(
            &stored.file,
            format!(
                "tensor {}, row {}: holds NaN, infinity or values too large for a f16 scale; \
                 the checkpoint is broken",
                stored.name,
                stored.order.stored(row)
            ),
        )),
    }
}

/// Some groups of one tensor.
struct Task<'a, 'b> {
    stored: &'a Stored,
    spec: &'a Spec,
    form: Form,
    /// The first of the groups.
    first: usize,
    groups: &'a [Group<'b>],
}

fn in_parallel(task: &Task<'_, '_>, threads: usize, bad_row: &AtomicUsize) {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut decoded = Decoded::default();
        // Each step is one group of sixteen rows; a mutex hands its two slices to whoever claims it.
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(group) = task.groups.get(i) else { return };
            let g = task.first + i;
            let mut planes = group.lock().expect("invariant: claimed once");
            let (quants, scales) = &mut *planes;
            if let Form::Blocks(format) = task.form
                && format.padding() != 0
            {
                quants.fill(format.padding());
            }
            for lane in 0..GROUP_ROWS.min(task.spec.rows - g * GROUP_ROWS) {
                let row = g * GROUP_ROWS + lane;
                if !put_row(task, row, (quants, scales), &mut decoded) {
                    bad_row.fetch_min(row, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(task.groups.len()) {
            scope.spawn(work);
        }
        work();
    });
}

/// A row that is decoded on its way; room for one.
#[derive(Default)]
struct Decoded {
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Decoded {
    /// A stored row as little-endian f32; false when one is not finite.
    fn set(&mut self, stored: &Stored, row: usize, cols: usize) -> bool {
        self.values.resize(cols, 0.0);
        decode(stored.block, stored.row(row), &mut self.values);
        self.bytes.clear();
        self.bytes.extend(self.values.iter().flat_map(|x| x.to_le_bytes()));
        self.values.iter().all(|x| x.is_finite())
    }
}

/// Puts a row where its group's planes have it; false when it holds what is no finite number.
fn put_row(
    task: &Task<'_, '_>,
    row: usize,
    (quants, scales): (&mut [u8], &mut [u8]),
    decoded: &mut Decoded,
) -> bool {
    let (stored, cols, lane) = (task.stored, task.spec.cols, row % GROUP_ROWS);
    match (task.form, stored.dtype()) {
        (Form::Blocks(format), _) if format.block() == stored.block => {
            format.put_row(quants, scales, lane, stored.row(row))
        }
        // Only Q4_0 is quantised to.
        (Form::Blocks(_), Some(dtype)) => rows::quantise(dtype, stored.row(row), lane, quants, scales),
        (Form::Blocks(_), None) => {
            decoded.set(stored, row, cols) && rows::quantise(Dtype::F32, &decoded.bytes, lane, quants, scales)
        }
        (Form::Rows(block), _) if block == stored.block => {
            quants[lane * stored.row_bytes()..][..stored.row_bytes()].copy_from_slice(stored.row(row));
            true
        }
        (Form::Rows(_) | Form::Head, _) => {
            let finite = decoded.set(stored, row, cols);
            quants[lane * decoded.bytes.len()..][..decoded.bytes.len()].copy_from_slice(&decoded.bytes);
            finite
        }
    }
}
