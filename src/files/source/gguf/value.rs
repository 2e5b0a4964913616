//! The values of GGUF metadata: numbers, booleans, strings, and arrays of these.
//!
//! The format allows arrays of arrays. They are rejected: no model uses them, and without them no code here recurses.
//! An array takes no more memory than in the file.

use std::fmt;

use super::cursor::Cursor;
use crate::error::quote;

/// The type of a value that is not an array, with its id in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueType {
    Uint8 = 0,
    Int8 = 1,
    Uint16 = 2,
    Int16 = 3,
    Uint32 = 4,
    Int32 = 5,
    Float32 = 6,
    Bool = 7,
    Text = 8,
    Uint64 = 10,
    Int64 = 11,
    Float64 = 12,
}

use ValueType::*;

/// The id of arrays.
const ARRAY: u32 = 9;

impl ValueType {
    const ALL: [ValueType; 12] =
        [Uint8, Int8, Uint16, Int16, Uint32, Int32, Float32, Bool, Text, Uint64, Int64, Float64];

    fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == id)
    }

    /// Bytes of a value in a file; for a string, the minimum.
    fn size(self) -> usize {
        match self {
            Uint8 | Int8 | Bool => 1,
            Uint16 | Int16 => 2,
            Uint32 | Int32 | Float32 => 4,
            Text | Uint64 | Int64 | Float64 => 8,
        }
    }
}

/// One value. Integers are widened, and stay signed or unsigned.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    Array(Array),
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Numbers or booleans as stored: packed and little-endian. `kind` is not `Text`.
    Numbers {
        kind: ValueType,
        bytes: Vec<u8>,
    },
    Strings(Strings),
}

/// An array of strings in one allocation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Strings {
    text: String,
    ends: Vec<u32>, // [string], byte offsets in `text`; ascending, at character boundaries
}

impl Strings {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)? as usize;
        let start = i.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(&self.text[start..end])
    }

    /// All strings, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|i| self.get(i))
    }

    /// Reads `count` strings; the caller has checked that the rest has room for that many.
    fn read(cursor: &mut Cursor<'_>, count: usize) -> Result<Self, String> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(count));
        for i in 0..count {
            let text = cursor.read_string_bytes("string").map_err(|e| format!("element {i}: {e}"))?;
            bytes.extend_from_slice(text);
            ends.push(u32::try_from(bytes.len()).map_err(|_| "more than 4 GiB of strings")?);
        }
        let broken = |at: usize| format!("element {at}: is not UTF-8");
        let text = String::from_utf8(bytes).map_err(|e| {
            let valid = e.utf8_error().valid_up_to();
            broken(ends.partition_point(|&end| end as usize <= valid))
        })?;
        // Two strings may be valid UTF-8 only when joined.
        match ends.iter().position(|&end| !text.is_char_boundary(end as usize)) {
            Some(at) => Err(broken(at)),
            None => Ok(Self { text, ends }),
        }
    }
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Array::Numbers { kind, bytes } => bytes.len() / kind.size(),
            Array::Strings(strings) => strings.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = Value> {
        (0..self.len()).map(move |i| match self {
            Array::Numbers { kind, bytes } => decode_number(*kind, &bytes[i * kind.size()..][..kind.size()]),
            Array::Strings(strings) => Value::Text(strings.get(i).unwrap_or_default().to_string()),
        })
    }

    /// Values of an array of 32-bit integers; `None` for any other array, as in llama.cpp.
    pub fn iter_int32(&self) -> Option<impl Iterator<Item = Value>> {
        matches!(self, Array::Numbers { kind: Uint32 | Int32, .. }).then(|| self.iter())
    }

    fn read(cursor: &mut Cursor<'_>) -> Result<Self, String> {
        let id = cursor.read_u32("array type")?;
        let kind = ValueType::from_id(id).ok_or_else(|| match id {
            ARRAY => "is an array of arrays; supported: arrays of numbers, booleans or strings".into(),
            _ => format!("array type is {id}; supported: 0 to 12 except 9"),
        })?;
        let count = cursor.read_count("array length", kind.size(), usize::MAX)?;
        if kind == Text {
            return Strings::read(cursor, count).map(Array::Strings);
        }
        // No overflow: `count` was compared with the bytes that are left.
        let bytes = cursor.take_bytes((count * kind.size()) as u64, "array")?.to_vec();
        if kind == Bool
            && let Some(i) = bytes.iter().position(|&byte| byte > 1)
        {
            decode_bool(bytes[i]).map_err(|e| format!("element {i}: {e}"))?;
        }
        Ok(Array::Numbers { kind, bytes })
    }
}

