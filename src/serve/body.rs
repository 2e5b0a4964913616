//! Request bodies: JSON within limits, deserialized into types. Errors name the path of the field; `null` counts as an
//! absent field.

use super::access::ApiClient;
use super::error::{ApiError, ApiResult};
use super::memory::{MemoryBudget, MemoryShare};
use crate::run::session::CancelToken;
use files::json_depth::list_tokens;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt::{Display, Formatter};
use std::marker::PhantomData;
use std::sync::Arc;

/// Maximum number of JSON values in a body; each takes many times the memory of its text.
const MAX_VALUES: usize = 1 << 18;
/// Memory per value in bytes, including spare capacity of the array or object that contains it.
const VALUE_BYTES: u64 = 2 * size_of::<Value>() as u64 + 96;
/// Copies of a text while it becomes a prompt: body, JSON value, message, template, prompt.
const COPIES: u64 = 5;
/// Maximum nesting depth of arrays and objects.
const MAX_NESTING: usize = 64;
/// Initial capacity of a body, in bytes.
const MIN_CAPACITY: usize = 4 << 10;

/// Body of a request with its memory share and its client.
pub struct RequestBody {
    pub bytes: Vec<u8>,
    pub share: MemoryShare,
    pub client: ApiClient,
    /// Cancelled when the client disconnects.
    pub cancel: CancelToken,
}

impl RequestBody {
    /// Empty body.
    pub fn new(memory: &Arc<MemoryBudget>, client: ApiClient) -> Self {
        Self { bytes: Vec::new(), share: memory.new_share(), client, cancel: CancelToken::default() }
    }

