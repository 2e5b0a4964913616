//! The filters and functions that chat templates get: Jinja's, those of transformers, none without a limit.

use super::limits::{
    charge, charge_all, charge_compared, charge_parts, charge_places, check_kept, check_stored, count_part,
};
use super::source::{CHARGE, CHARGE_BYTES, CHARGE_PLACES, KEPT, NUMBER, STORED};
use super::{Refusal, python};
use crate::chat::Moment;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, escape_formatter, filters, tests};

/// Macros in macros and blocks in blocks; real templates have a handful.
const MAX_RECURSION: usize = 100;
/// Longest `range`.
const MAX_RANGE: i64 = 10_000;
/// Widest indentation.
const MAX_INDENT: usize = 64;

/// Replaces a filter of minijinja's by one that first counts what it is given, and checks a list that it makes.
macro_rules! counted {
    ($environment:expr, $count:path, $($name:ident)+) => {$(
        $environment.add_filter(concat!("uncounted ", stringify!($name)), filters::$name);
        $environment.add_filter(
            stringify!($name),
            |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
                let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
                if let Some(value) = args.first() {
                    $count(state, value)?;
                }
                // Others can become text.
                args.iter().skip(1).try_for_each(|value| charge_all(state, value))?;
                // `map` calls filters by name.
                if args.get(1).and_then(Value::as_str).is_some_and(|name| name.starts_with("uncounted ")) {
                    return Err(Error::from(ErrorKind::UnknownFilter));
                }
                let made = state.apply_filter(concat!("uncounted ", stringify!($name)), &args)?;
                let made = count_part(state, &made)?;
                check_stored(&made)?;
                Ok(made)
            },
        );
    )+};
}

/// An interpreter that takes `steps` steps at most, at `now`.
pub(super) fn environment<'a>(steps: u64, now: Moment) -> Result<Environment<'a>, Error> {
    let mut environment = Environment::new();
    // As transformers sets them.
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(steps));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, state, value| {
        charge_all(state, value)?;
        escape_formatter(out, state, value)
    });
    for name in ["batch", "chain", "format", "groupby", "lines", "pprint", "slice", "sum", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    counted!(environment, charge_all, string safe escape upper lower title capitalize);
    counted!(environment, charge_parts, list split reverse);
    counted!(environment, charge_compared, sort unique min max);
    counted!(environment, charge_places, map select reject selectattr rejectattr items dictsort);
    environment
        .add_filter("e", |state: &mut State<'_, '_>, value: Value| state.apply_filter("escape", &[value]));
    count(&mut environment);
    texts(&mut environment);
    comparisons(&mut environment);
    layout(&mut environment);
    functions(&mut environment, now);
    Ok(environment)
}

/// What [`super::source`] puts into a template.
fn count(environment: &mut Environment<'_>) {
    environment.add_filter(CHARGE, |state: &mut State<'_, '_>, value: Value| -> Result<Value, Error> {
        charge_all(state, &value)?;
        Ok(value)
    });
    environment.add_filter(
        CHARGE_PLACES,
        |state: &mut State<'_, '_>, value: Value| -> Result<Value, Error> {
            charge_places(state, &value)?;
            Ok(value)
        },
    );
    environment.add_filter(KEPT, |value: Value| -> Result<Value, Error> {
        check_kept(&value)?;
        Ok(value)
    });
    environment.add_filter(STORED, |value: Value| -> Result<Value, Error> {
        check_stored(&value)?;
        Ok(value)
    });
    environment.add_filter(NUMBER, |value: Value| -> Result<Value, Error> {
        match value.kind() {
            ValueKind::Number | ValueKind::Bool => Ok(value),
            kind => {
                let why = format!("multiplies a {kind}; only numbers can be multiplied here");
                Err(Error::new(ErrorKind::InvalidOperation, why))
            }
        }
    });
    environment.add_function(
        CHARGE_BYTES,
        |state: &mut State<'_, '_>, bytes: usize| -> Result<&'static str, Error> {
            charge(state, bytes)?;
            Ok("")
        },
    );
}

/// Filters of texts that could make more of them.
fn texts(environment: &mut Environment<'_>) {
    environment.add_filter(
        "trim",
        |state: &mut State<'_, '_>, value: Value, chars: Option<Value>| -> Result<Value, Error> {
            let value = text(state, &value)?;
            let chars = chars.map(|chars| text(state, &chars)).transpose()?;
            Ok(Value::from(python::strip(&value, "strip", chars.as_deref())?))
        },
    );
    environment.add_filter(
        "replace",
        |state: &mut State<'_, '_>, value: Value, old: Value, new: Value, count: Option<i64>| {
            let (old, new) = (text(state, &old)?, text(state, &new)?);
            let value = text(state, &value)?;
            python::replace(state, &value, (&old, &new), count)
        },
    );
    environment.add_filter(
        "join",
        |state: &mut State<'_, '_>,
         items: Value,
         between: Option<Value>,
         named: Kwargs|
         -> Result<Value, Error> {
            let between = match between {
                Some(between) => Some(between),
                None => named.get::<Option<Value>>("d")?,
            };
            let between = between.map_or(Ok(String::new()), |between| text(state, &between))?;
            let attribute: Option<String> = named.get("attribute")?;
            named.assert_all_used()?;
            let items = items.try_iter()?.map(|item| match &attribute {
                Some(name) => item.get_attr(name).unwrap_or_default(),
                None => item,
            });
            python::join(state, items, &between)
        },
    );
}

