//! Python's methods of strings, dictionaries and lists, and its way to pass arguments. As in transformers' sandbox, no
//! method changes a value.

use super::limits::{check_value, consume_fuel, template_error, value_size};
use super::repr;
use crate::chat::is_blank;
use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Cost of one string in a list, in bytes.
const PART_BYTES: usize = 32;
/// Maximum width of a field, and number of digits.
const MAX_WIDTH: usize = 4096;

/// The arguments of a filter or method, each given by position or by name.
pub(super) fn named_args<const N: usize>(
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (positional, kwargs) = match args.split_last() {
        Some((last, others)) if last.is_kwargs() => (others, Kwargs::try_from(last.clone())?),
        _ => (args, std::iter::empty::<(String, Value)>().collect()),
    };
    if positional.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut found = [const { None }; N];
    for (at, name) in names.into_iter().enumerate() {
        found[at] = match positional.get(at) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
    }
    kwargs.assert_all_used()?;
    Ok(found)
}

/// True if an argument is neither `none` nor undefined.
pub(super) fn is_given(value: &Value) -> bool {
    !value.is_none() && !value.is_undefined()
}

/// Calls `method` of `value`.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), value.kind()) {
        // The filters charge for the result before they make it.
        (Some(_), _) if method == "join" => {
            let (items,): (&Value,) = from_args(args)?;
            state.apply_filter("join", &[items.clone(), value.clone()])
        }
        (Some(_), _) if method == "replace" => {
            state.apply_filter("replace", &[std::slice::from_ref(value), args].concat())
        }
        (Some(text), _) => call_text_method(state, text, method, args),
        (None, ValueKind::Map) => call_dict_method(value, method, args),
        (None, ValueKind::Seq) => call_list_method(state, value, method, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn call_dict_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if method == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        let found = value.get_item(key)?;
        let missing = || default.unwrap_or_else(|| Value::from(()));
        return Ok(if found.is_undefined() { missing() } else { found });
    }
    let keys = value.try_iter()?;
    let of = |key: &Value| value.get_item(key);
    let pairs = |key: Value| Ok(Value::from(Tuple::from([key.clone(), of(&key)?])));
    let all: Result<Vec<Value>, Error> = match method {
        "keys" => Ok(keys.collect()),
        "values" => keys.map(|key| of(&key)).collect(),
        "items" => keys.map(pairs).collect(),
        "copy" => return from_args::<()>(args).map(|()| value.clone()),
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    };
    let () = from_args(args)?;
    all.map(Value::from)
}

fn call_list_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if method == "copy" && !value.is_tuple() {
        return from_args::<()>(args).map(|()| value.clone());
    }
    if !["count", "index"].contains(&method) {
        return Err(Error::from(ErrorKind::UnknownMethod));
    }
    let (wanted,): (&Value,) = from_args(args)?;
    consume_fuel(state, value_size(value)?.saturating_add(value_size(wanted)?))?;
    let mut items = value.try_iter()?;
    if method == "count" {
        return Ok(Value::from(items.filter(|item| item == wanted).count()));
    }
    let at = items.position(|item| item == *wanted);
    at.map(Value::from).ok_or_else(|| template_error("index: the value is not in the list"))
}

fn call_text_method(state: &State<'_, '_>, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "split" | "rsplit" => split_text(state, text, method, args),
        "splitlines" => split_lines(state, text, args),
        "partition" | "rpartition" => partition_text(text, method, args),
        "format" => format_text(state, text, args, FormatStyle::StrFormat),
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            strip_text(state, text, method, chars).map(Value::from)
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "startswith" | "endswith" => has_affix(text, method, args),
        "find" | "rfind" | "index" | "rindex" | "count" => find_text(text, method, args),
        _ => {
            let value =
                is_kind(text, method).map(Value::from).or_else(|| change_case(text, method).map(Value::from));
            let value = value.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))?;
            from_args::<()>(args).map(|()| value)
        }
    }
}

/// Removes whitespace, or `chars`, at the ends of `text`.
pub(super) fn strip_text<'a>(
    state: &State<'_, '_>,
    text: &'a str,
    method: &str,
    chars: Option<&str>,
) -> Result<&'a str, Error> {
    // Every character of the text is searched for in `chars`.
    consume_fuel(state, text.len().saturating_mul(chars.map_or(1, str::len)))?;
    let goes = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.contains(c));
    Ok(match method {
        "strip" => text.trim_matches(goes),
        "lstrip" => text.trim_start_matches(goes),
        _ => text.trim_end_matches(goes),
    })
}

