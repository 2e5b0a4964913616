//! Detects incomplete downloads: a file whose size was set in advance holds zeros from where the download stopped. Such
//! a model would run and generate nothing or nonsense.
//!
//! The search stops at the first byte that is not zero, so an intact file costs a page or two per tensor.

use super::spec::{CHOICE_BIAS, TensorRole, TensorSpec};
use files::mapped::MappedSlice;
use files::{Error, Result};
use std::path::Path;

/// Maximum number of unused rows at the end of a vocabulary: published models pad theirs to a round number.
const PADDING: usize = 1024;

/// The stored values of a tensor.
pub struct StoredValues<'a> {
    /// The file, and the tensor's name in it.
    pub file: &'a Path,
    pub name: &'a str,
    /// Part of the mapped file.
    pub data: &'a MappedSlice,
    /// Number of equal parts of the data, the last of which is not zeros in an intact file: rows, or groups of rows.
    pub parts: usize,
}

/// Rejects a norm or matrix that is all zeros, or that ends in zeros together with the rest of its file. Biases and the
/// last rows of a vocabulary may be zeros.
///
/// # Errors
///
/// [`Error::Model`], with the tensor's name.
pub fn check_not_zeros(spec: &TensorSpec, values: &StoredValues<'_>) -> Result<()> {
    let StoredValues { file, name, data, parts } = *values;
    if spec.role == TensorRole::Vector && [".bias", CHOICE_BIAS].iter().any(|end| spec.name.ends_with(end)) {
        return Ok(());
    }
    let parts = if spec.role == TensorRole::Vector { spec.cols.div_ceil(32) } else { parts };
    // Parts of a vocabulary that may be padding.
    let spare =
        if spec.is_vocabulary() { (PADDING.min(spec.rows / 8) * parts).div_ceil(spec.rows) } else { 0 };
    let last = parts.saturating_sub(1 + spare) * (data.bytes().len() / parts.max(1));
    let what = if is_zero(data.bytes()) {
        "is all zeros"
    } else if is_zero(data.to_end_of_memory(last)) {
        "ends in zeros, and so does the file"
    } else {
        return Ok(());
    };
    Err(Error::model(file, format!("tensor {name} {what}: a part of the file is missing; download it again")))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}