/// Tests that look into a text for what may not be one.
fn comparisons(environment: &mut Environment<'_>) {
    environment.add_test(
        "in",
        |state: &mut State<'_, '_>, value: Value, other: Value| -> Result<bool, Error> {
            charge_all(state, &value)?;
            charge_all(state, &other)?;
            tests::is_in(state, &value, &other)
        },
    );
    environment.add_test(
        "startingwith",
        |state: &mut State<'_, '_>, value: Value, other: Value| -> Result<bool, Error> {
            Ok(text(state, &value)?.starts_with(&text(state, &other)?))
        },
    );
    environment.add_test(
        "endingwith",
        |state: &mut State<'_, '_>, value: Value, other: Value| -> Result<bool, Error> {
            Ok(text(state, &value)?.ends_with(&text(state, &other)?))
        },
    );
}

/// A value as text.
fn text(state: &mut State<'_, '_>, value: &Value) -> Result<String, Error> {
    charge_all(state, value)?;
    Ok(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// Filters that lay out, and the length.
fn layout(environment: &mut Environment<'_>) {
    environment.add_filter("uncounted indent", filters::indent);
    environment.add_filter(
        "indent",
        |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
            let text = args.first().map_or(Ok(String::new()), |value| text(state, value))?;
            let width = args
                .iter()
                .skip(1)
                .find_map(|a| a.as_usize().or_else(|| a.get_attr("width").ok()?.as_usize()));
            if width.is_some_and(|w| w > MAX_INDENT) {
                return Err(too("indents by more than", MAX_INDENT));
            }
            charge(state, text.len() + text.matches('\n').count().saturating_mul(MAX_INDENT))?;
            state.apply_filter("uncounted indent", &args)
        },
    );
    environment.add_filter(
        "tojson",
        |state: &mut State<'_, '_>, value: Value, named: Rest<ValueOrKwargs>| {
            charge_all(state, &value)?;
            let mut indent = None;
            for argument in named.0.into_iter().map(ValueOrKwargs::into_value) {
                let width = if argument.is_kwargs() { argument.get_attr("indent")? } else { argument };
                indent = width.as_usize().or(indent);
            }
            if indent.is_some_and(|w| w > MAX_INDENT) {
                return Err(too("indents by more than", MAX_INDENT));
            }
            let mut out = String::new();
            super::json::write(&value, indent, 0, &mut out)?;
            charge(state, out.len())?;
            Ok(Value::from(out))
        },
    );
    environment.add_filter("length", length);
    environment.add_filter("count", length);
}

/// Jinja's undefined values are empty.
fn length(value: Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(&value) }
}

fn functions(environment: &mut Environment<'_>, now: Moment) {
    environment.add_function(
        "raise_exception",
        |state: &mut State<'_, '_>, message: Value| -> Result<Value, Error> {
            let message = text(state, &message)?;
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
        },
    );
    environment.add_function("namespace", |values: Option<ValueOrKwargs>| -> Result<Value, Error> {
        values.iter().try_for_each(|values| check_kept(values))?;
        minijinja::functions::namespace(values)
    });
    environment.add_function("dict", |values: Option<Value>, more: Kwargs| -> Result<Value, Error> {
        let value = minijinja::functions::dict(values, more)?;
        check_kept(&value)?;
        Ok(value)
    });
    environment.add_function(
        "strftime_now",
        move |state: &mut State<'_, '_>, form: Value| -> Result<String, Error> {
            now.format(&text(state, &form)?).map_err(|directive| {
                let why = format!("strftime_now does not know {directive}");
                Error::new(ErrorKind::InvalidOperation, why)
            })
        },
    );
    environment.add_function(
        "range",
        |state: &mut State<'_, '_>,
         first: i64,
         second: Option<i64>,
         step: Option<i64>|
         -> Result<Value, Error> {
            let (from, to, step) = (second.map_or(0, |_| first), second.unwrap_or(first), step.unwrap_or(1));
            if step == 0 {
                return Err(Error::new(ErrorKind::InvalidOperation, "range with a step of 0"));
            }
            if to.saturating_sub(from).checked_div(step).is_none_or(|places| places > MAX_RANGE) {
                return Err(too("makes a range longer than", MAX_RANGE));
            }
            let mut list = Vec::new();
            let mut at = from;
            while if step > 0 { at < to } else { at > to } {
                list.push(Value::from(at));
                at = at.saturating_add(step);
            }
            let list = Value::from(list);
            charge_places(state, &list)?;
            Ok(list)
        },
    );
}

fn too(what: &str, limit: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} {limit}"))
}
