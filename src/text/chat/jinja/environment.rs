//! The filters and functions that chat templates get: Jinja's, and those of transformers.

use super::limits::{checked, checked_inside, failed, is_namespace, pay_for};
use super::value::LongInteger;
use super::{Refusal, filters, objects, program, python, written};
use crate::chat::Moment;
use minijinja::value::{Kwargs, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, escape_formatter};

/// Macros in macros and blocks in blocks; real templates have a handful.
const MAX_RECURSION: usize = 100;
/// Bytes of fuel for a directive of a date.
const DIRECTIVE: usize = 64;

/// An interpreter with so much `fuel`, at `now`.
pub(super) fn environment<'a>(fuel: u64, now: Moment) -> Environment<'a> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(fuel));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, state, value| {
        if value.as_str().is_some() || value.is_undefined() {
            return escape_formatter(out, state, value);
        }
        let value = checked(value.clone())?;
        out.write_str(&written::text(&value)).map_err(|_| failed("is not written"))
    });
    // Not in Jinja, or without use in a prompt.
    for name in ["chain", "lines", "pprint", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    program::add_operators(&mut environment);
    filters::add(&mut environment);
    tests(&mut environment);
    functions(&mut environment, now);
    environment
}

/// Tests that Python answers otherwise.
fn tests(environment: &mut Environment<'_>) {
    let is_map = |value: &Value| value.kind() == ValueKind::Map && !is_namespace(value);
    environment.add_test("mapping", move |value: Value| is_map(&value));
    environment.add_test("iterable", move |value: Value| match value.kind() {
        ValueKind::Map => is_map(&value),
        kind => {
            matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Iterable)
        }
    });
    // The interpreter has views where Python has lists.
    environment.add_test("sequence", move |value: Value| match value.kind() {
        ValueKind::Map => is_map(&value),
        ValueKind::Iterable => value.len().is_some(),
        kind => matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq),
    });
    environment.add_test("callable", |value: Value| {
        value.kind() == ValueKind::Plain && value.downcast_object_ref::<LongInteger>().is_none()
    });
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
        let pair = |pair: Value| Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
        let values = match values {
            Some(pairs) if pairs.kind() == ValueKind::Seq => {
                let pairs: Result<Vec<_>, Error> = pairs.try_iter()?.map(pair).collect();
                Some(Value::from_pairs(pairs?))
            }
            other => other,
        };
        checked(minijinja::functions::dict(values, more)?)
    });
    environment.add_function("joiner", objects::joiner);
    environment.add_function("cycler", objects::cycler);
    environment.add_function("strftime_now", move |state: &State<'_, '_>, form: &str| {
        pay_for(state, form.len().saturating_mul(DIRECTIVE))?;
        now.format(form).map_err(|directive| failed(format!("strftime_now does not know {directive}")))
    });
}