    /// Appends bytes and takes memory for them; `expected` is the maximum length of the whole body.
    pub fn append(&mut self, data: &[u8], expected: usize) -> ApiResult<()> {
        let (need, room) = (self.bytes.len() + data.len(), self.bytes.capacity());
        if need > room {
            let more = (2 * room).max(MIN_CAPACITY).min(expected).max(need);
            self.share.grow((more - room) as u64)?;
            self.bytes.reserve_exact(more - self.bytes.len());
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Parses the body as a JSON object.
    pub fn parse_json(&mut self) -> ApiResult<Value> {
        let bytes = &*repair_surrogates(self.bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&self.bytes));
        let mut values = 0;
        for mark in list_tokens(bytes) {
            values += 1;
            if mark.depth > MAX_NESTING {
                let why = format!("request body is nested more than {MAX_NESTING} levels deep");
                return Err(ApiError::new(400, why));
            }
        }
        if values > MAX_VALUES {
            return Err(ApiError::new(400, format!("request body has more than {MAX_VALUES} values")));
        }
        self.share.grow(values as u64 * VALUE_BYTES + self.bytes.len() as u64 * COPIES)?;
        match serde_json::from_slice(bytes) {
            Ok(body @ Value::Object(_)) => Ok(body),
            Ok(_) => Err(ApiError::new(400, "request body is not a JSON object")),
            Err(e) => Err(ApiError::new(400, format!("request body is not valid JSON: {e}"))),
        }
    }
}

/// Replaces unpaired surrogate escapes by U+FFFD: they are invalid, but some clients send them.
fn repair_surrogates(body: &[u8]) -> Cow<'_, [u8]> {
    let mut body = Cow::Borrowed(body);
    let code = |body: &[u8], at: usize| {
        let digits = body.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut at = 0;
    while let Some(found) = body[at..].iter().position(|&byte| byte == b'\\') {
        at += found;
        at += match (code(&body, at), code(&body, at + 6)) {
            (Some(0xD800..0xDC00), Some(0xDC00..0xE000)) => 12,
            (Some(0xD800..0xE000), _) => {
                body.to_mut()[at + 2..at + 6].copy_from_slice(b"fffd");
                6
            }
            _ => 2,
        };
        at = at.min(body.len());
    }
    body
}

/// Deserializes a JSON value, owned or borrowed; errors name the field, whose path begins with `place`.
pub fn read_value<'de, T: Deserialize<'de>>(
    value: impl Deserializer<'de, Error = serde_json::Error>,
    place: &str,
) -> ApiResult<T> {
    serde_path_to_error::deserialize(value).map_err(|e| describe_type_error(&e, place))
}

fn describe_type_error(e: &serde_path_to_error::Error<serde_json::Error>, place: &str) -> ApiError {
    let (path, why) = (e.path().to_string(), e.inner().to_string());
    let (missing, why) = explain_type_error(&why);
    let mut field = place.to_owned();
    for part in [if path == "." { "" } else { &path }, missing] {
        let dot = if field.is_empty() || part.is_empty() || part.starts_with('[') { "" } else { "." };
        field = [&field, dot, part].concat();
    }
    ApiError::for_field(field, why)
}

/// Deserializes a JSON object.
pub fn read_object<'de, T: Deserialize<'de>>(value: &'de Value, place: &str) -> ApiResult<T> {
    Ok(read_value::<Object<T>>(value, place)?.0)
}

/// Deserializes a field of an object; `None` if it is absent or `null`.
pub fn read_field<'de, T: Deserialize<'de>>(object: &'de Value, field: &str) -> ApiResult<Option<T>> {
    read_value(&object[field], field)
}

/// Unwraps a required field.
pub fn require_field<T>(value: Option<T>, field: impl Display) -> ApiResult<T> {
    value.ok_or_else(|| ApiError::for_field(field.to_string(), "is missing; add it"))
}

/// Name of the missing field, if there is one, and serde's message in the words of JSON.
fn explain_type_error(message: &str) -> (&str, String) {
    let quoted = |text| str::split(text, '`').nth(1);
    if message.starts_with("missing field") {
        return (quoted(message).unwrap_or_default(), "is missing; add it".into());
    }
    let wrong = message.strip_prefix("invalid type: ").and_then(|rest| rest.rsplit_once(", expected "));
    let Some((found, expected)) = wrong else { return ("", message.to_owned()) };
    let found = match found.split(' ').next().unwrap_or_default() {
        "boolean" => "a boolean",
        "string" => "a string",
        "sequence" => "an array",
        "map" => "an object",
        _ => quoted(found).unwrap_or(found),
    };
    let expected = match expected {
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "an object",
        "f32" => "a number",
        other => other,
    };
    ("", format!("is {found}; use {expected}"))
}

/// Finds the value at a path such as `text.format`.
pub fn find_value<'a>(body: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(body, |value, part| value.get(part))
}

/// Type of a value, for error messages.
pub fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A struct deserialized from JSON objects only; serde's derive also accepts arrays.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct OfMap<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OfMap<T> {
            type Value = T;

            fn expecting(&self, to: &mut Formatter<'_>) -> std::fmt::Result {
                to.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        from.deserialize_map(OfMap(PhantomData)).map(Object)
    }
}

/// Deserializes with a function that returns `None` for a value of the wrong type.
fn read_with<'de, T, D: Deserializer<'de>>(
    from: D,
    expected: impl Display,
    read: impl FnOnce(&Value) -> Option<T>,
) -> Result<T, D::Error> {
    let value = Value::deserialize(from)?;
    read(&value).ok_or_else(|| {
        let found = if value.is_number() { value.to_string() } else { type_name(&value).into() };
        D::Error::custom(format!("is {found}; use {expected}"))
    })
}

/// Integer value of a number, also of one written as 3.0.
fn integer_value(value: &Value) -> Option<i64> {
    let float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15).map(|x| x as i64);
    value.as_i64().or_else(float)
}

/// An integer from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Integer<const MIN: i64, const MAX: i64>(pub i64);

impl<'de, const MIN: i64, const MAX: i64> Deserialize<'de> for Integer<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let expected = format!("an integer from {MIN} to {MAX}");
        let in_range = |value: &Value| integer_value(value).filter(|n| (MIN..=MAX).contains(n));
        read_with(from, expected, in_range).map(Integer)
    }
}

