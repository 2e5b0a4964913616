//! Arguments of filters and methods.

use minijinja::value::Kwargs;
use minijinja::{Error, Value};

/// An argument that is given by position or by name; none where it is `none`.
pub(super) fn named(positional: Option<Value>, kwargs: &Kwargs, name: &str) -> Result<Option<Value>, Error> {
    let value = match positional {
        Some(value) => Some(value),
        None => kwargs.get::<Option<Value>>(name)?,
    };
    Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
}

/// [`named`] for what is true or false.
pub(super) fn flag(positional: Option<Value>, kwargs: &Kwargs, name: &str) -> Result<bool, Error> {
    Ok(named(positional, kwargs, name)?.is_some_and(|value| value.is_true()))
}
