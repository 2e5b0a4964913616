//! Weights that are missing: a file whose size was set before a download broke off holds zeros from there on. Such a
//! model runs, and says nothing or nonsense.
//!
//! A search for anything but zeros ends at the first byte that is something, so that a sound file costs a page or two
//! for each tensor.

use super::spec::{Role, Spec};
use files::mapped::Plane;
use files::{Error, Result};
use std::path::Path;

/// The most rows at the end of a vocabulary that no token uses: published models pad theirs to a round number.
const PADDING: usize = 1024;

/// The stored values of a tensor.
pub struct Values<'a> {
    /// The file, and its name for the tensor.
    pub file: &'a Path,
    pub name: &'a str,
    /// Part of the mapped file.
    pub data: &'a Plane,
    /// How many parts the data have that no sound file ends with zeros in: a matrix's rows, or groups of them.
    pub parts: usize,
}

/// Refuses a norm or a matrix of zeros, and one that ends in zeros as the rest of its file does. Biases may be zeros, and
/// so may the last rows of a vocabulary.
///
/// # Errors
///
/// [`Error::Model`], by name.
pub fn check(spec: &Spec, values: &Values<'_>) -> Result<()> {
    let Values { file, name, data, parts } = *values;
    if spec.role == Role::Vector && spec.name.ends_with(".bias") {
        return Ok(());
    }
    let parts = if spec.role == Role::Vector { spec.cols.div_ceil(32) } else { parts };
    // Of a vocabulary's parts, as many as `PADDING` is of its rows.
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
