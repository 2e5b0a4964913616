//! Python's methods of texts, dictionaries and lists, as far as chat templates use them.

use super::limits::{charge, charge_parts, count_part};
use super::source::COUNT_PART;
use crate::chat::is_blank;
use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Longest list of characters to strip, in bytes.
const MAX_STRIPPED: usize = 256;

/// Calls `method` of `value`.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        _ if method == COUNT_PART => count_part(state, value),
        (ValueKind::String, Some(text)) => match method {
            "split" | "rsplit" | "splitlines" | "partition" | "rpartition" => {
                charge_parts(state, value)?;
                parts(text, method, args)
            }
            "replace" => {
                let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
                replace(state, text, (old, new), count)
            }
            "join" => {
                let (items,): (&Value,) = from_args(args)?;
                join(state, items.try_iter()?, text)
            }
            _ => {
                charge(state, text.len())?;
                match asked(text, method, args) {
                    Some(answer) => answer,
                    None => changed(text, method, args),
                }
            }
        },
        (ValueKind::Map, _) => of_map(value, method, args),
        (ValueKind::Seq, _) if method == "count" => {
            let (what,): (&Value,) = from_args(args)?;
            Ok(Value::from(value.try_iter()?.filter(|x| x == what).count()))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Methods that give a text.
fn changed(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let changed = match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            strip(text, method, chars)?.to_owned()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).to_owned()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).to_owned()
        }
        _ => {
            let result = match method {
                "upper" => text.to_uppercase(),
                "lower" => text.to_lowercase(),
                "title" => title(text),
                "capitalize" => capitalize(text),
                _ => return Err(Error::from(ErrorKind::UnknownMethod)),
            };
            let () = from_args(args)?;
            result
        }
    };
    Ok(Value::from(changed))
}

/// Methods that say something about a text.
fn asked(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let all = |test: fn(char) -> bool| {
        from_args::<()>(args).map(|()| Value::from(!text.is_empty() && text.chars().all(test)))
    };
    // Positions are counted in characters.
    let position = |at: Option<usize>| Value::from(at.map_or(-1, |at| text[..at].chars().count() as i64));
    let one = || from_args::<(&str,)>(args).map(|(what,)| what);
    Some(match method {
        "startswith" => affix(args, &|affix| text.starts_with(affix)),
        "endswith" => affix(args, &|affix| text.ends_with(affix)),
        "find" => one().map(|what| position(text.find(what))),
        "rfind" => one().map(|what| position(text.rfind(what))),
        "count" => one().map(|what| Value::from(text.matches(what).count())),
        "isspace" => all(is_blank),
        "isdigit" | "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isupper" => from_args::<()>(args).map(|()| {
            Value::from(text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase))
        }),
        "islower" => from_args::<()>(args).map(|()| {
            Value::from(text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase))
        }),
        _ => return None,
    })
}

/// Whether a text, or one of several, is what a text begins or ends with.
fn affix(args: &[Value], is: &dyn Fn(&str) -> bool) -> Result<Value, Error> {
    let (affix,): (&Value,) = from_args(args)?;
    if let Some(affix) = affix.as_str() {
        return Ok(Value::from(is(affix)));
    }
    for affix in affix.try_iter()? {
        if affix.as_str().is_some_and(is) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

/// `text` without blanks, or without `chars`, at its ends.
pub(super) fn strip<'a>(text: &'a str, method: &str, chars: Option<&str>) -> Result<&'a str, Error> {
    // Every character of the text is looked up among them.
    if chars.is_some_and(|chars| chars.len() > MAX_STRIPPED) {
        let why = format!("strips more than {MAX_STRIPPED} bytes of characters");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    let goes = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.contains(c));
    Ok(match method {
        "strip" => text.trim_matches(goes),
        "lstrip" => text.trim_start_matches(goes),
        _ => text.trim_end_matches(goes),
    })
}

/// A text in parts.
fn parts(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let list = |parts: Vec<&str>| Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()));
    match method {
        "partition" | "rpartition" => {
            let (at,): (&str,) = from_args(args)?;
            let parts = match (text.split_once(at), text.rsplit_once(at), method) {
                (Some((before, after)), _, "partition") | (_, Some((before, after)), _) => {
                    [before, at, after]
                }
                (_, _, "partition") => [text, "", ""],
                _ => ["", "", text],
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "splitlines" => {
            let () = from_args(args)?;
            list(text.lines().collect())
        }
        _ => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            if separator == Some("") {
                return Err(Error::new(ErrorKind::InvalidOperation, "splits a text at an empty text"));
            }
            let most = most.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
            list(match (separator, method) {
                (Some(separator), "split") => text.splitn(most, separator).collect(),
                (Some(separator), _) => {
                    let mut parts: Vec<_> = text.rsplitn(most, separator).collect();
                    parts.reverse();
                    parts
                }
                (None, _) if most == usize::MAX => text.split(is_blank).filter(|t| !t.is_empty()).collect(),
                (None, _) => {
                    let why = "splits a text at a number of blanks, which is not supported";
                    return Err(Error::new(ErrorKind::InvalidOperation, why));
                }
            })
        }
    }
}

/// `text` with `pair.1` for every `pair.0`, or for the first `count`.
pub(super) fn replace(
    state: &mut State<'_, '_>,
    text: &str,
    pair: (&str, &str),
    count: Option<i64>,
) -> Result<Value, Error> {
    let (old, new) = pair;
    let most = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).count().min(most);
    charge(state, found.saturating_mul(new.len()).saturating_add(text.len()))?;
    Ok(Value::from(text.replacen(old, new, most)))
}

/// `items` as one text with `between` between them.
pub(super) fn join(
    state: &mut State<'_, '_>,
    items: impl Iterator<Item = Value>,
    between: &str,
) -> Result<Value, Error> {
    let mut out = String::new();
    for (i, item) in items.enumerate() {
        super::limits::charge_all(state, &item)?;
        charge(state, between.len())?;
        if i > 0 {
            out.push_str(between);
        }
        match item.as_str() {
            Some(text) => out.push_str(text),
            None => out += &item.to_string(),
        }
    }
    Ok(Value::from(out))
}

fn of_map(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if method == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        let found = value.get_item(key)?;
        return Ok(if found.is_undefined() { default.unwrap_or(Value::from(())) } else { found });
    }
    let mut list = Vec::new();
    for key in value.try_iter()? {
        list.push(match method {
            "keys" => key,
            "values" => value.get_item(&key)?,
            "items" => {
                let item = value.get_item(&key)?;
                Value::from(Tuple::from([key, item]))
            }
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        });
    }
    let () = from_args(args)?;
    Ok(Value::from(list))
}

fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.flat_map(char::to_lowercase)).collect(),
        None => String::new(),
    }
}

/// Every run of letters begins with a capital.
fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        inside = c.is_alphabetic();
    }
    out
}
