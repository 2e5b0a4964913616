//! Typed access to the fields of a JSON object, with an error that names the field.

use crate::error::escape;
use serde_json::{Map, Value};

/// One unusable field. Its message is one line.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("field `{field}` is {value}; supported: {supported}")]
pub struct ConfigError {
    /// The field's name in the file.
    pub field: String,
    /// Its value, as JSON.
    pub value: String,
    /// Accepted values.
    pub supported: String,
}

impl ConfigError {
    pub fn new(field: impl Into<String>, value: impl Into<String>, supported: impl Into<String>) -> Self {
        Self { field: field.into(), value: value.into(), supported: supported.into() }
    }
}

/// The fields of an object. `null` counts as missing.
pub(crate) struct Fields<'a>(pub &'a Map<String, Value>);

impl Fields<'_> {
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    /// Always an error: the field's value is not one of `supported`.
    pub fn unsupported<T>(&self, field: &str, supported: &str) -> Result<T, ConfigError> {
        let found = self.0.get(field).map_or("missing".into(), Value::to_string);
        Err(ConfigError::new(field, escape(&found), supported))
    }

    pub fn read_size(&self, field: &str, default: Option<usize>, max: usize) -> Result<usize, ConfigError> {
        let found = match self.get(field) {
            None => default,
            Some(v) => v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n)),
        };
        found.map_or_else(|| self.unsupported(field, &format!("an integer from 1 to {max}")), Ok)
    }

    /// Reads a number from 0 to `max`.
    pub fn read_count(&self, field: &str, default: usize, max: usize) -> Result<usize, ConfigError> {
        if self.get(field).is_some_and(|v| v.as_u64() == Some(0)) {
            return Ok(0);
        }
        let found = self.get(field).map_or(Ok(default), |_| self.read_size(field, None, max));
        found.map_err(|e| ConfigError { supported: format!("an integer from 0 to {max}"), ..e })
    }

    /// Reads a number that is positive and finite, also as f32.
    pub fn read_float(&self, field: &str, default: Option<f64>) -> Result<f64, ConfigError> {
        let found = match self.get(field) {
            None => default,
            Some(v) => positive_float(v),
        };
        found.map_or_else(|| self.unsupported(field, "a positive number"), Ok)
    }

    pub fn read_bool(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => self.unsupported(field, "true or false"),
        }
    }

    /// Reads an array of exactly `len` items, each read by `item`.
    pub fn read_array<T>(
        &self,
        field: &str,
        len: usize,
        item: impl Fn(&Value) -> Option<T>,
        supported: &str,
    ) -> Result<Vec<T>, ConfigError> {
        let items: Option<Vec<T>> =
            self.get(field).and_then(Value::as_array).and_then(|all| all.iter().map(item).collect());
        items.filter(|items| items.len() == len).map_or_else(|| self.unsupported(field, supported), Ok)
    }
}

/// A number that is positive and finite, also as f32.
pub(super) fn positive_float(value: &Value) -> Option<f64> {
    value.as_f64().filter(|&x| (x as f32).is_finite() && x as f32 > 0.0)
}
