//! Tool calls as models write them: JSON objects with a name and arguments.

use super::template_kwargs::{check_json, is_function_name};
use files::json_depth::list_tokens;
use serde::Deserialize;
use serde_json::value::RawValue;

/// The name of a function, and its arguments: the text of a JSON object.
pub(super) type ParsedCall = (String, String);

/// A call, `{"name": …, "arguments": {…}}`; Llama's arguments are `parameters`.
#[derive(Deserialize)]
struct RawCall<'a> {
    #[serde(alias = "function")]
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl RawCall<'_> {
    fn into_call(self) -> Option<ParsedCall> {
        let arguments = match self.arguments.map(RawValue::get) {
            None | Some("null") => "{}".to_owned(),
            // An object inside a string.
            Some(text) if text.starts_with('"') => {
                let inner: String = serde_json::from_str(text).ok()?;
                serde_json::from_str::<&RawValue>(&inner).ok()?.get().to_owned()
            }
            Some(json) => json.to_owned(),
        };
        (is_function_name(&self.name) && are_arguments(&arguments)).then_some((self.name, arguments))
    }
}

/// True if this JSON is an object within the limits of templates.
pub(super) fn are_arguments(json: &str) -> bool {
    json.starts_with('{') && check_json(json).is_ok()
}

/// Parses text that consists only of calls: an object, several with whitespace, commas or semicolons between them, or a
/// list.
/// `None` if it contains anything else.
pub(super) fn parse_all(text: &str) -> Option<Vec<ParsedCall>> {
    let text = text.trim();
    let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    let (mut calls, mut rest) = (Vec::new(), inner.trim());
    while !rest.is_empty() {
        let end = find_object_end(rest)?;
        calls.push(parse_call(&rest[..end])?);
        rest = rest[end..].trim_start_matches(is_between);
    }
    Some(calls).filter(|calls| !calls.is_empty())
}

/// Parses the complete calls that `text` begins with; returns them, and the offset of the text after them.
pub(super) fn parse_leading(text: &str) -> (Vec<ParsedCall>, usize) {
    let start = text.trim_start();
    let (mut calls, mut rest) = (Vec::new(), start.strip_prefix('[').unwrap_or(start).trim_start());
    while let Some((call, end)) = find_object_end(rest).and_then(|end| Some((parse_call(&rest[..end])?, end)))
    {
        calls.push(call);
        rest = rest[end..].trim_start_matches(is_between);
    }
    (calls, text.len() - rest.len())
}

/// Parses a call.
pub(super) fn parse_call(object: &str) -> Option<ParsedCall> {
    serde_json::from_str::<RawCall>(object).ok()?.into_call()
}

/// Parses the name of the call that `text` begins with, and the offset of its arguments, if both are there. The call
/// is an object, alone or first in a list; its arguments must be an object too.
pub(super) fn parse_start(text: &str) -> Option<(String, usize)> {
    let mut name = None;
    let at = read_head(text, &mut name)?;
    Some((name.filter(|name| is_function_name(name))?, at))
}

/// Parses the name of the call that `text` begins with, if it is there.
pub(super) fn parse_name(text: &str) -> Option<String> {
    let mut name = None;
    read_head(text, &mut name);
    name.filter(|name| is_function_name(name))
}

/// Parses a call up to its arguments; returns their offset.
fn read_head(text: &str, name: &mut Option<String>) -> Option<usize> {
    let after = |rest: &'_ str, c: char| rest.trim_start().strip_prefix(c).map(str::len);
    let tail = |n: usize| &text[text.len() - n..];
    let list = after(text, '[').unwrap_or(text.len());
    let mut rest = tail(after(tail(list), '{')?);
    loop {
        let (field, n) = parse_string(rest)?;
        rest = tail(after(&rest[n..], ':')?).trim_start();
        if matches!(field.as_str(), "arguments" | "parameters") {
            return rest.starts_with('{').then_some(text.len() - rest.len());
        }
        let (value, n) = parse_string(rest)?;
        match field.as_str() {
            "name" | "function" if name.is_none() => *name = Some(value),
            "type" => {}
            _ => return None,
        }
        rest = tail(after(&rest[n..], ',')?).trim_start();
    }
}

/// Parses the JSON string that `text` begins with; returns it and its end.
fn parse_string(text: &str) -> Option<(String, usize)> {
    let mut strings = serde_json::Deserializer::from_str(text).into_iter::<String>();
    let string = strings.next()?.ok()?;
    Some((string, strings.byte_offset()))
}

/// True if a character may separate two calls.
pub(super) fn is_between(c: char) -> bool {
    c.is_whitespace() || c == ';' || c == ','
}

/// Finds the end of the JSON object that `text` begins with; `None` if there is none, or it has no end.
pub(super) fn find_object_end(text: &str) -> Option<usize> {
    let begins = text.starts_with('{');
    begins.then(|| list_tokens(text.as_bytes()).find(|mark| mark.depth == 0))?.map(|end| end.at + 1)
}

/// True if an object that begins with `text` may be a call, by the name of its first field.
pub(super) fn may_be_call(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('{') else { return text.is_empty() };
    let rest = rest.trim_start();
    ["\"name\"", "\"type\"", "\"function\"", "\"parameters\"", "\"arguments\""]
        .iter()
        .any(|field| field.starts_with(rest) || rest.starts_with(field))
}
