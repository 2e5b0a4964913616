//! Writes values like Python's `str` and `repr`.

use minijinja::Value;
use minijinja::value::ValueKind;
use std::borrow::Cow;

/// Writes `value` like `str`. The caller has checked its nesting.
pub(super) fn to_str(value: &Value) -> Cow<'_, str> {
    match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None if value.is_undefined() => Cow::Borrowed(""),
        None => {
            let mut out = String::new();
            write_repr(value, &mut out);
            Cow::Owned(out)
        }
    }
}

/// Appends `value` like `repr`.
fn write_repr(value: &Value, out: &mut String) {
    let (open, close) = match value.kind() {
        ValueKind::Undefined => return out.push_str("Undefined"),
        ValueKind::Number => return out.push_str(&number_to_str(value)),
        ValueKind::Map if !super::limits::is_namespace(value) => ("{", "}"),
        ValueKind::Seq if value.is_tuple() && value.len() == Some(1) => ("(", ",)"),
        ValueKind::Seq if value.is_tuple() => ("(", ")"),
        ValueKind::Seq => ("[", "]"),
        ValueKind::String => return write_quoted(value.as_str().unwrap_or(""), out),
        _ => return out.push_str(&value.to_string()),
    };
    out.push_str(open);
    for (at, item) in value.try_iter().into_iter().flatten().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        write_repr(&item, out);
        if open == "{" {
            out.push_str(": ");
            write_repr(&value.get_item(&item).unwrap_or_default(), out);
        }
    }
    out.push_str(close);
}

/// Appends a quoted text.
fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if c == quote => out.extend(['\\', c]),
            _ if is_printable(c) => out.push(c),
            ..'\u{100}' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            _ => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        }
    }
    out.push(quote);
}

/// True if Python does not escape a character in quotes.
fn is_printable(c: char) -> bool {
    let is_format = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || is_format)
}

/// Escapes a text for HTML; a text that is marked as safe is not changed.
pub(super) fn escape_html(value: &Value) -> String {
    let text = self::to_str(value).into_owned();
    if value.is_safe() {
        return text;
    }
    let signs = [("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ("\"", "&#34;")];
    signs.iter().fold(text, |text, (sign, name)| text.replace(sign, name))
}

/// Writes a number.
pub(super) fn number_to_str(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => write_float(float),
        _ => value.to_string(),
    }
}

/// Writes a number in the fewest digits that give it; an exponent has a sign and two digits.
fn write_float(number: f64) -> String {
    let digits = format!("{number:?}");
    match digits.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None if number.is_nan() => "nan".into(),
        None => digits,
    }
}
