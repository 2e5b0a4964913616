//! A tensor as a file stores it.

use super::lora::LoraDelta;
use super::spec::{CheckpointPlace, TensorRole, TensorSpec, ValueMap};
use super::storage::Storage;
use super::weight_type::WeightType;
use crate::dims::EXPERTS;
use files::Result;
use files::blocks::gguf::decode_values;
use files::blocks::{BLOCK, BlockType, Dtype};
use files::mapped::{AlignedBytes, MappedSlice};
use files::source::gguf::names::RowOrder;
use files::source::quantised::QuantisedTensor;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A tensor as the file stores it, with its shape checked.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    pub block: BlockType,
    /// Order of its rows in the file.
    pub order: RowOrder,
    /// Form of the file's tensor, of which the only part holds the whole unless these are rows.
    pub form: StoredForm,
    /// Change of a vector's values.
    pub map: ValueMap,
    /// `[rows][cols / block.values()][block.bytes()]`, in one or more parts of equally many rows; of a quantised
    /// checkpoint the codes.
    pub parts: Vec<MappedSlice>,
    pub file: Arc<Path>,
    /// Bytes of one row in `parts`; 0 if they are not together.
    pub row_bytes: usize,
    /// Added to the matrix when it is loaded.
    pub deltas: Vec<LoraDelta>,
}

/// Form of a stored tensor.
#[derive(Debug, Clone)]
pub enum StoredForm {
    /// Row by row.
    Rows,
    /// Its rows are the columns of the file's matrix, or of its matrices of experts.
    Transposed,
    /// Codes of MXFP4, of two neighbours in a byte, whose scales are another tensor.
    Mxfp4 { scales: MappedSlice },
    /// Of a quantised checkpoint: the matrix, whose blocks are made row by row, and the tensor's first row in it.
    Quantised(Arc<QuantisedTensor>, usize),
}

impl StoredTensor {
    /// True if the file has its rows as they are used.
    pub fn has_rows(&self) -> bool {
        matches!(self.form, StoredForm::Rows)
    }

    /// True if it has to be brought to rows in memory of its own: see [`StoredTensor::into_rows`].
    pub fn is_rearranged(&self) -> bool {
        matches!(self.form, StoredForm::Transposed | StoredForm::Mxfp4 { .. })
    }

    /// True if a row is read without reading the others.
    pub fn is_read_by_rows(&self) -> bool {
        !self.is_rearranged() && self.row_bytes > 0
    }

