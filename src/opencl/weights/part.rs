//! Matrices as the bytes that are uploaded, and which of them a step can have.

use super::Chunk;
use crate::dims::{DIM, FFN_DIM};
use crate::model::weights::{Layer, Matrix};
use crate::opencl::form::{Form, Quantised};
use files::source::Dtype;
use numeric::quant::format::GROUP_ROWS;
use opencl_runtime::failure::{Failure, Kind, Result};
use std::borrow::Cow;
use std::ops::Range;

/// One matrix as bytes, in groups of sixteen rows.
pub struct Part<'a> {
    rows: usize,
    /// Columns.
    pub cols: usize,
    /// How it is stored.
    pub form: Form,
    /// Quants, or rows.
    quants: Cow<'a, [u8]>,
    scales: &'a [u8],
}

/// The matrices of a layer's steps. Those of one step are all multiplied with the same input, and gate and up, of which
/// one kernel reads both, are in one form: as f32 where they are not quantised.
///
/// # Errors
///
/// [`Kind::Build`] where the weights have other mixtures.
pub fn of_layer(l: &Layer) -> Result<[Vec<Part<'_>>; 4]> {
    let qkv = vec![Part::of(&l.wq), Part::of(&l.wk), Part::of(&l.wv)];
    if qkv.iter().any(|p| p.form.reads() != qkv[0].form.reads()) {
        return Err(mixed("q, k and v", &qkv));
    }
    Ok([qkv, vec![Part::of(&l.wo)], gate_up(&l.gate, &l.up)?, vec![Part::of(&l.down)]])
}

fn gate_up<'a>(gate: &'a Matrix<FFN_DIM, DIM>, up: &'a Matrix<FFN_DIM, DIM>) -> Result<Vec<Part<'a>>> {
    let both = vec![Part::of(gate), Part::of(up)];
    if both[0].form == both[1].form {
        return Ok(both);
    }
    match both.iter().all(|p| p.form.reads() == Quantised::No) {
        true => Ok(both.iter().map(Part::widened).collect()),
        false => Err(mixed("gate and up", &both)),
    }
}

fn mixed(names: &str, parts: &[Part<'_>]) -> Failure {
    let forms: Vec<String> = parts.iter().map(|p| p.form.to_string()).collect();
    let forms = forms.join(" and ");
    let message =
        format!("{names} of a layer are {forms}, which no kernel takes together; --backend cpu does");
    Failure::new(Kind::Build, message)
}

impl<'a> Part<'a> {
    /// The bytes of a matrix.
    pub fn of<const ROWS: usize, const COLS: usize>(m: &'a Matrix<ROWS, COLS>) -> Self {
        let all = 0..ROWS.div_ceil(GROUP_ROWS);
        let (form, quants, scales) = match m {
            Matrix::Quantised(w) => (Form::Blocks(w.format()), w.quants(all.clone()), w.scales(all)),
            Matrix::Dense { dtype, data } => (dense(*dtype), data.bytes(), [].as_slice()),
        };
        Part { rows: ROWS, cols: COLS, form, quants: quants.into(), scales }
    }

    /// Groups of sixteen rows.
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// Whether both are stored in the same way.
    pub fn same_form(&self, other: &Self) -> bool {
        self.form == other.form
    }

    /// Unquantised rows as f32.
    fn widened<'b>(&self) -> Part<'b> {
        let dtype = match self.form {
            Form::F16 => Dtype::F16,
            Form::Bf16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        let bytes = dtype.to_f32(&self.quants).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        Part { rows: self.rows, cols: self.cols, form: Form::F32, quants: bytes.into(), scales: &[] }
    }

    /// Writes some groups to the given groups of a buffer pair; rows that pad the last group are zeros.
    pub fn write(&self, range: Range<usize>, chunk: &Chunk, at: usize) -> Result<()> {
        let (group, scale) = self.form.group_bytes(self.cols);
        let end = (range.end * group).min(self.quants.len());
        let bytes = &self.quants[range.start * group..end];
        chunk.quants.write(at * group, bytes)?;
        let rest = at * group + bytes.len()..(at + range.len()) * group;
        chunk.quants.fill(rest, 0)?;
        match &chunk.scales {
            Some(scales) => scales.write(at * scale, &self.scales[range.start * scale..range.end * scale]),
            None => Ok(()),
        }
    }
}

fn dense(dtype: Dtype) -> Form {
    match dtype {
        Dtype::F32 => Form::F32,
        Dtype::F16 => Form::F16,
        Dtype::BF16 => Form::Bf16,
        Dtype::U8 => unreachable!("invariant: bytes are not a weight type"),
    }
}