/// `startswith` and `endswith`: true if a text begins or ends with another one, or with one of a tuple.
fn has_affix(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(args)?;
    let all = if wanted.is_tuple() { wanted.try_iter()?.collect() } else { vec![wanted.clone()] };
    for wanted in all {
        let wanted = wanted
            .as_str()
            .ok_or_else(|| template_error(format!("calls {method} on a value that is not a string")))?;
        let found = if method == "startswith" { text.starts_with(wanted) } else { text.ends_with(wanted) };
        if found {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

/// Finds a text in another one: its offset in characters, or for `count` the number of its occurrences.
fn find_text(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&str,) = from_args(args)?;
    if method == "count" {
        return Ok(Value::from(text.matches(wanted).count()));
    }
    let found = if method.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
    match found {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(template_error(format!("{method}: the text is not there"))),
    }
}

/// `isalnum` and the like; `None` for an unknown method.
fn is_kind(text: &str, method: &str) -> Option<bool> {
    let every = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let any = |is: fn(char) -> bool| text.chars().any(is);
    let has_case = || any(|c| c.is_lowercase() || c.is_uppercase());
    Some(match method {
        "isalnum" => every(char::is_alphanumeric),
        "isalpha" => every(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" => every(|c| c.is_ascii_digit()),
        "isdigit" => every(|c| c.is_ascii_digit() || "²³¹⁰⁴⁵⁶⁷⁸⁹".contains(c)),
        "isnumeric" => every(char::is_numeric),
        "isspace" => every(is_blank),
        "islower" => has_case() && !any(char::is_uppercase),
        "isupper" => has_case() && !any(char::is_lowercase),
        _ => return None,
    })
}

/// `upper` and the like; `None` for an unknown method.
fn change_case(text: &str, method: &str) -> Option<String> {
    Some(match method {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "capitalize" => {
            let first = text.chars().next().map_or(0, char::len_utf8);
            text[..first].to_uppercase() + &text[first..].to_lowercase()
        }
        "title" => {
            // A letter after another one is lower case, any other upper case.
            let (mut out, mut after_letter) = (String::new(), false);
            for c in text.chars() {
                if after_letter {
                    out.extend(c.to_lowercase())
                } else {
                    out.extend(c.to_uppercase())
                }
                after_letter = c.is_lowercase() || c.is_uppercase();
            }
            out
        }
        _ => return None,
    })
}

/// `split` and `rsplit`: splits a text at a separator or at whitespace, at most `maxsplit` times.
pub(super) fn split_text(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let [separator, most] = named_args(args, ["sep", "maxsplit"])?;
    let (separator, most) = (separator.filter(is_given), most.filter(is_given));
    let most = most.map(i64::try_from).transpose()?;
    let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let Some(separator) = separator else {
        consume_fuel(state, text.split(is_blank).count().min(most) * PART_BYTES)?;
        if method == "split" {
            return Ok(split_at_blanks(text, most).into_iter().map(Value::from).collect());
        }
        let reverse = |text: &str| text.chars().rev().collect::<String>();
        return Ok(split_at_blanks(&reverse(text), most)
            .into_iter()
            .rev()
            .map(|p| Value::from(reverse(p)))
            .collect());
    };
    let separator = separator.as_str().filter(|separator| !separator.is_empty());
    let separator = separator
        .ok_or_else(|| template_error("splits a string at a separator that is empty or not a string"))?;
    let most = most.saturating_add(1);
    consume_fuel(state, text.matches(separator).count() * PART_BYTES)?;
    if method == "split" {
        return Ok(text.splitn(most, separator).map(Value::from).collect());
    }
    let mut parts: Vec<_> = text.rsplitn(most, separator).map(Value::from).collect();
    parts.reverse();
    Ok(Value::from(parts))
}

/// Splits at whitespace into `most` parts and the rest.
fn split_at_blanks(text: &str, most: usize) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(is_blank));
    while !rest.is_empty() {
        let end = Some(rest.len()).filter(|_| parts.len() == most);
        let end = end.or_else(|| rest.find(is_blank)).unwrap_or(rest.len());
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_blank);
    }
    parts
}

