//! Python's methods of texts, dictionaries and lists. In transformers' sandbox none may change a value.

mod formatting;
mod split;
mod text;

pub(super) use formatting::{formatted, percent};
pub(super) use split::split;
pub(super) use text::strip;

use super::limits::{failed, pay_for, size};
use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Calls `method` of `value`.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), value.kind()) {
        // The filters know what they make before they make it.
        (Some(_), _) if method == "join" => {
            let (items,): (&Value,) = from_args(args)?;
            state.apply_filter("join", &[items.clone(), value.clone()])
        }
        (Some(_), _) if method == "replace" => {
            state.apply_filter("replace", &[std::slice::from_ref(value), args].concat())
        }
        (Some(text), _) => text::method(state, text, method, args),
        (None, ValueKind::Map) => dictionary(value, method, args),
        (None, ValueKind::Seq) => list(state, value, method, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn dictionary(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
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

fn list(state: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "copy" if !value.is_tuple() => from_args::<()>(args).map(|()| value.clone()),
        "count" | "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            pay_for(state, size(value)?.saturating_add(size(wanted)?))?;
            let mut items = value.try_iter()?;
            match method {
                "count" => Ok(Value::from(items.filter(|item| item == wanted).count())),
                _ => items
                    .position(|item| item == *wanted)
                    .map(Value::from)
                    .ok_or_else(|| failed("index: the value is not in the list")),
            }
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}
