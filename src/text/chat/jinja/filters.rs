//! Jinja's filters where the interpreter has none, or others than Python's.

use super::arguments::{flag, named};
use super::limits::{checked, failed, pay_for, size};
use super::{json, program, python, written};
use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, State, Value, filters};

/// Fuel for one item, in bytes.
const ITEM: usize = 64;

/// Adds them.
pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("trim", |state: &State<'_, '_>, value: Value, chars: Option<&str>| {
        python::strip(state, &text(state, &value)?, "strip", chars).map(Value::from)
    });
    environment.add_filter("split", |state: &State<'_, '_>, value: &str, args: Rest<Value>| {
        python::split(state, value, "split", &args)
    });
    environment.add_filter(
        "tojson",
        |state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            json::dump(state, &checked(value)?, &args.into_values())
        },
    );
    environment
        .add_filter("string", |state: &State<'_, '_>, value: Value| text(state, &value).map(Value::from));
    environment.add_filter("format", |state: &State<'_, '_>, value: &str, args: Rest<ValueOrKwargs>| {
        python::formatted(state, value, &args.into_values(), FormatStyle::Printf)
    });
    environment.add_filter("center", |state: &mut State<'_, '_>, value: Value, width: Option<Value>| {
        let value = Value::from(text(state, &value)?);
        python::method(state, &value, "center", &[width.unwrap_or(Value::from(80))])
    });
    environment.add_filter("wordcount", |state: &State<'_, '_>, value: Value| -> Result<usize, Error> {
        let is_word = |c: char| c == '_' || c.is_alphanumeric();
        Ok(text(state, &value)?.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count())
    });
    environment.add_filter("batch", |state: &State<'_, '_>, value: Value, n: usize, fill: Option<Value>| {
        checked(filters::batch(state, value, n, fill)?)
    });
    environment.add_filter("slice", |state: &State<'_, '_>, value: Value, n: usize, fill: Option<Value>| {
        checked(filters::slice(state, value, n, fill)?)
    });
    environment.add_filter(
        "groupby",
        |state: &State<'_, '_>, value: Value, attribute: Option<&str>, kwargs: Kwargs| {
            // It sorts them.
            pay_for(state, size(&value)?.saturating_mul(16))?;
            checked(filters::groupby(value, attribute, kwargs)?)
        },
    );
    for name in ["e", "escape"] {
        environment.add_filter(name, |state: &State<'_, '_>, value: Value| -> Result<Value, Error> {
            // A sign becomes six.
            pay_for(state, size(&value)?.saturating_mul(6))?;
            Ok(Value::from_safe_string(written::escaped(&value)))
        });
    }
    for name in ["d", "default"] {
        environment.add_filter(name, default);
    }
    environment.add_filter("float", |value: Value, default: Option<Value>| {
        as_float(&value).map_or_else(|| default.unwrap_or(Value::from(0.0)), Value::from)
    });
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("join", join);
    environment.add_filter("sum", sum);
    environment.add_filter("truncate", truncate);
}

/// The text of a value, which is paid for.
fn text(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    pay_for(state, size(value)?)?;
    Ok(written::text(value).into_owned())
}

/// One attribute of all items, if one is named.
fn attributes(state: &mut State<'_, '_>, value: Value, attribute: Option<Value>) -> Result<Value, Error> {
    match attribute.filter(|attribute| !attribute.is_none()) {
        Some(attribute) => {
            let attribute: Kwargs = [("attribute", attribute)].into_iter().collect();
            state.apply_filter("map", &[value, attribute.into()])
        }
        None if value.is_none() => Err(failed("joins or adds up a value that is none")),
        None => Ok(value),
    }
}

fn default(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (other, boolean, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(&args)?;
    let other = match other {
        Some(other) => other,
        None => kwargs.get::<Option<Value>>("default_value")?.unwrap_or_else(|| Value::from("")),
    };
    let boolean = flag(boolean, &kwargs, "boolean")?;
    kwargs.assert_all_used()?;
    Ok(if value.is_undefined() || (boolean && !value.is_true()) { other } else { value })
}

fn as_float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    }
}

