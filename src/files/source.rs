//! Safetensors models, whole or in shards, as named tensors over mapped files.
//!
//! Model files come from strangers: everything a file says about itself is checked here, once, before
//! a tensor is handed out. A tensor's bytes are inside its file and as many as its dtype and shape
//! say; nothing is known about their alignment or values.

pub mod gguf;
mod header;
mod index;
mod json;
mod quoted;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::mapped::{Plane, map_file};
use crate::{Error, Result};
use gguf::block::BlockType;
use header::Header;
pub use quoted::quoted;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The element types this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    U8,
}

impl Dtype {
    /// For messages.
    pub const NAMES: &str = "F32, F16, BF16, U8";

    /// Bytes an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            Dtype::U8 => 1,
        }
    }

    /// The type that a file calls `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::U8].into_iter().find(|t| format!("{t:?}") == name)
    }

    /// The same as GGUF has it, where it has it.
    pub fn block(self) -> Option<BlockType> {
        match self {
            Dtype::F32 => Some(BlockType::F32),
            Dtype::F16 => Some(BlockType::F16),
            Dtype::BF16 => Some(BlockType::BF16),
            Dtype::U8 => None,
        }
    }

    /// The type of the elements, if it is one.
    pub fn of(block: BlockType) -> Option<Self> {
        [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|t| t.block() == Some(block))
    }

    /// `N` stored values, widened exactly. `bytes` holds at least that many.
    #[inline(always)]
    pub fn widen<const N: usize>(self, bytes: &[u8]) -> [f32; N] {
        let mut out = [0.0; N];
        match self {
            Dtype::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Dtype::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = half::f16::from_le_bytes(*b).to_f32();
                }
            }
            Dtype::BF16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
            Dtype::U8 => {
                for (o, b) in out.iter_mut().zip(bytes) {
                    *o = f32::from(*b);
                }
            }
        }
        out
    }

    /// Values, widened exactly, sixteen at a time, since that vectorises; inlined for each type.
    #[inline(always)]
    pub fn widen_all(self, bytes: &[u8], values: &mut [f32]) {
        const RUN: usize = 16;
        let (runs, rest) = values.as_chunks_mut::<RUN>();
        let from = runs.len() * RUN * self.size();
        for (run, stored) in runs.iter_mut().zip(bytes.chunks_exact(RUN * self.size())) {
            *run = self.widen(stored);
        }
        for (value, stored) in rest.iter_mut().zip(bytes[from..].chunks_exact(self.size())) {
            [*value] = self.widen(stored);
        }
    }

    /// All values, widened exactly.
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(self.size()).map(|b| self.widen::<1>(b)[0]).collect()
    }

    fn readable(dtype: safetensors::Dtype) -> Option<Dtype> {
        match dtype {
            safetensors::Dtype::F32 => Some(Dtype::F32),
            safetensors::Dtype::F16 => Some(Dtype::F16),
            safetensors::Dtype::BF16 => Some(Dtype::BF16),
            safetensors::Dtype::U8 => Some(Dtype::U8),
            _ => None,
        }
    }
}

/// One tensor: row-major, little-endian, at any alignment.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// As many bytes as the shape's product times the dtype's size.
    pub data: Plane,
    pub file: Arc<Path>,
}

/// A tensor that is there, but of an element type this program does not read.
#[derive(Clone, Debug, PartialEq)]
pub struct Unreadable {
    pub name: String,
    /// As the file spells it, e.g. `I64`.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: usize,
    pub file: Arc<Path>,
}

/// An opened model: its tensors by name.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    unreadable: BTreeMap<String, Unreadable>,
    metadata: BTreeMap<String, String>,
    files: Vec<File>,
}

#[derive(Debug)]
struct File {
    plane: Plane,
    header_len: usize,
}

