//! The fields of a request. A wrong type is an error with the field's name; null counts as left out.

use super::access::Client;
use super::budget::{Budget, Share};
use super::refusal::Refusal;
use crate::run::session::CancelToken;
use files::nesting::marks;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;

/// Values in a body, at most: each takes many times the memory of its text.
const MAX_VALUES: usize = 1 << 18;
/// Memory of each, with what a list or an object has room for beside it.
const OF_VALUE: u64 = 2 * size_of::<Value>() as u64 + 96;
/// Texts are held several times while a prompt is made of them: as a value, as a message, in a template, as a prompt.
const COPIES: u64 = 5;
/// Brackets in brackets.
const MAX_NESTING: usize = 64;

type Result<T> = std::result::Result<T, Refusal>;

/// An object of a request.
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// What comes before the names of its fields in messages.
    place: String,
}

/// The bytes of a request, with the memory that they may take, and who sends them.
pub struct Body {
    pub bytes: Vec<u8>,
    pub share: Share,
    pub client: Client,
    /// Ends what is done for it, once its client has gone.
    pub cancel: CancelToken,
}

impl Body {
    /// None yet.
    pub fn new(budget: &Arc<Budget>, client: Client) -> Self {
        Self { bytes: Vec::new(), share: budget.share(), client, cancel: CancelToken::default() }
    }
}

/// The JSON of a body, which must be an object.
pub fn object(body: &mut Body) -> Result<Map<String, Value>> {
    let bytes = &*repaired(body.bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&body.bytes));
    let values = count(bytes)?;
    body.share.grow(values * OF_VALUE + body.bytes.len() as u64 * COPIES)?;
    parse(bytes)
}

/// How many values there are, where they can be handled.
fn count(body: &[u8]) -> Result<u64> {
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
    Ok(values as u64)
}

fn parse(body: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Refusal::new(400, "the body is no JSON object")),
        Err(e) => Err(Refusal::new(400, format!("the body is not valid JSON: {e}"))),
    }
}

/// JSON in which halves of surrogate pairs that stand alone are U+FFFD: they are no text, but some clients send them.
fn repaired(body: &[u8]) -> Cow<'_, [u8]> {
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

/// What a value is, for messages.
pub fn kind(value: &Value) -> &'static str {
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

    /// All of it, as text.
    pub fn json(&self) -> String {
        Value::Object(self.object.clone()).to_string()
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

    /// One text, or several: each once, at most so many, of at most so many bytes.
    pub fn texts(&self, field: &str, (most, bytes): (usize, usize)) -> Result<Option<Vec<String>>> {
        let one = self.get(field).filter(|value| value.is_string()).map(std::slice::from_ref);
        let all = one.or(self.get(field).and_then(|value| value.as_array().map(Vec::as_slice)));
        if !all.is_some_and(|all| all.iter().all(Value::is_string)) {
            return self.as_type(field, "a string or an array of strings", |_| None);
        }
        let mut texts: Vec<String> = Vec::new();
        for text in all.into_iter().flatten().filter_map(Value::as_str) {
            if text.len() > bytes {
                return Err(
                    self.refuse(field, format!("has a text of {} bytes; use at most {bytes}", text.len()))
                );
            }
            if !texts.iter().any(|other| other == text) {
                if texts.len() == most {
                    return Err(self.refuse(field, format!("has more than {most} texts; use at most {most}")));
                }
                texts.push(text.to_owned());
            }
        }
        Ok(Some(texts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A body, with a budget of so many MiB.
    fn of(bytes: Vec<u8>, mib: u64) -> Body {
        Body { bytes, ..Body::new(&Budget::new(mib << 20), Client::default()) }
    }

    fn object(body: &[u8]) -> Result<Map<String, Value>> {
        super::object(&mut of(body.to_vec(), 256))
    }

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
        assert!(
            inner.texts("e", (9, 9)).is_err() && fields.list("d").is_err() && fields.object("a").is_err()
        );
        for range in [0..=0, 2..=9] {
            assert!(fields.whole("a", range).is_err());
        }
        assert!(
            fields.whole("g", -9..=9).is_err() && fields.flag("a").is_err() && fields.number("b").is_err()
        );
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
            assert_eq!(object(body.as_bytes()).expect(body)["a"], text, "{body}");
        }
        for bad in [r#"{"a":"\ud80"}"#, r#"{"a":"\"#, r#"{"a":"\ud800"#, r#"{"a":"\u+800"}"#] {
            assert!(object(bad.as_bytes()).is_err(), "{bad}");
        }
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
        // Each value takes memory beside its text.
        let some = format!("{{\"a\":[{}0]}}", "0,".repeat(MAX_VALUES / 2));
        let mut body = of(some.into(), 4);
        assert_eq!(super::object(&mut body).unwrap_err().status, 413);
    }

    #[test]
    fn texts_are_few_short_and_each_there_once() {
        let body = object(br#"{"a":["x","yy","x"],"b":"x","c":[1],"d":{}}"#).unwrap();
        let texts =
            |field: &str, most| Fields::new(&body).texts(field, most).map_err(|refusal| refusal.param);
        let some = |texts: &[&str]| Ok(Some(texts.iter().map(|text| text.to_string()).collect()));
        assert_eq!((texts("a", (2, 2)), texts("b", (1, 1))), (some(&["x", "yy"]), some(&["x"])));
        assert_eq!(texts("none", (1, 1)), Ok(None));
        for (field, most) in [("a", (1, 2)), ("a", (2, 1)), ("c", (9, 9)), ("d", (9, 9))] {
            assert_eq!(texts(field, most), Err(Some(field.into())));
        }
    }
}
