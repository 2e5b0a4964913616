//! Python's methods of texts, dictionaries and lists: those of `minijinja-contrib`, and what it lacks or does without
//! a limit.

use super::limits::{checked, failed, pay_for};
use crate::chat::is_blank;
use minijinja::value::{Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Bytes for one text in a list of texts.
const PART: usize = 32;

/// Calls `method` of `value`.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return checked(unknown_method_callback(state, value, method, args)?);
    };
    match method {
        // The filters know what they make before they make it.
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            state.apply_filter("join", &[items.clone(), value.clone()])
        }
        "replace" => state.apply_filter("replace", &[std::slice::from_ref(value), args].concat()),
        "split" | "rsplit" => split(state, text, method, args),
        "splitlines" => {
            pay_for(state, text.lines().count() * PART)?;
            unknown_method_callback(state, value, method, args)
        }
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            strip(state, text, method, chars).map(Value::from)
        }
        "partition" | "rpartition" => partition(text, method, args),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        // Pads to any width.
        "format" => Err(Error::from(ErrorKind::UnknownMethod)),
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// `text` without blanks, or without `chars`, at its ends.
pub(super) fn strip<'a>(
    state: &State<'_, '_>,
    text: &'a str,
    method: &str,
    chars: Option<&str>,
) -> Result<&'a str, Error> {
    // Every character of the text is looked up among them.
    pay_for(state, text.len().saturating_mul(chars.map_or(1, str::len)))?;
    let goes = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.contains(c));
    Ok(match method {
        "strip" => text.trim_matches(goes),
        "lstrip" => text.trim_start_matches(goes),
        _ => text.trim_end_matches(goes),
    })
}

/// The parts of a text between separators, or between blanks.
pub(super) fn split(state: &State<'_, '_>, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let most = most.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
    let Some(separator) = separator else {
        if most != usize::MAX {
            return Err(failed("splits a text at a number of blanks, which is not supported"));
        }
        let parts = || text.split(is_blank).filter(|part| !part.is_empty());
        pay_for(state, parts().count() * PART)?;
        return Ok(parts().map(Value::from).collect());
    };
    if separator.is_empty() {
        return Err(failed("splits a text at an empty text"));
    }
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

/// What is before the separator, the separator, and what is after it.
fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (at,): (&str,) = from_args(args)?;
    let (found, missing) = match method {
        "partition" => (text.split_once(at), [text, "", ""]),
        _ => (text.rsplit_once(at), ["", "", text]),
    };
    let parts = found.map_or(missing, |(before, after)| [before, at, after]);
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}
