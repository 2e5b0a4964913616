//! Python's methods of texts.

use super::super::limits::{failed, pay_for};
use super::formatting::formatted;
use super::split::{partition, split, split_lines};
use crate::chat::is_blank;
use minijinja::formatting::FormatStyle;
use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Calls `method` of `text`.
pub(super) fn method(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match method {
        "split" | "rsplit" => split(state, text, method, args),
        "splitlines" => split_lines(state, text, args),
        "partition" | "rpartition" => partition(text, method, args),
        "format" => formatted(state, text, args, FormatStyle::StrFormat),
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            strip(state, text, method, chars).map(Value::from)
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "startswith" | "endswith" => meets(text, method, args),
        "find" | "rfind" | "index" | "rindex" | "count" => find(text, method, args),
        "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => pad(state, text, method, args),
        _ => {
            let is = is(text, method).map(Value::from);
            let other = is.or_else(|| in_case(text, method).map(Value::from));
            let () = from_args(if other.is_some() { args } else { &[] })?;
            other.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))
        }
    }
}

/// `text` without blanks, or without `chars`, at its ends.
pub(in super::super) fn strip<'a>(
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

/// The characters of `text` from `start` to `end`, and how many come before; `None` where `start` is behind the text.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    if (start, end) == (None, None) {
        return Some((0, text));
    }
    let count = text.chars().count();
    let at = |n: i64| match usize::try_from(n) {
        Ok(n) => n,
        Err(_) => count.saturating_sub(n.unsigned_abs() as usize),
    };
    let (start, end) = (at(start.unwrap_or(0)), at(end.unwrap_or(i64::MAX)).min(count));
    let byte = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    (start <= count).then(|| (start, if start < end { &text[byte(start)..byte(end)] } else { "" }))
}

/// Whether a text begins or ends with one of some.
fn meets(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let Some((_, text)) = part(text, start, end) else { return Ok(Value::from(false)) };
    let wanted = match wanted.kind() {
        ValueKind::Seq if wanted.is_tuple() => wanted.try_iter()?.collect(),
        _ => vec![wanted.clone()],
    };
    for wanted in wanted {
        let wanted = wanted.as_str().ok_or_else(|| failed(format!("{method} of a value that is no text")))?;
        let meets = if method == "startswith" { text.starts_with(wanted) } else { text.ends_with(wanted) };
        if meets {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

/// Where a text is in another one, and how often.
fn find(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let part = part(text, start, end);
    if method == "count" {
        return Ok(Value::from(part.map_or(0, |(_, text)| text.matches(wanted).count())));
    }
    let found = part.and_then(|(before, text)| {
        let at = if method.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
        Some(before + text[..at?].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(failed(format!("{method}: the text is not there"))),
    }
}

/// A text of some width.
fn pad(state: &State<'_, '_>, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (Option<i64>, Option<&str>) = from_args(args)?;
    let width = match (width, method) {
        (Some(width), _) => usize::try_from(width).unwrap_or(0),
        (None, "expandtabs") => 8,
        (None, _) => return Err(Error::from(ErrorKind::MissingArgument)),
    };
    let mut fill = fill.unwrap_or(" ").chars();
    let (Some(fill), None) = (fill.next(), fill.next()) else {
        return Err(failed(format!("{method}: fills with a text that is not one character")));
    };
    if method == "expandtabs" {
        pay_for(state, width.saturating_mul(text.matches('\t').count()))?;
        return Ok(Value::from(expand_tabs(text, width)));
    }
    let missing = width.saturating_sub(text.chars().count());
    pay_for(state, missing.saturating_mul(4))?;
    let filled = |n: usize| fill.to_string().repeat(n);
    Ok(Value::from(match method {
        "ljust" => text.to_owned() + &filled(missing),
        "rjust" => filled(missing) + text,
        "zfill" => {
            let sign = text.strip_prefix(['+', '-']).map_or(0, |digits| text.len() - digits.len());
            [&text[..sign], &"0".repeat(missing), &text[sign..]].concat()
        }
        // As CPython rounds.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            filled(left) + text + &filled(missing - left)
        }
    }))
}

fn expand_tabs(text: &str, width: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let blanks = if width == 0 { 0 } else { width - column % width };
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            _ => {
                out.push(c);
                column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// Whether a text is of a kind.
fn is(text: &str, method: &str) -> Option<bool> {
    let every = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let any = |is: fn(char) -> bool| text.chars().any(is);
    let has_case = || any(|c| c.is_lowercase() || c.is_uppercase());
    let is_digit = |c: char| c.is_ascii_digit() || "²³¹⁰⁴⁵⁶⁷⁸⁹".contains(c);
    Some(match method {
        "isalnum" => every(char::is_alphanumeric),
        "isalpha" => every(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" => every(|c| c.is_ascii_digit()),
        "isdigit" => every(is_digit),
        "isnumeric" => every(char::is_numeric),
        "isidentifier" => every(|c| c == '_' || c.is_alphanumeric()) && !text.starts_with(char::is_numeric),
        "isspace" => every(is_blank),
        "islower" => has_case() && !any(char::is_uppercase),
        "isupper" => has_case() && !any(char::is_lowercase),
        "istitle" => has_case() && title(text) == text,
        _ => return None,
    })
}

/// A text in other case.
fn in_case(text: &str, method: &str) -> Option<String> {
    Some(match method {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "capitalize" => {
            let first = text.chars().next().map_or(0, char::len_utf8);
            text[..first].to_uppercase() + &text[first..].to_lowercase()
        }
        "swapcase" => {
            let swap = |c: char| {
                if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() }
            };
            text.chars().map(swap).collect()
        }
        "title" => title(text),
        _ => return None,
    })
}

/// Every letter after another one is small, and every other one large.
fn title(text: &str) -> String {
    let (mut out, mut after_letter) = (String::new(), false);
    for c in text.chars() {
        match after_letter {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        after_letter = c.is_lowercase() || c.is_uppercase();
    }
    out
}
