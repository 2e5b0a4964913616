//! What a template may use up, besides the interpreter's steps.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Bytes of text that one rendering may make, results on the way included.
pub(super) const TEXT: usize = 128 << 20;
/// Lists in lists.
const MAX_NESTING: usize = 32;
/// What a place of a list is counted as.
const PLACE: usize = 32;
/// Values in a list, those in its lists included; 6,000 messages.
const MAX_STORED: usize = 20_000;
/// Bytes of text in a list: no context holds that much, and one step may compare or write out all of it.
const MAX_STORED_TEXT: usize = 16 << 20;

/// What is left of [`TEXT`]; kept with the rendering.
struct Budget(usize);

/// Counts `bytes`.
pub(super) fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let budget = state.get_or_insert_extension_with(|| Budget(TEXT));
    budget.0 = budget.0.checked_sub(bytes).ok_or_else(too_much)?;
    Ok(())
}

/// Counts all of a value, as it would be written out.
pub(super) fn charge_all(state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let left = state.get_or_insert_extension_with(|| Budget(TEXT)).0;
    charge(state, size(value, left, 0)?)
}

/// Counts a text, or the places of a list, whose values are shared.
pub(super) fn charge_places(state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => charge(state, text.len()),
        None => charge(state, value.len().unwrap_or(0).saturating_mul(PLACE)),
    }
}

/// Counts a list of the characters or parts of a text.
pub(super) fn charge_parts(state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = value.as_str().map_or(0, str::len);
    charge(state, text.max(value.len().unwrap_or(0)).saturating_mul(PLACE))
}

/// Counts as [`charge_places`], and makes a list of a view of one: views of views take long.
pub(super) fn count_part(state: &mut State<'_, '_>, value: &Value) -> Result<Value, Error> {
    let value = match value.kind() {
        ValueKind::Iterable => Value::from(value.try_iter()?.collect::<Vec<_>>()),
        _ => value.clone(),
    };
    charge_places(state, &value)?;
    Ok(value)
}

/// Counts what a list's values are compared by, besides a list of them.
pub(super) fn charge_compared(state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    charge_parts(state, value)?;
    charge_all(state, value)
}

/// Bytes of a value written out, or anything above `left` where it is more than that.
fn size(value: &Value, left: usize, depth: usize) -> Result<usize, Error> {
    if depth > MAX_NESTING {
        let why = format!("writes out lists nested more than {MAX_NESTING} levels deep");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    let items = match value.kind() {
        ValueKind::String | ValueKind::Bytes => {
            return Ok(value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len));
        }
        ValueKind::Seq | ValueKind::Map => value.try_iter()?,
        // Counting would use it up.
        ValueKind::Iterable if value.len().is_none() => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "uses an iterator as text; it needs `|list`",
            ));
        }
        ValueKind::Iterable => value.try_iter()?,
        ValueKind::Plain => {
            return Err(Error::new(ErrorKind::InvalidOperation, "uses an object of the interpreter as text"));
        }
        _ => return Ok(PLACE),
    };
    let mut total = PLACE;
    for item in items {
        total = total.saturating_add(PLACE).saturating_add(size(&item, left, depth + 1)?);
        if value.kind() == ValueKind::Map {
            total = total.saturating_add(size(&value.get_item(&item)?, left, depth + 1)?);
        }
        if total > left {
            return Err(too_much());
        }
    }
    Ok(total)
}

/// Refuses a value that takes too long, or too much stack, to compare.
pub(super) fn check_stored(value: &Value) -> Result<(), Error> {
    if is_namespace(value) { Ok(()) } else { check_kept(value) }
}

/// [`check_stored`] for what a namespace keeps: one that holds itself has no end.
pub(super) fn check_kept(value: &Value) -> Result<(), Error> {
    if value.as_str().is_some() { Ok(()) } else { visit(value, 0, &mut Seen::default()) }
}

/// What there is in a list.
#[derive(Default)]
struct Seen {
    values: usize,
    text: usize,
}

/// The interpreter has no other way to tell.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().contains("Namespace"))
}

fn visit(value: &Value, depth: usize, seen: &mut Seen) -> Result<(), Error> {
    let refuse = |why: String| Err(Error::new(ErrorKind::InvalidOperation, why));
    seen.values += 1;
    seen.text += value.as_str().map_or(0, str::len);
    if depth > MAX_NESTING {
        return refuse(format!("makes lists nested more than {MAX_NESTING} levels deep"));
    }
    if seen.values > MAX_STORED {
        return refuse(format!("makes a list of more than {MAX_STORED} values"));
    }
    if seen.text > MAX_STORED_TEXT {
        return refuse(format!("makes a list with more than {} MiB of text", MAX_STORED_TEXT >> 20));
    }
    if is_namespace(value) {
        return refuse("puts a namespace into a namespace or a list".into());
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

/// What is said where [`TEXT`] is not enough.
pub(super) fn too_much() -> Error {
    let why = format!("makes more than {} MiB of text", TEXT >> 20);
    Error::new(ErrorKind::InvalidOperation, why)
}