/// `splitlines`: the lines of a text, with their ends if `keepends` is set.
fn split_lines(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<Value, Error> {
    let [keeps_ends] = named_args(args, ["keepends"])?;
    let keeps_ends = keeps_ends.is_some_and(|keeps| keeps.is_true());
    let is_end = |c: char| "\n\r\x0b\x0c\x1c\x1d\x1e\u{85}\u{2028}\u{2029}".contains(c);
    consume_fuel(state, text.matches(is_end).count() * PART_BYTES)?;
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

/// `partition` and `rpartition`: the text before the separator, the separator, and the text after it.
fn partition_text(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (at,): (&str,) = from_args(args)?;
    if at.is_empty() {
        return Err(template_error("splits a text at an empty text"));
    }
    let (found, missing) = match method {
        "partition" => (text.split_once(at), [text, "", ""]),
        _ => (text.rsplit_once(at), ["", "", text]),
    };
    let parts = found.map_or(missing, |(before, after)| [before, at, after]);
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// The operator `%` of a string.
pub(super) fn format_percent(state: &State<'_, '_>, text: &str, value: Value) -> Result<Value, Error> {
    let args = if value.is_tuple() { value.try_iter()?.collect() } else { vec![value] };
    format_text(state, text, &args, FormatStyle::Printf)
}

/// Formats `args` into the fields of a text. Fields may be wide, and one argument may fill many: all is charged before.
pub(super) fn format_text(
    state: &State<'_, '_>,
    text: &str,
    args: &[Value],
    style: FormatStyle,
) -> Result<Value, Error> {
    let fields = field_specs(text, style);
    let numbers = fields.iter().flat_map(|field| field.split(|c: char| !c.is_ascii_digit()));
    let widest = numbers.filter(|n| !n.is_empty()).map(|n| n.parse().unwrap_or(usize::MAX)).max();
    let widest = widest.unwrap_or(0);
    if widest > MAX_WIDTH || fields.iter().any(|field| field.contains(['*', '{'])) {
        return Err(template_error(format!(
            "formats with a width of more than {MAX_WIDTH} or one that is computed"
        )));
    }
    // The interpreter counts bytes, Python characters.
    if widest > 0 && args.iter().any(|arg| arg.as_str().is_some_and(|text| !text.is_ascii())) {
        return Err(template_error("formats a text that is not ASCII with a width, which is not supported"));
    }
    let mut largest = widest;
    for arg in args {
        largest = largest.max(value_size(arg)?);
    }
    consume_fuel(state, fields.len().saturating_mul(largest).saturating_add(text.len()))?;
    let args: Result<Vec<Value>, Error> = args.iter().map(|arg| format_argument(arg, text)).collect();
    Ok(Value::from(formatting::format(style, text, &args?)?))
}

/// The flags, width and precision of each field of a format.
fn field_specs(text: &str, style: FormatStyle) -> Vec<&str> {
    let is_spec = |c: char| "-+ #.*".contains(c) || c.is_ascii_digit();
    let spec = |part| match style {
        FormatStyle::Printf => {
            let named = str::strip_prefix(part, "(").and_then(|named| named.split_once(')'));
            let spec = named.map_or(part, |(_, spec)| spec);
            &spec[..spec.find(|c| !is_spec(c)).unwrap_or(spec.len())]
        }
        FormatStyle::StrFormat => {
            let field = part.split_once('}').map_or(part, |(field, _)| field);
            field.split_once(':').map_or("", |(_, spec)| spec)
        }
    };
    let sign = if style == FormatStyle::Printf { '%' } else { '{' };
    text.split(sign).skip(1).map(spec).collect()
}

/// Replaces a list by its text, and a dictionary unless the fields of `text` access its items.
fn format_argument(arg: &Value, text: &str) -> Result<Value, Error> {
    let arg = check_value(arg.clone())?;
    let looks =
        arg.kind() == ValueKind::Map && (arg.is_kwargs() || text.contains("%(") || text.contains('['));
    if looks || !matches!(arg.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
        return Ok(arg);
    }
    Ok(Value::from(repr::to_str(&arg).into_owned()))
}
