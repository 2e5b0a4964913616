//! Safetensors models, single files or shards: named tensors over mapped files.
//!
//! Model files are untrusted, so everything that a file says about itself is checked here, once, before a tensor is
//! handed out. A tensor's bytes are inside its file and as many as its dtype and shape require. Their alignment and
//! values are not checked.

pub mod gguf;
pub(crate) mod header;
mod index;
pub(crate) mod json;
pub mod quantised;

use crate::blocks::Dtype;
use crate::config::QuantMethod;
use crate::text_file::read_text_file;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::quote;
use crate::mapped::{MappedSlice, map_file};
use crate::{Error, Result};
use header::Header;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One tensor: row-major, little-endian, at any alignment.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Product of the shape times the dtype's size, in bytes.
    pub data: MappedSlice,
    pub file: Arc<Path>,
}

/// A tensor whose element type this program cannot read.
#[derive(Clone, Debug, PartialEq)]
pub struct UnsupportedTensor {
    pub name: String,
    /// As the file spells it, e.g. `I64`.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: usize,
    pub file: Arc<Path>,
}

/// An opened model.
#[derive(Debug, Default)]
pub struct Safetensors {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    unreadable: BTreeMap<String, UnsupportedTensor>,
    metadata: BTreeMap<String, String>,
    /// Storage of quantised matrices, from the `config.json` beside it.
    quant_method: Option<QuantMethod>,
    files: Vec<File>,
}

#[derive(Debug)]
struct File {
    plane: MappedSlice,
    header_len: usize,
}

impl Safetensors {
    /// Opens a `.safetensors` file, a directory with a `model.safetensors`, or a directory with a
    /// `model.safetensors.index.json` and its shards.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], one line: a file is missing or damaged.
    pub fn open(path: &Path) -> Result<Safetensors> {
        let meta = fs::metadata(path).map_err(|e| {
            let remedy = "give a model directory or a .safetensors file";
            Error::model(path, format_args!("cannot be read: {e}; {remedy}"))
        })?;
        let mut source = Safetensors { path: path.into(), ..Safetensors::default() };
        if !meta.is_dir() {
            source.add_file(path.into())?;
        } else if path_exists(&path.join(FILE))? {
            source.add_file(path.join(FILE).into())?;
        } else if path_exists(&path.join(INDEX))? {
            source.add_shards(path, &path.join(INDEX))?;
        } else {
            let remedy = "give the directory of a downloaded model, or download one: cargo xtask fetch NAME";
            return Err(Error::model(path, format_args!("has neither {FILE} nor {INDEX}; {remedy}")));
        }
        let dir = if meta.is_dir() { Some(path) } else { path.parent() };
        source.quant_method = dir.and_then(|dir| read_quant_method(&dir.join("config.json")));
        Ok(source)
    }

    /// Storage of its quantised matrices; `None` for a usual checkpoint.
    pub fn quant_method(&self) -> Option<QuantMethod> {
        self.quant_method
    }

    /// Opens a safetensors file that is embedded as `plane` in the file at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], one line: it is damaged.
    pub fn open_embedded(path: &Path, plane: MappedSlice) -> Result<Safetensors> {
        let mut source = Safetensors { path: path.into(), ..Safetensors::default() };
        source.add_mapped(path.into(), plane)?;
        Ok(source)
    }

    /// The opened file or directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Content of the file, if the model is a single file; packed models always are.
    pub fn only_file(&self) -> Option<&MappedSlice> {
        if let [file] = &self.files[..] { Some(&file.plane) } else { None }
    }

    /// Looks up a readable tensor by name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Looks up a tensor by name.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is missing or not readable.
    pub fn get_required(&self, name: &str) -> Result<&Tensor> {
        self.get(name).ok_or_else(|| match self.unreadable.get(name) {
            None => missing_tensor(&self.path, name),
            Some(UnsupportedTensor { file, dtype, .. }) => {
                let (name, readable) = (quote(name), Dtype::NAMES);
                let remedy = "convert the model to one of these";
                Error::model(
                    file,
                    format_args!("tensor {name} has dtype {dtype}; supported: {readable}; {remedy}"),
                )
            }
        })
    }

    /// The readable tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// The unreadable tensors, sorted by name.
    pub fn unsupported_tensors(&self) -> impl Iterator<Item = &UnsupportedTensor> {
        self.unreadable.values()
    }

    /// `__metadata__` of all files. If shards differ, the first one wins.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Hash of the content, in hex. It covers the size, the header and a few samples of the data of every file, but no
    /// names or times. The samples distinguish models of the same shapes, such as two fine-tunes of one base; a change
    /// of a few bytes can go unnoticed.
    pub fn hash_files(&self) -> String {
        hash_files(self.files.iter().map(|file| (&file.plane, file.header_len)))
    }

    /// Maps and reads one file. Returns the names of its tensors, sorted.
    fn add_file(&mut self, path: Arc<Path>) -> Result<Vec<String>> {
        let plane = map_file(&path)?;
        self.add_mapped(path, plane)
    }

