//! How large the values of a template may become, besides what the interpreter's fuel pays for.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};
use std::borrow::Cow;

/// Lists in lists.
const MAX_NESTING: usize = 32;
/// Values in a list, those in its lists included; 6,000 messages.
const MAX_VALUES: usize = 20_000;
/// Bytes of text in a list: no context holds that much, and one step may compare or write out all of it.
const MAX_TEXT: usize = 8 << 20;
/// Bytes of a value in a list.
const VALUE: usize = 32;
/// Bytes that one unit of the interpreter's fuel pays for.
const BYTES_PER_FUEL: usize = 64;

/// Takes what `bytes` cost from the fuel.
pub(super) fn pay_for(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

/// [`checked`] for what a namespace or a list holds: a namespace that holds itself has no end.
pub(super) fn checked_inside(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) {
        return refused("puts a namespace into a namespace or a list");
    }
    checked(value)
}

/// The value, a list in place of a view of one: views of views take long. Refuses a value that takes too long, or too
/// much stack, to write out or compare.
pub(super) fn checked(value: Value) -> Result<Value, Error> {
    if value.as_object().is_none() || is_namespace(&value) {
        return Ok(value);
    }
    visit(&value, 0, &mut Seen::default())?;
    match value.kind() {
        ValueKind::Iterable if value.len().is_some() => {
            Ok(Value::from(value.try_iter()?.collect::<Vec<_>>()))
        }
        _ => Ok(value),
    }
}

/// About the bytes of a value written out. Refuses as [`checked`].
pub(super) fn size(value: &Value) -> Result<usize, Error> {
    if value.as_object().is_none() {
        return Ok(value.as_str().map_or(0, str::len));
    }
    let mut seen = Seen::default();
    visit(value, 0, &mut seen)?;
    Ok(seen.text + seen.values * VALUE)
}

/// What there is in a list.
#[derive(Default)]
struct Seen {
    values: usize,
    text: usize,
}

/// The interpreter has no other way to tell.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().contains("Namespace"))
}

fn visit(value: &Value, depth: usize, seen: &mut Seen) -> Result<(), Error> {
    seen.values += 1;
    seen.text += value.as_str().map_or(0, str::len);
    if depth > MAX_NESTING {
        return refused(format!("makes lists nested more than {MAX_NESTING} levels deep"));
    }
    if seen.values > MAX_VALUES {
        return refused(format!("makes a list of more than {MAX_VALUES} values"));
    }
    if seen.text > MAX_TEXT {
        return refused(format!("makes a list with more than {} MiB of text", MAX_TEXT >> 20));
    }
    if is_namespace(value) {
        return refused("puts a namespace into a namespace or a list");
    }
    // What is an iterator without a length would be used up.
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) || value.len().is_none()
    {
        return Ok(());
    }
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            visit(&value.get_item(&item)?, depth + 1, seen)?;
        }
        visit(&item, depth + 1, seen)?;
    }
    Ok(())
}

fn refused<T>(why: impl Into<Cow<'static, str>>) -> Result<T, Error> {
    Err(failed(why))
}

/// Ends a template that does what it may not.
pub(super) fn failed(why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