impl Source {
    /// Opens a `.safetensors` file, or a directory with a `model.safetensors` or else with a
    /// `model.safetensors.index.json` and its shards.
    pub fn open(path: &Path) -> Result<Source> {
        let meta = fs::metadata(path).map_err(|e| {
            Error::model(
                path,
                format_args!("cannot be read: {e}; give a model directory or a .safetensors file"),
            )
        })?;
        let mut source = Source {
            path: path.into(),
            tensors: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            metadata: BTreeMap::new(),
            files: Vec::new(),
        };
        if !meta.is_dir() {
            source.add_file(path.into())?;
            return Ok(source);
        }
        // A link that leads nowhere counts as present, so that it is the file the error names.
        let present = |name| fs::symlink_metadata(path.join(name)).is_ok();
        if present(FILE) {
            source.add_file(path.join(FILE).into())?;
        } else if present(INDEX) {
            source.add_shards(path, &path.join(INDEX))?;
        } else {
            return Err(Error::model(
                path,
                format_args!("has neither {FILE} nor {INDEX}; give the directory of a downloaded model"),
            ));
        }
        Ok(source)
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensor of that name, if it is there and readable.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The tensor of that name, or an error that says what is wrong with it.
    pub fn require(&self, name: &str) -> Result<&Tensor> {
        self.get(name).ok_or_else(|| match self.unreadable.get(name) {
            Some(t) => Error::model(
                &t.file,
                format_args!(
                    "tensor {} has dtype {}; supported: {}; convert the model to one of these",
                    quoted(name),
                    t.dtype,
                    Dtype::NAMES
                ),
            ),
            None => Error::model(
                &self.path,
                format_args!("tensor {} is missing; download the whole model", quoted(name)),
            ),
        })
    }

    /// The readable tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// The others, sorted by name.
    pub fn unreadable(&self) -> impl Iterator<Item = &Unreadable> {
        self.unreadable.values()
    }

    /// `__metadata__` of all files; where they differ, the first shard's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// An id of the content in hex: over sizes, headers and a few samples of the data of every file,
    /// but not over their names and times. The samples tell apart models of the same shapes, such as
    /// two fine-tunes of one base; a change of a few bytes can go unseen.
    pub fn fingerprint(&self) -> String {
        fingerprint(self.files.iter().map(|file| (file.plane.bytes(), file.header_len)))
    }

    /// Maps and reads one file, and returns the names of its tensors.
    fn add_file(&mut self, path: Arc<Path>) -> Result<Vec<String>> {
        let plane = map_file(&path)?;
        if plane.bytes().starts_with(b"version https://git-lfs") {
            return Err(Error::model(
                &path,
                "is a Git LFS pointer, not the weights; run `git lfs pull` in its directory",
            ));
        }
        let header = Header::parse(plane.bytes()).map_err(|e| damaged(&path, e))?;
        for (key, value) in header.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        let names = header.entries.keys().cloned().collect();
        for (name, entry) in header.entries {
            let (shape, file) = (entry.shape, path.clone());
            match Dtype::readable(entry.dtype) {
                Some(dtype) => {
                    let data = plane.slice(entry.range).expect("the header's ranges are inside the file");
                    self.tensors.insert(name.clone(), Tensor { name, dtype, shape, data, file });
                }
                None => {
                    let (dtype, bytes) = (entry.dtype.to_string(), entry.range.len());
                    self.unreadable.insert(name.clone(), Unreadable { name, dtype, shape, bytes, file });
                }
            }
        }
        self.files.push(File { plane, header_len: header.len });
        Ok(names)
    }

    /// Reads the shards of `index`, each of which must hold exactly the tensors listed for it; so no
    /// tensor can come from two.
    fn add_shards(&mut self, dir: &Path, index: &Path) -> Result<()> {
        let shards = index::parse(map_file(index)?.bytes()).map_err(|e| damaged(index, e))?;
        for (shard, listed) in shards {
            let path = dir.join(&shard);
            let missing = fs::metadata(&path).is_err_and(|e| e.kind() == ErrorKind::NotFound);
            if missing {
                return Err(Error::model(
                    &path,
                    format_args!("the file is missing, but {INDEX} lists it; download it"),
                ));
            }
            let held = self.add_file(path.as_path().into())?;
            // Both are sorted, so the first difference is where one lacks what the other has.
            let extra = held.iter().find(|name| listed.binary_search(name).is_err());
            let absent = listed.iter().find(|name| held.binary_search(name).is_err());
            let (name, what) = match (extra, absent) {
                (None, None) => continue,
                (Some(name), _) => (name, "is in this file, but not listed for it in"),
                (None, Some(name)) => (name, "is not in this file, but listed for it in"),
            };
            return Err(damaged(&path, format_args!("tensor {} {what} {INDEX}", quoted(name))));
        }
        Ok(())
    }
}

fn damaged(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::model(
        path,
        format_args!("{what}; the file is damaged or not what it should be: download it again"),
    )
}

/// [`Source::fingerprint`] of files, each with the length of its header.
fn fingerprint<'a>(files: impl Iterator<Item = (&'a [u8], usize)>) -> String {
    const SAMPLES: usize = 16;
    const SAMPLE: usize = 256; // bytes
    let mut hash = Fnv::new();
    for (bytes, header_len) in files {
        let (header, data) = bytes.split_at(header_len);
        hash.add(&(bytes.len() as u64).to_le_bytes());
        hash.add(header);
        for i in 0..SAMPLES {
            let start = data.len() / SAMPLES * i;
            hash.add(&data[start..(start + SAMPLE).min(data.len())]);
        }
    }
    format!("{:032x}", hash.0)
}

/// FNV-1a, 128 bits: the same on every machine. No defence against forgery.
struct Fnv(u128);

impl Fnv {
    fn new() -> Fnv {
        Fnv(0x6c62272e07bb014262b821756295c58d)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv_vectors() {
        let hash = |bytes: &[u8]| {
            let mut hash = Fnv::new();
            hash.add(bytes);
            format!("{:032x}", hash.0)
        };
        assert_eq!(hash(b""), "6c62272e07bb014262b821756295c58d");
        assert_eq!(hash(b"a"), "d228cb696f1a8caf78912b704e4a8964");
    }
}
