//! The header of one safetensors file, checked in full before any tensor is used.
//!
//! Layout: `n` (u64, little-endian), `n` bytes of JSON, then the tensors' data without gaps.
//!
//! From the `safetensors` crate come the element types and their sizes. Its parser is not used, for it lets pass what
//! is refused here (a tensor name that occurs twice, an entry written as an array, a shape that only overflows because
//! a zero hides it, any number of dimensions), and most of its errors name neither tensor nor value. Tests check that
//! it accepts every file that is accepted here.

use std::collections::BTreeMap;
use std::fmt;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::json::{Object, UniqueMap, insert_new, parse as parse_json, within};
use crate::error::quoted;

/// The format's own limit, in bytes of JSON.
const MAX_JSON: u64 = 100_000_000;

/// More dimensions than any tensor has.
const MAX_RANK: usize = 8;

/// What a file holds.
pub struct Header {
    /// Where the data start, in bytes of the file.
    pub len: usize,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// By tensor name.
    pub entries: BTreeMap<String, Entry>,
}

/// One tensor.
#[derive(Deserialize)]
pub struct Entry {
    #[serde(deserialize_with = "dtype")]
    pub dtype: Dtype,
    #[serde(deserialize_with = "shape")]
    pub shape: Vec<usize>,
    /// Start and end in bytes of the data: inside them, and as far apart as dtype and shape ask for.
    #[serde(deserialize_with = "data_offsets")]
    pub data_offsets: (usize, usize),
}

impl Header {
    /// Parses and checks the header of a file with this content.
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
        let Fields { metadata, entries } = parse_json(json).map_err(|e| format!("header: {e}"))?;
        for (name, entry) in &entries {
            entry.check_size().map_err(|e| format!("tensor {}: {e}", quoted(name)))?;
        }
        check_cover(&entries, size - len)?;
        Ok(Header { len, metadata, entries })
    }
}

impl Entry {
    /// Checks that the offsets are as far apart as dtype and shape ask for.
    fn check_size(&self) -> Result<(), String> {
        let Entry { dtype, shape, data_offsets: (start, end) } = self;
        let Some(given) = end.checked_sub(*start) else {
            return Err(format!("data_offsets [{start}, {end}] are reversed"));
        };
        // Zeros count as ones, so that no part of the product can overflow later either.
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
fn check_cover(entries: &BTreeMap<String, Entry>, size: usize) -> Result<(), String> {
    let mut order: Vec<_> = entries.iter().map(|(name, entry)| (entry.data_offsets, name)).collect();
    order.sort();
    let mut filled = 0;
    for ((start, end), name) in order {
        let what = if start < filled {
            format!("overlap the tensor before, which ends at {filled}")
        } else if start > filled {
            format!("leave a hole at {filled}")
        } else if end > size {
            format!("go past the end of the data, {size} bytes")
        } else {
            filled = end;
            continue;
        };
        return Err(format!("tensor {}: data_offsets [{start}, {end}] {what}", quoted(name)));
    }
    if filled == size {
        Ok(())
    } else {
        Err(format!("the tensors end at {filled}, but the file has {size} bytes of data"))
    }
}

/// The header's JSON.
struct Fields {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, Entry>,
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfMap;
        impl<'de> Visitor<'de> for OfMap {
            type Value = Fields;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let (mut metadata, mut entries) = (None, BTreeMap::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name.is_empty() {
                        return Err(A::Error::custom("a tensor has an empty name"));
                    }
                    if name == "__metadata__" {
                        let UniqueMap(found) = map.next_value().map_err(within("__metadata__"))?;
                        if metadata.replace(found).is_some() {
                            return Err(A::Error::custom("\"__metadata__\" is there twice"));
                        }
                    } else {
                        let place = format!("tensor {}", quoted(&name));
                        let Object(entry) = map.next_value().map_err(within(place))?;
                        insert_new(&mut entries, name, entry)?;
                    }
                }
                Ok(Fields { metadata: metadata.unwrap_or_default(), entries })
            }
        }
        deserializer.deserialize_map(OfMap)
    }
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
    let name = String::deserialize(deserializer).map_err(within("dtype"))?;
    serde_json::from_value(name.as_str().into()).map_err(|_| {
        let readable = crate::blocks::Dtype::NAMES;
        D::Error::custom(format_args!("dtype {} is unknown; supported: {readable}", quoted(&name)))
    })
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct Shape;
    impl<'de> Visitor<'de> for Shape {
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
    deserializer.deserialize_seq(Shape).map_err(within("shape"))
}

fn data_offsets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(usize, usize), D::Error> {
    Deserialize::deserialize(deserializer).map_err(within("data_offsets"))
}