fn int(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (default, base, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(&args)?;
    let default = named(default, &kwargs, "default")?.unwrap_or(Value::from(0));
    let base = named(base, &kwargs, "base")?.map_or(Ok(10), u32::try_from)?;
    kwargs.assert_all_used()?;
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits =
        |text: &str| i128::from_str_radix(text.trim().trim_start_matches(prefix), base.clamp(2, 36)).ok();
    let whole = |float: f64| Some(float as i128).filter(|_| float.is_finite());
    let number = match value.as_str() {
        Some(text) => digits(text).or_else(|| whole(as_float(&value)?)),
        None if value.is_integer() => return Ok(value),
        None => as_float(&value).and_then(whole),
    };
    Ok(number.map_or(default, program::integer))
}

/// A text whose lines begin with blanks, or with a text; the first line and empty ones do not, unless asked for.
fn indent(state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (width, first, blank, kwargs): (Option<Value>, Option<Value>, Option<Value>, Kwargs) =
        from_args(&args)?;
    let width = named(width, &kwargs, "width")?.unwrap_or(Value::from(4));
    let (first, blank) = (flag(first, &kwargs, "first")?, flag(blank, &kwargs, "blank")?);
    kwargs.assert_all_used()?;
    let text = text(state, &value)?;
    let width = match width.as_str() {
        Some(width) => width.to_owned(),
        None => {
            let width = usize::try_from(width)?;
            pay_for(state, width)?;
            " ".repeat(width)
        }
    };
    pay_for(state, width.len().saturating_mul(text.lines().count() + 1))?;
    let mut out = if first { width.clone() } else { String::new() };
    for (at, line) in text.split('\n').enumerate() {
        if at > 0 {
            out.push('\n');
            out.push_str(if blank || !line.is_empty() { &width } else { "" });
        }
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn join(state: &mut State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (between, attribute, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(&args)?;
    let between = named(between, &kwargs, "d")?;
    let attribute = named(attribute, &kwargs, "attribute")?;
    kwargs.assert_all_used()?;
    let between = between.map_or(Ok(String::new()), |between| text(state, &between))?;
    let mut out = String::new();
    for (at, item) in attributes(state, value, attribute)?.try_iter()?.enumerate() {
        pay_for(state, ITEM + between.len() + size(&item)?)?;
        if at > 0 {
            out.push_str(&between);
        }
        out.push_str(&written::text(&item));
    }
    Ok(Value::from(out))
}

fn sum(state: &mut State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (attribute, start, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(&args)?;
    let attribute = named(attribute, &kwargs, "attribute")?;
    let start = named(start, &kwargs, "start")?.unwrap_or(Value::from(0));
    kwargs.assert_all_used()?;
    attributes(state, value, attribute)?.try_iter()?.try_fold(start, |sum, item| {
        pay_for(state, ITEM + size(&sum)?)?;
        program::add(state, sum, item)
    })
}

/// A text of some length at most, with `end` in place of what is left out; cut between words unless `killwords`.
fn truncate(state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    type Options = (Option<Value>, Option<Value>, Option<Value>, Option<Value>, Kwargs);
    let (length, cuts_words, end, leeway, kwargs): Options = from_args(&args)?;
    let length = named(length, &kwargs, "length")?.map_or(Ok(255), usize::try_from)?;
    let cuts_words = flag(cuts_words, &kwargs, "killwords")?;
    let end = named(end, &kwargs, "end")?.map_or_else(|| "...".into(), |end| end.to_string());
    let leeway = named(leeway, &kwargs, "leeway")?.map_or(Ok(5), usize::try_from)?;
    kwargs.assert_all_used()?;
    let text = text(state, &value)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(Value::from(text));
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(failed("truncate: the end is longer than the text may be"));
    };
    let cut = text.char_indices().nth(kept).map_or(text.len(), |(at, _)| at);
    let cut = &text[..cut];
    let cut = if cuts_words { cut } else { cut.rsplit_once(' ').map_or(cut, |(words, _)| words) };
    Ok(Value::from([cut, end.as_str()].concat()))
}
