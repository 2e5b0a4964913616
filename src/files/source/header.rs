//! The header of one safetensors file, checked in full before any tensor is used.
//!
//! Layout: `n` (u64, little-endian), `n` bytes of JSON, then the tensors' data without gaps.
//!
//! The element types and their sizes come from the `safetensors` crate. Its parser is not used: it accepts files that
//! are rejected here (a tensor name that occurs twice, an entry written as an array, a shape whose overflow is hidden
//! by a zero, any number of dimensions), and most of its errors name neither tensor nor value. Tests check that it
//! accepts every file that is accepted here.

use std::collections::BTreeMap;
use std::fmt;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::json::{Object, UniqueMap, add_context, insert_new, parse_object as parse_json};
use crate::error::quote;

/// The format's own limit, in bytes of JSON.
const MAX_JSON: u64 = 100_000_000;

/// Maximum dimensions of a tensor; real ones have fewer.
const MAX_RANK: usize = 8;

/// A parsed header.
pub struct Header {
    /// Offset of the data in the file, in bytes.
    pub len: usize,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// By tensor name.
    pub entries: BTreeMap<String, TensorEntry>,
}

/// One tensor.
#[derive(Deserialize)]
pub struct TensorEntry {
    #[serde(deserialize_with = "deserialize_dtype")]
    pub dtype: Dtype,
    #[serde(deserialize_with = "deserialize_shape")]
    pub shape: Vec<usize>,
    /// Start and end in bytes of the data, inside it; their distance matches dtype and shape.
    #[serde(deserialize_with = "deserialize_offsets")]
    pub data_offsets: (usize, usize),
}

impl Header {
    /// Parses and checks the header of a file.
    pub fn parse(file: &[u8]) -> Result<Header, String> {
        let size = file.len();
        let Some(&n) = file.first_chunk::<8>() else {
            return Err(format!("the file is {size} bytes long, too short for a header"));
        };
        let n = u64::from_le_bytes(n);
        if n > MAX_JSON {
            return Err(format!("the header length is {n}, more than the format's {MAX_JSON}"));
        }
        let len = 8 + n as usize; // no overflow: n <= MAX_JSON
        let Some(json) = file.get(8..len) else {
            return Err(format!("the header length is {n}, but the file is only {size} bytes long"));
        };
        let HeaderJson { metadata, entries } = parse_json(json).map_err(|e| format!("header: {e}"))?;
        for (name, entry) in &entries {
            entry.check_size().map_err(|e| format!("tensor {}: {e}", quote(name)))?;
        }
        check_cover(&entries, size - len)?;
        Ok(Header { len, metadata, entries })
    }
}

impl TensorEntry {
    /// Checks that the distance of the offsets matches dtype and shape.
    fn check_size(&self) -> Result<(), String> {
        let TensorEntry { dtype, shape, data_offsets: (start, end) } = self;
        let Some(given) = end.checked_sub(*start) else {
            return Err(format!("data_offsets [{start}, {end}] are reversed"));
        };
        // Zeros count as ones, so that no partial product can overflow later.
        let bits = shape
            .iter()
            .try_fold(dtype.bitsize(), |bits, &d| bits.checked_mul(d.max(1)))
            .ok_or_else(|| format!("shape {shape:?} of {dtype} is more than this machine can address"))?;
        let bits = if shape.contains(&0) { 0 } else { bits };
        if bits.is_multiple_of(8) && bits / 8 == given {
            return Ok(());
        }
        let asked = bits.div_ceil(8);
        Err(format!("shape {shape:?} of {dtype} needs {asked} bytes, data_offsets give {given}"))
    }
}

/// Checks that the tensors fill the `size` bytes of data exactly, one after another.
fn check_cover(entries: &BTreeMap<String, TensorEntry>, size: usize) -> Result<(), String> {
    let mut order: Vec<_> = entries.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
    order.sort();
    let mut filled = 0;
    for ((start, end), name) in order {
        let what = if start < filled {
            format!("overlap the tensor before them, which ends at {filled}")
        } else if start > filled {
            format!("leave a hole at {filled}")
        } else if end > size {
            format!("go past the end of the data, {size} bytes")
        } else {
            filled = end;
            continue;
        };
        return Err(format!("tensor {}: data_offsets [{start}, {end}] {what}", quote(name)));
    }
    if filled == size {
        Ok(())
    } else {
        Err(format!("the tensors end at {filled}, but the file has {size} bytes of data"))
    }
}

/// The header's JSON.
struct HeaderJson {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, TensorEntry>,
}

impl<'de> Deserialize<'de> for HeaderJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = HeaderJson;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderJson, A::Error> {
                let (mut metadata, mut entries) = (None, BTreeMap::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name.is_empty() {
                        return Err(A::Error::custom("a tensor has an empty name"));
                    }
                    if name == "__metadata__" {
                        let UniqueMap(found) = map.next_value().map_err(add_context("__metadata__"))?;
                        if metadata.replace(found).is_some() {
                            return Err(A::Error::custom("\"__metadata__\" occurs twice"));
                        }
                    } else {
                        let place = format!("tensor {}", quote(&name));
                        let Object(entry) = map.next_value().map_err(add_context(place))?;
                        insert_new(&mut entries, name, entry)?;
                    }
                }
                Ok(HeaderJson { metadata: metadata.unwrap_or_default(), entries })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

fn deserialize_dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
    let name = String::deserialize(deserializer).map_err(add_context("dtype"))?;
    serde_json::from_value(name.as_str().into()).map_err(|_| {
        let readable = crate::blocks::Dtype::NAMES;
        D::Error::custom(format_args!("dtype {} is unknown; supported: {readable}", quote(&name)))
    })
}

fn deserialize_shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct ShapeVisitor;
    impl<'de> Visitor<'de> for ShapeVisitor {
        type Value = Vec<usize>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an array of at most {MAX_RANK} sizes")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(size) = seq.next_element()? {
                if shape.len() == MAX_RANK {
                    return Err(A::Error::invalid_length(MAX_RANK + 1, &self));
                }
                shape.push(size);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(ShapeVisitor).map_err(add_context("shape"))
}

fn deserialize_offsets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(usize, usize), D::Error> {
    Deserialize::deserialize(deserializer).map_err(add_context("data_offsets"))
}
