//! The fields of a request. A wrong type is an error with the field's name; null counts as left out.

use super::refusal::Refusal;
use files::nesting::marks;
use serde_json::{Map, Value};

/// Values in a body, at most: each takes many times the memory of its text.
const MAX_VALUES: usize = 1 << 20;
/// Brackets in brackets.
const MAX_NESTING: usize = 64;

type Result<T> = std::result::Result<T, Refusal>;

/// An object of a request.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// What comes before the names of its fields in messages.
    place: String,
}

/// The JSON of a body, which must be an object.
pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>> {
    let mut values = 0;
    for mark in marks(body) {
        values += 1;
        if mark.depth > MAX_NESTING {
            return Err(Refusal::new(400, format!("the body is nested more than {MAX_NESTING} levels deep")));
        }
    }
    if values > MAX_VALUES {
        return Err(Refusal::new(400, format!("the body holds more than {MAX_VALUES} values")));
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Refusal::new(400, "the body is no JSON object")),
        Err(e) => Err(Refusal::new(400, format!("the body is not valid JSON: {e}"))),
    }
}

/// What a value is, for messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

impl<'a> Fields<'a> {
    /// Of the body.
    pub fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, place: String::new() }
    }

    /// Of a value in it.
    pub fn of(value: &'a Value, place: &str) -> Result<Self> {
        match value {
            Value::Object(object) => Ok(Self { object, place: format!("{place}.") }),
            other => Err(Refusal::field(place, format!("is {}; use an object", kind(other)))),
        }
    }

    /// The name of a field in messages.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.place)
    }

    /// An error of a field.
    pub fn refuse(&self, field: &str, why: impl std::fmt::Display) -> Refusal {
        Refusal::field(self.name(field), why)
    }

    /// Any value.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn as_type<T>(
        &self,
        field: &str,
        what: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let shown = match value {
            Value::Number(n) => n.to_string(),
            other => kind(other).to_owned(),
        };
        read(value).map(Some).ok_or_else(|| self.refuse(field, format!("is {shown}; use {what}")))
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>> {
        self.as_type(field, "a string", Value::as_str)
    }

    /// A text that must be there.
    pub fn needed_text(&self, field: &str) -> Result<&'a str> {
        self.text(field)?.ok_or_else(|| self.refuse(field, "is missing; give a string"))
    }

    pub fn flag(&self, field: &str) -> Result<Option<bool>> {
        self.as_type(field, "true or false", Value::as_bool)
    }

    pub fn list(&self, field: &str) -> Result<Option<&'a [Value]>> {
        self.as_type(field, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        self.get(field).map(|value| Fields::of(value, &self.name(field))).transpose()
    }

    /// Names and values of an object.
    pub fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.object.iter()
    }

    /// A finite number.
    pub fn number(&self, field: &str) -> Result<Option<f32>> {
        let read = |value: &Value| Some(value.as_f64()? as f32).filter(|x| x.is_finite());
        self.as_type(field, "a number", read)
    }

    /// A whole number in a range; 3.0 is one.
    pub fn whole(&self, field: &str, range: std::ops::RangeInclusive<i64>) -> Result<Option<i64>> {
        let what = format!("a whole number from {} to {}", range.start(), range.end());
        let read = |value: &Value| {
            let float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15).map(|x| x as i64);
            value.as_i64().or_else(float).filter(|n| range.contains(n))
        };
        self.as_type(field, &what, read)
    }

    /// A seed, any whole number of 64 bits; -1 is `None`, which draws one.
    pub fn seed(&self, field: &str) -> Result<Option<Option<u64>>> {
        self.as_type(field, "a whole number from -2^63 to 2^64-1", |value| {
            let float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15).map(|x| x as i64);
            match value.as_u64() {
                Some(n) => Some(Some(n)),
                None => value.as_i64().or_else(float).map(|n| (n != -1).then_some(n as u64)),
            }
        })
    }

    /// One text, or several.
    pub fn texts(&self, field: &str) -> Result<Option<Vec<String>>> {
        self.as_type(field, "a string or an array of strings", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(all) => all.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_type_is_refused_by_its_name_and_null_is_nothing() {
        let body = object(br#"{"a":1,"b":"x","c":null,"d":{"e":[true]},"f":2.0,"g":-1.5}"#).unwrap();
        let fields = Fields::new(&body);
        assert_eq!((fields.whole("a", 0..=9), fields.text("b")), (Ok(Some(1)), Ok(Some("x"))));
        assert_eq!((fields.text("c"), fields.number("g")), (Ok(None), Ok(Some(-1.5))));
        assert_eq!(fields.whole("f", 0..=9), Ok(Some(2)));
        let e = fields.text("a").unwrap_err();
        assert_eq!((e.message.as_str(), e.param.as_deref()), ("a: is 1; use a string", Some("a")));
        let seeds =
            object(br#"{"a":18446744073709551615,"b":-2,"c":-1,"d":3.0,"e":0.5,"f":1e30,"g":"x"}"#).unwrap();
        let seeds = Fields::new(&seeds);
        let found = ["a", "b", "c", "d", "none"].map(|field| seeds.seed(field));
        let expected = [Some(Some(u64::MAX)), Some(Some(u64::MAX - 1)), Some(None), Some(Some(3)), None];
        assert_eq!(found, expected.map(Ok));
        assert!(["e", "f", "g"].iter().all(|field| seeds.seed(field).is_err()));
        let inner = fields.object("d").unwrap().unwrap();
        assert_eq!(inner.flag("e").unwrap_err().param.as_deref(), Some("d.e"));
        assert!(inner.texts("e").is_err() && fields.list("d").is_err() && fields.object("a").is_err());
        for range in [0..=0, 2..=9] {
            assert!(fields.whole("a", range).is_err());
        }
        assert!(
            fields.whole("g", -9..=9).is_err() && fields.flag("a").is_err() && fields.number("b").is_err()
        );
    }

    #[test]
    fn a_body_is_an_object_of_a_size_that_can_be_held() {
        for bad in [&b""[..], b"[]", b"{", b"\"a\"", b"{\"a\":1}x", b"\xff", b"{\"a\":\"\xff\"}"] {
            assert_eq!(object(bad).unwrap_err().status, 400);
        }
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(object(deep.as_bytes()).unwrap_err().message.contains("levels"));
        let many = format!("{{\"a\":[{}0]}}", "0,".repeat(MAX_VALUES));
        assert!(object(many.as_bytes()).unwrap_err().message.contains("values"));
    }
}