impl<const MIN: i64, const MAX: i64> Integer<MIN, MAX> {
    /// The number; `None` if it is negative.
    pub fn to_count(self) -> Option<usize> {
        usize::try_from(self.0).ok()
    }
}

/// A seed: any 64-bit integer. -1 becomes `None`, which requests a random one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seed(pub Option<u64>);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let seed = |value: &Value| match value.as_u64() {
            Some(n) => Some(Seed(Some(n))),
            None => integer_value(value).map(|n| Seed((n != -1).then_some(n as u64))),
        };
        read_with(from, "an integer from -2^63 to 2^64-1", seed)
    }
}

/// One string or an array of strings, without duplicates: at most `COUNT`, of at most `BYTES` bytes each.
#[derive(Debug, Clone, PartialEq)]
pub struct Strings<const COUNT: usize, const BYTES: usize>(pub Vec<String>);

impl<'de, const COUNT: usize, const BYTES: usize> Deserialize<'de> for Strings<COUNT, BYTES> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let all = |value: &Value| match value {
            Value::String(one) => Some(vec![one.clone()]),
            Value::Array(all) => all.iter().map(|one| one.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        let all: Vec<String> = read_with(from, "a string or an array of strings", all)?;
        let mut strings = Vec::new();
        for string in all {
            if string.len() > BYTES {
                let why = format!("has a string of {} bytes; use at most {BYTES}", string.len());
                return Err(D::Error::custom(why));
            }
            if !strings.contains(&string) {
                strings.push(string);
            }
            if strings.len() > COUNT {
                return Err(D::Error::custom(format!("has more than {COUNT} strings; use at most {COUNT}")));
            }
        }
        Ok(Self(strings))
    }
}

