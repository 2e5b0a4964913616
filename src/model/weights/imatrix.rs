//! Importance files of llama.cpp (`imatrix`): sums of the squares of the inputs of matrices, measured over a text.
//!
//! A GGUF file of `general.type` `imatrix` has a tensor `NAME.in_sum2` for each matrix. An older file, of any other form,
//! is a number of entries, then for each the length of a name, the name, a number of calls, a number of values and the
//! values, f32; integers have 32 bits and all is little-endian. Names are those of tensors in GGUF files.

use super::checkpoint::{Checkpoint, gguf_name};
use super::spec::{TensorRole, model_tensors};
use crate::cpu::InputSquares;
use crate::dims::{DELTA_NET, HEADS_PER_KEY};
use files::blocks::Dtype;
use files::config::DeltaNetSizes;
use files::error::quote;
use files::mapped::{MappedSlice, map_file};
use files::source::gguf::Gguf;
use files::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The sums of an importance file.
#[derive(Debug)]
pub struct ImportanceFile {
    path: PathBuf,
    /// By the name of the matrix in GGUF files.
    sums: BTreeMap<String, Vec<f32>>,
}

impl ImportanceFile {
    /// Reads an importance file; `None` for other files, which are texts.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], one line: the file cannot be read, or is damaged.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let is_old = path.extension().is_some_and(|e| e == "dat" || e == "imatrix");
        let content = map_file(path)?;
        let sums = if content.bytes().starts_with(b"GGUF") {
            read_gguf(path, content)?
        } else if is_old {
            read_old(content.bytes()).map_err(|why| Error::model(path, format!("{why}; make it again")))?
        } else {
            return Ok(None);
        };
        Ok(Some(Self { path: path.into(), sums }))
    }

    /// The squares of the inputs of a checkpoint's matrices. Matrices that the file lacks have none.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: the file is of another model, or has a value that is no sum of squares.
    pub fn input_squares(&self, checkpoint: &Checkpoint) -> Result<InputSquares> {
        let (mut squares, mut found) = (InputSquares::without_inputs(), false);
        for spec in model_tensors().iter().filter(|spec| spec.role == TensorRole::Matrix) {
            let name = gguf_name(spec, &spec.stored.name);
            let Some(sums) = self.sums.get(&name) else { continue };
            if sums.len() != spec.cols {
                let (have, want) = (sums.len(), spec.cols);
                let why = format!("{name} has {have} values, but the model's has {want} columns");
                return Err(Error::model(&self.path, format!("{why}; give the file of this model")));
            }
            if let Some(bad) = sums.iter().find(|x| !x.is_finite() || **x < 0.0) {
                let why = format!("{name} has the value {bad}, which is no sum of squares; make it again");
                return Err(Error::model(&self.path, why));
            }
            let is_tiled = spec.name.ends_with("linear_attn.out_proj.weight") && checkpoint.gguf().is_none();
            let sums = (0..spec.cols).map(|col| {
                let col = if is_tiled { to_gguf_column(&DELTA_NET, HEADS_PER_KEY, col) } else { col };
                f64::from(sums[col])
            });
            found |= squares.set_columns(&spec.name, sums.collect());
        }
        if found {
            return Ok(squares);
        }
        let why = "has no matrix of this model; give the importance file that llama.cpp made of it";
        Err(Error::model(&self.path, why))
    }
}

/// Column in a GGUF file of a column of a delta net's output projection: there the value heads of all keys come by turns.
fn to_gguf_column(net: &DeltaNetSizes, heads_per_key: usize, column: usize) -> usize {
    let (head, rest) = (column / net.value_dim, column % net.value_dim);
    let (key, turn) = (head / heads_per_key, head % heads_per_key);
    (turn * net.key_heads + key) * net.value_dim + rest
}

fn read_gguf(path: &Path, content: MappedSlice) -> Result<BTreeMap<String, Vec<f32>>> {
    let gguf = Gguf::open_embedded(path, content)?;
    if gguf.metadata().get_str("general.type").ok().flatten() != Some("imatrix") {
        let why = "is a GGUF file, but general.type is not imatrix; give an importance file or a text";
        return Err(Error::model(path, why));
    }
    let sums = gguf.tensors().filter_map(|tensor| {
        let name = tensor.name.strip_suffix(".in_sum2")?;
        Dtype::from_block_type(tensor.block).map(|_| (name.into(), tensor.to_f32()))
    });
    Ok(sums.collect())
}

fn read_old(mut rest: &[u8]) -> std::result::Result<BTreeMap<String, Vec<f32>>, String> {
    let mut take = |len: usize, what: &str| {
        let (taken, left) =
            rest.split_at_checked(len).ok_or(format!("{what} goes past the end of the file"))?;
        rest = left;
        Ok::<_, String>(taken)
    };
    let to_len = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b) as usize);
    let entries = to_len(take(4, "the number of entries")?);
    let mut sums = BTreeMap::new();
    for i in 0..entries {
        let len = to_len(take(4, &format!("entry {i}"))?);
        let name = String::from_utf8_lossy(take(len, &format!("the name of entry {i}"))?).into_owned();
        let what = format!("entry {}", quote(&name));
        let len = to_len(&take(8, &what)?[4..]);
        let values = take(len.saturating_mul(4), &what)?;
        sums.insert(name, Dtype::F32.to_f32(values));
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_heads_of_a_key_lie_apart_in_gguf_files() {
        // Three keys of two heads each; the second head of the first key comes behind the first heads of all.
        let net = DeltaNetSizes { key_heads: 3, value_heads: 6, value_dim: 4, ..DELTA_NET };
        let columns = [0, 3, 4, 8, 23].map(|column| to_gguf_column(&net, 2, column));
        assert_eq!(columns, [0, 3, 12, 4, 23]);
    }

    #[test]
    fn old_files_are_read_and_damaged_ones_are_refused() {
        let mut file = Vec::new();
        file.extend(1u32.to_le_bytes());
        file.extend(5u32.to_le_bytes());
        file.extend(b"a.b.c");
        [7u32, 2].iter().for_each(|n| file.extend(n.to_le_bytes()));
        [1.5f32, 2.0].iter().for_each(|x| file.extend(x.to_le_bytes()));
        assert_eq!(read_old(&file).unwrap()["a.b.c"], [1.5, 2.0]);
        for len in 0..file.len() {
            assert!(read_old(&file[..len]).unwrap_err().ends_with("goes past the end of the file"));
        }
        file[4..8].fill(255);
        assert!(read_old(&file).is_err());
    }
}
