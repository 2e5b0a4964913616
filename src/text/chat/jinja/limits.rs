//! Limits on the size of values, which the fuel of the interpreter does not cover.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};
use std::borrow::Cow;

/// Maximum nesting of lists.
const MAX_NESTING: usize = 32;
/// Maximum number of values in a list, nested ones included: enough for 6,000 messages.
const MAX_VALUES: usize = 20_000;
/// Maximum bytes of text in a list: no context holds more, and one step may compare or write out all of it.
const MAX_TEXT: usize = 8 << 20;
/// Cost of a value in a list, in bytes.
const VALUE_BYTES: usize = 32;
/// Bytes per unit of fuel.
const BYTES_PER_FUEL: usize = 64;

/// Takes the cost of `bytes` from the fuel.
pub(super) fn consume_fuel(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

/// [`check_value`] for an item of a namespace or a list: a namespace that contains itself has no end.
pub(super) fn check_nested(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) {
        return Err(template_error("puts a namespace into a namespace or a list"));
    }
    check_value(value)
}

/// Refuses a value that takes too long, or too much stack, to write out or compare. Replaces a view by a list, as
/// views of views are slow.
pub(super) fn check_value(value: Value) -> Result<Value, Error> {
    if value.as_object().is_none() || is_namespace(&value) {
        return Ok(value);
    }
    measure_value(&value, 0, &mut ValueSize::default())?;
    match value.kind() {
        ValueKind::Iterable if value.len().is_some() => {
            Ok(Value::from(value.try_iter()?.collect::<Vec<_>>()))
        }
        _ => Ok(value),
    }
}

/// The approximate bytes of a value written out. Refuses the values that [`check_value`] refuses.
pub(super) fn value_size(value: &Value) -> Result<usize, Error> {
    if value.as_object().is_none() {
        return Ok(value.as_str().map_or(0, str::len));
    }
    let mut size = ValueSize::default();
    measure_value(value, 0, &mut size)?;
    Ok(size.text + size.values * VALUE_BYTES)
}

/// The contents of a list.
#[derive(Default)]
struct ValueSize {
    values: usize,
    text: usize,
}

/// True for a namespace. The interpreter has no other way to tell.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().contains("Namespace"))
}

fn measure_value(value: &Value, depth: usize, size: &mut ValueSize) -> Result<(), Error> {
    size.values += 1;
    size.text += value.as_str().map_or(0, str::len);
    if depth > MAX_NESTING {
        return Err(template_error(format!("makes lists nested more than {MAX_NESTING} levels deep")));
    }
    if size.values > MAX_VALUES {
        return Err(template_error(format!("makes a list of more than {MAX_VALUES} values")));
    }
    if size.text > MAX_TEXT {
        return Err(template_error(format!("makes a list with more than {} MiB of text", MAX_TEXT >> 20)));
    }
    if is_namespace(value) {
        return Err(template_error("puts a namespace into a namespace or a list"));
    }
    // An iterator without a length would be used up.
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    if !is_list || value.len().is_none() {
        return Ok(());
    }
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            measure_value(&value.get_item(&item)?, depth + 1, size)?;
        }
        measure_value(&item, depth + 1, size)?;
    }
    Ok(())
}

/// The error of a template that does something it may not.
pub(super) fn template_error(why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
