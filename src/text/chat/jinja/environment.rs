//! Filters, tests and functions for chat templates: Jinja's, as they work in Python, and those of transformers.

use super::interpreter::{add_operators, add_values, integer_value};
use super::limits::{check_nested, check_value, consume_fuel, is_namespace, template_error, value_size};
use super::python::{is_given, named_args};
use super::{TemplateException, json, python, repr};
use crate::chat::UtcTime;
use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, escape_formatter};

/// Maximum nesting of macros and blocks; real templates have a handful.
const MAX_RECURSION: usize = 100;
/// Cost of a directive of a date, in bytes.
const DIRECTIVE_BYTES: usize = 64;
/// Cost of an item of a list, in bytes.
const ITEM_BYTES: usize = 64;
/// Filters of the interpreter that are not in Jinja, or useless in a prompt.
const REMOVED_FILTERS: [&str; 7] = ["batch", "chain", "groupby", "lines", "pprint", "slice", "zip"];

/// An interpreter with this `fuel`; `now` is its date and time.
pub(super) fn build_environment<'a>(fuel: u64, now: UtcTime) -> Environment<'a> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(fuel));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(python::call_method);
    environment.set_formatter(|out, state, value| {
        if value.as_str().is_some() || value.is_undefined() {
            return escape_formatter(out, state, value);
        }
        let value = check_value(value.clone())?;
        out.write_str(&repr::to_str(&value)).map_err(|_| template_error("is not written"))
    });
    for name in REMOVED_FILTERS {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    add_operators(&mut environment);
    add_filters(&mut environment);
    add_tests(&mut environment);
    add_functions(&mut environment, now);
    environment
}

/// Adds the tests that give another result in Python than in the interpreter.
fn add_tests(environment: &mut Environment<'_>) {
    let is_map = |value: &Value| value.kind() == ValueKind::Map && !is_namespace(value);
    environment.add_test("mapping", move |value: Value| is_map(&value));
    environment.add_test("iterable", move |value: Value| match value.kind() {
        ValueKind::Map => is_map(&value),
        kind => {
            matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Iterable)
        }
    });
    environment.add_test("callable", |value: Value| value.kind() == ValueKind::Plain);
    // The interpreter has views where Python has lists.
    environment.add_test("sequence", move |value: Value| match value.kind() {
        ValueKind::Map => is_map(&value),
        ValueKind::Iterable => value.len().is_some(),
        kind => matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq),
    });
}

fn add_functions(environment: &mut Environment<'_>, now: UtcTime) {
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = check_value(message)?.to_string();
        Err(template_error(message.clone()).with_source(TemplateException(message)))
    });
    environment.add_function("namespace", |values: Option<ValueOrKwargs>| -> Result<Value, Error> {
        values.iter().try_for_each(|values| check_nested(Value::clone(values)).map(drop))?;
        minijinja::functions::namespace(values)
    });
    environment.add_function("dict", |values: Option<Value>, more: Kwargs| {
        let pair = |pair: Value| Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
        let values = match values {
            Some(pairs) if pairs.kind() == ValueKind::Seq => {
                let pairs: Result<Vec<_>, Error> = pairs.try_iter()?.map(pair).collect();
                Some(Value::from_pairs(pairs?))
            }
            other => other,
        };
        check_value(minijinja::functions::dict(values, more)?)
    });
    environment.add_function("strftime_now", move |state: &State<'_, '_>, format: &str| {
        consume_fuel(state, format.len().saturating_mul(DIRECTIVE_BYTES))?;
        now.format_strftime(format)
            .map_err(|directive| template_error(format!("strftime_now does not know {directive}")))
    });
}

