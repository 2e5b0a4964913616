//! The tensors of a quantised matrix, with their types and shapes checked.

use super::{CodeKind, CodeOrder, QuantisedTensor};
use crate::blocks::{BlockType, Dtype};
use crate::config::QuantMethod;
use crate::source::{Safetensors, Tensor};
use crate::{Error, Result};

/// The tensors whose names begin with a module's.
pub(super) struct TensorParts<'a> {
    source: &'a Safetensors,
    stem: &'a str,
    method: QuantMethod,
    rows: usize,
    cols: usize,
}

const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

impl<'a> TensorParts<'a> {
    pub fn new(
        source: &'a Safetensors,
        stem: &'a str,
        method: QuantMethod,
        (rows, cols): (usize, usize),
    ) -> Self {
        Self { source, stem, method, rows, cols }
    }

    /// The matrix; `None` if its weights are usual ones, or missing.
    pub fn read_tensor(&self) -> Result<Option<QuantisedTensor>> {
        let Some((codes, kind, order)) = self.find_codes()? else { return Ok(None) };
        let (group_count, scales) = self.read_scales(kind)?;
        let groups = self.read_groups(group_count)?;
        let zeros = self.read_zeros(kind, group_count)?;
        let row_bytes = if let CodeOrder::Along(len) = order { len } else { 0 };
        let (codes, block) = (codes.clone(), BlockType::F32);
        let tensor = QuantisedTensor {
            codes,
            row_bytes,
            block,
            loss: None,
            order,
            kind,
            groups,
            group_count,
            scales,
            zeros,
        };
        Ok(Some(tensor.choose_block()))
    }

