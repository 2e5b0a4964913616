//! The header of a GGUF file, versions 2 and 3, checked in full before any tensor is used.
//!
//! Layout (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), all little-endian: the magic `GGUF`, version
//! (u32), number of tensors (u64), number of metadata pairs (u64), the pairs, the tensors' infos (name, dimensions,
//! type, offset), padding to `general.alignment`, the tensors' data. Offsets count from the start of the data.

use std::collections::BTreeMap;
use std::ops::Range;

use super::cursor::Cursor;
use super::metadata::Metadata;
use super::value::Value;
use crate::blocks::BlockType;
use crate::error::quote;

const MAGIC: &[u8; 4] = b"GGUF";
/// Bytes of the file that hold the number of tensors.
const TENSOR_COUNT: Range<usize> = 8..16;
/// Maximum metadata keys and tensors; a model has about a hundred keys and 13 tensors per layer.
const MAX_KEYS: usize = 1 << 16;
const MAX_TENSORS: usize = 1 << 16;
/// The format's own limits: bytes of a key, bytes of a tensor's name, number of dimensions.
const MAX_KEY: usize = (1 << 16) - 1;
const MAX_NAME: usize = 64;
const MAX_RANK: u32 = 4;
/// The alignment of tensors in bytes: its key, default and allowed values.
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENTS: Range<u64> = 8..(1 << 20) + 1;
/// Minimum bytes of a metadata pair (length and one letter of the key, type, value), and of a tensor's info (length and
/// one letter of the name, rank, one dimension, type, offset).
const LEAST_PAIR: usize = 8 + 1 + 4 + 1;
const LEAST_INFO: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// A parsed header.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufHeader {
    /// 2 or 3; the fields read here are the same in both.
    pub version: u32,
    pub metadata: Metadata,
    /// By tensor name.
    pub tensors: BTreeMap<String, GgufTensorEntry>,
    /// Bytes of the header; padding or data follow.
    pub len: usize,
    /// Offset of the end of the metadata pairs, in bytes.
    pairs_end: usize,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTensorEntry {
    pub block: BlockType,
    /// Row-major, the reverse of the file's order: a matrix is `[rows, cols]`. No dimension is 0.
    pub shape: Vec<usize>,
    /// Range of bytes inside the file; its length matches block and shape.
    pub range: Range<usize>,
}

/// A tensor's info in the header; `shape` and `block` have been checked.
struct Info {
    name: String,
    block: BlockType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

impl GgufHeader {
    /// Parses and checks the header of a file.
    ///
    /// # Errors
    ///
    /// One line that names the field and its value.
    pub fn parse(file: &[u8]) -> Result<GgufHeader, String> {
        let mut cursor = Cursor::new(file);
        let version = read_version(&mut cursor)?;
        let tensors = cursor.read_count("tensor count", LEAST_INFO, MAX_TENSORS)?;
        let pairs = cursor.read_count("metadata count", LEAST_PAIR, MAX_KEYS)?;
        let mut metadata = Metadata::default();
        for i in 0..pairs {
            let key = cursor.read_string("key", MAX_KEY).map_err(|e| format!("metadata {i}: {e}"))?;
            if key.is_empty() {
                return Err(format!("metadata {i}: the key is empty"));
            }
            let value = Value::read(&mut cursor).map_err(|e| format!("metadata {}: {e}", quote(&key)))?;
            metadata.insert(key, value)?;
        }
        let pairs_end = cursor.position();
        let alignment = read_alignment(&metadata)?;
        let infos = (0..tensors).map(|i| Info::read(&mut cursor, i)).collect::<Result<Vec<_>, _>>()?;
        let len = cursor.position();
        // No overflow: a header is limited to 128 MiB.
        let data = (len as u64).next_multiple_of(alignment)..file.len() as u64;
        let entries = locate_all(infos, &data, alignment)?;
        Ok(GgufHeader { version, metadata, tensors: entries, len, pairs_end })
    }

    /// Builds a file with the same metadata and no tensors; `file` is the parsed file.
    pub fn without_tensors(&self, file: &[u8]) -> Vec<u8> {
        [&file[..TENSOR_COUNT.start], &[0; 8], &file[TENSOR_COUNT.end..self.pairs_end]].concat()
    }
}

fn in_tensor(tensor: &str, what: impl std::fmt::Display) -> String {
    format!("tensor {}: {what}", quote(tensor))
}

/// Reads magic and version.
fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, String> {
    let magic = cursor.take_bytes(4, "magic")?;
    if magic != MAGIC {
        return Err(format!("starts with \"{}\", not with \"GGUF\"", magic.escape_ascii()));
    }
    match cursor.read_u32("version")? {
        version @ 2..=3 => Ok(version),
        version if matches!(version.swap_bytes(), 1..=0xffff) => {
            Err(format!("version is {}, big-endian; supported: little-endian files", version.swap_bytes()))
        }
        version => Err(format!("version is {version}; supported: 2 and 3")),
    }
}

/// Reads the alignment of tensors, in bytes.
fn read_alignment(metadata: &Metadata) -> Result<u64, String> {
    match metadata.get(ALIGNMENT) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::Unsigned(n)) if n.is_power_of_two() && ALIGNMENTS.contains(&n) => Ok(n),
        Some(value) => {
            let Range { start, end } = ALIGNMENTS;
            let supported = format!("an unsigned power of two from {start} to {}", end - 1);
            Err(format!("metadata \"{ALIGNMENT}\" is {value}; supported: {supported}"))
        }
    }
}