    /// Blocks or elements of row `row` of the matrix, wherever the file has it.
    pub fn row_bytes_at(&self, row: usize) -> Cow<'_, [u8]> {
        let row = self.order.file_row(row);
        if let StoredForm::Quantised(matrix, first) = &self.form {
            return matrix.encode_row(first + row).into();
        }
        let (at, of_part) = (row * self.row_bytes, self.parts[0].bytes().len());
        self.parts[at / of_part].bytes()[at % of_part..][..self.row_bytes].into()
    }

    /// Decodes row `row` of the matrix; a quantised checkpoint's exactly, although its blocks may be less exact.
    pub fn decode_row(&self, row: usize, values: &mut [f32]) {
        match &self.form {
            StoredForm::Quantised(matrix, first) => {
                matrix.decode_row(first + self.order.file_row(row), values)
            }
            _ => decode_values(self.block, &self.row_bytes_at(row), values),
        }
    }

    /// The file's tensor with a row, and the row's index there. (The name of several is that of the first expert's.)
    pub fn find_row(&self, row: usize) -> (String, usize) {
        let (row, of_part) = (self.order.file_row(row), self.parts[0].bytes().len() / self.row_bytes.max(1));
        (self.part_name(row / of_part.max(1)), row % of_part.max(1))
    }

    /// Name of the tensor that is this part.
    pub fn part_name(&self, part: usize) -> String {
        self.name.replace("experts.0.", &format!("experts.{part}."))
    }

    /// Bytes of all parts.
    pub fn byte_len(&self) -> usize {
        self.parts.iter().map(|part| part.bytes().len()).sum()
    }

    /// Releases the pages of some of the file's rows; see [`MappedSlice::release_pages`].
    pub fn release_rows(&self, rows: Range<usize>) {
        let (mut start, mut end) = (rows.start * self.row_bytes, rows.end * self.row_bytes);
        for part in &self.parts {
            let len = part.bytes().len();
            if let Some(done) = part.slice(start.min(len)..end.min(len)).filter(|_| start < end.min(len)) {
                done.release_pages();
            }
            (start, end) = (start.saturating_sub(len), end.saturating_sub(len));
        }
    }

    /// Cuts the rows of a spec out of a tensor that also holds others'.
    pub(super) fn select_rows(self, spec: &TensorSpec) -> Self {
        let CheckpointPlace { first, of, order, .. } = spec.stored;
        let (rows, bytes) = match spec.role {
            TensorRole::Vector => (spec.cols, self.block.bytes_per_block()),
            _ => (spec.rows, self.row_bytes),
        };
        if rows == of || self.is_rearranged() || matches!(order, RowOrder::HeadPart { .. }) {
            return self;
        }
        let form = match self.form {
            StoredForm::Quantised(matrix, _) => StoredForm::Quantised(matrix, first),
            form => form,
        };
        if self.row_bytes == 0 {
            return Self { form, ..self };
        }
        let part = self.parts[0].slice(first * bytes..(first + rows) * bytes);
        Self { parts: vec![part.expect("invariant: the shape was checked")], form, ..self }
    }

    /// Brings a [rearranged](StoredTensor::is_rearranged) tensor to rows, in memory of its own.
    pub fn into_rows(self, spec: &TensorSpec) -> Result<Self> {
        let from = self.parts[0].bytes();
        let mut rows =
            AlignedBytes::zeroed(if self.is_rearranged() { spec.rows * self.row_bytes } else { 0 })?;
        let to = rows.as_mut_slice().chunks_exact_mut(self.row_bytes.max(1)).enumerate();
        match &self.form {
            StoredForm::Rows | StoredForm::Quantised(..) => return Ok(self),
            StoredForm::Transposed => {
                let size = self.block.bytes_per_block();
                let matrices = if spec.is_expert() { EXPERTS.count } else { 1 };
                let of_matrix = spec.rows / matrices;
                let width = from.len() / (size * spec.cols * matrices);
                for (row, to) in to {
                    let at = spec.stored.first + self.order.file_row(row % of_matrix);
                    for (col, to) in to.chunks_exact_mut(size).enumerate() {
                        let col = row / of_matrix * spec.cols + col;
                        to.copy_from_slice(&from[(col * width + at) * size..][..size]);
                    }
                }
            }
            StoredForm::Mxfp4 { scales } => {
                let blocks = spec.cols / BLOCK;
                let (codes, scales) = (from.as_chunks::<{ BLOCK / 2 }>().0, scales.bytes());
                for (row, to) in to {
                    let from = self.order.file_row(row) * blocks;
                    for (b, to) in to.chunks_exact_mut(1 + BLOCK / 2).enumerate() {
                        to[0] = scales[from + b];
                        let code = |i: usize| codes[from + b][i / 2] >> (4 * (i % 2)) & 15;
                        for (i, to) in to[1..].iter_mut().enumerate() {
                            *to = code(i) | code(i + BLOCK / 2) << 4;
                        }
                    }
                }
            }
        }
        self.parts[0].release_pages();
        Ok(Self { parts: vec![rows.freeze()], form: StoredForm::Rows, order: RowOrder::Unchanged, ..self })
    }

    /// Storage after loading; `weight_type` is not `Auto`. With adapters, f32 weights keep their sums unrounded.
    pub fn choose_storage(&self, spec: &TensorSpec, weight_type: WeightType) -> Storage {
        match Storage::for_tensor(spec, self.block, weight_type) {
            Storage::Rows(_) if weight_type == WeightType::F32 && !self.deltas.is_empty() => {
                Storage::Rows(BlockType::F32)
            }
            storage => storage,
        }
    }

    /// The element type; `None` for blocks.
    pub fn element_type(&self) -> Option<Dtype> {
        Dtype::from_block_type(self.block)
    }
}