    /// Reads one mapped file. Returns the names of its tensors, sorted.
    fn add_mapped(&mut self, path: Arc<Path>, plane: MappedSlice) -> Result<Vec<String>> {
        if plane.bytes().starts_with(b"version https://git-lfs") {
            let remedy = "run `git lfs pull` in its directory";
            return Err(Error::model(&path, format_args!("is a Git LFS pointer, not the weights; {remedy}")));
        }
        let header =
            Header::parse(plane.bytes()).map_err(|e| match detect_other_format(&path, plane.bytes()) {
                // Only for a file that the user named, not one found in a directory or index.
                Some(what) if self.path == *path => Error::model(&path, what),
                _ => damaged_file(&path, e),
            })?;
        for (key, value) in header.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        let names = header.entries.keys().cloned().collect();
        for (name, entry) in header.entries {
            let (shape, file) = (entry.shape, path.clone());
            let (start, end) = entry.data_offsets;
            let range = header.len + start..header.len + end;
            let dtype = match entry.dtype {
                safetensors::Dtype::F32 => Dtype::F32,
                safetensors::Dtype::F16 => Dtype::F16,
                safetensors::Dtype::BF16 => Dtype::BF16,
                safetensors::Dtype::U8 => Dtype::U8,
                safetensors::Dtype::I8 => Dtype::I8,
                safetensors::Dtype::I32 => Dtype::I32,
                safetensors::Dtype::I64 => Dtype::I64,
                safetensors::Dtype::F8_E4M3 => Dtype::F8_E4M3,
                safetensors::Dtype::F8_E5M2 => Dtype::F8_E5M2,
                other => {
                    let (dtype, bytes) = (other.to_string(), range.len());
                    self.unreadable
                        .insert(name.clone(), UnsupportedTensor { name, dtype, shape, bytes, file });
                    continue;
                }
            };
            let data = plane.slice(range).expect("the header's ranges are inside the file");
            self.tensors.insert(name.clone(), Tensor { name, dtype, shape, data, file });
        }
        self.files.push(File { plane, header_len: header.len });
        Ok(names)
    }

    /// Reads the shards of an index. Each must hold exactly the tensors listed for it, so no tensor can come from two
    /// shards.
    fn add_shards(&mut self, dir: &Path, index: &Path) -> Result<()> {
        let shards = index::parse_index(map_file(index)?.bytes()).map_err(|e| damaged_file(index, e))?;
        for (shard, listed) in shards {
            let path = dir.join(&shard);
            if fs::metadata(&path).is_err_and(|e| e.kind() == ErrorKind::NotFound) {
                let message = format_args!("the file is missing, but {INDEX} lists it; download it");
                return Err(Error::model(&path, message));
            }
            let held = self.add_file(path.as_path().into())?;
            let wrong =
                |name: &str, what| damaged_file(&path, format_args!("tensor {} {what} {INDEX}", quote(name)));
            // Both lists are sorted.
            if let Some(extra) = held.iter().find(|name| listed.binary_search(name).is_err()) {
                return Err(wrong(extra, "is in this file, but not listed for it in"));
            }
            if let Some(absent) = listed.iter().find(|name| held.binary_search(name).is_err()) {
                return Err(wrong(absent, "is not in this file, but listed for it in"));
            }
        }
        Ok(())
    }
}

/// The `quantization_config` of a `config.json`. A wrong one counts as none: whoever reads the rest of the file reports
/// it.
fn read_quant_method(config: &Path) -> Option<QuantMethod> {
    QuantMethod::parse(&read_text_file(config).ok()?).ok().flatten()
}

/// Returns true if a path exists. A dangling link counts, so that opening it gives an error with its name.
///
/// # Errors
///
/// [`Error::Model`]: the system cannot tell, e.g. the directory may not be searched or its disk fails.
pub fn path_exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(e) => {
            Err(Error::model(path, format_args!("cannot be read: {e}; check the permissions and the disk")))
        }
    }
}

/// The reason why a file is not a safetensors file at all; `None` if it may be a damaged one.
fn detect_other_format(path: &Path, bytes: &[u8]) -> Option<&'static str> {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors")) {
        return None;
    }
    if bytes.starts_with(b"GGUF") {
        return Some("is a GGUF file, but its name does not end in .gguf; rename it");
    }
    // A safetensors header is JSON at byte 8.
    (bytes.get(8) != Some(&b'{'))
        .then_some("is not a weights file; give the model's directory, a .safetensors or a .gguf file")
}

fn missing_tensor(file: &Path, tensor: &str) -> Error {
    Error::model(file, format_args!("tensor {} is missing; download the whole model", quote(tensor)))
}

fn damaged_file(path: &Path, what: impl std::fmt::Display) -> Error {
    let remedy = "the file is damaged or of another kind: download it again";
    Error::model(path, format_args!("{what}; {remedy}"))
}

/// Computes [`Safetensors::hash_files`] from the contents of files, each with the length of its header in bytes.
pub(crate) fn hash_files<'a>(files: impl Iterator<Item = (&'a MappedSlice, usize)>) -> String {
    const SAMPLES: usize = 16;
    const SAMPLE: usize = 256; // bytes
    let mut hash = Fnv::new();
    for (plane, header_len) in files {
        let bytes = plane.bytes();
        let (header, data) = bytes.split_at(header_len);
        hash.add(&(bytes.len() as u64).to_le_bytes());
        hash.add(header);
        for i in 0..SAMPLES {
            let start = data.len() / SAMPLES * i;
            let sample = start..(start + SAMPLE).min(data.len());
            hash.add(&data[sample.clone()]);
            // Reading the sample can map a huge page; releasing it keeps memory use low.
            if let Some(read) = plane.slice(header_len + sample.start..header_len + sample.end) {
                read.release_pages();
            }
        }
    }
    hash.to_hex()
}

/// Hash of parts of something, in hex.
pub fn hash_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Fnv::new();
    parts.into_iter().for_each(|part| hash.add(part));
    hash.to_hex()
}

/// The 128-bit FNV-1a hash. It does not defend against forgery.
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

    fn to_hex(&self) -> String {
        format!("{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        let hash = |bytes: &[u8]| hash_parts([bytes]);
        assert_eq!(hash(b""), "6c62272e07bb014262b821756295c58d");
        assert_eq!(hash(b"a"), "d228cb696f1a8caf78912b704e4a8964");
    }
}