/// Token ids of the model's vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenIds(pub Vec<u32>);

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .filter(|&id| (id as usize) < crate::dims::VOCAB)
        };
        let ids = |value: &Value| value.as_array()?.iter().map(id).collect();
        let expected = format!("an array of token ids from 0 to {}", crate::dims::VOCAB - 1);
        read_with(from, expected, ids).map(TokenIds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Body with a memory budget of `mib` MiB.
    fn body(bytes: Vec<u8>, mib: u64) -> RequestBody {
        RequestBody { bytes, ..RequestBody::new(&MemoryBudget::new(mib << 20), ApiClient::default()) }
    }

    fn parse(bytes: &[u8]) -> ApiResult<Value> {
        body(bytes.to_vec(), 256).parse_json()
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "its fields are read from JSON alone")]
    struct Inner {
        e: Option<bool>,
        need: String,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "its fields are read from JSON alone")]
    struct Outer {
        a: Option<Integer<0, 9>>,
        b: Option<String>,
        d: Option<Vec<Object<Inner>>>,
        g: Option<f32>,
        seed: Option<Seed>,
        strings: Option<Strings<2, 2>>,
        ids: Option<TokenIds>,
    }

    #[test]
    fn a_wrong_type_is_refused_with_its_path_and_in_plain_words_and_null_is_nothing() {
        let good = br#"{"a":2.0,"b":null,"g":-1.5,"seed":18446744073709551615,"strings":["x","yy","x"],"ids":[1],"more":1}"#;
        let outer: Outer = read_object(&parse(good).expect("JSON"), "").expect("reads");
        assert_eq!((outer.a, outer.b, outer.g), (Some(Integer(2)), None, Some(-1.5)));
        assert_eq!((outer.seed, outer.ids), (Some(Seed(Some(u64::MAX))), Some(TokenIds(vec![1]))));
        assert_eq!(outer.strings, Some(Strings(vec!["x".into(), "yy".into()])));
        for (bad, message) in [
            (r#"{"a":10}"#, "a: is 10; use an integer from 0 to 9"),
            (r#"{"a":"x"}"#, "a: is a string; use an integer from 0 to 9"),
            (r#"{"a":0.5}"#, "a: is 0.5; use an integer from 0 to 9"),
            (r#"{"b":1}"#, "b: is 1; use a string"),
            (r#"{"b":[1]}"#, "b: is an array; use a string"),
            (r#"{"d":1}"#, "d: is 1; use an array"),
            (r#"{"d":[[]]}"#, "d[0]: is an array; use an object"),
            (r#"{"d":[{"need":"x"},{"e":0}]}"#, "d[1].e: is 0; use true or false"),
            (r#"{"d":[{}]}"#, "d[0].need: is missing; add it"),
            (r#"{"g":true}"#, "g: is a boolean; use a number"),
            (r#"{"seed":1.5}"#, "seed: is 1.5; use an integer from -2^63 to 2^64-1"),
            (r#"{"strings":"xxx"}"#, "strings: has a string of 3 bytes; use at most 2"),
            (r#"{"strings":["a","b","c"]}"#, "strings: has more than 2 strings; use at most 2"),
            (r#"{"strings":[1]}"#, "strings: is an array; use a string or an array of strings"),
            (r#"{"ids":[-1]}"#, "ids: is an array; use an array of token ids from 0 to 255"),
        ] {
            let e = read_object::<Outer>(&parse(bad.as_bytes()).expect("JSON"), "").expect_err(bad);
            let field = message.split_once(':').map(|(field, _)| field);
            let ids = format!("from 0 to {}", crate::dims::VOCAB - 1);
            assert_eq!(e.message, message.replace("from 0 to 255", &ids), "{bad}");
            assert_eq!(e.param.as_deref(), field, "{bad}");
        }
        let inner: Object<Inner> =
            read_value(serde_json::json!({"need": "x", "e": true}), "").expect("reads");
        assert!(inner.0.need == "x" && inner.0.e == Some(true) && outer.d.is_none());
        let e = read_object::<Inner>(&serde_json::json!({"need": 1}), "x[2]").expect_err("a number");
        assert_eq!(e.message, "x[2].need: is 1; use a string");
        let seeds = [(-2, Some(u64::MAX - 1)), (-1, None), (3, Some(3))];
        assert!(seeds.iter().all(|(n, seed)| read_value::<Seed>(Value::from(*n), "") == Ok(Seed(*seed))));
    }

    #[test]
    fn a_lone_surrogate_is_a_replacement_character_and_a_mark_before_the_body_is_skipped() {
        for (body, text) in [
            (r#"{"a":"\ud800"}"#, "\u{fffd}"),
            (r#"{"a":"x\uDFFFy"}"#, "x\u{fffd}y"),
            (r#"{"a":"\ud83d\ude00\ud83d\ud83d\ude00"}"#, "😀\u{fffd}😀"),
            (r#"{"a":"\\ud800\\\ud800"}"#, "\\ud800\\\u{fffd}"),
            ("\u{feff}{\"a\":\"b\"}", "b"),
        ] {
            assert_eq!(parse(body.as_bytes()).expect(body)["a"], text, "{body}");
        }
        for bad in [r#"{"a":"\ud80"}"#, r#"{"a":"\"#, r#"{"a":"\ud800"#, r#"{"a":"\u+800"}"#] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_body_is_an_object_of_a_size_that_can_be_held() {
        for bad in [&b""[..], b"[]", b"{", b"\"a\"", b"{\"a\":1}x", b"\xff", b"{\"a\":\"\xff\"}"] {
            assert_eq!(parse(bad).unwrap_err().status, 400);
        }
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(parse(deep.as_bytes()).unwrap_err().message.contains("levels"));
        let many = format!("{{\"a\":[{}0]}}", "0,".repeat(MAX_VALUES));
        assert!(parse(many.as_bytes()).unwrap_err().message.contains("values"));
        // Each value takes memory beside its text.
        let some = format!("{{\"a\":[{}0]}}", "0,".repeat(MAX_VALUES / 2));
        assert_eq!(body(some.into(), 4).parse_json().unwrap_err().status, 413);
    }
}