    fn find_part(&self, suffix: &str) -> Option<&'a Tensor> {
        self.source.get(&format!("{}{suffix}", self.stem))
    }

    fn require_part(&self, suffix: &str) -> Result<&'a Tensor> {
        self.source.get_required(&format!("{}{suffix}", self.stem))
    }

    fn find_codes(&self) -> Result<Option<(&'a Tensor, CodeKind, CodeOrder)>> {
        let (rows, cols) = (self.rows, self.cols);
        // Words for this many integers.
        let words = |count: usize, bits: usize| (count * bits).div_ceil(32);
        if let QuantMethod::Gptq { .. } | QuantMethod::Awq = self.method {
            let Some(codes) = self.find_part("qweight") else { return Ok(None) };
            if self.method == QuantMethod::Awq {
                check_tensor(codes, &[Dtype::I32], &[&[cols, words(rows, 4)]])?;
                return Ok(Some((codes, CodeKind::Unsigned(4), CodeOrder::Awq(4 * words(rows, 4)))));
            }
            let shapes = [4, 8].map(|bits| [words(cols, bits), rows]);
            let found = check_tensor(codes, &[Dtype::I32], &[&shapes[0], &shapes[1]])?;
            return Ok(Some((codes, CodeKind::Unsigned([4, 8][found]), CodeOrder::Across(rows))));
        }
        if let Some(shape) = self.find_part("weight_shape") {
            check_tensor(shape, &[Dtype::I32, Dtype::I64], &[&[2]])?;
            let found = shape.dtype.to_f32(shape.data.bytes());
            if found != [rows as f32, cols as f32] {
                let why =
                    format!("tensor {} holds {found:?}; config.json makes it [{rows}, {cols}]", shape.name);
                return Err(Error::model(&shape.file, why));
            }
        }
        let Some(codes) = self.find_part("weight_packed") else {
            let Some(codes) = self.find_part("weight") else { return Ok(None) };
            let kind = match codes.dtype {
                Dtype::F8_E4M3 | Dtype::F8_E5M2 => CodeKind::Float(codes.dtype),
                Dtype::I8 => CodeKind::Signed,
                _ => return Ok(None),
            };
            check_tensor(codes, &[codes.dtype], &[&[rows, cols]])?;
            return Ok(Some((codes, kind, CodeOrder::Along(cols))));
        };
        if codes.dtype == Dtype::U8 {
            check_tensor(codes, &[Dtype::U8], &[&[rows, cols.div_ceil(2)]])?;
            return Ok(Some((codes, CodeKind::E2m1, CodeOrder::Along(cols.div_ceil(2)))));
        }
        let shapes = [4, 8].map(|bits| [rows, words(cols, bits)]);
        let found = check_tensor(codes, &[Dtype::I32], &[&shapes[0], &shapes[1]])?;
        Ok(Some((codes, CodeKind::Unsigned([4, 8][found]), CodeOrder::Along(4 * shapes[found][1]))))
    }

    /// The number of groups, and the scales `[row][group]`.
    fn read_scales(&self, kind: CodeKind) -> Result<(usize, Vec<f32>)> {
        let (rows, cols) = (self.rows, self.cols);
        let block = match self.method {
            QuantMethod::Fp8 { block } | QuantMethod::CompressedTensors { block } => block,
            QuantMethod::Gptq { .. } | QuantMethod::Awq => {
                let scales = self.require_part("scales")?;
                let groups = scales.shape.first().copied().unwrap_or_default();
                check_tensor(scales, FLOATS, &[&[groups, rows]])?;
                let values = scales.dtype.to_f32(scales.data.bytes());
                let transposed = (0..rows * groups).map(|i| values[i % groups * rows + i / groups]);
                return Ok((groups, transposed.collect()));
            }
        };
        let scales =
            self.find_part("weight_scale_inv").map_or_else(|| self.require_part("weight_scale"), Ok)?;
        let of_blocks = block.map(|[height, width]| [rows.div_ceil(height), cols.div_ceil(width)]);
        let groups = scales.shape.get(1).copied().unwrap_or(1);
        let mut shapes = vec![&[][..], &[1], &[1, 1]];
        let tables = [[rows, groups]];
        shapes.extend(of_blocks.iter().map(|shape| &shape[..]));
        shapes.extend([&tables[0][..], &tables[0][..1]]);
        let dtypes = if kind == CodeKind::E2m1 { &[Dtype::U8, Dtype::F8_E4M3] } else { FLOATS };
        let found = check_tensor(scales, dtypes, &shapes)?;
        let mut values = scales.dtype.to_f32(scales.data.bytes());
        if scales.dtype == Dtype::U8 {
            // E8M0: the exponent of an f32, whose smallest is a subnormal number.
            let widen = |e: &f32| f32::from_bits((*e as u32) << 23).max(f32::from_bits(1 << 22));
            values = values.iter().map(widen).collect();
        } else if kind == CodeKind::E2m1 {
            let factor = self.require_part("weight_global_scale")?;
            check_tensor(factor, FLOATS, &[&[], &[1]])?;
            let factor = factor.dtype.to_f32(factor.data.bytes())[0];
            values.iter_mut().for_each(|scale| *scale /= factor);
        }
        match block {
            _ if found < 3 => Ok((1, vec![values[0]; rows])),
            Some([height, _]) if Some(&scales.shape[..]) == of_blocks.as_ref().map(|shape| &shape[..]) => {
                let rows = (0..rows).flat_map(|row| &values[row / height * groups..][..groups]);
                Ok((groups, rows.copied().collect()))
            }
            _ => Ok((groups, values)),
        }
    }

    /// Group of each column.
    fn read_groups(&self, count: usize) -> Result<Vec<u32>> {
        let cols = self.cols;
        if let Some(order) = self.find_part("g_idx").or_else(|| self.find_part("weight_g_idx")) {
            check_tensor(order, &[Dtype::I32], &[&[cols]])?;
            let words = order.data.bytes().as_chunks().0.iter();
            let groups: Vec<u32> = words.map(|word| u32::from_le_bytes(*word)).collect();
            if let Some(i) = groups.iter().position(|group| *group as usize >= count) {
                let group = groups[i] as i32;
                if group != -1 || groups.iter().any(|group| *group != u32::MAX) {
                    let why = format!(
                        "tensor {}: element {i} is {group}; supported: 0 to {}",
                        order.name,
                        count - 1
                    );
                    return Err(Error::model(&order.file, format!("{why}; download the whole model")));
                }
            } else {
                return Ok(groups);
            }
        }
        let width = match self.method {
            QuantMethod::Fp8 { block: Some([_, width]) }
            | QuantMethod::CompressedTensors { block: Some([_, width]) }
                if count == cols.div_ceil(width) =>
            {
                width
            }
            _ if cols.is_multiple_of(count) => cols / count,
            _ => {
                let why = format!("{}weight: {count} groups do not divide {cols} columns", self.stem);
                return Err(Error::model(self.source.path(), format!("{why}; quantise it with a divisor")));
            }
        };
        Ok((0..cols).map(|col| (col / width) as u32).collect())
    }

    /// Zero points `[row][group]`.
    fn read_zeros(&self, kind: CodeKind, groups: usize) -> Result<Vec<i16>> {
        let (rows, bits) = (self.rows, kind.code_bits());
        let middle = 1 << (bits - 1);
        let symmetric = || vec![middle; rows * groups];
        if !matches!(kind, CodeKind::Unsigned(_) | CodeKind::Signed) {
            return Ok(Vec::new());
        }
        let words = (rows * bits).div_ceil(32);
        let (zeros, offset) = match self.method {
            QuantMethod::Gptq { zero_offset } => (self.require_part("qzeros")?, zero_offset),
            QuantMethod::Awq => (self.require_part("qzeros")?, 0),
            _ => match self.find_part("weight_zero_point") {
                None => return Ok(symmetric()),
                Some(zeros) if zeros.dtype == Dtype::I8 => {
                    let shapes: [&[usize]; 4] = [&[rows, groups], &[rows * groups], &[], &[1]];
                    let found = check_tensor(zeros, &[Dtype::I8], &shapes)?;
                    let values: Vec<i16> =
                        zeros.data.bytes().iter().map(|zero| i16::from(*zero as i8) + middle).collect();
                    if let Some(i) = values.iter().position(|zero| !(0..2 * middle).contains(zero)) {
                        let why = format!("tensor {}: element {i} does not fit {bits} bits", zeros.name);
                        return Err(Error::model(&zeros.file, format!("{why}; download the model again")));
                    }
                    return Ok(if found < 2 { values } else { vec![values[0]; rows * groups] });
                }
                Some(zeros) => {
                    check_tensor(zeros, &[Dtype::I32], &[&[words, groups]])?;
                    let (order, bytes) = (CodeOrder::Across(groups), zeros.data.bytes());
                    let zero = |i| order.read_code(bytes, bits, (i / groups, i % groups));
                    return Ok((0..rows * groups).map(|i| i16::from(zero(i))).collect());
                }
            },
        };
        check_tensor(zeros, &[Dtype::I32], &[&[groups, words]])?;
        // Added to whole words, as it was subtracted.
        let offsets = offset * (u32::MAX / ((1 << bits) - 1));
        let add = |word: &[u8; 4]| u32::from_le_bytes(*word).wrapping_add(offsets).to_le_bytes();
        let bytes: Vec<u8> = zeros.data.bytes().as_chunks().0.iter().flat_map(add).collect();
        let order = if self.method == QuantMethod::Awq {
            CodeOrder::Awq(4 * words)
        } else {
            CodeOrder::Along(4 * words)
        };
        let zero = |i| order.read_code(&bytes, bits, (i % groups, i / groups));
        Ok((0..rows * groups).map(|i| i16::from(zero(i))).collect())
    }
}

/// Checks a tensor's type, and finds its shape among some.
fn check_tensor(tensor: &Tensor, dtypes: &[Dtype], shapes: &[&[usize]]) -> Result<usize> {
    let Tensor { name, dtype, shape, file, .. } = tensor;
    if !dtypes.contains(dtype) {
        let why = format!("tensor {name} has type {dtype:?}; quantization_config makes it one of {dtypes:?}");
        return Err(Error::model(file, why));
    }
    let found = shapes.iter().position(|known| *known == &shape[..]);
    let is_empty = shape.contains(&0);
    found.filter(|_| !is_empty).ok_or_else(|| {
        let why = format!("tensor {name} has shape {shape:?}; config.json makes it one of {shapes:?}");
        Error::model(file, format!("{why}; download the model again"))
    })
}
