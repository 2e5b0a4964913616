//! The header of one safetensors file, checked in full before any tensor is believed.
//!
//! Layout: `n` (u64, little-endian), `n` bytes of JSON, then the tensors' data without gaps.
//! The `safetensors` crate's own parser takes a tensor name that occurs twice and an entry written as
//! an array, and its errors do not name the field; so only its table of element types is used here,
//! and tests hold the two parsers against each other.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::value::{Error as NameError, StrDeserializer};
use serde::de::{Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use super::json::{Object, UniqueMap, insert_new, parse as parse_json, within};
use super::quoted::quoted;

/// The format's own limit, in bytes of JSON.
const MAX_JSON: u64 = 100_000_000;

/// More dimensions than any tensor has.
const MAX_RANK: usize = 8;

/// What a file holds.
pub struct Header {
    /// Where the data starts, in bytes of the file.
    pub len: usize,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// By tensor name.
    pub entries: BTreeMap<String, Entry>,
}

/// One tensor; `range` is inside the file and as long as `dtype` and `shape` say.
pub struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub range: Range<usize>, // bytes of the file
}

impl Header {
    /// Parses and checks the header of the file whose content is `file`.
    pub fn parse(file: &[u8]) -> Result<Header, String> {
        let (Some(&n), size) = (file.first_chunk::<8>(), file.len()) else {
            return Err(format!("the file is {} bytes long, too short for a header", file.len()));
        };
        let n = u64::from_le_bytes(n);
        if n > MAX_JSON {
            return Err(format!("the header length is {n}, more than the format's {MAX_JSON}"));
        }
        let len = 8 + n as usize; // no overflow: n <= MAX_JSON
        let Some(json) = file.get(8..len) else {
            return Err(format!("the header length is {n}, but the file is only {size} bytes long"));
        };
        let raw: RawHeader = parse_json(json).map_err(|e| format!("header: {e}"))?;
        let mut entries = BTreeMap::new();
        for (name, raw) in raw.tensors {
            let entry = raw.check().map_err(|e| format!("tensor {}: {e}", quoted(&name)))?;
            entries.insert(name, entry);
        }
        check_cover(&entries, size - len)?;
        for entry in entries.values_mut() {
            // No overflow: the ranges end at most at `size - len`.
            entry.range = entry.range.start + len..entry.range.end + len;
        }
        Ok(Header { len, metadata: raw.metadata, entries })
    }
}

/// Checks that the tensors follow each other and fill the `size` bytes of data exactly.
fn check_cover(entries: &BTreeMap<String, Entry>, size: usize) -> Result<(), String> {
    let mut order: Vec<(&String, &Range<usize>)> = entries.iter().map(|(n, e)| (n, &e.range)).collect();
    order.sort_by_key(|(_, range)| (range.start, range.end));
    let mut end = 0;
    for (name, range) in order {
        if range.start != end {
            let what =
                if range.start < end { "overlap the tensor before, which ends" } else { "leave a hole" };
            let Range { start, end: stop } = range;
            return Err(format!("tensor {}: data_offsets [{start}, {stop}] {what} at {end}", quoted(name)));
        }
        end = range.end;
        if end > size {
            let Range { start, end } = range;
            return Err(format!(
                "tensor {}: data_offsets [{start}, {end}] go past the end of the data, {size} bytes",
                quoted(name)
            ));
        }
    }
    if end != size {
        return Err(format!("the tensors end at {end}, but the file has {size} bytes of data"));
    }
    Ok(())
}

/// The header as written.
#[derive(Default)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawEntry>,
}

#[derive(Deserialize)]
struct RawEntry {
    #[serde(deserialize_with = "dtype")]
    dtype: Dtype,
    #[serde(deserialize_with = "shape")]
    shape: Vec<usize>,
    #[serde(deserialize_with = "data_offsets")]
    data_offsets: (usize, usize),
}

impl RawEntry {
    /// Checks that the bytes are as many as dtype and shape ask for. The range is still of the data.
    fn check(self) -> Result<Entry, String> {
        let RawEntry { dtype, shape, data_offsets: (start, end) } = self;
        if end < start {
            return Err(format!("data_offsets [{start}, {end}] are reversed"));
        }
        // Zeros count as ones, so that no part of the product can overflow later either.
        let bits = shape
            .iter()
            .try_fold(dtype.bitsize(), |bits, &d| bits.checked_mul(d.max(1)))
            .ok_or_else(|| format!("shape {shape:?} of {dtype} is more than this machine can address"))?;
        let bits = if shape.contains(&0) { 0 } else { bits };
        if !bits.is_multiple_of(8) || bits / 8 != end - start {
            let (asked, given) = (bits.div_ceil(8), end - start);
            return Err(format!("shape {shape:?} of {dtype} needs {asked} bytes, data_offsets give {given}"));
        }
        Ok(Entry { dtype, shape, range: start..end })
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let (mut metadata, mut tensors) = (None, BTreeMap::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name.is_empty() {
                        return Err(A::Error::custom("a tensor has an empty name"));
                    }
                    if name == "__metadata__" {
                        let UniqueMap(m) = map.next_value().map_err(within("__metadata__"))?;
                        if metadata.replace(m).is_some() {
                            return Err(A::Error::custom("\"__metadata__\" is there twice"));
                        }
                    } else {
                        let place = format_args!("tensor {}", quoted(&name)).to_string();
                        let Object(entry) = map.next_value().map_err(within(place))?;
                        insert_new(&mut tensors, name, entry)?;
                    }
                }
                Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
    let name = String::deserialize(deserializer).map_err(within("dtype"))?;
    let known: StrDeserializer<'_, NameError> = name.as_str().into_deserializer();
    Dtype::deserialize(known).map_err(|_| {
        let readable = super::Dtype::NAMES;
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
