//! Texts in parts.

use super::super::arguments::{flag, named};
use super::super::limits::{failed, pay_for};
use crate::chat::is_blank;
use minijinja::value::{Kwargs, Tuple, from_args};
use minijinja::{Error, State, Value};

/// Bytes for one text in a list of texts.
const PART: usize = 32;

/// The parts of a text between separators, or between blanks: at most some, from the left or from the right.
pub(in super::super) fn split(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let (separator, most, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(args)?;
    let separator = named(separator, &kwargs, "sep")?;
    let most = named(most, &kwargs, "maxsplit")?.map(i64::try_from).transpose()?;
    kwargs.assert_all_used()?;
    let separator = match &separator {
        Some(separator) => {
            Some(separator.as_str().ok_or_else(|| failed("splits a text at a value that is no text"))?)
        }
        None => None,
    };
    let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let Some(separator) = separator else {
        let parts = || text.split(is_blank).filter(|part| !part.is_empty());
        pay_for(state, parts().count().min(most) * PART)?;
        return Ok(match (method, most) {
            (_, usize::MAX) => parts().map(Value::from).collect(),
            ("split", _) => Value::from(from_left(text, most)),
            _ => Value::from(from_right(text, most)),
        });
    };
    if separator.is_empty() {
        return Err(failed("splits a text at an empty text"));
    }
    let most = most.saturating_add(1);
    pay_for(state, text.matches(separator).count() * PART)?;
    Ok(match method {
        "split" => text.splitn(most, separator).map(Value::from).collect(),
        _ => {
            let mut parts: Vec<_> = text.rsplitn(most, separator).map(Value::from).collect();
            parts.reverse();
            Value::from(parts)
        }
    })
}

/// `most` parts between blanks, and the rest.
fn from_left(text: &str, most: usize) -> Vec<Value> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(is_blank));
    while !rest.is_empty() {
        let end = Some(rest.len()).filter(|_| parts.len() == most);
        let end = end.or_else(|| rest.find(is_blank)).unwrap_or(rest.len());
        parts.push(Value::from(&rest[..end]));
        rest = rest[end..].trim_start_matches(is_blank);
    }
    parts
}

/// The rest, and `most` parts between blanks.
fn from_right(text: &str, most: usize) -> Vec<Value> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end_matches(is_blank));
    while !rest.is_empty() {
        let blank = rest.char_indices().rev().find(|(_, c)| is_blank(*c)).filter(|_| parts.len() < most);
        let from = blank.map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(Value::from(&rest[from..]));
        rest = rest[..from].trim_end_matches(is_blank);
    }
    parts.reverse();
    parts
}

/// The lines of a text, their ends too where `args` say so.
pub(super) fn split_lines(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keeps_ends, kwargs): (Option<Value>, Kwargs) = from_args(args)?;
    let keeps_ends = flag(keeps_ends, &kwargs, "keepends")?;
    kwargs.assert_all_used()?;
    let is_end = |c: char| "\n\r\x0b\x0c\x1c\x1d\x1e\u{85}\u{2028}\u{2029}".contains(c);
    pay_for(state, text.matches(is_end).count() * PART)?;
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let width = match &rest[end..] {
            after if after.starts_with("\r\n") => 2,
            after => after.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(Value::from(&rest[..if keeps_ends { end + width } else { end }]));
        rest = &rest[end + width..];
    }
    Ok(Value::from(lines))
}

/// The text before the separator, the separator, and the text after it.
pub(super) fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (at,): (&str,) = from_args(args)?;
    if at.is_empty() {
        return Err(failed("splits a text at an empty text"));
    }
    let (found, missing) = match method {
        "partition" => (text.split_once(at), [text, "", ""]),
        _ => (text.rsplit_once(at), ["", "", text]),
    };
    let parts = found.map_or(missing, |(before, after)| [before, at, after]);
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}