/// Decodes a boolean, which is 0 or 1.
fn decode_bool(byte: u8) -> Result<bool, String> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(format!("boolean is {byte}; supported: 0 and 1")),
    }
}

/// Decodes one value from exactly `kind.size()` bytes.
fn decode_number(kind: ValueType, bytes: &[u8]) -> Value {
    let mut low = [0; 8];
    low[..bytes.len()].copy_from_slice(bytes);
    let raw = u64::from_le_bytes(low);
    match kind {
        Uint8 | Uint16 | Uint32 | Uint64 | Text => Value::Unsigned(raw),
        Int8 => Value::Signed((raw as u8 as i8).into()),
        Int16 => Value::Signed((raw as u16 as i16).into()),
        Int32 => Value::Signed((raw as u32 as i32).into()),
        Int64 => Value::Signed(raw as i64),
        Float32 => Value::F32(f32::from_bits(raw as u32)),
        Float64 => Value::F64(f64::from_bits(raw)),
        Bool => Value::Bool(raw != 0),
    }
}

impl Value {
    /// Reads a value's type and the value.
    pub fn read(cursor: &mut Cursor<'_>) -> Result<Self, String> {
        let id = cursor.read_u32("value type")?;
        match ValueType::from_id(id) {
            Some(Text) => cursor.read_string("string", usize::MAX).map(Value::Text),
            Some(Bool) => decode_bool(cursor.take_bytes(1, "boolean")?[0]).map(Value::Bool),
            Some(kind) => Ok(decode_number(kind, cursor.take_bytes(kind.size() as u64, "number")?)),
            None if id == ARRAY => Array::read(cursor).map(Value::Array),
            None => Err(format!("value type is {id}; supported: 0 to 12")),
        }
    }

    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(n) => Some(n),
            Value::Signed(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// Value of a finite float. An f32 becomes the shortest decimal that rounds to it, which is the number that was
    /// meant: 1e-5, not 0.000009999999747378752.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(x) if x.is_finite() => format!("{x:e}").parse().ok(),
            Value::F64(x) => Some(x),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// Formats a value for messages: one short line.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(n) => write!(f, "{n}"),
            Value::Signed(n) => write!(f, "{n}"),
            Value::F32(x) => write!(f, "{x:?}"),
            Value::F64(x) => write!(f, "{x:?}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Text(text) => f.write_str(&quote(text)),
            Value::Array(array) => {
                let kind = match array {
                    Array::Numbers { kind, .. } => *kind,
                    Array::Strings(_) => Text,
                };
                write!(f, "an array of {} values of type {kind:?}", array.len())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Value, String> {
        let mut cursor = Cursor::new(bytes);
        let value = Value::read(&mut cursor)?;
        assert_eq!(cursor.position(), bytes.len(), "all of it");
        Ok(value)
    }

    fn typed(id: u32, rest: &[u8]) -> Vec<u8> {
        [&id.to_le_bytes(), rest].concat()
    }

    #[test]
    fn every_kind_of_number_is_read() {
        let value = |id, rest: &[u8]| read(&typed(id, rest)).unwrap();
        assert_eq!(value(0, &[255]), Value::Unsigned(255));
        assert_eq!(value(1, &[255]), Value::Signed(-1));
        assert_eq!(value(2, &[0, 255]), Value::Unsigned(0xff00));
        assert_eq!(value(3, &[0, 255]), Value::Signed(-256));
        assert_eq!(value(4, &u32::MAX.to_le_bytes()), Value::Unsigned(u32::MAX.into()));
        assert_eq!(value(5, &(-7i32).to_le_bytes()), Value::Signed(-7));
        assert_eq!(value(6, &1e-5f32.to_le_bytes()), Value::F32(1e-5));
        assert_eq!(value(7, &[1]), Value::Bool(true));
        assert_eq!(value(10, &u64::MAX.to_le_bytes()), Value::Unsigned(u64::MAX));
        assert_eq!(value(11, &i64::MIN.to_le_bytes()), Value::Signed(i64::MIN));
        assert_eq!(value(12, &0.1f64.to_le_bytes()), Value::F64(0.1));
        assert_eq!(value(6, &1e-5f32.to_le_bytes()).as_f64(), Some(1e-5));
        assert_eq!(value(6, &5e5f32.to_le_bytes()).as_f64(), Some(5e5));
        assert_eq!(value(6, &f32::NAN.to_le_bytes()).as_f64(), None);
        assert_eq!((Value::Signed(-1).as_u64(), Value::Signed(3).as_u64()), (None, Some(3)));
    }

    fn strings(parts: &[&[u8]]) -> Vec<u8> {
        let mut bytes = typed(ARRAY, &8u32.to_le_bytes());
        bytes.extend((parts.len() as u64).to_le_bytes());
        for part in parts {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(*part);
        }
        bytes
    }

    #[test]
    fn arrays_of_numbers_and_strings_are_read() {
        let Value::Array(Array::Strings(found)) = read(&strings(&[b"a", b"", "é".as_bytes()])).unwrap()
        else {
            panic!("not strings")
        };
        assert_eq!(found.iter().collect::<Vec<_>>(), ["a", "", "é"]);
        assert_eq!((found.get(2), found.get(3)), (Some("é"), None));

        let mut numbers = typed(ARRAY, &3u32.to_le_bytes());
        numbers.extend(2u64.to_le_bytes());
        numbers.extend([1, 0, 0xff, 0xff]);
        let Value::Array(found) = read(&numbers).unwrap() else { panic!("no array") };
        assert_eq!(found.iter().collect::<Vec<_>>(), [Value::Signed(1), Value::Signed(-1)]);
        assert_eq!(Value::Array(found).to_string(), "an array of 2 values of type Int16");
        let empty = [typed(ARRAY, &12u32.to_le_bytes()), vec![0; 8]].concat();
        assert!(matches!(read(&empty), Ok(Value::Array(a)) if a.is_empty()));
    }

    #[test]
    fn damaged_values_are_refused_by_name() {
        let refused = |bytes: &[u8], what: &str| {
            let error = read(bytes).unwrap_err();
            assert!(error.contains(what), "no {what:?} in {error:?}");
        };
        refused(&typed(13, &[0; 8]), "value type is 13");
        refused(&typed(u32::MAX, &[]), "value type is 4294967295");
        refused(&typed(7, &[2]), "boolean is 2");
        refused(&typed(4, &[0; 3]), "past the end");
        refused(&typed(ARRAY, &[&9u32.to_le_bytes()[..], &[0; 8]].concat()), "array of arrays");
        refused(&typed(ARRAY, &[&77u32.to_le_bytes()[..], &[0; 8]].concat()), "array type is 77");
        let long = [&12u32.to_le_bytes()[..], &u64::MAX.to_le_bytes(), &[0; 64]].concat();
        refused(&typed(ARRAY, &long), "array length 18446744073709551615");
        let truths = [&7u32.to_le_bytes()[..], &3u64.to_le_bytes(), &[0, 1, 9]].concat();
        refused(&typed(ARRAY, &truths), "element 2: boolean is 9");
        refused(&strings(&[b"ok", b"\xff"]), "element 1: is not UTF-8");
        refused(&strings(&[b"\xc3", b"\xa9"]), "element 0: is not UTF-8");
    }
}