impl Info {
    fn read(cursor: &mut Cursor<'_>, i: usize) -> Result<Info, String> {
        let name = cursor.read_string("name", MAX_NAME).map_err(|e| format!("tensor {i}: {e}"))?;
        if name.is_empty() {
            return Err(format!("tensor {i}: the name is empty"));
        }
        Self::read_unnamed(cursor, &name).map_err(|e| in_tensor(&name, e))
    }

    /// Reads the info after the name.
    fn read_unnamed(cursor: &mut Cursor<'_>, name: &str) -> Result<Info, String> {
        let rank = cursor.read_u32("number of dimensions")?;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(format!("number of dimensions is {rank}; supported: 1 to {MAX_RANK}"));
        }
        let dims = (0..rank).map(|_| cursor.read_u64("dimension")).collect::<Result<Vec<_>, _>>()?;
        let block = BlockType::from_id(cursor.read_u32("type")?)
            .map_err(|found| format!("type is {found}; supported: {}", BlockType::list_names()))?;
        let offset = cursor.read_u64("offset")?;
        let too_large = || format!("dimensions {dims:?} of {block:?} are more than this machine can address");
        let size = |&dim| usize::try_from(dim).map_err(|_| too_large());
        let shape = dims.iter().rev().map(size).collect::<Result<Vec<_>, _>>()?;
        if !dims[0].is_multiple_of(block.values_per_block() as u64) {
            let values = block.values_per_block();
            return Err(format!("dimensions {dims:?}: a row of {block:?} is a multiple of {values} values"));
        }
        if dims.contains(&0) {
            return Err(format!("dimensions {dims:?}: none may be 0"));
        }
        let blocks = dims[1..]
            .iter()
            .try_fold(dims[0] / block.values_per_block() as u64, |n, &dim| n.checked_mul(dim))
            // The values must be addressable as f32 too.
            .filter(|n| {
                n.checked_mul(4 * block.values_per_block() as u64).is_some_and(|n| isize::try_from(n).is_ok())
            })
            .ok_or_else(too_large)?;
        Ok(Info { name: name.into(), block, shape, bytes: blocks * block.bytes_per_block() as u64, offset })
    }

    /// Resolves the tensor's offset in the file, whose data are the bytes `data`.
    fn to_entry(&self, data: &Range<u64>, alignment: u64) -> Result<GgufTensorEntry, String> {
        let Info { offset, bytes, .. } = *self;
        if !offset.is_multiple_of(alignment) {
            return Err(format!("offset is {offset}, not a multiple of the alignment {alignment}"));
        }
        let room = data.end.saturating_sub(data.start);
        if offset > room || bytes > room - offset {
            return Err(format!(
                "{bytes} bytes at offset {offset} go past the end of the data, {room} bytes"
            ));
        }
        let start = data.start + offset; // no overflow: it is inside the file
        let address = |at: u64| usize::try_from(at).map_err(|_| "is more than this machine can address");
        let range = address(start)?..address(start + bytes)?;
        Ok(GgufTensorEntry { block: self.block, shape: self.shape.clone(), range })
    }
}

/// Resolves the offsets of all tensors, which must follow one another in the order of their infos, each padded to the
/// alignment. A wrong type or dimension of one tensor thus shows in the offset of the next or in the size of the file.
fn locate_all(
    infos: Vec<Info>,
    data: &Range<u64>,
    alignment: u64,
) -> Result<BTreeMap<String, GgufTensorEntry>, String> {
    let (mut entries, mut end) = (BTreeMap::new(), 0);
    for info in infos {
        let entry = info.to_entry(data, alignment).map_err(|e| in_tensor(&info.name, e))?;
        if info.offset != end {
            let what = format!("offset is {}, but the tensors before it end at {end}", info.offset);
            return Err(in_tensor(&info.name, what));
        }
        end = (info.offset + info.bytes).next_multiple_of(alignment); // no overflow: it is inside the file
        if entries.contains_key(&info.name) {
            return Err(format!("tensor {} occurs twice", quote(&info.name)));
        }
        entries.insert(info.name, entry);
    }
    let room = data.end.saturating_sub(data.start);
    if !entries.is_empty() && room > end {
        return Err(format!("the tensors end at {end}, but the file has {room} bytes of data"));
    }
    Ok(entries)
}