/// Adds Jinja's filters that the interpreter lacks, or that work otherwise in Python.
fn add_filters(environment: &mut Environment<'_>) {
    environment.add_filter("trim", |state: &State<'_, '_>, value: Value, chars: Option<&str>| {
        python::strip_text(state, &to_text(state, &value)?, "strip", chars).map(Value::from)
    });
    environment.add_filter("split", |state: &State<'_, '_>, value: &str, args: Rest<Value>| {
        python::split_text(state, value, "split", &args)
    });
    environment.add_filter(
        "tojson",
        |state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            json::dump_json(state, &check_value(value)?, &args.into_values())
        },
    );
    environment
        .add_filter("string", |state: &State<'_, '_>, value: Value| to_text(state, &value).map(Value::from));
    environment.add_filter("format", |state: &State<'_, '_>, value: &str, args: Rest<ValueOrKwargs>| {
        python::format_text(state, value, &args.into_values(), FormatStyle::Printf)
    });
    for name in ["e", "escape"] {
        environment.add_filter(name, |state: &State<'_, '_>, value: Value| -> Result<Value, Error> {
            // A character becomes up to six.
            consume_fuel(state, value_size(&value)?.saturating_mul(6))?;
            Ok(Value::from_safe_string(repr::escape_html(&value)))
        });
    }
    for name in ["d", "default"] {
        environment.add_filter(name, filter_default);
    }
    environment.add_filter("float", |value: Value, default: Option<Value>| {
        to_float(&value).map_or_else(|| default.unwrap_or(Value::from(0.0)), Value::from)
    });
    environment.add_filter("indent", filter_indent);
    environment.add_filter("int", filter_int);
    environment.add_filter("join", filter_join);
    environment.add_filter("sum", filter_sum);
}

/// The text of a value, charged to the fuel.
fn to_text(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    consume_fuel(state, value_size(value)?)?;
    Ok(repr::to_str(value).into_owned())
}

/// Takes one attribute of each item, if one is named.
fn map_attribute(state: &mut State<'_, '_>, value: Value, attribute: Option<Value>) -> Result<Value, Error> {
    match attribute.filter(is_given) {
        Some(attribute) => {
            let attribute: Kwargs = [("attribute", attribute)].into_iter().collect();
            state.apply_filter("map", &[value, attribute.into()])
        }
        None if value.is_none() => Err(template_error("joins or sums a value that is none")),
        None => Ok(value),
    }
}

fn filter_default(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [other, boolean] = named_args(&args.into_values(), ["default_value", "boolean"])?;
    let is_missing = value.is_undefined() || boolean.is_some_and(|b| b.is_true() && !value.is_true());
    Ok(if is_missing { other.unwrap_or_else(|| Value::from("")) } else { value })
}

fn to_float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    }
}

fn filter_int(value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [default] = named_args(&args.into_values(), ["default"])?;
    let default = default.filter(is_given).unwrap_or(Value::from(0));
    let whole = |float: f64| Some(float as i128).filter(|_| float.is_finite());
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok().or_else(|| whole(to_float(&value)?)),
        None if value.is_integer() => return Ok(value),
        None => to_float(&value).and_then(whole),
    };
    Ok(number.map_or(default, integer_value))
}

/// Indents the lines of a text by spaces or by a text; the first line and empty ones only if asked for.
fn filter_indent(state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [width, first, blank] = named_args(&args.into_values(), ["width", "first", "blank"])?;
    let width = width.filter(is_given).unwrap_or(Value::from(4));
    let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let text = to_text(state, &value)?;
    let width = match width.as_str() {
        Some(width) => width.to_owned(),
        None => {
            let width = usize::try_from(width)?;
            consume_fuel(state, width)?;
            " ".repeat(width)
        }
    };
    consume_fuel(state, width.len().saturating_mul(text.lines().count() + 1))?;
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

fn filter_join(state: &mut State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [between, attribute] = named_args(&args.into_values(), ["d", "attribute"])?;
    let between = between.filter(is_given);
    let between = between.map_or(Ok(String::new()), |between| to_text(state, &between))?;
    let mut out = String::new();
    for (at, item) in map_attribute(state, value, attribute)?.try_iter()?.enumerate() {
        consume_fuel(state, ITEM_BYTES + between.len() + value_size(&item)?)?;
        if at > 0 {
            out.push_str(&between);
        }
        out.push_str(&repr::to_str(&item));
    }
    Ok(Value::from(out))
}

fn filter_sum(state: &mut State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [attribute, start] = named_args(&args.into_values(), ["attribute", "start"])?;
    let start = start.filter(is_given).unwrap_or(Value::from(0));
    map_attribute(state, value, attribute)?.try_iter()?.try_fold(start, |sum, item| {
        consume_fuel(state, ITEM_BYTES + value_size(&sum)?)?;
        add_values(state, sum, item)
    })
}
