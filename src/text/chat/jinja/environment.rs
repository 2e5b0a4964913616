//! The filters and functions that chat templates get: Jinja's, and those of transformers.

use super::limits::{checked, checked_inside, failed, pay_for};
use super::{Refusal, program, python};
use crate::chat::Moment;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, escape_formatter};

/// Macros in macros and blocks in blocks; real templates have a handful.
const MAX_RECURSION: usize = 100;
/// Widest indentation.
const MAX_INDENT: usize = 64;

/// An interpreter with so much `fuel`, at `now`.
pub(super) fn environment<'a>(fuel: u64, now: Moment) -> Environment<'a> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(fuel));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, state, value| escape_formatter(out, state, &checked(value.clone())?));
    // Not in chat templates, and some make large lists of small ones.
    for name in ["batch", "chain", "format", "groupby", "lines", "pprint", "slice", "sum", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    // The interpreter has views where Python has lists.
    environment
        .add_test("sequence", |value: Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable));
    program::add_operators(&mut environment);
    filters(&mut environment);
    functions(&mut environment, now);
    environment
}

fn filters(environment: &mut Environment<'_>) {
    environment.add_filter("trim", |state: &State<'_, '_>, value: Value, chars: Option<&str>| {
        let text = value.to_string();
        python::strip(state, &text, "strip", chars).map(Value::from)
    });
    environment.add_filter("split", |state: &State<'_, '_>, value: &str, args: Rest<Value>| {
        python::split(state, value, "split", &args)
    });
    environment.add_filter(
        "tojson",
        |state: &State<'_, '_>, value: Value, named: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let mut indent = None;
            for argument in named.0.into_iter().map(ValueOrKwargs::into_value) {
                let width = if argument.is_kwargs() { argument.get_attr("indent")? } else { argument };
                indent = width.as_usize().or(indent);
            }
            if indent.is_some_and(|w| w > MAX_INDENT) {
                return Err(failed(format!("indents by more than {MAX_INDENT}")));
            }
            let mut out = String::new();
            super::json::write(&checked(value)?, indent, 0, &mut out)?;
            pay_for(state, out.len())?;
            Ok(Value::from(out))
        },
    );
}

fn functions(environment: &mut Environment<'_>, now: Moment) {
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = checked(message)?.to_string();
        Err(failed(message.clone()).with_source(Refusal(message)))
    });
    environment.add_function("namespace", |values: Option<ValueOrKwargs>| -> Result<Value, Error> {
        values.iter().try_for_each(|values| checked_inside(Value::clone(values)).map(drop))?;
        minijinja::functions::namespace(values)
    });
    environment.add_function("dict", |values: Option<Value>, more: Kwargs| {
        checked(minijinja::functions::dict(values, more)?)
    });
    environment.add_function("strftime_now", move |form: &str| {
        now.format(form).map_err(|directive| failed(format!("strftime_now does not know {directive}")))
    });
}
